// SPDX-License-Identifier: Apache-2.0
// Argument parsing, scratch allocation and launch of single-request calls.
#pragma once
#include "attention_launch.h"

namespace flashinfer {
namespace attention {

/// Call of a single request.
struct SingleCall {
  Params params{};
  Optional<TensorView> tmp;
  DLDevice device;
  bool all_masked;
};

/// q, k, v, tmp | None, o, lse | None, mask_mode, layout, window_left, *extras. tmp is scratch memory.
constexpr int SINGLE_ARGUMENTS = 9;

inline SingleCall NextSingle(const char* op, Arguments& args) {
  SingleCall call;
  Params& p = call.params;
  const TensorView q = args.Next<TensorView>(), k = args.Next<TensorView>(), v = args.Next<TensorView>();
  call.tmp = args.Next<Optional<TensorView>>();
  const TensorView o = args.Next<TensorView>();
  const Optional<TensorView> lse = args.Next<Optional<TensorView>>();
  const int64_t mask_mode = args.Next<int64_t>(), layout = args.Next<int64_t>(), window_left = args.Next<int64_t>();
  Expect(op, "q", q).rank(3);
  SetQueries(p, op, q, o, lse);
  SetKeys(p, op, q, o, k, v, layout, false);
  ExtrasReader reader(args, q, layout, false);
  ReadExtras(p, reader);
  p.qo_len = int32_t(q.size(0));
  p.window_left = int32_t(window_left);
  SetMaskMode(p, op, mask_mode);
  call.device = q.device();
  call.all_masked = WantsAll(mask_mode);
  return call;
}

/// Scratch bytes that a single request can use on the current device: a partial state for each resident block, if its
/// keys are split.
template <bool HAS_PREFILL>
int64_t ScratchBytes(const Params& params) {
  const int64_t rows = int64_t(params.qo_len) * params.group.divisor;
  const auto [tile, blocks] = SingleTileOf<HAS_PREFILL>(rows);
  const bool is_cut = params.kv_len > KV_UNIT && 2 * DivideUp(rows, tile) * params.num_kv_heads <= blocks;
  return is_cut ? blocks * tile * (Params::HEAD_DIM_VO + 1) * int64_t(sizeof(float)) : 0;
}

/// Scratch memory: the caller's, or that of the call (torch must not see memory that is kept between calls).
class Scratch {
 public:
  Scratch(const Optional<TensorView>& given, int64_t bytes, DLDevice device) {
    if (given.has_value()) {
      view_ = *given;
      return;
    }
    size_ = bytes;
    flat_ = {bytes > 0 ? memory_.Take(device, bytes) : nullptr, device, 1, dl_uint8, &size_, &stride_, 0};
    view_ = TensorView(tvm::ffi::TensorView(&flat_));
  }
  Scratch(const Scratch&) = delete;

  const TensorView& view() const { return view_.value(); }

 private:
  int64_t size_ = 0, stride_ = 1;
  DLTensor flat_{};
  CallMemory memory_;
  std::optional<TensorView> view_;
};

/// Launch options of `op` on the current device, with programmatic dependent launch where available.
inline LaunchSite SiteOf(const char* op, DLDevice device) {
  return {op, UsePdl(true, device), get_stream(device), device};
}

/// Launch the call on the current device.
inline void RunSingle(const LaunchSite& site, const SingleCall& call) {
  const Scratch scratch(call.tmp, call.tmp.has_value() ? 0 : ScratchBytes<true>(call.params), call.device);
  RunPlannedSingle<true>(site, call.params, scratch.view(), call.all_masked);
}

}  // namespace attention
}  // namespace flashinfer
