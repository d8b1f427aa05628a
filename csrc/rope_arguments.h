// SPDX-License-Identifier: Apache-2.0
// Helpers of the launchers of the rotary embedding: conversion of tensors to the segments, positions and tables of
// RopeParams.
#pragma once
#include <algorithm>

#include "page_arguments.h"
#include "tvm_ffi_utils.h"
// clang-format off
#include <flashinfer/rope.h>
#if defined(FLASHINFER_CPU)
#include <flashinfer/rope_cpu.h>
#elif defined(__CUDACC__)
#include <flashinfer/rope.cuh>
#endif
// clang-format on

namespace flashinfer {
namespace rope {

/// Return the stride of a dimension, or 0 if its size is one: the stride of such a dimension is arbitrary.
inline int64_t StrideOf(const TensorView& t, int dim) { return t.size(dim) > 1 ? t.stride(dim) : 0; }

/// Make the segment of a tensor (tokens, heads, width), or (tokens, width) with one head, whose output rows are tokens.
inline RopeSegment SegmentOf(const TensorView& in, const TensorView& out, bool rotated, double scale = 1) {
  const bool heads = in.ndim() == 3;
  RopeSegment s{};
  s.in = in.data_ptr();
  s.out = out.data_ptr();
  s.heads = heads ? in.size(1) : 1;
  s.width = in.size(-1);
  s.rotated = rotated;
  s.in_token = StrideOf(in, 0);
  s.in_head = heads ? StrideOf(in, 1) : 0;
  s.out_row = StrideOf(out, 0);
  s.out_head = heads ? StrideOf(out, 1) : 0;
  s.scale = static_cast<float>(scale);
  return s;
}

inline void AddSegment(RopeParams& p, const RopeSegment& segment) {
  if (segment.heads > 0 && segment.width > 0) p.segments[p.num_segments++] = segment;
}

inline const Expect& Positions(const Expect& expect, const TensorView& like) {
  return expect.same_device(like, "q").dtype({dl_int32, dl_int64}).rank(1).contiguous();
}

inline void SetPosIds(const char* op, const char* name, RopeParams& p, const TensorView& pos_ids, const TensorView& q) {
  Positions(Expect(op, name, pos_ids), q).dim(0, q.size(0), "the number of tokens");
  p.positions.pos_ids = pos_ids.data_ptr();
  p.positions.wide = pos_ids.dtype().bits == 64;
}

inline void SetRagged(const char* op, RopeParams& p, const TensorView& indptr, const TensorView& offsets,
                      const TensorView& q) {
  Positions(Expect(op, "offsets", offsets), q);
  Positions(Expect(op, "indptr", indptr), q)
      .same_dtype(offsets, "offsets")
      .dim(0, offsets.size(0) + 1, "offsets.shape[0] + 1");
  p.positions.indptr = indptr.data_ptr();
  p.positions.offsets = offsets.data_ptr();
  p.positions.requests = offsets.size(0);
  p.positions.wide = indptr.dtype().bits == 64;
#ifdef FLASHINFER_CPU
  if (p.positions.wide) {
    page::CheckRising(op, "indptr", static_cast<const int64_t*>(p.positions.indptr), p.positions.requests);
  } else {
    page::CheckRising(op, "indptr", static_cast<const int32_t*>(p.positions.indptr), p.positions.requests);
  }
#endif
}

inline void SetRotaryDim(const char* op, const char* name, RopeParams& p, int64_t rotary_dim, int64_t width) {
  int64_t limit = width;
#ifndef FLASHINFER_CPU
  limit = std::min(limit, MAX_ROTARY_DIM);
#endif
  if (rotary_dim <= 0 || rotary_dim % 2 != 0 || rotary_dim > limit) {
    FLASHINFER_THROW(ArgumentError) << op << ": " << name << " must be an even number from 2 to " << limit
                                    << " (columns of a head are rotated in pairs), got " << rotary_dim;
  }
  p.rotary_dim = rotary_dim;
}

/// Set the cos/sin table. The width of its rows is the number of rotated columns.
inline void SetCache(const char* op, RopeParams& p, const TensorView& cache, const TensorView& q, int64_t width) {
  if (encode_dlpack_dtype(cache.dtype()) != encode_dlpack_dtype(dl_float32)) {  // the text is the contract's
    FLASHINFER_THROW(ArgumentError) << op << ": cos_sin_cache has dtype " << cache.dtype()
                                    << ": cos_sin_cache should be float32";
  }
  Expect(op, "cos_sin_cache", cache).same_device(q, "q").rank(2).last_dim_contiguous();
  SetRotaryDim(op, "cos_sin_cache.shape[1]", p, cache.size(1), width);
  p.angles.cache = cache.data_ptr<float>();
  p.angles.cache_rows = cache.size(0);
  p.angles.cache_stride = StrideOf(cache, 0);
  if (p.tokens > 0 && cache.size(0) == 0) {
    FLASHINFER_THROW(ArgumentError) << op << ": cos_sin_cache must have one row for each position, got 0";
  }
}

#ifdef FLASHINFER_CPU
/// Throw if a position is outside of the table, on the CPU only. Padding tokens have no position.
inline void CheckTableRows(const char* op, const RopeParams& p) {
  for (int64_t token = 0; token < p.tokens; ++token) {
    if (p.pages.batch_indices != nullptr && p.pages.batch_indices[token] < 0) continue;
    const int64_t position = cpu::IndexAt(p.positions.pos_ids, token, p.positions.wide);
    if (position < 0 || position >= p.angles.cache_rows) {
      FLASHINFER_THROW(ArgumentError) << op << ": the position of token " << token << " must be 0 to "
                                      << p.angles.cache_rows - 1 << ", got " << position;
    }
  }
}
#else
inline void CheckTableRows(const char*, const RopeParams&) {}
#endif

inline void Run(const char* op, const RopeParams& p, const TensorView& q) {
  DeviceGuard guard(q.device());
  DispatchFloat(q.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    CheckStatus(op, Rope<T>(p, get_stream(q.device())));
  });
}

inline void ExpectHeads(const char* op, const char* name, const TensorView& t, const TensorView& q, int low, int high) {
  Expect(op, name, t)
      .same_device(q, "q")
      .same_dtype(q, "q")
      .rank(low, high)
      .dim(0, q.size(0), "the number of tokens")
      .last_dim_contiguous();
}

}  // namespace rope
}  // namespace flashinfer
