// SPDX-License-Identifier: Apache-2.0
// Launches of the kernels in primitives.cuh, for test_primitives.py.
#include "tvm_ffi_utils.h"
// clang-format off
#include "primitives.cuh"
// clang-format on

namespace {

CUtensorMap MapOf(const TensorView& x, uint32_t columns, uint32_t rows) {
  hopper::TensorBox t;
  t.data = x.data_ptr();
  t.element_bytes = x.dtype().bits / 8;
  t.size[0] = x.size(1), t.size[1] = x.size(0);
  t.stride_bytes[0] = x.stride(0) * t.element_bytes;
  t.box[0] = columns, t.box[1] = rows;
  CUtensorMap map;
  CheckStatus("EncodeTensorMap", hopper::EncodeTensorMap(&map, t));
  return map;
}

template <WgmmaType TYPE, int N, bool TA, bool TB, bool RS>
void Product(TensorView c, TensorView a, TensorView b) {
  const uint32_t row = 128 / (a.dtype().bits / 8);
  const CUtensorMap a_map = MapOf(a, row, 64), b_map = MapOf(b, TB ? 64 : row, TB ? 64 : N);
  const int bytes = 1024 + 64 * 128 + 256 * 128;
  auto* kernel = ProductKernel<TYPE, N, TA, TB, RS>;
  CheckStatus("Product", cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  kernel<<<1, 128, bytes, get_stream(a.device())>>>(a_map, b_map, c.data_ptr<float>());
  CheckStatus("Product", cudaGetLastError());
}

template <WgmmaType TYPE>
void ProductOfWidth(TensorView c, TensorView a, TensorView b) {
  switch (b.size(0)) {
    case 8:
      return Product<TYPE, 8, false, false, false>(c, a, b);
    case 16:
      return Product<TYPE, 16, false, false, false>(c, a, b);
    case 32:
      return Product<TYPE, 32, false, false, false>(c, a, b);
    case 48:
      return Product<TYPE, 48, false, false, false>(c, a, b);
    case 64:
      return Product<TYPE, 64, false, false, false>(c, a, b);
    case 88:
      return Product<TYPE, 88, false, false, false>(c, a, b);
    case 96:
      return Product<TYPE, 96, false, false, false>(c, a, b);
    case 128:
      return Product<TYPE, 128, false, false, false>(c, a, b);
    case 192:
      return Product<TYPE, 192, false, false, false>(c, a, b);
    default:
      return Product<TYPE, 256, false, false, false>(c, a, b);
  }
}

}  // namespace

/// c = a b^T, both K-major.
void product(TensorView c, TensorView a, TensorView b) {
  if (a.dtype().bits == 8) return ProductOfWidth<WgmmaType::kE4m3>(c, a, b);
  if (a.dtype().code == kDLBfloat) return ProductOfWidth<WgmmaType::kBf16>(c, a, b);
  return ProductOfWidth<WgmmaType::kF16>(c, a, b);
}

/// bf16, N = 128: MN-major operands, and A from registers.
void product_form(TensorView c, TensorView a, TensorView b, int64_t transpose_a, int64_t transpose_b,
                  int64_t registers) {
  constexpr WgmmaType T = WgmmaType::kBf16;
  if (registers)
    return transpose_b ? Product<T, 128, false, true, true>(c, a, b) : Product<T, 128, false, false, true>(c, a, b);
  if (transpose_a && transpose_b) return Product<T, 128, true, true, false>(c, a, b);
  if (transpose_a) return Product<T, 128, true, false, false>(c, a, b);
  return Product<T, 128, false, true, false>(c, a, b);
}

void ring_copy(TensorView y, TensorView x) {
  const int bytes = 1024 + 3 * 64 * 128, tiles = int((x.size(0) + 63) / 64);
  CheckStatus("ring_copy", cudaFuncSetAttribute(RingCopyKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  const flashinfer::LaunchConfig config(dim3(2), dim3(256), bytes, false, get_stream(x.device()), 2);
  CheckStatus("ring_copy", config.Launch(RingCopyKernel, MapOf(x, 64, 32), MapOf(y, 64, 64), tiles));
}

void store_matrix(TensorView plain, TensorView transposed) {
  StoreMatrixKernel<<<1, 32, 0, get_stream(plain.device())>>>(static_cast<uint16_t*>(plain.data_ptr()),
                                                              static_cast<uint16_t*>(transposed.data_ptr()));
  CheckStatus("store_matrix", cudaGetLastError());
}

FLASHINFER_EXPORT(product, product)
FLASHINFER_EXPORT(product_form, product_form)
FLASHINFER_EXPORT(ring_copy, ring_copy)
FLASHINFER_EXPORT(store_matrix, store_matrix)
