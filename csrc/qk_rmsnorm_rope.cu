// SPDX-License-Identifier: Apache-2.0
// Launcher of QK RMSNorm with 3-D rotary embedding: argument checks, stream. CUDA only.
#include <cmath>

#include "tvm_ffi_utils.h"
// clang-format off
#include <flashinfer/qk_rmsnorm_rope.h>
#if defined(__CUDACC__)
#include <flashinfer/qk_rmsnorm_rope.cuh>
#endif
// clang-format on

/// `qkv` (num_tokens, heads * head_dim); outputs (num_tokens, heads_x, head_dim).
void qk_rmsnorm_rope(TensorView q_out, TensorView k_out, TensorView v_out, TensorView qkv, TensorView q_weight,
                     TensorView k_weight, int64_t ppf, int64_t pph, int64_t ppw, int64_t num_frame_channels,
                     int64_t num_height_channels, int64_t num_width_channels, int64_t head_dim, double eps, double base,
                     bool interleave, double factor, double low, double high, double attention_factor, bool is_qk_norm,
                     double qk_scale, double v_scale) {
  const char* op = "fused_qk_rmsnorm_rope";
  Expect(op, "qkv", qkv).on_device().rank(2).dtype({dl_bfloat16}).contiguous();
  const bool fp8 = q_out.dtype().code == kDLFloat8_e4m3fn;
  int64_t columns = 0;
  for (auto [name, t] : {std::pair{"q_out", &q_out}, std::pair{"k_out", &k_out}, std::pair{"v_out", &v_out}}) {
    Expect(op, name, *t)
        .same_device(qkv, "qkv")
        .dtype({fp8 ? dl_float8_e4m3fn : dl_bfloat16})
        .rank(3)
        .dim(0, qkv.size(0), "number of tokens")
        .dim(2, head_dim, "head_dim")
        .contiguous();
    columns += t->size(1) * head_dim;
  }
  Expect(op, "qkv", qkv).dim(1, columns, "(num_heads_q + num_heads_k + num_heads_v) * head_dim");
  Expect(op, "q_weight", q_weight)
      .same_device(qkv, "qkv")
      .dtype({dl_bfloat16})
      .contiguous()
      .numel(q_out.size(1) * head_dim);
  Expect(op, "k_weight", k_weight)
      .same_device(qkv, "qkv")
      .dtype({dl_bfloat16})
      .contiguous()
      .numel(k_out.size(1) * head_dim);

  flashinfer::QkRMSNormRopeParams p{};
  p.qkv = qkv.data_ptr<flashinfer::bfloat16_t>();
  p.q_weight = q_weight.data_ptr<flashinfer::bfloat16_t>();
  p.k_weight = k_weight.data_ptr<flashinfer::bfloat16_t>();
  p.q_out = q_out.data_ptr();
  p.k_out = k_out.data_ptr();
  p.v_out = v_out.data_ptr();
  p.num_tokens = qkv.size(0);
  p.num_heads_q = int(q_out.size(1)), p.num_heads_k = int(k_out.size(1)), p.num_heads_v = int(v_out.size(1));
  p.head_dim = int(head_dim);
  p.ppf = int(ppf), p.pph = int(pph), p.ppw = int(ppw);
  p.num_frame_channels = int(num_frame_channels);
  p.num_height_channels = int(num_height_channels);
  p.num_width_channels = int(num_width_channels);
  p.eps = float(eps);
  p.log2_base = float(std::log2(base));
  p.factor = float(factor), p.low = float(low), p.high = float(high), p.attention_factor = float(attention_factor);
  p.qk_scale = float(qk_scale), p.v_scale = float(v_scale);
  p.interleave = interleave, p.is_qk_norm = is_qk_norm, p.output_fp8 = fp8;
  DeviceGuard guard(qkv.device());
  CheckStatus(op, flashinfer::QkRMSNormRope(p, get_stream(qkv.device())));
}
