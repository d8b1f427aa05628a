// SPDX-License-Identifier: Apache-2.0
// Copy of a query tile by the consumers of the Hopper prefill kernel, each warpgroup its own rows: where a tile does not
// consist of whole tokens, which TMA boxes need, and where a variant changes queries.
#pragma once
#include "../ptx/barrier.cuh"
#include "../ptx/cp_async.cuh"
#include "../ptx/tma.cuh"
#include "prefill_sm90_traits.cuh"
#include "query.cuh"

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
  constexpr int COLUMNS = 16 / int(sizeof(typename Tr::T)), CHUNKS = Tr::D_QK / COLUMNS;
  const QueryReader<Params, Variant> reader{p, variant, item};
  const int thread = threadIdx.x % WARPGROUP, rows = item.qo_len * int(p.group.divisor);
  ptx::BarrierSync(Barrier::kWarpgroup + group, WARPGROUP);  // its warps may still read the previous query
#pragma unroll 4
  for (int i = thread; i < 64 * CHUNKS; i += WARPGROUP) {
    const int row = 64 * group + i / CHUNKS, chunk = i % CHUNKS, at = item.row_begin + row;
    const uint32_t to = shared.Query() + chunk / 8 * (Tr::TILE * hopper::SLAB_ROW_BYTES) +
                        hopper::Swizzle128(row * hopper::SLAB_ROW_BYTES + chunk % 8 * 16);
    if constexpr (CHANGES_QUERIES) {
      float x[8];
      reader.Read(x, row, 8 * chunk);
      ptx::StoreShared16(to, uint4{Pack<typename Tr::T>(x[0], x[1]), Pack<typename Tr::T>(x[2], x[3]),
                                   Pack<typename Tr::T>(x[4], x[5]), Pack<typename Tr::T>(x[6], x[7])});
    } else {
      const int token = p.group.Divide(at), head = item.kv_head * int(p.group.divisor) + at - token * p.group.divisor;
      const auto* from = p.q + (int64_t(item.qo_begin) + token) * p.q_stride_n + head * p.q_stride_h + COLUMNS * chunk;
      ptx::CopyAsync16(to, from, at < rows);
    }
  }
  ptx::CopyCommit();
  ptx::CopyWait<0>();
  ptx::FenceAsyncProxy();
  ptx::BarrierSync(Barrier::kWarpgroup + group, WARPGROUP);
}

#endif

}  // namespace prefill_sm90
}  // namespace attention
}  // namespace flashinfer
