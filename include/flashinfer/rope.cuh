// SPDX-License-Identifier: Apache-2.0
// Rotary position embedding on CUDA (formulas and parameters: rope.h). Heads of one or two tensors, the usual call, are
// rotated by rope_heads.cuh; one kernel serves the other forms: fp8 output and appending, columns that are copied, rows
// that are not aligned. Bound by DRAM, or nearly. Whether a table is read or angles are worked out is known when it is
// compiled: half the code to fetch.
//
// An item is two 16-byte vectors of one head, columns c and c + R/2, so that the pairs of either style are in the
// registers of one thread. The items of all segments of a token (q and k, or also their unrotated parts and v) are
// numbered through and dealt to blocks of 64 or 96 threads, one or two per thread.
// * The loads of the items are issued first. While they fly, each block works out the cosines and sines of its token
//   once, R/2 threads one each, into shared memory; the other warps wait at the barrier with their loads in flight.
// * A cos/sin cache is read by each thread for itself instead, and blocks fetch the row of a later token into L2.
// * Divisions are multiplications by a reciprocal, tokens are in the grid, strides have 32 bits.
// * Instructions count: 16384 tokens of 32 + 8 + 8 heads, quantised and appended, took 91.7 us with 1300 of them and
//   take 85.7 with 710 and the prefetch of later tokens (H200).
//   test  pytest tests/rope      bench  python benchmarks/bench_rope.py
#pragma once
#include "page_table.cuh"
#include "ptx/pdl.cuh"
#include "rope_angles.cuh"
#include "rope_heads.cuh"
#include "utils.cuh"
#include "vec_dtypes.cuh"

namespace flashinfer {
namespace rope {

constexpr int MAX_THREADS = 96;

/// RopeSegment in the form that the kernel reads: 32-bit sizes, items instead of heads and columns.
template <typename T>
struct Part {
  const T* in;
  void* out;
  uint32_t in_token, in_head, out_row, out_entry, out_head;
  uint32_t first;          // number of its first item; no item reaches that of an unused part
  FastDivisor per_head;    // items of a head: `pairs` rotated ones, then those of the tail, which is copied
  int pairs, tail, width;  // the tail is [tail, width)
  float scale;
  bool paged;
  uint32_t row_bytes;  // bytes per token; 0 where heads are not contiguous
};

template <typename T>
struct Args {
  Part<T> parts[RopeParams::MAX_SEGMENTS];
  uint32_t tokens, items, rotated_items;  // items of rotated parts come first
  uint32_t ahead;                         // prefetch distance in tokens; 0 for no prefetch
  int half;                               // R / 2
  bool interleave;
  RopePositions positions;
  RopeAngles angles;
  page::TableArgs pages;
  RopeOut out_kind;
};

/// Find the cosine and sine of pair j at a position: read from the table if there is one, otherwise computed.
__device__ __forceinline__ void FindCosSin(const RopeAngles& a, int half, int64_t position, int j, float& cosine,
                                           float& sine) {
  if (a.cache == nullptr) return CosSin(a, position, j, cosine, sine);
  const float* row = CacheRow(a, position);
  cosine = row[j];
  sine = row[half + j];
}

template <typename T, bool QUANT, int VEC>
__device__ __forceinline__ void StoreRounded(void* out, int64_t offset, float (&y)[VEC], float scale, RopeOut kind) {
  if constexpr (QUANT) {
#pragma unroll
    for (int i = 0; i < VEC; ++i) y[i] *= scale;
    StoreFp8<VEC>(static_cast<uint8_t*>(out) + offset, y, kind == RopeOut::kE4M3 ? __NV_E4M3 : __NV_E5M2);
  } else {
    RoundTo<T, VEC>(y).Store(static_cast<T*>(out) + offset);
  }
}

/// One item of a thread: two vectors of a head.
template <typename T, int VEC>
struct Item {
  const Part<T>* part;
  uint32_t head;
  int column, c0, c1;
  Vec<T, VEC> in0, in1;

  /// Find an item by its number and issue its loads.
  __device__ __forceinline__ Item(const Args<T>& a, uint32_t token, uint32_t number) {
    int index = 0;
#pragma unroll
    for (int i = 1; i < RopeParams::MAX_SEGMENTS; ++i) index += number >= a.parts[i].first;
    part = &a.parts[index];
    const uint32_t local = number - part->first;
    head = part->per_head.Divide(local);
    column = int(local - head * part->per_head.divisor);
    c0 = column * VEC, c1 = c0 + a.half;
    if (VEC == 1 && a.interleave) {
      c0 = 2 * column;
      c1 = c0 + 1;
    }
    if (!Rotated()) {  // the tail, from both ends: an odd number of vectors has its middle one copied twice
      c0 = part->tail + (column - part->pairs) * VEC;
      c1 = part->width - (column - part->pairs + 1) * VEC;
    }
    const T* in = part->in + (uint64_t{token} * part->in_token + uint64_t{head} * part->in_head);
    in0 = Vec<T, VEC>::Load(in + c0);
    in1 = Vec<T, VEC>::Load(in + c1);
  }
  __device__ __forceinline__ bool Rotated() const { return column < part->pairs; }

  template <bool QUANT>
  __device__ __forceinline__ void Finish(const Args<T>& a, const float* table, int sines, uint32_t row,
                                         uint32_t entry) const {
    float x[VEC], y[VEC];
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      x[i] = in0.Float(i);
      y[i] = in1.Float(i);
    }
    if (Rotated()) {
      if constexpr (VEC == 1) {
        Rotate(x[0], y[0], table[column], table[sines + column]);
      } else {
        RotateVectors<VEC>(x, y, table, sines, c0, c1, a.interleave);
      }
    }
    const uint64_t out =
        uint64_t{row} * part->out_row + uint64_t{entry} * part->out_entry + uint64_t{head} * part->out_head;
    StoreRounded<T, QUANT, VEC>(part->out, out + c0, x, part->scale, a.out_kind);
    StoreRounded<T, QUANT, VEC>(part->out, out + c1, y, part->scale, a.out_kind);
  }
};

/// Kernel of all forms. READ_CACHE: each thread reads cosines and sines from the table, at the row given by pos_ids.
template <typename T, bool QUANT, bool READ_CACHE, int VEC, int ITEMS>
__global__ void __launch_bounds__(MAX_THREADS) RopeKernel(const __grid_constant__ Args<T> a) {
  __shared__ alignas(16) float table[READ_CACHE ? 1 : MAX_ROTARY_DIM];
  ptx::GridDependencyWait();
  ptx::LaunchDependentsOfFew();
  const uint32_t token = blockIdx.z * gridDim.y + blockIdx.y;  // the grid may have a few blocks too many
  if (token >= a.tokens) return;
  const uint32_t block_item = blockIdx.x * blockDim.x * ITEMS;
  auto number_of = [&](int k) { return block_item + threadIdx.x + k * blockDim.x; };
  auto item_of = [&](int k) { return Item<T, VEC>(a, token, min(number_of(k), a.items - 1)); };
  const bool appends = QUANT && a.pages.batch_indices != nullptr;
  int32_t batch = 0, slot_position = 0;
  if (appends) {  // loaded first, because the other loads of the slot depend on these values
    batch = a.pages.batch_indices[token];
    slot_position = a.pages.positions[token];
  }
  int64_t position = 0;
  const bool ragged = !READ_CACHE && a.positions.pos_ids == nullptr;
  if (!ragged) position = IndexAt(a.positions.pos_ids, token, a.positions.wide);
  const Item<T, VEC> first = item_of(0), second = item_of(ITEMS - 1);

  if (ITEMS == 2 && blockIdx.x == 0 && threadIdx.x < RopeParams::MAX_SEGMENTS && a.ahead != 0) {
    const Part<T>& part = a.parts[threadIdx.x];
    const uint32_t later = token + a.ahead;
    if (later < a.tokens && part.row_bytes != 0) {
      ptx::PrefetchL2(part.in + uint64_t{later} * part.in_token, part.row_bytes);
    }
  }

  uint32_t row = token, entry = 0;  // position of the token's slot
  if (appends) {
    const page::DeviceSlot slot = page::SlotOf(a.pages, batch, slot_position);
    if (slot.page < 0) return;
    row = uint32_t(slot.page);
    entry = uint32_t(slot.entry);
  }

  const float* angles = table;
  int sines = MAX_ROTARY_DIM / 2;
  if constexpr (READ_CACHE) {  // every thread reads what it needs of the row: no barrier, and the heads find it in L1
    angles = CacheRow(a.angles, position);
    sines = a.half;
    const uint32_t later = token + TOKENS_AHEAD;
    if (blockIdx.x == 0 && later < a.tokens) PrefetchRow(a.angles, a.positions, later, 2 * a.half, threadIdx.x);
  } else if (block_item < a.rotated_items) {
    if (__builtin_expect(ragged, false) && !RaggedPosition(a.positions, token, threadIdx.x % 32, position)) return;
    for (int j = threadIdx.x; j < a.half; j += blockDim.x) {
      FindCosSin(a.angles, a.half, position, j, table[j], table[MAX_ROTARY_DIM / 2 + j]);
    }
    __syncthreads();
  }
  auto finish = [&](const Item<T, VEC>& item) {
    const bool paged = QUANT && item.part->paged;
    item.template Finish<QUANT>(a, angles, sines, paged ? row : token, paged ? entry : 0);
  };
  if (number_of(0) < a.items) finish(first);
  if (ITEMS == 2 && number_of(1) < a.items) finish(second);
}

inline bool CanVectorise(const RopeParams& p, int vec) {
  if (p.rotary_dim % (2 * vec) != 0) return false;
  const size_t out_bytes = p.out_kind == RopeOut::kSame ? 16 : vec;
  for (const RopeSegment* s = p.segments; s < p.segments + p.num_segments; ++s) {
    for (int64_t size : {s->width, s->in_token, s->in_head, s->out_row, s->out_entry, s->out_head}) {
      if (size % vec != 0) return false;
    }
    if (!IsAligned(s->in, 16) || !IsAligned(s->out, out_bytes)) return false;
  }
  return true;
}

/// Number the items of all segments. Returns false if the number of items or a stride exceeds 32 bits.
template <typename T>
bool DealItems(const RopeParams& p, int vec, Args<T>& a) {
  int64_t items = 0, token_bytes = 0;
  for (int i = 0; i < RopeParams::MAX_SEGMENTS; ++i) {
    Part<T>& part = a.parts[i];
    part.first = i < p.num_segments ? uint32_t(items) : UINT32_MAX;
    if (i >= p.num_segments) continue;
    const RopeSegment& s = p.segments[i];
    const int64_t rotary = s.rotated ? p.rotary_dim : 0, pairs = rotary / (2 * vec);
    const int64_t per_head = pairs + (s.InPlace() ? 0 : CeilDiv(s.width - rotary, 2 * vec));
    if (items + per_head * s.heads > INT32_MAX) return false;
    if (std::max({s.in_token, s.in_head, s.out_row, s.out_entry, s.out_head}) > UINT32_MAX) return false;
    part.in = static_cast<const T*>(s.in);
    part.out = s.out;
    part.in_token = uint32_t(s.in_token);
    part.in_head = uint32_t(s.in_head);
    part.out_row = uint32_t(s.out_row);
    part.out_entry = uint32_t(s.out_entry);
    part.out_head = uint32_t(s.out_head);
    part.per_head = FastDivisor(uint32_t(per_head));
    part.pairs = int(pairs);
    part.tail = int(rotary);
    part.width = int(s.width);
    part.scale = s.scale;
    part.paged = s.paged;
    part.row_bytes = s.in_head == s.width ? uint32_t(s.heads * s.width * sizeof(T)) : 0;
    token_bytes += s.heads * s.width * sizeof(T);
    items += per_head * s.heads;
    if (s.rotated) a.rotated_items = uint32_t(items);
  }
  a.items = uint32_t(items);
  a.ahead = TokensAhead(p.tokens, token_bytes);
  return true;
}

}  // namespace rope

template <typename T, bool QUANT>
Status RopeOf(const RopeParams& p, Stream stream) {
  using namespace rope;
  constexpr int VEC = 16 / sizeof(T);
  if (p.tokens > INT32_MAX || p.rotary_dim > MAX_ROTARY_DIM) return cudaErrorInvalidValue;
  const bool vectorised = CanVectorise(p, VEC);
  if constexpr (!QUANT) {
    HeadsArgs<T> heads{};
    if (vectorised && p.tokens > 0 && p.num_segments > 0 && MakeHeads(p, heads)) return LaunchHeads(p, heads, stream);
  }
  Args<T> a{};
  if (!DealItems(p, vectorised ? VEC : 1, a)) return cudaErrorInvalidValue;
  if (p.tokens == 0 || a.items == 0) return cudaSuccess;
  a.tokens = uint32_t(p.tokens);
  a.half = int(p.rotary_dim / 2);
  a.interleave = p.interleave;
  a.positions = p.positions;
  a.angles = p.angles;
  if (p.pages.batch_indices != nullptr) a.pages = page::MakeTable(p.pages);
  a.out_kind = p.out_kind;
  const bool aligned_cache = IsAligned(p.angles.cache, 16) && p.angles.cache_stride % 4 == 0;
  const bool read_cache = vectorised && p.angles.cache != nullptr && p.positions.pos_ids != nullptr && aligned_cache;
  // Two items per thread pay when there is bandwidth to fill: many tokens of many heads.
  const bool two = vectorised && p.tokens >= 1024 && a.items > 160;
  const int64_t per_thread = two ? 2 : 1;
  const int64_t most = two || read_cache ? 64 : MAX_THREADS;
  const int64_t blocks = CeilDiv(a.items, most * per_thread);
  const int64_t threads = CeilDiv(CeilDiv(a.items, blocks * per_thread), 32) * 32;
  const int64_t z = CeilDiv(p.tokens, MAX_GRID_Y);
  const dim3 grid(CeilDiv(a.items, threads * per_thread), CeilDiv(p.tokens, z), z);
  auto launch = [&](auto kernel) { return Launch(kernel, grid, dim3(threads), p.enable_pdl, stream, a); };
  if (!vectorised) return launch(RopeKernel<T, QUANT, false, 1, 1>);
  if (read_cache) return launch(two ? RopeKernel<T, QUANT, true, VEC, 2> : RopeKernel<T, QUANT, true, VEC, 1>);
  return launch(two ? RopeKernel<T, QUANT, false, VEC, 2> : RopeKernel<T, QUANT, false, VEC, 1>);
}

}  // namespace flashinfer
