# SPDX-License-Identifier: Apache-2.0
"""``top_k_varlen``: the selection a sparse-attention indexer makes, one row per token of a decode step."""

from __future__ import annotations

from typing import Optional, Sequence

import torch

from .._runtime.arch import BLACKWELL, CPU, TURING_ON
from .._runtime.dispatch import backend_of
from .._runtime.errors import ArgumentError
from .._runtime.requirements import backend_requirement, supported_compute_capability
from .._runtime.torch_ops import register_custom_op
from ..api_logging import flashinfer_api
from ..topk.launch import get_topk_module, plan
from ..trace.templates.topk import top_k_varlen_dispatch

__all__ = ["top_k_varlen"]

_BACKENDS = ("gvr", "radix", "radix_cutlass")  # best first


def _n_is_256bit_aligned(dtype: torch.dtype, n: int) -> bool:
    """Return True if a row of ``n`` elements is a multiple of 32 bytes."""
    return n * dtype.itemsize % 32 == 0


@register_custom_op("flashinfer::top_k_varlen", mutates_args=("out_indices", "out_values"))
def _top_k_varlen(
    out_indices: torch.Tensor,
    out_values: Optional[torch.Tensor],
    logits: torch.Tensor,
    seq_lens: torch.Tensor,
    top_k: int,
    compress_ratio: int,
    next_n: int,
) -> None:
    get_topk_module(backend_of(logits)).top_k_varlen(
        out_indices, out_values, logits, seq_lens, top_k, compress_ratio, next_n, *plan(logits, top_k)
    )


def _check_arguments(
    logits: torch.Tensor,
    seq_lens: torch.Tensor,
    top_k: int,
    pre_idx: Optional[torch.Tensor] = None,
    compress_ratio: int = 1,
    next_n: int = 1,
    return_values: bool = False,
    out_indices: Optional[torch.Tensor] = None,
    out_values: Optional[torch.Tensor] = None,
    backend: str = "auto",
    load_balance: bool = True,
    workspace: Optional[torch.Tensor] = None,
) -> bool:
    if logits.ndim != 2:
        raise ArgumentError(f"top_k_varlen: logits must have 2 dimensions, got {logits.ndim}")
    if seq_lens.dtype is not torch.int32:
        raise ArgumentError(f"top_k_varlen: seq_lens must have dtype torch.int32, got {seq_lens.dtype}")
    if top_k < 1:
        raise ArgumentError(f"top_k_varlen: top_k must be at least 1, got {top_k}")
    return True


@supported_compute_capability([CPU, *TURING_ON])
def _check_radix_cutlass(logits: torch.Tensor, *args: object, **kwargs: object) -> bool:
    return True


@supported_compute_capability(BLACKWELL)
def _check_blackwell(logits: torch.Tensor, *args: object, **kwargs: object) -> bool:
    raise ArgumentError(
        "top_k_varlen: backend must be 'radix_cutlass' or 'auto', got one that needs kernels for Blackwell GPUs"
    )


def _top_k_varlen_heuristic(
    suitable: Sequence[str], logits: torch.Tensor, seq_lens: torch.Tensor, top_k: int, *args: object, **kwargs: object
) -> list[str]:
    """Return the suitable backends, best first."""
    return [backend for backend in _BACKENDS if backend in suitable]


@flashinfer_api(trace=top_k_varlen_dispatch)
@backend_requirement(
    backend_checks={"radix_cutlass": _check_radix_cutlass, "radix": _check_blackwell, "gvr": _check_blackwell},
    common_check=_check_arguments,
    heuristic_func=_top_k_varlen_heuristic,
)
def top_k_varlen(
    logits: torch.Tensor,
    seq_lens: torch.Tensor,
    top_k: int,
    pre_idx: Optional[torch.Tensor] = None,
    compress_ratio: int = 1,
    next_n: int = 1,
    return_values: bool = False,
    out_indices: Optional[torch.Tensor] = None,
    out_values: Optional[torch.Tensor] = None,
    backend: str = "auto",
    load_balance: bool = True,
    workspace: Optional[torch.Tensor] = None,
) -> tuple[torch.Tensor, Optional[torch.Tensor]]:
    r"""Select the k largest logits of rows of various lengths and return their columns.

    Row ``q * next_n + t`` is token ``t`` of the ``next_n`` tokens that request ``q`` decodes in this step. The row
    consists of the first ``(seq_lens[q] - next_n + t + 1) // compress_ratio`` columns. Indices ascend; ``-1`` fills
    unused places.

    Parameters
    ----------
    logits : torch.Tensor
        ``(requests * next_n, max_len)``, float32, float16 or bfloat16, last dimension contiguous.
    seq_lens : torch.Tensor
        ``(requests,)``, int32, contiguous.
    top_k : int
        At least 1.
    pre_idx : Optional[torch.Tensor]
        Selection of the previous step, from which other backends start; not needed here.
    compress_ratio : int
        Tokens that share a column.
    next_n : int
        Rows of a request.
    return_values : bool
        Also return the logits; 0 where the index is -1.
    out_indices : Optional[torch.Tensor]
        ``(rows, top_k)``, int32, contiguous; written and returned.
    out_values : Optional[torch.Tensor]
        ``(rows, top_k)``, dtype of ``logits``, contiguous; written and returned.
    backend : str
        "radix_cutlass" everywhere; "radix" and "gvr" need a Blackwell GPU. "auto" takes the best available one.
    load_balance, workspace
        Accepted for compatibility: rows are balanced by the hardware and nothing is kept between calls.

    Returns
    -------
    indices : torch.Tensor
        ``(rows, top_k)``, int32.
    values : Optional[torch.Tensor]
        ``(rows, top_k)``, or None.

    Examples
    --------
    >>> logits, seq_lens = torch.randn(4, 8192), torch.tensor([5000, 100], dtype=torch.int32)
    >>> indices, values = flashinfer.top_k_varlen(logits, seq_lens, 2048, next_n=2, return_values=True)
    """
    shape = (logits.shape[0], top_k)
    if out_indices is None:
        out_indices = logits.new_empty(shape, dtype=torch.int32)
    if out_values is None and return_values:
        out_values = logits.new_empty(shape)
    _top_k_varlen(out_indices, out_values, logits, seq_lens, top_k, compress_ratio, next_n)
    return out_indices, out_values


def _lb_max_batch_size(n: int) -> int:
    """Return the smallest ``GvrTopKLBConfig.max_batch_size`` for ``n`` rows (a published name)."""
    for size in (64, 128, 256, 512, 1024):
        if n <= size:
            return size
    raise ArgumentError(f"_lb_max_batch_size: n must be at most 1024, got {n}")
