// SPDX-License-Identifier: Apache-2.0
// Chunked gated delta rule on SM90, split form: parts of a long request side by side, where heads are few.
//
// A part changes the state by S <- S M + N (S transposed, V x K). The recurrence with zeros at the start gives N; with
// the identity at the start, and values of zeros, it gives M, whose rows are independent as those of S are. Then a short
// chain over the parts (StartStatesKernel, fp32) gives the state at the start of each, and all parts are computed again
// from there, with their outputs. Parts begin at multiples of `segment` of their requests, so a prefix has the same ones.
//   test  pytest tests/recurrent/test_emulated_gdn_prefill.py      bench  python benchmarks/bench_gdn_prefill.py
#pragma once
#include "../chunk/prepare.cuh"
#include "shape.h"

namespace flashinfer {
namespace recurrent {
namespace sm90 {

/// States of all parts, [slot, head, 128, 128]: M, N, and the state at the start.
enum class PartState { kTransfer, kAdded, kStart };

template <typename T>
FLASHINFER_HD States StatesOf(const DeltaParams<T>& p, PartState which) {
  const int64_t head = DIM * DIM, slot = p.num_heads * head;
  const int64_t slots = FirstChunkSlot(p.requests, p.tokens, p.segment);
  return {p.parts + int(which) * slots * slot, StateType::kF32, slot, head, DIM, 1};
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/// Return the work of this block: a part of a request, of which the state at the start is known. Called by whole warps.
template <typename Shape, typename T>
__device__ __forceinline__ Item PartOf(const DeltaParams<T>& p) {
  constexpr int PARTS = 2 / Shape::WARPGROUPS;
  const int part = int(blockIdx.x) % PARTS, rest = int(blockIdx.x) / PARTS;
  const int64_t slot = rest / p.num_heads;
  const Chunk piece = FindChunk(p, slot, p.segment);
  Item item{};
  if (piece.request < 0) return item;
  const Request request = p.RequestOf(piece.request);
  item.tokens = {piece.begin, piece.length};
  item.passed = piece.begin - request.begin;
  item.number = piece.request, item.head = rest % p.num_heads, item.column = part * HALF;
  const int64_t own = p.slots[piece.request];
  item.initial = item.passed == 0 ? p.initial : StatesOf(p, PartState::kStart);
  item.initial_slot = item.passed == 0 ? own : slot;
  if (item.passed + piece.length == request.length) item.final = p.final;
  item.final_slot = own;
  return item;
}

/// Return the work of this block: N (even blocks) or M (odd blocks) of a part, unless it is the last of its request.
template <typename T>
__device__ __forceinline__ Item TransferOf(const DeltaParams<T>& p) {
  const bool is_transfer = blockIdx.x % 2 == 1;
  const int rest = int(blockIdx.x) / 2;
  const int64_t slot = rest / p.num_heads;
  const Chunk piece = FindChunk(p, slot, p.segment);
  Item item{};
  if (piece.request < 0) return item;
  const Request request = p.RequestOf(piece.request);
  item.passed = piece.begin - request.begin;
  if (item.passed + piece.length == request.length) return item;
  item.tokens = {piece.begin, piece.length};
  item.number = piece.request, item.head = rest % p.num_heads;
  item.final = StatesOf(p, is_transfer ? PartState::kTransfer : PartState::kAdded);
  item.final_slot = slot;
  return item;
}

#endif

}  // namespace sm90
}  // namespace recurrent
}  // namespace flashinfer
