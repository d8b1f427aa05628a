// SPDX-License-Identifier: Apache-2.0
// Appending to a paged KV cache in NVFP4 on CUDA (formulas and parameters: page_nvfp4.h).
// A thread quantises one block of 16 keys and the same block of the values: 64 bytes read, 18 written, no exchange
// between threads, which are arranged as in page.cuh. Divisions are IEEE's: a product with the reciprocal would round
// some ties the other way.
//   test  pytest tests/page/test_page_nvfp4.py      bench  python benchmarks/bench_page_nvfp4.py
#pragma once
#include "e2m1.cuh"
#include "page_nvfp4.h"
#include "page_table.cuh"
#include "utils.cuh"
#include "vec_dtypes.cuh"

namespace flashinfer {
namespace page {

struct MappingArgs {
  const void* slots;
  bool is_int64;
  int64_t num_slots;
  FastDivisor page_size;
};

/// Look-up of a row's slot: in the page table, or (MAPPED) in an array with the slot number of each row.
template <bool MAPPED>
struct Place;
template <>
struct Place<false> {
  TableArgs table;
  __device__ __forceinline__ DeviceSlot Find(uint32_t row) const {
    return SlotOf(table, table.batch_indices[row], table.positions[row]);
  }
};
template <>
struct Place<true> {
  MappingArgs mapping;
  __device__ __forceinline__ DeviceSlot Find(uint32_t row) const {
    const int64_t slot = mapping.is_int64 ? static_cast<const int64_t*>(mapping.slots)[row]
                                          : static_cast<const int32_t*>(mapping.slots)[row];
    if (slot < 0 || slot >= mapping.num_slots) return {-1, 0};
    const int32_t page = mapping.page_size.Divide(uint32_t(slot));
    return {page, int32_t(slot) - page * int32_t(mapping.page_size.divisor)};
  }
};

template <typename T, bool MAPPED>
struct Nvfp4Args {
  Place<MAPPED> place;
  Nvfp4Part<T> key, value;
  uint32_t num_rows, num_heads, num_blocks;
};

/// Return the global scale of a part. An invalid scale traps: in a CUDA graph the host cannot check the value before.
template <typename T>
__device__ __forceinline__ float GlobalScale(const Nvfp4Part<T>& p) {
  if (p.global_on_device == nullptr) return p.global;
  const float scale = *p.global_on_device;
  if (!(scale > 0.f && isfinite(scale))) __trap();
  return scale;
}

/// Block of 16 elements in registers.
template <typename T, bool ALIGNED>
struct Nvfp4Block {
  static constexpr int VEC = ALIGNED ? 8 : 1;
  Vec<T, VEC> x[NVFP4_BLOCK / VEC];

  __device__ __forceinline__ Nvfp4Block(const Nvfp4Part<T>& p, uint32_t row, uint32_t head, uint32_t block) {
    const T* from = p.rows + row * p.row_stride.token + head * p.row_stride.head + block * NVFP4_BLOCK;
#pragma unroll
    for (int i = 0; i < NVFP4_BLOCK / VEC; ++i) x[i] = Vec<T, VEC>::Load(from + i * VEC);
  }

  __device__ __forceinline__ float At(int i) const { return ToFloat(x[i / VEC][i % VEC]); }

  __device__ __forceinline__ void Store(const Nvfp4Part<T>& p, float global, uint32_t head, uint32_t block,
                                        DeviceSlot slot) const {
    float largest = 0.f;
#pragma unroll
    for (int i = 0; i < NVFP4_BLOCK; ++i) largest = fmaxf(largest, fabsf(At(i)));
    const __nv_fp8_storage_t sf = __nv_cvt_float_to_fp8(largest / (6.f * global), __NV_SATFINITE, __NV_E4M3);
    const float scale = __half2float(__half(__nv_cvt_fp8_to_halfraw(sf, __NV_E4M3))) * global;
    uint32_t codes[2] = {0, 0};
    if ((sf & 0x7F) != 0) {
#pragma unroll
      for (int i = 0; i < NVFP4_BLOCK; ++i) {
        const float value = At(i);
        const uint32_t code = RoundToE2M1(fabsf(value) / scale) | ((__float_as_uint(value) >> 28) & 8);
        codes[i / 8] |= code << (i % 8 * 4);
      }
    }
    auto offset = [&](const SlotStride& s) { return slot.page * s.page + slot.entry * s.entry + head * s.head; };
    p.scales[offset(p.scales_stride) + block] = sf;
    uint8_t* to = p.codes + offset(p.codes_stride) + block * (NVFP4_BLOCK / 2);
    if constexpr (ALIGNED) {
      *reinterpret_cast<uint2*>(to) = make_uint2(codes[0], codes[1]);
    } else {
#pragma unroll
      for (int i = 0; i < NVFP4_BLOCK / 2; ++i) to[i] = uint8_t(codes[i / 4] >> (i % 4 * 8));
    }
  }
};

template <typename T, bool MAPPED, bool ALIGNED>
__global__ void __launch_bounds__(THREADS) Nvfp4AppendKernel(const __grid_constant__ Nvfp4Args<T, MAPPED> a) {
  const uint32_t row = RowOfThread(), head = HeadOfThread();
  if (row >= a.num_rows || head >= a.num_heads) return;
  DeviceSlot slot;
  float key_scale, value_scale;
  for (uint32_t block = threadIdx.x; block < a.num_blocks; block += blockDim.x) {
    const Nvfp4Block<T, ALIGNED> k(a.key, row, head, block), v(a.value, row, head, block);
    if (block == threadIdx.x) {  // after the loads of the first block are on their way
      slot = a.place.Find(row);
      key_scale = GlobalScale(a.key), value_scale = GlobalScale(a.value);
    }
    if (slot.page < 0) return;
    k.Store(a.key, key_scale, head, block, slot);
    v.Store(a.value, value_scale, head, block, slot);
  }
}

/// Return true if 16-byte loads and 8-byte stores are aligned.
template <typename T>
bool IsAligned(const Nvfp4Part<T>& p) {
  const int64_t rows = p.row_stride.token | p.row_stride.head;
  const int64_t codes = p.codes_stride.page | p.codes_stride.entry | p.codes_stride.head;
  return flashinfer::IsAligned(p.rows, 16) && flashinfer::IsAligned(p.codes, 8) && rows % 8 == 0 && codes % 8 == 0;
}

template <typename T, bool MAPPED>
cudaError_t LaunchNvfp4Append(const Nvfp4AppendParams<T>& p, const Place<MAPPED>& place, cudaStream_t stream) {
  const int64_t blocks = p.head_dim / NVFP4_BLOCK;
  const Shape shape(blocks, p.num_heads, p.table.num_rows);
  const bool aligned = IsAligned(p.key) && IsAligned(p.value);
  const Nvfp4Args<T, MAPPED> args{place,           p.key, p.value, uint32_t(p.table.num_rows), uint32_t(p.num_heads),
                                  uint32_t(blocks)};
  auto kernel = aligned ? Nvfp4AppendKernel<T, MAPPED, true> : Nvfp4AppendKernel<T, MAPPED, false>;
  return Launch(kernel, shape.grid, shape.block, false, stream, args);
}

}  // namespace page

template <typename T>
Status Nvfp4AppendPaged(const Nvfp4AppendParams<T>& p, Stream stream) {
  if (p.table.num_rows == 0 || p.num_heads == 0) return cudaSuccess;
  if (p.mapping.slots == nullptr) return page::LaunchNvfp4Append<T, false>(p, {page::MakeTable(p.table)}, stream);
  const SlotMapping& m = p.mapping;
  const page::MappingArgs mapping{m.slots, m.is_int64, m.num_slots, FastDivisor(uint32_t(m.page_size))};
  return page::LaunchNvfp4Append<T, true>(p, {mapping}, stream);
}

}  // namespace flashinfer
