// SPDX-License-Identifier: Apache-2.0
// What the attention kernels share: where rows of keys and values are, how tiles lie in shared memory, how they become
// tensor core fragments, where a work item comes from.
#pragma once
#include <atomic>
#include <initializer_list>
#include <type_traits>

#include "../ptx/cp_async.cuh"
#include "../ptx/math.cuh"
#include "../ptx/mma.cuh"
#include "../ptx/pdl.cuh"
#include "../utils.cuh"
#include "../vec_dtypes.cuh"
#include "entry.h"
#include "variants.h"

namespace flashinfer {
namespace attention {

template <typename T>
inline constexpr bool IS_FP4 = std::is_same_v<T, uint8_t>;
template <typename T>
inline constexpr bool IS_FP8 = sizeof(T) == 1 && !IS_FP4<T>;

/// Bytes of shared memory that a block may have on every device the unit is compiled for.
constexpr int SharedLimitOf(int arch) {
  switch (arch) {
    case 900:
    case 1000:
    case 1030:
    case 1100:
      return 227 * 1024;
    case 800:
    case 870:
      return 163 * 1024;
    case 750:
      return 64 * 1024;
    default:
      return 99 * 1024;
  }
}
constexpr int SharedLimit() {
#ifdef __CUDA_ARCH_LIST__
  constexpr int ARCHS[] = {__CUDA_ARCH_LIST__};
#else
  constexpr int ARCHS[] = {800};
#endif
  int limit = 227 * 1024;
  for (int arch : ARCHS) limit = SharedLimitOf(arch) < limit ? SharedLimitOf(arch) : limit;
  return limit;
}

/// What rows of K and V are in shared memory: as stored, except NVFP4, which is expanded on the way.
template <typename Params>
using SharedKV =
    std::conditional_t<IS_FP4<typename Params::DTypeKV>, typename Params::DTypeQ, typename Params::DTypeKV>;

/// Rows of ROW_BYTES in shared memory, such that 8 rows' chunks of 16 bytes at one column are in different banks.
template <int ROW_BYTES>
struct RowLayout {
  static constexpr int CHUNKS = ROW_BYTES / 16;
  static constexpr bool SWIZZLED = CHUNKS % 8 == 0;
  static constexpr int PITCH = SWIZZLED || CHUNKS % 2 == 1 ? ROW_BYTES : ROW_BYTES + 16;  // an odd number of chunks
  static __device__ __forceinline__ uint32_t Offset(int row, int chunk) {
    return row * PITCH + (SWIZZLED ? chunk ^ (row & 7) : chunk) * 16;
  }
  /// `address` of chunk 0 or 1 of a row, moved on by `pairs` of chunks; the tile starts at a multiple of 128 bytes.
  static __device__ __forceinline__ uint32_t Pair(uint32_t address, int pairs) {
    return SWIZZLED ? (address ^ (pairs % 4 * 32)) + pairs / 4 * 128 : address + pairs * 32;
  }
};

/// Two 16-bit numbers in a register.
template <typename T>
__device__ __forceinline__ uint32_t Pack(float low, float high);
template <>
__device__ __forceinline__ uint32_t Pack<__half>(float low, float high) {
  const __half2 x = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&x);
}
template <>
__device__ __forceinline__ uint32_t Pack<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 x = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&x);
}

template <typename T>
__device__ __forceinline__ float2 Unpack(uint32_t x);
template <>
__device__ __forceinline__ float2 Unpack<__half>(uint32_t x) {
  return __half22float2(*reinterpret_cast<const __half2*>(&x));
}
template <>
__device__ __forceinline__ float2 Unpack<__nv_bfloat16>(uint32_t x) {
  return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&x));
}

/// Both fp8 formats become 16-bit numbers by moving their bits under the wider exponent and one exact multiplication by
/// a power of two, subnormal numbers included: 9 instructions for 4 numbers, where the conversion instructions go
/// through float. `x` holds 4 numbers; `odd` gets those of bytes 1 and 3, `even` those of bytes 0 and 2.
template <typename To, typename From>
struct Fp8Bits;
template <>
struct Fp8Bits<__nv_bfloat16, __nv_fp8_e4m3> {
  static constexpr int SHIFT = 4;
  static constexpr uint32_t MASK = 0x07f007f0, FACTOR = 0x7b807b80;  // 2^120
};
template <>
struct Fp8Bits<__nv_bfloat16, __nv_fp8_e5m2> {
  static constexpr int SHIFT = 3;
  static constexpr uint32_t MASK = 0x0fe00fe0, FACTOR = 0x77807780;  // 2^112
};
template <>
struct Fp8Bits<__half, __nv_fp8_e4m3> {
  static constexpr int SHIFT = 1;
  static constexpr uint32_t MASK = 0x3f803f80, FACTOR = 0x5c005c00;  // 2^8
};
template <>
struct Fp8Bits<__half, __nv_fp8_e5m2> {
  static constexpr int SHIFT = 0;
  static constexpr uint32_t MASK = 0x7f007f00, FACTOR = 0;
};

template <typename To>
__device__ __forceinline__ uint32_t Multiply2(uint32_t a, uint32_t b);
template <>
__device__ __forceinline__ uint32_t Multiply2<__half>(uint32_t a, uint32_t b) {
  const __half2 x = __hmul2(*reinterpret_cast<const __half2*>(&a), *reinterpret_cast<const __half2*>(&b));
  return *reinterpret_cast<const uint32_t*>(&x);
}
template <>
__device__ __forceinline__ uint32_t Multiply2<__nv_bfloat16>(uint32_t a, uint32_t b) {
  const __nv_bfloat162 x =
      __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&a), *reinterpret_cast<const __nv_bfloat162*>(&b));
  return *reinterpret_cast<const uint32_t*>(&x);
}

template <typename To, typename From>
__device__ __forceinline__ void ExpandFp8(uint32_t x, uint32_t& even, uint32_t& odd) {
  using Bits = Fp8Bits<To, From>;
  const uint32_t moved = x << 8;
  odd = ((x >> Bits::SHIFT) & Bits::MASK) | (x & 0x80008000u);
  even = ((moved >> Bits::SHIFT) & Bits::MASK) | (moved & 0x80008000u);
  if constexpr (Bits::FACTOR != 0) {
    odd = Multiply2<To>(odd, Bits::FACTOR);
    even = Multiply2<To>(even, Bits::FACTOR);
  }
}

/// 4 fp8 numbers as fp16, which holds them exactly: those of bytes 0 and 1, and of bytes 2 and 3.
template <typename From>
__device__ __forceinline__ void HalvesOf(uint32_t x, uint32_t& low, uint32_t& high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  const uint16_t first = uint16_t(x), second = uint16_t(x >> 16);
  if constexpr (std::is_same_v<From, __nv_fp8_e4m3>) {
    low = ptx::HalvesOfE4M3(first);
    high = ptx::HalvesOfE4M3(second);
  } else {
    low = ptx::HalvesOfE5M2(first);
    high = ptx::HalvesOfE5M2(second);
  }
#else
  uint32_t even, odd;
  ExpandFp8<__half, From>(x, even, odd);
  low = __byte_perm(even, odd, 0x5410);
  high = __byte_perm(even, odd, 0x7632);
#endif
}

/// 8 numbers of an NVFP4 row: E2M1 codes, low nibble first, times their e4m3 scale.
template <typename T>
__device__ __forceinline__ uint4 ExpandFp4(uint32_t codes, uint8_t scale_bits) {
  __nv_fp8_e4m3 scale_storage;
  scale_storage.__x = scale_bits;
  const float scale = float(scale_storage);
  uint32_t out[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float value[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const uint32_t code = codes >> (8 * i + 4 * j);
      // E2M1: 1 bit of mantissa; exponent 0 is subnormal (0, 0.5). As float bits: exponent + 126, mantissa on top.
      const uint32_t magnitude = code & 7;
      const float x = magnitude < 2 ? 0.5f * magnitude : __uint_as_float((126u << 23) + (magnitude << 22));
      value[j] = (code & 8) != 0 ? -x * scale : x * scale;
    }
    out[i] = Pack<T>(value[0], value[1]);
  }
  return uint4{out[0], out[1], out[2], out[3]};
}

/// Where the row of a token starts in k and v: in units of 16 bytes, which every row starts at a multiple of
/// (RowsAligned), or in bytes (NVFP4). 32 bits reach 64 GiB. SHARED_KV: v is the row of k_pe.
template <typename Params>
using RowOffset = std::conditional_t<IS_FP4<typename Params::DTypeKV>, int64_t, uint32_t>;
template <typename Params>
struct RowOffsets {
  RowOffset<Params> k, v;
};

/// Strides in these units, computed once on the host: the kernels' address arithmetic is 32 bits wide.
template <typename Params>
struct RowStrides {
  RowOffset<Params> k_page, k_n, k_h, v_page, v_n, v_h;

  explicit RowStrides(const Params& p) {
    constexpr int64_t UNIT = IS_FP4<typename Params::DTypeKV> ? 1 : 16 / sizeof(typename Params::DTypeKV);
    auto in_units = [](int64_t stride) { return RowOffset<Params>(stride / UNIT); };
    k_page = in_units(p.k_stride_page);
    k_n = in_units(p.k_stride_n);
    k_h = in_units(p.k_stride_h);
    if constexpr (Params::SHARED_KV) {
      v_page = in_units(p.k_pe_stride_page);
      v_n = in_units(p.k_pe_stride_n);
      v_h = 0;
    } else {
      v_page = in_units(p.v_stride_page);
      v_n = in_units(p.v_stride_n);
      v_h = in_units(p.v_stride_h);
    }
  }
};

template <typename Params>
__device__ __forceinline__ const char* RowAt(const typename Params::DTypeKV* data, RowOffset<Params> offset) {
  constexpr int64_t UNIT = IS_FP4<typename Params::DTypeKV> ? 1 : 16;
  return reinterpret_cast<const char*>(data) + UNIT * offset;
}

/// `page` is the token's entry of the page table.
template <bool PAGED, typename Params>
__device__ __forceinline__ RowOffsets<Params> RowOf(const Params& p, const RowStrides<Params>& strides,
                                                    const WorkItem& item, int token, int page) {
  using Offset = RowOffset<Params>;
  const Offset head = Offset(item.kv_head);
  if constexpr (PAGED) {
    const Offset entry = Offset(token - int(p.page_size.Divide(token)) * int(p.page_size.divisor));
    return {Offset(page) * strides.k_page + entry * strides.k_n + head * strides.k_h,
            Offset(page) * strides.v_page + entry * strides.v_n + head * strides.v_h};
  } else {
    static_assert(!Params::SHARED_KV, "latent caches are paged");
    const Offset row = Offset(item.kv_begin) + Offset(token);
    return {row * strides.k_n + head * strides.k_h, row * strides.v_n + head * strides.v_h};
  }
}

/// The page table entry of a token, clamped to tokens that exist so that it may be asked for any.
template <bool PAGED, typename Params>
__device__ __forceinline__ int PageOf(const Params& p, const WorkItem& item, int token) {
  if constexpr (PAGED) {
    const int last = item.kv_end - 1;
    if (last < 0) return 0;
    return int(p.kv_indices[item.kv_begin + p.page_size.Divide(min(token, last))]);
  } else {
    return 0;
  }
}

/// Chunk `chunk` of a row of an NVFP4 cache, expanded. `sf` is the first scale of the row.
template <typename T>
__device__ __forceinline__ void ExpandChunk(uint32_t to, const char* row, const uint8_t* sf, int chunk, bool valid) {
  uint4 x{};
  if (valid) {
    uint32_t codes = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) codes |= uint32_t(uint8_t(row[4 * chunk + i])) << (8 * i);
    x = ExpandFp4<T>(codes, sf[chunk / 2]);
  }
  ptx::StoreShared16(to, x);
}

/// An item of one request cut evenly (WorkList::uniform).
template <int TILE, typename Params>
__device__ __forceinline__ WorkItem UniformItem(const Params& p, const WorkList& work, int index) {
  WorkItem item;
  const int heads = p.num_kv_heads, unit = index / heads;
  const int tile = work.uniform.tiles - 1 - unit / work.uniform.chunks, chunk = unit % work.uniform.chunks;
  item.request = item.qo_begin = item.kv_begin = 0;
  item.next = -1;
  item.qo_len = p.qo_len;
  item.kv_len = p.kv_len;
  item.kv_head = index - unit * heads;
  item.row_begin = tile * TILE;
  item.is_first = chunk == 0;
  item.slot = work.uniform.chunks > 1 ? (tile * work.uniform.chunks + chunk) * heads + item.kv_head : -1;
  // Keys that some row of the tile sees.
  const MaskOf<Params> mask(p, item.qo_len, item.kv_len);
  const int first = p.group.Divide(item.row_begin);
  const int last = min(int(p.group.Divide(item.row_begin + TILE - 1)), item.qo_len - 1);
  item.kv_start = max(chunk * work.uniform.chunk_size, mask.First(first) / GRANULE * GRANULE);
  item.kv_end = min(min(p.kv_len, (chunk + 1) * work.uniform.chunk_size), mask.End(last));
  return item;
}

/// Item `index` of a list whose items name their head, with its length where only the device knows it.
template <typename Params>
__device__ __forceinline__ WorkItem ListItem(const Params& p, const WorkList& work, int index) {
  WorkItem item;
  const int4* from = reinterpret_cast<const int4*>(work.items + index);
  int4* to = reinterpret_cast<int4*>(&item);
#pragma unroll
  for (int i = 0; i < int(sizeof(WorkItem) / sizeof(int4)); ++i) to[i] = __ldg(from + i);
  if (item.kv_len < 0) {
    item.kv_len = int(p.get_kv_len(item.request));
    item.kv_end = min(item.kv_end, item.kv_len);
  }
  return item;
}

/// The first item of block `block`, in any kind of list; `request` is negative if there is none. No load waits for another.
template <int TILE, typename Params>
__device__ __forceinline__ WorkItem FirstItem(const Params& p, const WorkList& work, int block) {
  if (work.items == nullptr) return UniformItem<TILE>(p, work, block);
  if (work.has_shares) return ListItem(p, work, block);
  const int heads = p.num_kv_heads, unit = block / heads;
  WorkItem item = ListItem(p, work, unit);
  item.kv_head = block - unit * heads;
  if (item.slot >= 0) item.slot += item.kv_head;
  if (unit >= *work.num_items) item.request = -1;
  return item;
}

/// Element of the query of a tile's row, as the kernel multiplies it: transformed, rotated, 0 outside of the tile.
template <typename Params, typename Variant>
struct QueryReader {
  const Params& p;
  Variant& variant;
  const WorkItem& item;

  __device__ __forceinline__ float Stored(int row, int d) const {
    const int token = p.group.Divide(row), head = item.kv_head * int(p.group.divisor) + row - token * p.group.divisor;
    const int64_t n = int64_t(item.qo_begin) + token;
    if constexpr (Params::SHARED_KV) {
      if (d >= Params::HEAD_DIM_VO) {
        return ToFloat(p.q_pe[n * p.q_pe_stride_n + head * p.q_pe_stride_h + d - Params::HEAD_DIM_VO]);
      }
    }
    return ToFloat(p.q[n * p.q_stride_n + head * p.q_stride_h + d]);
  }

  __device__ __forceinline__ float operator()(int row, int d) const {
    row += item.row_begin;
    if (row >= item.qo_len * int(p.group.divisor)) return 0.f;
    float x = variant.QueryTransform(p, Stored(row, d));
    if constexpr (Params::POS_ENCODING == PosEncodingMode::kRoPELlama) {
      constexpr int HALF = Params::HEAD_DIM_QK / 2;
      const float other = variant.QueryTransform(p, Stored(row, d < HALF ? d + HALF : d - HALF));
      const float position = float(int(p.group.Divide(row)) + item.kv_len - item.qo_len);
      float sine, cosine;
      RopeAngle(p, position, d < HALF ? d : d - HALF, sine, cosine);
      x = d < HALF ? x * cosine - other * sine : x * cosine + other * sine;
    }
    return x;
  }

  /// Columns [d, d + 8) of a row as they are stored.
  __device__ __forceinline__ Vec<typename Params::DTypeQ, 8> Vector(int row, int d) const {
    const int at = item.row_begin + row;
    if (at >= item.qo_len * int(p.group.divisor)) return {};
    const int token = p.group.Divide(at), head = item.kv_head * int(p.group.divisor) + at - token * p.group.divisor;
    return Vec<typename Params::DTypeQ, 8>::Load(p.q + (int64_t(item.qo_begin) + token) * p.q_stride_n +
                                                 head * p.q_stride_h + d);
  }

  /// The same as the kernel multiplies them.
  __device__ __forceinline__ void Read(float (&x)[8], int row, int d) const {
    if constexpr (Params::POS_ENCODING == PosEncodingMode::kRoPELlama || Params::SHARED_KV) {
#pragma unroll 1
      for (int i = 0; i < 8; ++i) x[i] = (*this)(row, d + i);
    } else {
      const auto v = Vector(row, d);
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = variant.QueryTransform(p, ToFloat(v[i]));
    }
  }

  static __device__ __forceinline__ void RopeAngle(const Params& p, float position, int pair, float& sine,
                                                   float& cosine) {
    const float frequency =
        float(p.rope_rcp_scale) * exp2f(log2f(float(p.rope_rcp_theta)) * (2.f * pair / Params::HEAD_DIM_QK));
    sincosf(position * frequency, &sine, &cosine);
  }
};

/// In which order a tile of queries has its columns: that in which keys arrive. Of each 16, fp8 keys come the odd ones
/// first (ExpandFp8), or the first two of each four (HalvesOf).
enum class QueryOrder { kStored, kOddFirst, kPairs };

/// The query of a tile on its way to shared memory, by all threads of a block: loaded first, stored when it has arrived,
/// as numbers of type T.
template <int TILE, int THREADS, typename Layout, QueryOrder ORDER, typename T, typename Params, typename Variant>
struct QueryTile {
  static constexpr int CHUNKS = Params::HEAD_DIM_QK / 8, TURNS = (TILE * CHUNKS + THREADS - 1) / THREADS;
  // Rows that are put together or rotated are read when they are stored; so are tiles that need many registers.
  static constexpr bool AHEAD = Params::POS_ENCODING != PosEncodingMode::kRoPELlama && !Params::SHARED_KV && TURNS <= 4;
  Vec<typename Params::DTypeQ, 8> loaded[AHEAD ? TURNS : 1];

  __device__ __forceinline__ void Load(const QueryReader<Params, Variant>& query) {
    if constexpr (AHEAD) {
#pragma unroll
      for (int turn = 0; turn < TURNS; ++turn) {
        const int id = turn * THREADS + int(threadIdx.x);
        if (TILE * CHUNKS % THREADS == 0 || id < TILE * CHUNKS)
          loaded[turn] = query.Vector(id / CHUNKS, id % CHUNKS * 8);
      }
    }
  }

  /// The largest exponent of this thread's numbers, with the bias of a float.
  __device__ __forceinline__ int Exponent(const QueryReader<Params, Variant>& query) const {
    static_assert(AHEAD, "nothing was loaded");
    float largest = 0.f;
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
      if (TILE * CHUNKS % THREADS != 0 && turn * THREADS + int(threadIdx.x) >= TILE * CHUNKS) break;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        largest = fmaxf(largest, fabsf(query.variant.QueryTransform(query.p, ToFloat(loaded[turn][i]))));
      }
    }
    return __float_as_int(largest) >> 23;
  }

  __device__ __forceinline__ void Store(const QueryReader<Params, Variant>& query, char* to, float factor = 1.f) const {
#pragma unroll TURNS < 4 ? TURNS : 4
    for (int turn = 0; turn < TURNS; ++turn) {
      const int id = turn * THREADS + int(threadIdx.x), row = id / CHUNKS, chunk = id % CHUNKS;
      if (TILE * CHUNKS % THREADS != 0 && id >= TILE * CHUNKS) break;
      float x[8];
      if constexpr (AHEAD) {
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = query.variant.QueryTransform(query.p, ToFloat(loaded[turn][i]));
      } else {
        query.Read(x, row, 8 * chunk);
      }
      if constexpr (ORDER == QueryOrder::kOddFirst) {
        T* odd = reinterpret_cast<T*>(to + Layout::Offset(row, chunk & ~1));
        T* even = reinterpret_cast<T*>(to + Layout::Offset(row, chunk | 1));
#pragma unroll
        for (int i = 0; i < 8; ++i) (i % 2 == 1 ? odd : even)[chunk % 2 * 4 + i / 2] = FromFloat<T>(x[i]);
      } else if constexpr (ORDER == QueryOrder::kPairs) {
#pragma unroll
        for (int i = 0; i < 8; i += 4) {
          const int at = chunk % 2 * 8 + i;  // bytes in a chunk
          *reinterpret_cast<uint32_t*>(to + Layout::Offset(row, chunk & ~1) + at) =
              Pack<T>(x[i] * factor, x[i + 1] * factor);
          *reinterpret_cast<uint32_t*>(to + Layout::Offset(row, chunk | 1) + at) =
              Pack<T>(x[i + 2] * factor, x[i + 3] * factor);
        }
      } else {
        const uint4 packed{Pack<T>(x[0], x[1]), Pack<T>(x[2], x[3]), Pack<T>(x[4], x[5]), Pack<T>(x[6], x[7])};
        *reinterpret_cast<uint4*>(to + Layout::Offset(row, chunk)) = packed;
      }
    }
  }
};

/// Whether hooks on logits and outputs may be called for the rows and keys that fill up a tile, with the indices of
/// others. Ours may; a user's may write down what it is given, and is called for those that exist.
template <typename Variant>
inline constexpr bool TAKES_PADDING = false;
template <bool CUSTOM_MASK, bool SLIDING_WINDOW, bool SOFT_CAP, bool ALIBI>
inline constexpr bool TAKES_PADDING<DefaultAttention<CUSTOM_MASK, SLIDING_WINDOW, SOFT_CAP, ALIBI>> = true;

/// Whether keys are changed between memory and the product: rotated, or by a hook of the variant.
#ifdef FLASHINFER_VARIANT_CHANGES_KEYS
inline constexpr bool HAS_KEY_HOOK = true;
#else
inline constexpr bool HAS_KEY_HOOK = false;
#endif
template <typename Params>
inline constexpr bool CHANGES_KEYS = HAS_KEY_HOOK || Params::POS_ENCODING == PosEncodingMode::kRoPELlama;

/// B fragments of 16 keys (rows of a tile at `tile`), for the slow path in which keys are changed.
template <typename Params, typename Variant, typename KV, typename Layout>
struct KeyFragments {
  using T = typename Params::DTypeQ;
  const Params& p;
  Variant& variant;
  uint32_t tile;

  /// Column of number j of register i in k-step k.
  static __device__ __forceinline__ int Column(int k, int i, int j) {
    const int c = threadIdx.x % 4;
    return 16 * k + (IS_FP8<KV> ? 4 * c + (i % 2 == 0 ? 1 : 0) + 2 * j : 2 * c + (i % 2 == 0 ? 0 : 8) + j);
  }

  /// Registers 0, 1 for the first 8 keys, 2, 3 for the others.
  __device__ __forceinline__ void Load(uint32_t (&b)[4], int k) {
    const int lane = threadIdx.x % 32;
    if constexpr (IS_FP8<KV>) {
      uint32_t x[4];
      ptx::LdMatrix(x, tile + Layout::Offset(lane % 16, k));
      ExpandFp8<T, KV>(x[0], b[1], b[0]);
      ExpandFp8<T, KV>(x[1], b[3], b[2]);
    } else {
      ptx::LdMatrix(b, tile + Layout::Offset(lane % 8 + lane / 16 * 8, 2 * k + lane / 8 % 2));
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 x = Unpack<T>(b[i]);
      b[i] = Pack<T>(variant.KeyTransform(p, x.x), variant.KeyTransform(p, x.y));
    }
  }

  /// Rotate the first half of the columns (k-step k) with the second; the keys are at positions from `token` on.
  __device__ __forceinline__ void Rotate(uint32_t (&low)[4], uint32_t (&high)[4], int token, int k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float position = float(token + int(threadIdx.x % 32) / 4 + i / 2 * 8);
      const float2 x = Unpack<T>(low[i]), y = Unpack<T>(high[i]);
      float sine[2], cosine[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        QueryReader<Params, Variant>::RopeAngle(p, position, Column(k, i, j), sine[j], cosine[j]);
      }
      low[i] = Pack<T>(x.x * cosine[0] - y.x * sine[0], x.y * cosine[1] - y.y * sine[1]);
      high[i] = Pack<T>(y.x * cosine[0] + x.x * sine[0], y.y * cosine[1] + x.y * sine[1]);
    }
  }
};

// ------------------------------------------------------------------------------------------------ launching

/// A number that is asked of the driver once per device.
template <typename Tag>
int OncePerDevice(int (*ask)(int device)) {
  constexpr int MAX_DEVICES = 64;
  static std::atomic<int> known[MAX_DEVICES];  // 0: not asked yet, else the number + 1
  int device = 0;
  cudaGetDevice(&device);
  if (device >= MAX_DEVICES) return ask(device);
  int x = known[device].load(std::memory_order_relaxed);
  if (x == 0) known[device].store(x = ask(device) + 1, std::memory_order_relaxed);
  return x - 1;
}

/// Let KERNEL have `BYTES` of dynamic shared memory.
template <auto KERNEL, int BYTES>
Status AllowShared() {
  struct Tag {};
  return Status(OncePerDevice<Tag>(
      [](int) { return int(cudaFuncSetAttribute(KERNEL, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES)); }));
}

template <auto KERNEL, int THREADS, int BYTES>
int ResidentBlocksOf() {
  struct Tag {};
  return OncePerDevice<Tag>([](int device) {
    int each = 0, multiprocessors = 0;
    AllowShared<KERNEL, BYTES>();
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, KERNEL, THREADS, BYTES);
    cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    return each * multiprocessors;
  });
}

template <auto KERNEL, int THREADS, int BYTES, typename... Args>
Status LaunchBlocks(int blocks, bool enable_pdl, Stream stream, const Args&... args) {
  const Status status = AllowShared<KERNEL, BYTES>();
  if (status != cudaSuccess) return status;
  return LaunchShared(KERNEL, dim3(blocks), dim3(THREADS), BYTES, enable_pdl, stream, args...);
}

/// Whether every row of the tensors starts at a multiple of 16 bytes, which the kernels rely on.
template <typename Params>
bool RowsAligned(const Params& p) {
  auto fits = [](const auto* data, std::initializer_list<int64_t> strides) {
    bool aligned = IsAligned(data, 16);
    for (int64_t stride : strides) aligned = aligned && stride * int64_t(sizeof(*data)) % 16 == 0;
    return aligned;
  };
  bool aligned = fits(p.q, {p.q_stride_n, p.q_stride_h}) && fits(p.o, {p.o_stride_n, p.o_stride_h});
  if constexpr (!IS_FP4<typename Params::DTypeKV>) {
    aligned = aligned && fits(p.k, {p.k_stride_page, p.k_stride_n, p.k_stride_h});
    if constexpr (Params::SHARED_KV) {
      aligned = aligned && fits(p.k_pe, {p.k_pe_stride_page, p.k_pe_stride_n});
    } else {
      aligned = aligned && fits(p.v, {p.v_stride_page, p.v_stride_n, p.v_stride_h});
    }
  }
  return aligned;
}

}  // namespace attention
}  // namespace flashinfer
