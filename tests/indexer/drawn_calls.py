# SPDX-License-Identifier: Apache-2.0
"""Calls of the indexer for test_drawn_calls.py."""

from __future__ import annotations

import functools

import torch

from flashinfer import attn_scores, indexer

from ..traced_calls import traced as _traced

traced = functools.partial(_traced, has_python_checks=True)

CALLS = {
    "fp8_paged_mqa_logits": traced(
        attn_scores.fp8_paged_mqa_logits,
        any_strides=("weights",),
        any_number=("seq_lens",),  # a request without keys has no scores
        batch_size=(1, 3),
        max_seq_len=(1, 70, 130),
        next_n=(1, 2),
        num_heads=(8, 64),
        head_dim=(64, 128),
        block_size=(32, 64),
    ),
    "fp8_ragged_mqa_logits": traced(
        indexer.fp8_ragged_mqa_logits,
        more=lambda draw, made: {"k_ends": torch.randint(0, len(made["k"]) + 1, (len(made["q"]),)).int()},
        keeps_rest=True,
        any_strides=("weights", "k_scales"),
        # Of a range that is empty, a first key behind the last is as right.
        any_number=("k_starts", "k_ends"),
        num_tokens=(1, 3, 9),
        num_keys=(1, 70),
        num_heads=(4, 8, 64),
        head_dim=(32, 128),
    ),
    "compute_paged_mqa_logits_schedule": traced(
        attn_scores.compute_paged_mqa_logits_schedule, batch_size=(1, 3, 70), any_number=("seq_lens",)
    ),
}
