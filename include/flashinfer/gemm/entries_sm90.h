// SPDX-License-Identifier: Apache-2.0
// Declarations of the SM90 GEMM entries for launchers. The compilation units of a module instantiate the entries.
#pragma once
#include "problem_sm90.h"

namespace flashinfer {
namespace gemm {

/// Compute d = a b^T with tiles of BLOCK_M tokens by BLOCK_N weights (gemm_sm90.cuh).
template <typename T, Scaling SCALING, int BLOCK_M, int BLOCK_N>
Status GemmSm90(const GemmProblem& problem, const GemmConfig& config, Stream stream);

/// Compute d = a b^T with weights on the M side of the tensor cores: tiles of TOKENS by 128 weights (swapped_sm90.cuh).
template <typename T, Scaling SCALING, int TOKENS>
Status GemmSwappedSm90(const GemmProblem& problem, const GemmConfig& config, Stream stream);

constexpr int SWAPPED_WEIGHTS = 128;  // rows of weights per tile

/// Workspace of GemmSwappedSm90 in bytes: counters, at an offset that is the same for every launch, then two partial
/// tiles per block.
constexpr int64_t SPLIT_COUNTER_BYTES = 4096;
constexpr int MAX_SPLIT_BLOCKS = int(SPLIT_COUNTER_BYTES / 8);
constexpr int64_t SplitWorkspaceBytes(int tokens, int blocks) {
  return SPLIT_COUNTER_BYTES + int64_t(blocks) * 2 * SWAPPED_WEIGHTS * tokens * 4;
}

}  // namespace gemm
}  // namespace flashinfer
