// SPDX-License-Identifier: Apache-2.0
// Kernels of plan.h. Blocks of the decode list come first: the device gives one block to each SM before any SM gets a
// second, so each SM has one of each kind (if the lists are planned for that).
//
//   blocks  0 .. d - 1 │ d .. d + p - 1        SM 0: [decode block 0][prefill block 0]    bound by whichever list is longer
//           decode     │ prefill               SM 1: [decode block 1][prefill block 1]
//   test  pytest tests/cascade tests/pod      bench  python benchmarks/bench_pod.py
#pragma once
#include "../common/merge.cuh"
#include "../decode/kernel.cuh"
#include "plan.h"
#include "../prefill/kernel.cuh"

namespace flashinfer {
namespace attention {
namespace fused {

constexpr int THREADS = decode::THREADS;

/// One list with its parameters.
template <typename Params>
struct Part {
  Params params;
  WorkList work;
  RowStrides<Params> strides;
};

template <typename Params, int TILE>
struct Shape {
  using Prefill = prefill::Traits<Params, TILE>;
  static constexpr int FIT = decode::Shape<Params>::StagesOf(2), STAGES = FIT > 6 ? 6 : (FIT < 1 ? 1 : FIT);
  using Decode = decode::Traits<Params, STAGES>;
  static constexpr int SHARED_BYTES =
      Prefill::SHARED_BYTES > Decode::SHARED_BYTES ? Prefill::SHARED_BYTES : Decode::SHARED_BYTES;
  static constexpr bool FITS = FIT >= 2 && Prefill::THREADS == THREADS && Prefill::BLOCKS_PER_SM == 2 &&
                               sizeof(typename Params::DTypeKV) == 2 && !CHANGES_KEYS<Params>;
};

template <typename Params, typename Variant, int TILE>
__global__ void __launch_bounds__(THREADS, 2)
    FusedKernel(const __grid_constant__ Part<Params> prefill, const __grid_constant__ Part<Params> decode) {
  extern __shared__ __align__(128) char shared[];
  ptx::GridDependencyWait();
  ptx::LaunchDependents();  // the merge starts as blocks finish, and waits for all of them
  const int block = int(blockIdx.x) - decode.work.blocks;
  if (block < 0) {
    decode::DecodeBlock<Params, Variant, Shape<Params, TILE>::STAGES, true, false>(decode.params, decode.work,
                                                                                   decode.strides, shared, blockIdx.x);
  } else {
    prefill::PrefillBlock<Params, Variant, TILE, true, false>(prefill.params, prefill.work, prefill.strides, shared,
                                                              block);
  }
}

/// Merge with one warp per row: parts of the prefill list, then those of the decode list.
template <typename Params, typename Variant, int TILE>
__global__ void __launch_bounds__(merge::THREADS, 4)
    FusedMergeKernel(const __grid_constant__ Params p, const __grid_constant__ WorkList prefill,
                     const __grid_constant__ WorkList decode, const TokenPlace* places, int rows) {
  static_assert(Variant::use_softmax, "states are weighted by their scores");
  constexpr int D = Params::HEAD_DIM_VO;
  const int index = int(blockIdx.x * merge::WARPS + threadIdx.x / 32);
  if (index >= rows) return;
  const int token = index / p.num_qo_heads, head = index - token * p.num_qo_heads;
  const int kv_head = p.group.Divide(head), of_group = head - kv_head * int(p.group.divisor);
  // The plan was written before the kernel that is waited for below.
  const TokenPlace place = places[token];
  if (place.prefill_tile < 0) return;
  const int prefill_row = place.prefill_row + of_group, decode_row = place.decode_row + of_group;
  const MergeItem a = prefill.merges[place.prefill_tile + prefill_row / TILE];
  const MergeItem b = decode.merges[place.decode_tile + decode_row / DECODE_TILE];
  const int64_t shared = int64_t(a.first_slot + kv_head) * TILE + prefill_row % TILE,
                shared_step = int64_t(a.step) * TILE;
  const int64_t own = int64_t(b.first_slot + kv_head) * DECODE_TILE + decode_row % DECODE_TILE;
  const int64_t own_step = int64_t(b.step) * DECODE_TILE;
  auto part_of = [&](int i) {
    const bool is_shared = i < a.count;
    const int64_t at = is_shared ? shared + i * shared_step : own + (i - a.count) * own_step;
    return merge::Part{(is_shared ? prefill.partial_o : decode.partial_o) + at * D,
                       (is_shared ? prefill.partial_lse : decode.partial_lse) + at};
  };
  ptx::GridDependencyWait();
  merge::MergeRow<Variant>(p, a.count + b.count, part_of, token, head);
}

}  // namespace fused

template <typename Params, int TILE>
int FusedBlocks() {
  using Shape = fused::Shape<Params, TILE>;
  if constexpr (Shape::FITS) {
    return device::MaxActiveBlocksOf<fused::FusedKernel<Params, Variant<false>, TILE>, fused::THREADS,
                                     Shape::SHARED_BYTES>() /
           2;
  } else {
    return 0;
  }
}

template <typename Params, int TILE>
Status LaunchFused(const Params& prefill_params, const WorkList& prefill, const Params& decode_params,
                   const WorkList& decode, bool enable_pdl, Stream stream) {
  using Shape = fused::Shape<Params, TILE>;
  if constexpr (!Shape::FITS) {
    return cudaErrorNotSupported;
  } else {
    if (!RowsAligned(prefill_params) || !RowsAligned(decode_params)) return cudaErrorMisalignedAddress;
    return device::LaunchBlocks<fused::FusedKernel<Params, Variant<false>, TILE>, fused::THREADS, Shape::SHARED_BYTES>(
        decode.blocks + prefill.blocks, enable_pdl, stream,
        fused::Part<Params>{prefill_params, prefill, RowStrides<Params>(prefill_params)},
        fused::Part<Params>{decode_params, decode, RowStrides<Params>(decode_params)});
  }
}

template <typename Params, int TILE>
Status LaunchFusedCascade(const FusedLists<Params>& both, bool enable_pdl, Stream stream) {
  if constexpr (!fused::Shape<Params, TILE>::FITS) {
    return cudaErrorNotSupported;
  } else {
    if (both.tokens == 0) return cudaSuccess;
    const Status status = LaunchFused<Params, TILE>(both.prefill_params, both.prefill, both.decode_params, both.decode,
                                                    enable_pdl, stream);
    if (status != cudaSuccess) return status;
    const int rows = both.tokens * both.decode_params.num_qo_heads;
    return Launch(fused::FusedMergeKernel<Params, Variant<false>, TILE>, dim3(DivideUp(rows, merge::WARPS)),
                  dim3(merge::THREADS), enable_pdl, stream, both.decode_params, both.prefill, both.decode, both.places,
                  rows);
  }
}

}  // namespace attention
}  // namespace flashinfer
