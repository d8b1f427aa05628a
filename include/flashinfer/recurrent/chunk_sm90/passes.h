// SPDX-License-Identifier: Apache-2.0
// Launches of the second kernel on SM90. Their definitions (scan_launch.cuh, start_states.cuh) are in units of their own,
// which compile side by side.
#pragma once
#include <cuda.h>

#include "../chunk/kda_blocks.h"

namespace flashinfer {
namespace recurrent {
namespace sm90 {

/// Tensor maps [token, head, DIM]: inputs with boxes of 64 tokens by 64 columns of a head, outputs with 16 columns.
struct Maps {
  CUtensorMap q, k, v, o;
};

/// The result of a launch: outputs of whole requests, or of their parts, or the change of the state by a part (split.cuh).
enum class Pass { kWhole, kTransfer, kParts };

template <int WARPGROUPS>
struct Shape;
template <int WARPGROUPS>
struct KdaShape;

/// Launch a pass over `items` requests, or parts of requests, of all heads.
template <typename T, typename S, Pass PASS>
cudaError_t LaunchScan(const DeltaParams<T>& p, const Maps& maps, int64_t items, cudaStream_t stream);

/// Launch the chain over the parts of requests, which gives the states at their starts.
template <typename T>
cudaError_t LaunchStartStates(const DeltaParams<T>& p, cudaStream_t stream);

}  // namespace sm90
}  // namespace recurrent
}  // namespace flashinfer
