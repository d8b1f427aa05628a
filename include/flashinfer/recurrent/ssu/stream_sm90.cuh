// SPDX-License-Identifier: Apache-2.0
// Selective state update of one token on SM90, as a stream of states through shared memory; formulas in ../ssu.h.
//
//   producer warp     slots and numbers of 32 items at a time; bulk copies of a tile of the state, of x, B and C into a ring
//   8 consumer warps  rows of the tile from shared memory into registers, update, product with C, back to where they were,
//                     bulk store; the stage is free when the next item's store has been issued and this one's has been read
//
// An item is a tile of 8 or 16 KiB: rows of one head of one sequence, which lie together. Bytes in flight do not depend on
// registers. Four stages are enough, and more are slower; so are loads that L2 evicts first (H200, 64 and 256 sequences of 128
// heads in bf16: 78.9 and 292 us; twelve stages 80.1 and 293; twelve, evicted first, 82.4 and 303).
//   test  pytest tests/recurrent -k ssu      bench  python benchmarks/bench_recurrent_mamba.py -k selective
#pragma once
#include "../../device/occupancy.cuh"
#include "../../device/sm_count.h"
#include "../../hopper/ring.cuh"
#include "../../ptx/bulk.cuh"
#include "../../ptx/math.cuh"
#include "../../ptx/pdl.cuh"
#include "../../ptx/tma.cuh"
#include "../rules.h"
#include "../ssu.h"
#include "state_row.cuh"

namespace flashinfer {
namespace recurrent {
namespace ssu_stream {

constexpr int CONSUMERS = 8, THREADS = 32 * (CONSUMERS + 1);
constexpr int TILE_BYTES = 16 * 1024, MOST_ROWS = 64;
constexpr int SHARED_BYTES = 220 * 1024, MOST_STAGES = 4;

/// Description of an item for the consumers.
struct Item {
  int64_t target;  ///< slot; negative: nothing is stored
  int n, head, row;
  float dt, decay, d;
  int has_state;
};

template <typename State, typename Input, int WIDTH>
struct Shape : RowShape<State, WIDTH> {
  using Row = RowShape<State, WIDTH>;
  static constexpr int TILE_ROWS =
      TILE_BYTES / int(sizeof(State)) / WIDTH < MOST_ROWS ? TILE_BYTES / int(sizeof(State)) / WIDTH : MOST_ROWS;
  static constexpr int WARP_ROWS = TILE_ROWS / CONSUMERS, LANE_ROWS = WARP_ROWS / Row::GROUPS;
  static constexpr int STATE_BYTES = TILE_ROWS * WIDTH * int(sizeof(State));
  struct Stage {
    alignas(128) State state[TILE_ROWS * WIDTH];
    alignas(16) Input b[WIDTH], c[WIDTH], x[TILE_ROWS];
    alignas(16) float scale[TILE_ROWS];
    Item item;
  };
  static constexpr int STAGES =
      SHARED_BYTES / int(sizeof(Stage)) < MOST_STAGES ? SHARED_BYTES / int(sizeof(Stage)) : MOST_STAGES;
  struct Shared {
    Stage stages[STAGES];
    alignas(8) uint64_t barriers[2 * STAGES];
  };
  static_assert(LANE_ROWS >= 1, "a row for each lane");
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

/// Fill the ring with the items of this block.
template <typename S, typename State, typename Input>
__device__ __forceinline__ void Produce(const SsuParams<State, Input>& p, typename S::Shared& shared, int64_t items,
                                        int tiles) {
  const hopper::Ring<S::STAGES> ring{ptx::SharedAddress(shared.barriers)};
  hopper::RingPosition<S::STAGES> at;
  const int lane = threadIdx.x % 32;
  for (int64_t first = blockIdx.x; first < items; first += int64_t(gridDim.x) * 32) {
    const int64_t mine = first + int64_t(gridDim.x) * lane;
    Item item{};
    int64_t source = 0;
    if (mine < items) {
      item.n = int(mine / tiles / p.heads);
      item.head = int(mine / tiles % p.heads);
      item.row = int(mine % tiles) * S::TILE_ROWS;
      source = p.source.data == nullptr ? item.n : p.source.At(item.n);
      item.target = p.target.data == nullptr ? source : p.target.At(item.n);
      item.has_state = source != p.pad && uint64_t(source) < uint64_t(p.slots);
      const bool stores =
          item.has_state && p.update && item.target != p.pad && uint64_t(item.target) < uint64_t(p.slots);
      if (!stores) item.target = -1;
      item.dt = WeightAt(p.dt, item.n * p.dt.batch + item.head * p.dt.head);
      if (p.dt_bias.data != nullptr) item.dt += WeightAt(p.dt_bias, item.head * p.dt_bias.head);
      if (p.d.data != nullptr && p.d.row == 0) item.d = WeightAt(p.d, item.head * p.d.head);
      const float a = p.a[item.head * p.a_head];
      if (p.softplus) item.dt = Softplus(item.dt);
      item.decay = ptx::Exp2(Mamba2Rule::LogDecay(item.dt, a) * 1.4426950409f);
    }
    const int count = int(min(int64_t(32), (items - first + gridDim.x - 1) / gridDim.x));
    for (int i = 0; i < count; ++i) {
      ring.WaitEmpty(at);
      if (lane == i) {  // the lane that knows the item issues its copies
        typename S::Stage& stage = shared.stages[at.stage];
        stage.item = item;
        const uint32_t full = ring.Full(at.stage);
        uint32_t bytes = S::TILE_ROWS * sizeof(Input) + 2 * S::Row::LANES * S::Row::ELEMENTS * sizeof(Input);
        if (item.has_state) bytes += S::STATE_BYTES + (StateFormat<State>::IS_SCALED ? S::TILE_ROWS * 4 : 0);
        ptx::MbarrierArriveExpect(full, bytes);
        if (item.has_state) {
          const State* from = p.state.data + source * p.state.slot + item.head * p.state.head + item.row * p.state.row;
          ptx::LoadBulk(ptx::SharedAddress(stage.state), from, S::STATE_BYTES, full);
          if constexpr (StateFormat<State>::IS_SCALED) {
            const float* scale =
                p.state.scale + source * p.state.scale_slot + item.head * p.state.scale_head + item.row;
            ptx::LoadBulk(ptx::SharedAddress(stage.scale), scale, S::TILE_ROWS * 4, full);
          }
        }
        const int group = item.head / p.heads_per_group;
        const Input* x = p.x.data + item.n * p.x.batch + item.head * p.x.head + item.row;
        ptx::LoadBulk(ptx::SharedAddress(stage.x), x, S::TILE_ROWS * sizeof(Input), full);
        constexpr uint32_t ROW_BYTES = S::Row::LANES * S::Row::ELEMENTS * sizeof(Input);
        ptx::LoadBulk(ptx::SharedAddress(stage.b), p.b.data + item.n * p.b.batch + group * p.b.head, ROW_BYTES, full);
        ptx::LoadBulk(ptx::SharedAddress(stage.c), p.c.data + item.n * p.c.batch + group * p.c.head, ROW_BYTES, full);
      }
      __syncwarp();
      at.Advance();
    }
  }
}

template <typename S, typename State, typename Input, int WIDTH>
__device__ __forceinline__ void Consume(const SsuParams<State, Input>& p, typename S::Shared& shared, int64_t items) {
  using Row = typename S::Row;
  constexpr int ELEMENTS = Row::ELEMENTS, LANE_ROWS = S::LANE_ROWS;
  const hopper::Ring<S::STAGES> ring{ptx::SharedAddress(shared.barriers)};
  hopper::RingPosition<S::STAGES> at;
  const int lane = threadIdx.x % 32, sublane = lane % Row::LANES;
  const int warp_row = threadIdx.x / 32 * S::WARP_ROWS, row0 = warp_row + lane / Row::LANES * LANE_ROWS;
  const StoreOptions options{p.seed != nullptr, p.seed != nullptr ? *p.seed : 0, p.rounds};
  const int local = row0 + ReducedRow<Row::LANES, LANE_ROWS>(sublane);
  const bool writes = WritesReduced<Row::LANES, LANE_ROWS>(sublane);
  int before = -1;  // stage whose store may still be reading
  for (int64_t i = blockIdx.x; i < items; i += gridDim.x) {
    ring.WaitFull(at);
    typename S::Stage& stage = shared.stages[at.stage];
    const Item item = stage.item;
    float z = 0.f, d = item.d;
    if (p.z.data != nullptr && writes)
      z = ToFloat(p.z.data[item.n * p.z.batch + item.head * p.z.head + item.row + local]);
    if (p.d.data != nullptr && p.d.row != 0 && writes)
      d = WeightAt(p.d, item.head * p.d.head + (item.row + local) * p.d.row);
    float b[ELEMENTS], c[ELEMENTS], y[LANE_ROWS];
#pragma unroll
    for (int k = 0; k < Row::CHUNKS; ++k) {
      const int column = (k * Row::LANES + sublane) * Row::VEC;
      float part[Row::VEC];
      LoadSome(&stage.b[column], Row::VEC, true, part);
#pragma unroll
      for (int j = 0; j < Row::VEC; ++j) b[k * Row::VEC + j] = part[j];
      LoadSome(&stage.c[column], Row::VEC, true, part);
#pragma unroll
      for (int j = 0; j < Row::VEC; ++j) c[k * Row::VEC + j] = part[j];
    }
    const bool in_place = !StateFormat<State>::IS_SCALED && !(std::is_same_v<State, __half> && options.is_random);
#pragma unroll
    for (int r = 0; r < LANE_ROWS; ++r) {
      const int row = row0 + r;
      float s[ELEMENTS];
      RawVec<Row::VEC, State> raw[Row::CHUNKS];
      State* const at_row = &stage.state[row * WIDTH];
      float scale = 1.f;
      if constexpr (StateFormat<State>::IS_SCALED) scale = stage.scale[row];
#pragma unroll
      for (int k = 0; k < Row::CHUNKS; ++k) {
        using Bits = typename RawVec<Row::VEC, State>::Bits;
        raw[k].Clear();
        if (item.has_state)
          *reinterpret_cast<Bits*>(&raw[k]) =
              *reinterpret_cast<const Bits*>(at_row + (k * Row::LANES + sublane) * Row::VEC);
        raw[k].ToFloats(&s[k * Row::VEC]);
      }
      const float added = Mamba2Rule::Correction(ToFloat(stage.x[row]), 0.f, item.dt);
      const float factor = StateFormat<State>::IS_SCALED && item.has_state ? item.decay * scale : item.decay;
      y[r] = 0.f;
#pragma unroll
      for (int j = 0; j < ELEMENTS; ++j) {
        s[j] = s[j] * factor + added * b[j];
        y[r] += s[j] * c[j];
      }
      if (in_place) {
#pragma unroll
        for (int k = 0; k < Row::CHUNKS; ++k) {
          float part[Row::VEC];
#pragma unroll
          for (int j = 0; j < Row::VEC; ++j) part[j] = s[k * Row::VEC + j];
          if constexpr (!StateFormat<State>::IS_SCALED)
            RoundTo<State, Row::VEC>(part).Store(at_row + (k * Row::LANES + sublane) * Row::VEC);
        }
      } else {
        StoreRow<State, WIDTH>(p.state, item.target, item.head, item.row + row, WIDTH, sublane, s, options,
                               item.target >= 0);
      }
    }
    if (in_place) ptx::FenceAsyncProxy();
    ReduceRows<Row::LANES>(y, sublane);
    if (writes) {
      float result = y[0] + d * ToFloat(stage.x[local]);
      if (p.z.data != nullptr) result *= z * Sigmoid(z);
      p.out.data[item.n * p.out.batch + item.head * p.out.head + item.row + local] = FromFloat<Input>(result);
    }
    __syncwarp();
    if (lane == 0) {
      if (in_place && item.target >= 0) {
        State* to =
            p.state.data + item.target * p.state.slot + item.head * p.state.head + (item.row + warp_row) * p.state.row;
        ptx::StoreBulk(to, ptx::SharedAddress(&stage.state[warp_row * WIDTH]), S::WARP_ROWS * WIDTH * sizeof(State));
      }
      ptx::CommitStores();
      ptx::WaitStoresRead<1>();
    }
    __syncwarp();
    if (before >= 0) ring.Release(before, 1);
    before = at.stage;
    at.Advance();
  }
  if (lane == 0) ptx::WaitStoresRead<0>();
}

#endif

template <typename State, typename Input, int WIDTH>
__global__ void __launch_bounds__(THREADS, 1)
    SsuStreamKernel(const __grid_constant__ SsuParams<State, Input> p, int64_t items, int tiles) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  using S = Shape<State, Input, WIDTH>;
  ptx::GridDependencyWait();
  ptx::LaunchDependentsOfFew();
  extern __shared__ __align__(128) uint8_t raw_shared[];
  auto& shared = *reinterpret_cast<typename S::Shared*>(raw_shared);
  if (threadIdx.x == 0) hopper::Ring<S::STAGES>{ptx::SharedAddress(shared.barriers)}.Init(CONSUMERS);
  __syncthreads();
  if (threadIdx.x / 32 == CONSUMERS) {
    Produce<S>(p, shared, items, tiles);
  } else {
    Consume<S, State, Input, WIDTH>(p, shared, items);
  }
#endif
}

/// Least number of items for which a stream is worth its start: a few for each SM.
constexpr int64_t FEW_ITEMS = 4 * 132;

template <typename State, typename Input, int WIDTH>
bool CanStream(const SsuParams<State, Input>& p) {
  using S = Shape<State, Input, WIDTH>;
  constexpr int UNIT = 16 / int(sizeof(Input)), STATE_UNIT = 16 / int(sizeof(State));
  const auto aligns = [](const auto& a, int unit) {
    return a.batch % unit == 0 && a.head % unit == 0 && IsAligned(a.data, 16);
  };
  const StateArray<State>& s = p.state;
  const bool has_scales =
      !StateFormat<State>::IS_SCALED || (s.scale_slot % 4 == 0 && s.scale_head % 4 == 0 && IsAligned(s.scale, 16));
  return p.dstate == WIDTH && p.dim % S::TILE_ROWS == 0 && s.row == WIDTH && s.slot % STATE_UNIT == 0 &&
         s.head % STATE_UNIT == 0 && IsAligned(s.data, 16) && has_scales && aligns(p.x, UNIT) && aligns(p.b, UNIT) &&
         aligns(p.c, UNIT) && int64_t(p.sequences) * p.heads * (p.dim / S::TILE_ROWS) >= FEW_ITEMS &&
         flashinfer::device::HasBulkCopies();
}

template <int WIDTH, typename State, typename Input>
Status Launch(const SsuParams<State, Input>& p, Stream stream) {
  using S = Shape<State, Input, WIDTH>;
  constexpr auto KERNEL = SsuStreamKernel<State, Input, WIDTH>;
  constexpr int BYTES = int(sizeof(typename S::Shared));
  const Status status = flashinfer::device::AllowShared<KERNEL, BYTES>();
  if (status != cudaSuccess) return status;
  int device = 0;
  cudaGetDevice(&device);
  const int tiles = p.dim / S::TILE_ROWS;
  const int64_t items = int64_t(p.sequences) * p.heads * tiles;
  const int64_t blocks = std::min<int64_t>(items, flashinfer::device::SmCount(device));
  return LaunchShared(KERNEL, dim3(blocks), dim3(THREADS), BYTES, p.enable_pdl, stream, p, items, tiles);
}

}  // namespace ssu_stream
}  // namespace recurrent
}  // namespace flashinfer
