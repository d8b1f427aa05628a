// SPDX-License-Identifier: Apache-2.0
// Shared-memory tiles with the 128-byte swizzle, in the layout that TMA writes and wgmma reads.
//
// A slab is `rows` rows of 128 bytes, aligned to 1024: the 16-byte chunk c of row r lies in chunk c ^ (r % 8). A box of
// 128 bytes by `rows`, loaded with that swizzle, is one slab. Read K-major, a row is an index of M or N and its 128
// bytes are 64 (16 bits) or 128 (8 bits) steps of K; read MN-major (16 bits only), a row is a step of K and its 64
// elements are neighbours along M or N, further ones in the next slab.
#pragma once
#include <cstdint>

#include "../host_device.h"

namespace flashinfer {
namespace hopper {

constexpr int SLAB_ROW_BYTES = 128;
constexpr int SLAB_ALIGNMENT = 1024;
constexpr int WGMMA_K_BYTES = 32;

/// Return the swizzled offset in a slab of the byte whose unswizzled offset is `offset`.
FLASHINFER_HD constexpr uint32_t Swizzle128(uint32_t offset) { return offset ^ (((offset >> 7) & 7) << 4); }

/// Build the 64-bit matrix descriptor of wgmma: addresses and offsets in units of 16 bytes, swizzle mode 1 (128 bytes).
/// `leading` and `stride` are bytes; their meaning depends on the major dimension, see below.
FLASHINFER_HD constexpr uint64_t Descriptor128(uint32_t address, uint32_t leading, uint32_t stride) {
  return uint64_t((address & 0x3FFFF) >> 4) | (uint64_t((leading & 0x3FFFF) >> 4) << 16) |
         (uint64_t((stride & 0x3FFFF) >> 4) << 32) | (uint64_t(1) << 62);
}

/// Return the descriptor of a K-major slab: groups of 8 rows are 1024 bytes apart, and the leading offset is not used.
/// The next 32 bytes of K are at AdvanceDescriptor(d, 32).
FLASHINFER_HD constexpr uint64_t DescriptorKMajor(uint32_t address) { return Descriptor128(address, 16, 1024); }

/// Return the descriptor of MN-major slabs of `rows` rows each: the next 8 steps of K are 1024 bytes further, the next
/// 64 columns are in the next slab. The next 16 steps of K are at AdvanceDescriptor(d, 16 * 128).
FLASHINFER_HD constexpr uint64_t DescriptorMnMajor(uint32_t address, int rows) {
  return Descriptor128(address, uint32_t(rows) * SLAB_ROW_BYTES, 1024);
}

/// Return the descriptor `bytes` further. Only the low word changes, because shared memory ends below 2^18.
FLASHINFER_HD constexpr uint64_t AdvanceDescriptor(uint64_t descriptor, uint32_t bytes) {
  return descriptor + (bytes >> 4);
}

}  // namespace hopper
}  // namespace flashinfer
