# SPDX-License-Identifier: Apache-2.0
"""Calls of latent attention for test_drawn_calls.py: plan and run of the wrapper are one call."""

from __future__ import annotations

from typing import Any, Optional

import torch

import flashinfer

from ..traced_calls import traced
from .latent import CKV, F16, HEADS, KPE, SCALE, Latent

_WORKSPACE = torch.empty(16 << 20, dtype=torch.int8)


def latent_attention(
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_lens: torch.Tensor,
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    ckv: torch.Tensor,
    kpe: torch.Tensor,
    page_size: int,
    out: Optional[torch.Tensor] = None,
    lse: Optional[torch.Tensor] = None,
) -> Any:
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(_WORKSPACE)
    wrapper.plan(qo_indptr, kv_indptr, kv_indices, kv_lens, HEADS, CKV, KPE, page_size, True, SCALE, F16, F16)
    return wrapper.run(q_nope, q_pe, ckv, kpe, out=out, lse=lse)


def _latent(batch: int, longest: int, page_size: int) -> dict[str, Any]:
    kv_lens = torch.randint(0, longest + 1, (batch,)).tolist()
    qo_lens = [int(torch.randint(0, n + 1, ())) % 4 for n in kv_lens]
    x = Latent("cpu", page_size, qo_lens, kv_lens, heads=HEADS)
    names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_lens", "q_nope", "q_pe", "ckv", "kpe")
    return dict(zip(names, (*x.tables, *x.arguments), strict=True)) | {"page_size": page_size}


CALLS = {
    "sparse_mla": traced(
        flashinfer.mla.sparse_mla,
        more=lambda draw, made: {"lengths": torch.randint(0, made["indices"].shape[1] + 1, (len(made["q"]),)).int()},
        any_number=("indices",),  # behind the length of a list
        has_python_checks=True,
        num_tokens=(0, 1, 3),
        num_heads=(1, 16, 20),
        page_size=(1, 16),
        top_k=(0, 1, 40),
        head_dim=(576,),
    ),
    "latent_attention": traced(
        latent_attention,
        init=_latent,
        any_number=("kv_indices",),
        batch=(1, 3),
        longest=(0, 1, 9, 70),
        page_size=(1, 16),
    ),
}
