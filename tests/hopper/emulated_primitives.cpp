// SPDX-License-Identifier: Apache-2.0
// The kernels of primitives.cuh on the CPU, called by test_emulated_primitives.py.
#include "primitives.cuh"

namespace {

/// A matrix of `rows` contiguous rows.
CUtensorMap MapOf(const void* data, int element, int64_t rows, int64_t columns, uint32_t box_columns,
                  uint32_t box_rows) {
  hopper::TensorBox t;
  t.data = data, t.element_bytes = element;
  t.size[0] = uint64_t(columns), t.size[1] = uint64_t(rows), t.stride_bytes[0] = uint64_t(columns) * element;
  t.box[0] = box_columns, t.box[1] = box_rows;
  CUtensorMap map;
  hopper::EncodeTensorMap(&map, t);
  return map;
}

template <WgmmaType TYPE, int N, bool TA, bool TB, bool RS>
int Product(float* c, const void* a, const void* b) {
  constexpr int ELEMENT = TYPE == WgmmaType::kE4m3 ? 1 : 2, K = 128 / ELEMENT;
  const CUtensorMap a_map = MapOf(a, ELEMENT, 64, K, K, 64);
  const CUtensorMap b_map = TB ? MapOf(b, ELEMENT, K, N, 64, 64) : MapOf(b, ELEMENT, N, K, K, N);
  const flashinfer::LaunchConfig config(dim3(1), dim3(128), 1024 + 64 * 128 + 256 * 128, false, nullptr);
  return int(config.Launch(ProductKernel<TYPE, N, TA, TB, RS>, a_map, b_map, c));
}

}  // namespace

/// c (64, n) = a b^T; the forms are those of test_emulated_primitives.py.
EMULATION_EXPORT int product(int64_t form, float* c, const void* a, const void* b) {
  constexpr WgmmaType BF16 = WgmmaType::kBf16;
  switch (form) {
    case 0:
      return Product<BF16, 96, false, false, false>(c, a, b);
    case 1:
      return Product<WgmmaType::kF16, 8, false, false, false>(c, a, b);
    case 2:
      return Product<WgmmaType::kE4m3, 256, false, false, false>(c, a, b);
    case 3:
      return Product<BF16, 128, true, false, false>(c, a, b);
    case 4:
      return Product<BF16, 128, false, true, false>(c, a, b);
    case 5:
      return Product<BF16, 128, true, true, false>(c, a, b);
    case 6:
      return Product<BF16, 128, false, false, true>(c, a, b);
    default:
      return Product<BF16, 128, false, true, true>(c, a, b);
  }
}

EMULATION_EXPORT int ring_copy(void* y, const void* x, int64_t rows) {
  const flashinfer::LaunchConfig config(dim3(2), dim3(256), 1024 + 3 * 64 * 128, false, nullptr, 2);
  return int(config.Launch(RingCopyKernel, MapOf(x, 2, rows, 64, 64, 32), MapOf(y, 2, rows, 64, 64, 64),
                           int((rows + 63) / 64)));
}

EMULATION_EXPORT int store_matrix(uint16_t* plain, uint16_t* transposed) {
  return int(flashinfer::Launch(StoreMatrixKernel, dim3(1), dim3(32), false, nullptr, plain, transposed));
}
