// SPDX-License-Identifier: Apache-2.0
// Launcher of concat_mla_k: argument checks and stream.
#include "tvm_ffi_utils.h"
// clang-format off
#include <flashinfer/concat_mla.h>
#if defined(FLASHINFER_CPU)
#include <flashinfer/concat_mla_cpu.h>
#elif defined(__CUDACC__)
#include <flashinfer/concat_mla.cuh>
#endif
// clang-format on

using namespace flashinfer;

void concat_mla_k(TensorView k, TensorView k_nope, TensorView k_rope) {
  const char* op = "concat_mla_k";
  const char* fixed = "the only size there is a kernel for";
  Expect(op, "k", k).on_device().rank(3).dtype({dl_bfloat16, dl_float16, dl_float8_e4m3fn, dl_float8_e5m2});
  Expect(op, "k", k).dim(1, MLA_HEADS, fixed).dim(2, MLA_K_DIM, fixed).last_dim_contiguous().distinct();
  for (auto [name, t, heads, width] :
       {std::tuple{"k_nope", &k_nope, MLA_HEADS, MLA_NOPE_DIM}, std::tuple{"k_rope", &k_rope, 1, MLA_ROPE_DIM}}) {
    Expect(op, name, *t)
        .same_device(k, "k")
        .same_dtype(k, "k")
        .rank(3)
        .dim(0, k.size(0), "k.shape[0]")
        .dim(1, heads, fixed)
        .dim(2, width, fixed)
        .last_dim_contiguous();
    Expect(op, "k", k).apart(*t, name);
  }
  const int size = k.dtype().bits / 8;
  ConcatMlaKParams p{};
  p.k = k.data_ptr<char>();
  p.nope = k_nope.data_ptr<char>();
  p.rope = k_rope.data_ptr<char>();
  p.num_tokens = k.size(0);
  p.k_token_stride = k.stride(0) * size;
  p.k_head_stride = k.stride(1) * size;
  p.nope_token_stride = k_nope.stride(0) * size;
  p.nope_head_stride = k_nope.stride(1) * size;
  p.rope_token_stride = k_rope.stride(0) * size;
  p.element_size = size;
  DeviceGuard guard(k.device());
  CheckStatus(op, ConcatMlaK(p, get_stream(k.device())));
}
