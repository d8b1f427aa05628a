// SPDX-License-Identifier: Apache-2.0
// Launcher of index scores on Hopper. A module has the kernel of one number of heads and slots and one head dimension.
#include "mqa_logits_arguments.h"
#include "mqa_logits_sm90_config.inc"

using namespace flashinfer;

/// Compute the scores if TMA can read the tensors; otherwise return false.
bool mqa_logits_sm90(TensorView out, TensorView q, TensorView kv, TensorView weights, TensorView tables,
                     TensorView lens, int64_t max_seq_len, TensorView schedule) {
  const MqaLogitsParams p = indexer::ParamsOf(out, q, kv, weights, tables, lens, max_seq_len, schedule);
  if (p.heads != HEADS || p.dim != DIM || p.next_n != NEXT_N) {
    FLASHINFER_THROW(ArgumentError) << indexer::SCORES << ": q.shape[1:] must be (" << NEXT_N << ", " << HEADS << ", "
                                    << DIM << ") in this module, got (" << p.next_n << ", " << p.heads << ", " << p.dim
                                    << ")";
  }
  if (p.batch == 0 || p.max_len == 0 || p.blocks < 1) return true;
  if (!indexer::IsReadableByTma(p)) return false;
  const DeviceGuard guard(q.device());
  CheckStatus(indexer::SCORES, MqaLogitsSm90(p, get_stream(q.device())));
  return true;
}
