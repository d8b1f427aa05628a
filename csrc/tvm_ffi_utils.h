// SPDX-License-Identifier: Apache-2.0
// Helpers of launchers and bindings: tensor views, argument checks, dtype dispatch, stream.
#pragma once
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <string>
#include <type_traits>
#include <utility>

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#endif
#include <flashinfer/backend.h>

// ------------------------------------------------------------------------------------------------ tensors

namespace flashinfer {
namespace ffi {

/// Borrowed tensor argument. Adds a typed data_ptr<T>() to the view of TVM-FFI.
class TensorView : public tvm::ffi::TensorView {
 public:
  using tvm::ffi::TensorView::TensorView;
  TensorView(const tvm::ffi::TensorView& view) : tvm::ffi::TensorView(view) {}  // NOLINT(*)

  void* data_ptr() const { return static_cast<char*>(tvm::ffi::TensorView::data_ptr()) + byte_offset(); }

  template <typename T>
  T* data_ptr() const {
    return static_cast<T*>(data_ptr());
  }

  /// Return false for tensors without memory, such as torch's fake tensors.
  bool has_memory() const { return tvm::ffi::TensorView::data_ptr() != nullptr || numel() == 0; }
};

}  // namespace ffi
}  // namespace flashinfer

namespace tvm {
namespace ffi {

/// Conversion of arguments to our view, the same as for the view of TVM-FFI.
template <>
struct TypeTraits<flashinfer::ffi::TensorView> : public TypeTraits<TensorView> {
  using Self = flashinfer::ffi::TensorView;
  static Self CopyFromAnyViewAfterCheck(const TVMFFIAny* src) {
    return Self(TypeTraits<TensorView>::CopyFromAnyViewAfterCheck(src));
  }
  static std::optional<Self> TryCastFromAnyView(const TVMFFIAny* src) {
    auto view = TypeTraits<TensorView>::TryCastFromAnyView(src);
    return view ? std::optional<Self>(Self(*view)) : std::nullopt;
  }
};

}  // namespace ffi
}  // namespace tvm

using flashinfer::ffi::TensorView;
using tvm::ffi::Optional;
using tvm::ffi::Tensor;

constexpr DLDataType dl_float64{kDLFloat, 64, 1};
constexpr DLDataType dl_float32{kDLFloat, 32, 1};
constexpr DLDataType dl_float16{kDLFloat, 16, 1};
constexpr DLDataType dl_bfloat16{kDLBfloat, 16, 1};
constexpr DLDataType dl_float8_e4m3fn{kDLFloat8_e4m3fn, 8, 1};
constexpr DLDataType dl_float8_e5m2{kDLFloat8_e5m2, 8, 1};
constexpr DLDataType dl_int32{kDLInt, 32, 1};
constexpr DLDataType dl_int64{kDLInt, 64, 1};
constexpr DLDataType dl_uint8{kDLUInt, 8, 1};
constexpr DLDataType dl_bool{kDLBool, 8, 1};

/// Encode a dtype as an integer, for switch statements.
constexpr int64_t encode_dlpack_dtype(DLDataType t) {
  return (int64_t(t.code) << 32) | (int64_t(t.bits) << 16) | int64_t(t.lanes);
}

inline bool SameDevice(DLDevice a, DLDevice b) { return a.device_type == b.device_type && a.device_id == b.device_id; }

/// Return the name of a dtype in Python.
__attribute__((cold)) inline std::string DTypeName(DLDataType t) {
  switch (encode_dlpack_dtype(t)) {
    case encode_dlpack_dtype(dl_float64):
      return "float64";
    case encode_dlpack_dtype(dl_float32):
      return "float32";
    case encode_dlpack_dtype(dl_float16):
      return "float16";
    case encode_dlpack_dtype(dl_bfloat16):
      return "bfloat16";
    case encode_dlpack_dtype(dl_float8_e4m3fn):
      return "float8_e4m3fn";
    case encode_dlpack_dtype(dl_float8_e5m2):
      return "float8_e5m2";
    case encode_dlpack_dtype(dl_int32):
      return "int32";
    case encode_dlpack_dtype(dl_int64):
      return "int64";
    case encode_dlpack_dtype(dl_uint8):
      return "uint8";
    case encode_dlpack_dtype(dl_bool):
      return "bool";
    default:
      if (t.lanes == 1 && (t.code == kDLInt || t.code == kDLUInt)) {
        return (t.code == kDLInt ? "int" : "uint") + std::to_string(t.bits);
      }
      return "dtype(code=" + std::to_string(t.code) + ", bits=" + std::to_string(t.bits) + ")";
  }
}

__attribute__((cold)) inline std::string DeviceName(DLDevice d) {
  switch (d.device_type) {
    case kDLCPU:
      return "cpu";
    case kDLCUDA:
      return "cuda:" + std::to_string(d.device_id);
    default:
      return "device type " + std::to_string(int(d.device_type));
  }
}

// ------------------------------------------------------------------------------------------------ errors

namespace flashinfer {
namespace ffi {

/// Text of an exception, which is thrown at the end of the expression:
///   FLASHINFER_THROW(ArgumentError) << op << ": n must be even, got " << n;
/// A launcher has up to a hundred such places. They are calls of functions that are compiled once, and have no C++ stack
/// frames: TVM_FFI_THROW expands to a stream and a backtrace in each place, which took g++ 1 s of the 4.8 s of
/// batch_prefill_jit_binding.cu, and the frames, of no help to a Python user, take 0.9 s the first time.
class ErrorText {
 public:
  __attribute__((noinline, cold)) explicit ErrorText(const char* kind) noexcept : kind_(kind) {}
  __attribute__((noinline, cold)) ErrorText(const char* kind, const char* op, const char* name) noexcept : kind_(kind) {
    text_.append(op).append(": ").append(name);
  }
  ErrorText(const ErrorText&) = delete;
  ErrorText& operator=(const ErrorText&) = delete;
  [[noreturn]] __attribute__((noinline, cold)) ~ErrorText() noexcept(false) {
    throw tvm::ffi::Error(kind_, std::move(text_), "");
  }

  __attribute__((noinline, cold)) ErrorText& operator<<(const char* text) noexcept {
    text_ += text;
    return *this;
  }
  __attribute__((noinline, cold)) ErrorText& operator<<(const std::string& text) noexcept {
    text_ += text;
    return *this;
  }
  __attribute__((noinline, cold)) ErrorText& operator<<(DLDataType dtype) noexcept { return *this << DTypeName(dtype); }
  __attribute__((noinline, cold)) ErrorText& operator<<(DLDevice device) noexcept {
    return *this << DeviceName(device);
  }
  __attribute__((noinline, cold)) ErrorText& operator<<(long long number) noexcept {
    char digits[24];
    std::snprintf(digits, sizeof(digits), "%lld", number);
    return *this << digits;
  }
  __attribute__((noinline, cold)) ErrorText& operator<<(unsigned long long number) noexcept {
    char digits[24];
    std::snprintf(digits, sizeof(digits), "%llu", number);
    return *this << digits;
  }
  __attribute__((noinline, cold)) ErrorText& operator<<(double number) noexcept {
    char digits[32];
    std::snprintf(digits, sizeof(digits), "%g", number);
    return *this << digits;
  }
  ErrorText& operator<<(int number) noexcept { return *this << static_cast<long long>(number); }
  ErrorText& operator<<(long number) noexcept { return *this << static_cast<long long>(number); }
  ErrorText& operator<<(unsigned number) noexcept { return *this << static_cast<unsigned long long>(number); }
  ErrorText& operator<<(unsigned long number) noexcept { return *this << static_cast<unsigned long long>(number); }

 private:
  const char* kind_;
  std::string text_;
};

}  // namespace ffi
}  // namespace flashinfer

#define FLASHINFER_THROW(kind) ::flashinfer::ffi::ErrorText(#kind)

// ------------------------------------------------------------------------------------------------ exports

namespace flashinfer {
namespace ffi {

/// Run an exported function and hand its exception to the caller: one copy of the handlers that
/// TVM_FFI_DLL_EXPORT_TYPED_FUNC puts into each export.
using Body = void (*)(const TVMFFIAny* args, int32_t count, TVMFFIAny* result);
__attribute__((noinline)) inline int SafeCall(Body body, const TVMFFIAny* args, int32_t count, TVMFFIAny* result) {
  TVM_FFI_SAFE_CALL_BEGIN();
  body(args, count, result);
  TVM_FFI_SAFE_CALL_END();
}

/// Return true if kernels can access an argument: a number, a tensor with memory, or a missing tensor.
template <typename T>
bool HasMemory(const T&) {
  return true;
}
inline bool HasMemory(const TensorView& x) { return x.has_memory(); }
inline bool HasMemory(const tvm::ffi::Optional<TensorView>& x) { return !x.has_value() || x.value().has_memory(); }

/// Return argument `i` of a call as a T. One function per type, not inlined: the export of TVM-FFI unpacks every
/// argument of every function inline, which took g++ 10 s for the seven exports of rope. This takes 1.7 s, and 0.02 us
/// per call.
template <typename T>
__attribute__((noinline)) T Argument(const char* function, const TVMFFIAny* args, int i) {
  std::optional<T> value = tvm::ffi::TypeTraits<T>::TryCastFromAnyView(args + i);
  if (!value.has_value()) {
    FLASHINFER_THROW(TypeError) << function << ": argument " << i << " must be "
                                << (std::is_same_v<T, TensorView> ? "a tensor" : tvm::ffi::TypeTraits<T>::TypeStr())
                                << ", got a " << tvm::ffi::TypeTraits<T>::GetMismatchTypeInfo(args + i);
  }
  if (!HasMemory(*value)) {
    FLASHINFER_THROW(TypeError) << function << ": argument " << i
                                << " must be a tensor with data, got a tensor without memory";
  }
  return *std::move(value);
}

template <typename R, typename... Args, size_t... I>
R CallWith(const char* function, R (*f)(Args...), const TVMFFIAny* args, int count, std::index_sequence<I...>) {
  if (count != int(sizeof...(Args))) {
    FLASHINFER_THROW(TypeError) << function << ": arguments must be " << sizeof...(Args) << ", got " << count;
  }
  return f(Argument<std::decay_t<Args>>(function, args, I)...);
}

template <typename R, typename... Args>
void Call(const char* function, R (*f)(Args...), const TVMFFIAny* args, int count, TVMFFIAny* result) {
  constexpr std::index_sequence_for<Args...> indices;
  if constexpr (std::is_void_v<R>) {
    CallWith(function, f, args, count, indices);
  } else {
    tvm::ffi::TypeTraits<R>::MoveToAny(CallWith(function, f, args, count, indices), result);
  }
}

}  // namespace ffi
}  // namespace flashinfer

/// Export an expression of `args`, `count` and `result`.
#define FLASHINFER_EXPORT_BODY(name, ...)                                                                              \
  extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_##name(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny* result) { \
    return flashinfer::ffi::SafeCall([](const TVMFFIAny* args, [[maybe_unused]] int32_t count,                         \
                                        [[maybe_unused]] TVMFFIAny* result) { __VA_ARGS__; },                          \
                                     args, count, result);                                                             \
  }

/// Export a function that returns nothing or a number. The stock TVM_FFI_DLL_EXPORT_TYPED_FUNC works as well.
#define FLASHINFER_EXPORT(name, function) \
  FLASHINFER_EXPORT_BODY(name, flashinfer::ffi::Call(#name, function, args, count, result))

// ------------------------------------------------------------------------------------------------ stream, device

/// Return the caller's current stream on `device`.
inline flashinfer::Stream get_stream(DLDevice device) {
  return static_cast<flashinfer::Stream>(TVMFFIEnvGetStream(device.device_type, device.device_id));
}

inline Tensor alloc_tensor(tvm::ffi::ShapeView shape, DLDataType dtype, DLDevice device) {
  return Tensor::FromEnvAlloc(TVMFFIEnvTensorAlloc, shape, dtype, device);
}

#ifdef FLASHINFER_CPU
struct DeviceGuard {
  explicit DeviceGuard(DLDevice) {}
};
#else
inline flashinfer::Stream get_current_stream() {
  int device = 0;
  cudaGetDevice(&device);
  return get_stream(DLDevice{kDLCUDA, device});
}

/// Scope guard that makes the device of the tensors current during the launch. torch's current device may be another
/// one.
class DeviceGuard {
 public:
  explicit DeviceGuard(DLDevice device) {
    cudaGetDevice(&previous_);
    if (previous_ != device.device_id) cudaSetDevice(device.device_id);
    changed_ = previous_ != device.device_id;
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};
#endif

/// Return true if a launch on `device` uses PDL: the caller allows PDL and the device supports it (SM90 and later,
/// queried once). Decided here because Python takes 0.3 us for it; a launch with PDL takes the host 0.6 us less.
inline bool UsePdl([[maybe_unused]] bool is_allowed, [[maybe_unused]] DLDevice device) {
#ifdef FLASHINFER_CPU
  return false;
#else
  constexpr int MAX_DEVICES = 64;
  static std::atomic<int> majors[MAX_DEVICES];  // 0: not queried yet
  if (!is_allowed || device.device_id >= MAX_DEVICES) return false;
  int major = majors[device.device_id].load(std::memory_order_relaxed);
  if (major == 0) {
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device.device_id);
    majors[device.device_id].store(major, std::memory_order_relaxed);
  }
  return major >= 9;
#endif
}

/// Turn a kernel entry's status into an exception that names the op.
inline void CheckStatus(const char* op, flashinfer::Status status) {
#ifdef FLASHINFER_CPU
  if (status != 0) FLASHINFER_THROW(RuntimeError) << op << ": CPU kernel failed with status " << status;
#else
  if (status != cudaSuccess) FLASHINFER_THROW(RuntimeError) << op << ": CUDA error: " << cudaGetErrorString(status);
#endif
}

// ------------------------------------------------------------------------------------------------ checks

/// Argument checks that read like a table and cost a few comparisons:
///   Expect("rmsnorm", "weight", weight).same_device(input, "input").rank(1).dim(0, hidden, "input.shape[1]");
/// A failed one throws `rmsnorm: weight.shape[0] must be 4096 (input.shape[1]), got 4000`.
class Expect {
 public:
  Expect(const char* op, const char* name, const TensorView& tensor) : op_(op), name_(name), t_(tensor) {}

  /// Check that the tensor is on the kind of device that this module was built for.
  const Expect& on_device() const {
#ifdef FLASHINFER_CPU
    if (t_.device().device_type != kDLCPU) Fail() << " must be on cpu, got " << t_.device();
#else
    if (t_.device().device_type != kDLCUDA) Fail() << " must be on a CUDA device, got " << t_.device();
#endif
    return *this;
  }
  const Expect& same_device(const TensorView& other, const char* of) const {
    if (!SameDevice(t_.device(), other.device())) {
      Fail() << " must be on " << other.device() << " (the device of " << of << "), got " << t_.device();
    }
    return *this;
  }
  const Expect& rank(int low, int high) const {
    if (t_.ndim() < low || t_.ndim() > high) {
      const char* const kind = high == 1 ? " dimension, got " : " dimensions, got ";
      if (low == high) Fail() << " must have " << low << kind << t_.ndim();
      Fail() << " must have " << low << " to " << high << kind << t_.ndim();
    }
    return *this;
  }
  const Expect& rank(int n) const { return rank(n, n); }
  const Expect& dim(int index, int64_t expected, const char* because) const {
    if (t_.size(index) != expected) {
      Fail() << ".shape[" << index << "] must be " << expected << " (" << because << "), got " << t_.size(index);
    }
    return *this;
  }
  const Expect& numel(int64_t expected) const {
    if (t_.numel() != expected) {
      Fail() << " must have " << expected << (expected == 1 ? " element, got " : " elements, got ") << t_.numel();
    }
    return *this;
  }
  const Expect& same_shape(const TensorView& other, const char* of) const {
    bool equal = t_.ndim() == other.ndim();
    for (int i = 0; equal && i < t_.ndim(); ++i) equal = t_.size(i) == other.size(i);
    if (!equal) Fail() << " must have shape " << Shape(other) << " (the shape of " << of << "), got " << Shape(t_);
    return *this;
  }
  const Expect& dtype(std::initializer_list<DLDataType> allowed) const {
    for (DLDataType d : allowed) {
      if (encode_dlpack_dtype(d) == encode_dlpack_dtype(t_.dtype())) return *this;
    }
    FailDType(allowed);
  }
  const Expect& same_dtype(const TensorView& other, const char* of) const {
    if (encode_dlpack_dtype(other.dtype()) != encode_dlpack_dtype(t_.dtype())) {
      Fail() << " must be " << other.dtype() << " (the dtype of " << of << "), got " << t_.dtype();
    }
    return *this;
  }
  const Expect& last_dim_contiguous() const {
    if (t_.size(-1) > 1 && t_.stride(-1) != 1) {
      Fail() << ".stride(-1) must be 1 (the last dimension must be contiguous), got " << t_.stride(-1);
    }
    return *this;
  }
  /// Refuse outputs whose elements share memory: expanded tensors, and rows that lie over each other.
  const Expect& distinct() const {
    int64_t span = 1;  // elements from the first to the last of the dimensions seen so far
    for (int i = t_.ndim() - 1; i >= 0; --i) {
      if (t_.size(i) < 2) continue;
      if (t_.stride(i) < span) return distinct_in_any_order();
      span += (t_.size(i) - 1) * t_.stride(i);
    }
    return *this;
  }
  /// Refuse an output that shares memory with `other`, which is read while the output is written.
  const Expect& apart(const TensorView& other, const char* of) const {
    if (MayOverlap(t_, other) && !AreColumnsBesideOthers(t_, other)) FailShared(of);
    return *this;
  }
  /// The same, except for an output whose elements lie where those of `other` begin: each is read before it is written.
  const Expect& apart_or_in_place(const TensorView& other, const char* of) const {
    if (MayOverlap(t_, other) && !IsInPlace(other) && !AreColumnsBesideOthers(t_, other)) FailShared(of);
    return *this;
  }
  const Expect& apart(const Optional<TensorView>& other, const char* of) const {
    return other.has_value() ? apart(other.value(), of) : *this;
  }
  const Expect& contiguous() const {
    if (!t_.IsContiguous()) Fail() << " must be contiguous, got strides " << Sizes(t_.strides());
    return *this;
  }

 private:
  flashinfer::ffi::ErrorText Fail() const { return flashinfer::ffi::ErrorText("ArgumentError", op_, name_); }
  [[noreturn]] __attribute__((noinline, cold)) void FailDType(std::initializer_list<DLDataType> allowed) const {
    std::string names;
    for (DLDataType d : allowed) names += (names.empty() ? "" : " or ") + DTypeName(d);
    Fail() << " must be " << names << ", got " << t_.dtype();
  }
  __attribute__((noinline, cold)) const Expect& distinct_in_any_order() const {
    int64_t span = 1, done = -1;  // dimensions with strides up to `done` have been seen
    for (;;) {
      int next = -1;
      for (int i = 0; i < t_.ndim(); ++i) {
        if (t_.size(i) == 0) return *this;
        const bool is_left = t_.size(i) > 1 && t_.stride(i) > done;
        if (is_left && (next < 0 || t_.stride(i) < t_.stride(next))) next = i;
      }
      if (next < 0) return *this;
      done = t_.stride(next);
      for (int i = 0; i < t_.ndim(); ++i) {  // those with one stride come one after the other
        if (t_.size(i) < 2 || t_.stride(i) != done) continue;
        if (done < span) {
          if (done == 0) {
            Fail() << ".stride(" << i << ") must not be 0 for an output (its elements would share memory), got 0";
          }
          Fail() << ".stride(" << i << ") must be at least " << span
                 << " for an output (its elements would share memory), got " << done;
        }
        span += (t_.size(i) - 1) * done;
      }
    }
  }
  [[noreturn]] __attribute__((noinline, cold)) void FailShared(const char* of) const {
    Fail() << " must not share memory with " << of << " (it is written while " << of << " is read), got addresses from "
           << (unsigned long long)(Begin(t_)) << " on";
  }

  static uintptr_t Begin(const TensorView& t) { return reinterpret_cast<uintptr_t>(t.data_ptr()); }
  static int64_t Bytes(const TensorView& t) { return (t.dtype().bits * t.dtype().lanes + 7) / 8; }
  static uintptr_t End(const TensorView& t) {
    int64_t span = 1;
    for (int i = 0; i < t.ndim(); ++i) {
      if (t.size(i) == 0) return 0;  // an empty tensor lies over nothing
      span += (t.size(i) - 1) * t.stride(i);
    }
    return Begin(t) + span * Bytes(t);
  }
  static bool MayOverlap(const TensorView& a, const TensorView& b) {
    return Begin(a) < End(b) && Begin(b) < End(a) && SameDevice(a.device(), b.device());
  }
  /// Tell whether element for element, or row for row, the output begins where `other` does.
  __attribute__((noinline, cold)) bool IsInPlace(const TensorView& other) const {
    if (Begin(t_) != Begin(other) || Bytes(t_) != Bytes(other) || t_.ndim() != other.ndim()) return false;
    for (int i = 0; i < t_.ndim(); ++i) {
      const bool is_row = i + 1 == t_.ndim();
      if (!is_row && t_.size(i) != other.size(i)) return false;
      if (t_.size(i) > 1 && t_.stride(i) != other.stride(i)) return false;
    }
    return true;
  }
  /// Tell whether two tensors are views of different columns of one, such as q and k of qkv: for some distance `step`,
  /// both consist of blocks that are whole multiples of it apart, and no block reaches the next one of the other.
  __attribute__((noinline, cold)) static bool AreColumnsBesideOthers(const TensorView& a, const TensorView& b) {
    for (const TensorView* t : {&a, &b}) {
      for (int i = 0; i < t->ndim(); ++i) {
        const int64_t step = t->size(i) > 1 ? t->stride(i) * Bytes(*t) : 0;
        if (step == 0) continue;
        const int64_t of_a = BlockBytes(a, step), of_b = BlockBytes(b, step);
        const uintptr_t distance =
            Begin(b) - Begin(a) + (Begin(b) < Begin(a) ? ((Begin(a) - Begin(b)) / step + 1) * step : 0);
        const int64_t offset = int64_t(distance % step);
        if (offset >= of_a && offset + of_b <= step) return true;
      }
    }
    return false;
  }
  /// Bytes of a block: what the dimensions span whose strides are no multiples of `step`.
  static int64_t BlockBytes(const TensorView& t, int64_t step) {
    int64_t span = Bytes(t);
    for (int i = 0; i < t.ndim(); ++i) {
      const int64_t stride = t.stride(i) * Bytes(t);
      if (stride % step != 0) span += (t.size(i) - 1) * stride;
    }
    return span;
  }
  static std::string Shape(const TensorView& t) { return Sizes(t.shape()); }
  __attribute__((cold)) static std::string Sizes(tvm::ffi::ShapeView sizes) {
    std::string text = "(";
    for (size_t i = 0; i < sizes.size(); ++i) text += (i ? ", " : "") + std::to_string(sizes[i]);
    return text + (sizes.size() == 1 ? ",)" : ")");
  }

  const char* op_;
  const char* name_;
  const TensorView& t_;
};

// Check macros that published launchers use. Error messages contain the C++ spelling of the argument.
#define CHECK_CPU(x)                                                                              \
  do {                                                                                            \
    if ((x).device().device_type != kDLCPU)                                                       \
      FLASHINFER_THROW(ArgumentError) << #x " must be a CPU tensor, got one on " << (x).device(); \
  } while (0)
#define CHECK_CUDA(x)                                                                              \
  do {                                                                                             \
    if ((x).device().device_type != kDLCUDA)                                                       \
      FLASHINFER_THROW(ArgumentError) << #x " must be a CUDA tensor, got one on " << (x).device(); \
  } while (0)
#define CHECK_CONTIGUOUS(x)                                                                                      \
  do {                                                                                                           \
    if (!(x).IsContiguous()) FLASHINFER_THROW(ArgumentError) << #x " must be contiguous, got strides of a view"; \
  } while (0)
#define CHECK_LAST_DIM_CONTIGUOUS(x) Expect(__func__, #x, x).last_dim_contiguous()
#define CHECK_INPUT(x)   \
  do {                   \
    CHECK_CUDA(x);       \
    CHECK_CONTIGUOUS(x); \
  } while (0)
#define CHECK_LAST_DIM_CONTIGUOUS_INPUT(x) \
  do {                                     \
    CHECK_CUDA(x);                         \
    CHECK_LAST_DIM_CONTIGUOUS(x);          \
  } while (0)
#define CHECK_INPUT_TYPE(x, expected) Expect(__func__, #x, x).dtype({expected})
#define CHECK_INPUT_AND_TYPE(x, expected) \
  do {                                    \
    CHECK_INPUT(x);                       \
    CHECK_INPUT_TYPE(x, expected);        \
  } while (0)
#define CHECK_MAYBE_INPUT_TYPE(x, expected)                       \
  do {                                                            \
    if ((x).has_value()) CHECK_INPUT_TYPE((x).value(), expected); \
  } while (0)
#define CHECK_DIM(n, x) Expect(__func__, #x, x).rank(n)
#define CHECK_SHAPE(a, b) Expect(__func__, #a, a).same_shape(b, #b)
#define CHECK_SAME_DTYPE(a, b) Expect(__func__, #a, a).same_dtype(b, #b)
#define CHECK_DEVICE(a, b) Expect(__func__, #a, a).same_device(b, #b)

// ------------------------------------------------------------------------------------------------ dtype dispatch

/// Tag that passes a C++ type to a generic lambda: `[&](auto tag) { using T = typename decltype(tag)::type; ... }`.
template <typename T>
struct TypeTag {
  using type = T;
};

/// Call `f` with the element type of a float32, float16 or bfloat16 tensor (checked before with Expect).
template <typename F>
void DispatchFloat(DLDataType dtype, F&& f) {
  switch (encode_dlpack_dtype(dtype)) {
    case encode_dlpack_dtype(dl_float32):
      return f(TypeTag<float>{});
    case encode_dlpack_dtype(dl_float16):
      return f(TypeTag<flashinfer::float16_t>{});
    case encode_dlpack_dtype(dl_bfloat16):
      return f(TypeTag<flashinfer::bfloat16_t>{});
    default:
      FLASHINFER_THROW(ArgumentError) << "no kernel for dtype " << dtype;
  }
}

// The published macro family: DISPATCH_DLPACK_DTYPE_TO_CTYPE_<set>(dtype, TypeName, [&] { ...; return true; }).
#define FLASHINFER_DISPATCH_CASE(dl, T, NAME, ...) \
  case encode_dlpack_dtype(dl): {                  \
    using NAME [[maybe_unused]] = T;               \
    return __VA_ARGS__();                          \
  }
#define FLASHINFER_DISPATCH(dtype, CASES)                                                              \
  [&]() -> bool {                                                                                      \
    switch (encode_dlpack_dtype(dtype)) {                                                              \
      CASES                                                                                            \
      default:                                                                                         \
        FLASHINFER_THROW(ArgumentError) << __func__ << ": no kernel for " << dtype << " (dtype code "  \
                                        << int((dtype).code) << ", " << int((dtype).bits) << " bits)"; \
    }                                                                                                  \
    return false;                                                                                      \
  }()
#define FLASHINFER_CASES_FP16(NAME, ...)                                         \
  FLASHINFER_DISPATCH_CASE(dl_float16, flashinfer::float16_t, NAME, __VA_ARGS__) \
  FLASHINFER_DISPATCH_CASE(dl_bfloat16, flashinfer::bfloat16_t, NAME, __VA_ARGS__)
#define FLASHINFER_CASES_FP32(NAME, ...) FLASHINFER_DISPATCH_CASE(dl_float32, float, NAME, __VA_ARGS__)
#define FLASHINFER_CASES_FP8(NAME, ...)                                                    \
  FLASHINFER_DISPATCH_CASE(dl_float8_e4m3fn, flashinfer::float8_e4m3_t, NAME, __VA_ARGS__) \
  FLASHINFER_DISPATCH_CASE(dl_float8_e5m2, flashinfer::float8_e5m2_t, NAME, __VA_ARGS__)

#define DISPATCH_DLPACK_DTYPE_TO_CTYPE_FP16(dtype, NAME, ...) \
  FLASHINFER_DISPATCH(dtype, FLASHINFER_CASES_FP16(NAME, __VA_ARGS__))
#define DISPATCH_DLPACK_DTYPE_TO_CTYPE_FP8(dtype, NAME, ...) \
  FLASHINFER_DISPATCH(dtype, FLASHINFER_CASES_FP8(NAME, __VA_ARGS__))
#define DISPATCH_DLPACK_DTYPE_TO_CTYPE_FP16_FP8(dtype, NAME, ...) \
  FLASHINFER_DISPATCH(dtype, FLASHINFER_CASES_FP16(NAME, __VA_ARGS__) FLASHINFER_CASES_FP8(NAME, __VA_ARGS__))
#define DISPATCH_DLPACK_DTYPE_TO_CTYPE_FP32_FP16(dtype, NAME, ...) \
  FLASHINFER_DISPATCH(dtype, FLASHINFER_CASES_FP32(NAME, __VA_ARGS__) FLASHINFER_CASES_FP16(NAME, __VA_ARGS__))
#define DISPATCH_DLPACK_DTYPE_TO_CTYPE(dtype, NAME, ...)                                                       \
  FLASHINFER_DISPATCH(dtype, FLASHINFER_CASES_FP32(NAME, __VA_ARGS__) FLASHINFER_CASES_FP16(NAME, __VA_ARGS__) \
                                 FLASHINFER_CASES_FP8(NAME, __VA_ARGS__))
#define DISPATCH_DLPACK_IDTYPE_TO_CTYPE(dtype, NAME, ...)                                   \
  FLASHINFER_DISPATCH(dtype, FLASHINFER_DISPATCH_CASE(dl_int32, int32_t, NAME, __VA_ARGS__) \
                                 FLASHINFER_DISPATCH_CASE(dl_int64, int64_t, NAME, __VA_ARGS__))
#define DISPATCH_BOOL(expr, NAME, ...) \
  [&]() -> bool {                      \
    if (expr) {                        \
      constexpr bool NAME = true;      \
      return __VA_ARGS__();            \
    } else {                           \
      constexpr bool NAME = false;     \
      return __VA_ARGS__();            \
    }                                  \
  }()
