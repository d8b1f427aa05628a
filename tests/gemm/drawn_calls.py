# SPDX-License-Identifier: Apache-2.0
"""Calls of matrix products for test_drawn_calls.py."""

from __future__ import annotations

from typing import Any

import torch

import flashinfer
import flashinfer.gemm

from ..guard_pages import Draw
from ..traced_calls import traced

_MNK = {"M": (0, 1, 5, 33), "N": (1, 8, 72), "K": (8, 13, 128)}
_FP8 = {"m": (1, 5, 33), "n": (128, 256), "k": (128, 256)}
_BLOCKS = {"M": (1, 5, 33), "N": (128, 256), "K": (128, 256)}
_GROUPS = {"m": (128, 256), "groups": (1, 2), "n": (128,), "k": (128, 256)}


def _out(draw: Draw, made: dict[str, Any]) -> dict[str, Any]:
    a, b = (next(made[name] for name in names if name in made) for names in (("a", "A"), ("b", "B")))
    out = torch.empty(*a.shape[:-1], b.shape[-1], dtype=torch.bfloat16)
    return {"out": out} if draw.chance(0.3) else {}


def _grouped(rows: int, groups: int, n: int, k: int) -> dict[str, Any]:
    edges = torch.randint(0, rows + 1, (groups - 1,)).sort().values.tolist()
    return {
        "a": torch.randn(rows, k).bfloat16(),
        "b": torch.randn(groups, n, k).bfloat16(),
        "m_indptr": torch.tensor([0, *edges, rows], dtype=torch.int32),
    }


CALLS = {
    "mm_bf16": traced(flashinfer.gemm.mm_bf16, more=_out, **_MNK),
    "bmm_bf16": traced(flashinfer.gemm.bmm_bf16, more=_out, batch_size=(1, 3), **_MNK),
    "bmm_fp8": traced(flashinfer.gemm.bmm_fp8, more=_out, batch_size=(1, 3), **_MNK),
    "tinygemm_bf16": traced(flashinfer.gemm.tinygemm_bf16, M=(0, 1, 5, 33), N=(16, 48), K=(64, 128)),
    "fp8_blockscale_gemm_sm90": traced(
        flashinfer.gemm.fp8_blockscale_gemm_sm90, any_strides=("weight_scale",), **_BLOCKS
    ),
    "gemm_fp8_nt_groupwise": traced(flashinfer.gemm.gemm_fp8_nt_groupwise, any_strides=("a_scale", "b_scale"), **_FP8),
    "group_gemm_fp8_nt_groupwise": traced(
        flashinfer.gemm.group_gemm_fp8_nt_groupwise,
        keeps_rest=True,
        cum_m=(8, 32),
        groups=(1, 3),
        n=(128,),
        k=(128, 256),
    ),
    "group_deepgemm_fp8_nt_groupwise": traced(
        flashinfer.gemm.group_deepgemm_fp8_nt_groupwise, keeps_rest=True, **_GROUPS
    ),
    "batch_deepgemm_fp8_nt_groupwise": traced(
        flashinfer.gemm.batch_deepgemm_fp8_nt_groupwise, keeps_rest=True, **_GROUPS
    ),
    "grouped_mm_bf16": traced(
        flashinfer.grouped_mm.grouped_mm_bf16,
        init=_grouped,
        keeps_rest=True,
        rows=(0, 1, 33),
        groups=(1, 3),
        n=(8, 72),
        k=(8, 64),
    ),
}
