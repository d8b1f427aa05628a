// SPDX-License-Identifier: Apache-2.0
// One-sided exchange of tokens between the ranks of an expert-parallel layer.
//   dispatch  every rank stores each of its tokens once into the memory of each rank that has experts of it: row
//             [own rank][slot] of that rank's receive buffer, slots in order of token
//   combine   every rank reads the rows of its tokens from the memory of those ranks and adds them in fp32, in the order
//             of the token's experts
// The memory of a rank is its row of one table, at the same offsets on all ranks (Offsets); words that peers write are
// flags with the number of the exchange. No third flag is needed: a peer overwrites a receive buffer in its next dispatch
// only, behind the combine flags of all ranks, and rows that are being read only behind all ranks' next dispatch flags. So
// both calls wait for the flags of ALL ranks, of those without tokens for this one too.
// Results lie behind the receive buffers of the largest call: tokens of a next call with more rows never reach results
// that a slow rank still reads.
#pragma once
#include <cstdint>

#include "../../backend.h"
#include "../../host_device.h"

namespace flashinfer {
namespace comm {

constexpr int MAX_EP = 64, MAX_TOP_K = 22, MAX_PAYLOADS = 6;

/// Head of the memory of a rank. Zero bytes are its first state.
struct ExchangeHead {
  uint32_t call;     ///< dispatches that are done
  uint32_t tokens;   ///< tokens of the last dispatch
  int32_t arrived;   ///< CTAs of the running kernel that are done
  uint32_t aborted;  ///< written by a peer that gave up: 1 + the rank it waited for
};

/// The sizes that a rank sends to each peer with its flag: ranks that do not agree are found by them.
struct ExchangeRequest {
  uint32_t rows;    ///< rows of a receive buffer per source
  uint32_t layout;  ///< digest of sizes and types of the payloads
};

/// Entries of the vector of offsets; Python knows them by their published names.
enum Meta : int {
  kFlagVal,
  kLocalTokenCounter,
  kSendCounters,
  kRecvCounters,
  kDispatchFlags,
  kCombineFlags,
  kTargetRanks,
  kSendIndices,
  kEplbStats,
  kPayload,
  kRequests,
  kMaxTokens,  ///< no offset: most tokens of a rank
  kEplbExperts,
  kMetaCount
};

/// Fill the offsets into the memory of a rank and return the bytes in front of the payloads, a multiple of 128.
inline int64_t ExchangeOffsets(int64_t ranks, int64_t max_tokens, int64_t eplb_experts, int64_t (&meta)[kMetaCount]) {
  int64_t at = 128;
  const auto take = [&](int64_t bytes) {
    const int64_t begin = at;
    at += (bytes + 127) / 128 * 128;
    return begin;
  };
  meta[kFlagVal] = 0;
  meta[kLocalTokenCounter] = 4;
  meta[kSendCounters] = take(4 * ranks);
  meta[kRecvCounters] = take(4 * ranks);
  meta[kDispatchFlags] = take(4 * ranks);
  meta[kCombineFlags] = take(4 * ranks);
  meta[kRequests] = take(2 * int64_t(sizeof(ExchangeRequest)) * ranks);
  meta[kTargetRanks] = take(4 * max_tokens * MAX_TOP_K);
  meta[kSendIndices] = take(4 * max_tokens * MAX_TOP_K);
  meta[kEplbStats] = take(4 * ranks * eplb_experts);
  meta[kPayload] = at;
  meta[kMaxTokens] = max_tokens;
  meta[kEplbExperts] = eplb_experts;
  return at;
}

struct ExchangeTable {
  char* memory;    ///< the memory of rank 0
  int64_t stride;  ///< bytes from a rank's memory to the next rank's
  int32_t rank, world;
  uint64_t active;  ///< bit r: rank r takes part
  int64_t meta[kMetaCount];

  FLASHINFER_HD char* Of(int r) const { return memory + r * stride; }
  FLASHINFER_HD ExchangeHead* Head(int r) const { return reinterpret_cast<ExchangeHead*>(Of(r)); }
  template <typename T>
  FLASHINFER_HD T* At(int r, Meta what) const {
    return reinterpret_cast<T*>(Of(r) + meta[what]);
  }
  /// Request of rank `source` to rank `r` in a call. Two calls have room: where ranks disagree, one that raises may enter
  /// the next call before another has compared.
  FLASHINFER_HD ExchangeRequest* Request(int r, int source, uint32_t call) const {
    return At<ExchangeRequest>(r, kRequests) + (call & 1) * world + source;
  }
  FLASHINFER_HD bool IsActive(int r) const { return active >> r & 1; }
};

/// Experts of a rank are neighbours; the first `experts % world` ranks have one more than the others.
FLASHINFER_HD int RankOfExpert(int expert, int experts, int world) {
  const int each = experts / world, extra = experts % world, of_larger = extra * (each + 1);
  return expert < of_larger ? expert / (each + 1) : extra + (expert - of_larger) / each;
}

struct ExchangePayload {
  const char* rows;   ///< rows of the own tokens
  int64_t row_bytes;  ///< any number
  int64_t offset;     ///< offset of the receive buffer [world][rows]
};

/// Limits of a call's wait, and the words that it leaves to the next call.
struct ExchangeWait {
  bool resume;      ///< CPU: go on waiting in the call that has begun
  int64_t wait_us;  ///< CPU: return after this time, to be resumed
  int32_t max_blocks;
  uint64_t timeout_ns;  ///< CUDA, 0: wait forever
  uint32_t* record;     ///< CUDA: host memory, what the watchdog found
  bool enable_pdl;
};

struct DispatchParams {
  ExchangeTable table;
  ExchangeWait wait;
  const int32_t* experts;  ///< [tokens][top_k]; numbers outside of [0, num_experts) have no rank
  int32_t tokens, top_k, num_experts;
  ExchangeRequest request;  ///< its `rows`: rows of a receive buffer per source
  int32_t num_payloads;
  ExchangePayload payloads[MAX_PAYLOADS];
  const int32_t* eplb_stats;  ///< null, or statistics of the experts on this rank, for every rank
};

struct SanitizeParams {
  ExchangeTable table;
  int32_t* ids;  ///< [world][rows][top_k]
  int64_t rows, top_k;
  int32_t invalid;
  bool enable_pdl;
};

template <typename T>
struct CombineParams {
  ExchangeTable table;
  ExchangeWait wait;
  const T* payload;  ///< [world][rows][hidden]; null: it is in place
  int64_t offset;    ///< offset of the rows in the memory of a rank
  int64_t rows, hidden;
  int32_t tokens, top_k;
  bool is_e4m3;  ///< rows travel as e4m3; each begins where the row of T would
  T* out;        ///< [tokens][hidden]
};

/// Entries of the CUDA kernels (dispatch.cuh, combine.cuh). Those of the CPU return an outcome (one_sided_cpu.h).
Status Dispatch(const DispatchParams& p, Stream stream);
Status SanitizeExpertIds(const SanitizeParams& p, Stream stream);
template <typename T>
Status Combine(const CombineParams<T>& p, Stream stream);

/// Exchange of partial attention between the ranks of a context-parallel group (decode_cp.cuh): out[row][p] =
/// o of rank p [row][own rank], and statistics alike; or the partial results merged by their LSE. Memory of a rank: the
/// head, a flag per source, slots [parity of the call][source], each with `rows` rows of o and then as many of statistics.
struct DecodeCpParams {
  ExchangeTable table;  ///< its meta[kDispatchFlags] is the offset of the flags
  ExchangeWait wait;
  const char *o, *stats;               ///< [rows][world][...]
  char *out_o, *out_stats;             ///< the same; merged: out_o [rows][...], out_stats null
  int64_t rows, o_bytes, stats_bytes;  ///< sizes of a part
  int64_t slots, slot_bytes;           ///< offset of the slots, and bytes of one
  bool is_base_e;
  uint16_t request;  ///< CPU: digest of the sizes of the whole exchange; ranks that differ raise

  FLASHINFER_HD char* Slot(int owner, int source, uint32_t call) const {
    return table.Of(owner) + slots + ((call & 1) * table.world + source) * slot_bytes;
  }
};

template <typename T>
Status DecodeCpExchange(const DecodeCpParams& p, Stream stream);

/// Stages of the watchdog's record.
enum Stage : uint32_t { kWaitDispatch = 1, kWaitCombine = 2, kRequestsDiffer = 3 };

}  // namespace comm
}  // namespace flashinfer
