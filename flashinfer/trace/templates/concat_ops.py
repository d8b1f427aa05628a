# SPDX-License-Identifier: Apache-2.0
"""Template and reference of ``flashinfer.concat_ops``."""

from __future__ import annotations

from typing import Any

import torch

from ..template import Const, Tensor, TraceTemplate, Var

__all__ = ["concat_mla_k_trace"]


def _concat_mla_k_reference(k_nope: torch.Tensor, k_rope: torch.Tensor, **_: Any) -> torch.Tensor:
    # As bytes: not every torch can concatenate fp8.
    nope, rope = k_nope.contiguous().view(torch.uint8), k_rope.contiguous().view(torch.uint8)
    return torch.cat([nope, rope.expand(-1, nope.shape[1], -1)], dim=-1).view(k_nope.dtype)


concat_mla_k_trace = TraceTemplate(
    "concat",
    axes={
        "num_tokens": Var(),
        "num_heads": Const(abbrev="h", value=128),
        "nope_dim": Const("elements without position", abbrev="n", value=128),
        "rope_dim": Const("elements with position, one set for all heads", abbrev="r", value=64),
        "head_dim": Const("nope_dim + rope_dim", abbrev="", value=192),
        "one": Const(abbrev="", value=1),
    },
    inputs={
        "k_nope": Tensor(("num_tokens", "num_heads", "nope_dim")),
        "k_rope": Tensor(("num_tokens", "one", "rope_dim")),
    },
    outputs={"out": Tensor(("num_tokens", "num_heads", "head_dim"), param="k", dtype_from="k_nope")},
    name_prefix="concat_mla_k",
    reference=_concat_mla_k_reference,
    description="Keys of multi-head latent attention: the part without position, then the one with it, for every head.",
)
