// SPDX-License-Identifier: Apache-2.0
// The kernels of low-rank adapters on the CPU, called by test_emulated_bgmv.py.
#include <flashinfer/bgmv_moe.cuh>

using namespace flashinfer;

namespace {

/// Read the pairs that both kernels have first among their fields.
BgmvPairs Pairs(const int64_t*& x) {
  BgmvPairs by{};
  by.w_ptr = reinterpret_cast<const int64_t*>(*x++);
  by.token_ids = reinterpret_cast<const int64_t*>(*x++);
  by.expert_ids = reinterpret_cast<const int64_t*>(*x++);
  by.lora_ids = reinterpret_cast<const int64_t*>(*x++);
  by.lora_stride = *x++, by.pairs = *x++, by.tokens = *x++, by.experts = *x++, by.slices = *x++;
  return by;
}

}  // namespace

/// y, x, rows or null, columns and rank follow the pairs.
EMULATION_EXPORT int shrink(const int64_t* x) {
  BgmvShrinkParams p{};
  p.by = Pairs(x);
  p.y = {reinterpret_cast<void*>(*x++), BgmvFloat::kFloat};
  p.x = reinterpret_cast<const void*>(*x++);
  p.x_rows = reinterpret_cast<const int64_t*>(*x++);
  p.columns = p.x_stride = *x++;
  p.rank = *x++;
  return int(BgmvMoeShrink<__nv_bfloat16>(p, nullptr));
}

/// y and its stride, x, weights, starts, order, offsets, rank, columns and finalize follow the pairs.
EMULATION_EXPORT int expand(const int64_t* x) {
  BgmvExpandParams p{};
  p.by = Pairs(x);
  p.y = {reinterpret_cast<void*>(*x++), BgmvFloat::kFloat};
  p.y_stride = *x++;
  p.x = {reinterpret_cast<void*>(*x++), BgmvFloat::kFloat};
  p.weights = reinterpret_cast<const float*>(*x++);
  p.slice_starts = reinterpret_cast<const int64_t*>(*x++);
  p.order = reinterpret_cast<const int64_t*>(*x++);
  p.offsets = reinterpret_cast<const int64_t*>(*x++);
  p.rank = *x++, p.columns = *x++, p.finalize = *x++ != 0;
  p.scale = 1.f;
  return int(BgmvMoeExpand<__nv_bfloat16>(p, nullptr));
}
