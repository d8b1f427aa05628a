// SPDX-License-Identifier: Apache-2.0
// Manifold hyper-connections with four residual streams: parameters and entries shared by both backends.
//   post   out[j] = x * post[j] + sum_i comb[i][j] * residual[i]
//   pre    m = dot_mix / sqrt(mean of squares + rms_eps), split into 4, 4 and 16 numbers, each scaled and shifted;
//          pre = sigmoid + pre_eps, post = sigmoid * post_mult, comb = Sinkhorn normalisation of a softmax over rows;
//          layer_input = sum_j pre[j] * residual[j]
// Defined in mhc.cuh (CUDA) and mhc_cpu.h (CPU). Arithmetic is fp32; each bf16 result is rounded once.
//   test  pytest tests/mhc      bench  python benchmarks/bench_mhc.py
#pragma once
#include "backend.h"
#include "host_device.h"

namespace flashinfer {

constexpr int MHC_STREAMS = 4;                                                  // residual streams
constexpr int MHC_MIX = 2 * MHC_STREAMS + MHC_STREAMS * MHC_STREAMS;            // numbers of dot_mix of a token
constexpr int MHC_PRE = 0, MHC_POST = MHC_STREAMS, MHC_COMB = 2 * MHC_STREAMS;  // where the parts of dot_mix begin

struct MhcPostParams {
  const bfloat16_t* x;         ///< (tokens, hidden)
  const bfloat16_t* residual;  ///< (tokens, 4, hidden)
  const float* post;           ///< (tokens, 4)
  const float* comb;           ///< (tokens, 4, 4)
  bfloat16_t* out;             ///< (tokens, 4, hidden)
  int64_t tokens, hidden;
};

struct MhcPreParams {
  const float* dot_mix;        ///< (splits, tokens, 24); splits are added
  const float* sqrsum;         ///< (splits, tokens); null: the sum of squares of the residual row
  const bfloat16_t* residual;  ///< (tokens, 4, hidden)
  const float* scale;          ///< (3)
  const float* base;           ///< (24)
  float* post;                 ///< (tokens, 4)
  float* comb;                 ///< (tokens, 4, 4)
  bfloat16_t* layer_input;     ///< (tokens, hidden)
  int64_t tokens, hidden;
  int splits, repeat;
  int block_size;  ///< CUDA: threads per block, 0 for the default
  float k, rms_eps, pre_eps, sinkhorn_eps, post_mult;
};

Status MhcPost(const MhcPostParams& params, Stream stream);
Status MhcPre(const MhcPreParams& params, Stream stream);

namespace mhc {

/// Load numbers FIRST .. FIRST + COUNT - 1 of dot_mix of a token, the sums over the splits. All of a split are loaded together.
template <int FIRST, int COUNT>
FLASHINFER_HD void LoadMix(const MhcPreParams& p, int64_t token, float (&m)[COUNT]) {
  for (int i = 0; i < COUNT; ++i) m[i] = p.dot_mix[token * MHC_MIX + FIRST + i];
  for (int s = 1; s < p.splits; ++s) {
    const float* from = p.dot_mix + (s * p.tokens + token) * MHC_MIX + FIRST;
    float more[COUNT];
    for (int i = 0; i < COUNT; ++i) more[i] = from[i];
    for (int i = 0; i < COUNT; ++i) m[i] += more[i];
  }
}

/// Return the sum of squares of a token's residual row, the sum over the splits.
FLASHINFER_HD float SquareSum(const MhcPreParams& p, int64_t token) {
  float sum = 0.f;
  for (int s = 0; s < p.splits; ++s) sum += p.sqrsum[s * p.tokens + token];
  return sum;
}

/// Normalise the 4 x 4 matrix whose logits are in `c`: a softmax over rows, then columns and rows in turn, `repeat` times.
/// `Exp` and `Reciprocal` are those of the device.
template <typename Exp, typename Reciprocal>
FLASHINFER_HD void Sinkhorn(float (&c)[MHC_STREAMS][MHC_STREAMS], float eps, int repeat, Exp exp,
                            Reciprocal reciprocal) {
  constexpr int N = MHC_STREAMS;
  for (int i = 0; i < N; ++i) {
    float most = c[i][0];
    for (int j = 1; j < N; ++j) most = c[i][j] > most ? c[i][j] : most;
    float sum = 0.f;
    for (int j = 0; j < N; ++j) sum += c[i][j] = exp(c[i][j] - most);
    const float factor = reciprocal(sum);
    for (int j = 0; j < N; ++j) c[i][j] = c[i][j] * factor + eps;
  }
  const auto normalise_columns = [&] {
    for (int j = 0; j < N; ++j) {
      const float factor = reciprocal(((c[0][j] + c[1][j]) + (c[2][j] + c[3][j])) + eps);
      for (int i = 0; i < N; ++i) c[i][j] *= factor;
    }
  };
  normalise_columns();
  for (int round = 1; round < repeat; ++round) {
    for (int i = 0; i < N; ++i) {
      const float factor = reciprocal(((c[i][0] + c[i][1]) + (c[i][2] + c[i][3])) + eps);
      for (int j = 0; j < N; ++j) c[i][j] *= factor;
    }
    normalise_columns();
  }
}

/// Compute post and comb of one token, whose mean of squares is `mean`.
template <typename Exp, typename Reciprocal, typename Rsqrt>
FLASHINFER_HD void PostAndComb(const MhcPreParams& p, int64_t token, float mean, Exp exp, Reciprocal reciprocal,
                               Rsqrt rsqrt) {
  constexpr int N = MHC_STREAMS;
  float m[MHC_MIX - MHC_POST], base[MHC_MIX - MHC_POST], c[N][N];
  LoadMix<MHC_POST>(p, token, m);
  for (int i = 0; i < MHC_MIX - MHC_POST; ++i) base[i] = p.base[MHC_POST + i];
  const float r = rsqrt(mean + p.rms_eps), post_scale = p.scale[1] * r, comb_scale = p.scale[2] * r;
  for (int j = 0; j < N; ++j) {
    p.post[token * N + j] = reciprocal(1.f + exp(-(m[j] * post_scale + base[j]))) * p.post_mult;
  }
  for (int i = 0; i < N; ++i) {
    for (int j = 0; j < N; ++j) c[i][j] = m[N + i * N + j] * comb_scale + base[N + i * N + j];
  }
  Sinkhorn(c, p.sinkhorn_eps, p.repeat, exp, reciprocal);
  for (int i = 0; i < N; ++i) {
    for (int j = 0; j < N; ++j) p.comb[(token * N + i) * N + j] = c[i][j];
  }
}

}  // namespace mhc
}  // namespace flashinfer
