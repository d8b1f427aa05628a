// SPDX-License-Identifier: Apache-2.0
// A layer of MXFP4 weights for one token in one launch, like kernel.cuh, at the rate of memory: 53 MB of GPT-OSS 120B
// take as long to decode as to read, so that each instruction of a stage counts.
// - A half warp keeps its columns for many rows (mxfp4_order.cuh), with the token's elements in registers.
//   Addresses are found anew where an expert or a pass ends, and warps meet at the end of a batch only.
// - Rows are divided by eights: 368 for 132 SMs in GEMM 2 of that model, where blocks of 16 rows would be 184.
// - Scales multiply sums, not weights: the product of the tensor cores has 8 columns, one for each group of 32
//   columns of the two sources of a warp. The token's elements of group g are in column g, and zeros in the others. A
//   row has sums in the 4 columns of its own source; the others have no meaning.
// - Weights stay as they are spread, value times 2^-126, most of them subnormal, which the tensor cores keep.
//   Elements are multiplied by 2^64, so that products are normal numbers in fp32: elements from 2^64 on would
//   overflow.
//   test  pytest tests/fused_moe/test_emulated_mono.py      bench  python benchmarks/bench_fused_moe.py
#pragma once
#include "../../gemm/w4_decode.cuh"
#include "kernel.cuh"
#include "mxfp4_order.cuh"

namespace flashinfer {
namespace fused_moe {
namespace mono {

constexpr int MXFP4_HALVES = 2 * MXFP4_WARPS;
static_assert(MXFP4_HALVES % 4 == 0, "four lanes add the sums of a row");

/// Shared memory of a block.
struct alignas(128) Mxfp4Memory {
  unsigned char ring[MXFP4_WARPS][MXFP4_STAGES][PAIR_BYTES];
  // Sums of half warps for the eights of a batch. 8 floats more: gate and up of a row are in different banks.
  float sums[2 * BATCH][MXFP4_HALVES * EIGHT + 8];
  float bias[2][2 * BATCH * EIGHT];  // biases of a batch, by product
  TokenExperts experts[MXFP4_WARPS];
  ActivationConstants constants[TOKEN_MAX_SLOTS];
};

/// A block's share of a layer.
class Mxfp4Block {
 public:
  __device__ __forceinline__ Mxfp4Block(const MonoParams& p, Mxfp4Memory& memory)
      : p_(p),
        memory_(memory),
        experts_(memory.experts[threadIdx.x / 32]),
        count_(FindExperts(p, experts_)),
        requests_(p, experts_, count_),
        ring_(ptx::SharedAddress(memory.ring[threadIdx.x / 32])) {}

  __device__ __forceinline__ void Run(int32_t& barrier) {
#pragma unroll 1
    for (int i = 0; i < MXFP4_STAGES - 1; ++i) requests_.Next(ring_ + i * PAIR_BYTES);
    const uint4 elements = LoadElementsOf<1>(0);
    // Other warps for each of these: a warp that waited for all, one after another, would begin to multiply late.
    const int thread = int(threadIdx.x);
    LoadBias<1>(0, thread);
    LoadBias<2>(0, THREADS - 1 - thread);
    for (int i = (thread + THREADS / 2) % THREADS; i < count_; i += THREADS) {
      memory_.constants[i] = ConstantsOf(p_.activation, experts_.expert[i]);
    }
    Product<1>(elements);
    SyncGrid(barrier);
    Product<2>(LoadElementsOf<2>(0));
  }

 private:
  static constexpr int THREADS = MXFP4_WARPS * 32;
  /// Elements that a lane multiplies: those of the own group of 32 columns in x[group], zeros elsewhere.
  using Operand = uint32_t[4][4];

  template <int PRODUCT>
  __device__ __forceinline__ const Portion& Of() const {
    return PRODUCT == 1 ? requests_.shares.first : requests_.shares.second;
  }
  /// Return the number of the expert, among those in use, of stage `at` of GEMM 1.
  __device__ __forceinline__ int ActiveOf(int at) const {
    return requests_.shares.PairOf(at) / requests_.shares.pairs_per_expert;
  }
  /// Return which eight of an expert's hidden values, or of the output, a part of a stage computes.
  template <int PRODUCT>
  __device__ __forceinline__ int EightOf(int at, int part) const {
    if (PRODUCT == 2) return requests_.shares.second.begin + 2 * at + part;
    return 2 * (requests_.shares.PairOf(at) - ActiveOf(at) * requests_.shares.pairs_per_expert) + part;
  }

  /// Copy the biases of a batch to shared memory; those of GEMM 2 are summed over experts.
  template <int PRODUCT>
  __device__ __forceinline__ void LoadBias(int batch, int thread) {
    const void* const bias = PRODUCT == 1 ? p_.bias1 : p_.bias2;
    const int parts = 2 * (min(requests_.shares.Stages(PRODUCT), batch + BATCH) - batch);
    for (int i = thread; i < parts * EIGHT; i += THREADS) {
      const int part = i / EIGHT % 2, at = batch + i / EIGHT / 2, row = RowOf(EightOf<PRODUCT>(at, part), i % EIGHT);
      float x = 0.f;
      if (bias != nullptr && PRODUCT == 1) {
        const int64_t expert = experts_.expert[ActiveOf(at)];
        const int64_t rows = requests_.shares.is_gated ? 2 * p_.intermediate : p_.intermediate;
        const int gate = requests_.shares.is_gated && at % 2 == 0 ? p_.intermediate : 0;
        x = Load16(bias, expert * rows + gate + row, p_.output_element);
      } else if (bias != nullptr && row < p_.hidden) {
#pragma unroll 4
        for (int e = 0; e < count_; ++e) {
          x += experts_.factor[e] * Load16(bias, int64_t(experts_.expert[e]) * p_.hidden + row, p_.output_element);
        }
      }
      memory_.bias[PRODUCT - 1][i] = x;
    }
  }

  /// Load the elements of this lane in a pass: columns 2 (lane % 4) + {0, 1} of each 8, of group lane / 4 % 4.
  template <int PRODUCT>
  __device__ __forceinline__ uint4 LoadElementsOf(int pass) const {
    const int lane = int(threadIdx.x) % 32, source = pass * MXFP4_HALVES + int(threadIdx.x) / 16;
    uint4 x{};
    if (source >= Of<PRODUCT>().sources) return x;
    if (PRODUCT == 1) {
      const auto* const from =
          static_cast<const __nv_bfloat16*>(p_.input) + source * SOURCE_COLUMNS + lane / 4 % 4 * 32 + lane % 4 * 2;
      x = {LoadElements<1, uint32_t>(from), LoadElements<1, uint32_t>(from + 8), LoadElements<1, uint32_t>(from + 16),
           LoadElements<1, uint32_t>(from + 24)};
    } else {
      const int active = source / requests_.shares.second.chunks,
                chunk = source - active * requests_.shares.second.chunks;
      x = LoadElements<2, uint4>(static_cast<const __nv_bfloat16*>(p_.hidden_values) +
                                 int64_t(experts_.slot[active]) * p_.intermediate + chunk * SOURCE_COLUMNS +
                                 lane % 16 * 8);
    }
    return x;
  }
  /// Return the place of a hidden value, so that what a lane needs of 32 columns lies together.
  __device__ __forceinline__ static int HiddenColumn(int i) {
    return i / 32 * 32 + i % 8 / 2 * 8 + i % 32 / 8 * 2 + i % 2;
  }

  __device__ __forceinline__ static void MakeOperand(const uint4& elements, Operand& to) {
    constexpr uint32_t FACTOR = 0x5F805F80u;  // 2^64
    const int lane = int(threadIdx.x) % 32, group = lane / 4 % 4;
    const uint32_t words[4] = {elements.x, elements.y, elements.z, elements.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t x = ptx::MultiplyBf16Pairs(words[i], FACTOR);
#pragma unroll
      for (int g = 0; g < 4; ++g) {  // a shuffle: the compiler would choose again between x and 0 in each stage
        to[g][i] = __shfl_sync(~0u, g == group ? x : 0u, lane);
      }
    }
  }

  /// Compute a product of this block's rows, in batches; `next` are the elements of pass 0.
  template <int PRODUCT>
  __device__ __forceinline__ void Product(uint4 next) {
    const int stages = requests_.shares.Stages(PRODUCT), passes = Of<PRODUCT>().passes;
#pragma unroll 1
    for (int batch = 0; batch < stages; batch += BATCH) {
      const int end = min(stages, batch + BATCH);
      if (batch > 0) {
        __syncthreads();  // sums and biases of the batch before were read
        LoadBias<PRODUCT>(batch, int(threadIdx.x));
        next = LoadElementsOf<PRODUCT>(0);
      }
#pragma unroll 1
      for (int pass = 0; pass < passes; ++pass) {
        Operand x;
        MakeOperand(next, x);
        if (pass + 1 < passes) next = LoadElementsOf<PRODUCT>(pass + 1);
        Pass<PRODUCT>(pass, batch, end, x);
      }
      __syncthreads();
      Finish<PRODUCT>(batch, end);
    }
  }

  /// Multiply the stages of a pass, and add to the sums of this half warp.
  template <int PRODUCT>
  __device__ __forceinline__ void Pass(int pass, int batch, int end, const Operand& x) {
    const int lane = int(threadIdx.x) % 32, half = int(threadIdx.x) / 16, source = pass * MXFP4_HALVES + half;
    const bool has_source = source < Of<PRODUCT>().sources;
    // Two lanes of a row have its sums: one writes those of part 0 and the other those of part 1.
    const bool is_odd = lane % 2 == 1, has_sums = lane % 4 / 2 == lane / 16;
    float factor = 1.f;
    if (PRODUCT == 2 && has_source) factor = experts_.factor[source / requests_.shares.second.chunks];
    float* to = &memory_.sums[lane % 2][half * EIGHT + lane / 4 % 4];
    if (pass == 0 && has_sums && !has_source) {
      for (int i = 0; i < 2 * SUMS_STRIDE * (end - batch); i += 2 * SUMS_STRIDE) to[i] = to[i + 4] = 0.f;
    }
    const bool writes = has_sums && has_source;
#pragma unroll 1
    for (int at = batch; at < end; ++at) {
      ptx::CopyWait<MXFP4_STAGES - 2>();
      __syncwarp();  // all lanes have the stage, and have read the one before
      requests_.Next(ring_ + (slot_ == 0 ? MXFP4_STAGES - 1 : slot_ - 1) * PAIR_BYTES);
      const uint32_t stage = ring_ + slot_ * PAIR_BYTES;
      slot_ = slot_ == MXFP4_STAGES - 1 ? 0 : slot_ + 1;
      const float2 first = Multiply(stage, 0, x);
      float2 second{};
      if (PRODUCT == 1 || EightOf<2>(at, 1) < requests_.shares.second.end) second = Multiply(stage, 1, x);
      float2 mine = is_odd ? second : first;
      const float2 others = is_odd ? first : second;
      mine.x += __shfl_xor_sync(~0u, others.x, 1), mine.y += __shfl_xor_sync(~0u, others.y, 1);
      if (PRODUCT == 2) mine.x *= factor, mine.y *= factor;
      if (writes) {
        if (pass > 0) mine.x += to[0], mine.y += to[4];
        to[0] = mine.x, to[4] = mine.y;
      }
      to += 2 * SUMS_STRIDE;
    }
  }

  /// Return a lane's part of the sums of rows lane / 4 % 4 and 4 more of an eight.
  __device__ __forceinline__ static float2 Multiply(uint32_t stage, int part, const Operand& x) {
    float of_row[2] = {};
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    const int lane = int(threadIdx.x) % 32;
    const uint32_t of_rows = stage + 2 * PART_BYTES + (lane / 16 * 16 + part * EIGHT + lane / 4 % 4) * 4;
    const uint32_t scales[2] = {ptx::LoadShared4(of_rows), ptx::LoadShared4(of_rows + 16)};
    float sums[2][4] = {};  // two chains of products
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t words[4];
      ptx::LoadFragment(words, stage + part * PART_BYTES + i * gemm::W4_BLOCK_BYTES + lane * 16);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t a[4];
        gemm::SpreadE2M1(words[j], a);
        const uint32_t (&of_group)[4] = x[2 * i + j / 2];
        ptx::Mma<__nv_bfloat16>(sums[j % 2], a, of_group[j % 2 * 2], of_group[j % 2 * 2 + 1]);
      }
    }
    constexpr float FACTOR = 0x1p62f / (1.f + 0x1p-8f);  // without what Factor has too much
    const int first = lane % 2 * 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      of_row[h] = (sums[0][2 * h] + sums[1][2 * h]) * FACTOR * Factor(scales[h], first) +
                  (sums[0][2 * h + 1] + sums[1][2 * h + 1]) * FACTOR * Factor(scales[h], first + 1);
    }
#endif
    return {of_row[0], of_row[1]};
  }

  /// Return the scale that is byte `i` of a word, times 1 + 2^-8, without a comparison: the bit makes 255 a NaN, and
  /// 0, which is 2^-127, almost zero. A shift to the left, because multipliers can do it, and have less to do than
  /// what shifts to the right.
  __device__ __forceinline__ static float Factor(uint32_t word, int i) {
    return __uint_as_float(__byte_perm(word, 1u, 0x5504u | uint32_t(i) << 4) << 15);
  }

  /// Add the sums of half warps in a fixed order, and write hidden values or outputs. Four lanes have a row.
  template <int PRODUCT>
  __device__ __forceinline__ void Finish(int batch, int end) const {
    const bool is_pair = PRODUCT == 1 && requests_.shares.is_gated;  // two stages are gate and up of the same rows
    const int rows = (end - batch) * (is_pair ? EIGHT : 2 * EIGHT), quarter = int(threadIdx.x) % 4;
#pragma unroll 1
    for (int first = 0; first < rows; first += THREADS / 4) {
      const int i = first + int(threadIdx.x) / 4, row = min(i, rows - 1), r = row % EIGHT, part = row / EIGHT % 2;
      const int at = is_pair ? row / EIGHT / 2 * 2 + quarter % 2 : row / EIGHT / 2;
      const float* const sums = memory_.sums[2 * at + part] + r;
      float x = 0.f;
#pragma unroll
      for (int half = 0; half < MXFP4_HALVES / 4; ++half) {
        if (is_pair) {
          x += sums[(4 * half + quarter / 2) * EIGHT], x += sums[(4 * half + 2 + quarter / 2) * EIGHT];
        } else {
          x += sums[(4 * half + quarter) * EIGHT];
        }
      }
      x += __shfl_xor_sync(~0u, x, 2);
      if (!is_pair) x += __shfl_xor_sync(~0u, x, 1);
      x += memory_.bias[PRODUCT - 1][(2 * at + part) * EIGHT + r];
      const float up = __shfl_xor_sync(~0u, x, 1);
      const int eight = EightOf<PRODUCT>(batch + at, part), to = RowOf(eight, r);
      if (quarter != 0 || i >= rows) continue;
      if (PRODUCT == 2) {
        if (eight < requests_.shares.second.end) Store16(p_.output, to, p_.output_element, x);
      } else {
        const int active = ActiveOf(batch + at);
        const float h = ActivateValue(p_.activation.type, memory_.constants[active], x, up);
        Store16(p_.hidden_values, int64_t(experts_.slot[active]) * p_.intermediate + HiddenColumn(to), p_.element, h);
      }
    }
  }

  static constexpr int SUMS_STRIDE = MXFP4_HALVES * EIGHT + 8;

  const MonoParams& p_;
  Mxfp4Memory& memory_;
  TokenExperts& experts_;
  int count_;
  Requests<MXFP4_HALVES> requests_;
  const uint32_t ring_;
  uint32_t slot_ = 0;
};

static __global__ void __launch_bounds__(MXFP4_WARPS * 32, 1) Mxfp4OneKernel(const __grid_constant__ MonoParams p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(128) unsigned char shared_memory[];
  ptx::GridDependencyWait();
  ptx::LaunchDependents();
  Mxfp4Block(p, *reinterpret_cast<Mxfp4Memory*>(shared_memory)).Run(grid_barrier);
#endif
}

}  // namespace mono

FLASHINFER_INLINE Status MonoMxfp4(const MonoParams& p, Stream stream) {
  using mono::Mxfp4Memory, mono::Mxfp4OneKernel, mono::MXFP4_WARPS;
  if (p.tokens != 1 || p.top_k > mono::TOKEN_MAX_SLOTS) return cudaErrorNotSupported;
  return mono::Launch<Mxfp4OneKernel, MXFP4_WARPS * 32, sizeof(Mxfp4Memory)>(p, stream);
}

}  // namespace fused_moe
}  // namespace flashinfer
