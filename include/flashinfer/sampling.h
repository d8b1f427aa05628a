// SPDX-License-Identifier: Apache-2.0
// Sampling from rows of probabilities or logits: parameters and entries, shared by both backends.
//   A draw takes 64 random bits r(seed, offset, output row) and the masses m of the columns a filter keeps, in the
//   order of the columns: the first column whose running sum reaches 1 + floor(r * sum(m) / 2^64). No filter: of the
//   mass of 1 instead of sum(m), and the last positive column where the sum stays below. Filters keep the columns at
//   or above a threshold, found exactly (no rejection, no loop that depends on the draw):
//     top-k   fewer than k columns are above it         top-p   the columns above it have less than top_p
//     min-p   it is min_p times the largest
// Arithmetic: sampling/math.h. Defined in sampling/*.cuh (CUDA; sampling.cuh lists them) and sampling_cpu.h (CPU).
//   test  pytest tests/sampling      bench  python benchmarks/bench_sampling.py
#pragma once
#include <cstdint>

#include "backend.h"
#include "philox.h"

namespace flashinfer {

/// One value for all, or one for each row.
template <typename T>
struct PerRow {
  const T* values;  ///< null: `value` for all
  T value;
  int64_t count;  ///< of `values`: later rows take the last
};

struct RandomStream {
  PerRow<uint64_t> seed, offset;  ///< by output row; a `count` of 1 serves all
};

enum class Filter { kNone, kMinP, kBoth, kTopKFirst };  ///< kBoth: top-k and top-p of the whole row

/// What a filter keeps. top_k of at most 0 is 1, of the vocabulary or more is no limit; top_p from 1 on is no limit.
struct FilterParams {
  Filter filter;
  PerRow<int32_t> top_k;
  PerRow<float> top_p;   ///< min_p for kMinP
  bool top_k_by_output;  ///< which row a parameter belongs to: that of the output, or that of the input
  bool top_p_by_output;
};

struct SampleParams {
  const float* input;  ///< (rows, vocab)
  int64_t row_stride;
  int64_t rows, vocab;  ///< vocab: 1 to MAX_VOCAB
  bool is_logits;       ///< for Sample and SampleByTable with kNone
  const void* indices;  ///< input row of each output, or null: its own number
  void* out;            ///< of the type of indices; int32 without
  bool wide;            ///< indices and out are int64
  uint8_t* valid;       ///< null, or whether there was a column to draw
  int64_t batch;        ///< outputs
  RandomStream random;
  FilterParams filter;
  bool enable_pdl;  ///< programmatic dependent launch; not by table
};

/// Draws one column for each output: of all, or with kMinP.
Status Sample(const SampleParams& params, Stream stream);

/// The same with kBoth or kTopKFirst.
Status SampleTop(const SampleParams& params, Stream stream);

/// The same for many outputs of few rows, which are prepared once. `table` has SampleTableSize words.
Status SampleByTable(const SampleParams& params, uint64_t* table, Stream stream);

namespace sampling {
constexpr int64_t MAX_VOCAB = 1 << 21;  ///< masses of so many columns fit 64 bits
constexpr int SEGMENT = 1024;           ///< columns that are summed up on their own
constexpr int TABLE_HEADER = 2;
/// Words for a row: its header, and the mass of each segment of columns.
FLASHINFER_HD int64_t TableStride(int64_t vocab) { return TABLE_HEADER + (vocab + SEGMENT - 1) / SEGMENT; }
}  // namespace sampling

/// 64-bit words of the table that pays for these outputs; 0 where none does.
inline int64_t SampleTableSize(const SampleParams& p) {
#ifdef FLASHINFER_CPU
  return 0;  // a thread prepares a row once for all outputs of it that follow each other
#else
  const bool by_output = (p.filter.top_k_by_output && p.filter.top_k.values != nullptr) ||
                         (p.filter.top_p_by_output && p.filter.top_p.values != nullptr);
  return p.indices == nullptr || by_output || p.batch < 4 * p.rows ? 0 : p.rows * sampling::TableStride(p.vocab);
#endif
}

template <typename T>
struct RowParams {
  const T* input;
  T* out;
  int64_t input_stride, out_stride;
  int64_t rows, vocab;
  FilterParams filter;        ///< kBoth; not for softmax
  PerRow<float> temperature;  ///< softmax only
  bool enable_pdl;
};

/// e^(x / temperature), divided by the sum. A row of -inf gives 0; a NaN gives NaN in its column and is left out of
/// the sum.
template <typename T>
Status SoftmaxRows(const RowParams<T>& params, Stream stream);

/// What the filter keeps, divided by its sum; 0 elsewhere.
template <typename T>
Status RenormRows(const RowParams<T>& params, Stream stream);

/// Logits below the k-th largest of their row become -inf.
template <typename T>
Status MaskRows(const RowParams<T>& params, Stream stream);

/// Verifies `drafts` tokens of each request and emits one token more. Contiguous tensors.
struct SpeculativeParams {
  const float* draft_probs;     ///< (batch, drafts, vocab)
  const int32_t* draft_ids;     ///< (batch, drafts)
  const float* target_probs;    ///< (batch, drafts + 1, vocab)
  int32_t* out;                 ///< (batch, drafts + 1): accepted tokens, one more, then -1
  int32_t *accepted, *emitted;  ///< (batch), added to
  int64_t batch, drafts, vocab;
  RandomStream random;
};

Status ChainSpeculativeSample(const SpeculativeParams& params, Stream stream);

}  // namespace flashinfer
