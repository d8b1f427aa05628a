// SPDX-License-Identifier: Apache-2.0
// End of an item of the Hopper prefill kernel: outputs are normalised and written, or stored as a partial state. Each
// warp stages 16 rows by 64 columns in its own 2 KB of shared memory and writes lines of 128 bytes: no barrier, and rows
// behind the end of a request are left out one by one.
#pragma once
#include "../../ptx/stmatrix.cuh"
#include "softmax.cuh"

namespace flashinfer {
namespace attention {
namespace prefill_sm90 {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

template <typename Tr, typename Rows, typename Variant>
struct Epilogue {
  using Params = typename Tr::Params;
  using Output = float[Tr::D_VO / 2];
  const Params& p;
  const WorkList& work;
  const WorkItem& item;
  Rows& rows;
  const uint32_t staging;  // 16 rows of 128 bytes of this warp

  __device__ __forceinline__ void Write(Output& o) {
    rows.SumLanes();
    Normalise(o);
    if (item.slot >= 0) {
      WritePartial(o);
    } else {
      WriteLse();
#pragma unroll
      for (int slab = 0; slab < Tr::VO_SLABS; ++slab) {
        Stage(o, slab);
        __syncwarp();
        WriteLines(slab);
        __syncwarp();
      }
    }
  }

 private:
  __device__ __forceinline__ float Top(int i) const { return Variant::use_softmax ? rows.m[i] : 0.f; }
  __device__ __forceinline__ float Total(int i) const { return Variant::use_softmax ? rows.d[i] : 1.f; }
  __device__ __forceinline__ float Lse(int i) const { return Total(i) > 0.f ? Top(i) + __log2f(Total(i)) : -math::inf; }

  /// Call the output hook: once a row where it is a factor, otherwise for each element.
  __device__ __forceinline__ void Normalise(Output& o) {
    const float out_scale =
        (item.slot >= 0 ? 1.f : p.out_scale) * rows.ValueScale();  // the merge scales partial states
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float top = Top(i), total = Total(i);
      if constexpr (HOOKS_ACCEPT_PADDING<Variant>) {
        const float factor = rows.variant.OutputTransform(p, out_scale, item.request, 0, 0, top, total, 1.f);
#pragma unroll
        for (int n = 0; n < Tr::D_VO / 8; ++n) {
          o[4 * n + 2 * i] *= factor;
          o[4 * n + 2 * i + 1] *= factor;
        }
      } else {
        if (!rows.Exists(rows.row[i])) continue;
        const int token = rows.TokenOf(rows.row[i]), head = rows.HeadOf(rows.row[i]);
#pragma unroll
        for (int n = 0; n < Tr::D_VO / 8; ++n) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            float& x = o[4 * n + 2 * i + j];
            x = rows.variant.OutputTransform(p, x, item.request, token, head, top, total, 1.f) * out_scale;
          }
        }
      }
    }
  }

  __device__ __forceinline__ void WritePartial(const Output& o) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!rows.Exists(rows.row[i])) continue;
      const int64_t slot_row = int64_t(item.slot) * Tr::TILE + rows.row[i] - item.row_begin;
      if (threadIdx.x % 4 == 0) work.partial_lse[slot_row] = Lse(i);
      if constexpr (Tr::TRANSPOSES) {
        float* const row = work.partial_o + slot_row * Tr::D_VO + 4 * (threadIdx.x % 4);
#pragma unroll
        for (int n = 0; n < Tr::D_VO / 16; ++n) {
          const float* x = o + 8 * n + 2 * i;
          *reinterpret_cast<float2*>(row + 16 * n) = make_float2(x[0], x[4]);
          *reinterpret_cast<float2*>(row + 16 * n + 2) = make_float2(x[1], x[5]);
        }
        continue;
      }
      float* to = work.partial_o + slot_row * Tr::D_VO + 2 * (threadIdx.x % 4);
#pragma unroll
      for (int n = 0; n < Tr::D_VO / 8; ++n) {
        *reinterpret_cast<float2*>(to + 8 * n) = make_float2(o[4 * n + 2 * i], o[4 * n + 2 * i + 1]);
      }
    }
  }

  __device__ __forceinline__ void WriteLse() const {
    if (p.lse == nullptr || threadIdx.x % 4 != 0) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!rows.Exists(rows.row[i])) continue;
      p.lse[(int64_t(item.qo_begin) + rows.TokenOf(rows.row[i])) * p.num_qo_heads + rows.HeadOf(rows.row[i])] =
          Lse(i) * p.lse_scale;
    }
  }

  /// Columns of a slab, in blocks of 16 (the last slab may be narrower).
  static __device__ __forceinline__ constexpr int Blocks(int slab) {
    return (Tr::D_VO - 64 * slab < 64 ? Tr::D_VO - 64 * slab : 64) / 16;
  }

  __device__ __forceinline__ void Stage(const Output& o, int slab) const {
    using To = typename Params::DTypeO;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < Blocks(slab); ++n) {
      const float* x = o + 32 * slab + 8 * n;
      if constexpr (Tr::TRANSPOSES) {
        StageOrdered(x, 32 * n);
        continue;
      }
      ptx::StoreMatrix4(staging + hopper::Swizzle128(lane % 16 * hopper::SLAB_ROW_BYTES + (2 * n + lane / 16) * 16),
                        Pack<To>(x[0], x[1]), Pack<To>(x[2], x[3]), Pack<To>(x[4], x[5]), Pack<To>(x[6], x[7]));
    }
  }

  /// Stage 16 columns whose even ones precede the odd ones in the registers: lane l has columns 4 (l % 4) + {0 .. 3}.
  __device__ __forceinline__ void StageOrdered(const float* x, int byte) const {
    using To = typename Params::DTypeO;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      ptx::StoreShared8(staging + hopper::Swizzle128((lane / 4 + 8 * i) * hopper::SLAB_ROW_BYTES + byte + lane % 4 * 8),
                        __uint_as_float(Pack<To>(x[2 * i], x[2 * i + 4])),
                        __uint_as_float(Pack<To>(x[2 * i + 1], x[2 * i + 5])));
    }
  }

  __device__ __forceinline__ void WriteLines(int slab) const {
    const int lane = threadIdx.x % 32, chunk = lane % 8, first = rows.row[0] - lane / 4;
    if (chunk >= 2 * Blocks(slab)) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = 4 * i + lane / 8, row = first + at;
      const float4 x = ptx::LoadShared16(staging + hopper::Swizzle128(at * hopper::SLAB_ROW_BYTES + chunk * 16));
      if (!rows.Exists(row)) continue;
      typename Params::DTypeO* to = p.o + (int64_t(item.qo_begin) + rows.TokenOf(row)) * p.o_stride_n +
                                    rows.HeadOf(row) * p.o_stride_h + 64 * slab + 8 * chunk;
      *reinterpret_cast<float4*>(to) = x;
    }
  }
};

#endif

}  // namespace prefill_sm90
}  // namespace attention
}  // namespace flashinfer
