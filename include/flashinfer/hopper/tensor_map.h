// SPDX-License-Identifier: Apache-2.0
// Tensor maps for TMA, encoded on the host by the driver's cuTensorMapEncodeTiled. The function is looked up at run
// time, so no module links to libcuda.
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace flashinfer {
namespace hopper {

/// Tensor of up to three dimensions, innermost first, and the box that one TMA instruction copies.
struct TensorBox {
  const void* data = nullptr;
  int element_bytes = 2;              // 1, 2 or 4; loads zero-fill, so only the size of elements matters
  uint64_t size[3] = {1, 1, 1};       // size of the tensor in elements
  uint64_t stride_bytes[2] = {0, 0};  // strides of dimensions 1 and 2; dimension 0 is contiguous
  uint32_t box[3] = {1, 1, 1};        // size of the box in elements
  bool swizzle = true;                // use the 128-byte swizzle
};

/// Return the reason why TMA cannot use this tensor, or nullptr. The rules are the driver's, whose error is only
/// "invalid".
inline const char* TensorBoxFault(const TensorBox& t) {
  if (t.element_bytes != 1 && t.element_bytes != 2 && t.element_bytes != 4) return "element_bytes must be 1, 2 or 4";
  if (reinterpret_cast<uintptr_t>(t.data) % 16 != 0) return "data must be aligned to 16 bytes";
  for (int i = 0; i < 3; ++i) {
    if (t.size[i] < 1 || t.size[i] > (uint64_t(1) << 32)) return "sizes must be in 1 .. 2^32";
    if (t.box[i] < 1 || t.box[i] > 256) return "box sizes must be in 1 .. 256";
  }
  for (int i = 0; i < 2; ++i) {
    const bool is_used = t.size[i + 1] > 1;
    if (is_used && (t.stride_bytes[i] % 16 != 0 || t.stride_bytes[i] >= (uint64_t(1) << 40))) {
      return "strides must be multiples of 16 bytes below 2^40";
    }
  }
  const uint32_t inner = t.box[0] * uint32_t(t.element_bytes);
  if (inner % 16 != 0) return "the inner size of a box must be a multiple of 16 bytes";
  if (t.swizzle && inner > 128) return "the inner size of a box with the 128-byte swizzle must be at most 128 bytes";
  return nullptr;
}

using TensorMapEncode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                     const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                     CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

/// Return the driver's encoder, or nullptr if the driver is older than CUDA 12.
inline TensorMapEncode FindTensorMapEncode() {
  static const TensorMapEncode encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
    const cudaError_t status =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
#else
    const cudaError_t status = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &result);
#endif
    const bool found = status == cudaSuccess && result == cudaDriverEntryPointSuccess;
    return found ? reinterpret_cast<TensorMapEncode>(function) : nullptr;
  }();
  return encode;
}

/// Encode `t` as a three-dimensional map. A dimension of one element gets a stride that the driver accepts.
inline cudaError_t EncodeTensorMap(CUtensorMap* map, const TensorBox& t) {
  const TensorMapEncode encode = FindTensorMapEncode();
  if (encode == nullptr) return cudaErrorNotSupported;
  if (TensorBoxFault(t) != nullptr) return cudaErrorInvalidValue;
  const CUtensorMapDataType type = t.element_bytes == 1   ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                   : t.element_bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT16
                                                          : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  const uint64_t inner = (t.size[0] * uint64_t(t.element_bytes) + 15) / 16 * 16;
  const uint64_t row = t.size[1] > 1 ? t.stride_bytes[0] : inner;
  const cuuint64_t sizes[3] = {t.size[0], t.size[1], t.size[2]};
  const cuuint64_t strides[2] = {row, t.size[2] > 1 ? t.stride_bytes[1] : row * t.size[1]};
  const cuuint32_t boxes[3] = {t.box[0], t.box[1], t.box[2]};
  const cuuint32_t steps[3] = {1, 1, 1};
  const CUresult status =
      encode(map, type, 3, const_cast<void*>(t.data), sizes, strides, boxes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             t.swizzle ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return status == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace hopper
}  // namespace flashinfer
