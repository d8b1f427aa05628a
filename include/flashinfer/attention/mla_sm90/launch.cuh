// SPDX-License-Identifier: Apache-2.0
// MLA decode on SM90: the launch that common/backend_interface.h declares, for modules whose only list has tiles of
// mla::ROWS rows, and the merge of split tiles. The two kernels (kernel.cuh) are in units of their own, compiled in
// parallel.
//   test  pytest tests/mla/test_emulated_mla.py      bench  python benchmarks/bench_mla.py
#pragma once
#include "../common/kv_rows.cuh"
#include "../common/merge.cuh"
#include "shape.cuh"

namespace flashinfer {
namespace attention {
namespace mla {

constexpr int MERGE_COLUMNS = LATENT / merge::WARPS;  // columns of a warp
/// Tiles up to which several groups of warps merge each row: their blocks are all resident on an H200.
constexpr int FEW_TILES = 4;

/// Params of the merge of some columns of each row.
template <typename Params>
struct MergedColumns : Params {
  static constexpr int HEAD_DIM_VO = MERGE_COLUMNS;
  __device__ __forceinline__ explicit MergedColumns(const Params& p) : Params(p) {}
};

/// Add the sums of a row of GROUPS groups of warps in the first group, in order. `first`: first column of the warp.
template <int GROUPS>
__device__ __forceinline__ void AddGroups(merge::RowSum<MERGE_COLUMNS>& row, int group, int first) {
  __shared__ float4 sums[GROUPS][LATENT / 4];
  __shared__ float maxima[GROUPS], totals[GROUPS];
  const int at = first / 4 + int(threadIdx.x) % 32;
  const auto& x = row.sum[0];
  sums[group][at] = float4{x[0], x[1], x[2], x[3]};
  if (first == 0 && threadIdx.x % 32 == 0) maxima[group] = row.maximum, totals[group] = row.total;
  __syncthreads();
  if (group > 0) return;
  row = {};
#pragma unroll
  for (int i = 0; i < GROUPS; ++i) row.maximum = fmaxf(row.maximum, maxima[i]);
  const float base = row.maximum == -math::inf ? 0.f : row.maximum;
#pragma unroll
  for (int i = 0; i < GROUPS; ++i) {
    const float weight = ptx::Exp2(maxima[i] - base);
    row.total += weight * totals[i];
    merge::AddPart(row.sum, weight, {sums[i][at]});
  }
}

/// Merge one row per block, with a part of its columns per warp. GROUPS: groups of warps that take some of the parts
/// each. One long request has few rows and many parts.
template <typename Params, typename Variant, int GROUPS>
__global__ void __launch_bounds__(GROUPS* merge::THREADS)
    MergeColumnsKernel(const __grid_constant__ Params params, const __grid_constant__ WorkList work) {
  const int index = int(blockIdx.x) / ROWS, row = int(blockIdx.x) % ROWS, warp = int(threadIdx.x) / 32;
  const int first = warp % merge::WARPS * MERGE_COLUMNS, group = warp / merge::WARPS;
  // The list is older than the kernel that this one waits for, and has room for items of all blocks. All blocks wait: the
  // next kernel may start when this one has ended.
  const int count = *work.num_merges;
  const MergeItem item = work.merges[index];
  ptx::GridDependencyWait();
  if (index >= count) return;
  const int heads = params.group.divisor, token = params.group.Divide(item.row_begin + row);
  if (token >= item.qo_len) return;
  MergedColumns<Params> p(params);
  p.o += first;
  if (first > 0) p.lse = nullptr;
  const int begin = item.count * group / GROUPS, end = item.count * (group + 1) / GROUPS;
  auto part_of = [&](int i) {
    const int64_t at = int64_t(item.first_slot + begin + i) * ROWS + row;
    return merge::Part{work.partial_o + at * LATENT + first, work.partial_lse + at};
  };
  merge::RowSum<MERGE_COLUMNS> sum;
  merge::AddParts<Variant>(sum, end - begin, part_of);
  if constexpr (GROUPS > 1) {
    AddGroups<GROUPS>(sum, group, first);
    if (group > 0) return;
  }
  const int head = item.row_begin + row - token * heads;
  merge::Write<Variant>(p, sum.sum, sum.maximum, sum.total, int64_t(item.qo_begin) + token, head);
}

/// Launch the merge.
template <int GROUPS, typename Params>
Status LaunchMerge(const Params& params, const WorkList& work, bool enable_pdl, Stream stream) {
  return Launch(MergeColumnsKernel<Params, Variant<false>, GROUPS>, dim3(work.merge_blocks * ROWS),
                dim3(GROUPS * merge::THREADS), enable_pdl, stream, params, work);
}

}  // namespace mla

/// Run the items of `work` on the kernel that copies rows of keys with cp.async (COPIED), or boxes of pages by TMA.
template <typename Params, bool COPIED>
Status LaunchPages(const Params& params, const WorkList& work, bool enable_pdl, Stream stream);

/// Run the items of `work` and merge split tiles. Each row of each tensor must be aligned to 16 bytes.
template <typename Params, int TILE, bool PAGED, bool ALL_MASKED>
Status LaunchAttention(const Params& params, const WorkList& work, bool enable_pdl, Stream stream) {
  static_assert(Params::HEAD_DIM_VO == mla::LATENT, "columns of the kernel");
  static_assert(Params::HEAD_DIM_PE == mla::ROTARY || Params::HEAD_DIM_PE == 0, "columns of the kernel");
  static_assert(TILE == mla::ROWS && PAGED && !ALL_MASKED, "the only form of the kernel");
  if (work.blocks == 0) return cudaSuccess;
  const bool is_aligned = RowsAligned(params) && IsAligned(params.q_pe, 16) && params.q_pe_stride_n % 8 == 0 &&
                          params.q_pe_stride_h % 8 == 0;
  if (!is_aligned || !IsAligned(params.latent_scales, 16)) return cudaErrorMisalignedAddress;
  Status status;
  if constexpr (IS_FP8<typename Params::DTypeKV>) {
    status = LaunchPages<Params, true>(params, work, enable_pdl, stream);
  } else {
    status = mla::PagesAreBoxes(int(params.page_size.divisor))
                 ? LaunchPages<Params, false>(params, work, enable_pdl, stream)
                 : LaunchPages<Params, true>(params, work, enable_pdl, stream);
  }
  if (status != cudaSuccess || work.merge_blocks == 0) return status;
  return work.merge_blocks <= mla::FEW_TILES ? mla::LaunchMerge<4>(params, work, enable_pdl, stream)
                                             : mla::LaunchMerge<1>(params, work, enable_pdl, stream);
}

}  // namespace attention
}  // namespace flashinfer
