# SPDX-License-Identifier: Apache-2.0
"""Index scores of sparse attention: each query token scores all cached tokens, and attends to the best ones alone.

Published as ``flashinfer.attn_scores``. The selection is in :mod:`flashinfer.topk`.
"""

from .ragged import fp8_ragged_mqa_logits
from .schedule import compute_paged_mqa_logits_schedule
from .schedule import min_block_table_width as min_block_table_width
from .schedule import padded_seq_len as padded_seq_len
from .scores import fp4_paged_mqa_logits as fp4_paged_mqa_logits
from .scores import fp8_paged_mqa_logits
from .scores import get_mqa_logits_module as get_mqa_logits_module
from .scores import get_mqa_logits_sm90_module as get_mqa_logits_sm90_module
from .scores import precompile_paged_mqa_logits as precompile_paged_mqa_logits

__all__ = ["compute_paged_mqa_logits_schedule", "fp8_paged_mqa_logits", "fp8_ragged_mqa_logits"]
