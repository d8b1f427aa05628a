// SPDX-License-Identifier: Apache-2.0
// Selective state update on CUDA; formulas and parameters in ../ssu.h. Bound by memory: a state is read once and written once.
//
//   block = 4 warps = BLOCK_ROWS rows of the state of one head of one sequence
//   warp  = WARP_ROWS neighbouring rows; a row of 128 bf16 is a 16-byte vector in each of 16 lanes, two rows side by side
//   lane  = 8 rows: eight loads in flight, then row by row update, product with C and store
//
// The sums over lanes are exchanged for all eight rows together (ReduceRows). With several tokens the state stays in registers
// between them, as floats. B and C of a group are read by all its heads, which are neighbouring blocks, from the caches.
//   test  pytest tests/recurrent -k ssu      bench  python benchmarks/bench_recurrent_mamba.py -k selective
#pragma once
#include "../../ptx/math.cuh"
#include "../../ptx/pdl.cuh"
#include "../rules.h"
#include "../ssu.h"
#include "few.cuh"
#include "state_row.cuh"
#include "stream_sm90.cuh"

namespace flashinfer {
namespace recurrent {

constexpr float SSU_LOG2_E = 1.4426950409f;

/// Needs of the kernel besides the parameters: which arrays vectors may be loaded from.
struct SsuAlignment {
  bool x, bc;
};

/// SEVERAL: more than one token, or states after each of them. TIED: see SsuParams::is_tied.
template <typename State, typename Input, int WIDTH, bool SEVERAL, bool TIED>
__global__ void __launch_bounds__(128)
    SsuKernel(const __grid_constant__ SsuParams<State, Input> p, const SsuAlignment aligned) {
  using S = RowShape<State, WIDTH>;
  constexpr int ROWS = S::ROWS, ELEMENTS = S::ELEMENTS;
  ptx::GridDependencyWait();
  ptx::LaunchDependentsOfFew();
  const int head = blockIdx.x % p.heads, n = blockIdx.x / p.heads, group = head / p.heads_per_group;
  const int lane = threadIdx.x % 32, sublane = lane % S::LANES;
  const int row0 = (blockIdx.y * S::WARPS + threadIdx.x / 32) * S::WARP_ROWS + lane / S::LANES * ROWS;

  // Where the sequence begins, and its slots.
  int64_t begin_token = 0, begin_batch = n;
  int tokens = SEVERAL ? p.tokens : 1;
  if (SEVERAL && p.cu_seqlens.data != nullptr) {
    begin_token = p.cu_seqlens.At(n);
    begin_batch = 0;
    tokens = int(p.cu_seqlens.At(n + 1) - begin_token);
    if (tokens <= 0) return;
  }
  int first_column = 0;
  if (SEVERAL && p.accepted.data != nullptr) {
    first_column = min(max(int(p.accepted.At(n)) - 1, 0), p.source.columns - 1);
  }
  const int64_t source = p.source.data == nullptr ? n : p.source.At(n, first_column);
  const bool has_state = source != p.pad && uint64_t(source) < uint64_t(p.slots);

  RawVec<S::VEC, State> raw[ROWS][S::CHUNKS];
  float scale[ROWS];
  {
    const State* from = p.state.data + source * p.state.slot + head * p.state.head;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const bool is_row = has_state && row0 + r < p.dim;
#pragma unroll
      for (int c = 0; c < S::CHUNKS; ++c) {
        const int column = (c * S::LANES + sublane) * S::VEC;
        if (is_row && column < p.dstate) {
          raw[r][c].Load(from + (row0 + r) * p.state.row + column);
        } else {
          raw[r][c].Clear();
        }
      }
      scale[r] = 1.f;
      if constexpr (StateFormat<State>::IS_SCALED) {
        if (is_row) scale[r] = p.state.scale[source * p.state.scale_slot + head * p.state.scale_head + row0 + r];
      }
    }
  }
  StoreOptions options{p.seed != nullptr, p.seed != nullptr ? *p.seed : 0, p.rounds};

  // What does not depend on the token.
  const float a_tied = TIED ? p.a[head * p.a_head] : 0.f;
  const int out_row = row0 + ReducedRow<S::LANES, ROWS>(sublane);
  const bool writes = WritesReduced<S::LANES, ROWS>(sublane) && out_row < p.dim;
  const float d = p.d.data != nullptr && writes ? WeightAt(p.d, head * p.d.head + out_row * p.d.row) : 0.f;
  float bias[TIED ? 1 : ROWS];
#pragma unroll
  for (int r = 0; r < (TIED ? 1 : ROWS); ++r) {
    const bool exists = p.dt_bias.data != nullptr && row0 + r < p.dim;
    bias[r] = exists ? WeightAt(p.dt_bias, head * p.dt_bias.head + (row0 + r) * p.dt_bias.row) : 0.f;
  }

  float s[SEVERAL ? ROWS : 1][ELEMENTS];  // the state between tokens
  const auto to_floats = [&](int r, float (&x)[ELEMENTS]) {
#pragma unroll
    for (int c = 0; c < S::CHUNKS; ++c) raw[r][c].ToFloats(&x[c * S::VEC]);
    if constexpr (StateFormat<State>::IS_SCALED) {
#pragma unroll
      for (int i = 0; i < ELEMENTS; ++i) x[i] *= scale[r];
    }
  };
  if constexpr (SEVERAL) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) to_floats(r, s[r]);
  }

  int64_t final_target = source;
  bool stores_final = has_state && p.update;
  if (p.target.data != nullptr) {
    final_target = p.target.At(n);
    stores_final = p.update && final_target != p.pad && uint64_t(final_target) < uint64_t(p.slots);
    // A sequence that pads the batch has no state, whatever its target.
    stores_final = stores_final && has_state;
  }
  if (SEVERAL && p.accepted.data != nullptr) stores_final = false;  // a state after each token instead
  int64_t kept_row = source;
  if (SEVERAL && p.kept.data != nullptr && p.kept_index.data != nullptr) kept_row = p.kept_index.At(n);
  const bool keeps = SEVERAL && p.kept.data != nullptr && has_state && uint64_t(kept_row) < uint64_t(p.kept_rows);

#pragma unroll 1
  for (int t = 0; t < tokens; ++t) {
    const auto at = [&](const auto& array) { return begin_batch * array.batch + (begin_token + t) * array.token; };
    float b[ELEMENTS], c[ELEMENTS], x[ROWS], y[ROWS];
    const Input* from_b = p.b.data + at(p.b) + group * p.b.head;
    const Input* from_c = p.c.data + at(p.c) + group * p.c.head;
#pragma unroll
    for (int i = 0; i < S::CHUNKS; ++i) {
      const int column = (i * S::LANES + sublane) * S::VEC;
      float part[S::VEC];
      LoadSome(from_b + column, p.dstate - column, aligned.bc, part);
#pragma unroll
      for (int j = 0; j < S::VEC; ++j) b[i * S::VEC + j] = part[j];
      LoadSome(from_c + column, p.dstate - column, aligned.bc, part);
#pragma unroll
      for (int j = 0; j < S::VEC; ++j) c[i * S::VEC + j] = part[j];
    }
    const Input* from_x = p.x.data + at(p.x) + head * p.x.head;
    LoadSome(from_x + row0, p.dim - row0, aligned.x, x);
    const int64_t dt_at = at(p.dt) + head * p.dt.head;
    float dt[TIED ? 1 : ROWS], decay[TIED ? 1 : ROWS];
#pragma unroll
    for (int r = 0; r < (TIED ? 1 : ROWS); ++r) {
      dt[r] = row0 + r < p.dim || TIED ? WeightAt(p.dt, dt_at + (TIED ? 0 : (row0 + r) * p.dt.row)) + bias[r] : 0.f;
      if (p.softplus) dt[r] = Softplus(dt[r]);
      decay[r] =
          ptx::Exp2(Mamba2Rule::LogDecay(dt[r], a_tied) * SSU_LOG2_E);  // untied: computed for each element below
    }
    int64_t target = final_target;
    bool stores = stores_final && t == tokens - 1;
    if (SEVERAL && p.accepted.data != nullptr && p.update && has_state) {
      const IndexArray& targets = p.target.data != nullptr ? p.target : p.source;
      if (t < targets.columns) {
        target = targets.At(n, t);
        stores = target != p.pad && uint64_t(target) < uint64_t(p.slots);
      }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      float (&row)[ELEMENTS] = s[SEVERAL ? r : 0];
      if constexpr (!SEVERAL) to_floats(r, row);
      const float dt_r = dt[TIED ? 0 : r], added = Mamba2Rule::Correction(x[r], 0.f, dt_r);
      y[r] = 0.f;
#pragma unroll
      for (int i = 0; i < ELEMENTS; ++i) {
        float factor = decay[TIED ? 0 : r];
        if constexpr (!TIED) {
          const int column = (i / S::VEC * S::LANES + sublane) * S::VEC + i % S::VEC;
          const bool exists = row0 + r < p.dim && column < p.dstate;
          const float a = exists ? p.a[head * p.a_head + (row0 + r) * p.a_row + column * p.a_column] : 0.f;
          factor = ptx::Exp2(Mamba2Rule::LogDecay(dt_r, a) * SSU_LOG2_E);
        }
        row[i] = row[i] * factor + added * b[i];
        y[r] += row[i] * c[i];
      }
      const bool is_row = row0 + r < p.dim;
      if (!SEVERAL || stores)
        StoreRow<State, WIDTH>(p.state, target, head, row0 + r, p.dstate, sublane, row, options, stores && is_row);
      if (SEVERAL && keeps) {
        StateArray<State> kept = p.kept;
        kept.data += t * p.kept_token;
        kept.scale += StateFormat<State>::IS_SCALED ? t * p.kept_scale_token : 0;
        StoreRow<State, WIDTH>(kept, kept_row, head, row0 + r, p.dstate, sublane, row, options, is_row && t < p.tokens);
      }
    }
    ReduceRows<S::LANES>(y, sublane);
    if (writes) {
      float result = y[0] + d * ToFloat(from_x[out_row]);
      if (p.z.data != nullptr) {
        const float z = ToFloat(p.z.data[at(p.z) + head * p.z.head + out_row]);
        result *= z * Sigmoid(z);
      }
      p.out.data[at(p.out) + head * p.out.head + out_row] = FromFloat<Input>(result);
    }
  }
}

/// True if vectors of `elements` begin at aligned addresses in all tokens and heads.
template <typename T>
bool AlignsTokens(const TokenArray<T>& a, int elements, size_t bytes) {
  return a.batch % elements == 0 && a.token % elements == 0 && a.head % elements == 0 && IsAligned(a.data, bytes);
}

/// Launch for rows of up to WIDTH numbers. Each width is a unit of its own (csrc/ssu_kernels.jinja).
template <int WIDTH, typename State, typename Input>
Status LaunchSsu(const SsuParams<State, Input>& p, Stream stream) {
  using S = RowShape<State, WIDTH>;
  const int64_t blocks = int64_t(p.sequences) * p.heads;
  if (blocks == 0) return cudaSuccess;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  const dim3 grid(blocks, CeilDiv(p.dim, S::BLOCK_ROWS));
  const size_t row_bytes = std::min<size_t>(16, S::ROWS * sizeof(Input)),
               column_bytes = std::min<size_t>(16, S::VEC * sizeof(Input));
  const SsuAlignment aligned{AlignsTokens(p.x, int(row_bytes / sizeof(Input)), row_bytes),
                             AlignsTokens(p.b, int(column_bytes / sizeof(Input)), column_bytes) &&
                                 AlignsTokens(p.c, int(column_bytes / sizeof(Input)), column_bytes)};
  const bool several =
      p.tokens > 1 || p.cu_seqlens.data != nullptr || p.accepted.data != nullptr || p.kept.data != nullptr;
  const auto launch = [&](auto kernel) {
    return Launch(kernel, grid, dim3(32 * S::WARPS), p.enable_pdl, stream, p, aligned);
  };
  if constexpr (!StateFormat<State>::IS_SCALED) {
    if (!several && p.is_tied && ssu_few::Serves<State, Input, WIDTH>(p)) return ssu_few::Launch<WIDTH>(p, stream);
  }
  if (!several && p.is_tied && ssu_stream::CanStream<State, Input, WIDTH>(p))
    return ssu_stream::Launch<WIDTH>(p, stream);
  if (!p.is_tied) return launch(SsuKernel<State, Input, WIDTH, true, false>);
  return several ? launch(SsuKernel<State, Input, WIDTH, true, true>)
                 : launch(SsuKernel<State, Input, WIDTH, false, true>);
}

}  // namespace recurrent
}  // namespace flashinfer
