# SPDX-License-Identifier: Apache-2.0
"""Index scores of prefill: keys are rows of one tensor, of which each token sees a range."""

from __future__ import annotations

from typing import NoReturn, Optional

import torch

from .._runtime.allocation import new_empty
from .._runtime.arch import AMPERE_ON, CPU
from .._runtime.dispatch import NativeFunction
from .._runtime.errors import ArgumentError
from .._runtime.requirements import backend_requirement, supported_compute_capability
from .._runtime.torch_ops import called, register_custom_op
from ..api_logging import flashinfer_api
from ..trace.templates.indexer import fp8_ragged_mqa_logits_trace
from .schedule import get_mqa_logits_module

__all__ = ["fp8_ragged_mqa_logits"]

OP = "fp8_ragged_mqa_logits"
_FLOATS = (torch.float32, torch.float16)
_native_scores = NativeFunction(get_mqa_logits_module, "ragged_mqa_logits")


def _refuse(text: str) -> NoReturn:
    raise ArgumentError(f"{OP}: {text}")


@supported_compute_capability([CPU, *AMPERE_ON])
def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scales: torch.Tensor,
    weights: torch.Tensor,
    k_starts: torch.Tensor,
    k_ends: torch.Tensor,
    *,
    output_dtype: torch.dtype = torch.float32,
    out: Optional[torch.Tensor] = None,
) -> bool:
    """Check what a kernel is chosen by; the launcher checks all else."""
    if q.ndim != 3:
        _refuse(f"q must be 3-D [tokens, heads, head_dim], got {q.ndim}-D")
    if k.ndim != 2:
        _refuse(f"k must be 2-D [keys, head_dim], got {k.ndim}-D")
    heads, dim = q.shape[1:]
    if dim % 32 or not 32 <= dim <= 256:
        _refuse(f"head_dim must be a multiple of 32 up to 256, got {dim}")
    if heads % 4 or heads < 4:
        _refuse(f"num_heads must be a multiple of 4, got {heads}")
    if output_dtype not in _FLOATS:
        _refuse(f"output_dtype must be float32 or float16, got {output_dtype}")
    if out is not None and out.dtype is not output_dtype:
        _refuse(f"out must be {output_dtype} (output_dtype), got {out.dtype}")
    return True


@register_custom_op("flashinfer::fp8_ragged_mqa_logits", mutates_args=("out",))
@called(OP)
def _scores(
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    k_scales: torch.Tensor,
    weights: torch.Tensor,
    k_starts: torch.Tensor,
    k_ends: torch.Tensor,
) -> None:
    _native_scores[q.is_cuda](out, q, k, k_scales, weights, k_starts, k_ends)


@flashinfer_api(trace=fp8_ragged_mqa_logits_trace)
@backend_requirement(backend_checks={}, common_check=_check)
def fp8_ragged_mqa_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scales: torch.Tensor,
    weights: torch.Tensor,
    k_starts: torch.Tensor,
    k_ends: torch.Tensor,
    *,
    output_dtype: torch.dtype = torch.float32,
    out: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    r"""Score keys that lie one after the other, as in prefill, for tokens that each see a range of them.

    ``logits[t, j] = k_scales[j] * sum_h weights[t, h] * relu(q[t, h] . k[j])`` for ``k_starts[t] <= j < k_ends[t]``;
    other columns keep what they hold. Sums over heads have the order of :func:`fp8_paged_mqa_logits`.

    Parameters
    ----------
    q : torch.Tensor
        ``(tokens, heads, head_dim)`` float8_e4m3fn; any strides but the last. ``head_dim`` is a multiple of 32 up to
        256, ``heads`` of 4.
    k : torch.Tensor
        ``(keys, head_dim)`` float8_e4m3fn: those of all requests; rows may lie apart.
    k_scales : torch.Tensor
        ``(keys,)`` float32, any stride.
    weights : torch.Tensor
        ``(tokens, heads)`` float32, any strides.
    k_starts, k_ends : torch.Tensor
        ``(tokens,)`` int32: first key and end of the keys of each token; no keys where the end is not behind the first.
        Ranges that leave ``k`` are an error on the CPU; on CUDA they are cut.
    output_dtype : torch.dtype
        float32 or float16.
    out : Optional[torch.Tensor]
        ``(tokens, keys)`` in ``output_dtype``; rows may lie apart.

    Returns
    -------
    torch.Tensor
        ``(tokens, keys)``, contiguous if it is new: as :func:`flashinfer.top_k_ragged_transform` reads it.

    Examples
    --------
    Two requests of two and three tokens, each of which sees its own request up to itself.

    >>> q, k = (torch.randn(5, *shape).to(torch.float8_e4m3fn) for shape in ((64, 128), (128,)))
    >>> starts, ends = torch.tensor([0, 0, 2, 2, 2]).int(), torch.arange(1, 6).int()
    >>> flashinfer.indexer.fp8_ragged_mqa_logits(q, k, torch.ones(5), torch.rand(5, 64), starts, ends).shape
    torch.Size([5, 5])
    """
    if out is None:
        out = new_empty(q, output_dtype, q.shape[0], k.shape[0])
    _scores(out, q, k, k_scales, weights, k_starts, k_ends)
    return out
