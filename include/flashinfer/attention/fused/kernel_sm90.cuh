// SPDX-License-Identifier: Apache-2.0
// Fused launch of plan.h on Hopper. A block of the prefill kernel fills an SM, so that no SM can hold a block of each
// list. Instead the first blocks of the launch begin with the decode list: some of their warpgroups are
// teams, each of which runs a decode block in its part of the shared memory. These SMs wait for memory while the others
// multiply; then they take prefill items like all others. The planner divides the SMs (Planner::DivideDevice).
//
//   SMs of the decode list    [team 0][team 1].. decode items, then [producer][consumers] of prefill items
//   other SMs                 [producer][consumers] of prefill items            until both lists are empty
//   test   pytest tests/attention/test_emulated_prefill.py tests/attention/test_mixed.py
//   bench  python benchmarks/bench_prefill.py
#pragma once
#include "../decode/kernel.cuh"
#include "plan.h"
#include "../prefill_sm90/launch.cuh"

namespace flashinfer {
namespace attention {
namespace mixed_sm90 {

/// Pages, or one request whose keys are one page (POD).
template <typename Params>
struct PrefillTraits : prefill_sm90::UsualTraits<Params, true> {
  static constexpr bool MAY_BE_SINGLE = true;
};

template <typename Params>
struct Shape {
  using Prefill = PrefillTraits<Params>;
  using Decode = decode::Shape<Params>;
  static constexpr int TEAMS = Decode::BLOCKS, STAGES = Decode::STAGES;  // as the decode kernel on an SM
  static constexpr int TEAM_BYTES = (decode::Traits<Params, STAGES, true>::SHARED_BYTES + 127) / 128 * 128;
  static constexpr int SHARED_BYTES =
      Prefill::SHARED_BYTES > TEAMS* TEAM_BYTES ? Prefill::SHARED_BYTES : TEAMS * TEAM_BYTES;
  static constexpr bool FITS = TEAMS > 1 && TEAMS* decode::THREADS <= Prefill::THREADS&& Prefill::CONSUMERS == 2 &&
                               !Prefill::CONVERTS && SHARED_BYTES <= Prefill::SHARED_LIMIT;
};

/// The decode list of a launch.
template <typename Params>
struct DecodePart {
  Params params;
  WorkList work;
  RowStrides<Params> strides;
};

template <typename Tr, typename Variant>
__global__ void __launch_bounds__(Tr::THREADS, 1)
    MixedSm90Kernel(const __grid_constant__ typename Tr::Params p, const __grid_constant__ WorkList work,
                    const __grid_constant__ prefill_sm90::Boxes boxes,
                    const __grid_constant__ RowStrides<typename Tr::Params> strides,
                    const __grid_constant__ DecodePart<typename Tr::Params> decode) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Shape = mixed_sm90::Shape<typename Tr::Params>;
  extern __shared__ __align__(1024) char memory[];
  ptx::GridDependencyWait();
  if (int(blockIdx.x) < work.late_blocks) {
    const int team = __shfl_sync(~0u, int(threadIdx.x) / decode::THREADS, 0);
    const int block = int(blockIdx.x) * Shape::TEAMS + team;
    if (team < Shape::TEAMS && block < decode.work.blocks) {
      decode::DecodeBlock<typename Tr::Params, Variant, Shape::STAGES, true, false, false, true>(
          decode.params, decode.work, decode.strides, memory + team * Shape::TEAM_BYTES, block);
    }
    ptx::FenceAsyncProxy();  // TMA writes next to the memory that threads read and wrote
    __syncthreads();
  }
  prefill_sm90::RunBlock<Tr, Variant, false>(p, work, boxes, strides, memory);
#endif
}

}  // namespace mixed_sm90

template <typename Params, int TILE>
int FusedBlocks() {
  using Shape = mixed_sm90::Shape<Params>;
  if constexpr (Shape::FITS) {
    constexpr auto KERNEL = mixed_sm90::MixedSm90Kernel<typename Shape::Prefill, Variant<false>>;
    return Shape::TEAMS * device::MaxActiveBlocksOf<KERNEL, Shape::Prefill::THREADS, Shape::SHARED_BYTES>();
  } else {
    return 0;
  }
}

template <typename Params, int TILE>
Status LaunchFused(const Params& prefill_params, const WorkList& prefill, const Params& decode_params,
                   const WorkList& decode, bool enable_pdl, Stream stream) {
  using Shape = mixed_sm90::Shape<Params>;
  if constexpr (!Shape::FITS) {
    return cudaErrorNotSupported;
  } else {
    using Tr = typename Shape::Prefill;
    if (!RowsAligned(prefill_params) || !RowsAligned(decode_params)) return cudaErrorMisalignedAddress;
    prefill_sm90::Boxes boxes{};
    boxes.has_query = !prefill_sm90::CHANGES_QUERIES && prefill_sm90::EncodeQueries(&boxes, prefill_params, Tr::TILE);
    if (!prefill_sm90::EncodePages(&boxes, prefill_params, Tr::BOX_KEYS))
      return cudaErrorNotSupported;  // pages that TMA cannot read
    WorkList work = prefill;
    work.late_blocks = (decode.blocks + Shape::TEAMS - 1) / Shape::TEAMS;
    const int resident = FusedBlocks<Params, TILE>() / Shape::TEAMS;
    if (work.late_blocks >= resident) return cudaErrorNotSupported;
    constexpr auto KERNEL = mixed_sm90::MixedSm90Kernel<Tr, Variant<false>>;
    return device::LaunchBlocks<KERNEL, Tr::THREADS, Shape::SHARED_BYTES>(
        std::min(prefill.blocks + work.late_blocks, resident), enable_pdl, stream, prefill_params, work, boxes,
        RowStrides<Params>(prefill_params),
        mixed_sm90::DecodePart<Params>{decode_params, decode, RowStrides<Params>(decode_params)});
  }
}

}  // namespace attention
}  // namespace flashinfer
