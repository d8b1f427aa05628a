// SPDX-License-Identifier: Apache-2.0
// GEMM of bf16 or e4m3 tokens with four-bit weights: weights are the M side of wgmma, as fragments in registers, and tokens the N
// side. TMA loads packed weights, their scales and tokens to a ring, 128 of K per stage; each consumer warpgroup decodes
// 64 rows of weights, 64 of K at a time, while the tensor cores multiply the 64 before.
//   d[token][row] = sum over k of a[token][k] * code[row][k] * scale[row][k / group]
//   stage: tokens (2 slabs of TOKENS x 64, or one of TOKENS x 128 of e4m3) | codes of warpgroup 0, of 1 ... (4 strips x 1 KB); scales in an array of their own
//   a tile of 128 weights has two consumer warpgroups; one of 256 has four, of which some decode while others multiply, and
//   reads tokens half as often, but does not split K
//   bound by decoding for few tokens and by products for 128; they overlap (docs/performance/moe.md)
//   test  pytest tests/hopper/test_emulated_w4.py      bench  python benchmarks/bench_fused_moe.py -k mxfp4
#pragma once
#include "producer.cuh"
#include "stream.cuh"

namespace flashinfer {
namespace gemm {

template <WeightCode TYPE_, int TOKENS_, int WEIGHTS_>
struct W4Traits {
  static constexpr WeightCode TYPE = TYPE_;
  static constexpr int TOKENS = TOKENS_, WEIGHTS = WEIGHTS_, GROUPS = WEIGHTS / W4_GROUP_ROWS;  // consumer warpgroups
  static constexpr bool IS_E4M3 = TakesE4M3(TYPE);
  static constexpr ptx::WgmmaType PRODUCT = IS_E4M3 ? ptx::WgmmaType::kE4m3 : ptx::WgmmaType::kBf16;
  static constexpr int STEPS = IS_E4M3 ? 2 : 4;  // products of 64 of K
  // Halves of a stage whose fragments a thread keeps: with one, the next half is decoded when products have ended.
  static constexpr int FRAGMENT_BUFFERS = (WEIGHTS > W4_WEIGHTS && TOKENS > 64 && !IS_E4M3) ? 1 : 2;
  // Tokens of a load; those that no row needs are left out.
  static constexpr int BOX_TOKENS = TOKENS % 64 == 0 ? 64 : TOKENS % 32 == 0 ? 32 : TOKENS;
  static constexpr int SLABS = W4Slabs(TYPE),
                       BOX_SLABS = BOX_TOKENS == TOKENS ? SLABS : 1;  // slabs of a stage, slabs of a load
  static constexpr int SLAB_BYTES = TOKENS * SLAB_K_BYTES, TOKEN_BYTES = SLABS * SLAB_BYTES;
  static constexpr int HALF_BYTES = IS_E4M3 ? SLAB_K_BYTES / 2 : SLAB_BYTES;  // distance of 64 of K and the next 64
  static constexpr int CODE_BYTES = GROUPS * W4_CODE_BYTES;
  static constexpr int STAGE_BYTES = TOKEN_BYTES + CODE_BYTES;
  static constexpr int SCALE_BYTES = GROUPS * ScaleBytes(TYPE);
  static constexpr int THREADS = (1 + GROUPS) * WARPGROUP, BLOCKS_PER_SM = 1, PRODUCERS = 1;
  // Of five warpgroups, 32 * 128 + 112 * 512 = 96 * 640.
  static constexpr int PRODUCER_REGISTERS = WEIGHTS > W4_WEIGHTS ? 32 : SWAPPED_PRODUCER_REGISTERS;
  static constexpr int CONSUMER_REGISTERS = WEIGHTS > W4_WEIGHTS ? 112 : SWAPPED_CONSUMER_REGISTERS;
  static constexpr bool ENCODES = false;  // tokens are loaded as they are (see SwappedTraits)
  static constexpr int MAX_SPLIT =
      WEIGHTS > W4_WEIGHTS || TOKENS > W4_SPLIT_TOKENS ? 1 : SplitBuffer<TOKENS>::MAX_SPLIT;
  static constexpr bool CAN_SPLIT = MAX_SPLIT > 1;
  static constexpr int SPLIT_BYTES = CAN_SPLIT ? SplitBuffer<TOKENS>::MaxBytes() : 0;
  static constexpr int SWAPS_BYTES = GROUPS / 2 * SWAP_BYTES;
  static constexpr int RING_BYTES = MAX_SHARED_BYTES - 1024 - BARRIER_BYTES - SPLIT_BYTES - SWAPS_BYTES;
  static constexpr int STAGES = RING_BYTES / (STAGE_BYTES + SCALE_BYTES);
  static constexpr int SHARED_BYTES =
      1024 + BARRIER_BYTES + STAGES * (STAGE_BYTES + SCALE_BYTES) + SPLIT_BYTES + SWAPS_BYTES;
  static constexpr int SPLIT_BARRIERS = BARRIER_BYTES - 64;  // byte offset of the barriers of SplitSum
  static_assert(2 * STAGES * 8 <= SPLIT_BARRIERS && STAGE_BYTES % 1024 == 0 && STAGES >= 3, "tile shape");
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/// Memory of a consumer warpgroup's stage 0.
struct W4Stage {
  const unsigned char *codes, *scales;  // the thread's codes, the warpgroup's scales
  uint64_t tokens;                      // wgmma descriptor
};

/// Compute acc = the sum over `k_blocks` stages. With two buffers of fragments, the products of 64 of K are in flight while
/// the next 64 are decoded. A stage is released when the next one is read and its own products have ended.
template <typename Traits>
__device__ __forceinline__ void SumPacked(float (&acc)[Traits::TOKENS / 2], const hopper::Ring<Traits::STAGES>& ring,
                                          hopper::RingPosition<Traits::STAGES>& at, const W4Stage& from, int k_blocks) {
  constexpr int BUFFERS = Traits::FRAGMENT_BUFFERS;
  uint32_t fragments[BUFFERS][Traits::STEPS][4];
  int previous = 0;
  for (int kb = 0; kb < k_blocks; ++kb) {
    ring.WaitFull(at);
    const FragmentDecoder<Traits::TYPE> decoder(from.scales + at.stage * Traits::SCALE_BYTES);
    const unsigned char* const codes = from.codes + at.stage * Traits::STAGE_BYTES;
    const uint64_t tokens = hopper::AdvanceDescriptor(from.tokens, at.stage * Traits::STAGE_BYTES);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const unsigned char* const from_codes = codes + half * W4_BLOCK_BYTES;
      const uint4 words = *reinterpret_cast<const uint4*>(from_codes);
      ptx::WgmmaWait<BUFFERS - 1>();  // the fragments to come are free
      if (half == BUFFERS - 1 && kb > 0) ring.Release(previous, 1);
      decoder.Decode(words, from_codes, half, fragments[half % BUFFERS]);
      ptx::WgmmaFence();
#pragma unroll
      for (int k = 0; k < Traits::STEPS; ++k) {
        ptx::Wgmma<Traits::PRODUCT, Traits::TOKENS>::Run(
            acc, fragments[half % BUFFERS][k],
            hopper::AdvanceDescriptor(tokens, half * Traits::HALF_BYTES + k * hopper::WGMMA_K_BYTES),
            kb > 0 || half > 0 || k > 0);
      }
      ptx::WgmmaCommit();
    }
    previous = at.stage;
    at.Advance();
  }
  ptx::WgmmaWait<0>();
  ptx::WgmmaPin(acc);
  ring.Release(previous, 1);
}

template <typename Traits>
class W4Consumer {
 public:
  static constexpr int TOKENS = Traits::TOKENS;
  using Split = SplitSum<Traits::CAN_SPLIT ? TOKENS : 8>;

  __device__ __forceinline__ W4Consumer(const GemmParams& p, const hopper::Ring<Traits::STAGES>& ring,
                                        const W4Stage& stage, const Split& split, HalvesSwap swap,
                                        const W4Rows<Traits::WEIGHTS>& rows)
      : p_(p), ring_(ring), stage_(stage), split_(split), swap_(swap), rows_(rows) {}

  /// Compute a part of a tile.
  __device__ __forceinline__ void Run(const TilePart& part, hopper::RingPosition<Traits::STAGES>& at) {
    if (Traits::WEIGHTS > W4_WEIGHTS && rows_.Column(p_, part.tile) >= p_.n) {  // n is a multiple of 128
      for (int kb = part.first; kb < part.end; ++kb, at.Advance()) {
        ring_.WaitFull(at);
        ring_.Release(at.stage, 1);
      }
      return;
    }
    float acc[TOKENS / 2];
    SumPacked<Traits>(acc, ring_, at, stage_, part.end - part.first);
    if (p_.cluster > 1 && turn_ == 0) ptx::ClusterWait();  // barriers of the other blocks are initialised
    StoreW4<Traits>(p_, part.tile, swap_, rows_, [&](const auto& finish) { Add(acc, finish); });
    ++turn_;
  }

  __device__ __forceinline__ uint32_t turn() const { return turn_; }

 private:
  /// Call finish(fragment, sums) for the fragments that this block stores.
  template <typename Finish>
  __device__ __forceinline__ void Add(float (&acc)[TOKENS / 2], const Finish& finish) {
    if constexpr (Traits::CAN_SPLIT) {
      split_.Add(acc, turn_, finish);
    } else {
#pragma unroll
      for (int j = 0; j < TOKENS / 8; ++j) {
        float sum[4] = {acc[4 * j], acc[4 * j + 1], acc[4 * j + 2], acc[4 * j + 3]};
        finish(j, sum);
      }
    }
  }

  const GemmParams& p_;
  const hopper::Ring<Traits::STAGES>& ring_;
  const W4Stage stage_;
  const Split& split_;
  HalvesSwap swap_;
  const W4Rows<Traits::WEIGHTS> rows_;
  uint32_t turn_ = 0;
};

#endif

template <typename Traits>
__global__ void __launch_bounds__(Traits::THREADS, 1) GemmW4Sm90Kernel(const __grid_constant__ W4Params params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ unsigned char shared[];
  const GemmParams& p = params.gemm;
  const hopper::AlignedMemory memory = hopper::Aligned(shared);
  const uint32_t base = memory.base;
  unsigned char* const aligned = memory.data;
  const hopper::Ring<Traits::STAGES> ring{base};
  constexpr int SCALES = BARRIER_BYTES + Traits::STAGES * Traits::STAGE_BYTES;
  constexpr int BUFFER = SCALES + Traits::STAGES * Traits::SCALE_BYTES;
  const typename W4Consumer<Traits>::Split split(aligned + Traits::SPLIT_BARRIERS, aligned + BUFFER, p.cluster);
  if (threadIdx.x == 0) {
    ptx::PrefetchTensorMap(&p.weights);
    ptx::PrefetchTensorMap(&p.tokens);
    ptx::PrefetchTensorMap(&params.scales);
    ring.Init(Traits::GROUPS * WARPGROUP / 32);
    split.Init();
  }
  __syncthreads();
  if (p.cluster > 1) ptx::ClusterArriveRelaxed();  // consumers wait before they send the first accumulators
  if (!p.weights_first) ptx::GridDependencyWait();
  ptx::LaunchDependents();
  const auto produce = [&] {
    if (threadIdx.x < 32) ProduceW4<Traits>(params, ring, base + BARRIER_BYTES, base + SCALES, 0);
    __syncwarp();
    if (p.cluster > 1) ptx::ClusterWait();
  };
  const auto consume = [&](int group) {
    const W4Rows<Traits::WEIGHTS> rows{group};
    const int warp = int(threadIdx.x) % WARPGROUP / 32, lane = threadIdx.x % 32;
    const int codes = Traits::TOKEN_BYTES + group * W4_CODE_BYTES + warp * W4_STRIP_WORDS * 4 + lane * 16;
    const W4Stage stage = {aligned + BARRIER_BYTES + codes, aligned + SCALES + group * ScaleBytes(Traits::TYPE),
                           hopper::DescriptorKMajor(base + BARRIER_BYTES)};
    const HalvesSwap swap(aligned + BUFFER + Traits::SPLIT_BYTES, rows.Pair());
    W4Consumer<Traits> consumer(p, ring, stage, split, swap, rows);
    ForEachPart<Traits>(
        p, [&](const TilePart& part, hopper::RingPosition<Traits::STAGES>& at) { consumer.Run(part, at); });
    if (p.cluster > 1 && consumer.turn() == 0) ptx::ClusterWait();
  };
  hopper::RunRoles<Traits::PRODUCER_REGISTERS, Traits::CONSUMER_REGISTERS>(produce, consume);
  if (p.cluster > 1) ptx::ClusterSync();  // the other blocks may still write to this one
#endif
}

/// Compute d = a b^T with tiles of up to TOKENS tokens by 128 or 256 weights.
template <WeightCode TYPE, int TOKENS, int WEIGHTS>
Status GemmW4Sm90(const W4Problem& problem, const GemmConfig& config, Stream stream) {
  if (problem.m == 0 || problem.n == 0 || problem.batch == 0) return cudaSuccess;
  if (problem.grouping != Grouping::kPacked || problem.n % SWAPPED_WEIGHTS != 0 || problem.k % W4_BLOCK_K != 0 ||
      problem.k == 0 || problem.bias != nullptr || problem.weight_indices != nullptr) {
    return cudaErrorInvalidValue;
  }
  if constexpr (TOKENS <= W4_STREAM_TOKENS && WEIGHTS == W4_WEIGHTS && !TakesE4M3(TYPE)) {
    using Traits = W4StreamTraits<TYPE, TOKENS>;
    return LaunchW4<Traits, GemmW4StreamSm90Kernel<Traits>>(problem, config, stream);
  } else {
    using Traits = W4Traits<TYPE, TOKENS, WEIGHTS>;
    return LaunchW4<Traits, GemmW4Sm90Kernel<Traits>>(problem, config, stream);
  }
}

}  // namespace gemm
}  // namespace flashinfer
