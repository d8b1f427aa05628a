// SPDX-License-Identifier: Apache-2.0
// Helpers of the rotary kernels: the position of a token, its row of the table, the angle of a pair (formulas: rope.h).
#pragma once
#include "ptx/prefetch.cuh"
#include "rope.h"
#include "utils.cuh"
#include "vec_dtypes.cuh"

namespace flashinfer {
namespace rope {

constexpr uint32_t TOKENS_AHEAD = 1024;  // prefetch distance in tokens: more than run at once
constexpr int64_t MAX_GRID_Y = 65535;

__device__ __forceinline__ int64_t IndexAt(const void* values, int64_t i, bool wide) {
  return wide ? static_cast<const int64_t*>(values)[i] : static_cast<const int32_t*>(values)[i];
}

/// Find the position of a token in its request. Returns false if no request holds the token. A warp searches together,
/// 32 ways per step.
__device__ __forceinline__ bool RaggedPosition(const RopePositions& p, int64_t token, int lane, int64_t& position) {
  if (token < IndexAt(p.indptr, 0, p.wide) || token >= IndexAt(p.indptr, p.requests, p.wide)) return false;
  int64_t begin = 0, count = p.requests;  // the last of these requests that starts at the token or before it
  while (count > 1) {
    const int64_t step = (count + 31) / 32;
    const bool starts_before = lane * step < count && IndexAt(p.indptr, begin + lane * step, p.wide) <= token;
    const int last = 31 - __clz(__ballot_sync(0xffffffffu, starts_before));
    begin += last * step;
    count = min(step, count - last * step);
  }
  position = IndexAt(p.offsets, begin, p.wide) + token - IndexAt(p.indptr, begin, p.wide);
  return true;
}

/// Return the row of the cos/sin table. A kernel cannot throw for an invalid position, so the position is clamped.
__device__ __forceinline__ const float* CacheRow(const RopeAngles& a, int64_t position) {
  return a.cache + max(int64_t(0), min(position, a.cache_rows - 1)) * a.cache_stride;
}

/// Prefetch the table row of a token into L2. The first threads of a block prefetch one line each.
__device__ __forceinline__ void PrefetchRow(const RopeAngles& a, const RopePositions& p, uint32_t token, int columns,
                                            int thread) {
  constexpr int LINE = 32;  // floats
  if (thread * LINE >= columns) return;
  const float* row = CacheRow(a, IndexAt(p.pos_ids, token, p.wide));
  ptx::PrefetchL2(row + thread * LINE);
}

/// Return the prefetch distance in tokens: 5 MB; 0 (no prefetch) in batches of less than 32 MB, whose loads are all in
/// flight at once.
inline uint32_t TokensAhead(int64_t tokens, int64_t token_bytes) {
  return tokens * token_bytes < 32 << 20 ? 0 : uint32_t(CeilDiv(5 << 20, token_bytes));
}

/// Compute the cosine and sine of pair j at a position, without a table. In fp64 (some 40 instructions, hidden by
/// loads): the angle is reduced to one turn, so large positions need no slow path, and the error does not grow with the
/// position.
__device__ __forceinline__ void CosSin(const RopeAngles& a, int64_t position, int j, float& cosine, float& sine) {
  constexpr double INVERSE_TURN = 0.15915494309189535;
  const double frequency = exp2(-j * a.log2_step);
  const double smooth = fmin(fmax(a.ramp * frequency + a.shift, 0.), 1.);
  const double turns = position * (frequency * ((1. - smooth) * a.inv_scale + smooth) * INVERSE_TURN);
  sincospif(2.f * float(turns - rint(turns)), &sine, &cosine);
}

__device__ __forceinline__ void Rotate(float& first, float& second, float cosine, float sine) {
  const float x = first;
  first = x * cosine - second * sine;
  second = second * cosine + x * sine;
}

/// Rotate two vectors. The table holds the cosines of the token and, at offset `sines`, the sines.
template <int VEC>
__device__ __forceinline__ void RotateVectors(float (&x)[VEC], float (&y)[VEC], const float* table, int sines, int c0,
                                              int c1, bool interleave) {
  constexpr int HALF_VEC = VEC / 2;
  using V = Vec<float, HALF_VEC>;
  const int j0 = interleave ? c0 / 2 : c0, j1 = interleave ? c1 / 2 : c0 + HALF_VEC;
  const V cosine[2] = {V::Load(table + j0), V::Load(table + j1)};
  const V sine[2] = {V::Load(table + sines + j0), V::Load(table + sines + j1)};
  if (interleave) {
#pragma unroll
    for (int i = 0; i < HALF_VEC; ++i) {
      Rotate(x[2 * i], x[2 * i + 1], cosine[0][i], sine[0][i]);
      Rotate(y[2 * i], y[2 * i + 1], cosine[1][i], sine[1][i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      Rotate(x[i], y[i], cosine[i / HALF_VEC][i % HALF_VEC], sine[i / HALF_VEC][i % HALF_VEC]);
    }
  }
}

}  // namespace rope
}  // namespace flashinfer
