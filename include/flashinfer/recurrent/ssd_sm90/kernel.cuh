// SPDX-License-Identifier: Apache-2.0
// Mamba-2 over whole sequences on Hopper tensor cores; formulas and parameters in ../ssd.h.
//
//   block  64 rows of one head of one sequence, from its first chunk to its last
//   warpgroup 0   warp 0: X, B and C of chunks by TMA into a ring of 4 stages; warp 1: dt and decays of chunks
//   warpgroup 1   the state: 64 x 128 fp32 in registers. Before each chunk its 16-bit copy goes to a ring of 2, then
//                 S = e^(G) S + (weighted X)^T B
//   warpgroups 2, 3   the outputs of even and of odd chunks: scores = C B^T, Y = e^G C S^T + (masked scores) X
//
// Only the state goes from chunk to chunk, and its step is one product: outputs of two chunks overlap with it and with each
// other. Bound by the chain of states for few heads, by tensor cores and exponentials for many.
//   test  pytest tests/recurrent -k ssd      bench  python benchmarks/bench_recurrent_mamba.py -k ssd
#pragma once
#include <cuda.h>

#include "../../hopper/ring.cuh"
#include "../../ptx/barrier.cuh"
#include "../../ptx/mma.cuh"
#include "../../ptx/setmaxnreg.cuh"
#include "../../ptx/stmatrix.cuh"
#include "../../ptx/tma.cuh"
#include "../../ptx/wgmma.cuh"
#include "../chunk/ssd_common.cuh"
#include "shape.h"

namespace flashinfer {
namespace recurrent {
namespace ssd_sm90 {

struct Shared {
  alignas(1024) Stage stages[STAGES];
  alignas(1024) uint8_t states[STATE_STAGES][2 * SLAB_BYTES];
  SsdDecays decays[STAGES];
  alignas(8) uint64_t barriers[2 * STAGES], state_barriers[2 * STATE_STAGES];
};
constexpr int SHARED_BYTES = int(sizeof(Shared)) + hopper::SLAB_ALIGNMENT;  // the base is aligned in the kernel

/// The maps of X (rows, heads, tokens), B and C (dstate, groups, tokens).
struct Maps {
  CUtensorMap x, b, c;
};

/// Work of a block.
struct Place {
  SsdSequence sequence;
  int64_t n;
  int head, group, row;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

template <typename Input>
constexpr ptx::WgmmaType TYPE = std::is_same_v<Input, __half> ? ptx::WgmmaType::kF16 : ptx::WgmmaType::kBf16;

template <typename Input>
__device__ __forceinline__ uint32_t Pair(float x, float y) {
  const float both[2] = {x, y};
  const auto v = RoundTo<Input, 2>(both);
  return *reinterpret_cast<const uint32_t*>(&v);
}

/// Set rows from `length` on of slabs to zero, so that what lies behind a sequence, NaN included, has no part in products.
/// Called by a warpgroup; its barrier follows.
__device__ __forceinline__ void ClearRows(uint8_t* slabs, int count, int length) {
  const int rows = SSD_CHUNK - length;
  for (int i = threadIdx.x % WARPGROUP; i < rows * 8 * count; i += WARPGROUP) {
    const int slab = i / (rows * 8), inside = i % (rows * 8);
    *reinterpret_cast<uint4*>(slabs + slab * SLAB_BYTES + (length + inside / 8) * hopper::SLAB_ROW_BYTES +
                              inside % 8 * 16) = uint4{};
  }
  ptx::FenceAsyncProxy();
}

template <typename Input>
__device__ __forceinline__ void LoadChunks(const SsdParams<Input>& p, const Place& at, const Maps& maps,
                                           Shared& shared) {
  const hopper::Ring<STAGES> ring{ptx::SharedAddress(shared.barriers)};
  hopper::RingPosition<STAGES> to;
  const int64_t base = at.sequence.batch * p.tokens;
  for (int64_t token = at.sequence.begin; token < at.sequence.end; token += SsdChunkLength(at.sequence, token)) {
    const uint32_t full = ring.BeginFill(to, TOKEN_BYTES);
    Stage& stage = shared.stages[to.stage];
    const int row = int(base + token);
    ptx::LoadBox(ptx::SharedAddress(stage.x), &maps.x, full, at.row, at.head, row);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      ptx::LoadBox(ptx::SharedAddress(stage.b + half * SLAB_BYTES), &maps.b, full, half * 64, at.group, row);
      ptx::LoadBox(ptx::SharedAddress(stage.c + half * SLAB_BYTES), &maps.c, full, half * 64, at.group, row);
    }
    to.Advance();
  }
}

template <typename Input>
__device__ __forceinline__ void WriteDecays(const SsdParams<Input>& p, const Place& at, Shared& shared) {
  const hopper::Ring<STAGES> ring{ptx::SharedAddress(shared.barriers)};
  hopper::RingPosition<STAGES> to;
  const int lane = threadIdx.x % 32;
  const float a = p.a[at.head], bias = p.dt_bias.data == nullptr ? 0.f : WeightAt(p.dt_bias, at.head * p.dt_bias.head);
  for (int64_t token = at.sequence.begin; token < at.sequence.end;) {
    const int length = SsdChunkLength(at.sequence, token);
    const float first = ChunkDt(p, at.sequence, token, length, 2 * lane, at.head, bias);
    const float second = ChunkDt(p, at.sequence, token, length, 2 * lane + 1, at.head, bias);
    ring.WaitEmpty(to);
    ChunkDecays(first, second, a, shared.decays[to.stage]);
    __syncwarp();
    if (lane == 0) ptx::MbarrierArrive(ring.Full(to.stage));
    to.Advance();
    token += length;
  }
}

template <typename Input>
__device__ __forceinline__ void RunState(const SsdParams<Input>& p, const Place& at, Shared& shared) {
  using Product = ptx::Wgmma<TYPE<Input>, DSTATE, false, true>;
  const hopper::Ring<STAGES> ring{ptx::SharedAddress(shared.barriers)};
  const hopper::Ring<STATE_STAGES> states{ptx::SharedAddress(shared.state_barriers)};
  hopper::RingPosition<STAGES> from;
  hopper::RingPosition<STATE_STAGES> to;
  const int warp = threadIdx.x % WARPGROUP / 32, lane = threadIdx.x % 32, lane_row = lane / 4,
            lane_column = lane % 4 * 2;
  const int matrix = lane / 8, matrix_row = lane % 8;
  const auto index = [&](int64_t n, const SsdStates& s, int half, int j) {
    const int64_t row = at.row + warp * 16 + half * 8 + lane_row;
    return n * s.row + (int64_t(at.head) * p.dim + row) * DSTATE + j * 8 + lane_column;
  };
  float s[DSTATE / 2];
#pragma unroll
  for (int j = 0; j < DSTATE / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      s[4 * j + i] = p.initial.data == nullptr ? 0.f : SsdLoad(p.initial, index(at.n, p.initial, i / 2, j) + i % 2);
  }
  const auto store = [&](const SsdStates& to, int64_t n) {
#pragma unroll
    for (int j = 0; j < DSTATE / 8; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        SsdStore(to, index(n, to, half, j), s[4 * j + 2 * half], s[4 * j + 2 * half + 1]);
    }
  };
  for (int64_t token = at.sequence.begin; token < at.sequence.end;) {
    const int length = SsdChunkLength(at.sequence, token);
    // The state before the chunk, for the outputs.
    states.WaitEmpty(to);
    const uint32_t copy = ptx::SharedAddress(shared.states[to.stage]);
#pragma unroll
    for (int j = 0; j < DSTATE / 8; j += 2) {
      const int column = (j + matrix / 2) * 8, row = warp * 16 + matrix % 2 * 8 + matrix_row;
      const uint32_t offset =
          hopper::Swizzle128(row * hopper::SLAB_ROW_BYTES + column % 64 * 2) + column / 64 * SLAB_BYTES;
      ptx::StoreMatrix4(copy + offset, Pair<Input>(s[4 * j], s[4 * j + 1]), Pair<Input>(s[4 * j + 2], s[4 * j + 3]),
                        Pair<Input>(s[4 * j + 4], s[4 * j + 5]), Pair<Input>(s[4 * j + 6], s[4 * j + 7]));
    }
    ptx::FenceAsyncProxy();
    __syncwarp();
    if (lane == 0) ptx::MbarrierArrive(states.Full(to.stage));
    to.Advance();

    ring.WaitFull(from);
    Stage& stage = shared.stages[from.stage];
    const SsdDecays& decays = shared.decays[from.stage];
    if (length < SSD_CHUNK) {
      ClearRows(stage.b, 2, length);
      ptx::BarrierSync(kStateBarrier, WARPGROUP);
    }
    uint32_t x[SSD_CHUNK / 16][4];
    const uint32_t x_slab = ptx::SharedAddress(stage.x);
#pragma unroll
    for (int k = 0; k < SSD_CHUNK / 16; ++k) {
      const int row = k * 16 + matrix / 2 * 8 + matrix_row, column = warp * 16 + matrix % 2 * 8;
      ptx::LdMatrixTrans(x[k], x_slab + hopper::Swizzle128(row * hopper::SLAB_ROW_BYTES + column * 2));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int first = k * 16 + i / 2 * 8 + lane_column;
        const float2 w = *reinterpret_cast<const float2*>(&decays.to_end[first]);
        const auto pair = *reinterpret_cast<const Vec<Input, 2>*>(&x[k][i]);
        x[k][i] =
            Pair<Input>(first < length ? pair.Float(0) * w.x : 0.f, first + 1 < length ? pair.Float(1) * w.y : 0.f);
      }
    }
    const float whole = decays.whole;
#pragma unroll
    for (int i = 0; i < DSTATE / 2; ++i) s[i] *= whole;
    const uint64_t b = hopper::DescriptorMnMajor(ptx::SharedAddress(stage.b), SSD_CHUNK);
    ptx::WgmmaPin(s);
    ptx::WgmmaFence();
#pragma unroll
    for (int k = 0; k < SSD_CHUNK / 16; ++k) {
      Product::Run(s, x[k], hopper::AdvanceDescriptor(b, k * 16 * hopper::SLAB_ROW_BYTES), true);
    }
    ptx::WgmmaCommit();
    ptx::WgmmaWait<0>();
    ptx::WgmmaPin(s);
#pragma unroll
    for (int k = 0; k < SSD_CHUNK / 16; ++k) ptx::WgmmaPin(x[k]);
    __syncwarp();
    ring.Release(from.stage, 1);
    from.Advance();
    token += length;
    if (token == at.sequence.keep) store(p.kept, at.sequence.keep_slot);
  }
  if (p.final.data != nullptr) store(p.final, at.n);
}

template <typename Input>
__device__ __forceinline__ void RunOutputs(const SsdParams<Input>& p, const Place& at, Shared& shared, int parity) {
  using Scores = ptx::Wgmma<TYPE<Input>, SSD_CHUNK, false, false>;
  using FromState = ptx::Wgmma<TYPE<Input>, ROWS, false, false>;
  using FromTokens = ptx::Wgmma<TYPE<Input>, ROWS, false, true>;
  const hopper::Ring<STAGES> ring{ptx::SharedAddress(shared.barriers)};
  const hopper::Ring<STATE_STAGES> states{ptx::SharedAddress(shared.state_barriers)};
  hopper::RingPosition<STAGES> from;
  hopper::RingPosition<STATE_STAGES> state;
  const int warp = threadIdx.x % WARPGROUP / 32, lane = threadIdx.x % 32, lane_row = lane / 4,
            lane_column = lane % 4 * 2;
  const int rows[2] = {warp * 16 + lane_row, warp * 16 + lane_row + 8};
  float d[ROWS / 8][2];
#pragma unroll
  for (int j = 0; j < ROWS / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = at.row + j * 8 + lane_column + i;
      d[j][i] = p.d.data == nullptr ? 0.f : WeightAt(p.d, at.head * p.d.head + row * p.d.row);
    }
  }
  int chunk = 0;
  for (int64_t token = at.sequence.begin; token < at.sequence.end; ++chunk) {
    const int length = SsdChunkLength(at.sequence, token);
    if (chunk % 2 != parity) {
      from.Advance();
      state.Advance();
      token += length;
      continue;
    }
    ring.WaitFull(from);
    Stage& stage = shared.stages[from.stage];
    const SsdDecays& decays = shared.decays[from.stage];
    if (length < SSD_CHUNK) {
      ClearRows(stage.x, 1, length);
      ptx::BarrierSync(kOutputBarrier + parity, WARPGROUP);
    }
    const uint64_t b = hopper::DescriptorKMajor(ptx::SharedAddress(stage.b)),
                   c = hopper::DescriptorKMajor(ptx::SharedAddress(stage.c));
    float scores[SSD_CHUNK / 2], y[ROWS / 2];
    ptx::WgmmaFence();
#pragma unroll
    for (int k = 0; k < DSTATE / 16; ++k) {
      const uint32_t step = k / 4 * SLAB_BYTES + k % 4 * hopper::WGMMA_K_BYTES;
      Scores::Run(scores, hopper::AdvanceDescriptor(c, step), hopper::AdvanceDescriptor(b, step), k > 0);
    }
    ptx::WgmmaCommit();
    states.WaitFull(state);
    const uint64_t s = hopper::DescriptorKMajor(ptx::SharedAddress(shared.states[state.stage]));
    ptx::WgmmaFence();
#pragma unroll
    for (int k = 0; k < DSTATE / 16; ++k) {
      const uint32_t step = k / 4 * SLAB_BYTES + k % 4 * hopper::WGMMA_K_BYTES;
      FromState::Run(y, hopper::AdvanceDescriptor(c, step), hopper::AdvanceDescriptor(s, step), k > 0);
    }
    ptx::WgmmaCommit();
    ptx::WgmmaWait<1>();
    ptx::WgmmaPin(scores);

    // Masked and decayed scores as the left operand of the next product.
    uint32_t weights[SSD_CHUNK / 16][4];
    const float g[2] = {decays.g[rows[0]], decays.g[rows[1]]};
#pragma unroll
    for (int j = 0; j < SSD_CHUNK / 8; ++j) {
      const int column = j * 8 + lane_column;
      const float2 g_column = *reinterpret_cast<const float2*>(&decays.g[column]);
      const float2 dt = *reinterpret_cast<const float2*>(&decays.dt[column]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float x = column <= rows[half] ? scores[4 * j + 2 * half] * ptx::Exp2(g[half] - g_column.x) * dt.x : 0.f;
        const float z =
            column + 1 <= rows[half] ? scores[4 * j + 2 * half + 1] * ptx::Exp2(g[half] - g_column.y) * dt.y : 0.f;
        weights[j / 2][j % 2 * 2 + half] = Pair<Input>(x, z);
      }
    }
    ptx::WgmmaWait<0>();
    ptx::WgmmaPin(y);
    __syncwarp();
    states.Release(state.stage, 1);
    const float from_begin[2] = {decays.from_begin[rows[0]], decays.from_begin[rows[1]]};
#pragma unroll
    for (int i = 0; i < ROWS / 2; ++i) y[i] *= from_begin[i % 4 / 2];
    const uint64_t x = hopper::DescriptorMnMajor(ptx::SharedAddress(stage.x), SSD_CHUNK);
    ptx::WgmmaPin(y);
    ptx::WgmmaFence();
#pragma unroll
    for (int k = 0; k < SSD_CHUNK / 16; ++k) {
      FromTokens::Run(y, weights[k], hopper::AdvanceDescriptor(x, k * 16 * hopper::SLAB_ROW_BYTES), true);
    }
    ptx::WgmmaCommit();
    ptx::WgmmaWait<0>();
    ptx::WgmmaPin(y);
#pragma unroll
    for (int k = 0; k < SSD_CHUNK / 16; ++k) ptx::WgmmaPin(weights[k]);

#pragma unroll
    for (int j = 0; j < ROWS / 8; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (rows[half] >= length) continue;
        const int column = j * 8 + lane_column;
        const auto own = Vec<Input, 2>::Load(reinterpret_cast<const Input*>(
            stage.x + hopper::Swizzle128(rows[half] * hopper::SLAB_ROW_BYTES + column * 2)));
        float result[2] = {y[4 * j + 2 * half] + d[j][0] * own.Float(0),
                           y[4 * j + 2 * half + 1] + d[j][1] * own.Float(1)};
        const int64_t t = token + rows[half];
        if (p.z.data != nullptr) {
          const Input* z =
              p.z.data + at.sequence.batch * p.z.batch + t * p.z.token + at.head * p.z.head + at.row + column;
          result[0] *= ToFloat(z[0]) * Sigmoid(ToFloat(z[0]));
          result[1] *= ToFloat(z[1]) * Sigmoid(ToFloat(z[1]));
        }
        Input* out = p.out.data + at.sequence.batch * p.out.batch + t * p.out.token + at.head * p.out.head +
                     (at.row + column) * p.out_row;
        if (p.out_row == 1) {
          RoundTo<Input, 2>(result).Store(out);
        } else {
          out[0] = FromFloat<Input>(result[0]);
          out[p.out_row] = FromFloat<Input>(result[1]);
        }
      }
    }
    __syncwarp();
    ring.Release(from.stage, 1);
    from.Advance();
    state.Advance();
    token += length;
  }
}

#endif

template <typename Input>
__global__ void __launch_bounds__(THREADS, 1)
    SsdSm90Kernel(const __grid_constant__ SsdParams<Input> p, const __grid_constant__ Maps maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ uint8_t raw_shared[];
  const uintptr_t begin = reinterpret_cast<uintptr_t>(raw_shared);
  Shared& shared = *reinterpret_cast<Shared*>((begin + hopper::SLAB_ALIGNMENT - 1) / hopper::SLAB_ALIGNMENT *
                                              hopper::SLAB_ALIGNMENT);
  const int tiles = p.dim / ROWS;
  Place at;
  at.n = blockIdx.x / (p.heads * tiles);
  at.head = int(blockIdx.x / tiles % p.heads);
  at.group = at.head / p.heads_per_group;
  at.row = int(blockIdx.x % tiles) * ROWS;
  at.sequence = FindSsdSequence(p, at.n);
  if (threadIdx.x == 0) {
    // A stage is read by the warps of the state and by those of one output warpgroup.
    hopper::Ring<STAGES>{ptx::SharedAddress(shared.barriers)}.Init(8, 2);
    hopper::Ring<STATE_STAGES>{ptx::SharedAddress(shared.state_barriers)}.Init(4, 4);
  }
  __syncthreads();
  const int role = threadIdx.x / WARPGROUP;
  if (role == 0) {
    ptx::ReleaseRegisters<PRODUCER_REGISTERS>();
    const int warp = threadIdx.x / 32;
    if (warp == 0 && threadIdx.x == 0) LoadChunks(p, at, maps, shared);
    if (warp == 1) WriteDecays(p, at, shared);
  } else if (role == 1) {
    ptx::TakeRegisters<STATE_REGISTERS>();
    RunState(p, at, shared);
  } else {
    ptx::TakeRegisters<OUTPUT_REGISTERS>();
    RunOutputs(p, at, shared, role - 2);
  }
#endif
}

}  // namespace ssd_sm90
}  // namespace recurrent
}  // namespace flashinfer
