// SPDX-License-Identifier: Apache-2.0
// Sampling from rows of probabilities or logits: parameters and entries, shared by both backends.
//   A draw takes 64 random bits r(seed, offset, output row) and the masses m of the columns a filter keeps, in the
//   order of the columns: the first column whose running sum reaches 1 + floor(r * sum(m) / 2^64). No filter: of the
//   mass of 1 instead of sum(m), and the last positive column where the sum stays below. Filters keep the columns at
//   or above a threshold, found exactly (no rejection, no loop that depends on the draw):
//     top-k   fewer than k columns are above it         top-p   the columns above it have less than top_p
//     min-p   it is min_p times the largest
// Arithmetic: sampling/fixed_point.h. Defined in sampling/*.cuh (CUDA; sampling.cuh lists them) and sampling_cpu.h
// (CPU).
//   test  pytest tests/sampling      bench  python benchmarks/bench_sampling.py
#pragma once
#include <cstdint>

#include "backend.h"
#include "philox.h"

namespace flashinfer {

/// One value for all rows, or one per row.
template <typename T>
struct PerRow {
  const T* values;  ///< null: `value` for all rows
  T value;
  int64_t count;  ///< number of `values`; later rows take the last one
};

struct RandomStream {
  PerRow<uint64_t> seed, offset;  ///< indexed by output row; a `count` of 1 serves all rows
};

enum class Filter { kNone, kMinP, kBoth, kTopKFirst };  ///< kBoth: top-k and top-p of the whole row

/// Parameters of a filter. top_k <= 0 means 1, top_k >= vocab means no limit; top_p >= 1 means no limit.
struct FilterParams {
  Filter filter;
  PerRow<int32_t> top_k;
  PerRow<float> top_p;   ///< min_p for kMinP
  bool top_k_by_output;  ///< index parameters by output row instead of input row
  bool top_p_by_output;
};

struct SampleParams {
  const float* input;  ///< (rows, vocab)
  int64_t row_stride;
  int64_t rows, vocab;  ///< vocab: 1 to MAX_VOCAB
  bool is_logits;       ///< input is logits; only Sample and SampleByTable with kNone
  const void* indices;  ///< input row of each output, or null: the output's own index
  void* out;            ///< token ids, in the type of indices; int32 without them
  bool wide;            ///< indices and out are int64
  uint8_t* valid;       ///< null, or whether there was a column to sample
  int64_t batch;        ///< number of outputs
  RandomStream random;
  FilterParams filter;
  bool enable_pdl;  ///< programmatic dependent launch; not by table
};

/// Sample one column per output: from all columns, or with kMinP.
Status Sample(const SampleParams& params, Stream stream);

/// Sample one column per output with kBoth or kTopKFirst.
Status SampleTop(const SampleParams& params, Stream stream);

/// Sample many outputs of few rows, which are prepared once. `table` has SampleTableSize words.
Status SampleByTable(const SampleParams& params, uint64_t* table, Stream stream);

namespace sampling {
constexpr int64_t MAX_VOCAB = 1 << 21;  ///< masses of this many columns fit 64 bits
constexpr int SEGMENT = 1024;           ///< columns per segment
constexpr int TABLE_HEADER = 2;
/// Return the 64-bit words per row: header, and the mass of each segment.
FLASHINFER_HD int64_t TableStride(int64_t vocab) { return TABLE_HEADER + (vocab + SEGMENT - 1) / SEGMENT; }
}  // namespace sampling

/// Return the 64-bit words of the table; 0 where a table does not pay.
inline int64_t SampleTableSize(const SampleParams& p) {
#ifdef FLASHINFER_CPU
  return 0;  // a thread prepares a row once for consecutive outputs of it
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

/// Compute the softmax: e^(x / temperature), divided by the sum. A row of -inf gives 0. A NaN gives NaN in its column
/// and is not part of the sum.
template <typename T>
Status SoftmaxRows(const RowParams<T>& params, Stream stream);

/// Divide the kept columns by their sum; the others become 0.
template <typename T>
Status RenormRows(const RowParams<T>& params, Stream stream);

/// Set logits below the k-th largest of their row to -inf.
template <typename T>
Status MaskRows(const RowParams<T>& params, Stream stream);

/// Verify `drafts` tokens of each request and emit one more token. Contiguous tensors.
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
