// SPDX-License-Identifier: Apache-2.0
// plan() of the batch modules: checks of the host arrays, the planner, one copy to the int workspace.
#pragma once
#include "attention_arguments.h"
// clang-format off
#include <flashinfer/attention/entry.h>
#include <flashinfer/attention/pair.h>

#ifndef FLASHINFER_CPU
#include <algorithm>
#include <map>
#include <mutex>
#endif
// clang-format on

namespace flashinfer {
namespace attention {

/// Buffers that a plan goes to.
struct PlanBuffers {
  TensorView float_ws, int_ws, pinned;
};

inline int64_t ByteSize(const TensorView& t) { return t.numel() * ((t.dtype().bits * t.dtype().lanes + 7) / 8); }

/// Address of int32 numbers on the host, at least `count` of them.
inline const int32_t* HostArray(const char* op, const char* name, const TensorView& t, int64_t count) {
  if (t.device().device_type != kDLCPU && t.device().device_type != kDLCUDAHost) {
    TVM_FFI_THROW(ArgumentError) << op << ": " << name << " is on " << DeviceName(t.device()) << ", expected cpu";
  }
  Expect(op, name, t).dtype({dl_int32}).contiguous();
  if (t.numel() < count) {
    TVM_FFI_THROW(ArgumentError) << op << ": " << name << " has " << t.numel() << " elements, expected at least "
                                 << count;
  }
  return t.data_ptr<int32_t>();
}

#ifndef FLASHINFER_CPU
constexpr int MAX_DEVICES = 64;

/// ask(device) for the current device. The answer is kept in `known`, static memory of the caller; 0: not asked yet.
template <typename Ask>
int AskOnce(int (&known)[MAX_DEVICES], const Ask& ask) {
  int device = 0;
  cudaGetDevice(&device);
  if (device < 0 || device >= MAX_DEVICES) return ask(device);
  if (known[device] == 0) known[device] = ask(device);
  return known[device];
}

/// Bytes of the current device's L2 cache.
inline int64_t CacheBytes() {
  static int known[MAX_DEVICES] = {};
  return AskOnce(known, [](int device) {
    int bytes = 0;
    cudaDeviceGetAttribute(&bytes, cudaDevAttrL2CacheSize, device);
    return bytes;
  });
}
#endif

/// Blocks that the current device runs at once.
template <int TILE>
int CachedBlocks() {
#ifdef FLASHINFER_CPU
  return ResidentBlocks<Params, TILE>();
#else
  static int known[MAX_DEVICES] = {};
  return AskOnce(known, [](int) { return ResidentBlocks<Params, TILE>(); });
#endif
}

/// The tiles that kernels of this module exist for.
template <bool HAS_WIDE>
void SetTiles(PlanInput& in) {
  in.head_dim_vo = Params::HEAD_DIM_VO;
  in.narrow_tile = NARROW_TILE;
  in.narrow_blocks = CachedBlocks<NARROW_TILE>();
#ifndef FLASHINFER_CPU
  in.takes_shares = SERVED_BY_NARROW<Params, NARROW_TILE>;
#endif
  if constexpr (HAS_WIDE) {
    in.wide_tiles[0] = WIDE_TILE;
    in.wide_blocks[0] = CachedBlocks<WIDE_TILE>();
    if constexpr (HasWidestTile(Params::HEAD_DIM_VO)) {
      in.wide_tiles[1] = WIDEST_TILE;
      in.wide_blocks[1] = CachedBlocks<WIDEST_TILE>();
      if constexpr (HAS_TOGETHER) in.paired_blocks = PairBlocks<Params, WIDEST_TILE>();
    }
  }
}

/// Requests of equal numbers of rows and pages, whose keys only the device knows.
template <bool HAS_WIDE>
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
    SetTiles<HAS_WIDE>(plan);
  }

 private:
  std::vector<int32_t> indptr_;
};

inline void CheckInput(const char* op, const PlanInput& in) {
  auto fail = [&](const std::string& text) { TVM_FFI_THROW(ArgumentError) << op << ": " << text; };
  if (in.num_kv_heads <= 0 || in.num_qo_heads <= 0 || in.num_qo_heads % in.num_kv_heads != 0) {
    fail("num_qo_heads = " + std::to_string(in.num_qo_heads) +
         ", expected a multiple of num_kv_heads = " + std::to_string(in.num_kv_heads));
  }
  if (in.page_size <= 0) fail("page_size = " + std::to_string(in.page_size) + ", expected at least 1");
  const int32_t first_row = in.qo_indptr != nullptr ? in.qo_indptr[0] : 0;
  if (in.batch_size > 0 && (in.kv_indptr[0] < 0 || first_row < 0)) {
    fail("indptr begins with " + std::to_string(std::min(in.kv_indptr[0], first_row)) + ", expected 0 or more");
  }
  for (int32_t b = 0; b < in.batch_size; ++b) {
    const int64_t pages = int64_t(in.kv_indptr[b + 1]) - in.kv_indptr[b];
    const int64_t rows = in.qo_indptr != nullptr ? int64_t(in.qo_indptr[b + 1]) - in.qo_indptr[b] : 0;
    const int64_t keys = in.kv_lens != nullptr ? in.kv_lens[b] : 0;
    if (rows < 0 || pages < 0 || keys < 0) {
      fail("request " + std::to_string(b) + " has " + std::to_string(rows) + " rows, " + std::to_string(pages) +
           " pages and " + std::to_string(keys) + " keys, expected none to be negative (indptr must not decrease)");
    }
    if (pages > 0 && keys > pages * in.page_size) {
      fail("request " + std::to_string(b) + " has " + std::to_string(keys) + " keys, expected at most " +
           std::to_string(pages * in.page_size) + " (its pages)");
    }
  }
}

/// Plan into the lists that are kept for it: growing them costs more than planning. Items go to `buffer` if they fit.
inline PlanOutput& RunPlanner(const char* op, const PlanInput& in, char* buffer = nullptr, int64_t bytes = 0) {
  static thread_local PlanOutput out;
  CheckInput(op, in);
  Planner::Use(out, in, buffer, bytes);
  Planner(in, out).Run();
  return out;
}

/// The plan, with what it has room for.
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
    TVM_FFI_THROW(ArgumentError) << op << ": " << name << " has " << ByteSize(buffer) << " bytes, expected at least "
                                 << needed << " (what this plan needs)";
  }
}

#ifndef FLASHINFER_CPU
/// Halves of a pinned buffer, written in turn: one is free again once the copy of the plan before the last has run.
/// Waits for that one only; in a serving loop it is long past.
struct PinnedHalves {
  cudaEvent_t copied[2] = {};
  bool is_free[2] = {true, true};
  int turn = 0;

  void WaitFor(const char* op, int half) {
    if (!is_free[half]) CheckStatus(op, cudaEventSynchronize(copied[half]));
    is_free[half] = true;
  }
  void Record(const char* op, int half, Stream stream) {
    is_free[half] = false;
    CheckStatus(op, cudaEventRecord(copied[half], stream));
  }
};

inline PinnedHalves& HalvesOf(const void* pinned, int device) {
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, PinnedHalves> all;
  std::lock_guard<std::mutex> lock(mutex);
  PinnedHalves& halves = all[{pinned, device}];
  for (cudaEvent_t& event : halves.copied) {
    if (event == nullptr) cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
  }
  return halves;
}

inline int64_t HalfSize(const TensorView& pinned) { return ByteSize(pinned) / 32 * 16; }

/// The half that CopyPlan takes next, free to be written.
inline char* FreeHalf(const char* op, const PlanBuffers& to) {
  PinnedHalves& halves = HalvesOf(to.pinned.data_ptr(), to.int_ws.device().device_id);
  halves.WaitFor(op, halves.turn);
  return to.pinned.data_ptr<char>() + halves.turn * HalfSize(to.pinned);
}

/// Write a plan of so many bytes to a half of the pinned buffer, or to all of it if it is long, and copy it without
/// waiting.
template <typename Write>
void CopyPlan(const char* op, int64_t bytes, const Write& write, const PlanBuffers& to) {
  const int64_t half = HalfSize(to.pinned);
  PinnedHalves& halves = HalvesOf(to.pinned.data_ptr(), to.int_ws.device().device_id);
  const bool is_long = bytes > half;
  const int turn = is_long ? 0 : halves.turn;
  halves.WaitFor(op, turn);
  if (is_long) halves.WaitFor(op, 1);
  char* const from = to.pinned.data_ptr<char>() + turn * half;
  write(from);
  const Stream stream = get_stream(to.int_ws.device());
  CheckStatus(op, cudaMemcpyAsync(to.int_ws.data_ptr(), from, bytes, cudaMemcpyHostToDevice, stream));
  halves.Record(op, turn, stream);
  if (is_long) halves.Record(op, 1, stream);
  halves.turn = 1 - turn;
}
#endif

inline Numbers MakePlan(const char* op, PlanInput in, const PlanBuffers& to) {
  in.float_bytes = ByteSize(to.float_ws);
#ifdef FLASHINFER_CPU
  const PlanOutput& out = RunPlanner(op, in);
#else
  const PlanOutput& out = RunPlanner(op, in, FreeHalf(op, to), HalfSize(to.pinned));
#endif
  const PlanInfo& info = out.info;
  CheckSize(op, "float_workspace_buffer", to.float_ws, info.float_bytes);
  CheckSize(op, "int_workspace_buffer", to.int_ws, info.int_bytes);
#ifdef FLASHINFER_CPU
  WritePlan(in, out, to.int_ws.data_ptr<char>());
#else
  CheckSize(op, "pinned int_workspace_buffer", to.pinned, info.int_bytes);
  CopyPlan(op, info.int_bytes, [&](char* at) { WritePlan(in, out, at); }, to);
#endif
  int64_t numbers[PLAN_INFO_SIZE];
  info.ToArray(numbers);
  return Numbers(numbers, numbers + PLAN_INFO_SIZE);
}

}  // namespace attention
}  // namespace flashinfer
