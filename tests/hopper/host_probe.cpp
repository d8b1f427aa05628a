// SPDX-License-Identifier: Apache-2.0
// Host arithmetic of the Hopper layer, called by test_host.py through ctypes.
#include <flashinfer/gemm/sm90/problem.h>
#include <flashinfer/hopper/smem_tile.cuh>
#include <flashinfer/hopper/tensor_map.h>

namespace hopper = flashinfer::hopper;

extern "C" {

uint32_t swizzle(uint32_t offset) { return hopper::Swizzle128(offset); }
uint64_t k_major(uint32_t address) { return hopper::DescriptorKMajor(address); }
uint64_t mn_major(uint32_t address, int rows) { return hopper::DescriptorMnMajor(address, rows); }
uint64_t advance(uint64_t descriptor, uint32_t bytes) { return hopper::AdvanceDescriptor(descriptor, bytes); }

bool takes_bulk_copies(const void* data, int element_bytes, int rank, const int64_t* sizes, const int64_t* strides) {
  return flashinfer::gemm::TakesBulkCopies(data, element_bytes, rank, sizes, strides);
}

/// Ten numbers: address, element bytes, three sizes, two strides, three sizes of the box; swizzle.
const char* fault(const uint64_t* x, bool swizzle) {
  hopper::TensorBox t;
  t.data = reinterpret_cast<const void*>(x[0]);
  t.element_bytes = int(x[1]);
  for (int i = 0; i < 3; ++i) t.size[i] = x[2 + i], t.box[i] = uint32_t(x[7 + i]);
  t.stride_bytes[0] = x[5], t.stride_bytes[1] = x[6];
  t.swizzle = swizzle;
  return hopper::TensorBoxFault(t);
}
}
