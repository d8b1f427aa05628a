// SPDX-License-Identifier: Apache-2.0
// Launch of the Hopper prefill kernel: definitions for its tiles of the functions that common/backend_interface.h
// declares.
#pragma once
#include "../../device/occupancy.cuh"
#include "kernel.cuh"

namespace flashinfer {
namespace attention {
namespace prefill_sm90 {

/// Traits of the kernel that a module has for calls without special strides or pages.
template <typename Params, bool PAGED, Form FORM, bool IS_FP8_QUERY = sizeof(typename Params::DTypeQ) == 1>
struct UsualTraitsOf {
  using Type = Traits<Params,
                      IS_FP8<typename Params::DTypeKV> ? Loading::kConvert
                      : PAGED                          ? Loading::kPages
                                                       : Loading::kRows,
                      PAGED, FORM>;
};
template <typename Params, bool PAGED>
struct UsualTraitsOf<Params, PAGED, Form::kLong, true> {
  using Type = Fp8Traits<Params, PAGED, HasBoxesFp8(Params::HEAD_DIM_QK, Params::HEAD_DIM_VO)>;
};
template <typename Params, bool PAGED, Form FORM = Form::kLong>
using UsualTraits = typename UsualTraitsOf<Params, PAGED, FORM>::Type;

/// Traits of the kernel for rows that TMA cannot copy.
template <typename Params, bool PAGED, Form FORM, bool IS_FP8_QUERY = sizeof(typename Params::DTypeQ) == 1>
struct GatheringTraitsOf {
  using Type = Traits<Params, Loading::kGather, PAGED, FORM>;
};
template <typename Params, bool PAGED>
struct GatheringTraitsOf<Params, PAGED, Form::kLong, true> {
  using Type = Fp8Traits<Params, PAGED, false>;
};

/// Form whose tiles have TILE rows.
template <int TILE>
inline constexpr Form FORM_OF = TILE == SHORT_PREFILL_TILE ? Form::kShort : Form::kLong;

/// Traits of the first choice among the ways of loading keys. With a mask of pairs, e4m3 keys and values are copied by cp.async:
/// consumers have too few registers for it beside what they find out early about boxes.
template <typename Params, bool PAGED, Form FORM, bool ALL_MASKED, typename Usual = UsualTraits<Params, PAGED, FORM>,
          bool IS_COPIED = ALL_MASKED && Usual::TRANSPOSES && !Usual::GATHERS>
struct FirstTraits {
  using Type = Usual;
};
template <typename Params, bool PAGED, Form FORM, bool ALL_MASKED, typename Usual>
struct FirstTraits<Params, PAGED, FORM, ALL_MASKED, Usual, true> : GatheringTraitsOf<Params, PAGED, FORM> {};

/// Blocks of the kernel that run at once, and its launch. All ways of loading keys have the same shape.
template <typename Tr, bool ALL_MASKED>
struct Kernel {
  static constexpr auto FUNCTION = PrefillSm90Kernel<Tr, Variant<ALL_MASKED>, ALL_MASKED>;

  static int ResidentBlocks() { return device::MaxActiveBlocksOf<FUNCTION, Tr::THREADS, Tr::SHARED_BYTES>(); }
  static Status Launch(const typename Tr::Params& params, const WorkList& work, const Boxes& boxes, bool enable_pdl,
                       Stream stream) {
    const int blocks = std::min(work.blocks, ResidentBlocks());
    if (blocks == 0) return cudaErrorInvalidConfiguration;
    return device::LaunchBlocks<FUNCTION, Tr::THREADS, Tr::SHARED_BYTES>(
        blocks, enable_pdl, stream, params, work, boxes, RowStrides<typename Tr::Params>(params));
  }
};

}  // namespace prefill_sm90

template <typename Params, int TILE, bool PAGED, bool ALL_MASKED>
int MaxActivePrefillSm90Blocks() {
  using namespace prefill_sm90;
  return Kernel<typename FirstTraits<Params, PAGED, FORM_OF<TILE>, ALL_MASKED>::Type, ALL_MASKED>::ResidentBlocks();
}

/// Run the items of `work`, whose tiles have PrefillTileSm90() or SHORT_PREFILL_TILE rows, by TMA where the strides and pages allow it, or
/// with keys and values converted or values transposed. Not for RoPE in the kernel, nor for variants that change keys.
template <typename Params, int TILE, bool PAGED, bool ALL_MASKED>
Status LaunchPrefillSm90(const Params& params, const WorkList& work, bool enable_pdl, Stream stream) {
  using namespace prefill_sm90;
  static_assert(HasPrefillSm90(Params::HEAD_DIM_QK, Params::HEAD_DIM_VO), "head dimensions of the kernel");
  static_assert(!CHANGES_KEYS<Params>, "keys are multiplied as stored");
  constexpr Form FORM = FORM_OF<TILE>;
  using Tr = typename FirstTraits<Params, PAGED, FORM, ALL_MASKED>::Type;
  static_assert(TILE == Tr::TILE, "tiles of the kernel");
  if (work.blocks == 0) return cudaSuccess;
  if (!RowsAligned(params)) return cudaErrorMisalignedAddress;
  Boxes boxes{};
  boxes.has_query = !CHANGES_QUERIES && EncodeQueries(&boxes, params, Tr::TILE);
  if constexpr (Tr::CONVERTS || Tr::GATHERS) {
    return Kernel<Tr, ALL_MASKED>::Launch(params, work, boxes, enable_pdl, stream);
  } else {
    if (PAGED ? EncodePages(&boxes, params, Tr::BOX_KEYS) : EncodeRows(&boxes, params, Tr::BOX_KEYS)) {
      return Kernel<Tr, ALL_MASKED>::Launch(params, work, boxes, enable_pdl, stream);
    }
    using Gathering = typename GatheringTraitsOf<Params, PAGED, FORM>::Type;
    return Kernel<Gathering, ALL_MASKED>::Launch(params, work, boxes, enable_pdl, stream);
  }
}

template <typename Params, int TILE, bool PAGED, bool ALL_MASKED>
Status LaunchAttention(const Params& params, const WorkList& work, bool enable_pdl, Stream stream) {
  return LaunchPrefillSm90<Params, TILE, PAGED, ALL_MASKED>(params, work, enable_pdl, stream);
}

}  // namespace attention
}  // namespace flashinfer
