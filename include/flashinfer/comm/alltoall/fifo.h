// SPDX-License-Identifier: Apache-2.0
// Rows sent from any rank to any rank through first-in-first-out buffers: the two-sided exchange of tokens.
//   output of rank q [recv_indices[j]] = input of rank p [send_indices[i]]
// for i in the part of q of p's send_indices and j in the part of p of q's recv_indices, in the same order; the inclusive
// sums bound the parts. Memory of a rank: the head, counters by peer, then a buffer of FIFO_DEPTH slots for each source. A
// slot has as many rows as fit. The sender counts the slots that it filled in the memory of the receiver, who counts those
// it took in the memory of the sender; so each pair of ranks goes on by itself, and ranks need no common number of rounds.
#pragma once
#include "params.h"

namespace flashinfer {
namespace comm {

constexpr int FIFO_DEPTH = 4;
constexpr int64_t FIFO_SLOT_BYTES = 128 << 10;

/// Offsets of the counters in the memory of a rank, MAX_EP words each; `sent` and `got` are read by their rank only.
constexpr int64_t FIFO_FILLED = 128, FIFO_TAKEN = 384, FIFO_SENT = 640, FIFO_GOT = 896, FIFO_SLOTS = 1152;

struct FifoParams {
  ExchangeTable table;  ///< meta: kDispatchFlags has FIFO_FILLED, kCombineFlags has FIFO_TAKEN
  ExchangeWait wait;
  const char* input;
  char* output;
  int64_t row_bytes;  ///< a multiple of 16, at most FIFO_SLOT_BYTES
  int64_t input_rows, output_rows;
  const int32_t *send_sums, *send_indices, *recv_sums, *recv_indices;
  int64_t sends, receives;  ///< lengths of the indices
  int64_t* progress;        ///< CPU: rows sent to each peer, then rows received from each

  FLASHINFER_HD char* Slot(int owner, int source, uint32_t number) const {
    return table.Of(owner) + FIFO_SLOTS + (int64_t(source) * FIFO_DEPTH + number % FIFO_DEPTH) * FIFO_SLOT_BYTES;
  }
  FLASHINFER_HD uint32_t* Counter(int r, int64_t which, int peer) const {
    return reinterpret_cast<uint32_t*>(table.Of(r) + which) + peer;
  }
  FLASHINFER_HD int64_t RowsPerSlot() const { return FIFO_SLOT_BYTES / row_bytes; }
};

/// First and last index of the part of a peer, within the `most` indices that there are.
struct FifoPart {
  int64_t begin, end;
  FLASHINFER_HD FifoPart(const int32_t* sums, int peer, int64_t most)
      : begin(peer == 0 ? 0 : sums[peer - 1]), end(sums[peer]) {
    begin = begin < 0 ? 0 : begin;
    end = end > most ? most : end;
  }
};

/// Entry of the CUDA kernel (fifo.cuh). That of the CPU is MoeCommOnHost (fifo_cpu.h).
Status MoeComm(const FifoParams& p, Stream stream);

}  // namespace comm
}  // namespace flashinfer
