// SPDX-License-Identifier: Apache-2.0
// Rows of a block of kernel.cuh and of its forms for one token.
#pragma once

namespace flashinfer {
namespace fused_moe {
namespace mono {

/// Give number `block` of the grid's blocks its share of rows; the first blocks have a row more.
__device__ __forceinline__ void ShareRows(int rows, int block, int& begin, int& end) {
  const int blocks = int(gridDim.x), each = rows / blocks, more = rows % blocks;
  begin = block * each + min(block, more), end = begin + each + (block < more ? 1 : 0);
}

}  // namespace mono
}  // namespace fused_moe
}  // namespace flashinfer
