// SPDX-License-Identifier: Apache-2.0
// GEMM of few bf16 tokens with four-bit weights, which reads weights at the rate of DRAM. Weights are the M side of mma.sync:
// 16 bytes of codes in shared memory are a lane's fragments of 64 of K, so a warp decodes and multiplies with no exchange
// and no dependence on other warps. Each group of 64 rows has K_PARTS warps that take the stages of a tile in turn, with
// sums for all 64 rows; at the end of the tile they add their sums, in the order of the warps.
//   warps: 4 of rows 0 to 63, 4 of rows 64 to 127, then those beyond 4 of each, then the producers, which fill stages in turn
//   a token is read from shared memory once for 64 rows of weights; of two blocks on an SM, one loads and multiplies while
//   the other adds and stores accumulators
//   test  pytest tests/hopper/test_emulated_w4.py      bench  python benchmarks/bench_fused_moe.py -k mxfp4
#pragma once
#include "../../ptx/barrier.cuh"
#include "../../ptx/mma.cuh"
#include "producer.cuh"

namespace flashinfer {
namespace gemm {

template <WeightCode TYPE_, int TOKENS_>
struct W4StreamTraits {
  static constexpr WeightCode TYPE = TYPE_;
  static constexpr int TOKENS = TOKENS_, WEIGHTS = W4_WEIGHTS, FRAGMENTS = TOKENS / 8;
  static constexpr bool IS_E4M3 = false;
  static constexpr int SLABS = 2, BOX_SLABS = 2;  // slabs of a stage, slabs of a load
  // Tokens per load. Loads of 4 would read less where groups have few, with conflicts of banks.
  static constexpr int BOX_TOKENS = 8;
  static_assert(!TakesE4M3(TYPE), "tokens are bf16");
  // Warps per 64 rows of weights. 18 warps on an SM have 96 registers each, which int4 codes and 16 tokens exceed.
  static constexpr bool NEEDS_REGISTERS = TYPE == WeightCode::kInt4 && TOKENS == 16;
  static constexpr int K_PARTS = NEEDS_REGISTERS ? 6 : TOKENS <= 16 ? 4 : W4_STRIPS;
  static constexpr int BLOCKS_PER_SM = TOKENS <= 16 && !NEEDS_REGISTERS ? 2 : 1;
  // Warps that load, in turn. One took 1,620 clocks for the 6 loads of a stage that stages had once (H200).
  static constexpr int PRODUCERS = 2;
  static constexpr bool ENCODES = false;  // tokens are loaded as they are (see SwappedTraits)
  static constexpr int THREADS = (CONSUMERS * K_PARTS + PRODUCERS) * 32;
  // Two slabs of BOX_TOKENS tokens, two of the next, ...
  static constexpr int SLAB_BYTES = BOX_TOKENS * SLAB_K_BYTES, TOKEN_BYTES = 2 * TOKENS * SLAB_K_BYTES;
  static constexpr int CODE_BYTES = CONSUMERS * W4_CODE_BYTES;
  static constexpr int STAGE_BYTES = TOKEN_BYTES + CODE_BYTES;
  static constexpr int SCALE_BYTES = CONSUMERS * ScaleBytes(TYPE);
  static constexpr int MAX_SPLIT = W4_STREAM_MAX_SPLIT;
  static constexpr int SPLIT_BYTES = SplitBuffer<TOKENS>::BytesUpTo(MAX_SPLIT);
  // Accumulators of 16 rows by 8 tokens, from each warp to the warp that adds them. More fragments at a time would cost stages.
  static constexpr int SUM_BYTES = CONSUMERS * W4_STRIPS * (K_PARTS - 1) * 32 * 16;
  static constexpr int RING_BYTES =
      (MAX_SHARED_BYTES + 1024) / BLOCKS_PER_SM - 1024 - BARRIER_BYTES - SPLIT_BYTES - SUM_BYTES - SWAP_BYTES;
  static constexpr int FITTING = RING_BYTES / (STAGE_BYTES + SCALE_BYTES);
  static constexpr int STAGES = (FITTING < 24 ? FITTING : 24) / PRODUCERS * PRODUCERS;
  static constexpr int SHARED_BYTES =
      BARRIER_BYTES + STAGES * (STAGE_BYTES + SCALE_BYTES) + SPLIT_BYTES + SUM_BYTES + SWAP_BYTES;
  static constexpr int SPLIT_BARRIERS = BARRIER_BYTES - 64;  // byte offset of the barriers of SplitSum
  static_assert(K_PARTS >= W4_STRIPS && STAGE_BYTES % 1024 == 0 && 2 * STAGES * 8 <= SPLIT_BARRIERS, "tile shape");
  static_assert(STAGES >= K_PARTS && K_PARTS % PRODUCERS == 0, "SumStream() relies on it");
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/// Group of 64 rows of a consumer warp and its number in the group; producers have group CONSUMERS.
struct WarpRole {
  int group, part;
};

/// Return the role of a warp. The warps that add and store accumulators are the first eight, as in blocks of two warpgroups.
template <int K_PARTS>
__device__ __forceinline__ WarpRole RoleOf(int warp) {
  constexpr int ADDING = CONSUMERS * W4_STRIPS, MORE = K_PARTS - W4_STRIPS;
  if (warp < ADDING) return {warp / W4_STRIPS, warp % W4_STRIPS};
  if (warp >= CONSUMERS * K_PARTS) return {CONSUMERS, warp - CONSUMERS * K_PARTS};
  return {(warp - ADDING) / (MORE > 0 ? MORE : 1), W4_STRIPS + (warp - ADDING) % (MORE > 0 ? MORE : 1)};
}

/// Memory of a warp's 64 rows in stage 0.
struct W4StreamStage {
  const unsigned char *codes, *scales;  // first bytes that the lane reads
  uint32_t tokens;                      // address of the row of 16 bytes that the lane passes to ldmatrix
};

/// Add the products of 64 rows, 128 of K and 8 * USED tokens to acc[strip of 16 rows][8 tokens].
template <typename Traits, int USED, bool MAY_BE_LARGE>
__device__ __forceinline__ void MultiplyStage(float (&acc)[W4_STRIPS][Traits::FRAGMENTS][4],
                                              const FragmentDecoder<Traits::TYPE> (&decoders)[W4_STRIPS],
                                              const unsigned char* codes, uint32_t tokens) {
  constexpr int UNROLL = USED > 1 ? 1 : 2;  // unrolled, loads of the second half are moved up until registers spill
#pragma unroll UNROLL
  for (int half = 0; half < 2; ++half) {
    uint32_t b[USED][2][4];
#pragma unroll
    for (int j = 0; j < USED; ++j) {
#pragma unroll
      for (int q = 0; q < 2; ++q) {
        // 32 of K are 4 chunks of 16 bytes; the swizzle makes a difference of 4 chunks an exclusive or, and also one of 4
        // rows, which is where the second slab of a box of 4 tokens is.
        const int chunks = Traits::BOX_TOKENS == 4 ? (q ^ half) * 64 : q * 64;
        ptx::LdMatrix(b[j][q], (tokens ^ chunks) + half * Traits::SLAB_BYTES + j * 16 * SLAB_K_BYTES);
      }
    }
#pragma unroll
    for (int s = 0; s < W4_STRIPS; ++s) {
      const uint4 words = *reinterpret_cast<const uint4*>(codes + s * W4_STRIP_WORDS * 4 + half * W4_BLOCK_BYTES);
#pragma unroll
      for (int q = 0; q < 2; ++q) {
        uint32_t a[2][4];
        decoders[s].template DecodeGroup<MAY_BE_LARGE>(q == 0 ? words.x : words.z, q == 0 ? words.y : words.w,
                                                       2 * half + q, a);
#pragma unroll
        for (int k = 0; k < 2; ++k) {
#pragma unroll
          for (int j = 0; j < USED; ++j) ptx::Mma<__nv_bfloat16>(acc[s][j], a[k], b[j][q][2 * k], b[j][q][2 * k + 1]);
        }
      }
    }
  }
}

/// Sum the stages number first, first + K_PARTS, ... below `end` of those that this block has loaded. Other warps read the
/// turn before of a stage. Until it has landed, its parity reads as if the turn to come had: hence the wait until it was
/// read. That wait in turn needs the turn before the last to have been read, which is so: stage i - STAGES is loaded, after
/// a wait for that, by the producer of i - K_PARTS and before that one, which this warp has read; or it is of another tile.
template <typename Traits, int USED>
__device__ __forceinline__ void SumStream(float (&acc)[W4_STRIPS][Traits::FRAGMENTS][4],
                                          const hopper::Ring<Traits::STAGES>& ring, const W4StreamStage& from,
                                          uint32_t first, uint32_t end) {
#pragma unroll 1
  for (uint32_t i = first; i < end; i += Traits::K_PARTS) {
    const uint32_t turn = i / Traits::STAGES, stage = i - turn * Traits::STAGES;
    ptx::MbarrierWait(ring.Empty(stage), (turn + 1) % 2);
    ptx::MbarrierWait(ring.Full(stage), turn % 2);
    const uint4* const scales = reinterpret_cast<const uint4*>(from.scales + stage * Traits::SCALE_BYTES);
    const uint4 x = scales[0], y = Traits::TYPE == WeightCode::kInt4 ? uint4{} : scales[8];
    using Decoder = FragmentDecoder<Traits::TYPE>;
    const Decoder decoders[W4_STRIPS] = {Decoder(x.x, y.x), Decoder(x.y, y.y), Decoder(x.z, y.z), Decoder(x.w, y.w)};
    const bool is_large = Decoder::HasLarge((x.x | x.y) | (x.z | x.w) | (y.x | y.y) | (y.z | y.w));
    const unsigned char* const codes = from.codes + stage * Traits::STAGE_BYTES;
    const uint32_t tokens = from.tokens + stage * Traits::STAGE_BYTES;
    if (Traits::TYPE == WeightCode::kE2M1 && __any_sync(~0u, is_large)) {
      MultiplyStage<Traits, USED, true>(acc, decoders, codes, tokens);
    } else {
      MultiplyStage<Traits, USED, false>(acc, decoders, codes, tokens);
    }
    __syncwarp();
    ring.Release(stage, 1);
  }
}

/// Sum stages like SumStream, with the products of only `used` fragments of 8 tokens where there are more than two.
template <typename Traits, int MOST>
__device__ __forceinline__ void SumUsed(float (&acc)[W4_STRIPS][Traits::FRAGMENTS][4],
                                        const hopper::Ring<Traits::STAGES>& ring, const W4StreamStage& from, int used,
                                        uint32_t first, uint32_t end) {
  if constexpr (MOST > 2) {
    if (used < MOST) {
      SumUsed<Traits, MOST - 1>(acc, ring, from, used, first, end);
      return;
    }
  }
  SumStream<Traits, MOST>(acc, ring, from, first, end);
}

/// Accumulators of the K_PARTS warps of 64 rows, added in shared memory. Warp s of the group, s < 4, adds strip s.
template <typename Traits>
class PartSums {
 public:
  __device__ __forceinline__ PartSums(unsigned char* buffer, const WarpRole& role)
      : slots_(reinterpret_cast<float4*>(buffer)), group_(role.group), warp_(role.part) {}

  /// Set `sum` of the warps that add to the sums of all warps, of the first `used` fragments. Called by all warps of the
  /// group.
  __device__ __forceinline__ void Add(const float (&acc)[W4_STRIPS][Traits::FRAGMENTS][4], int used,
                                      float (&sum)[Traits::TOKENS / 2]) const {
#pragma unroll
    for (int j = 0; j < Traits::FRAGMENTS; ++j) {
      if (j > 0 && j >= used) break;
      Sync();  // accumulators before these have been read
#pragma unroll
      for (int s = 0; s < W4_STRIPS; ++s) {
        const float (&x)[4] = acc[s][j];
        if (s != warp_) *Slot(s, warp_) = float4{x[0], x[1], x[2], x[3]};
      }
      Sync();
      if (warp_ >= W4_STRIPS) continue;
      float4 own = {}, total = {};
#pragma unroll
      for (int s = 0; s < W4_STRIPS; ++s) {
        if (s == warp_) own = float4{acc[s][j][0], acc[s][j][1], acc[s][j][2], acc[s][j][3]};
      }
#pragma unroll
      for (int part = 0; part < Traits::K_PARTS; ++part) {
        const float4 x = part == warp_ ? own : *Slot(warp_, part);
        total.x += x.x, total.y += x.y, total.z += x.z, total.w += x.w;
      }
      sum[4 * j] = total.x, sum[4 * j + 1] = total.y, sum[4 * j + 2] = total.z, sum[4 * j + 3] = total.w;
    }
  }

 private:
  /// Wait for all warps of the group.
  __device__ __forceinline__ void Sync() const {
    if (group_ == 0) {
      ptx::BarrierSync(int(NamedBarrier::kFirstRows), Traits::K_PARTS * 32);
    } else {
      ptx::BarrierSync(int(NamedBarrier::kSecondRows), Traits::K_PARTS * 32);
    }
  }

  __device__ __forceinline__ float4* Slot(int strip, int part) const {
    const int sender = part < strip ? part : part - 1;
    return slots_ + ((group_ * W4_STRIPS + strip) * (Traits::K_PARTS - 1) + sender) * 32 + threadIdx.x % 32;
  }

  float4* const slots_;
  const int group_, warp_;
};

/// Compute all tiles of this block: what a consumer warp does.
template <typename Traits>
__device__ __forceinline__ void ConsumeW4Stream(const GemmParams& p, const hopper::Ring<Traits::STAGES>& ring,
                                                const W4StreamStage& from, const PartSums<Traits>& parts,
                                                const SplitSum<Traits::TOKENS>& split, HalvesSwap swap,
                                                const WarpRole& role) {
  uint32_t turn = 0, loaded = 0;  // stages of the tiles before
  ForEachPart<Traits>(p, [&](const TilePart& part, hopper::RingPosition<Traits::STAGES>&) {
    const uint32_t end = loaded + uint32_t(part.end - part.first);
    const int used = min(Traits::FRAGMENTS, CeilDivide(part.tile.end_row - part.tile.row, 8));
    float acc[W4_STRIPS][Traits::FRAGMENTS][4] = {};
    SumUsed<Traits, Traits::FRAGMENTS>(acc, ring, from, used, loaded + role.part, end);
    loaded = end;
    float sum[Traits::TOKENS / 2] = {};
    parts.Add(acc, used, sum);
    if (p.cluster > 1 && turn == 0) ptx::ClusterWait();  // barriers of the other blocks are initialised
    if (role.part < W4_STRIPS) {
      const W4Rows<Traits::WEIGHTS> rows{role.group};
      StoreW4<Traits>(p, part.tile, swap, rows, [&](const auto& finish) { split.Add(sum, turn, finish); });
    }
    ++turn;
  });
  if (p.cluster > 1 && turn == 0) ptx::ClusterWait();
}

#endif

template <typename Traits>
__global__ void __launch_bounds__(Traits::THREADS, Traits::BLOCKS_PER_SM)
    GemmW4StreamSm90Kernel(const __grid_constant__ W4Params params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char shared[];
  const GemmParams& p = params.gemm;
  const uint32_t base = ptx::SharedAddress(shared);
  const hopper::Ring<Traits::STAGES> ring{base};
  constexpr int SCALES = BARRIER_BYTES + Traits::STAGES * Traits::STAGE_BYTES;
  constexpr int SPLIT = SCALES + Traits::STAGES * Traits::SCALE_BYTES, SUMS = SPLIT + Traits::SPLIT_BYTES;
  const int warp = __shfl_sync(~0u, int(threadIdx.x) / 32, 0), lane = threadIdx.x % 32;
  const WarpRole role = RoleOf<Traits::K_PARTS>(warp);
  const SplitSum<Traits::TOKENS> split(shared + Traits::SPLIT_BARRIERS, shared + SPLIT, p.cluster, warp * 32 + lane);
  if (threadIdx.x == 0) {
    ptx::PrefetchTensorMap(&p.weights);
    ptx::PrefetchTensorMap(&p.tokens);
    ptx::PrefetchTensorMap(&params.scales);
    ring.Init(CONSUMERS);
    split.Init();
  }
  __syncthreads();
  if (p.cluster > 1) ptx::ClusterArriveRelaxed();  // consumers wait before they send the first accumulators
  if (!p.weights_first) ptx::GridDependencyWait();
  ptx::LaunchDependents();
  if (role.group == CONSUMERS) {
    ProduceW4<Traits>(params, ring, base + BARRIER_BYTES, base + SCALES, role.part);
    if (p.cluster > 1) ptx::ClusterWait();
  } else {
    const int codes = BARRIER_BYTES + Traits::TOKEN_BYTES + role.group * W4_CODE_BYTES + lane * 16;
    const int token = lane % Traits::BOX_TOKENS, box = lane % 8 / Traits::BOX_TOKENS;
    const int row = (2 * box * Traits::BOX_TOKENS + token) * SLAB_K_BYTES + (lane / 8 ^ token) * 16;
    const W4StreamStage from = {shared + codes, shared + SCALES + role.group * ScaleBytes(Traits::TYPE) + lane / 4 * 16,
                                base + BARRIER_BYTES + row};
    const HalvesSwap swap(shared + SUMS + Traits::SUM_BYTES);
    ConsumeW4Stream<Traits>(p, ring, from, PartSums<Traits>(shared + SUMS, role), split, swap, role);
  }
  if (p.cluster > 1) ptx::ClusterSync();  // the other blocks may still write to this one
#endif
}

}  // namespace gemm
}  // namespace flashinfer
