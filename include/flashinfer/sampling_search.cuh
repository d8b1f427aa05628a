// SPDX-License-Identifier: Apache-2.0
// The threshold of a filter over a row held by a cluster (sampling_held.cuh), exact and in a bounded number of steps:
//   1. each block puts its columns into bins of keys, 16 to an octave: how many, and the mass to 2^-31. Every block
//      adds up the bins of all and brackets the threshold, mostly by one bin;
//   2. while the bracket holds more columns than block 0 can list: 256 bins of the bracket, with exact quanta;
//   3. every warp tells block 0 what it has above the bracket, and the groups with columns within;
//   4. block 0 sorts the latter by counting who is above whom, and adds them up.
// Columns that cannot be kept are left out of the first histogram: below as many columns of a block as top-k asks for,
// or together of less mass than top-p leaves.
// Here is what the steps share; 1 and 2 are in sampling_bracket.cuh, 3 and 4 in sampling_decide.cuh.
#pragma once
#include "sampling_held.cuh"

namespace flashinfer {
namespace sampling {
namespace held {

/// What a filter asks of a row.
struct Asked {
  uint32_t count;  // fewer columns than this are above one that is kept
  float top_p;
  bool by_count, by_mass;
  bool top_k_first;  // top_p is of the columns that top-k keeps
};

/// Where the search stands. Columns below `low` are dropped, those within [low, low + width) listed for block 0 to
/// decide, all above kept.
struct Bracket {
  uint32_t low, width;
  uint32_t count_above;
};

constexpr uint32_t INFINITE_KEY = 0x7fffffffu;  // above all keys of weights
constexpr uint32_t MOST = ~uint32_t{0};

/// The search of one row, by all threads of the cluster: Fill, a barrier of the cluster, Find, Report, a barrier; then
/// Decide, by block 0. SIGNED: columns are any floats, to be ranked; otherwise weights.
template <bool SIGNED>
struct Search {
  const Slice& slice;
  const Asked& asked;
  Shared& shared;
  int vocab;
  Scale scale{ONE};
  int emax = ONE;
  uint32_t cutoff = 0;  // columns below are dropped for certain
  // What block 0 decides by. In two steps: by count, then by mass of what that keeps.
  uint32_t count_limit = MOST;
  uint64_t quanta_limit = UNLIMITED;
  bool in_two_steps = false;

  /// Step 1 up to the exchange: the largest column, the first histogram.
  __device__ __forceinline__ void Fill();

  /// Steps 1 and 2.
  __device__ __forceinline__ Bracket Find();

  /// Step 3. Block 0 knows all after the next barrier of the cluster. MASSES: those of segments too.
  template <bool MASSES>
  __device__ __forceinline__ void Report(const Bracket& bracket);

  /// Step 4, by block 0: the threshold. The masses of segments are complete then, after a barrier of the block.
  template <bool MASSES>
  __device__ __forceinline__ uint32_t Decide(const Bracket& bracket);

 private:
  /// Publish the bins that the limits are reached in; every thread has one. `count` and `mass` are of the thread's bin.
  template <typename Reached>
  __device__ __forceinline__ void FindBins(uint64_t count, uint64_t mass, uint64_t higher_count, uint64_t higher_mass,
                                           const Reached& reached);

  /// The rest of step 1. Returns whether the bracket can be listed; if not, [low, high] is to be searched.
  __device__ __forceinline__ bool First(Bracket& bracket, uint32_t& high);

  /// Step 2: the bin of [low, high] that the limits are reached in. True if the bracket can be listed.
  __device__ __forceinline__ bool Next(Bracket& bracket, uint32_t& high);
};

}  // namespace held
}  // namespace sampling
}  // namespace flashinfer
