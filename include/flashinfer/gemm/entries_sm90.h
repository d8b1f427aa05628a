// SPDX-License-Identifier: Apache-2.0
// The entries of the SM90 GEMM kernels, as a launcher sees them. Units of a module instantiate them.
#pragma once
#include "problem_sm90.h"

namespace flashinfer {
namespace gemm {

/// d = a b^T with tiles of BLOCK_M tokens by BLOCK_N weights (gemm_sm90.cuh).
template <typename T, Scaling SCALING, int BLOCK_M, int BLOCK_N>
Status GemmSm90(const GemmProblem& problem, const GemmConfig& config, Stream stream);

/// The same with weights on the M side of the tensor cores: tiles of TOKENS by 128 weights (swapped_sm90.cuh).
template <typename T, Scaling SCALING, int TOKENS>
Status GemmSwappedSm90(const GemmProblem& problem, const GemmConfig& config, Stream stream);

constexpr int SWAPPED_WEIGHTS = 128;  // of a tile

/// Bytes that GemmSwappedSm90 needs: counters, whose place does not depend on the launch, then two partial tiles of a block.
constexpr int64_t SPLIT_COUNTER_BYTES = 4096;
constexpr int MAX_SPLIT_BLOCKS = int(SPLIT_COUNTER_BYTES / 8);
constexpr int64_t SplitWorkspaceBytes(int tokens, int blocks) {
  return SPLIT_COUNTER_BYTES + int64_t(blocks) * 2 * SWAPPED_WEIGHTS * tokens * 4;
}

}  // namespace gemm
}  // namespace flashinfer
