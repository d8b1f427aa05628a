// SPDX-License-Identifier: Apache-2.0
// Each Hopper primitive in the smallest kernel that shows it, for test_primitives.py (GPU) and test_emulated_primitives.py.
#pragma once
#include <flashinfer/hopper/ring.cuh>
#include <flashinfer/hopper/smem_tile.cuh>
#include <flashinfer/hopper/tensor_map.h>
#include <flashinfer/ptx/barrier.cuh>
#include <flashinfer/ptx/setmaxnreg.cuh>
#include <flashinfer/ptx/stmatrix.cuh>
#include <flashinfer/ptx/tma.cuh>
#include <flashinfer/ptx/wgmma.cuh>
#include <flashinfer/utils.cuh>

namespace hopper = flashinfer::hopper;
namespace ptx = flashinfer::ptx;
using ptx::WgmmaType;

namespace {

__device__ unsigned char* Align1024(unsigned char* p) {
  return reinterpret_cast<unsigned char*>((reinterpret_cast<uintptr_t>(p) + 1023) / 1024 * 1024);
}

/// One product: c (64, N) = a b^T. K-major operands are (64, k) and (N, k); MN-major ones (k, 64) and (k, N). k is 128 bytes
/// of a K-major row (MN-major: 64 steps). `RS`: A goes through registers.
template <WgmmaType TYPE, int N, bool TA, bool TB, bool RS>
__global__ void __launch_bounds__(128, 1)
    ProductKernel(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map, float* c) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ unsigned char raw[];
  __shared__ uint64_t barrier;
  unsigned char* const a_tile = Align1024(raw);
  unsigned char* const b_tile = a_tile + 64 * 128;
  const uint32_t a = ptx::SharedAddress(a_tile), b = ptx::SharedAddress(b_tile), full = ptx::SharedAddress(&barrier);
  constexpr int B_SLABS = TB && N > 64 ? N / 64 : 1, B_ROWS = TB ? 64 : N;
  if (threadIdx.x == 0) {
    ptx::MbarrierInit(full, 1);
    ptx::MbarrierInitFence();
    ptx::MbarrierArriveExpect(full, 64 * 128 + B_SLABS * B_ROWS * 128);
    ptx::LoadBox(a, &a_map, full, 0, 0, 0);
    for (int i = 0; i < B_SLABS; ++i) ptx::LoadBox(b + i * B_ROWS * 128, &b_map, full, 64 * i, 0, 0);
  }
  __syncthreads();
  ptx::MbarrierWait(full, 0);
  const uint64_t da = TA ? hopper::DescriptorMnMajor(a, 64) : hopper::DescriptorKMajor(a);
  const uint64_t db = TB ? hopper::DescriptorMnMajor(b, 64) : hopper::DescriptorKMajor(b);
  float d[N / 2];
  for (int k = 0; k < 4; ++k) {
    const uint64_t bk = hopper::AdvanceDescriptor(db, k * (TB ? 16 * 128 : 32));
    if constexpr (RS) {
      uint32_t fragment[4];
      const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, pair = threadIdx.x % 4;
      for (int i = 0; i < 4; ++i) {
        const uint32_t offset = (row + 8 * (i % 2)) * 128 + 32 * k + 16 * (i / 2) + 4 * pair;
        fragment[i] = *reinterpret_cast<const uint32_t*>(a_tile + hopper::Swizzle128(offset));
      }
      ptx::WgmmaFence();
      ptx::Wgmma<TYPE, N, false, TB>::Run(d, fragment, bk, k > 0);
    } else {
      ptx::WgmmaFence();
      ptx::Wgmma<TYPE, N, TA, TB>::Run(d, hopper::AdvanceDescriptor(da, k * (TA ? 16 * 128 : 32)), bk, k > 0);
    }
    ptx::WgmmaCommit();
    ptx::WgmmaWait<0>();
    ptx::WgmmaPin(d);
  }
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    c[(row + 8 * (i % 4 / 2)) * N + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2] = d[i];
  }
#endif
}

/// Copy x (rows, 64) of 16 bits to y through a ring of three stages, by clusters of two blocks. Each block loads half of a
/// tile of 64 rows and sends it to both; block r stores tiles r, r + 2, ... A warp of the consumers reads nothing itself.
__global__ void __launch_bounds__(256, 1)
    RingCopyKernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap y_map, int tiles) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int STAGES = 3, TILE = 64 * 128;
  extern __shared__ unsigned char raw[];
  __shared__ uint64_t barriers[2 * STAGES];
  const uint32_t tile = ptx::SharedAddress(Align1024(raw)), rank = ptx::ClusterRank();
  const hopper::Ring<STAGES> ring{ptx::SharedAddress(barriers)};
  if (threadIdx.x == 0) ring.Init(4 * 2);
  ptx::ClusterSync();
  hopper::RingPosition<STAGES> at;
  if (threadIdx.x < 128) {
    ptx::ReleaseRegisters<40>();
    if (threadIdx.x == 0) {
      for (int i = 0; i < tiles; ++i, at.Advance()) {
        const uint32_t full = ring.BeginFill(at, TILE);
        ptx::LoadBoxMulticast(tile + at.stage * TILE + rank * (TILE / 2), &x_map, full, 0, i * 64 + int(rank) * 32, 0,
                              3);
      }
    }
    __syncwarp();
  } else {
    ptx::TakeRegisters<200>();
    for (int i = 0; i < tiles; ++i, at.Advance()) {
      ring.WaitFull(at);
      if (threadIdx.x == 128 && i % 2 == int(rank)) {
        ptx::StoreBox(&y_map, tile + at.stage * TILE, 0, i * 64, 0);
        ptx::CommitStores();
        ptx::WaitStoresRead<0>();
      }
      __syncwarp();
      ring.Release(at.stage, 2);
    }
  }
  ptx::ClusterSync();
#endif
}

/// Write fragments of a (16, 16) matrix of values 16 row + column to shared memory and dump it.
__global__ void StoreMatrixKernel(uint16_t* plain, uint16_t* transposed) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __shared__ alignas(16) uint16_t tile[2][16 * 16];
  const int lane = threadIdx.x;
  uint32_t x[4];
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + 8 * (i % 2), column = lane % 4 * 2 + 8 * (i / 2);
    x[i] = uint32_t(16 * row + column) | uint32_t(16 * row + column + 1) << 16;
  }
  const int row = lane % 8, i = lane / 8;
  ptx::StoreMatrix4(ptx::SharedAddress(&tile[0][(row + 8 * (i % 2)) * 16 + 8 * (i / 2)]), x[0], x[1], x[2], x[3]);
  ptx::StoreMatrix4Transposed(ptx::SharedAddress(&tile[1][(row + 8 * (i / 2)) * 16 + 8 * (i % 2)]), x[0], x[1], x[2],
                              x[3]);
  __syncwarp();
  for (int j = lane; j < 256; j += 32) plain[j] = tile[0][j], transposed[j] = tile[1][j];
#endif
}

}  // namespace
