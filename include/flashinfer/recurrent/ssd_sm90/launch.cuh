// SPDX-License-Identifier: Apache-2.0
// Host entry of the Hopper kernel of SSD: what it serves, tensor maps, launch.
//   test  pytest tests/recurrent -k ssd      bench  python benchmarks/bench_recurrent_mamba.py -k ssd
#pragma once
#include "../../device/occupancy.cuh"
#include "../../hopper/tensor_map_cache.h"
#include "kernel.cuh"

namespace flashinfer {
namespace recurrent {
namespace ssd_sm90 {

inline bool IsHopper() {
  struct Tag {};
  return device::OncePerDevice<Tag>([](int device) {
           int major = 0;
           cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
           return major;
         }) == 9;
}

#ifdef __CUDA_ARCH_LIST__
/// True if the unit is compiled for sm_90a, whose instructions the kernel needs (a build for sm_90 has them not).
constexpr bool HasHopperTarget() {
  constexpr int ARCHS[] = {__CUDA_ARCH_LIST__};
  for (const int arch : ARCHS) {
    if (arch == 900) return true;
  }
  return false;
}
#else
constexpr bool HasHopperTarget() { return true; }
#endif

/// True if one box copies tokens of any batch entry: entries follow each other as tokens do, at aligned addresses.
template <typename Input>
bool Supports(const SsdParams<Input>& p) {
  const auto suits = [&](const auto& a) {
    return IsAligned(a.data, 16) && a.token % 8 == 0 && a.head % 8 == 0 &&
           (p.sequences == 1 || p.bounds != nullptr || a.batch == a.token * p.tokens);
  };
  const bool has_pairs = p.out_row != 1 || (p.out.batch % 2 == 0 && p.out.token % 2 == 0 && p.out.head % 2 == 0 &&
                                            IsAligned(p.out.data, 4));
  return p.dstate == DSTATE && p.dim % ROWS == 0 && suits(p.x) && suits(p.b) && suits(p.c) && has_pairs &&
         p.tokens > 0 && HasHopperTarget() && IsHopper();
}

template <typename Input>
cudaError_t MapOf(CUtensorMap* map, const TokenArray<const Input>& a, int64_t width, int64_t heads, int64_t tokens) {
  hopper::TensorBox box;
  box.data = a.data;
  box.size[0] = uint64_t(width), box.size[1] = uint64_t(heads), box.size[2] = uint64_t(tokens);
  box.stride_bytes[0] = uint64_t(a.head) * sizeof(Input), box.stride_bytes[1] = uint64_t(a.token) * sizeof(Input);
  box.box[0] = 64, box.box[1] = 1, box.box[2] = SSD_CHUNK;
  return hopper::FindTensorMap(map, box);
}

template <typename Input>
Status Launch(const SsdParams<Input>& p, Stream stream) {
  const int64_t tokens = p.bounds != nullptr ? p.tokens : int64_t(p.tokens) * p.sequences;
  Maps maps;
  cudaError_t status = MapOf(&maps.x, p.x, p.dim, p.heads, tokens);
  if (status == cudaSuccess) status = MapOf(&maps.b, p.b, p.dstate, p.heads / p.heads_per_group, tokens);
  if (status == cudaSuccess) status = MapOf(&maps.c, p.c, p.dstate, p.heads / p.heads_per_group, tokens);
  if (status != cudaSuccess) return status;
  constexpr auto KERNEL = SsdSm90Kernel<Input>;
  status = device::AllowShared<KERNEL, SHARED_BYTES>();
  if (status != cudaSuccess) return status;
  const int64_t blocks = int64_t(p.sequences) * p.heads * (p.dim / ROWS);
  return LaunchShared(KERNEL, dim3(blocks), dim3(THREADS), SHARED_BYTES, false, stream, p, maps);
}

}  // namespace ssd_sm90
}  // namespace recurrent
}  // namespace flashinfer
