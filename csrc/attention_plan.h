// SPDX-License-Identifier: Apache-2.0
// plan() of the batch modules: validates the host arrays, runs the planner, copies the plan to the int workspace.
#pragma once
#include "attention_arguments.h"
#include "attention_staging.h"
// clang-format off
#include <flashinfer/attention/common/backend_interface.h>
#include <flashinfer/attention/fused/plan.h>
#include <flashinfer/attention/prefill_sm90/tiles.h>
// clang-format on

namespace flashinfer {
namespace attention {

/// Workspaces of a plan. Callers pass a pinned buffer too, as published: plans go through memory of the module instead
/// (attention_staging.h), because that buffer may belong to somebody else before its copy has run.
struct PlanBuffers {
  TensorView float_ws, int_ws;
};

inline int64_t ByteSize(const TensorView& t) { return t.numel() * ((t.dtype().bits * t.dtype().lanes + 7) / 8); }

/// Return the address of at least `count` int32 numbers on the host.
inline const int32_t* HostArray(const char* op, const char* name, const TensorView& t, int64_t count) {
  if (t.device().device_type != kDLCPU && t.device().device_type != kDLCUDAHost) {
    FLASHINFER_THROW(ArgumentError) << op << ": " << name << " must be on cpu, got " << t.device();
  }
  Expect(op, name, t).dtype({dl_int32}).contiguous();
  if (t.numel() < count) {
    FLASHINFER_THROW(ArgumentError) << op << ": " << name << " must have at least " << count << " elements, got "
                                    << t.numel();
  }
  return t.data_ptr<int32_t>();
}

#ifndef FLASHINFER_CPU
constexpr int MAX_DEVICES = 64;

/// Cache ask(device) for the current device in `known`, static memory of the caller; 0: unknown.
template <typename Ask>
int AskOnce(int (&known)[MAX_DEVICES], const Ask& ask) {
  int device = 0;
  cudaGetDevice(&device);
  if (device < 0 || device >= MAX_DEVICES) return ask(device);
  if (known[device] == 0) known[device] = ask(device);
  return known[device];
}

/// Size of the current device's L2 cache in bytes.
inline int64_t CacheBytes() {
  static int known[MAX_DEVICES] = {};
  return AskOnce(known, [](int device) {
    int bytes = 0;
    cudaDeviceGetAttribute(&bytes, cudaDevAttrL2CacheSize, device);
    return bytes;
  });
}
#endif

/// Number of blocks that the current device runs at once.
template <int TILE>
int CachedBlocks() {
#ifdef FLASHINFER_CPU
  return MaxActiveBlocks<Params, TILE>();
#else
  static int known[MAX_DEVICES] = {};
  return AskOnce(known, [](int) { return MaxActiveBlocks<Params, TILE>(); });
#endif
}

/// Rows of a tile of the Hopper kernel.
constexpr int HOPPER_TILE = PrefillTileSm90(Params::HEAD_DIM_QK, Params::HEAD_DIM_VO);

/// Rows of the prefill tiles of a fused launch.
constexpr int FUSED_TILE = HAS_PREFILL_SM90 ? HOPPER_TILE : LARGE_PREFILL_TILE;

/// Rows of the tiles of a single request, and the number of their blocks that the current device runs at once.
struct SingleTile {
  int64_t tile, blocks;
};
template <bool HAS_PREFILL>
SingleTile SingleTileBySize(int64_t rows) {
  if constexpr (HAS_PREFILL && HAS_PREFILL_SM90) {
    if (rows > DECODE_TILE) return {HOPPER_TILE, CachedBlocks<HOPPER_TILE>()};
  } else if constexpr (HAS_PREFILL) {
    if constexpr (HasLargePrefillTile(Params::HEAD_DIM_VO)) {
      if (rows > PREFILL_TILE) return {LARGE_PREFILL_TILE, CachedBlocks<LARGE_PREFILL_TILE>()};
    }
    if (rows > DECODE_TILE) return {PREFILL_TILE, CachedBlocks<PREFILL_TILE>()};
  }
  return {DECODE_TILE, CachedBlocks<DECODE_TILE>()};
}
template <bool HAS_PREFILL>
SingleTile SingleTileOf(int64_t rows) {
  if constexpr (!HAS_DECODE_KERNEL) {
    return {HOPPER_TILE, CachedBlocks<HOPPER_TILE>()};
  } else {
    return SingleTileBySize<HAS_PREFILL>(rows);
  }
}

/// Set the tiles that kernels of this module exist for.
template <bool HAS_PREFILL>
void SetTiles(PlanInput& in) {
  in.head_dim_vo = Params::HEAD_DIM_VO;
  if constexpr (HAS_DECODE_KERNEL) {
    in.decode_tile = DECODE_TILE;
    in.decode_blocks = CachedBlocks<DECODE_TILE>();
#ifndef FLASHINFER_CPU
    in.takes_shares = SERVED_BY_DECODE_KERNEL<Params, DECODE_TILE>;
#endif
  }
  if constexpr (HAS_PREFILL && HAS_PREFILL_SM90) {
    in.takes_items = true;
    in.prefill_tiles[0] = HOPPER_TILE;
    in.prefill_blocks[0] = CachedBlocks<HOPPER_TILE>();
    if constexpr (HAS_SHORT_TILES) {
      in.prefill_tiles[1] = SHORT_PREFILL_TILE;
      in.prefill_blocks[1] = CachedBlocks<SHORT_PREFILL_TILE>();
    }
    if constexpr (HAS_FUSED) in.fused_blocks = FusedBlocks<Params, FUSED_TILE>();
  } else if constexpr (HAS_PREFILL) {
    in.prefill_tiles[0] = PREFILL_TILE;
    in.prefill_blocks[0] = CachedBlocks<PREFILL_TILE>();
    if constexpr (HasLargePrefillTile(Params::HEAD_DIM_VO)) {
      in.prefill_tiles[1] = LARGE_PREFILL_TILE;
      in.prefill_blocks[1] = CachedBlocks<LARGE_PREFILL_TILE>();
      if constexpr (HAS_FUSED) in.fused_blocks = FusedBlocks<Params, FUSED_TILE>();
    }
  }
}

/// Input of a batch of requests with equal numbers of rows and pages, whose keys only the device knows.
template <bool HAS_PREFILL>
struct UniformInput {
  PlanInput plan{};

  UniformInput(int64_t batch_size, int64_t q_len, int64_t pages_per_request, int64_t max_kv_len, int64_t num_qo_heads,
               int64_t num_kv_heads, int64_t page_size, bool causal)
      : indptr_(batch_size + 1) {
    for (int64_t b = 0; b <= batch_size; ++b) indptr_[b] = int32_t(b * pages_per_request);
    plan.batch_size = int32_t(batch_size);
    plan.uniform_qo_len = int32_t(q_len);
    plan.kv_indptr = indptr_.data();
    plan.max_kv_len = int32_t(max_kv_len);
    plan.page_size = int32_t(page_size);
    plan.num_qo_heads = int32_t(num_qo_heads);
    plan.num_kv_heads = int32_t(num_kv_heads);
    plan.causal = causal;
    plan.window_left = -1;
    plan.max_rows = int32_t(batch_size * q_len);
    SetTiles<HAS_PREFILL>(plan);
  }

 private:
  std::vector<int32_t> indptr_;
};

inline void CheckInput(const char* op, const PlanInput& in) {
  if (in.num_kv_heads <= 0 || in.num_qo_heads <= 0 || in.num_qo_heads % in.num_kv_heads != 0) {
    FLASHINFER_THROW(ArgumentError) << op << ": num_qo_heads must be a multiple of num_kv_heads = " << in.num_kv_heads
                                    << ", got " << in.num_qo_heads;
  }
  if (in.page_size <= 0) {
    FLASHINFER_THROW(ArgumentError) << op << ": page_size must be at least 1, got " << in.page_size;
  }
  const int32_t first_row = in.qo_indptr != nullptr ? in.qo_indptr[0] : 0;
  if (in.batch_size > 0 && (in.kv_indptr[0] < 0 || first_row < 0)) {
    FLASHINFER_THROW(ArgumentError) << op << ": indptr must begin with 0 or more, got "
                                    << std::min(in.kv_indptr[0], first_row);
  }
  for (int32_t b = 0; b < in.batch_size; ++b) {
    const int64_t pages = int64_t(in.kv_indptr[b + 1]) - in.kv_indptr[b];
    const int64_t rows = in.qo_indptr != nullptr ? int64_t(in.qo_indptr[b + 1]) - in.qo_indptr[b] : 0;
    const int64_t keys = in.kv_lens != nullptr ? in.kv_lens[b] : 0;
    if (rows < 0 || pages < 0 || keys < 0) {
      FLASHINFER_THROW(ArgumentError) << op << ": indptr must not decrease, got request " << b << " with " << rows
                                      << " rows, " << pages << " pages and " << keys << " keys";
    }
    const int64_t last_row = in.qo_indptr != nullptr ? in.qo_indptr[b + 1] : 0;
    if (last_row * in.num_qo_heads > INT32_MAX) {  // what follows counts rows of all heads in 32 bits
      FLASHINFER_THROW(ArgumentError) << op << ": qo_indptr must be at most " << INT32_MAX / in.num_qo_heads
                                      << " (2^31 rows of num_qo_heads = " << in.num_qo_heads << " heads), got "
                                      << last_row << " at request " << b;
    }
    if (pages > 0 && keys > pages * in.page_size) {
      FLASHINFER_THROW(ArgumentError) << op << ": request " << b << " must have at most " << pages * in.page_size
                                      << " keys (its pages), got " << keys;
    }
  }
}

/// Run the planner into per-thread lists that are reused: growing them costs more than planning. Items go to `buffer`
/// if they fit.
inline PlanOutput& RunPlanner(const char* op, const PlanInput& in, char* buffer = nullptr, int64_t bytes = 0) {
  static thread_local PlanOutput out;
  CheckInput(op, in);
  Planner::Use(out, in, buffer, bytes);
  Planner(in, out).Run();
  return out;
}

/// Write the plan, and the indptr arrays if it keeps them.
inline void WritePlan(const PlanInput& in, const PlanOutput& out, char* buffer) {
  Planner::Write(out, buffer);
  if (!in.keeps_indptr) return;
  const size_t bytes = (size_t(in.batch_size) + 1) * sizeof(int32_t);
  std::memcpy(buffer + Planner::IndptrOffset(0, in.batch_size), in.kv_indptr, bytes);
  if (in.qo_indptr != nullptr) std::memcpy(buffer + Planner::IndptrOffset(1, in.batch_size), in.qo_indptr, bytes);
}

inline Numbers WorkspaceSize(const char* op, const PlanInput& in) {
  const PlanInfo& info = RunPlanner(op, in).info;
  return Numbers{info.float_bytes, info.int_bytes};
}

inline void CheckSize(const char* op, const char* name, const TensorView& buffer, int64_t needed) {
  if (ByteSize(buffer) < needed) {
    FLASHINFER_THROW(ArgumentError) << op << ": " << name << " must have at least " << needed
                                    << " bytes (what this plan needs), got " << ByteSize(buffer);
  }
}

#ifndef FLASHINFER_CPU
/// Pinned memory for one plan, and its copy to the int workspace, whose device is current.
class PlanCopy {
 public:
  PlanCopy(const char* op, const TensorView& int_ws) : op_(op), int_ws_(int_ws), staging_(PoolOf(op, int_ws)) {}

  /// Room that a planner may use before the size of its plan is known; null if there is none.
  char* Room() { return staging_.Room(); }
  int64_t room_bytes() const { return staging_.bytes(); }

  /// Let write(at) write a plan of so many bytes, and copy it without waiting.
  template <typename Write>
  void Send(int64_t bytes, const Write& write) {
    char* const from = staging_.Room(bytes);
    if (from == nullptr) {
      FLASHINFER_THROW(RuntimeError) << op_ << ": pinned memory must be available for a plan of " << bytes
                                     << " bytes, got none";
    }
    write(from);
    const Stream stream = get_stream(int_ws_.device());
    CheckStatus(op_, cudaMemcpyAsync(int_ws_.data_ptr(), from, bytes, cudaMemcpyHostToDevice, stream));
    staging_.CopiedBy(stream, bytes);
  }

 private:
  static StagingPool<CudaStaging>& PoolOf(const char* op, const TensorView& int_ws) {
    StagingPool<CudaStaging>* const pool = StagingPoolOf(int_ws.device().device_id);
    if (pool == nullptr) {
      FLASHINFER_THROW(ArgumentError) << op << ": int_workspace_buffer must be on a device below 64, got "
                                      << int_ws.device();
    }
    return *pool;
  }

  const char* const op_;
  const TensorView int_ws_;
  Staging<CudaStaging> staging_;
};
#endif

inline Numbers MakePlan(const char* op, PlanInput in, const PlanBuffers& to) {
  in.float_bytes = ByteSize(to.float_ws);
#ifdef FLASHINFER_CPU
  const PlanOutput& out = RunPlanner(op, in);
#else
  PlanCopy copy(op, to.int_ws);
  char* const room = copy.Room();
  const PlanOutput& out = RunPlanner(op, in, room, copy.room_bytes());
#endif
  const PlanInfo& info = out.info;
  CheckSize(op, "float_workspace_buffer", to.float_ws, info.float_bytes);
  CheckSize(op, "int_workspace_buffer", to.int_ws, info.int_bytes);
#ifdef FLASHINFER_CPU
  WritePlan(in, out, to.int_ws.data_ptr<char>());
#else
  copy.Send(info.int_bytes, [&](char* at) { WritePlan(in, out, at); });
#endif
  int64_t numbers[PLAN_INFO_SIZE];
  info.ToArray(numbers);
  return Numbers(numbers, numbers + PLAN_INFO_SIZE);
}

}  // namespace attention
}  // namespace flashinfer
