// SPDX-License-Identifier: Apache-2.0
// Launchers of packbits: argument checks, element size and index dispatch, stream.
#include "tvm_ffi_utils.h"
// clang-format off
#include <flashinfer/packbits.h>
#if defined(FLASHINFER_CPU)
#include <flashinfer/packbits_cpu.h>
#elif defined(__CUDACC__)
#include <flashinfer/packbits.cuh>
#endif
// clang-format on

using flashinfer::BitOrder;

namespace {

BitOrder OrderOf(bool is_little) { return is_little ? BitOrder::kLittle : BitOrder::kBig; }

/// Bits of an element that make it non-zero: all of them, less the sign of a float (of both floats of a complex
/// number).
uint64_t MaskOf(DLDataType dtype) {
  const uint64_t all = dtype.bits == 64 ? ~uint64_t{0} : (uint64_t{1} << dtype.bits) - 1;
  switch (dtype.code) {
    case kDLComplex:
      return 0x7FFFFFFF7FFFFFFFull;
    case kDLInt:
    case kDLUInt:
    case kDLBool:
      return all;
    default:
      return all >> 1;
  }
}

template <typename F>
void DispatchIndex(DLDataType dtype, F&& f) {
  if (dtype.bits == 64) return f(TypeTag<int64_t>{});
  return f(TypeTag<int32_t>{});
}

void CheckIndptr(const char* op, const TensorView& x, const TensorView& indptr, const TensorView& new_indptr) {
  Expect(op, "indptr", indptr).same_device(x, "x").dtype({dl_int32, dl_int64}).rank(1).contiguous();
  if (indptr.size(0) < 1) FLASHINFER_THROW(ArgumentError) << op << ": indptr must have at least 1 element, got 0";
  Expect(op, "new_indptr", new_indptr).same_device(x, "x").dtype({dl_int32}).same_shape(indptr, "indptr").contiguous();
}

}  // namespace

void packbits(TensorView out, TensorView x, bool is_little) {
  const char* op = "packbits";
  Expect(op, "x", x).on_device().contiguous();
  Expect(op, "out", out).same_device(x, "x").dtype({dl_uint8}).rank(1).contiguous().numel((x.numel() + 7) / 8);
  DeviceGuard guard(x.device());
  const flashinfer::PackbitsParams p{x.data_ptr(), out.data_ptr<uint8_t>(), x.numel(), MaskOf(x.dtype()),
                                     OrderOf(is_little)};
  const auto stream = get_stream(x.device());
  switch (x.dtype().bits) {
    case 8:
      return CheckStatus(op, flashinfer::Packbits<uint8_t>(p, stream));
    case 16:
      return CheckStatus(op, flashinfer::Packbits<uint16_t>(p, stream));
    case 32:
      return CheckStatus(op, flashinfer::Packbits<uint32_t>(p, stream));
    case 64:
      return CheckStatus(op, flashinfer::Packbits<uint64_t>(p, stream));
    default:
      FLASHINFER_THROW(ArgumentError) << op << ": x must have a dtype of 8 to 64 bits, got " << x.dtype();
  }
}

void packed_indptr(TensorView new_indptr, TensorView num_bytes, TensorView x, TensorView indptr) {
  const char* op = "segment_packbits";
  Expect(op, "x", x).on_device().dtype({dl_bool, dl_uint8}).rank(1).contiguous();
  CheckIndptr(op, x, indptr, new_indptr);
  Expect(op, "num_bytes", num_bytes).same_device(x, "x").dtype({dl_int64}).numel(1);
  DeviceGuard guard(x.device());
  DispatchIndex(indptr.dtype(), [&](auto tag) {
    using IdType = typename decltype(tag)::type;
    const flashinfer::PackedIndptrParams<IdType> p{indptr.data_ptr<IdType>(), new_indptr.data_ptr<int32_t>(),
                                                   num_bytes.data_ptr<int64_t>(), indptr.size(0) - 1, x.numel()};
    CheckStatus(op, flashinfer::PackedIndptr<IdType>(p, get_stream(x.device())));
  });
}

void segment_packbits(TensorView out, TensorView x, TensorView indptr, TensorView new_indptr, bool is_little) {
  const char* op = "segment_packbits";
  Expect(op, "x", x).on_device().dtype({dl_bool, dl_uint8}).rank(1).contiguous();
  CheckIndptr(op, x, indptr, new_indptr);
  Expect(op, "out", out).same_device(x, "x").dtype({dl_uint8}).rank(1).contiguous();
  DeviceGuard guard(x.device());
  DispatchIndex(indptr.dtype(), [&](auto tag) {
    using IdType = typename decltype(tag)::type;
    const flashinfer::SegmentPackbitsParams<IdType> p{x.data_ptr<uint8_t>(),
                                                      indptr.data_ptr<IdType>(),
                                                      new_indptr.data_ptr<int32_t>(),
                                                      out.data_ptr<uint8_t>(),
                                                      x.numel(),
                                                      out.numel(),
                                                      indptr.size(0) - 1,
                                                      OrderOf(is_little)};
    CheckStatus(op, flashinfer::SegmentPackbits<IdType>(p, get_stream(x.device())));
  });
}
