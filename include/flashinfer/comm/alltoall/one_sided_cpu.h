// SPDX-License-Identifier: Apache-2.0
// One-sided exchange of tokens of CPU tensors over shared memory; what is exchanged and why two flags suffice: params.h.
// The same layout, slots and order of addition as on CUDA. A call that waits returns after a while, so that Python handles
// signals and looks at the clock, and is resumed.
//   test  pytest tests/comm/test_alltoall.py
#pragma once
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>

#include "../../cpu/parallel.h"
#include "../../cpu/vec.h"
#include "params.h"

namespace flashinfer {
namespace comm {

/// Outcome of a call: done, or a number that Python turns into an exception or a further wait.
constexpr int64_t EXCHANGE_DONE = -1;     // 0 to 63: still waiting for that rank
constexpr int64_t EXCHANGE_GAVE_UP = 64;  // + rank: a peer gave up waiting for that rank
constexpr int64_t EXCHANGE_DIFFER = 128;  // + rank: that rank asked for something else

inline void StoreFlag(uint32_t* flag, uint32_t x) { __atomic_store_n(flag, x, __ATOMIC_RELEASE); }
inline uint32_t LoadFlag(const uint32_t* flag) { return __atomic_load_n(flag, __ATOMIC_ACQUIRE); }

inline void SendFlags(const ExchangeTable& t, Meta flags, uint32_t call) {
  for (int r = 0; r < t.world; ++r) {
    if (t.IsActive(r)) StoreFlag(t.At<uint32_t>(r, flags) + t.rank, call);
  }
}

/// Wait for the flags of all active ranks.
inline int64_t WaitForFlags(const ExchangeTable& t, Meta flags, uint32_t call, int64_t wait_us) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::microseconds(wait_us);
  for (int r = 0; r < t.world; ++r) {
    if (!t.IsActive(r)) continue;
    const uint32_t* const flag = t.At<uint32_t>(t.rank, flags) + r;
    for (uint32_t polls = 1; int32_t(LoadFlag(flag) - call) < 0; ++polls) {
      if (polls % 64 != 0) continue;
      const uint32_t late = LoadFlag(&t.Head(t.rank)->aborted);
      if (late != 0) return EXCHANGE_GAVE_UP + late - 1;
      if (std::chrono::steady_clock::now() > deadline) return r;
      sched_yield();  // there may be fewer cores than ranks
    }
  }
  return EXCHANGE_DONE;
}

inline void SendTokens(const DispatchParams& p, uint32_t call) {
  const ExchangeTable& t = p.table;
  int32_t* const sent = t.At<int32_t>(t.rank, kSendCounters);
  std::memset(sent, 0, 4 * t.world);
  for (int64_t token = 0; token < p.tokens; ++token) {
    uint64_t left = t.active;
    for (int k = 0; k < p.top_k; ++k) {
      const int64_t at = token * p.top_k + k;
      const int32_t expert = p.experts[at];
      int32_t target = -1, slot = -1;
      if (uint32_t(expert) < uint32_t(p.num_experts)) target = RankOfExpert(expert, p.num_experts, t.world);
      if (target >= 0 && (left >> target & 1) == 0) target = -1;  // not active, or the token is there already
      if (target >= 0) {
        left &= ~(uint64_t{1} << target);
        slot = sent[target]++;
        for (int i = 0; i < p.num_payloads; ++i) {
          const ExchangePayload& payload = p.payloads[i];
          const int64_t row = int64_t(t.rank) * p.request.rows + slot;
          std::memcpy(t.Of(target) + payload.offset + row * payload.row_bytes, payload.rows + token * payload.row_bytes,
                      payload.row_bytes);
        }
      }
      t.At<int32_t>(t.rank, kTargetRanks)[at] = target;
      t.At<int32_t>(t.rank, kSendIndices)[at] = slot;
    }
  }
  for (int r = 0; r < t.world; ++r) {
    if (!t.IsActive(r)) {
      t.At<int32_t>(t.rank, kRecvCounters)[r] = 0;
      continue;
    }
    t.At<int32_t>(r, kRecvCounters)[t.rank] = sent[r];
    *t.Request(r, t.rank, call) = p.request;
    const int64_t experts = t.meta[kEplbExperts];
    if (p.eplb_stats != nullptr) {
      std::memcpy(t.At<int32_t>(r, kEplbStats) + t.rank * experts, p.eplb_stats, 4 * experts);
    }
  }
}

inline int64_t DispatchOnHost(const DispatchParams& p) {
  const ExchangeTable& t = p.table;
  ExchangeHead* const head = t.Head(t.rank);
  const uint32_t call = head->call + 1;
  if (!p.wait.resume) {
    SendTokens(p, call);
    SendFlags(t, kDispatchFlags, call);
  }
  const int64_t waiting = WaitForFlags(t, kDispatchFlags, call, p.wait.wait_us);
  if (waiting != EXCHANGE_DONE) return waiting;
  head->tokens = uint32_t(p.tokens);
  head->call = call;
  for (int r = 0; r < t.world; ++r) {
    const ExchangeRequest& other = *t.Request(t.rank, r, call);
    if (t.IsActive(r) && (other.rows != p.request.rows || other.layout != p.request.layout)) return EXCHANGE_DIFFER + r;
  }
  return EXCHANGE_DONE;
}

inline Status SanitizeExpertIds(const SanitizeParams& p, Stream) {
  const int32_t* const counts = p.table.At<int32_t>(p.table.rank, kRecvCounters);
  for (int source = 0; source < p.table.world; ++source) {
    for (int64_t i = counts[source] * p.top_k; i < p.rows * p.top_k; ++i) {
      p.ids[source * p.rows * p.top_k + i] = p.invalid;
    }
  }
  return 0;
}

template <typename T>
void ShowRows(const CombineParams<T>& p) {
  const ExchangeTable& t = p.table;
  const int32_t* const counts = t.At<int32_t>(t.rank, kRecvCounters);
  for (int64_t row = 0; row < p.rows * t.world; ++row) {
    if (row % p.rows >= counts[row / p.rows]) continue;
    T* const to = reinterpret_cast<T*>(t.Of(t.rank) + p.offset) + row * p.hidden;
    const T* const from = p.payload == nullptr ? to : p.payload + row * p.hidden;
    if (p.is_e4m3) {
      float8_e4m3_t* const small = reinterpret_cast<float8_e4m3_t*>(to);
      cpu::ForEachVec(p.hidden,
                      [&](int64_t i, auto lanes) { cpu::Store(small + i, cpu::Load(from + i, lanes), lanes); });
    } else if (from != to) {
      std::memcpy(to, from, p.hidden * sizeof(T));
    }
  }
}

template <typename T>
int64_t CombineOnHost(const CombineParams<T>& p) {
  const ExchangeTable& t = p.table;
  const uint32_t call = t.Head(t.rank)->call;
  if (!p.wait.resume) {
    if (p.payload != nullptr || p.is_e4m3) ShowRows(p);
    SendFlags(t, kCombineFlags, call);
  }
  const int64_t waiting = WaitForFlags(t, kCombineFlags, call, p.wait.wait_us);
  if (waiting != EXCHANGE_DONE) return waiting;
  cpu::ParallelFor(p.tokens, p.hidden * p.top_k, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const T* rows[MAX_TOP_K];
      int count = 0;
      for (int k = 0; k < p.top_k; ++k) {
        const int target = t.At<int32_t>(t.rank, kTargetRanks)[token * p.top_k + k];
        if (target < 0 || !t.IsActive(target)) continue;
        const int64_t row = t.rank * p.rows + t.At<int32_t>(t.rank, kSendIndices)[token * p.top_k + k];
        rows[count++] = reinterpret_cast<const T*>(t.Of(target) + p.offset) + row * p.hidden;
      }
      cpu::ForEachVec(p.hidden, [&](int64_t i, auto lanes) {
        cpu::Vec sum{};
        for (int k = 0; k < count; ++k) {
          sum += p.is_e4m3 ? cpu::Load(reinterpret_cast<const float8_e4m3_t*>(rows[k]) + i, lanes)
                           : cpu::Load(rows[k] + i, lanes);
        }
        cpu::Store(p.out + token * p.hidden + i, sum, lanes);
      });
    }
  });
  return EXCHANGE_DONE;
}

template <typename T>
void MergeRow(const DecodeCpParams& p, uint32_t call, int64_t row) {
  const ExchangeTable& t = p.table;
  float weights[MAX_EP], most = -INFINITY, total = 0;
  for (int source = 0; source < t.world; ++source) {
    const float* const all = reinterpret_cast<const float*>(p.Slot(t.rank, source, call) + p.rows * p.o_bytes);
    const float lse = all[row] * (p.is_base_e ? 1.442695040888963f : 1.f);
    weights[source] = lse < INFINITY ? lse : -INFINITY;  // NaN as well
    most = std::max(most, weights[source]);
  }
  for (int source = 0; source < t.world; ++source) {
    weights[source] = most > -INFINITY ? std::exp2(weights[source] - most) : 0.f;
    total += weights[source];
  }
  cpu::ForEachVec(p.o_bytes / int64_t(sizeof(T)), [&](int64_t i, auto lanes) {
    cpu::Vec sum{};
    for (int source = 0; source < t.world; ++source) {
      if (weights[source] == 0.f) continue;
      const T* const o = reinterpret_cast<const T*>(p.Slot(t.rank, source, call) + row * p.o_bytes);
      sum += cpu::Load(o + i, lanes) * (weights[source] / total);
    }
    cpu::Store(reinterpret_cast<T*>(p.out_o + row * p.o_bytes) + i, sum, lanes);
  });
}

/// Digest of the call of rank `source` in the memory of `owner`, behind the flags; two calls have room, by their parity.
inline uint16_t* DecodeCpRequest(const ExchangeTable& t, int owner, int source, uint32_t call) {
  char* const behind = t.Of(owner) + t.meta[kDispatchFlags] + 4 * t.world;
  return reinterpret_cast<uint16_t*>(behind) + 2 * source + call % 2;
}

template <typename T>
int64_t DecodeCpOnHost(const DecodeCpParams& p) {
  const ExchangeTable& t = p.table;
  const uint32_t call = t.Head(t.rank)->call + 1;
  if (!p.wait.resume) {
    for (int64_t part = 0; part < p.rows * t.world; ++part) {
      const int64_t row = part / t.world;
      char* const slot = p.Slot(int(part % t.world), t.rank, call);
      std::memcpy(slot + row * p.o_bytes, p.o + part * p.o_bytes, p.o_bytes);
      std::memcpy(slot + p.rows * p.o_bytes + row * p.stats_bytes, p.stats + part * p.stats_bytes, p.stats_bytes);
    }
    for (int r = 0; r < t.world; ++r) *DecodeCpRequest(t, r, t.rank, call) = p.request;
    SendFlags(t, kDispatchFlags, call);
  }
  const int64_t waiting = WaitForFlags(t, kDispatchFlags, call, p.wait.wait_us);
  if (waiting != EXCHANGE_DONE) return waiting;
  for (int r = 0; r < t.world; ++r) {
    if (*DecodeCpRequest(t, t.rank, r, call) == p.request) continue;
    t.Head(t.rank)->call = call;
    return EXCHANGE_DIFFER + r;
  }
  for (int64_t row = 0; row < p.rows; ++row) {
    if (p.out_stats == nullptr) {
      MergeRow<T>(p, call, row);
      continue;
    }
    for (int source = 0; source < t.world; ++source) {
      const int64_t part = row * t.world + source;
      const char* const slot = p.Slot(t.rank, source, call);
      std::memcpy(p.out_o + part * p.o_bytes, slot + row * p.o_bytes, p.o_bytes);
      std::memcpy(p.out_stats + part * p.stats_bytes, slot + p.rows * p.o_bytes + row * p.stats_bytes, p.stats_bytes);
    }
  }
  t.Head(t.rank)->call = call;
  return EXCHANGE_DONE;
}

}  // namespace comm
}  // namespace flashinfer
