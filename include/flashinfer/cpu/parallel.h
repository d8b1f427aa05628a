// SPDX-License-Identifier: Apache-2.0
// Rows over threads, and scratch memory for them.
// torch ships a libgomp of its own and loads it globally before any module of ours, so its symbols win over those of
// the system's: one thread pool serves both, and torch.set_num_threads limits the kernels too.
#pragma once
#include <cstddef>
#include <cstdint>
#include <new>

#if defined(_OPENMP)
#include <omp.h>
#include <pthread.h>
#endif

namespace flashinfer {
namespace cpu {

#if defined(_OPENMP)
namespace {
/// Fork handler that ends all OpenMP threads, including those of torch's operators, before a fork: threads do not
/// survive a fork, and libgomp would wait for them in the child forever. The next parallel region of either process
/// starts new threads.
[[maybe_unused]] const int fork_handler =
    pthread_atfork([] { omp_pause_resource_all(omp_pause_soft); }, nullptr, nullptr);
}  // namespace
#endif

/// Least number of elements per thread: below it, waking another thread (some microseconds) costs more than it saves.
constexpr int64_t ELEMENTS_PER_THREAD = 32768;

/// Call body(begin, end) with contiguous parts of [0, rows), one per thread. Each row has `row_size` elements. Each
/// thread calls the body once, so per-thread scratch can be a local variable of the body.
template <typename Body>
inline void ParallelFor(int64_t rows, int64_t row_size, const Body& body) {
  if (rows <= 0) return;
#if defined(_OPENMP)
  int64_t threads = rows * row_size / ELEMENTS_PER_THREAD;
  if (threads > rows) threads = rows;
  if (threads > omp_get_max_threads()) threads = omp_get_max_threads();
  if (threads > 1 && !omp_in_parallel()) {
#pragma omp parallel num_threads(static_cast<int>(threads))
    {
      // The team may be smaller than requested.
      const int64_t team = omp_get_num_threads(), rank = omp_get_thread_num();
      body(rows * rank / team, rows * (rank + 1) / team);
    }
    return;
  }
#endif
  body(int64_t{0}, rows);
}

/// Buffer of uninitialised floats, aligned to a cache line and padded to a multiple of a cache line.
class Scratch {
 public:
  explicit Scratch(int64_t size)
      : data_(static_cast<float*>(::operator new((size + 15) / 16 * LINE, std::align_val_t{LINE}))) {}
  ~Scratch() { ::operator delete(data_, std::align_val_t{LINE}); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  float& operator[](int64_t i) const { return data_[i]; }

 private:
  static constexpr size_t LINE = 64;
  float* data_;
};

}  // namespace cpu
}  // namespace flashinfer
