// SPDX-License-Identifier: Apache-2.0
// State update by replay on CUDA; formulas and parameters in ../ssu_replay.h. Bound by reading the states once.
//
//   block = 4 warps = BLOCK_ROWS rows of the state of one head of one sequence, as in kernel.cuh
//   1  eight loads of the state in each lane; meanwhile B, C, x and dt of all rows go to shared memory, and from there the
//      new ones to the rings
//   2  weights e^(G_t - G_i) dt_i (C_t . B_i) of the T x (p + T) pairs: a warp for each pair, or read from scratch where a
//      first kernel has computed C . B once for all heads of a group
//   3  for each token C_t s, summed over lanes for eight rows together, then the weighted sum of x
//   4  where the ring is full: the replayed state, by rank-1 updates in registers
//   test  pytest tests/recurrent -k replay      bench  python benchmarks/bench_recurrent_mamba.py -k checkpointing
#pragma once
#include "../../ptx/math.cuh"
#include "../../warp.cuh"
#include "../rules.h"
#include "../ssu_replay.h"
#include "state_row.cuh"

namespace flashinfer {
namespace recurrent {

constexpr float REPLAY_LOG2_E = 1.4426950409f;
constexpr int REPLAY_THREADS = 128;

/// Numbers of a block in shared memory. Rows 0 .. p - 1 are live ones, then come the new tokens.
template <typename Input, int WIDTH, int BLOCK_ROWS>
struct ReplayShared {
  alignas(16) Input b[REPLAY_ROWS][WIDTH], c[MAX_REPLAYED][WIDTH], x[REPLAY_ROWS][BLOCK_ROWS];
  float weight[MAX_REPLAYED][REPLAY_ROWS];
  float dt[REPLAY_ROWS], log_decay[REPLAY_ROWS];  // log2, cumulated
  float old_weight[MAX_REPLAYED];                 // weights of live rows in the replayed state
};

/// Copy `width` numbers to shared memory, zeros up to `padded`. All of `threads` threads take part.
template <typename T>
__device__ __forceinline__ void StageRow(T* to, const T* from, int width, int padded, int thread, int threads) {
  for (int i = thread; i < padded; i += threads) to[i] = i < width ? from[i] : FromFloat<T>(0.f);
}

/// A sequence: its tokens, its slot and the live rows of its rings.
struct ReplaySequence {
  int64_t begin_token, begin_batch, slot;
  int tokens, live, start;
  bool exists;
};

template <typename State, typename Input>
__device__ __forceinline__ ReplaySequence FindSequence(const ReplayParams<State, Input>& p, int n) {
  ReplaySequence s{0, n, 0, p.tokens, 0, 0, false};
  if (p.cu_seqlens.data != nullptr) {
    s.begin_token = p.cu_seqlens.At(n);
    s.begin_batch = 0;
    s.tokens = min(int(p.cu_seqlens.At(n + 1) - s.begin_token), p.tokens);
  }
  s.slot = p.source.data == nullptr ? n : p.source.At(n);
  s.exists = s.tokens > 0 && s.slot != p.pad && uint64_t(s.slot) < uint64_t(p.slots);
  if (s.exists) {
    s.live = min(max(p.live[s.slot], 0), p.window);
    s.start = p.ring_start[s.slot] % p.length;
    if (s.start < 0) s.start += p.length;
  }
  return s;
}

/// Processed dt of all rows and their cumulated log decay; called by one warp, which has a row in each lane.
template <typename State, typename Input>
__device__ __forceinline__ void RowDecays(const ReplayParams<State, Input>& p, const ReplaySequence& s, int head,
                                          float* dt_rows, float* log_decay) {
  const int i = threadIdx.x % 32, rows = s.live + s.tokens;
  float dt = 0.f;
  if (i < s.live) {
    dt = p.dt_ring.data[s.slot * p.dt_ring.slot + head * p.dt_ring.head + (s.start + i) % p.length * p.dt_ring.row];
  } else if (i < rows) {
    const int64_t token = s.begin_batch * p.dt.batch + (s.begin_token + i - s.live) * p.dt.token;
    dt = WeightAt(p.dt, token + head * p.dt.head);
    if (p.dt_bias.data != nullptr) dt += WeightAt(p.dt_bias, head * p.dt_bias.head);
    if (p.softplus) dt = Softplus(dt);
  }
  dt_rows[i] = dt;
  log_decay[i] = WarpInclusiveScan(Mamba2Rule::LogDecay(dt, p.a[head * p.a_head]) * REPLAY_LOG2_E);
}

/// Dot product of two rows in shared memory by a warp, in every lane.
template <int WIDTH, typename Input>
__device__ __forceinline__ float WarpDot(const Input* x, const Input* y) {
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < WIDTH / 64; ++i) {
    const auto a = Vec<Input, 2>::Load(x + i * 64 + threadIdx.x % 32 * 2),
               b = Vec<Input, 2>::Load(y + i * 64 + threadIdx.x % 32 * 2);
    sum += a.Float(0) * b.Float(0) + a.Float(1) * b.Float(1);
  }
  return WarpSum(sum);
}

__device__ __forceinline__ int OldWeightColumns(int window) { return (window + 7) / 8 * 8; }

/// First of two kernels. Block: one sequence, `heads_per_block` heads of a group; C . B is computed once for them.
template <typename State, typename Input, int WIDTH>
__global__ void __launch_bounds__(REPLAY_THREADS)
    ReplayWeightsKernel(const __grid_constant__ ReplayParams<State, Input> p, int parts) {
  __shared__ ReplayShared<Input, WIDTH, 8> shared;
  const int groups = p.heads / p.heads_per_group, part = blockIdx.x % parts;
  const int group = blockIdx.x / parts % groups, n = blockIdx.x / parts / groups;
  const ReplaySequence s = FindSequence(p, n);
  if (!s.exists) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rows = s.live + s.tokens;
  for (int i = warp; i < rows; i += 4) {
    const Input* from =
        i < s.live
            ? p.b_ring.data + s.slot * p.b_ring.slot + group * p.b_ring.head + (s.start + i) % p.length * p.b_ring.row
            : p.b.data + s.begin_batch * p.b.batch + (s.begin_token + i - s.live) * p.b.token + group * p.b.head;
    StageRow(shared.b[i], from, p.dstate, WIDTH, lane, 32);
  }
  for (int t = warp; t < s.tokens; t += 4) {
    const Input* from = p.c.data + s.begin_batch * p.c.batch + (s.begin_token + t) * p.c.token + group * p.c.head;
    StageRow(shared.c[t], from, p.dstate, WIDTH, lane, 32);
  }
  __syncthreads();
  for (int pair = warp; pair < s.tokens * rows; pair += 4) {
    const int t = pair / rows, i = pair % rows;
    if (i > s.live + t) continue;
    const float product = WarpDot<WIDTH>(shared.c[t], shared.b[i]);
    if (lane == 0) shared.weight[t][i] = product;
  }
  const int first = part * p.heads_per_block, last = min(first + p.heads_per_block, p.heads_per_group);
  const int columns = OldWeightColumns(p.window);
  for (int h = first; h < last; ++h) {
    const int head = group * p.heads_per_group + h;
    __syncthreads();
    if (warp == 0) RowDecays(p, s, head, shared.dt, shared.log_decay);
    __syncthreads();
    const int64_t item = int64_t(n) * p.heads + head;
    for (int pair = threadIdx.x; pair < s.tokens * rows; pair += REPLAY_THREADS) {
      const int t = pair / rows, i = pair % rows;
      float weight = 0.f;
      if (i <= s.live + t) {
        weight = shared.weight[t][i] * shared.dt[i] * ptx::Exp2(shared.log_decay[s.live + t] - shared.log_decay[i]);
      }
      Input* to = i < s.live ? p.old_weights + (item * MAX_REPLAYED + t) * columns + i
                             : p.new_weights + (item * MAX_REPLAYED + t) * MAX_REPLAYED + i - s.live;
      *to = FromFloat<Input>(weight);
    }
    if (threadIdx.x < s.tokens)
      p.decays[item * MAX_REPLAYED + threadIdx.x] = ptx::Exp2(shared.log_decay[s.live + threadIdx.x]);
  }
}

/// PRECOMPUTED: the weights come from ReplayWeightsKernel.
template <typename State, typename Input, int WIDTH, bool PRECOMPUTED>
__global__ void __launch_bounds__(REPLAY_THREADS) ReplayKernel(const __grid_constant__ ReplayParams<State, Input> p) {
  using S = RowShape<State, WIDTH>;
  constexpr int ROWS = S::ROWS, ELEMENTS = S::ELEMENTS;
  extern __shared__ __align__(16) uint8_t raw_shared[];
  auto& shared = *reinterpret_cast<ReplayShared<Input, WIDTH, S::BLOCK_ROWS>*>(raw_shared);
  const int head = blockIdx.x % p.heads, n = blockIdx.x / p.heads, group = head / p.heads_per_group;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, sublane = lane % S::LANES;
  const int block_row = blockIdx.y * S::BLOCK_ROWS, local_row = warp * S::WARP_ROWS + lane / S::LANES * ROWS;
  const int row0 = block_row + local_row;
  const ReplaySequence s = FindSequence(p, n);
  if (!s.exists) return;
  const int rows = s.live + s.tokens;

  RawVec<S::VEC, State> raw[ROWS][S::CHUNKS];
  float scale[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const State* from = p.state.data + s.slot * p.state.slot + head * p.state.head + (row0 + r) * p.state.row;
    const bool is_row = row0 + r < p.dim;
#pragma unroll
    for (int c = 0; c < S::CHUNKS; ++c) {
      const int column = (c * S::LANES + sublane) * S::VEC;
      if (is_row && column < p.dstate) {
        raw[r][c].Load(from + column);
      } else {
        raw[r][c].Clear();
      }
    }
    scale[r] = 1.f;
    if constexpr (StateFormat<State>::IS_SCALED) {
      if (is_row) scale[r] = p.state.scale[s.slot * p.state.scale_slot + head * p.state.scale_head + row0 + r];
    }
  }

  const int block_width = min(p.dim - block_row, S::BLOCK_ROWS);
#pragma unroll 1
  for (int i = warp; i < rows; i += S::WARPS) {
    const int ring_row = (s.start + i) % p.length;
    const int64_t token = s.begin_token + i - s.live;
    Input* b_ring = p.b_ring.data + s.slot * p.b_ring.slot + group * p.b_ring.head + ring_row * p.b_ring.row;
    Input* x_ring = p.x_ring.data + s.slot * p.x_ring.slot + head * p.x_ring.head + ring_row * p.x_ring.row + block_row;
    const bool is_live = i < s.live;
    const Input* b = is_live ? b_ring : p.b.data + s.begin_batch * p.b.batch + token * p.b.token + group * p.b.head;
    const Input* x =
        is_live ? x_ring : p.x.data + s.begin_batch * p.x.batch + token * p.x.token + head * p.x.head + block_row;
    if (!PRECOMPUTED || is_live) StageRow(shared.b[i], b, p.dstate, WIDTH, lane, 32);
    StageRow(shared.x[i], x, block_width, S::BLOCK_ROWS, lane, 32);
    if (is_live) continue;
    // Append. The row is free: no block reads it, for it is outside of the live ones.
    for (int j = lane; j < block_width; j += 32) x_ring[j] = x[j];
    if (head % p.heads_per_group == 0 && blockIdx.y == 0) {
      for (int j = lane; j < p.dstate; j += 32) b_ring[j] = b[j];
    }
  }
#pragma unroll 1
  for (int t = warp; t < s.tokens; t += S::WARPS) {
    const Input* from = p.c.data + s.begin_batch * p.c.batch + (s.begin_token + t) * p.c.token + group * p.c.head;
    StageRow(shared.c[t], from, p.dstate, WIDTH, lane, 32);
  }
  if (warp == 0) {
    RowDecays(p, s, head, shared.dt, shared.log_decay);
    if (blockIdx.y == 0 && lane >= s.live && lane < rows) {
      p.dt_ring.data[s.slot * p.dt_ring.slot + head * p.dt_ring.head + (s.start + lane) % p.length * p.dt_ring.row] =
          shared.dt[lane];
    }
  }
  __syncthreads();

  const int64_t item = int64_t(n) * p.heads + head;
  if constexpr (PRECOMPUTED) {
    const int columns = OldWeightColumns(p.window);
    for (int pair = threadIdx.x; pair < s.tokens * rows; pair += REPLAY_THREADS) {
      const int t = pair / rows, i = pair % rows;
      shared.weight[t][i] = ToFloat(i < s.live ? p.old_weights[(item * MAX_REPLAYED + t) * columns + i]
                                               : p.new_weights[(item * MAX_REPLAYED + t) * MAX_REPLAYED + i - s.live]);
    }
  } else {
#pragma unroll 1
    for (int pair = warp; pair < s.tokens * rows; pair += S::WARPS) {
      const int t = pair / rows, i = pair % rows;
      float weight = 0.f;
      if (i <= s.live + t) {
        weight = WarpDot<WIDTH>(shared.c[t], shared.b[i]) * shared.dt[i] *
                 ptx::Exp2(shared.log_decay[s.live + t] - shared.log_decay[i]);
      }
      if (lane == 0) shared.weight[t][i] = weight;
    }
  }
  const bool commits = rows > p.window;
  const float old_decay = s.live > 0 ? shared.log_decay[s.live - 1] : 0.f;
  if (threadIdx.x < s.live) {
    shared.old_weight[threadIdx.x] = shared.dt[threadIdx.x] * ptx::Exp2(old_decay - shared.log_decay[threadIdx.x]);
  }
  __syncthreads();

  float state[ROWS][ELEMENTS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int c = 0; c < S::CHUNKS; ++c) raw[r][c].ToFloats(&state[r][c * S::VEC]);
    if constexpr (StateFormat<State>::IS_SCALED) {
#pragma unroll
      for (int i = 0; i < ELEMENTS; ++i) state[r][i] *= scale[r];
    }
  }
  const auto columns_of = [&](const Input* row, float (&x)[ELEMENTS]) {
#pragma unroll
    for (int c = 0; c < S::CHUNKS; ++c) {
      float part[S::VEC];
      LoadSome(row + (c * S::LANES + sublane) * S::VEC, S::VEC, true, part);
#pragma unroll
      for (int i = 0; i < S::VEC; ++i) x[c * S::VEC + i] = part[i];
    }
  };
  const int reduced = ReducedRow<S::LANES, ROWS>(sublane), out_row = row0 + reduced;
  const bool writes = WritesReduced<S::LANES, ROWS>(sublane) && out_row < p.dim;
  const float d = p.d.data != nullptr && writes ? WeightAt(p.d, head * p.d.head + out_row * p.d.row) : 0.f;
#pragma unroll 1
  for (int t = 0; t < s.tokens; ++t) {
    float c[ELEMENTS], y[ROWS];
    columns_of(shared.c[t], c);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      y[r] = 0.f;
#pragma unroll
      for (int i = 0; i < ELEMENTS; ++i) y[r] += state[r][i] * c[i];
    }
    ReduceRows<S::LANES>(y, sublane);
    if (writes) {
      const int local = local_row + reduced;
      float result = y[0] * (PRECOMPUTED ? p.decays[item * MAX_REPLAYED + t] : ptx::Exp2(shared.log_decay[s.live + t]));
#pragma unroll 1
      for (int i = 0; i <= s.live + t; ++i) result += shared.weight[t][i] * ToFloat(shared.x[i][local]);
      result += d * ToFloat(shared.x[s.live + t][local]);
      const int64_t token = s.begin_token + t;
      if (p.z.data != nullptr) {
        const float z = ToFloat(p.z.data[s.begin_batch * p.z.batch + token * p.z.token + head * p.z.head + out_row]);
        result *= z * Sigmoid(z);
      }
      p.out.data[s.begin_batch * p.out.batch + token * p.out.token + head * p.out.head + out_row] =
          FromFloat<Input>(result);
    }
  }
  if (!commits) return;
  const float decay = ptx::Exp2(old_decay);
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) state[r][i] *= decay;
  }
#pragma unroll 1
  for (int i = 0; i < s.live; ++i) {
    float b[ELEMENTS];
    columns_of(shared.b[i], b);
    const float weight = shared.old_weight[i];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const float added = weight * ToFloat(shared.x[i][local_row + r]);
#pragma unroll
      for (int j = 0; j < ELEMENTS; ++j) state[r][j] += added * b[j];
    }
  }
  const StoreOptions options{p.seed != nullptr, p.seed != nullptr ? *p.seed : 0, p.rounds};
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    StoreRow<State, WIDTH>(p.state, s.slot, head, row0 + r, p.dstate, sublane, state[r], options, row0 + r < p.dim);
  }
}

template <int WIDTH, typename State, typename Input>
Status LaunchReplay(const ReplayParams<State, Input>& given, Stream stream) {
  using S = RowShape<State, WIDTH>;
  ReplayParams<State, Input> p = given;
  const int64_t blocks = int64_t(p.sequences) * p.heads;
  if (blocks == 0) return cudaSuccess;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  const dim3 grid(blocks, CeilDiv(p.dim, S::BLOCK_ROWS));
  const auto launch = [&](auto kernel) {
    constexpr size_t BYTES = sizeof(ReplayShared<Input, WIDTH, S::BLOCK_ROWS>);
    if (BYTES > 48 * 1024) {
      const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(BYTES));
      if (status != cudaSuccess) return status;
    }
    return LaunchShared(kernel, grid, dim3(REPLAY_THREADS), BYTES, false, stream, p);
  };
  if (p.new_weights == nullptr) return launch(ReplayKernel<State, Input, WIDTH, false>);
  if (p.heads_per_block <= 0) p.heads_per_block = p.heads_per_group;
  const int parts = int(CeilDiv(p.heads_per_group, p.heads_per_block));
  const int64_t weight_blocks = int64_t(p.sequences) * (p.heads / p.heads_per_group) * parts;
  const cudaError_t status = Launch(ReplayWeightsKernel<State, Input, WIDTH>, dim3(weight_blocks), dim3(REPLAY_THREADS),
                                    false, stream, p, parts);
  return status != cudaSuccess ? status : launch(ReplayKernel<State, Input, WIDTH, true>);
}

/// Grid (heads x row blocks, requests, layers).
template <typename State, typename Input, int WIDTH>
__global__ void __launch_bounds__(REPLAY_THREADS)
    MaterializeKernel(const __grid_constant__ MaterializeParams<State, Input> p) {
  using S = RowShape<State, WIDTH>;
  constexpr int ROWS = S::ROWS, ELEMENTS = S::ELEMENTS;
  __shared__ float dt[MAX_REPLAYED], weight[MAX_REPLAYED], total;
  const int head = blockIdx.x % p.heads, group = head / p.heads_per_group, layer = blockIdx.z;
  bool ended = false;
  for (int i = threadIdx.x; i <= int(blockIdx.y); i += REPLAY_THREADS) ended |= p.active[i] < 0;
  if (__syncthreads_or(ended)) return;
  const int request = p.active[blockIdx.y];
  if (request >= p.requests) return;
  const int64_t source = p.source[layer * p.requests + request], target = p.target[layer * p.requests + request];
  if (source == p.pad || target == p.pad || source < 0 || target < 0) return;
  const int live = min(max(p.live[request], 0), MAX_REPLAYED), start = p.ring_start[request];
  const int lane = threadIdx.x % 32, sublane = lane % S::LANES;
  const int row0 = (blockIdx.x / p.heads * S::WARPS + threadIdx.x / 32) * S::WARP_ROWS + lane / S::LANES * ROWS;

  const auto ring_row = [&](int i) { return ((start + i) % p.length + p.length) % p.length; };
  if (threadIdx.x < 32) {
    float mine = 0.f;
    if (lane < live) {
      mine = reinterpret_cast<const float*>(
          p.dt_ring[layer])[source * p.dt_slot[layer] + int64_t(head) * p.length + ring_row(lane)];
    }
    const float a = reinterpret_cast<const float*>(p.a[layer])[head];
    const float log_decay = WarpInclusiveScan(Mamba2Rule::LogDecay(mine, a) * REPLAY_LOG2_E);
    const float last = __shfl_sync(ALL_LANES, log_decay, 31);
    if (lane < MAX_REPLAYED) {
      dt[lane] = mine;
      weight[lane] = mine * ptx::Exp2(last - log_decay);
    }
    if (lane == 0) total = ptx::Exp2(last);
  }
  __syncthreads();

  StateArray<State> a{reinterpret_cast<State*>(p.state[layer]),
                      p.state_slot[layer],
                      int64_t(p.dim) * p.dstate,
                      p.dstate,
                      nullptr,
                      0,
                      0};
  if constexpr (StateFormat<State>::IS_SCALED) {
    a.scale = reinterpret_cast<float*>(p.scale[layer]);
    a.scale_slot = p.scale_slot[layer];
    a.scale_head = p.dim;
  }
  const Input* x_ring =
      reinterpret_cast<const Input*>(p.x_ring[layer]) + source * p.x_slot[layer] + int64_t(head) * p.length * p.dim;
  const Input* b_ring =
      reinterpret_cast<const Input*>(p.b_ring[layer]) + source * p.b_slot[layer] + int64_t(group) * p.length * p.dstate;
  const StoreOptions options{p.seed != nullptr, p.seed != nullptr ? *p.seed : 0, p.rounds};
#pragma unroll 1
  for (int r = 0; r < ROWS; ++r) {
    const int row = row0 + r;
    const bool is_row = row < p.dim;
    float s[ELEMENTS], scale = 1.f;
    if constexpr (StateFormat<State>::IS_SCALED) {
      if (is_row) scale = a.scale[source * a.scale_slot + head * a.scale_head + row];
      if (is_row && live == 0 && sublane == 0) a.scale[target * a.scale_slot + head * a.scale_head + row] = scale;
    }
#pragma unroll
    for (int c = 0; c < S::CHUNKS; ++c) {
      const int column = (c * S::LANES + sublane) * S::VEC;
      RawVec<S::VEC, State> raw;
      raw.Clear();
      if (is_row && column < p.dstate) {
        const int64_t inside = head * a.head + row * a.row + column;
        raw.Load(a.data + source * a.slot + inside);
        if (live == 0) raw.Store(a.data + target * a.slot + inside);
      }
      raw.ToFloats(&s[c * S::VEC]);
    }
    if (live == 0) continue;
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) s[i] *= scale * total;
    for (int i = 0; i < live; ++i) {
      const int at = ring_row(i);
      const float added = is_row ? weight[i] * ToFloat(x_ring[int64_t(at) * p.dim + row]) : 0.f;
#pragma unroll
      for (int c = 0; c < S::CHUNKS; ++c) {
        const int column = (c * S::LANES + sublane) * S::VEC;
#pragma unroll
        for (int j = 0; j < S::VEC; ++j) {
          if (column + j < p.dstate) s[c * S::VEC + j] += added * ToFloat(b_ring[int64_t(at) * p.dstate + column + j]);
        }
      }
    }
    StoreRow<State, WIDTH>(a, target, head, row, p.dstate, sublane, s, options, is_row);
  }
}

template <int WIDTH, typename State, typename Input>
Status LaunchMaterialize(const MaterializeParams<State, Input>& p, Stream stream) {
  using S = RowShape<State, WIDTH>;
  if (p.layers == 0 || p.active_count == 0 || p.heads == 0) return cudaSuccess;
  if (p.active_count > 65535 || p.layers > 65535) return cudaErrorInvalidValue;
  const dim3 grid(p.heads * CeilDiv(p.dim, S::BLOCK_ROWS), p.active_count, p.layers);
  return Launch(MaterializeKernel<State, Input, WIDTH>, grid, dim3(REPLAY_THREADS), false, stream, p);
}

}  // namespace recurrent
}  // namespace flashinfer
