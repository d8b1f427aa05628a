# SPDX-License-Identifier: Apache-2.0
"""Prefill of Kimi delta attention on Hopper, chunk by chunk: ``recurrent_kda`` calls it for long sequences."""

from __future__ import annotations

from typing import Any, Callable, Optional

import torch

from .. import utils
from .._runtime.allocation import new_empty
from ..jit.attention.generate import has_hopper_target
from ..jit.codegen import module_cache
from ..jit.recurrent.kda_prefill import gen_kda_prefill_module

__all__ = ["LONG", "run_chunks", "serves"]

get_kda_prefill_module = module_cache(gen_kda_prefill_module)

LONG = 32  #: tokens per sequence, on average, from which chunks take less time than a step for each token
_CHUNK = 64
_DIM = 128

_served: dict[Any, bool] = {}
_functions: list[Callable[..., Any]] = []


def serves(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    slots: Optional[torch.Tensor],
    cu_seqlens: Optional[torch.Tensor],
    every: int,
) -> bool:
    """Return True if the chunked kernels take these tokens, slots of states, and checkpoints of ``every`` tokens."""
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if q.shape[0] * q.shape[1] < LONG * sequences or every % _CHUNK or q.shape[-1] != _DIM or v.shape[-1] != _DIM:
        return False
    is_bf16 = q.dtype is k.dtype is v.dtype is g.dtype is torch.bfloat16
    if not is_bf16 or (slots is not None and slots.ndim != 1):
        return False
    probe = utils.is_sm90a_supported
    key = (q.get_device(), probe)  # engines replace the probe
    found = _served.get(key)
    if found is None:
        found = _served[key] = probe(q.device) and has_hopper_target()
    return found


def run_chunks(
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: Optional[torch.Tensor],
    dt_bias: Optional[torch.Tensor],
    state: Optional[torch.Tensor],
    slots: Optional[torch.Tensor],
    cu_seqlens: Optional[torch.Tensor],
    *arguments: Any,
) -> None:
    """Call the kernels, which take contiguous bfloat16 tokens and lists: others are copied first, and outputs after."""
    if not _functions:
        module = get_kda_prefill_module()
        _functions.extend((module.kda_prefill, module.kda_prefill_workspace))
    run, size_of = _functions
    q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
    if beta.dtype is torch.float16:
        beta = beta.float()
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    lists = [x if x is None else x.contiguous() for x in (A_log, dt_bias, slots, cu_seqlens)]
    workspace = new_empty(q, torch.uint8, size_of(sequences, q.shape[0] * q.shape[1], v.shape[2]))
    is_direct = out.dtype is torch.bfloat16 and out.is_contiguous()
    written = out if is_direct else torch.empty_like(v)
    run(written, q, k, v, g, beta, *lists[:2], state, *lists[2:], *arguments, workspace)
    if not is_direct:
        out.copy_(written)
