// SPDX-License-Identifier: Apache-2.0
// Selective state update of one token for few sequences; formulas in ../ssu.h. What such a call takes is a chain of waits: the
// code, the slot, the state. So rows are spread over all SMs, two for each lane, everything that does not depend on the slot
// is loaded beside it, and the code is short: with a cold cache each 128 bytes of it come from memory.
//   test  pytest tests/recurrent -k ssu      bench  python benchmarks/bench_recurrent_mamba.py -k selective
#pragma once
#include "../../ptx/math.cuh"
#include "../../ptx/pdl.cuh"
#include "../rules.h"
#include "../ssu.h"
#include "state_row.cuh"

namespace flashinfer {
namespace recurrent {
namespace ssu_few {

constexpr int LANE_ROWS = 2, WARPS = 4;

template <typename State, int WIDTH>
constexpr int BLOCK_ROWS = WARPS * LANE_ROWS * RowShape<State, WIDTH>::GROUPS;

template <typename State, typename Input, int WIDTH>
__global__ void __launch_bounds__(32 * WARPS) SsuFewKernel(const __grid_constant__ SsuParams<State, Input> p) {
  using S = RowShape<State, WIDTH>;
  ptx::GridDependencyWait();
  ptx::LaunchDependentsOfFew();
  constexpr int VEC = S::VEC, CHUNKS = S::CHUNKS, ELEMENTS = S::ELEMENTS;
  const int head = blockIdx.x, n = blockIdx.z, lane = threadIdx.x % 32, sublane = lane % S::LANES;
  const int64_t source = p.source.data == nullptr ? n : p.source.At(n);
  const int64_t target = p.target.data == nullptr ? source : p.target.At(n);
  const int row0 = blockIdx.y * BLOCK_ROWS<State, WIDTH> + (threadIdx.x / 32 * S::GROUPS + lane / S::LANES) * LANE_ROWS;
  const bool has_state = source != p.pad && uint64_t(source) < uint64_t(p.slots);

  RawVec<VEC, State> raw[LANE_ROWS][CHUNKS];
#pragma unroll
  for (int r = 0; r < LANE_ROWS; ++r) {
#pragma unroll
    for (int k = 0; k < CHUNKS; ++k) {
      raw[r][k].Clear();
      if (has_state) {
        raw[r][k].Load(p.state.data + source * p.state.slot + head * p.state.head + (row0 + r) * p.state.row +
                       (k * S::LANES + sublane) * VEC);
      }
    }
  }
  const int group = head / p.heads_per_group;
  float b[ELEMENTS], c[ELEMENTS], x[LANE_ROWS], y[LANE_ROWS];
#pragma unroll
  for (int k = 0; k < CHUNKS; ++k) {
    const int column = (k * S::LANES + sublane) * VEC;
    float part[2][VEC];
    LoadSome(p.b.data + n * p.b.batch + group * p.b.head + column, VEC, true, part[0]);
    LoadSome(p.c.data + n * p.c.batch + group * p.c.head + column, VEC, true, part[1]);
#pragma unroll
    for (int j = 0; j < VEC; ++j) b[k * VEC + j] = part[0][j], c[k * VEC + j] = part[1][j];
  }
#pragma unroll
  for (int r = 0; r < LANE_ROWS; ++r) x[r] = ToFloat(p.x.data[n * p.x.batch + head * p.x.head + row0 + r]);
  const int reduced = ReducedRow<S::LANES, LANE_ROWS>(sublane), out_row = row0 + reduced;
  float dt = WeightAt(p.dt, n * p.dt.batch + head * p.dt.head), d = 0.f;
  if (p.dt_bias.data != nullptr) dt += WeightAt(p.dt_bias, head * p.dt_bias.head);
  if (p.d.data != nullptr) d = WeightAt(p.d, head * p.d.head + out_row * p.d.row);
  const float a = p.a[head * p.a_head];
  if (p.softplus) dt = Softplus(dt);
  const float decay = ptx::Exp2(Mamba2Rule::LogDecay(dt, a) * 1.4426950409f);
  const bool stores = has_state && p.update && target != p.pad && uint64_t(target) < uint64_t(p.slots);
#pragma unroll
  for (int r = 0; r < LANE_ROWS; ++r) {
    const float added = Mamba2Rule::Correction(x[r], 0.f, dt);
    y[r] = 0.f;
#pragma unroll
    for (int k = 0; k < CHUNKS; ++k) {
      float s[VEC];
      raw[r][k].ToFloats(s);
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        s[j] = s[j] * decay + added * b[k * VEC + j];
        y[r] += s[j] * c[k * VEC + j];
      }
      if (stores) {
        RoundTo<State, VEC>(s).Store(p.state.data + target * p.state.slot + head * p.state.head +
                                     (row0 + r) * p.state.row + (k * S::LANES + sublane) * VEC);
      }
    }
  }
  ReduceRows<S::LANES>(y, sublane);
  if (!WritesReduced<S::LANES, LANE_ROWS>(sublane)) return;
  float result = y[0] + d * x[reduced];
  if (p.z.data != nullptr) {
    const float z = ToFloat(p.z.data[n * p.z.batch + head * p.z.head + out_row]);
    result *= z * Sigmoid(z);
  }
  p.out.data[n * p.out.batch + head * p.out.head + out_row] = FromFloat<Input>(result);
}

/// Largest number of sequences and heads: above, SMs have enough to do with more rows for each lane.
constexpr int64_t MOST_ITEMS = 4 * 132;

template <typename State, typename Input, int WIDTH>
bool Serves(const SsuParams<State, Input>& p) {
  constexpr int UNIT = RowShape<State, WIDTH>::VEC;
  const auto aligns = [](const auto& a) {
    return a.batch % UNIT == 0 && a.head % UNIT == 0 &&
           IsAligned(a.data, UNIT * sizeof(Input) < 16 ? UNIT * sizeof(Input) : 16);
  };
  return p.seed == nullptr && p.dstate == WIDTH && p.dim % BLOCK_ROWS<State, WIDTH> == 0 && aligns(p.b) &&
         aligns(p.c) && int64_t(p.sequences) * p.heads <= MOST_ITEMS && p.sequences <= 65535;
}

template <int WIDTH, typename State, typename Input>
Status Launch(const SsuParams<State, Input>& p, Stream stream) {
  const dim3 grid(p.heads, p.dim / BLOCK_ROWS<State, WIDTH>, p.sequences);
  return flashinfer::Launch(SsuFewKernel<State, Input, WIDTH>, grid, dim3(32 * WARPS), p.enable_pdl, stream, p);
}

}  // namespace ssu_few
}  // namespace recurrent
}  // namespace flashinfer
