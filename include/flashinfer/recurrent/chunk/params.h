// SPDX-License-Identifier: Apache-2.0
// Arguments of the chunked gated delta rule, for launchers and for the kernels of all backends.
//
// A head of the output is one of `num_heads` = max(query heads, value heads); it reads query head h / (num_heads /
// num_q_heads), and key and value heads likewise. A state is [slot, head, V, K] of DIM x DIM numbers of any float type.
#pragma once
#include <cstdint>

#include "../../backend.h"
#include "../../host_device.h"

namespace flashinfer {
namespace recurrent {

constexpr int DIM = 128;   // columns of keys and of values
constexpr int CHUNK = 64;  // tokens that are computed together

enum class StateType : int { kF32, kBf16, kF16, kE4M3, kE5M2 };

/// States of any strides, in elements; `data` is null if there are none.
struct States {
  void* data = nullptr;
  StateType type = StateType::kF32;
  int64_t slot = 0, head = 0, v = 0, k = 1;
};

/// List of int32 or int64 numbers; an empty list counts up from 0.
struct Integers {
  const void* data = nullptr;
  bool is_wide = false;

  FLASHINFER_HD int64_t operator[](int64_t i) const {
    if (data == nullptr) return i;
    return is_wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

/// Tokens of a request.
struct Request {
  int64_t begin;
  int64_t length;
};

template <typename T>
struct DeltaParams {
  const T *q = nullptr, *k = nullptr, *v = nullptr;  // [token, head, DIM], contiguous
  T* o = nullptr;                                    // [token, num_heads, DIM]
  const float* g = nullptr;                          // [token, num_heads], decay; null: 1
  const float* beta = nullptr;                       // [token, num_heads]; null: 1
  int num_q_heads = 0, num_k_heads = 0, num_v_heads = 0, num_heads = 0;
  float scale = 1.f;
  int64_t tokens = 0;
  int requests = 0;
  Integers offsets;  // [requests + 1]: first token of each request; none: requests of `each` tokens
  int64_t each = 0;
  States initial;             // none: zeros
  States final;               // none: not wanted
  States checkpoints;         // none: not wanted
  Integers slots;             // slot of each request in `initial` and `final`
  Integers rows;              // first row of each request in `checkpoints`
  int64_t interval = 0;       // tokens between checkpoints, a multiple of CHUNK
  Integers kept_slots;        // slots of KDA's checkpoints by their rows; none: the rows are slots
  bool keeps_starts = false;  // KDA's checkpoints are states before every `interval` tokens, not after them
  int64_t segment = 0;  // tokens of the parts in which requests are computed side by side, a multiple of CHUNK; 0: none
  float* parts = nullptr;  // states of these parts (chunk_sm90/split.cuh)
  char* blocks = nullptr;  // what the first kernel prepares for the second (chunk/blocks.h); not on the CPU
  int num_sms = 0;         // multiprocessors of the device
  bool enable_pdl = false;

  /// Return the tokens of request `n`. Offsets that fall or leave the tensors give fewer tokens: no access is outside.
  FLASHINFER_HD Request RequestOf(int n) const {
    if (offsets.data == nullptr) return {n * each, each};
    int64_t begin = offsets[n], end = offsets[n + 1];
    begin = begin < 0 ? 0 : begin > tokens ? tokens : begin;
    end = end < begin ? begin : end > tokens ? tokens : end;
    return {begin, end - begin};
  }
};

/// Return the slot of the first chunk of request `n`, which begins at token `begin`. Slots of different chunks differ, and
/// nobody has to add up the chunks of the requests before. `size`: tokens of a chunk, or of another piece of a request.
FLASHINFER_HD constexpr int64_t FirstChunkSlot(int64_t n, int64_t begin, int64_t size = CHUNK) {
  const int64_t whole = n < begin ? n : begin;
  return whole + (begin - whole) / size;
}

/// Compute outputs, final states and checkpoints of all requests; there is at least one token. Defined by the kernels of
/// each module: chunk_sm90/launch.cuh, chunk/launch.cuh, cpu/gdn_prefill.h.
template <typename T>
Status GdnPrefill(const DeltaParams<T>& p, Stream stream);

/// Divide rows of DIM numbers by their Euclidean norm: x * rsqrt(sum of x^2 + 1e-6), rounded.
template <typename T>
Status NormalizeRows(const T* in, T* out, int64_t rows, bool enable_pdl, Stream stream);

}  // namespace recurrent
}  // namespace flashinfer
