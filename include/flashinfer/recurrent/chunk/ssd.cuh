// SPDX-License-Identifier: Apache-2.0
// Mamba-2 over whole sequences through mma.sync, SM80 and later; formulas and parameters in ../ssd.h.
//
//   block  one sequence, one head, 64 of its rows (dim); 4 warps; goes from chunk to chunk with the state in registers
//   warp   16 tokens of the chunk for the outputs, 16 rows of the state
//   shared X (64 x 64), B, C (64 x WIDTH) of a chunk, and the state before it in 16 bits (64 x WIDTH); rows are padded by
//          16 bytes, so that the eight rows of a matrix of ldmatrix lie in different banks
//
// The masked and decayed C B^T goes from the accumulators of one product straight into the operand of the next. Bound by
// mma.sync; the Hopper kernel (../ssd_sm90) is the fast one.
//   test  pytest tests/recurrent -k ssd      bench  python benchmarks/bench_recurrent_mamba.py -k ssd
#pragma once
#include "../../ptx/mma.cuh"
#include "ssd_common.cuh"

namespace flashinfer {
namespace recurrent {
namespace ssd_chunk {

constexpr int THREADS = 128, ROWS = 64;

template <typename Input, int WIDTH>
struct Shared {
  static constexpr int X_STRIDE = ROWS + 8, N_STRIDE = WIDTH + 8;
  alignas(16) Input x[SSD_CHUNK * X_STRIDE];
  alignas(16) Input b[SSD_CHUNK * N_STRIDE], c[SSD_CHUNK * N_STRIDE], state[ROWS * N_STRIDE];
  SsdDecays decays;
};

template <typename Input>
__device__ __forceinline__ uint32_t Pair(float x, float y) {
  const float both[2] = {x, y};
  const auto v = RoundTo<Input, 2>(both);
  return *reinterpret_cast<const uint32_t*>(&v);
}

/// Copy rows of tokens to shared memory: zeros past the chunk's end and past `width` columns.
template <typename Input>
__device__ __forceinline__ void StageTokens(Input* to, int stride, const Input* from, int64_t token, int length,
                                            int columns, int width, bool is_aligned) {
  using V = Vec<Input, 8>;
  for (int i = threadIdx.x; i < SSD_CHUNK * (columns / 8); i += THREADS) {
    const int row = i / (columns / 8), column = i % (columns / 8) * 8;
    V v = V::Zero();
    const Input* source = from + row * token + column;
    if (row < length && is_aligned && column + 8 <= width) {
      v = V::Load(source);
    } else if (row < length) {
      for (int j = 0; j < 8 && column + j < width; ++j) v[j] = source[j];
    }
    v.Store(to + row * stride + column);
  }
}

template <typename Input, int WIDTH>
__global__ void __launch_bounds__(THREADS) SsdKernel(const __grid_constant__ SsdParams<Input> p, bool is_aligned) {
  using Sh = Shared<Input, WIDTH>;
  extern __shared__ __align__(16) uint8_t raw_shared[];
  Sh& shared = *reinterpret_cast<Sh*>(raw_shared);
  const int head = blockIdx.x % p.heads, group = head / p.heads_per_group, block_row = blockIdx.y * ROWS;
  const int64_t n = blockIdx.x / p.heads;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, lane_row = lane / 4, lane_column = lane % 4 * 2;
  const SsdSequence s = FindSsdSequence(p, n);

  // Rows 16 * warp + lane_row and 8 below of the state, columns 8 t + lane_column and its neighbour.
  float state[WIDTH / 8][4];
  const auto row_of = [&](int half) { return block_row + warp * 16 + half * 8 + lane_row; };
#pragma unroll
  for (int t = 0; t < WIDTH / 8; ++t) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = row_of(i / 2), column = t * 8 + lane_column + i % 2;
      const bool exists = p.initial.data != nullptr && row < p.dim && column < p.dstate;
      state[t][i] =
          exists ? SsdLoad(p.initial, n * p.initial.row + (int64_t(head) * p.dim + row) * p.dstate + column) : 0.f;
    }
  }
  const auto store = [&](const SsdStates& to, int64_t index) {
#pragma unroll
    for (int t = 0; t < WIDTH / 8; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = row_of(half), column = t * 8 + lane_column;
        if (row >= p.dim || column >= p.dstate) continue;
        SsdStore(to, index * to.row + (int64_t(head) * p.dim + row) * p.dstate + column, state[t][2 * half],
                 state[t][2 * half + 1]);
      }
    }
  };
  // Addresses of ldmatrix: lane l has row l % 8 of matrix l / 8.
  const int matrix = lane / 8, matrix_row = lane % 8;
  const auto address = [&](const Input* base, int stride, int row, int column) {
    return ptx::SharedAddress(base + row * stride + column);
  };

  for (int64_t at = s.begin; at < s.end;) {
    const int length = SsdChunkLength(s, at);
    __syncthreads();  // the chunk before has been read
    StageTokens(shared.x, Sh::X_STRIDE, p.x.data + s.batch * p.x.batch + at * p.x.token + head * p.x.head + block_row,
                p.x.token, length, ROWS, p.dim - block_row, is_aligned);
    StageTokens(shared.b, Sh::N_STRIDE, p.b.data + s.batch * p.b.batch + at * p.b.token + group * p.b.head, p.b.token,
                length, WIDTH, p.dstate, is_aligned);
    StageTokens(shared.c, Sh::N_STRIDE, p.c.data + s.batch * p.c.batch + at * p.c.token + group * p.c.head, p.c.token,
                length, WIDTH, p.dstate, is_aligned);
#pragma unroll
    for (int t = 0; t < WIDTH / 8; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        *reinterpret_cast<uint32_t*>(
            &shared.state[(warp * 16 + half * 8 + lane_row) * Sh::N_STRIDE + t * 8 + lane_column]) =
            Pair<Input>(state[t][2 * half], state[t][2 * half + 1]);
      }
    }
    if (warp == 0) {  // these two are read again each time: in registers they would make others spill
      const float a = p.a[head], bias = p.dt_bias.data == nullptr ? 0.f : WeightAt(p.dt_bias, head * p.dt_bias.head);
      ChunkDecays(ChunkDt(p, s, at, length, 2 * lane, head, bias), ChunkDt(p, s, at, length, 2 * lane + 1, head, bias),
                  a, shared.decays);
    }
    __syncthreads();

    // scores = C B^T and y = C S^T, for 16 tokens of this warp.
    float scores[SSD_CHUNK / 8][4] = {}, y[ROWS / 8][4] = {};
    const int token0 = warp * 16;
#pragma unroll
    for (int k = 0; k < WIDTH; k += 16) {
      uint32_t c[4], b[4];
      ptx::LdMatrix(c, address(shared.c, Sh::N_STRIDE, token0 + matrix % 2 * 8 + matrix_row, k + matrix / 2 * 8));
#pragma unroll
      for (int j = 0; j < SSD_CHUNK; j += 16) {
        if (j > token0) continue;  // later tokens than all of this warp's
        ptx::LdMatrix(b, address(shared.b, Sh::N_STRIDE, j + matrix / 2 * 8 + matrix_row, k + matrix % 2 * 8));
        ptx::Mma<Input>(scores[j / 8], c, b[0], b[1]);
        ptx::Mma<Input>(scores[j / 8 + 1], c, b[2], b[3]);
      }
#pragma unroll
      for (int j = 0; j < ROWS; j += 16) {
        ptx::LdMatrix(b, address(shared.state, Sh::N_STRIDE, j + matrix / 2 * 8 + matrix_row, k + matrix % 2 * 8));
        ptx::Mma<Input>(y[j / 8], c, b[0], b[1]);
        ptx::Mma<Input>(y[j / 8 + 1], c, b[2], b[3]);
      }
    }
    __syncwarp();
    const float* g = shared.decays.g;
    const int rows[2] = {token0 + lane_row, token0 + lane_row + 8};
    const float g_row[2] = {g[rows[0]], g[rows[1]]};
#pragma unroll
    for (int j = 0; j < ROWS / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) y[j][i] *= shared.decays.from_begin[rows[i / 2]];
    }
#pragma unroll
    for (int j = 0; j < SSD_CHUNK; j += 16) {
      if (j > token0) continue;
      uint32_t weights[4], x[4];
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        float w[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int column = j + part * 8 + lane_column + i % 2;
          const float decay = ptx::Exp2(g_row[i / 2] - g[column]) * shared.decays.dt[column];
          w[i] = column <= rows[i / 2] ? scores[j / 8 + part][i] * decay : 0.f;
        }
        weights[part * 2] = Pair<Input>(w[0], w[1]);
        weights[part * 2 + 1] = Pair<Input>(w[2], w[3]);
      }
#pragma unroll
      for (int r = 0; r < ROWS; r += 16) {
        ptx::LdMatrixTrans(x, address(shared.x, Sh::X_STRIDE, j + matrix % 2 * 8 + matrix_row, r + matrix / 2 * 8));
        ptx::Mma<Input>(y[r / 8], weights, x[0], x[1]);
        ptx::Mma<Input>(y[r / 8 + 1], weights, x[2], x[3]);
      }
    }
#pragma unroll
    for (int j = 0; j < ROWS / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = rows[i / 2], local = j * 8 + lane_column + i % 2, row = block_row + local;
        if (token >= length || row >= p.dim) continue;
        float result = y[j][i];
        if (p.d.data != nullptr) {
          result += WeightAt(p.d, head * p.d.head + row * p.d.row) * ToFloat(shared.x[token * Sh::X_STRIDE + local]);
        }
        if (p.z.data != nullptr) {
          const float z = ToFloat(p.z.data[s.batch * p.z.batch + (at + token) * p.z.token + head * p.z.head + row]);
          result *= z * Sigmoid(z);
        }
        p.out.data[s.batch * p.out.batch + (at + token) * p.out.token + head * p.out.head + row * p.out_row] =
            FromFloat<Input>(result);
      }
    }

    // The state after the chunk. Its loads, hoisted over the outputs, would spill.
    __syncwarp();
    const float whole = shared.decays.whole;
#pragma unroll
    for (int t = 0; t < WIDTH / 8; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) state[t][i] *= whole;
    }
#pragma unroll
    for (int k = 0; k < SSD_CHUNK; k += 16) {
      uint32_t x[4], b[4], weighted[4];
      // X^T: rows are those of the state, columns tokens.
      ptx::LdMatrixTrans(x,
                         address(shared.x, Sh::X_STRIDE, k + matrix / 2 * 8 + matrix_row, warp * 16 + matrix % 2 * 8));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 w = *reinterpret_cast<const float2*>(&shared.decays.to_end[k + i / 2 * 8 + lane_column]);
        const auto pair = *reinterpret_cast<const Vec<Input, 2>*>(&x[i]);
        weighted[i] = Pair<Input>(pair.Float(0) * w.x, pair.Float(1) * w.y);
      }
#pragma unroll
      for (int t = 0; t < WIDTH; t += 16) {
        ptx::LdMatrixTrans(b, address(shared.b, Sh::N_STRIDE, k + matrix % 2 * 8 + matrix_row, t + matrix / 2 * 8));
        ptx::Mma<Input>(state[t / 8], weighted, b[0], b[1]);
        ptx::Mma<Input>(state[t / 8 + 1], weighted, b[2], b[3]);
      }
    }
    at += length;
    if (at == s.keep) store(p.kept, s.keep_slot);
  }
  if (p.final.data != nullptr) store(p.final, blockIdx.x / p.heads);
}

template <int WIDTH, typename Input>
Status Launch(const SsdParams<Input>& p, Stream stream) {
  const int64_t blocks = int64_t(p.sequences) * p.heads;
  if (blocks == 0 || p.dim == 0) return cudaSuccess;
  const auto aligns = [](const auto& t) {
    return t.batch % 8 == 0 && t.token % 8 == 0 && t.head % 8 == 0 && IsAligned(t.data, 16);
  };
  constexpr size_t BYTES = sizeof(Shared<Input, WIDTH>);
  const cudaError_t status =
      cudaFuncSetAttribute(SsdKernel<Input, WIDTH>, cudaFuncAttributeMaxDynamicSharedMemorySize, int(BYTES));
  if (status != cudaSuccess) return status;
  return LaunchShared(SsdKernel<Input, WIDTH>, dim3(blocks, CeilDiv(p.dim, ROWS)), dim3(THREADS), BYTES, false, stream,
                      p, aligns(p.x) && aligns(p.b) && aligns(p.c));
}

}  // namespace ssd_chunk
}  // namespace recurrent
}  // namespace flashinfer
