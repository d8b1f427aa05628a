// SPDX-License-Identifier: Apache-2.0
// The blocks (CTAs) that share a row: a cluster, or a single block, for which synchronisation between blocks is a
// no-op.
#pragma once
#include "../ptx/cluster.cuh"

namespace flashinfer {
namespace sampling {

struct Cluster {
  static __device__ __forceinline__ int Size() { return ptx::ClusterSize(); }
  static __device__ __forceinline__ int Rank() { return ptx::ClusterRank(); }
  static __device__ __forceinline__ void Arrive() { ptx::ClusterArrive(); }
  static __device__ __forceinline__ void Wait() { ptx::ClusterWait(); }
  static __device__ __forceinline__ void Sync() { ptx::ClusterSync(); }
  /// Return the address of a shared-memory variable in the block of another rank.
  template <typename T>
  static __device__ __forceinline__ T* InBlock(T* local, int rank) {
    return ptx::InBlock(local, rank);
  }
};

struct SingleCta {
  static __device__ __forceinline__ int Size() { return 1; }
  static __device__ __forceinline__ int Rank() { return 0; }
  static __device__ __forceinline__ void Arrive() {}
  static __device__ __forceinline__ void Wait() {}
  static __device__ __forceinline__ void Sync() { __syncthreads(); }
  template <typename T>
  static __device__ __forceinline__ T* InBlock(T* local, int) {
    return local;
  }
};

}  // namespace sampling
}  // namespace flashinfer
