// SPDX-License-Identifier: Apache-2.0
// All-reduce with what follows it in a layer, for every rank bitwise the same result:
//   S = round_T(sum of the inputs in rank order, fp32)                                     -> output
//   R = round_T(S + residual_in)                                                           -> residual_out
//   N = round_T(R * rsqrt(mean(R^2) + eps) * (weight_bias + gamma))                        -> norm_out
//   Q = e4m3(N * (1 / scale)), or per row scale = max(amax(N), 2^-9) / 448, Q = e4m3(N / scale)   -> quant_out
// Outputs whose pointer is null are not written. An input of -0.0 counts as +0.0.
#pragma once
#include <cstdint>

#include "../../backend.h"
#include "../peer_table.h"

namespace flashinfer {
namespace comm {

/// Layout of the memory of a rank: a head, then parts (generations on CUDA), each with a slot per rank that pushes. On
/// the CPU a rank writes to its own memory only, and a part is one slot.
constexpr int64_t HEAD_BYTES = 512;

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

  // CPU
  bool resume;      ///< go on waiting in the call that has begun
  int64_t wait_us;  ///< return after this time, to be resumed

  // CUDA
  int32_t max_blocks;
  uint64_t timeout_ns;  ///< 0: wait forever
  uint32_t* record;     ///< host memory: what the watchdog found
  bool enable_pdl, trigger_early;
};

/// Entry of the CUDA kernels (one_shot.cuh). That of the CPU is AllReduceOnHost (one_shot_cpu.h).
template <typename T>
Status AllReduce(const AllReduceParams<T>& p, Stream stream);

constexpr float E4M3_LARGEST = 448.f;
constexpr float SMALLEST_AMAX = 1.f / 512;  // a row of zeros gets the scale 2^-9 / 448

}  // namespace comm
}  // namespace flashinfer
