// SPDX-License-Identifier: Apache-2.0
// The step kernel: each row of the state goes once from memory into registers, through all tokens of its sequence, and
// back. Bound by the bytes of the states.
//
//   grid    (tiles of rows * value heads, sequences)
//   block   4 warps; TILE = 16 * ROWS rows of one head       warp   4 groups of 8 lanes      group   ROWS rows
//
//        load rows (registers) ------------------------------.
//        k, q, v, decay, beta of up to 8 tokens (shared) ----+--> for each token: decay, s.k, s.q, shuffle,
//                                                                 u = beta (v - s.k), s += u k, o = s.q + u (k.q)
//
// The loads of all rows are issued before the tokens are staged, so that the two latencies overlap; the dot products
// with k and q are taken in one pass, because o needs no second look at the new state.
//   test  pytest tests/recurrent/test_gdn_decode.py      bench  python benchmarks/bench_recurrent.py
#pragma once
#include "../../ptx/pdl.cuh"
#include "../reduce_rows.cuh"
#include "ring.cuh"
#include "rows.cuh"
#include "stage.cuh"

namespace flashinfer {
namespace recurrent {
namespace step {

/// Outputs of a sequence that is skipped.
template <typename Shape>
__device__ __forceinline__ void ZeroOutputs(const StepParams& p, const Place& at) {
  for (int64_t t = 0; t < at.range.count; ++t) {
    const int64_t to = p.out_stride.Offset(at.range.sequence, at.range.first + t, at.head);
    for (int i = threadIdx.x; i < Shape::TILE && at.first_row + i < p.value_dim; i += THREADS) {
      StoreNumber(p.out, to + at.first_row + i, p.out_type, 0.f);
    }
  }
}

/// Store a checkpoint if one is due before (or after) token t.
template <bool BEFORE, typename S, typename Shape>
__device__ __forceinline__ void StoreCheckpoint(const StepParams& p, const Place& at, int64_t t, int row,
                                                const Rows<S, Shape>& rows) {
  const Checkpoints& c = p.checkpoints;
  const bool in_pool = c.rows.data != nullptr;
  const int64_t done = BEFORE ? t : t + 1;
  if (in_pool == BEFORE || done % c.every != 0) return;
  const int64_t j = c.starts.At(at.n) + done / c.every - (in_pool ? 1 : 0);
  const int64_t to = in_pool ? c.rows.At(j) : j;
  if (to >= 0) rows.Store(p, c.states, to, 0, at.head, row);
}

template <typename Rule, typename T, typename S, typename Shape>
__global__ void __launch_bounds__(THREADS, BLOCKS<Rule, Shape>) StepKernel(const __grid_constant__ StepParams p) {
  constexpr bool ANY = Shape::FORM == Form::kAny;
  __shared__ Shared<Rule, Shape> shared;
  ptx::GridDependencyWait();
  ptx::LaunchDependentsOfFew();

  Place at;
  at.n = int64_t(blockIdx.z) * gridDim.y + blockIdx.y;
  if (at.n >= p.sequences) return;
  at.range = RangeOf(p, at.n);
  if (at.range.count <= 0 && at.range.boundary != 0) return;
  const int tiles = int(p.value_dim + Shape::TILE - 1) / Shape::TILE;
  at.head = blockIdx.x / tiles;
  at.key_head = p.key_group.Divide(at.head);
  at.first_row = blockIdx.x % tiles * Shape::TILE;
  at.leads_head = at.first_row == 0;
  at.leads_key_head = at.leads_head && at.key_head * int(p.key_group.divisor) == at.head;
  at.slot = ReadSlot(p, at.n);
  if (at.slot < p.first_slot) {
    if (p.zero_skipped && p.out != nullptr) ZeroOutputs<Shape>(p, at);
    return;
  }

  if (p.is_replay) at.range.sequence = at.slot;

  const int group = threadIdx.x / COLUMNS % GROUPS, warp = threadIdx.x / 32;
  const int tile_row = warp * GROUPS * Shape::ROWS + group, row = at.first_row + tile_row;  // first of this lane
  const int column = threadIdx.x % COLUMNS;
  const int own = ReducedRow<COLUMNS, Shape::ROWS>(column) * GROUPS,
            own_row = row + own;  // row of the sums of this lane
  const bool owns = WritesReduced<COLUMNS, Shape::ROWS>(column) && own_row < p.value_dim;
  const bool writes_final = p.final.data != nullptr, has_ring = ANY && p.ring.k != nullptr;

  Rows<S, Shape> rows;
  rows.Load(p, p.initial, at.slot, at.head, row);
  if constexpr (ANY) {
    rows.Convert();
    if (has_ring) FoldRing<Rule>(p, at, tile_row, rows, shared);
    if (at.range.boundary == 0 && writes_final) {
      const int64_t slot = p.final.slots.At(at.n);
      if (slot >= p.first_slot) rows.Store(p, p.final, slot, 0, at.head, row);
    }
  }

  const int64_t end = ANY ? at.range.count : 1;  // kMany: all tokens at once
  for (int64_t begin = 0; begin < end; begin += Shape::TOKENS) {
    const int count = int(min(at.range.count - begin, int64_t(Shape::TOKENS)));
    if (ANY) __syncthreads();  // the tokens before have been read
    Stage<Rule, T, S>(p, at, begin, count, shared);
    __syncthreads();
    if (!ANY) rows.Convert();  // not before the tokens are on their way
    if (has_ring) AppendLogDecays(p, at, begin, count, shared);
    for (int i = 0; i < count; ++i) {
      const int64_t t = begin + i, token = at.range.first + t;
      if (ANY && p.checkpoints.states.data != nullptr) StoreCheckpoint<true>(p, at, t, row, rows);
      float sk[Shape::ROWS], sq[Shape::ROWS], u[Shape::ROWS];
      rows.Decay(shared, i, sk, sq);
      ReduceRows<COLUMNS>(sk, column);
      ReduceRows<COLUMNS>(sq, column);
      const float own_u = Rule::Correction(shared.v[i][tile_row + own], sk[0], shared.beta[i]);
#pragma unroll
      for (int r = 0; r < Shape::ROWS; ++r) {
        u[r] = __shfl_sync(0xffffffffu, own_u, group * COLUMNS + r * (COLUMNS / Shape::ROWS));
      }
      rows.Add(shared.k[i], u);
      if (owns && p.out != nullptr) {
        const int64_t to = p.out_stride.Offset(at.range.sequence, token, at.head) + own_row;
        StoreNumber(p.out, to, p.out_type, sq[0] + own_u * shared.kq[i]);
      }
      if constexpr (ANY) {
        if (p.checkpoints.states.data != nullptr) StoreCheckpoint<false>(p, at, t, row, rows);
        if (owns && has_ring) AppendCorrection(p, at, t, own_row, own_u);
        __syncwarp();  // lanes that store come back before the next shuffle
        if (owns && p.record.corrections != nullptr) {
          p.record.corrections[at.slot * p.record.correction_slot + (at.head * p.tokens + t) * p.value_dim + own_row] =
              own_u;
        }
      }
      const bool is_pool = p.each.slots.data != nullptr, is_end = writes_final && t + 1 == at.range.boundary;
      if (!ANY) {  // states after each token or after the last one, never both: one place that stores takes fewer registers
        const States& to = writes_final ? p.final : p.each;
        const int64_t slot = writes_final ? p.final.slots.At(at.n) : is_pool ? p.each.slots.At(at.n, t) : at.n;
        const bool is_slot = slot >= p.first_slot || !(writes_final || is_pool);
        if (is_slot && (is_end || p.each.data != nullptr)) {
          rows.Store(p, to, slot, writes_final || is_pool ? 0 : t, at.head, row);
        }
        continue;
      }
      if (p.each.data != nullptr) {
        const int64_t slot = is_pool ? p.each.slots.At(at.n, t) : at.n;
        const bool is_wanted = !is_pool || (slot >= p.first_slot && t < at.range.boundary);
        if (is_wanted) rows.Store(p, p.each, slot, is_pool ? 0 : t, at.head, row);
      }
      if (!has_ring && is_end) {
        const int64_t slot = p.final.slots.At(at.n);
        if (slot >= p.first_slot) rows.Store(p, p.final, slot, 0, at.head, row);
      }
    }
  }
}

}  // namespace step
}  // namespace recurrent
}  // namespace flashinfer
