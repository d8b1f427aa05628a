// SPDX-License-Identifier: Apache-2.0
// The kernels of pair.h. Blocks of the narrow list come first: the device gives one to each SM before any gets a second,
// so that each SM has one of either kind (as long as the lists are planned for that).
//   test  pytest tests/cascade
#pragma once
#include "merge.cuh"
#include "narrow.cuh"
#include "pair.h"
#include "wide.cuh"

namespace flashinfer {
namespace attention {
namespace pair {

constexpr int THREADS = narrow::THREADS;

/// One list and what it works on.
template <typename Params>
struct Part {
  Params params;
  WorkList work;
  RowStrides<Params> strides;
};

template <typename Params, int TILE>
struct Shape {
  using Wide = wide::Traits<Params, TILE>;
  static constexpr int FIT = narrow::Shape<Params>::StagesOf(2), STAGES = FIT > 6 ? 6 : (FIT < 1 ? 1 : FIT);
  using Narrow = narrow::Traits<Params, STAGES>;
  static constexpr int SHARED_BYTES =
      Wide::SHARED_BYTES > Narrow::SHARED_BYTES ? Wide::SHARED_BYTES : Narrow::SHARED_BYTES;
  static constexpr bool FITS = FIT >= 2 && Wide::THREADS == THREADS && Wide::BLOCKS_PER_SM == 2;
};

template <typename Params, typename Variant, int TILE>
__global__ void __launch_bounds__(THREADS, 2)
    PairKernel(const __grid_constant__ Part<Params> wide, const __grid_constant__ Part<Params> narrow) {
  extern __shared__ __align__(128) char shared[];
  ptx::GridDependencyWait();
  ptx::LaunchDependents();  // the merge finds room as blocks leave, and waits for all of them
  const int block = int(blockIdx.x) - narrow.work.blocks;
  if (block < 0) {
    narrow::NarrowBlock<Params, Variant, Shape<Params, TILE>::STAGES, true, false>(narrow.params, narrow.work,
                                                                                   narrow.strides, shared, blockIdx.x);
  } else {
    wide::WideBlock<Params, Variant, TILE, true, false>(wide.params, wide.work, wide.strides, shared, block);
  }
}

/// The partial states of a row in one list.
struct Parts {
  int64_t first, step;  // rows of the partial buffers
  int count;
};

/// One warp for each row, with 16 parts on their way at a time: those of the wide list, then those of the narrow one.
template <typename Params, typename Variant, int TILE>
__global__ void __launch_bounds__(merge::THREADS, 4)
    PairMergeKernel(const __grid_constant__ Params p, const __grid_constant__ WorkList wide,
                    const __grid_constant__ WorkList narrow, const TokenPlace* places, int rows) {
  static_assert(Variant::use_softmax, "states are weighted by their scores");
  constexpr int D = Params::HEAD_DIM_VO, IN_FLIGHT = 16;
  static_assert(D <= 128, "a lane has 4 columns");
  const int lane = threadIdx.x % 32, index = int(blockIdx.x * merge::WARPS + threadIdx.x / 32);
  if (index >= rows) return;
  const int token = index / p.num_qo_heads, head = index - token * p.num_qo_heads;
  const int kv_head = p.group.Divide(head), of_group = head - kv_head * int(p.group.divisor);
  // Plans were there before the kernel started that is waited for below.
  const TokenPlace place = places[token];
  if (place.wide_tile < 0) return;
  const int wide_row = place.wide_row + of_group, narrow_row = place.narrow_row + of_group;
  const MergeItem a = wide.merges[place.wide_tile + wide_row / TILE];
  const MergeItem b = narrow.merges[(place.narrow_tile + narrow_row / NARROW_TILE) * p.num_kv_heads + kv_head];
  const Parts shared{int64_t(a.first_slot + kv_head) * TILE + wide_row % TILE, int64_t(a.step) * TILE, a.count};
  const Parts own{int64_t(b.first_slot) * NARROW_TILE + narrow_row % NARROW_TILE, int64_t(b.step) * NARROW_TILE,
                  b.count};
  const int count = shared.count + own.count;
  auto row_of = [&](int part) {
    return part < shared.count ? shared.first + part * shared.step : own.first + (part - shared.count) * own.step;
  };
  ptx::GridDependencyWait();
  float maximum = -math::inf, total = 0.f, sum[4] = {};
#pragma unroll 1
  for (int begin = 0; begin < count; begin += 32) {
    const int mine = begin + lane;
    const float* scores = mine < shared.count ? wide.partial_lse : narrow.partial_lse;
    const float lse = mine < count ? scores[row_of(mine)] : -math::inf;
    float weight = 0.f;
#pragma unroll 1
    for (int i = 0; i < min(32, count - begin); i += IN_FLIGHT) {
      float4 x[IN_FLIGHT];
#pragma unroll
      for (int j = 0; j < IN_FLIGHT; ++j) {
        const int part = begin + i + j;
        const float* from = part < shared.count ? wide.partial_o : narrow.partial_o;
        const bool is_read = part < count && 4 * lane < D;
        x[j] = is_read ? *reinterpret_cast<const float4*>(from + row_of(part) * D + 4 * lane) : float4{};
      }
      if (i == 0) {
        const float next = fmaxf(maximum, merge::WarpMax(lse)), base = next == -math::inf ? 0.f : next;
        const float scale = ptx::Exp2(maximum - base);
        weight = ptx::Exp2(lse - base);
        maximum = next;
        total = total * scale + GroupSum(weight, 32);
#pragma unroll
        for (int k = 0; k < 4; ++k) sum[k] *= scale;
      }
#pragma unroll
      for (int j = 0; j < IN_FLIGHT; ++j) {
        const float w = __shfl_sync(0xffffffffu, weight, i + j);
        sum[0] += w * x[j].x;
        sum[1] += w * x[j].y;
        sum[2] += w * x[j].z;
        sum[3] += w * x[j].w;
      }
    }
  }
  const float factor = total > 0.f ? ptx::Reciprocal(total) * p.out_scale : 0.f;
  if (4 * lane < D) {
    RoundTo<typename Params::DTypeO, 4>({sum[0] * factor, sum[1] * factor, sum[2] * factor, sum[3] * factor})
        .Store(p.o + token * p.o_stride_n + head * p.o_stride_h + 4 * lane);
  }
  if (lane == 0 && p.lse != nullptr) {
    p.lse[index] = (total > 0.f ? maximum + __log2f(total) : -math::inf) * p.lse_scale;
  }
}

}  // namespace pair

template <typename Params, int TILE>
int PairBlocks() {
  using Shape = pair::Shape<Params, TILE>;
  if constexpr (Shape::FITS) {
    return ResidentBlocksOf<pair::PairKernel<Params, Variant<false>, TILE>, pair::THREADS, Shape::SHARED_BYTES>() / 2;
  } else {
    return 0;
  }
}

template <typename Params, int TILE>
Status LaunchPair(const Pair<Params>& both, bool enable_pdl, Stream stream) {
  using Shape = pair::Shape<Params, TILE>;
  if constexpr (!Shape::FITS) {
    return cudaErrorNotSupported;
  } else {
    if (both.tokens == 0) return cudaSuccess;
    if (!RowsAligned(both.narrow_params)) return cudaErrorMisalignedAddress;
    const pair::Part<Params> wide{both.wide_params, both.wide, RowStrides<Params>(both.wide_params)};
    const pair::Part<Params> narrow{both.narrow_params, both.narrow, RowStrides<Params>(both.narrow_params)};
    const Status status =
        LaunchBlocks<pair::PairKernel<Params, Variant<false>, TILE>, pair::THREADS, Shape::SHARED_BYTES>(
            both.narrow.blocks + both.wide.blocks, enable_pdl, stream, wide, narrow);
    if (status != cudaSuccess) return status;
    const int rows = both.tokens * both.narrow_params.num_qo_heads;
    return Launch(pair::PairMergeKernel<Params, Variant<false>, TILE>, dim3(DivideUp(rows, merge::WARPS)),
                  dim3(merge::THREADS), enable_pdl, stream, both.narrow_params, both.wide, both.narrow, both.places,
                  rows);
  }
}

}  // namespace attention
}  // namespace flashinfer
