// SPDX-License-Identifier: Apache-2.0
// Work of the consumers of the Hopper prefill kernel on a query tile, each warpgroup on its own rows: copying, where a tile
// does not consist of whole tokens, which TMA boxes need, and where a variant changes queries; and scaling, where products
// are in fp16 and queries in bf16.
#pragma once
#include "../../ptx/barrier.cuh"
#include "../../ptx/cp_async.cuh"
#include "../../ptx/tma.cuh"
#include "shape.cuh"
#include "../common/query.cuh"

namespace flashinfer {
namespace attention {
namespace prefill_sm90 {

/// True if the variant may change queries: user variants whose text names that hook.
#ifdef FLASHINFER_VARIANT_CHANGES_QUERIES
inline constexpr bool CHANGES_QUERIES = true;
#else
inline constexpr bool CHANGES_QUERIES = false;
#endif

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/// Copy the rows of warpgroup `group`, and wait for them.
template <typename Tr, typename Variant>
__device__ __forceinline__ void CopyQuery(const typename Tr::Params& p, Variant& variant, const WorkItem& item,
                                          const Shared<Tr>& shared, int group) {
  using Params = typename Tr::Params;
  constexpr int COLUMNS = 16 / int(sizeof(typename Tr::Query)), CHUNKS = Tr::D_QK / COLUMNS;
  const QueryReader<Params, Variant> reader{p, variant, item};
  const int thread = threadIdx.x % WARPGROUP, rows = item.qo_len * int(p.group.divisor);
  ptx::BarrierSync(int(NamedBarrier::kWarpgroup) + group, WARPGROUP);  // its warps may still read the previous query
#pragma unroll 4
  for (int i = thread; i < 64 * CHUNKS; i += WARPGROUP) {
    const int row = 64 * group + i / CHUNKS, chunk = i % CHUNKS, at = item.row_begin + row;
    const uint32_t to = shared.Query() + chunk / 8 * (Tr::TILE * hopper::SLAB_ROW_BYTES) +
                        hopper::Swizzle128(row * hopper::SLAB_ROW_BYTES + chunk % 8 * 16);
    if constexpr (CHANGES_QUERIES) {
      float x[8];
      reader.Read(x, row, 8 * chunk);
      ptx::StoreShared16(to, uint4{Pack<typename Tr::Query>(x[0], x[1]), Pack<typename Tr::Query>(x[2], x[3]),
                                   Pack<typename Tr::Query>(x[4], x[5]), Pack<typename Tr::Query>(x[6], x[7])});
    } else {
      const int token = p.group.Divide(at), head = item.kv_head * int(p.group.divisor) + at - token * p.group.divisor;
      const auto* from = p.q + (int64_t(item.qo_begin) + token) * p.q_stride_n + head * p.q_stride_h + COLUMNS * chunk;
      ptx::CopyAsync16(to, from, at < rows);
    }
  }
  ptx::CopyCommit();
  ptx::CopyWait<0>();
  ptx::FenceAsyncProxy();
  ptx::BarrierSync(int(NamedBarrier::kWarpgroup) + group, WARPGROUP);
}

/// Turn the rows of warpgroup `group` from bf16 to fp16, in place. Each is multiplied by a power of two such that its
/// largest number becomes 2^14 to 2^15: nothing is lost down to 2^-29 of it. Returns the inverse factors of the two rows
/// of the thread in the products: lanes of a row in the products have its columns here. Eight lanes access two rows, in
/// different banks.
template <typename Tr>
__device__ __forceinline__ float2 ScaleQuery(const Shared<Tr>& shared, int group) {
  const int lane = threadIdx.x % 32, first = 64 * group + int(threadIdx.x) % WARPGROUP / 32 * 16 + lane / 4;
  const auto has_chunk = [&](int slab) { return 64 * slab + 16 * (lane % 4) < Tr::D_QK; };
  float inverse[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t at = shared.Query() + hopper::Swizzle128((first + 8 * i) * hopper::SLAB_ROW_BYTES + lane % 4 * 32);
    const auto chunk = [&](int n) { return (at ^ (n % 2 * 16)) + n / 2 * (Tr::TILE * hopper::SLAB_ROW_BYTES); };
    uint4 x[2 * Tr::QK_SLABS];
    float largest = 0.f;
#pragma unroll
    for (int n = 0; n < 2 * Tr::QK_SLABS; ++n) {
      const float4 loaded = has_chunk(n / 2) ? ptx::LoadShared16(chunk(n)) : float4{};
      x[n] = uint4{__float_as_uint(loaded.x), __float_as_uint(loaded.y), __float_as_uint(loaded.z),
                   __float_as_uint(loaded.w)};
    }
#pragma unroll
    for (int n = 0; n < 2 * Tr::QK_SLABS; ++n) {
      for (const uint32_t word : {x[n].x, x[n].y, x[n].z, x[n].w}) {
        const float2 pair = Unpack<typename Tr::Query>(word);
        largest = fmaxf(largest, fmaxf(fabsf(pair.x), fabsf(pair.y)));
      }
    }
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    const int exponent = min(max(__float_as_int(largest) >> 23, 15), 254);
    const float factor = __int_as_float((268 - exponent) << 23);
    inverse[i] = __int_as_float((exponent - 14) << 23);
    const auto scaled = [&](uint32_t word) {
      const float2 pair = Unpack<typename Tr::Query>(word);
      return Pack<typename Tr::T>(pair.x * factor, pair.y * factor);
    };
#pragma unroll
    for (int n = 0; n < 2 * Tr::QK_SLABS; ++n) {
      if (!has_chunk(n / 2)) continue;
      ptx::StoreShared16(chunk(n), uint4{scaled(x[n].x), scaled(x[n].y), scaled(x[n].z), scaled(x[n].w)});
    }
  }
  ptx::FenceAsyncProxy();
  ptx::BarrierSync(int(NamedBarrier::kWarpgroup) + group, WARPGROUP);
  return {inverse[0], inverse[1]};
}

#endif

}  // namespace prefill_sm90
}  // namespace attention
}  // namespace flashinfer
