// SPDX-License-Identifier: Apache-2.0
// Statistics of a tensor for the API log, printed by the device (parameters: api_log_stats.h).
// One block reads the whole tensor, because one line must be printed without memory for partial results: a graph that
// is being captured can neither wait for them nor own them. Slow for large tensors, which is what log level 5 costs.
//   test  pytest tests/test_api_log_stats.py      bench  none: what the log costs is no figure of merit
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdio>

#include "api_log_stats.h"
#include "utils.cuh"

namespace flashinfer {
namespace api_log_stats {

constexpr int THREADS = 512, WARPS = THREADS / 32;

__device__ inline double ToDouble(__half x) { return __half2float(x); }
__device__ inline double ToDouble(__nv_bfloat16 x) { return __bfloat162float(x); }
template <typename T>
__device__ double ToDouble(T x) {
  return double(x);
}

/// Partial statistics. Extremes and sum cover the finite elements, as in the log outside of a capture.
struct Partial {
  double low = INFINITY;
  double high = -INFINITY;
  double sum = 0;
  long long nans = 0;
  long long infs = 0;

  __device__ void Add(double x) {
    if (isnan(x)) {
      ++nans;
    } else if (isinf(x)) {
      ++infs;
    } else {
      low = fmin(low, x);
      high = fmax(high, x);
      sum += x;
    }
  }

  __device__ void Add(const Partial& other) {
    low = fmin(low, other.low);
    high = fmax(high, other.high);
    sum += other.sum;
    nans += other.nans;
    infs += other.infs;
  }
};

/// Reduce over a warp; the first lane gets the total.
__device__ inline Partial ReduceWarp(Partial mine) {
  constexpr unsigned ALL = 0xffffffff;
  for (int offset = 16; offset > 0; offset /= 2) {
    Partial other;
    other.low = __shfl_down_sync(ALL, mine.low, offset);
    other.high = __shfl_down_sync(ALL, mine.high, offset);
    other.sum = __shfl_down_sync(ALL, mine.sum, offset);
    other.nans = __shfl_down_sync(ALL, mine.nans, offset);
    other.infs = __shfl_down_sync(ALL, mine.infs, offset);
    mine.Add(other);
  }
  return mine;
}

template <typename T>
__global__ void __launch_bounds__(THREADS) ApiLogStatsKernel(const __grid_constant__ ApiLogStatsParams<T> p) {
  Partial mine;
  for (int64_t i = threadIdx.x; i < p.numel; i += THREADS) mine.Add(ToDouble(p.x[i]));
  mine = ReduceWarp(mine);

  __shared__ double lows[WARPS], highs[WARPS], sums[WARPS];
  __shared__ long long nans[WARPS], infs[WARPS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (lane == 0) {
    lows[warp] = mine.low;
    highs[warp] = mine.high;
    sums[warp] = mine.sum;
    nans[warp] = mine.nans;
    infs[warp] = mine.infs;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int i = 1; i < WARPS; ++i) {
    Partial other;
    other.low = lows[i];
    other.high = highs[i];
    other.sum = sums[i];
    other.nans = nans[i];
    other.infs = infs[i];
    mine.Add(other);
  }
  const long long numel = p.numel, finite = numel - mine.nans - mine.infs;
  const bool none = finite == 0;
  printf("[flashinfer stats] id=%lld numel=%lld min=%.6f max=%.6f mean=%.6f nan=%lld inf=%lld\n", (long long)p.id,
         numel, none ? double(NAN) : mine.low, none ? double(NAN) : mine.high,
         none ? double(NAN) : mine.sum / double(finite), mine.nans, mine.infs);
}

/// Scope guard that lets the driver load a kernel at its first launch while the stream is being captured.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace api_log_stats

template <typename T>
Status ApiLogStats(const ApiLogStatsParams<T>& p, Stream stream) {
  using namespace api_log_stats;
  RelaxedCapture relaxed;
  return Launch(ApiLogStatsKernel<T>, dim3(1), dim3(THREADS), false, stream, p);
}

}  // namespace flashinfer
