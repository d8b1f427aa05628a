// SPDX-License-Identifier: Apache-2.0
// Launchers of the hyper-connections: argument checks, stream. Leading dimensions are those of `residual`, any number.
#include "tvm_ffi_utils.h"
// clang-format off
#include <flashinfer/mhc.h>
#if defined(FLASHINFER_CPU)
#include <flashinfer/mhc_cpu.h>
#elif defined(__CUDACC__)
#include <flashinfer/mhc.cuh>
#endif
// clang-format on

using flashinfer::bfloat16_t;
using flashinfer::MHC_MIX;
using flashinfer::MHC_STREAMS;

namespace {

/// Check `residual` (..., 4, hidden) and return the number of tokens.
int64_t CheckResidual(const char* op, const TensorView& residual) {
  Expect(op, "residual", residual).on_device().dtype({dl_bfloat16}).rank(2, 16).contiguous();
  Expect(op, "residual", residual).dim(residual.ndim() - 2, MHC_STREAMS, "the number of streams, HC");
  if (residual.size(-1) <= 0) {
    FLASHINFER_THROW(ArgumentError) << op << ": residual.shape[-1] must be positive, got " << residual.size(-1);
  }
  return residual.numel() / (MHC_STREAMS * residual.size(-1));
}

/// Check a tensor whose shape is `lead` splits, the leading dimensions of `residual`, and `tail`.
void CheckTokens(const char* op, const char* name, const TensorView& t, const TensorView& residual, DLDataType dtype,
                 std::initializer_list<int64_t> tail, int64_t splits = 1) {
  const int lead = splits > 1 ? 1 : 0, batch = residual.ndim() - 2, rank = lead + batch + int(tail.size());
  Expect expect(op, name, t);
  expect.same_device(residual, "residual").dtype({dtype}).rank(rank);
  if (lead) expect.dim(0, splits, "num_splits");
  for (int i = 0; i < batch; ++i) expect.dim(lead + i, residual.size(i), "that of residual");
  int i = lead + batch;
  for (const int64_t size : tail) expect.dim(i++, size, "of the four streams and residual.shape[-1]");
  expect.contiguous();
}

}  // namespace

void mhc_post(TensorView out, TensorView x, TensorView residual, TensorView post, TensorView comb) {
  const char* op = "mhc_post";
  const int64_t tokens = CheckResidual(op, residual), hidden = residual.size(-1);
  CheckTokens(op, "x", x, residual, dl_bfloat16, {hidden});
  if (post.ndim() == residual.ndim()) {
    CheckTokens(op, "post_layer_mix", post, residual, dl_float32, {MHC_STREAMS, 1});
  } else {
    CheckTokens(op, "post_layer_mix", post, residual, dl_float32, {MHC_STREAMS});
  }
  CheckTokens(op, "comb_res_mix", comb, residual, dl_float32, {MHC_STREAMS, MHC_STREAMS});
  CheckTokens(op, "out", out, residual, dl_bfloat16, {MHC_STREAMS, hidden});
  DeviceGuard guard(residual.device());
  const flashinfer::MhcPostParams p{x.data_ptr<bfloat16_t>(),
                                    residual.data_ptr<bfloat16_t>(),
                                    post.data_ptr<float>(),
                                    comb.data_ptr<float>(),
                                    out.data_ptr<bfloat16_t>(),
                                    tokens,
                                    hidden};
  CheckStatus(op, flashinfer::MhcPost(p, get_stream(residual.device())));
}

void mhc_pre(TensorView post, TensorView comb, TensorView layer_input, TensorView dot_mix, Optional<TensorView> sqrsum,
             TensorView residual, TensorView scale, TensorView base, double k, double rms_eps, double pre_eps,
             double sinkhorn_eps, double post_mult, int64_t repeat, int64_t splits, int64_t block_size) {
  const char* op = sqrsum.has_value() ? "mhc_pre_big_fuse" : "mhc_pre_big_fuse_with_prenorm";
  const int64_t tokens = CheckResidual(op, residual), hidden = residual.size(-1);
  if (hidden % 8 != 0) {
    FLASHINFER_THROW(ArgumentError) << op << ": residual.shape[-1] must be a multiple of 8, got " << hidden;
  }
  CheckTokens(op, "dot_mix", dot_mix, residual, dl_float32, {MHC_MIX}, splits);
  if (sqrsum.has_value()) CheckTokens(op, "sqrsum", sqrsum.value(), residual, dl_float32, {}, splits);
  Expect(op, "mhc_scale", scale).same_device(residual, "residual").dtype({dl_float32}).numel(3).contiguous();
  Expect(op, "mhc_base", base).same_device(residual, "residual").dtype({dl_float32}).numel(MHC_MIX).contiguous();
  CheckTokens(op, "post_mix", post, residual, dl_float32, {MHC_STREAMS, 1});
  CheckTokens(op, "comb_mix", comb, residual, dl_float32, {MHC_STREAMS, MHC_STREAMS});
  CheckTokens(op, "layer_input", layer_input, residual, dl_bfloat16, {hidden});
  flashinfer::MhcPreParams p{};
  p.dot_mix = dot_mix.data_ptr<float>();
  p.sqrsum = sqrsum.has_value() ? sqrsum.value().data_ptr<float>() : nullptr;
  p.residual = residual.data_ptr<bfloat16_t>();
  p.scale = scale.data_ptr<float>();
  p.base = base.data_ptr<float>();
  p.post = post.data_ptr<float>();
  p.comb = comb.data_ptr<float>();
  p.layer_input = layer_input.data_ptr<bfloat16_t>();
  p.tokens = tokens;
  p.hidden = hidden;
  p.splits = int(splits);
  p.repeat = int(repeat);
  p.block_size = int(block_size);
  p.k = float(k);
  p.rms_eps = float(rms_eps);
  p.pre_eps = float(pre_eps);
  p.sinkhorn_eps = float(sinkhorn_eps);
  p.post_mult = float(post_mult);
  DeviceGuard guard(residual.device());
  CheckStatus(op, flashinfer::MhcPre(p, get_stream(residual.device())));
}
