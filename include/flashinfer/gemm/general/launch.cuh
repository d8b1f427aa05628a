// SPDX-License-Identifier: Apache-2.0
// Launches of the general GEMM kernel, one template per kernel.
#pragma once
#include <atomic>

#include "../../utils.cuh"
#include "kernel.cuh"
#include "../../device/sm_count.h"

namespace flashinfer {
namespace gemm {

/// Kernel of an element type, way to load, scaling and tile. 99 KiB of shared memory are the most that all devices
/// from SM80 on have for a block; the large tile with scales needs 98.
template <typename T, Loads LOADS, TileSize SIZE>
struct TileClass {
  using type = MmaTile<T, 128, 128, 2, 4, 1, LOADS == Loads::kColumns>;
  static constexpr int STAGES = 3;
};
template <typename T, Loads LOADS>
struct TileClass<T, LOADS, TileSize::kMedium> {
  using type = MmaTile<T, 64, 64, 2, 2, 1, LOADS == Loads::kColumns>;
  static constexpr int STAGES = 4;
};
template <typename T, Loads LOADS>
struct TileClass<T, LOADS, TileSize::kNarrow> {
  using type = MmaTile<T, 64, 32, 2, 1, 2, LOADS == Loads::kColumns>;
  static constexpr int STAGES = 8;
};
template <typename T, Loads LOADS>
struct TileClass<T, LOADS, TileSize::kSmall> {
  using type = MmaTile<T, 16, 32, 1, 1, 4, LOADS == Loads::kColumns>;
  static constexpr int STAGES = 12;
};
template <>
struct TileClass<float, Loads::kAny, TileSize::kMedium> {
  using type = FmaTile;
  static constexpr int STAGES = 2;
};

template <typename T, Loads LOADS, bool SCALED, TileSize SIZE>
using TraitsOf = KernelTraits<T, typename TileClass<T, LOADS, SIZE>::type, LOADS, SCALED,
                              LOADS == Loads::kAny ? 2 : TileClass<T, LOADS, SIZE>::STAGES>;

/// Allow a kernel its shared memory and return the blocks of it that a device runs at once; 0 if that fails.
template <class Traits>
int ResidentBlocks(int device) {
  static std::atomic<int> counts[device::MAX_DEVICES];
  int count = device < device::MAX_DEVICES ? counts[device].load(std::memory_order_relaxed) : 0;
  if (count > 0) return count;
  const auto kernel = GemmKernel<Traits>;
  const int bytes = Traits::SHARED_BYTES;
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) != cudaSuccess) return 0;
  if (cudaOccupancyMaxActiveBlocksPerMultiprocessor(&count, kernel, Traits::THREADS, bytes) != cudaSuccess) return 0;
  count *= device::SmCount(device);
  if (device < device::MAX_DEVICES) counts[device].store(count, std::memory_order_relaxed);
  return count;
}

/// Launch the kernel of a plan: a block per tile, or, where only the device knows how many tiles there are, as many
/// blocks as run at once.
template <typename T, Loads LOADS, bool SCALED, TileSize SIZE>
Status LaunchGemm(const GemmPlan& p, int device, Stream stream) {
  using Traits = TraitsOf<T, LOADS, SCALED, SIZE>;
  const int resident = ResidentBlocks<Traits>(device);
  if (resident == 0) {
    const Status status = cudaGetLastError();
    return status == cudaSuccess ? cudaErrorLaunchOutOfResources : status;
  }
  const int64_t tiles = MaxTiles(p), blocks = HasCounts(p) ? std::min<int64_t>(tiles, resident) : tiles;
  return LaunchShared(GemmKernel<Traits>, dim3(unsigned(blocks)), dim3(Traits::THREADS), Traits::SHARED_BYTES,
                      p.x.enable_pdl, stream, p);
}

}  // namespace gemm
}  // namespace flashinfer
