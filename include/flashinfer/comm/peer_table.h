// SPDX-License-Identifier: Apache-2.0
// Table of the peers of a kernel: an address per rank. Who made the memory visible is of no concern here.
#pragma once
#include <cstdint>

namespace flashinfer {
namespace comm {

constexpr int MAX_RANKS = 16;

struct PeerTable {
  char* memory[MAX_RANKS];  ///< the shared memory of each rank, as addresses of this process and device
  int rank, world;
};

}  // namespace comm
}  // namespace flashinfer
