// SPDX-License-Identifier: Apache-2.0
// Index scores on CUDA, SM80 and later; formulas and parameters in mqa_logits.h. Hopper has a kernel of its own
// (mqa_logits_sm90/) for what TMA can read.
//
// A warp computes 16 keys of a request, for all slots: keys are the rows of m16n8k16, eight heads the columns. e4m3 becomes
// half, exactly. Where a step of k takes its numbers from is free if both operands agree, so a lane loads eight bytes at
// once, and each of the four lanes of a row a quarter of 32 bytes. Keys stay in registers; queries come from L1.
//   test  pytest tests/indexer      bench  python benchmarks/bench_indexer.py
#pragma once
#include "../ptx/mma.cuh"
#include "../ptx/pdl.cuh"
#include "../utils.cuh"
#include "load_e4m3.cuh"
#include "schedule.cuh"
#include "sum_heads.cuh"

namespace flashinfer {
namespace indexer {

constexpr int WARPS = 4, WARP_KEYS = 16;
constexpr int BLOCK_KEYS = WARPS * WARP_KEYS;

/// Grid (blocks of 64 keys, requests).
template <int DIM, bool ALIGNED>
__global__ void __launch_bounds__(WARPS * 32) MqaLogitsKernel(const __grid_constant__ MqaLogitsParams p) {
  constexpr int GROUPS = DIM / 32;  // groups of 32 bytes, two steps of k each
  ptx::GridDependencyWait();
  ptx::LaunchDependentsOfFew();
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32, row = lane / 4, chain = lane % 4;
  const int quads = p.heads / CHAINS, columns = p.heads * p.next_n;
  for (int b = blockIdx.y; b < p.batch; b += gridDim.y) {
    const int length = LengthOf(p, b);
    for (int64_t first = int64_t(blockIdx.x) * BLOCK_KEYS + warp * WARP_KEYS; first < length;
         first += int64_t(gridDim.x) * BLOCK_KEYS) {
      uint32_t keys[GROUPS][2][4];
      float scale[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int pos = int(first) + row + 8 * half;
        int page = 0;
        bool exists = pos < length;
        if (exists) page = p.block_tables[b * p.table_stride + pos / p.block_size];
        exists = exists && page >= 0 && page < p.pages;
        const uint8_t* bytes = p.kv + (exists ? page * p.kv_stride_page : 0);
        const int slot = pos % p.block_size;
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
          const uint2 x = LoadBytes<ALIGNED>(bytes + slot * DIM + g * 32 + chain * 8, exists);
          Halves(x.x, keys[g][0][half], keys[g][0][half + 2]);
          Halves(x.y, keys[g][1][half], keys[g][1][half + 2]);
        }
        scale[half] = 0.f;
        if (exists) {
          const uint8_t* at = bytes + p.block_size * DIM + slot * 4;
          if constexpr (ALIGNED) {
            scale[half] = *reinterpret_cast<const float*>(at);
          } else {
            scale[half] = __uint_as_float(at[0] | uint32_t(at[1]) << 8 | uint32_t(at[2]) << 16 | uint32_t(at[3]) << 24);
          }
        }
      }
      ChainSums sums;
      int quad = 0, t = 0;  // quads of heads of this slot that were added, and the slot
      for (int column = 0; column < columns; column += 8) {
        const int head_row = RowOfColumn(column + row);
        const uint8_t* from = reinterpret_cast<const uint8_t*>(p.q) + b * p.q_stride_b +
                              head_row / p.heads * p.q_stride_t + head_row % p.heads * p.q_stride_h + chain * 8;
        float products[4] = {};
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
          const uint2 x = LoadBytes<ALIGNED>(from + g * 32, true);
          uint32_t low, high;
          Halves(x.x, low, high);
          ptx::Mma<__half>(products, keys[g][0], low, high);
          Halves(x.y, low, high);
          ptx::Mma<__half>(products, keys[g][1], low, high);
        }
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int64_t out_row = int64_t(b) * p.next_n + t;
          const float weight = p.weights[out_row * p.weights_stride + (quad * CHAINS + chain) * p.weights_stride_h];
          sums.Add(weight, products[e], products[e + 2]);
          if (++quad == quads) {
            const float total = sums.Total() * (chain == 0 ? scale[0] : scale[1]);
            const int pos = int(first) + row + 8 * chain;
            if (chain < 2 && pos < length) StoreScore(p, out_row, pos, total);
            sums = ChainSums();
            quad = 0, ++t;
          }
        }
      }
    }
  }
}

template <int DIM>
Status LaunchMqaLogits(const MqaLogitsParams& p, Stream stream) {
  const auto aligned = [](const void* x) { return reinterpret_cast<uintptr_t>(x) % 8 == 0; };
  const bool is_aligned = aligned(p.q) && aligned(p.kv) && p.kv_stride_page % 8 == 0 && p.q_stride_b % 8 == 0 &&
                          p.q_stride_t % 8 == 0 && p.q_stride_h % 8 == 0;
  const dim3 grid(unsigned(std::min<int64_t>(CeilDiv(p.max_len, BLOCK_KEYS), 1 << 20)),
                  unsigned(std::min(p.batch, 65535)));
  const dim3 block(WARPS * 32);
  return is_aligned ? Launch(MqaLogitsKernel<DIM, true>, grid, block, p.enable_pdl, stream, p)
                    : Launch(MqaLogitsKernel<DIM, false>, grid, block, p.enable_pdl, stream, p);
}

}  // namespace indexer

FLASHINFER_INLINE Status MqaLogits(const MqaLogitsParams& p, Stream stream) {
  if (p.max_len == 0) return cudaSuccess;
  switch (p.dim) {
    case 32:
      return indexer::LaunchMqaLogits<32>(p, stream);
    case 64:
      return indexer::LaunchMqaLogits<64>(p, stream);
    case 96:
      return indexer::LaunchMqaLogits<96>(p, stream);
    case 128:
      return indexer::LaunchMqaLogits<128>(p, stream);
    case 160:
      return indexer::LaunchMqaLogits<160>(p, stream);
    case 192:
      return indexer::LaunchMqaLogits<192>(p, stream);
    case 224:
      return indexer::LaunchMqaLogits<224>(p, stream);
    case 256:
      return indexer::LaunchMqaLogits<256>(p, stream);
    default:
      return cudaErrorInvalidValue;  // the launcher has checked it
  }
}

}  // namespace flashinfer
