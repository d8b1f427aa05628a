# SPDX-License-Identifier: Apache-2.0
"""The module behind ``xqa``: that of batch decode for one token, that of masked drafts for several."""

from __future__ import annotations

from typing import Optional

import torch

from .._runtime.errors import ArgumentError
from .attention import gen_batch_decode_module, gen_customize_batch_prefill_module
from .core import JitSpec

__all__ = ["gen_xqa_module"]

_PAGE_SIZES = (16, 32, 64, 128)
_OP = "gen_xqa_module"


def _check_dtypes(q: torch.dtype, kv: torch.dtype, out: torch.dtype) -> None:
    if q not in (torch.float16, torch.bfloat16):
        raise ArgumentError(f"{_OP}: input_dtype must be torch.float16 or torch.bfloat16, got {q}")
    if kv not in (q, torch.float8_e4m3fn):
        raise ArgumentError(f"{_OP}: kv_cache_dtype must be {q} (input_dtype) or torch.float8_e4m3fn, got {kv}")
    if out not in (q, kv):
        raise ArgumentError(f"{_OP}: output_dtype must be {q} (input_dtype) or {kv} (kv_cache_dtype), got {out}")


def _check_sizes(page_size: int, head_dim: int, head_group_ratio: int, q_seq_len: int) -> None:
    if page_size not in _PAGE_SIZES:
        raise ArgumentError(f"{_OP}: page_size must be one of {_PAGE_SIZES}, got {page_size}")
    if head_dim % 16 or not 16 <= head_dim <= 512:
        raise ArgumentError(f"{_OP}: head_dim must be a multiple of 16 from 16 to 512, got {head_dim}")
    if head_group_ratio < 1 or q_seq_len < 1:
        raise ArgumentError(
            f"{_OP}: head_group_ratio and q_seq_len must be at least 1, got {head_group_ratio} and {q_seq_len}"
        )
    if head_dim > 256 and (q_seq_len > 1 or head_group_ratio > 16):
        raise ArgumentError(
            f"{_OP}: q_seq_len must be 1 and head_group_ratio at most 16 above a head_dim of 256, got {q_seq_len} and "
            f"{head_group_ratio} for {head_dim}"
        )


def gen_xqa_module(
    input_dtype: torch.dtype,
    kv_cache_dtype: torch.dtype,
    page_size: int,
    head_dim: int,
    head_group_ratio: int,
    use_sliding_window: bool,
    output_dtype: torch.dtype,
    q_seq_len: int = 1,
    use_ragged_q: bool = False,
    device: Optional[str] = None,
) -> JitSpec:
    """The module that a call of ``xqa`` with these properties loads; pages, groups and windows share one.

    Parameters
    ----------
    input_dtype, kv_cache_dtype, output_dtype : torch.dtype
        float16 or bfloat16 queries; a cache of that or of float8_e4m3fn; outputs of either.
    page_size, head_dim, head_group_ratio : int
        Tokens per page, elements per head, query heads per KV head.
    use_sliding_window : bool
        Whether a window limits the keys.
    q_seq_len : int
        Tokens of each request; several are draft tokens with a mask.
    use_ragged_q : bool
        Whether requests have different numbers of them.
    device : Optional[str]
        "cuda" or "cpu"; None takes CUDA if there is a target.
    """
    from ..attention.block_tables import draft_module_arguments

    _check_dtypes(input_dtype, kv_cache_dtype, output_dtype)
    _check_sizes(page_size, head_dim, head_group_ratio, q_seq_len)
    if q_seq_len > 1:
        arguments = draft_module_arguments(input_dtype, kv_cache_dtype, head_dim, head_dim)
        return gen_customize_batch_prefill_module(*arguments, device=device)  # type: ignore[misc]
    dtypes = (input_dtype, kv_cache_dtype, input_dtype, torch.int32)
    return gen_batch_decode_module(*dtypes, head_dim, head_dim, 0, False, False, device=device)
