# SPDX-License-Identifier: Apache-2.0
"""Softmax, and filters that set the dropped columns of a row to 0 or ``-inf``."""

from __future__ import annotations

from typing import Optional, Union

import torch

from .._runtime.allocation import new_empty
from .._runtime.checks import check_tensors
from .._runtime.dispatch import NativeFunction, use_pdl
from .._runtime.torch_ops import register_custom_op
from ..api_logging import flashinfer_api
from ..trace.templates.sampling import (
    softmax_trace,
    top_k_mask_logits_trace,
    top_k_renorm_probs_trace,
    top_p_renorm_probs_trace,
)
from .modules import as_float, get_native_module, get_rows_module, per_row

_native_softmax = NativeFunction(get_native_module, "softmax")
_native_top_p_renorm_probs = NativeFunction(get_rows_module, "top_p_renorm_probs")
_native_top_k_renorm_probs = NativeFunction(get_rows_module, "top_k_renorm_probs")
_native_top_k_mask_logits = NativeFunction(get_rows_module, "top_k_mask_logits")


@register_custom_op("flashinfer::softmax", mutates_args=("out",))
def _softmax(
    out: torch.Tensor,
    logits: torch.Tensor,
    temperatures: Optional[torch.Tensor],
    temperature: float,
    enable_pdl: Optional[bool],
) -> None:
    _native_softmax[logits.is_cuda](out, logits, temperatures, temperature, use_pdl(logits, enable_pdl))


@register_custom_op("flashinfer::top_p_renorm_probs", mutates_args=("out",))
def _top_p_renorm_probs(out: torch.Tensor, probs: torch.Tensor, top_ps: Optional[torch.Tensor], top_p: float) -> None:
    _native_top_p_renorm_probs[probs.is_cuda](out, probs, top_ps, top_p)


@register_custom_op("flashinfer::top_k_renorm_probs", mutates_args=("out",))
def _top_k_renorm_probs(out: torch.Tensor, probs: torch.Tensor, top_ks: Optional[torch.Tensor], top_k: int) -> None:
    _native_top_k_renorm_probs[probs.is_cuda](out, probs, top_ks, top_k)


@register_custom_op("flashinfer::top_k_mask_logits", mutates_args=("out",))
def _top_k_mask_logits(out: torch.Tensor, logits: torch.Tensor, top_ks: Optional[torch.Tensor], top_k: int) -> None:
    _native_top_k_mask_logits[logits.is_cuda](out, logits, top_ks, top_k)


def _room_for(op: str, name: str, x: torch.Tensor) -> torch.Tensor:
    """Allocate a result of the shape and dtype of ``x``."""
    try:
        return new_empty(x, x.dtype, *x.shape)
    except AttributeError:
        check_tensors(op, **{name: x})
        raise


@flashinfer_api(trace=softmax_trace)
def softmax(
    logits: torch.Tensor,
    temperature: Optional[Union[torch.Tensor, float]] = None,
    enable_pdl: Optional[bool] = None,
) -> torch.Tensor:
    r"""``softmax(logits / temperature)`` of each row, in float32.

    ``-inf`` gives exactly 0, in a row of nothing else too. A NaN gives NaN in its column; the others sum up to 1. Equal
    logits of a row give equal probabilities. Columns of ``inf`` share a row that has some.

    Parameters
    ----------
    logits : torch.Tensor
        ``(rows, vocab)``. Computed in float32; other dtypes are converted. The last dimension is contiguous.
    temperature : Optional[Union[torch.Tensor, float]]
        A number, or ``(rows,)`` for each row. None is 1; 0 gives equal probabilities.
    enable_pdl : Optional[bool]
        Programmatic dependent launch; None: where the device has it.

    Returns
    -------
    torch.Tensor
        ``(rows, vocab)``, float32.

    Examples
    --------
    >>> probs = flashinfer.softmax(torch.randn(4, 128256), temperature=0.7)
    """
    logits, temperatures, value = as_float("softmax", "logits", logits), None, 1.0
    if temperature is not None:
        temperatures, value = per_row("softmax", "temperature", temperature, torch.float32, logits)
    out = new_empty(logits, logits.dtype, *logits.shape)
    _softmax(out, logits, temperatures, value, enable_pdl)
    return out


@flashinfer_api(trace=top_p_renorm_probs_trace)
def top_p_renorm_probs(
    probs: torch.Tensor, top_p: Union[torch.Tensor, float], is_deterministic: bool = False
) -> torch.Tensor:
    r"""Set to 0 what top-p does not keep and divide the rest by its sum.

    Parameters
    ----------
    probs : torch.Tensor
        ``(rows, vocab)``, each row summing up to 1. Computed in float32; other dtypes are converted.
    top_p : Union[torch.Tensor, float]
        As for :func:`top_p_sampling_from_probs`.
    is_deterministic : bool
        Accepted for compatibility. Results never depend on scheduling.

    Returns
    -------
    torch.Tensor
        ``(rows, vocab)``, float32. A row without a positive number gives 0.

    Examples
    --------
    >>> probs = torch.softmax(torch.randn(4, 128256), dim=-1)
    >>> kept = flashinfer.top_p_renorm_probs(probs, 0.9)
    """
    probs = as_float("top_p_renorm_probs", "probs", probs)
    top_ps, value = per_row("top_p_renorm_probs", "top_p", top_p, torch.float32, probs)
    out = new_empty(probs, probs.dtype, *probs.shape)
    _top_p_renorm_probs(out, probs, top_ps, value)
    return out


@flashinfer_api(trace=top_k_renorm_probs_trace)
def top_k_renorm_probs(
    probs: torch.Tensor, top_k: Union[torch.Tensor, int], is_deterministic: bool = False
) -> torch.Tensor:
    r"""Set to 0 what is below the ``top_k``-th largest of a row and divide the rest by its sum.

    Parameters
    ----------
    probs : torch.Tensor
        ``(rows, vocab)``, float32, float16 or bfloat16. Need not be normalised.
    top_k : Union[torch.Tensor, int]
        A number, or ``(rows,)`` for each row; see :func:`top_k_sampling_from_probs`.
    is_deterministic : bool
        Accepted for compatibility. Results never depend on scheduling.

    Returns
    -------
    torch.Tensor
        ``(rows, vocab)``, dtype of ``probs``. A row without a positive number gives 0.

    Examples
    --------
    >>> probs = torch.softmax(torch.randn(4, 128256), dim=-1)
    >>> kept = flashinfer.top_k_renorm_probs(probs, 50)
    """
    op = "top_k_renorm_probs"
    out = _room_for(op, "probs", probs)
    top_ks, value = per_row(op, "top_k", top_k, torch.int32, probs)
    _top_k_renorm_probs(out, probs, top_ks, value)
    return out


@flashinfer_api(trace=top_k_mask_logits_trace)
def top_k_mask_logits(logits: torch.Tensor, top_k: Union[torch.Tensor, int]) -> torch.Tensor:
    r"""Set to ``-inf`` what is below the ``top_k``-th largest logit of a row; its equals are kept.

    Parameters
    ----------
    logits : torch.Tensor
        ``(rows, vocab)``, float32, float16 or bfloat16. A NaN counts as larger than anything, one with a sign as
        smaller, and -0 as less than 0.
    top_k : Union[torch.Tensor, int]
        A number, or ``(rows,)`` for each row; see :func:`top_k_sampling_from_probs`.

    Returns
    -------
    torch.Tensor
        ``(rows, vocab)``, dtype of ``logits``.

    Examples
    --------
    >>> masked = flashinfer.top_k_mask_logits(torch.randn(4, 128256), 50)
    """
    op = "top_k_mask_logits"
    out = _room_for(op, "logits", logits)
    top_ks, value = per_row(op, "top_k", top_k, torch.int32, logits)
    _top_k_mask_logits(out, logits, top_ks, value)
    return out


top_p_renorm_prob, top_k_renorm_prob = top_p_renorm_probs, top_k_renorm_probs
