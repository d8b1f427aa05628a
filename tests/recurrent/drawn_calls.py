# SPDX-License-Identifier: Apache-2.0
"""Calls of recurrent layers for test_drawn_calls.py: heads are few, because a state of one has 64 KB."""

from __future__ import annotations

import functools
from typing import Any

import torch

import flashinfer
from flashinfer import gdn_decode, gdn_prefill, mamba

from ..traced_calls import traced as _traced

traced = functools.partial(_traced, has_python_checks=True)
_HEADS = {"num_q_heads": (1, 2), "num_v_heads": (2,)}
_PADDED = ("initial_state_indices",)  # numbers below 0 are padding
_VECTORS = ("A_log", "a", "b", "dt_bias", "g", "beta")


def _kda(tokens: int, requests: int) -> dict[str, Any]:
    q, k, g = (torch.randn(1, tokens, 2, 128).bfloat16() for _ in range(3))
    offsets = torch.linspace(0, tokens, requests + 1).int()
    return {
        "q": q,
        "k": k,
        "v": torch.randn(1, tokens, 2, 128).bfloat16(),
        "g": -g.abs(),
        "beta": torch.rand(1, tokens, 2).bfloat16(),
        "initial_state": torch.randn(requests, 2, 128, 128),
        "cu_seqlens": offsets,
        "output_final_state": True,
    }


CALLS = {
    "gated_delta_rule_decode": traced(
        gdn_decode.gated_delta_rule_decode, any_strides=_VECTORS, batch_size=(0, 1, 3), **_HEADS
    ),
    "gated_delta_rule_decode_pretranspose": traced(
        gdn_decode.gated_delta_rule_decode_pretranspose, any_strides=_VECTORS, batch_size=(0, 1, 3), **_HEADS
    ),
    "gated_delta_rule_mtp": traced(
        gdn_decode.gated_delta_rule_mtp,
        any_strides=_VECTORS,
        any_number=_PADDED,
        batch_size=(1, 3),
        seq_len=(2, 4),
        **_HEADS,
    ),
    "chunk_gated_delta_rule": traced(
        gdn_prefill.chunk_gated_delta_rule,
        any_strides=_VECTORS,
        init=lambda **sizes: gdn_prefill.chunk_gated_delta_rule.fi_init(**sizes, device="cpu"),
        total_tokens=(1, 65, 130),
        num_requests=(1, 3),
        num_q_heads=(1,),
        num_k_heads=(1,),
        num_v_heads=(2,),
    ),
    "recurrent_kda": traced(flashinfer.recurrent_kda, any_strides=_VECTORS, init=_kda, tokens=(3, 70), requests=(1, 2)),
    "selective_state_update": traced(
        mamba.selective_state_update,
        any_strides=("A", "D", "dt", "dt_bias"),
        batch_size=(0, 1, 3),
        num_heads=(2, 4),
        num_groups=(1, 2),
        head_dim=(64,),
        state_dim=(64, 128),
    ),
}
