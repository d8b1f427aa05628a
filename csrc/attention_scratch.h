// SPDX-License-Identifier: Apache-2.0
// What the single calls see to by themselves: scratch memory, the caller's or as much as RunUniform can use, and how to
// launch.
#pragma once
#include "attention_launch.h"

namespace flashinfer {
namespace attention {

/// Bytes that one request can use on the current device: a state for each block that runs at once, if keys are cut.
template <bool HAS_WIDE>
int64_t ScratchBytes(const Params& params) {
  const int64_t rows = int64_t(params.qo_len) * params.group.divisor;
  int64_t tile = NARROW_TILE, blocks = CachedBlocks<NARROW_TILE>();
  if constexpr (HAS_WIDE) {
    if (rows > NARROW_TILE) tile = WIDE_TILE, blocks = CachedBlocks<WIDE_TILE>();
    if constexpr (HasWidestTile(Params::HEAD_DIM_VO)) {
      if (rows > WIDE_TILE) tile = WIDEST_TILE, blocks = CachedBlocks<WIDEST_TILE>();
    }
  }
  const bool is_cut = params.kv_len > GRANULE && 2 * DivideUp(rows, tile) * params.num_kv_heads <= blocks;
  return is_cut ? blocks * tile * (Params::HEAD_DIM_VO + 1) * int64_t(sizeof(float)) : 0;
}

/// Scratch memory: the caller's, that of the stream, or allocated.
class Scratch {
 public:
  Scratch(const Optional<TensorView>& given, int64_t bytes, DLDevice device) {
    if (given.has_value()) {
      view_ = *given;
      return;
    }
    Borrow(bytes, device);
    if (flat_.data != nullptr || bytes == 0) {
      view_ = TensorView(tvm::ffi::TensorView(&flat_));
    } else {
      own_ = alloc_tensor({bytes}, dl_uint8, device);
      view_ = ViewOf(own_.value());
    }
  }
  Scratch(const Scratch&) = delete;

  const TensorView& view() const { return view_.value(); }

 private:
  static TensorView ViewOf(const Tensor& tensor) { return TensorView(tvm::ffi::TensorView(tensor)); }

  /// Torch takes 3 us to allocate some, and wants no memory of its own kept between calls.
  void Borrow(int64_t bytes, DLDevice device) {
    size_ = bytes;
    flat_.device = device;
    flat_.ndim = 1;
    flat_.dtype = dl_uint8;
    flat_.shape = &size_;
    flat_.strides = &stride_;
#ifndef FLASHINFER_CPU
    if (bytes > 0) flat_.data = ScratchOf(get_stream(device), device, bytes);
#endif
  }

  int64_t size_ = 0, stride_ = 1;
  DLTensor flat_{};
  Optional<Tensor> own_;
  std::optional<TensorView> view_;
};

/// Where the current device launches kernels of `op`, dependently if it can.
inline LaunchSite SiteOf(const char* op, DLDevice device) {
  return {op, UsePdl(true, device), get_stream(device), device};
}

}  // namespace attention
}  // namespace flashinfer
