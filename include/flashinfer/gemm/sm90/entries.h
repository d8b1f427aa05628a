// SPDX-License-Identifier: Apache-2.0
// Declarations of the SM90 GEMM entries for launchers. The compilation units of a module instantiate the entries.
#pragma once
#include "problem.h"

namespace flashinfer {
namespace gemm {

/// Form of a kernel with tokens on the M side.
enum class Form {
  kPlain,
  kGather,  // tokens are those of row_indices (gather.cuh)
  kSplit,   // the blocks of a cluster split K (split_k.cuh)
};

/// Compute d = a b^T with tiles of BLOCK_M tokens by BLOCK_N weights (kernel.cuh).
template <typename T, Scaling SCALING, int BLOCK_M, int BLOCK_N, Form FORM = Form::kPlain>
Status GemmSm90(const GemmProblem& problem, const GemmConfig& config, Stream stream);

/// Compute d = a b^T with weights on the M side of the tensor cores: tiles of TOKENS by 128 or 64 weights
/// (swap_ab_kernel.cuh). ENCODES: tokens are bf16, and the kernel quantises them.
template <typename T, Scaling SCALING, int TOKENS, int WEIGHTS = SWAPPED_WEIGHTS, bool ENCODES = false>
Status GemmSwappedSm90(const GemmProblem& problem, const GemmConfig& config, Stream stream);

}  // namespace gemm
}  // namespace flashinfer
