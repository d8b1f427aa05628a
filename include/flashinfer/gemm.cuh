// SPDX-License-Identifier: Apache-2.0
// CUDA kernels of gemm.h, for SM80 and later: any strides, element types, groupings and scales. Results are the same
// in every run.
// Parts are in gemm/general:
//   choose.h   which kernel serves a problem    work.cuh      tiles of results, steps along K
//   load.cuh   operands to shared memory        multiply.cuh  products on tensor cores, or in fp32
//   store.cuh  scaling, bias, rounding          kernel.cuh    the ring and the loop over tiles
//   test  pytest tests/gemm      bench  python benchmarks/bench_gemm.py
#pragma once
#include "gemm/general/launch.cuh"

namespace flashinfer {
namespace gemm {

template <typename T, Loads LOADS, bool SCALED, TileSize SIZE>
Status LaunchIfThere(const GemmPlan& p, int device, Stream stream) {
  if constexpr (HasKernel(sizeof(T), LOADS, SCALED, SIZE)) {
    return LaunchGemm<T, LOADS, SCALED, SIZE>(p, device, stream);
  } else {
    return cudaErrorInvalidValue;  // ChooseKernel returns kernels that exist
  }
}

template <typename T, Loads LOADS, bool SCALED>
Status LaunchOfSize(const GemmPlan& p, TileSize size, int device, Stream stream) {
  switch (size) {
    case TileSize::kSmall:
      return LaunchIfThere<T, LOADS, SCALED, TileSize::kSmall>(p, device, stream);
    case TileSize::kNarrow:
      return LaunchIfThere<T, LOADS, SCALED, TileSize::kNarrow>(p, device, stream);
    case TileSize::kMedium:
      return LaunchIfThere<T, LOADS, SCALED, TileSize::kMedium>(p, device, stream);
    default:
      return LaunchIfThere<T, LOADS, SCALED, TileSize::kLarge>(p, device, stream);
  }
}

template <typename T, bool SCALED>
Status LaunchOfLoads(const GemmPlan& p, const KernelChoice& c, int device, Stream stream) {
  switch (c.loads) {
    case Loads::kChunks:
      return LaunchOfSize<T, Loads::kChunks, SCALED>(p, c.size, device, stream);
    case Loads::kColumns:
      return LaunchOfSize<T, Loads::kColumns, SCALED>(p, c.size, device, stream);
    default:
      return LaunchOfSize<T, Loads::kAny, SCALED>(p, c.size, device, stream);
  }
}

template <typename T>
Status LaunchOfType(const GemmPlan& p, const KernelChoice& c, int device, Stream stream) {
  return c.scaled ? LaunchOfLoads<T, true>(p, c, device, stream) : LaunchOfLoads<T, false>(p, c, device, stream);
}

FLASHINFER_INLINE Status Gemm(const GemmArguments& x, Stream stream) {
  if (x.m == 0 || x.n == 0 || x.batch == 0) return cudaSuccess;
  const bool same_bytes = ElementBytes(x.a.element) == ElementBytes(x.b.element);
  const bool is_fp8 = ElementBytes(x.a.element) == 1;
  if (!FitsPlan(x) || !same_bytes || (!is_fp8 && x.a.element != x.b.element)) return cudaErrorInvalidValue;
  int device = 0;
  const Status status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  GemmPlan p;
  const KernelChoice c = ChooseKernel(&p, x, device::SmCount(device));
  if (!FitsPlan(p)) return cudaErrorInvalidValue;
  switch (x.a.element) {
    case Element::kFloat32:
      return LaunchOfType<float>(p, c, device, stream);
    case Element::kFloat16:
      return LaunchOfType<__half>(p, c, device, stream);
    case Element::kBFloat16:
      return LaunchOfType<__nv_bfloat16>(p, c, device, stream);
    default:
      return LaunchOfType<Fp8>(p, c, device, stream);
  }
}

}  // namespace gemm
}  // namespace flashinfer
