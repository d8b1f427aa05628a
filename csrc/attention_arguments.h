// SPDX-License-Identifier: Apache-2.0
// Arguments of the run() functions of attention modules. Their number depends on the variant, so they are taken one by
// one, and the tail is read by the generated ReadExtras (csrc/attention_config.jinja).
#pragma once
#include "tvm_ffi_utils.h"
// clang-format off
#include <tvm/ffi/container/array.h>

#include <type_traits>
#include "attention_params.inc"
// clang-format on

namespace flashinfer {
namespace attention {

using Numbers = tvm::ffi::Array<int64_t>;

/// A cursor over the arguments of a call.
class Arguments {
 public:
  Arguments(const char* function, const TVMFFIAny* args, int count) : function_(function), args_(args), count_(count) {}

  /// `fixed` more, and those of the variant.
  void ExpectCount(int fixed) const {
    if (count_ - next_ != fixed + NUM_EXTRAS) {
      FLASHINFER_THROW(TypeError) << function_ << ": arguments must be " << next_ + fixed << " and " << NUM_EXTRAS
                                  << " of the variant, got " << count_;
    }
  }

  template <typename T>
  T Next() {
    return ffi::Argument<T>(function_, args_, next_++);
  }

  /// `rest` more, and none of the variant.
  void ExpectLast(int rest) const {
    if (count_ != next_ + rest) {
      FLASHINFER_THROW(TypeError) << function_ << ": arguments must be " << next_ + rest << ", got " << count_;
    }
  }

  const char* function() const { return function_; }

 private:
  const char* function_;
  const TVMFFIAny* args_;
  int count_, next_ = 0;
};

/// Return true if a kernel may read elements of type `t` as T: same size, and integers are not read as floats or the
/// other way round. Of 8
template <typename T>
constexpr bool IsReadAs(DLDataType t) {
  if (t.bits != 8 * sizeof(T)) return false;
  if (std::is_same_v<T, bfloat16_t>) return t.code == kDLBfloat;
  if (std::is_floating_point_v<T> || std::is_same_v<T, float16_t>) return t.code == kDLFloat;
  return !std::is_integral_v<T> || sizeof(T) == 1 || t.code == kDLInt || t.code == kDLUInt;
}

/// Reader of the variant's parameters for ReadExtras.
class ExtrasReader {
 public:
  /// `layout` and `is_paged` say how scale factors lie; `q` is on the device of all tensors.
  ExtrasReader(Arguments& args, const TensorView& q, int64_t layout, bool is_paged)
      : args_(args), q_(q), layout_(layout), is_paged_(is_paged) {}

  /// Address of a tensor of T, which is declared as `type`; null if it may be absent and is.
  template <typename T>
  T* Pointer(const char* name, const char* type, bool is_optional) {
    const Optional<TensorView> tensor = args_.Next<Optional<TensorView>>();
    last_ = tensor;
    if (!tensor.has_value()) {
      if (!is_optional) {
        FLASHINFER_THROW(ArgumentError)
            << args_.function() << ": " << name
            << " must be a tensor (only names that start with maybe are optional), got None";
      }
      return nullptr;
    }
    if (!IsReadAs<T>((*tensor).dtype())) {
      FLASHINFER_THROW(ArgumentError) << args_.function() << ": " << name
                                      << " must have the dtype that the variant declares (" << type << "), got "
                                      << (*tensor).dtype();
    }
    Expect(args_.function(), name, *tensor).same_device(q_, "q");
    return (*tensor).data_ptr<T>();
  }

  template <typename T>
  T Scalar(const char* name, const char* type) {
    if constexpr (std::is_floating_point_v<T>) {
      return T(args_.Next<double>());
    } else {
      const int64_t value = args_.Next<int64_t>();
      if (int64_t(T(value)) != value || (T(value) < T(0)) != (value < 0)) {
        FLASHINFER_THROW(ArgumentError) << args_.function() << ": " << name
                                        << " must have the type that the variant declares (" << type << "), got "
                                        << value;
      }
      return T(value);
    }
  }

  /// Store the address and strides of the scale factors of a cache, taken from the tensor just read.
  void ScaleFactors(const char* name, const uint8_t*& sf, int64_t& page, int64_t& n, int64_t& h) const {
    if (!last_.has_value()) {
      FLASHINFER_THROW(ArgumentError) << args_.function() << ": " << name
                                      << " must be a tensor (kv_cache_sf: a uint8 cache has scale factors), got None";
    }
    const TensorView& t = *last_;
    Expect(args_.function(), name, t).rank(is_paged_ ? 4 : 3);
    if (t.stride(-1) != 1) {
      FLASHINFER_THROW(ArgumentError) << args_.function() << ": " << name << " innermost stride must be 1, got "
                                      << t.stride(-1);
    }
    const int first = is_paged_ ? 1 : 0;
    sf = t.data_ptr<uint8_t>();
    page = is_paged_ ? t.stride(0) : 0;
    n = t.stride(first + (layout_ == 0 ? 0 : 1));
    h = t.stride(first + (layout_ == 0 ? 1 : 0));
  }

 private:
  Arguments& args_;
  const TensorView& q_;
  const int64_t layout_;
  const bool is_paged_;
  Optional<TensorView> last_;
};

template <typename... Args, size_t... I>
Numbers CallForNumbers(const char* function, Numbers (*f)(Args...), const TVMFFIAny* args, int count,
                       std::index_sequence<I...>) {
  if (count != int(sizeof...(Args))) {
    FLASHINFER_THROW(TypeError) << function << ": arguments must be " << sizeof...(Args) << ", got " << count;
  }
  return f(ffi::Argument<std::decay_t<Args>>(function, args, I)...);
}

template <typename... Args>
Numbers CallForNumbers(const char* function, Numbers (*f)(Args...), const TVMFFIAny* args, int count) {
  return CallForNumbers(function, f, args, count, std::index_sequence_for<Args...>{});
}

}  // namespace attention
}  // namespace flashinfer

/// Export a function of an Arguments cursor.
#define FLASHINFER_EXPORT_RUN(name, function) \
  FLASHINFER_EXPORT_BODY(name, flashinfer::attention::Arguments cursor(#name, args, count); function(cursor))

/// Export a function that returns a list of numbers.
#define FLASHINFER_EXPORT_PLAN(name, function)                             \
  FLASHINFER_EXPORT_BODY(name, *reinterpret_cast<tvm::ffi::Any*>(result) = \
                                   flashinfer::attention::CallForNumbers(#name, function, args, count))
