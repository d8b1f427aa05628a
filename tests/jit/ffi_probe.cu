// SPDX-License-Identifier: Apache-2.0
// Each helper of csrc/tvm_ffi_utils.h behind an exported function; test_ffi_utils.py calls them on CPU tensors.
#include "tvm_ffi_utils.h"

// ------------------------------------------------------------------------------------------------ errors

void fail(int64_t kind, int64_t value) {
  switch (kind) {
    case 0:
      TVM_FFI_THROW(ValueError) << "value must be another, got " << value;
    case 1:
      TVM_FFI_THROW(TypeError) << "type " << value;
    case 2:
      TVM_FFI_THROW(RuntimeError) << "runtime " << value;
    case 3:
      TVM_FFI_THROW(ArgumentError) << "argument " << value;
    case 4:
      TVM_FFI_LOG_AND_THROW(ValueError) << "logged " << value;
    case 5:
      TVM_FFI_ICHECK(value > 1000) << "invariant " << value;
      break;
    case 6:
      TVM_FFI_ICHECK_EQ(value, 1000) << "must be a thousand";
      break;
    case 8:
      TVM_FFI_LOG_AND_THROW(InternalError) << "internal " << value;
    case 9:
      TVM_FFI_LOG_AND_THROW(NotImplementedError) << "missing " << value;
    default:
      CheckStatus("probe", flashinfer::Status(value));
  }
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fail, fail);

// ------------------------------------------------------------------------------------------------ tensors

double first(TensorView x) { return x.data_ptr<float>()[0]; }
TVM_FFI_DLL_EXPORT_TYPED_FUNC(first, first);

bool same_pointer(TensorView x) { return x.data_ptr() == static_cast<void*>(x.data_ptr<char>()); }
TVM_FFI_DLL_EXPORT_TYPED_FUNC(same_pointer, same_pointer);

int64_t optional_size(Optional<TensorView> x) {
  CHECK_MAYBE_INPUT_TYPE(x, dl_float32);
  return x.has_value() ? x.value().numel() : -1;
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(optional_size, optional_size);

Tensor zeros(TensorView like) {
  Tensor y = alloc_tensor(like.shape(), like.dtype(), like.device());
  for (int64_t i = 0; i < like.numel(); ++i) TensorView(y).data_ptr<float>()[i] = 0;
  return y;
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(zeros, zeros);

bool has_stream(TensorView x) { return get_stream(x.device()) != nullptr; }
TVM_FFI_DLL_EXPORT_TYPED_FUNC(has_stream, has_stream);

// ------------------------------------------------------------------------------------------------ checks

void expect(int64_t what, TensorView x, TensorView other) {
  const Expect check("probe", "x", x);
  switch (what) {
    case 0:
      check.on_device();
      break;
    case 1:
      check.same_device(other, "other");
      break;
    case 2:
      check.rank(2);
      break;
    case 3:
      check.rank(2, 3);
      break;
    case 4:
      check.dim(0, other.size(0), "other.shape[0]");
      break;
    case 5:
      check.numel(1);
      break;
    case 6:
      check.same_shape(other, "other");
      break;
    case 7:
      check.dtype({dl_float16, dl_bfloat16});
      break;
    case 8:
      check.same_dtype(other, "other");
      break;
    case 9:
      check.last_dim_contiguous();
      break;
    case 10:
      check.contiguous();
      break;
  }
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(expect, expect);

void check(int64_t what, TensorView x, TensorView other) {
  switch (what) {
    case 0:
      CHECK_CPU(x);
      break;
    case 1:
      CHECK_CUDA(x);
      break;
    case 2:
      CHECK_CONTIGUOUS(x);
      break;
    case 3:
      CHECK_LAST_DIM_CONTIGUOUS(x);
      break;
    case 4:
      CHECK_INPUT(x);
      break;
    case 5:
      CHECK_INPUT_TYPE(x, dl_float16);
      break;
    case 6:
      CHECK_DIM(2, x);
      break;
    case 7:
      CHECK_SHAPE(x, other);
      break;
    case 8:
      CHECK_SAME_DTYPE(x, other);
      break;
    case 9:
      CHECK_DEVICE(x, other);
      break;
    case 10:
      CHECK_INPUT_AND_TYPE(x, dl_float16);
      break;
    case 11:
      CHECK_LAST_DIM_CONTIGUOUS_INPUT(x);
      break;
    case 12:
      TVM_FFI_ICHECK_EQ(x.dtype(), other.dtype());
      break;
  }
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(check, check);

// ------------------------------------------------------------------------------------------------ dispatch

int64_t dispatch(int64_t family, TensorView x) {
  int64_t size = 0;
  switch (family) {
    case 0:
      DISPATCH_DLPACK_DTYPE_TO_CTYPE_FP32_FP16(x.dtype(), T, [&] { return (size = sizeof(T)) > 0; });
      break;
    case 1:
      DISPATCH_DLPACK_DTYPE_TO_CTYPE_FP16(x.dtype(), T, [&] { return (size = sizeof(T)) > 0; });
      break;
    case 2:
      DISPATCH_DLPACK_DTYPE_TO_CTYPE_FP8(x.dtype(), T, [&] { return (size = sizeof(T)) > 0; });
      break;
    case 3:
      DISPATCH_DLPACK_DTYPE_TO_CTYPE_FP16_FP8(x.dtype(), T, [&] { return (size = sizeof(T)) > 0; });
      break;
    case 4:
      DISPATCH_DLPACK_DTYPE_TO_CTYPE(x.dtype(), T, [&] { return (size = sizeof(T)) > 0; });
      break;
    case 5:
      DISPATCH_DLPACK_IDTYPE_TO_CTYPE(x.dtype(), T, [&] { return (size = sizeof(T)) > 0; });
      break;
    default:
      DispatchFloat(x.dtype(), [&](auto tag) { size = sizeof(typename decltype(tag)::type); });
  }
  return size;
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(dispatch, dispatch);

/// Two dispatches nested, with a comma in the lambda: 10 * (flag ? 2 : 1) + size.
int64_t nested(bool flag, TensorView x) {
  int64_t result = 0;
  DISPATCH_BOOL(flag, FLAG, [&] {
    constexpr int factor = FLAG ? 2 : 1;
    return DISPATCH_DLPACK_DTYPE_TO_CTYPE_FP32_FP16(x.dtype(), T, [&, factor] {
      const int parts[] = {10 * factor, int(sizeof(T))};
      result = parts[0] + parts[1];
      return true;
    });
  });
  return result;
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(nested, nested);
