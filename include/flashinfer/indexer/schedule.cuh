// SPDX-License-Identifier: Apache-2.0
// Schedule of index scores on CUDA: which splits of 256 keys each block computes (numbers in mqa_logits.h).
// One block. A thread adds the splits of a run of requests, a scan over the block gives where the run begins, and the
// thread writes the rows that begin within its run. Bound by latency: two reads of the lengths.
//   test  pytest tests/indexer/test_schedule.py      bench  python benchmarks/bench_indexer.py -k schedule
#pragma once
#include "../ptx/pdl.cuh"
#include "../utils.cuh"
#include "../warp.cuh"
#include "mqa_logits.h"

namespace flashinfer {
namespace indexer {

constexpr int SCHEDULE_THREADS = 512;

__global__ void __launch_bounds__(SCHEDULE_THREADS) MqaScheduleKernel(const __grid_constant__ MqaScheduleParams p) {
  __shared__ int of_warp[SCHEDULE_THREADS / 32];
  const int thread = int(threadIdx.x), lane = thread % 32, warp = thread / 32;
  ptx::GridDependencyWait();
  ptx::LaunchDependents();
  const int run = (p.batch + SCHEDULE_THREADS - 1) / SCHEDULE_THREADS;
  const int first = min(thread * run, p.batch), last = min(first + run, p.batch);
  int splits = 0;
  for (int b = first; b < last; ++b) splits += SplitsOf(p.seq_lens[b * p.lens_stride]);
  const int inclusive = WarpInclusiveScan(splits);
  if (lane == 31) of_warp[warp] = inclusive;
  __syncthreads();
  const int sums = lane < SCHEDULE_THREADS / 32 ? of_warp[lane] : 0;
  const int total = WarpSum(sums), before_warp = WarpSum(lane < warp ? sums : 0);
  const Shares shares(total, p.blocks);
  int begin = before_warp + inclusive - splits;
  for (int b = first; b < last; ++b) {
    const int count = run == 1 ? splits : SplitsOf(p.seq_lens[b * p.lens_stride]);
    WriteRows(p, shares, b, begin, count);
    begin += count;
  }
  for (int row = thread; row <= p.blocks; row += SCHEDULE_THREADS) {  // rows past the end
    if (shares.SplitOf(row) >= total) p.out[2 * row] = p.batch, p.out[2 * row + 1] = 0;
  }
}

}  // namespace indexer

FLASHINFER_INLINE Status MqaSchedule(const MqaScheduleParams& p, Stream stream) {
  return Launch(indexer::MqaScheduleKernel, dim3(1), dim3(indexer::SCHEDULE_THREADS), p.enable_pdl, stream, p);
}

}  // namespace flashinfer
