# SPDX-License-Identifier: Apache-2.0
"""Merge attention over parts of the keys into attention over all keys.

A state is the output ``v`` of attention over some keys, and ``s``, the logarithm to base 2 of the sum of ``exp(logit)``
over these keys, which attention returns as its LSE. Without keys, ``s = -inf``.
"""

from __future__ import annotations

from typing import Optional

import torch

from .._runtime.allocation import new_empty
from .._runtime.checks import as_int32, check_tensors
from .._runtime.dispatch import NativeFunction
from .._runtime.errors import ArgumentError
from .._runtime.explain_error import explain_type_errors
from .._runtime.torch_ops import register_custom_op
from ..api_logging import flashinfer_api
from ..jit.cascade import gen_cascade_module
from ..jit.codegen import module_cache
from ..trace.templates.cascade import (
    merge_state_in_place_trace,
    merge_state_trace,
    merge_states_trace,
    variable_length_merge_states_trace,
)

__all__ = ["get_cascade_module", "merge_state", "merge_state_in_place", "merge_states", "variable_length_merge_states"]

get_cascade_module = module_cache(gen_cascade_module)

_native_merge_state = NativeFunction(get_cascade_module, "merge_state")
_native_merge_state_in_place = NativeFunction(get_cascade_module, "merge_state_in_place")
_native_merge_states = NativeFunction(get_cascade_module, "merge_states")
_native_variable_length = NativeFunction(get_cascade_module, "variable_length_merge_states")


def _as_float(s: torch.Tensor) -> torch.Tensor:
    return s if s.dtype is torch.float32 else s.float()


# Destination-passing ops: torch.compile traces them as custom ops, and eager mode calls them directly.


@register_custom_op("flashinfer::merge_state", mutates_args=("v", "s"))
def _merge_state(
    v: torch.Tensor, s: torch.Tensor, v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> None:
    _native_merge_state[v_a.is_cuda](v, s, v_a, _as_float(s_a), v_b, _as_float(s_b))


@register_custom_op("flashinfer::merge_state_in_place", mutates_args=("v", "s"))
def _merge_state_in_place(
    v: torch.Tensor, s: torch.Tensor, v_other: torch.Tensor, s_other: torch.Tensor, mask: Optional[torch.Tensor]
) -> None:
    scores = _as_float(s)
    _native_merge_state_in_place[v.is_cuda](v, scores, v_other, _as_float(s_other), mask)
    if scores is not s:
        s.copy_(scores)


@register_custom_op("flashinfer::merge_states", mutates_args=("v_merged", "s_merged"))
def _merge_states(v_merged: torch.Tensor, s_merged: torch.Tensor, v: torch.Tensor, s: torch.Tensor) -> None:
    _native_merge_states[v.is_cuda](v_merged, s_merged, v, _as_float(s))


@register_custom_op("flashinfer::variable_length_merge_states", mutates_args=("v_merged", "s_merged"))
def _variable_length_merge_states(
    v_merged: torch.Tensor, s_merged: torch.Tensor, v: torch.Tensor, s: torch.Tensor, indptr: torch.Tensor
) -> None:
    _native_variable_length[v.is_cuda](v_merged, s_merged, v, _as_float(s), indptr)


# The public functions.


@flashinfer_api(trace=merge_state_trace)
def merge_state(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Merge attention over two sets of keys into attention over their union.

    ``s = log2(2^s_a + 2^s_b)`` and ``v = 2^(s_a - s) v_a + 2^(s_b - s) v_b``, in float32, ``v`` rounded once. A state
    with ``s = -inf`` adds nothing, whatever its ``v`` holds; two of them merge to ``v = 0`` and ``s = -inf``.

    Parameters
    ----------
    v_a : torch.Tensor
        ``(seq_len, num_heads, head_dim)``, float16, bfloat16 or float32. Here and below the last dimension of a ``v``
        is contiguous, all others have any stride.
    s_a : torch.Tensor
        ``(seq_len, num_heads)``, base 2. Converted to float32 where it has another dtype.
    v_b : torch.Tensor
        Shape and dtype of ``v_a``.
    s_b : torch.Tensor
        Shape of ``s_a``, base 2.

    Returns
    -------
    v : torch.Tensor
        Shape and dtype of ``v_a``.
    s : torch.Tensor
        ``(seq_len, num_heads)``, float32.

    Examples
    --------
    >>> v_a, v_b = torch.randn(2, 7, 32, 128).bfloat16()
    >>> s_a, s_b = torch.randn(2, 7, 32)
    >>> v, s = flashinfer.merge_state(v_a, s_a, v_b, s_b)
    """
    try:
        shape = v_a.shape
        v, s = new_empty(v_a, v_a.dtype, *shape), new_empty(v_a, torch.float32, *shape[:-1])
    except AttributeError:
        check_tensors("merge_state", v_a=v_a)
        raise
    _merge_state(v, s, v_a, s_a, v_b, s_b)
    return v, s


@flashinfer_api(trace=merge_state_in_place_trace)
def merge_state_in_place(
    v: torch.Tensor,
    s: torch.Tensor,
    v_other: torch.Tensor,
    s_other: torch.Tensor,
    mask: Optional[torch.Tensor] = None,
) -> None:
    r"""Merge ``(v_other, s_other)`` into ``(v, s)`` in place, like :func:`merge_state`.

    Parameters
    ----------
    v : torch.Tensor
        ``(seq_len, num_heads, head_dim)``, float16, bfloat16 or float32; read and written.
    s : torch.Tensor
        ``(seq_len, num_heads)``, base 2; read and written. Float32 unless you can spare a copy.
    v_other : torch.Tensor
        Shape and dtype of ``v``.
    s_other : torch.Tensor
        ``(seq_len, num_heads)``, base 2.
    mask : Optional[torch.Tensor]
        ``(seq_len,)``, bool or uint8. Rows where it is 0 keep their ``v`` and ``s``.

    Examples
    --------
    >>> v, v_other = torch.randn(2, 7, 32, 128).bfloat16()
    >>> s, s_other = torch.randn(2, 7, 32)
    >>> flashinfer.merge_state_in_place(v, s, v_other, s_other, mask=torch.arange(7) < 4)
    """
    _merge_state_in_place(v, s, v_other, s_other, mask)


@flashinfer_api(trace=merge_states_trace)
@explain_type_errors
def merge_states(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Merge attention over many sets of keys: :func:`merge_state` along a whole dimension.

    Parameters
    ----------
    v : torch.Tensor
        ``(seq_len, num_states, num_heads, head_dim)``, float16, bfloat16 or float32. The last dimension is contiguous,
        the others have any stride.
    s : torch.Tensor
        ``(seq_len, num_states, num_heads)``, base 2. Converted to float32 where it has another dtype.

    Returns
    -------
    v_merged : torch.Tensor
        ``(seq_len, num_heads, head_dim)``, dtype of ``v``. Zeros where there is no state, or none but ``s = -inf``.
    s_merged : torch.Tensor
        ``(seq_len, num_heads)``, float32.

    Examples
    --------
    >>> v, s = torch.randn(7, 4, 32, 128).bfloat16(), torch.randn(7, 4, 32)
    >>> v_merged, s_merged = flashinfer.merge_states(v, s)
    """
    if v.ndim != 4:
        raise ArgumentError(f"merge_states: v must have 4 dimensions, got {v.ndim}")
    seq_len, _, num_heads, head_dim = v.shape
    v_merged = new_empty(v, v.dtype, seq_len, num_heads, head_dim)
    s_merged = new_empty(v, torch.float32, seq_len, num_heads)
    _merge_states(v_merged, s_merged, v, s)
    return v_merged, s_merged


@flashinfer_api(trace=variable_length_merge_states_trace)
@explain_type_errors
def variable_length_merge_states(
    v: torch.Tensor, s: torch.Tensor, indptr: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Merge states like :func:`merge_states`, with a separate number of states for each row.

    Published as ``flashinfer.triton.cascade.variable_length_merge_states``.

    Parameters
    ----------
    v : torch.Tensor
        ``(nnz, num_heads, head_dim)``, float16, bfloat16 or float32: the states of all rows, one row after the other.
    s : torch.Tensor
        ``(nnz, num_heads)``, base 2. Converted to float32 where it has another dtype.
    indptr : torch.Tensor
        ``(seq_len + 1,)``, on the device of ``v``: row ``i`` has the states ``indptr[i]`` to ``indptr[i + 1]``. On the
        CPU, offsets that fall or are beyond the states are an error; on CUDA nobody looks at them.

    Returns
    -------
    v_merged : torch.Tensor
        ``(seq_len, num_heads, head_dim)``, dtype of ``v``. Zeros where a row has no state, or none but ``s = -inf``.
    s_merged : torch.Tensor
        ``(seq_len, num_heads)``, float32.

    Examples
    --------
    >>> v, s = torch.randn(7, 32, 128).bfloat16(), torch.randn(7, 32)
    >>> indptr = torch.tensor([0, 3, 3, 7], dtype=torch.int32)
    >>> v_merged, s_merged = flashinfer.cascade.variable_length_merge_states(v, s, indptr)
    """
    if v.ndim != 3:
        raise ArgumentError(f"variable_length_merge_states: v must have 3 dimensions, got {v.ndim}")
    if indptr.ndim != 1 or indptr.shape[0] == 0:
        shape = tuple(indptr.shape)
        raise ArgumentError(f"variable_length_merge_states: indptr must have shape (seq_len + 1,), got {shape}")
    _, num_heads, head_dim = v.shape
    rows = indptr.shape[0] - 1
    v_merged = new_empty(v, v.dtype, rows, num_heads, head_dim)
    s_merged = new_empty(v, torch.float32, rows, num_heads)
    (offsets,) = as_int32("variable_length_merge_states", indptr=indptr)
    _variable_length_merge_states(v_merged, s_merged, v, s, offsets)
    return v_merged, s_merged
