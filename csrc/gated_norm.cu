// SPDX-License-Identifier: Apache-2.0
// Launchers of the gated norms: argument checks, stream.
#include "tvm_ffi_utils.h"
// clang-format off
#include <flashinfer/gated_norm.h>
#if defined(FLASHINFER_CPU)
#include <flashinfer/gated_norm_cpu.h>
#elif defined(__CUDACC__)
#include <flashinfer/gated_norm.cuh>
#endif
// clang-format on

namespace {

using flashinfer::bfloat16_t;
using OptionalView = Optional<TensorView>;

constexpr int64_t MAX_HIDDEN = 16384;

/// Check a matrix of rows; vectors of 16 bytes begin at each.
int64_t RowsOf(const char* op, const char* name, const TensorView& t, const TensorView& like, DLDataType dtype) {
  Expect(op, name, t).same_device(like, "branch").dtype({dtype}).same_shape(like, "branch").last_dim_contiguous();
  const int64_t bytes = dtype.bits / 8;
  if (reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 != 0 || (t.size(0) > 1 && t.stride(0) * bytes % 16 != 0)) {
    FLASHINFER_THROW(ArgumentError) << op << ": " << name << " must have rows that are aligned to 16 bytes, got "
                                    << "a stride of " << t.stride(0);
  }
  return t.stride(0);
}

void CheckVector(const char* op, const char* name, const TensorView& t, const TensorView& like, DLDataType dtype) {
  Expect(op, name, t).same_device(like, "branch").dtype({dtype}).rank(1).contiguous();
  Expect(op, name, t).dim(0, like.size(1), "branch.shape[1]");
  if (reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 != 0) {
    FLASHINFER_THROW(ArgumentError) << op << ": " << name << " must be aligned to 16 bytes, got another address";
  }
}

}  // namespace

void gated_residual_norm(TensorView branch, TensorView residual, OptionalView weight, OptionalView alpha,
                         TensorView beta, TensorView out, OptionalView next_weight, OptionalView next,
                         OptionalView router, double alpha_scalar, double eps, double gain_center, double next_eps,
                         double next_gain_center, bool enable_pdl) {
  const char* op = next.has_value() ? "gated_residual_next_rmsnorm" : "gated_residual_rmsnorm";
  flashinfer::GatedResidualParams p{};
  Expect(op, "branch", branch).on_device().rank(2).dtype({dl_bfloat16});
  p.rows = branch.size(0), p.hidden = branch.size(1);
  if (p.hidden % 8 != 0 || p.hidden > MAX_HIDDEN) {
    FLASHINFER_THROW(ArgumentError) << op << ": branch.shape[1] must be a multiple of 8 up to " << MAX_HIDDEN
                                    << ", got " << p.hidden;
  }
  p.branch_stride = RowsOf(op, "branch", branch, branch, dl_bfloat16);
  p.residual_stride = RowsOf(op, "residual", residual, branch, dl_float32);
  p.out_stride = RowsOf(op, next.has_value() ? "residual_out" : "out", out, branch, dl_float32);
  CheckVector(op, "beta", beta, branch, dl_float32);
  p.branch = branch.data_ptr<bfloat16_t>(), p.residual = residual.data_ptr<float>();
  p.beta = beta.data_ptr<float>(), p.out = out.data_ptr<float>();
  if (weight.has_value()) {
    CheckVector(op, "weight", weight.value(), branch, dl_bfloat16);
    p.weight = weight.value().data_ptr<bfloat16_t>();
  }
  if (alpha.has_value()) {
    CheckVector(op, "alpha", alpha.value(), branch, dl_float32);
    p.alpha = alpha.value().data_ptr<float>();
  }
  if (next.has_value()) {
    CheckVector(op, "next_weight", next_weight.value(), branch, dl_bfloat16);
    p.next_weight = next_weight.value().data_ptr<bfloat16_t>();
    p.next_stride = RowsOf(op, "ffn_input", next.value(), branch, dl_bfloat16);
    p.next = next.value().data_ptr<bfloat16_t>();
  }
  if (router.has_value()) {
    p.router_stride = RowsOf(op, "router_input", router.value(), branch, dl_float32);
    p.router = router.value().data_ptr<float>();
  }
  p.alpha_scalar = float(alpha_scalar), p.eps = float(eps), p.gain_center = float(gain_center);
  p.next_eps = float(next_eps), p.next_gain_center = float(next_gain_center);
  p.enable_pdl = UsePdl(enable_pdl, branch.device());
  DeviceGuard guard(branch.device());
  CheckStatus(op, flashinfer::GatedResidualNorm(p, get_stream(branch.device())));
}

void sigmoid_gate_norm(TensorView x, TensorView gate, double eps, bool enable_pdl) {
  const char* op = "rmsnorm_sigmoid_gate";
  flashinfer::SigmoidGateParams p{};
  Expect(op, "input", x).on_device().rank(2, 3).dtype({dl_bfloat16}).last_dim_contiguous().distinct();
  Expect(op, "gate", gate).same_device(x, "input").same_dtype(x, "input").same_shape(x, "input").last_dim_contiguous();
  p.rows = x.size(0), p.heads = x.ndim() == 3 ? x.size(1) : 1, p.dim = x.size(-1), p.eps = float(eps);
  if (p.dim != 64) FLASHINFER_THROW(ArgumentError) << op << ": input.shape[-1] must be 64, got " << p.dim;
  for (auto [name, t] : {std::pair{"input", &x}, std::pair{"gate", &gate}}) {
    const bool are_packed = t->ndim() == 2 || t->size(1) <= 1 || t->stride(1) == p.dim;
    const bool is_aligned = reinterpret_cast<uintptr_t>(t->data_ptr()) % 16 == 0 && t->stride(0) % 8 == 0;
    if (!are_packed || !is_aligned) {
      FLASHINFER_THROW(ArgumentError) << op << ": " << name
                                      << " must have packed heads and rows aligned to 16 bytes, got a row stride of "
                                      << t->stride(0);
    }
  }
  p.x = x.data_ptr<bfloat16_t>(), p.gate = gate.data_ptr<bfloat16_t>();
  p.x_stride = x.stride(0), p.gate_stride = gate.stride(0);
  p.enable_pdl = UsePdl(enable_pdl, x.device());
  DeviceGuard guard(x.device());
  CheckStatus(op, flashinfer::SigmoidGateNorm(p, get_stream(x.device())));
}
