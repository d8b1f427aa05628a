// SPDX-License-Identifier: Apache-2.0
// The kernels of pair.h. Blocks of the narrow list come first: the device gives one to each SM before any gets a second,
// so that each SM has one of either kind (as long as the lists are planned for that).
//   test  pytest tests/cascade
#pragma once
#include "merge.cuh"
#include "narrow.cuh"
#include "pair.h"
#include "wide.cuh"

namespace flashinfer {
namespace attention {
namespace pair {

constexpr int THREADS = narrow::THREADS;

/// One list and what it works on.
template <typename Params>
struct Part {
  Params params;
  WorkList work;
  RowStrides<Params> strides;
};

template <typename Params, int TILE>
struct Shape {
  using Wide = wide::Traits<Params, TILE>;
  static constexpr int FIT = narrow::Shape<Params>::StagesOf(2), STAGES = FIT > 6 ? 6 : (FIT < 1 ? 1 : FIT);
  using Narrow = narrow::Traits<Params, STAGES>;
  static constexpr int SHARED_BYTES =
      Wide::SHARED_BYTES > Narrow::SHARED_BYTES ? Wide::SHARED_BYTES : Narrow::SHARED_BYTES;
  static constexpr bool FITS = FIT >= 2 && Wide::THREADS == THREADS && Wide::BLOCKS_PER_SM == 2 &&
                               sizeof(typename Params::DTypeKV) == 2 && !CHANGES_KEYS<Params>;
};

template <typename Params, typename Variant, int TILE>
__global__ void __launch_bounds__(THREADS, 2)
    PairKernel(const __grid_constant__ Part<Params> wide, const __grid_constant__ Part<Params> narrow) {
  extern __shared__ __align__(128) char shared[];
  ptx::GridDependencyWait();
  ptx::LaunchDependents();  // the merge finds room as blocks leave, and waits for all of them
  const int block = int(blockIdx.x) - narrow.work.blocks;
  if (block < 0) {
    narrow::NarrowBlock<Params, Variant, Shape<Params, TILE>::STAGES, true, false>(narrow.params, narrow.work,
                                                                                   narrow.strides, shared, blockIdx.x);
  } else {
    wide::WideBlock<Params, Variant, TILE, true, false>(wide.params, wide.work, wide.strides, shared, block);
  }
}

/// One warp for each row: parts of the wide list, then those of the narrow one.
template <typename Params, typename Variant, int TILE>
__global__ void __launch_bounds__(merge::THREADS, 4)
    PairMergeKernel(const __grid_constant__ Params p, const __grid_constant__ WorkList wide,
                    const __grid_constant__ WorkList narrow, const TokenPlace* places, int rows) {
  static_assert(Variant::use_softmax, "states are weighted by their scores");
  constexpr int D = Params::HEAD_DIM_VO;
  const int index = int(blockIdx.x * merge::WARPS + threadIdx.x / 32);
  if (index >= rows) return;
  const int token = index / p.num_qo_heads, head = index - token * p.num_qo_heads;
  const int kv_head = p.group.Divide(head), of_group = head - kv_head * int(p.group.divisor);
  // Plans were there before the kernel started that is waited for below.
  const TokenPlace place = places[token];
  if (place.wide_tile < 0) return;
  const int wide_row = place.wide_row + of_group, narrow_row = place.narrow_row + of_group;
  const MergeItem a = wide.merges[place.wide_tile + wide_row / TILE];
  const MergeItem b = narrow.merges[place.narrow_tile + narrow_row / NARROW_TILE];
  const int64_t shared = int64_t(a.first_slot + kv_head) * TILE + wide_row % TILE, shared_step = int64_t(a.step) * TILE;
  const int64_t own = int64_t(b.first_slot + kv_head) * NARROW_TILE + narrow_row % NARROW_TILE;
  const int64_t own_step = int64_t(b.step) * NARROW_TILE;
  auto part_of = [&](int i) {
    const bool is_shared = i < a.count;
    const int64_t at = is_shared ? shared + i * shared_step : own + (i - a.count) * own_step;
    return merge::Part{(is_shared ? wide.partial_o : narrow.partial_o) + at * D,
                       (is_shared ? wide.partial_lse : narrow.partial_lse) + at};
  };
  ptx::GridDependencyWait();
  merge::MergeRow<Variant>(p, a.count + b.count, part_of, token, head);
}

}  // namespace pair

template <typename Params, int TILE>
int PairBlocks() {
  using Shape = pair::Shape<Params, TILE>;
  if constexpr (Shape::FITS) {
    return ResidentBlocksOf<pair::PairKernel<Params, Variant<false>, TILE>, pair::THREADS, Shape::SHARED_BYTES>() / 2;
  } else {
    return 0;
  }
}

template <typename Params, int TILE>
Status LaunchTogether(const Params& wide_params, const WorkList& wide, const Params& narrow_params,
                      const WorkList& narrow, bool enable_pdl, Stream stream) {
  using Shape = pair::Shape<Params, TILE>;
  if constexpr (!Shape::FITS) {
    return cudaErrorNotSupported;
  } else {
    if (!RowsAligned(wide_params) || !RowsAligned(narrow_params)) return cudaErrorMisalignedAddress;
    return LaunchBlocks<pair::PairKernel<Params, Variant<false>, TILE>, pair::THREADS, Shape::SHARED_BYTES>(
        narrow.blocks + wide.blocks, enable_pdl, stream,
        pair::Part<Params>{wide_params, wide, RowStrides<Params>(wide_params)},
        pair::Part<Params>{narrow_params, narrow, RowStrides<Params>(narrow_params)});
  }
}

template <typename Params, int TILE>
Status LaunchPair(const Pair<Params>& both, bool enable_pdl, Stream stream) {
  if constexpr (!pair::Shape<Params, TILE>::FITS) {
    return cudaErrorNotSupported;
  } else {
    if (both.tokens == 0) return cudaSuccess;
    const Status status =
        LaunchTogether<Params, TILE>(both.wide_params, both.wide, both.narrow_params, both.narrow, enable_pdl, stream);
    if (status != cudaSuccess) return status;
    const int rows = both.tokens * both.narrow_params.num_qo_heads;
    return Launch(pair::PairMergeKernel<Params, Variant<false>, TILE>, dim3(DivideUp(rows, merge::WARPS)),
                  dim3(merge::THREADS), enable_pdl, stream, both.narrow_params, both.wide, both.narrow, both.places,
                  rows);
  }
}

}  // namespace attention
}  // namespace flashinfer
