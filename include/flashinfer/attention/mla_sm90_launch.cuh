// SPDX-License-Identifier: Apache-2.0
// MLA decode on SM90: the launch that backend_interface.h declares, for modules whose only list has tiles of mla::ROWS
// rows, and the merge of split tiles. The two kernels (mla_sm90_kernel.cuh) are in units of their own, compiled in
// parallel.
#pragma once
#include "kv_rows.cuh"
#include "merge.cuh"
#include "mla_sm90_traits.cuh"

namespace flashinfer {
namespace attention {
namespace mla {

constexpr int MERGE_COLUMNS = LATENT / merge::WARPS;  // columns of a warp

/// Params of the merge of some columns of each row.
template <typename Params>
struct MergedColumns : Params {
  static constexpr int HEAD_DIM_VO = MERGE_COLUMNS;
  __device__ __forceinline__ explicit MergedColumns(const Params& p) : Params(p) {}
};

/// Merge one row per block, with a part of its columns per warp: one long request has few rows and many parts.
template <typename Params, typename Variant>
__global__ void __launch_bounds__(merge::THREADS)
    MergeColumnsKernel(const __grid_constant__ Params params, const __grid_constant__ WorkList work) {
  ptx::GridDependencyWait();
  const int index = int(blockIdx.x) / ROWS, row = int(blockIdx.x) % ROWS, first = int(threadIdx.x) / 32 * MERGE_COLUMNS;
  if (index >= *work.num_merges) return;
  const MergeItem item = work.merges[index];
  const int group = params.group.divisor, token = params.group.Divide(item.row_begin + row);
  if (token >= item.qo_len) return;
  MergedColumns<Params> p(params);
  p.o += first;
  if (first > 0) p.lse = nullptr;
  auto part_of = [&](int i) {
    const int64_t at = int64_t(item.first_slot + i) * ROWS + row;
    return merge::Part{work.partial_o + at * LATENT + first, work.partial_lse + at};
  };
  const int head = item.row_begin + row - token * group;
  merge::MergeRow<Variant>(p, item.count, part_of, int64_t(item.qo_begin) + token, head);
}

}  // namespace mla

/// Run the items of `work` on the kernel that copies rows of keys with cp.async (COPIED), or boxes of pages by TMA.
template <typename Params, bool COPIED>
Status LaunchPages(const Params& params, const WorkList& work, bool enable_pdl, Stream stream);

/// Run the items of `work` and merge split tiles. Each row of each tensor must be aligned to 16 bytes.
template <typename Params, int TILE, bool PAGED, bool ALL_MASKED>
Status LaunchAttention(const Params& params, const WorkList& work, bool enable_pdl, Stream stream) {
  static_assert(Params::HEAD_DIM_VO == mla::LATENT && Params::HEAD_DIM_PE == mla::ROTARY, "columns of the kernel");
  static_assert(TILE == mla::ROWS && PAGED && !ALL_MASKED, "the only form of the kernel");
  if (work.blocks == 0) return cudaSuccess;
  const bool is_aligned = RowsAligned(params) && IsAligned(params.q_pe, 16) && params.q_pe_stride_n % 8 == 0 &&
                          params.q_pe_stride_h % 8 == 0;
  if (!is_aligned) return cudaErrorMisalignedAddress;
  const Status status = mla::PagesAreBoxes(int(params.page_size.divisor))
                            ? LaunchPages<Params, false>(params, work, enable_pdl, stream)
                            : LaunchPages<Params, true>(params, work, enable_pdl, stream);
  if (status != cudaSuccess || work.merge_blocks == 0) return status;
  return Launch(mla::MergeColumnsKernel<Params, Variant<false>>, dim3(work.merge_blocks * mla::ROWS),
                dim3(merge::THREADS), enable_pdl, stream, params, work);
}

}  // namespace attention
}  // namespace flashinfer
