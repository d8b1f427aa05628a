// SPDX-License-Identifier: Apache-2.0
// Launchers of the merges of attention states: argument checks, dtype dispatch, stream.
#include "tvm_ffi_utils.h"
// clang-format off
#include <flashinfer/cascade.h>
#if defined(FLASHINFER_CPU)
#include <flashinfer/cascade_cpu.h>
#elif defined(__CUDACC__)
#include <flashinfer/cascade.cuh>
#endif
// clang-format on

using namespace flashinfer;

namespace {

/// Argument, and its name in error messages.
struct Named {
  const char* name;
  const TensorView& t;
};

/// Validate a state: v of any rank, and s with one number for each row of v.
void CheckState(const char* op, const Named& v, const Named& s) {
  if (v.t.size(-1) == 0) {
    FLASHINFER_THROW(ArgumentError) << op << ": " << v.name
                                    << ".shape[-1] must be at least 1 (elements of a head), got 0";
  }
  Expect(op, v.name, v.t).last_dim_contiguous();
  const Expect expect(op, s.name, s.t);
  const std::string because = "that of " + std::string(v.name);
  expect.same_device(v.t, v.name).dtype({dl_float32}).rank(v.t.ndim() - 1);
  for (int i = 0; i < s.t.ndim(); ++i) expect.dim(i, v.t.size(i), because.c_str());
}

/// Make a view of a state. Rows are dimension 0; heads are the last but one dimension of v and the last dimension of s.
template <typename T>
AttentionStates<T> StatesOf(const TensorView& v, const TensorView& s) {
  AttentionStates<T> states{};
  states.v = v.data_ptr<std::remove_const_t<T>>();
  states.s = s.data_ptr<float>();
  states.v_row_stride = v.stride(0);
  states.v_head_stride = v.stride(-2);
  states.s_row_stride = s.stride(0);
  states.s_head_stride = s.stride(-1);
  return states;
}

/// Merge (v_a, s_a) and (v_b, s_b) into (v, s). `mask` has been validated.
void RunMergeState(const char* op, const TensorView& v, const TensorView& s, const Named& v_a, const Named& s_a,
                   const Named& v_b, const Named& s_b, const TensorView* mask) {
  Expect(op, v_a.name, v_a.t).on_device().rank(3).dtype({dl_float16, dl_bfloat16, dl_float32});
  Expect(op, v_b.name, v_b.t).same_device(v_a.t, v_a.name).same_dtype(v_a.t, v_a.name).same_shape(v_a.t, v_a.name);
  CheckState(op, v_a, s_a);
  CheckState(op, v_b, s_b);
  DispatchFloat(v.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    MergeStateParams<T> p{};
    p.a = StatesOf<const T>(v_a.t, s_a.t);
    p.b = StatesOf<const T>(v_b.t, s_b.t);
    p.out = StatesOf<T>(v, s);
    if (mask != nullptr) {
      p.mask = static_cast<const uint8_t*>(mask->data_ptr());
      p.mask_stride = mask->stride(0);
    }
    p.rows = v.size(0);
    p.heads = v.size(1);
    p.head_dim = v.size(2);
    p.enable_pdl = UsePdl(true, v.device());
    DeviceGuard guard(v.device());
    CheckStatus(op, MergeState<T>(p, get_stream(v.device())));
  });
}

#ifdef FLASHINFER_CPU
/// Throw if offsets decrease or exceed the number of states. CPU only: on CUDA a check would have to synchronise.
void CheckOffsets(const char* op, const TensorView& indptr, int64_t num_states) {
  const int32_t* offsets = indptr.data_ptr<int32_t>();
  for (int64_t i = 0; i < indptr.size(0); ++i) {
    const int64_t low = i == 0 ? 0 : offsets[i - 1];
    if (offsets[i] < low || offsets[i] > num_states) {
      FLASHINFER_THROW(ArgumentError) << op << ": indptr[" << i << "] must be an offset from " << low << " to "
                                      << num_states << " (the number of states), got " << offsets[i];
    }
  }
}
#endif

}  // namespace

void merge_state(TensorView v, TensorView s, TensorView v_a, TensorView s_a, TensorView v_b, TensorView s_b) {
  const char* op = "merge_state";
  Expect(op, "v", v).same_device(v_a, "v_a").same_dtype(v_a, "v_a").same_shape(v_a, "v_a");
  if (v.ndim() == 3) CheckState(op, {"v", v}, {"s", s});
  RunMergeState(op, v, s, {"v_a", v_a}, {"s_a", s_a}, {"v_b", v_b}, {"s_b", s_b}, nullptr);
}

void merge_state_in_place(TensorView v, TensorView s, TensorView v_other, TensorView s_other,
                          Optional<TensorView> mask) {
  const char* op = "merge_state_in_place";
  Expect(op, "v", v).distinct().apart(v_other, "v_other").apart(s_other, "s_other").apart(s, "s");
  Expect(op, "s", s).distinct().apart(s_other, "s_other").apart(v_other, "v_other");
  const TensorView* rows = nullptr;
  if (mask.has_value()) {
    Expect(op, "v", v).rank(3);
    Expect(op, "mask", *mask).same_device(v, "v").dtype({dl_bool, dl_uint8}).rank(1).dim(0, v.size(0), "v.shape[0]");
    rows = &*mask;
  }
  RunMergeState(op, v, s, {"v", v}, {"s", s}, {"v_other", v_other}, {"s_other", s_other}, rows);
}

void merge_states(TensorView v_merged, TensorView s_merged, TensorView v, TensorView s) {
  const char* op = "merge_states";
  Expect(op, "v", v).on_device().rank(4).dtype({dl_float16, dl_bfloat16, dl_float32});
  CheckState(op, {"v", v}, {"s", s});
  Expect(op, "v_merged", v_merged)
      .same_device(v, "v")
      .same_dtype(v, "v")
      .rank(3)
      .dim(0, v.size(0), "v.shape[0]")
      .dim(1, v.size(2), "v.shape[2]")
      .dim(2, v.size(3), "v.shape[3]");
  CheckState(op, {"v_merged", v_merged}, {"s_merged", s_merged});
  DispatchFloat(v.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    MergeStatesParams<T> p{};
    p.in = StatesOf<const T>(v, s);
    p.out = StatesOf<T>(v_merged, s_merged);
    p.v_state_stride = v.stride(1);
    p.s_state_stride = s.stride(1);
    p.num_states = v.size(1);
    p.rows = v.size(0);
    p.heads = v.size(2);
    p.head_dim = v.size(3);
    p.enable_pdl = UsePdl(true, v.device());
    DeviceGuard guard(v.device());
    CheckStatus(op, MergeStates<T>(p, get_stream(v.device())));
  });
}

void variable_length_merge_states(TensorView v_merged, TensorView s_merged, TensorView v, TensorView s,
                                  TensorView indptr) {
  const char* op = "variable_length_merge_states";
  Expect(op, "v", v).on_device().rank(3).dtype({dl_float16, dl_bfloat16, dl_float32});
  CheckState(op, {"v", v}, {"s", s});
  Expect(op, "indptr", indptr).same_device(v, "v").dtype({dl_int32}).rank(1).contiguous();
#ifdef FLASHINFER_CPU
  CheckOffsets(op, indptr, v.size(0));
#endif
  Expect(op, "v_merged", v_merged)
      .same_device(v, "v")
      .same_dtype(v, "v")
      .rank(3)
      .dim(0, indptr.size(0) - 1, "indptr.shape[0] - 1")
      .dim(1, v.size(1), "v.shape[1]")
      .dim(2, v.size(2), "v.shape[2]");
  CheckState(op, {"v_merged", v_merged}, {"s_merged", s_merged});
  DispatchFloat(v.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    MergeStatesParams<T> p{};
    p.in = StatesOf<const T>(v, s);
    p.v_state_stride = p.in.v_row_stride;
    p.s_state_stride = p.in.s_row_stride;
    p.in.v_row_stride = p.in.s_row_stride = 0;
    p.out = StatesOf<T>(v_merged, s_merged);
    p.indptr = indptr.data_ptr<int32_t>();
    p.rows = v_merged.size(0);
    p.heads = v.size(1);
    p.head_dim = v.size(2);
    p.enable_pdl = UsePdl(true, v.device());
    DeviceGuard guard(v.device());
    CheckStatus(op, MergeStates<T>(p, get_stream(v.device())));
  });
}

void add_sinks(TensorView v, TensorView s, TensorView sinks) {
  const char* op = "add_sinks";
  Expect(op, "v", v).on_device().rank(3).dtype({dl_float16, dl_bfloat16, dl_float32});
  CheckState(op, {"v", v}, {"s", s});
  Expect(op, "sinks", sinks).same_device(v, "v").dtype({dl_float32}).rank(1).dim(0, v.size(1), "heads of v");
  DispatchFloat(v.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    AddSinksParams<T> p{};
    p.states = StatesOf<T>(v, s);
    p.sinks = sinks.data_ptr<float>();
    p.sink_stride = sinks.stride(0);
    p.rows = v.size(0);
    p.heads = v.size(1);
    p.head_dim = v.size(2);
    p.enable_pdl = UsePdl(true, v.device());
    DeviceGuard guard(v.device());
    CheckStatus(op, AddSinks<T>(p, get_stream(v.device())));
  });
}
