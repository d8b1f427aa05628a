// SPDX-License-Identifier: Apache-2.0
// The pool of pinned blocks over streams and events that a test moves on by hand, for test_staging.py.
#include "attention_staging.h"
#include "tvm_ffi_utils.h"
// clang-format off
#include <map>
#include <stdexcept>
// clang-format on

using namespace flashinfer::attention;

namespace {

/// Work of a stream is numbered; `done` says how much of it has run.
struct FakeStream {
  int64_t given = 0, done = 0;
  bool is_capturing = false;
};
std::map<int64_t, FakeStream> streams;
int64_t waits = 0, queries = 0, memory_left = 0;

struct FakeEvent {
  int64_t stream = 0, work = 0;
};

struct FakeRuntime {
  using Event = FakeEvent*;
  using Stream = int64_t;
  struct AnyCall {
    AnyCall() {}
  };
  static bool Allocate(char*& data, int64_t bytes, Event& event) {
    if (bytes > memory_left) return false;
    memory_left -= bytes;
    data = new char[bytes];
    event = new FakeEvent;
    return true;
  }
  static bool IsDone(Event event) {
    ++queries;
    return streams[event->stream].done >= event->work;
  }
  static void Wait(Event event) {
    ++waits;
    FakeStream& stream = streams[event->stream];
    stream.done = std::max(stream.done, event->work);
  }
  static bool Record(Event event, Stream stream) {
    *event = {stream, ++streams[stream].given};
    return true;
  }
  static bool IsCapturing(Stream stream) { return streams[stream].is_capturing; }
};

using Pool = StagingPool<FakeRuntime>;
Pool* pool = nullptr;
std::map<int64_t, Staging<FakeRuntime>*> plans;

void Reset(int64_t memory) {
  pool = new Pool;
  streams.clear();
  plans.clear();
  waits = queries = 0;
  memory_left = memory;
}

/// Begin plan `id`, whose size is not known.
void Begin(int64_t id) {
  plans[id] = new Staging<FakeRuntime>(*pool);
  plans[id]->Room();
}

/// The address of room for `bytes`, 0 if there is none.
int64_t Room(int64_t id, int64_t bytes) { return reinterpret_cast<int64_t>(plans[id]->Room(bytes)); }

/// End a plan: copied on `stream`, or with an exception if that is negative.
void End(int64_t id, int64_t bytes, int64_t stream) {
  if (stream >= 0) plans[id]->CopiedBy(stream, bytes);
  delete plans[id];
  plans.erase(id);
}

void Finish(int64_t stream, int64_t count) {
  FakeStream& s = streams[stream];
  s.done = std::min(s.given, s.done + count);
}

void Capture(int64_t stream, bool begins) { streams[stream].is_capturing = begins; }
int64_t Waits() { return waits; }
int64_t Queries() { return queries; }
int64_t MemoryLeft() { return memory_left; }

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(reset, Reset)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(begin, Begin)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(room, Room)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(end, End)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(finish, Finish)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(capture, Capture)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(waits, Waits)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(queries, Queries)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(memory_left, MemoryLeft)
