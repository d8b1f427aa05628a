// SPDX-License-Identifier: Apache-2.0
// MLA decode on SM90: results of a tile. Whole tiles are rounded and written to the output; parts of a split tile are
// written as fp32, with their log-sum-exp, for the merge.
#pragma once
#include "../../ptx/cp_async.cuh"
#include "../../ptx/stmatrix.cuh"
#include "softmax.cuh"

namespace flashinfer {
namespace attention {
namespace mla {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/// Add the row sums of both warpgroups, and replace them by the log-sum-exps. Returns the factors that normalise the
/// output. Called by both warpgroups. `is_odd`: the parity of the item.
template <int GROUP>
__device__ __forceinline__ RowPair Normalise(const Shared& shared, const RowPair& maximum, const RowPair& sum,
                                             uint32_t is_odd, RowPair& lse) {
  RowPair x = sum, factor;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    x[h] += __shfl_xor_sync(~0u, x[h], 1);
    x[h] += __shfl_xor_sync(~0u, x[h], 2);
  }
  WriteRows(shared.Sums(GROUP, is_odd), x);
  ptx::BarrierSyncApart(int(NamedBarrier::kSums), 2 * WARPGROUP);
  const RowPair first = ReadRows(shared.Sums(0, is_odd)), second = ReadRows(shared.Sums(1, is_odd));
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float total = first[h] + second[h];
    factor[h] = total > 0.f ? ptx::Reciprocal(total) : 0.f;
    lse[h] = total > 0.f ? maximum[h] + __log2f(total) : -math::inf;
  }
  return factor;
}

/// Write part of a split tile to its slot.
template <int GROUP>
__device__ __forceinline__ void StorePart(const WorkList& work, int slot, const float (&o)[HALF / 2],
                                          const RowPair& factor, const RowPair& lse) {
  const int row = ThreadRow(), quad = threadIdx.x % 4;
  float* const to = work.partial_o + (int64_t(slot) * ROWS + row) * LATENT + GROUP * HALF + 2 * quad;
#pragma unroll
  for (int i = 0; i < HALF / 4; ++i) {
    const int h = i % 2;
    *reinterpret_cast<float2*>(to + h * 8 * LATENT + i / 2 * 8) = {o[2 * i] * factor[h], o[2 * i + 1] * factor[h]};
  }
  if (GROUP == 0 && quad == 0) {
    work.partial_lse[slot * ROWS + row] = lse[0];
    work.partial_lse[slot * ROWS + row + 8] = lse[1];
  }
}

/// Write the rows of a tile to the output. Each warp stages 16 rows by 32 columns, so that four lanes write 64 bytes of
/// a row.
template <int GROUP, typename Params>
__device__ __forceinline__ void StoreRows(const Params& p, const Shared& shared, const WorkItem& item,
                                          const float (&o)[HALF / 2], const RowPair& factor, const RowPair& lse) {
  using T = typename Params::DTypeO;
  const int lane = threadIdx.x % 32, chunk = lane % 4, group = p.group.divisor;
  const uint32_t staging = shared.Staging(int(threadIdx.x) / 32 - WARPGROUP / 32);
  auto place = [&](int row, int c) { return staging + row * 64 + (c ^ (row / 2 % 4)) * 16; };
  T* to[2];
  bool exists[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = item.row_begin + ThreadRow() + 8 * h, token = p.group.Divide(row), head = row - token * group;
    const int64_t n = item.qo_begin + token;
    exists[h] = token < item.qo_len;
    to[h] = p.o + n * p.o_stride_n + head * p.o_stride_h + GROUP * HALF + chunk * 8;
    if (GROUP == 0 && chunk == 0 && exists[h] && p.lse != nullptr)
      p.lse[n * p.num_qo_heads + head] = lse[h] * p.lse_scale;
  }
#pragma unroll
  for (int part = 0; part < HALF / 32; ++part) {
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = part * 16 + j * 4 + 2 * i;
        words[i] = Pack<T>(o[at] * factor[i % 2], o[at + 1] * factor[i % 2]);
      }
      ptx::StoreMatrix4(place(lane % 16, j + lane / 16), words[0], words[1], words[2], words[3]);
    }
    __syncwarp();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float4 x = ptx::LoadShared16(place(lane / 4 + 8 * h, chunk));
      if (exists[h]) *reinterpret_cast<float4*>(to[h] + part * 32) = x;
    }
    __syncwarp();
  }
}

#endif

}  // namespace mla
}  // namespace attention
}  // namespace flashinfer
