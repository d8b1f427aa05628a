// SPDX-License-Identifier: Apache-2.0
// All-reduce with what follows it in a layer, for every rank bitwise the same result:
//   S = round_T(sum of the inputs in rank order, fp32)                                     -> output
//   R = round_T(S + residual_in)                                                           -> residual_out
//   N = round_T(R * rsqrt(mean(R^2) + eps) * (weight_bias + gamma))                        -> norm_out
//   Q = e4m3(N * (1 / scale)), or per row scale = max(amax(N), 2^-9) / 448, Q = e4m3(N / scale)   -> quant_out
//   or per 16 columns s = e4m3(g * amax / 6), Q = e2m1(N * (g / s)) with a global factor g, two codes to a byte  -> fp4_out
//   or per group of columns 2^e = 2^ceil(log2(max(amax / 448, 1e-10))), Q = e4m3(N / 2^e), four bytes e + 127 to a word
// The inputs of patterns 6 and 7 are sums themselves, rounded once (RowSource).
// Outputs whose pointer is null are not written. An input of -0.0 counts as +0.0.
#pragma once
#include <cstdint>

#include "../../backend.h"
#include "../../mx_quantization.h"
#include "../peer_table.h"

namespace flashinfer {
namespace comm {

/// Layout of the memory of a rank: a head, then parts (generations on CUDA), each with a slot per rank that pushes. On
/// the CPU a rank writes to its own memory only, and a part is one slot.
constexpr int64_t HEAD_BYTES = 512;

/// Rows that are pushed: sum over k < count of weight(t, k) * row(t, k), times `factor`, + add[t].
///   index null   row(t, k) = input[k][t], weight(t, k) = weights[k][t]                   results of experts, by expert
///   else         row(t, k) = input[index[t][k]], nothing below 0; weights [t][k]         results in order of expert
template <typename T>
struct RowSource {
  int32_t count;  ///< 0: rows are `input`
  const int32_t* index;
  const float* weights;  ///< null: `typed_weights`; both null: 1
  const T* typed_weights;
  const T* add;  ///< null: nothing
  float factor;
};

template <typename T>
struct AllReduceParams {
  PeerTable peers;
  int64_t slot_bytes;  ///< a multiple of 16
  int64_t tokens, hidden;
  int32_t pattern;
  const T* input;
  T* output;
  const T* residual_in;
  T* residual_out;
  const T* gamma;
  T* norm_out;
  float8_e4m3_t* quant_out;
  const float* scale;  ///< one element; null: `scale_value`
  float* scale_out;    ///< per row; its presence makes the scale dynamic
  float scale_value, eps, weight_bias;
  RowSource<T> source;
  uint8_t* packed_out;  ///< bytes of the exponents: group g of row t at 4 * (t + g / 4 * packed_stride) + g % 4
  int64_t packed_stride;
  int32_t group;  ///< columns per exponent

  // CPU
  bool resume;      ///< go on waiting in the call that has begun
  int64_t wait_us;  ///< return after this time, to be resumed

  // CUDA
  int32_t max_blocks;
  uint64_t timeout_ns;  ///< 0: wait forever
  uint32_t* record;     ///< host memory: what the watchdog found
  bool enable_pdl, trigger_early, is_two_shot;

  uint8_t* fp4_out;     ///< tokens x hidden / 2, the even column in the low nibble; null: no FP4
  uint8_t* fp4_scales;  ///< e4m3 in `fp4_grid`; g is *scale or scale_value
  ScaleGrid fp4_grid;   ///< rows of padding keep what they have, columns of padding get 0
};

/// Comparison of the calls of all ranks on CUDA (check.cuh).
struct CheckParams {
  PeerTable peers;
  uint32_t digest;      ///< shape, type and pattern in 32 bits
  uint64_t timeout_ns;  ///< 0: wait forever
  uint32_t* record;     ///< host memory: 1 late or 2 different, the rank, the number of the check
};
Status Check(const CheckParams& p, Stream stream);

/// Entry of the CUDA kernels (one_shot.cuh). That of the CPU is AllReduceOnHost (one_shot_cpu.h).
template <typename T>
Status AllReduce(const AllReduceParams<T>& p, Stream stream);

constexpr float E4M3_LARGEST = 448.f, E2M1_LARGEST = 6.f;
constexpr int FP4_BLOCK = 16;               // columns that share a scale
constexpr float SMALLEST_SCALE = 1e-10f;    // the least scale of a group
constexpr float SMALLEST_AMAX = 1.f / 512;  // a row of zeros gets the scale 2^-9 / 448

}  // namespace comm
}  // namespace flashinfer
