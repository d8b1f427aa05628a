// SPDX-License-Identifier: Apache-2.0
// Index scores over ragged keys on CUDA, SM80 and later; formulas and parameters in mqa_logits.h.
//
// A warp has 16 keys in registers, as halves, and computes them for eight tokens: keys are the rows of m16n8k16, heads of the
// tokens, one token after the other, the columns. Operands and sums over heads are those of mqa_logits.cuh. A block of keys that
// none of its tokens sees ends at once, so a causal mask costs half of the products.
//   test  pytest tests/indexer/test_ragged_mqa_logits.py      bench  python benchmarks/bench_indexer.py -k ragged
#pragma once
#include "../ptx/mma.cuh"
#include "../ptx/pdl.cuh"
#include "../utils.cuh"
#include "load_e4m3.cuh"
#include "sum_heads.cuh"

namespace flashinfer {
namespace indexer {
namespace ragged {

constexpr int WARPS = 4, WARP_KEYS = 16, TOKENS = 8;
constexpr int BLOCK_KEYS = WARPS * WARP_KEYS;

/// Grid (blocks of 64 keys, groups of eight tokens).
template <int DIM, bool ALIGNED>
__global__ void __launch_bounds__(WARPS * 32) Kernel(const __grid_constant__ RaggedMqaLogitsParams p) {
  constexpr int GROUPS = DIM / 32;  // groups of 32 bytes, two steps of k each
  ptx::GridDependencyWait();
  ptx::LaunchDependentsOfFew();
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32, row = lane / 4, chain = lane % 4;
  const int key0 = int(blockIdx.x) * BLOCK_KEYS + warp * WARP_KEYS, quads = p.heads / CHAINS;
  const int groups = (p.tokens + TOKENS - 1) / TOKENS;
  for (int group = blockIdx.y; group < groups; group += gridDim.y) {
    const int token0 = group * TOKENS, tokens = min(TOKENS, p.tokens - token0);
    const bool has_token = lane < tokens;
    const int from = has_token ? StartOf(p, token0 + lane) : 0, to = has_token ? EndOf(p, token0 + lane) : 0;
    if (!__any_sync(~0u, from < key0 + WARP_KEYS && to > key0 && from < to)) continue;

    uint32_t keys[GROUPS][2][4];
    float scale[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int j = key0 + row + 8 * half;
      const bool exists = j < p.keys;
      const auto* bytes = reinterpret_cast<const uint8_t*>(p.k) + (exists ? j * p.k_stride : 0) + chain * 8;
#pragma unroll
      for (int g = 0; g < GROUPS; ++g) {
        const uint2 x = LoadBytes<ALIGNED>(bytes + g * 32, exists);
        Halves(x.x, keys[g][0][half], keys[g][0][half + 2]);
        Halves(x.y, keys[g][1][half], keys[g][1][half + 2]);
      }
      scale[half] = exists ? p.scales[j * p.scales_stride] : 0.f;
    }
    ChainSums sums;
    int quad = 0, t = 0;  // quads of heads of this token that were added, and the token within the group
    for (int column = 0; column < p.heads * tokens; column += 8) {
      const int head_row = RowOfColumn(column + row), of = head_row / p.heads;
      const bool exists = of < tokens;  // the last group of eight may be half full
      const auto* q = reinterpret_cast<const uint8_t*>(p.q) +
                      (exists ? (token0 + of) * p.q_stride_n + head_row % p.heads * p.q_stride_h : 0) + chain * 8;
      float products[4] = {};
#pragma unroll
      for (int g = 0; g < GROUPS; ++g) {
        const uint2 x = LoadBytes<ALIGNED>(q + g * 32, exists);
        uint32_t low, high;
        Halves(x.x, low, high);
        ptx::Mma<__half>(products, keys[g][0], low, high);
        Halves(x.y, low, high);
        ptx::Mma<__half>(products, keys[g][1], low, high);
      }
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (t >= tokens) break;
        const int64_t token = token0 + t;
        const float weight = p.weights[token * p.weights_stride + (quad * CHAINS + chain) * p.weights_stride_h];
        sums.Add(weight, products[e], products[e + 2]);
        if (++quad == quads) {
          const float total = sums.Total() * (chain == 0 ? scale[0] : scale[1]);
          const int j = key0 + row + 8 * chain;  // key of a lane with chain 0 or 1
          const int start = __shfl_sync(~0u, from, t), end = __shfl_sync(~0u, to, t);  // all lanes shuffle
          if (chain < 2 && j >= start && j < end) StoreScore(p, token, j, total);
          sums = ChainSums();
          quad = 0, ++t;
        }
      }
    }
  }
}

template <int DIM>
Status LaunchDim(const RaggedMqaLogitsParams& p, Stream stream) {
  const auto aligned = [](const void* x) { return reinterpret_cast<uintptr_t>(x) % 8 == 0; };
  const bool is_aligned =
      aligned(p.q) && aligned(p.k) && p.k_stride % 8 == 0 && p.q_stride_n % 8 == 0 && p.q_stride_h % 8 == 0;
  const dim3 grid(unsigned(CeilDiv(p.keys, BLOCK_KEYS)), unsigned(std::min<int64_t>(CeilDiv(p.tokens, TOKENS), 65535)));
  return is_aligned ? Launch(Kernel<DIM, true>, grid, dim3(WARPS * 32), p.enable_pdl, stream, p)
                    : Launch(Kernel<DIM, false>, grid, dim3(WARPS * 32), p.enable_pdl, stream, p);
}

}  // namespace ragged
}  // namespace indexer

FLASHINFER_INLINE Status RaggedMqaLogits(const RaggedMqaLogitsParams& p, Stream stream) {
  using namespace indexer::ragged;
  if (p.keys == 0) return cudaSuccess;
  switch (p.dim) {
    case 32:
      return LaunchDim<32>(p, stream);
    case 64:
      return LaunchDim<64>(p, stream);
    case 96:
      return LaunchDim<96>(p, stream);
    case 128:
      return LaunchDim<128>(p, stream);
    case 160:
      return LaunchDim<160>(p, stream);
    case 192:
      return LaunchDim<192>(p, stream);
    case 224:
      return LaunchDim<224>(p, stream);
    case 256:
      return LaunchDim<256>(p, stream);
    default:
      return cudaErrorInvalidValue;  // the launcher has checked it
  }
}

}  // namespace flashinfer
