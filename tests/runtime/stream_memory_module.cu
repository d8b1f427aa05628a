// SPDX-License-Identifier: Apache-2.0
// Memory of streams over a runtime that a test directs, for test_stream_memory.py.
#include "stream_memory.h"

namespace {

int64_t memory_left = 0;

struct FakeRuntime {
  using Stream = int64_t;
  static bool FindId(Stream stream, unsigned long long* id) {
    *id = stream;
    return stream >= 0;
  }
  static void* Allocate(int64_t bytes) {
    if (bytes > memory_left) return nullptr;
    memory_left -= bytes;
    return new char[bytes];
  }
  static bool Clear(void*, int64_t, Stream) { return true; }
};

using Memory = flashinfer::StreamMemory<FakeRuntime>;
Memory* memory = nullptr;

void Reset(int64_t bytes) {
  memory = new Memory;
  memory_left = bytes;
}

/// Return a place to be given back, 0 if there is none.
int64_t Lend(int64_t stream, int64_t bytes) { return reinterpret_cast<int64_t>(memory->Lend(stream, bytes)); }
int64_t Address(int64_t place) { return reinterpret_cast<int64_t>(reinterpret_cast<Memory::Place*>(place)->scratch); }
int64_t Bytes(int64_t place) { return reinterpret_cast<Memory::Place*>(place)->bytes; }
void GiveBack(int64_t place) { memory->GiveBack(reinterpret_cast<Memory::Place*>(place)); }
int64_t Counters(int64_t stream) { return reinterpret_cast<int64_t>(memory->Counters(stream)); }

}  // namespace

FLASHINFER_EXPORT(reset, Reset)
FLASHINFER_EXPORT(lend, Lend)
FLASHINFER_EXPORT(address, Address)
FLASHINFER_EXPORT(bytes, Bytes)
FLASHINFER_EXPORT(give_back, GiveBack)
FLASHINFER_EXPORT(counters, Counters)
