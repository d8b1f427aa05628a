# SPDX-License-Identifier: Apache-2.0
"""Drawing tokens from what top-k and top-p keep, one after the other or both at once."""

from __future__ import annotations

from typing import Optional, Union

import torch

from .._runtime.errors import ArgumentError
from ..api_logging import flashinfer_api
from ..trace.templates.sampling import top_k_top_p_sampling_from_logits_trace, top_k_top_p_sampling_trace
from .modules import FROM_JOINT, FROM_TOP_K_FIRST, Samples, draw
from .random_stream import Number

_METHODS = {"top_k_first": FROM_TOP_K_FIRST, "joint": FROM_JOINT}


def _method(op: str, filter_apply_order: str) -> int:
    method = _METHODS.get(filter_apply_order) if isinstance(filter_apply_order, str) else None
    if method is None:
        order = f"Invalid filter_apply_order: {filter_apply_order!r}"
        raise ArgumentError(f"{op}: {order}, expected 'top_k_first' or 'joint'")
    return method


@flashinfer_api(trace=top_k_top_p_sampling_from_logits_trace)
def top_k_top_p_sampling_from_logits(
    logits: torch.Tensor,
    top_k: Union[torch.Tensor, int],
    top_p: Union[torch.Tensor, float],
    indices: Optional[torch.Tensor] = None,
    filter_apply_order: str = "top_k_first",
    deterministic: bool = True,
    generator: Optional[torch.Generator] = None,
    check_nan: bool = False,
    seed: Optional[Number] = None,
    offset: Optional[Number] = None,
) -> torch.Tensor:
    r"""Draw a token of each row from what top-k and top-p keep of ``softmax(logits)``: the token that
    :func:`top_k_top_p_sampling_from_probs` draws from :func:`softmax`.

    The probabilities are made on the way: it allocates ``rows * vocab`` floats.

    Parameters
    ----------
    logits : torch.Tensor
        ``(rows, vocab)``.
    top_k, top_p
        As for :func:`top_k_sampling_from_probs` and :func:`top_p_sampling_from_probs`; tensors are by row of logits.
    indices, deterministic, generator, check_nan, seed, offset
        As for :func:`sampling_from_logits`.
    filter_apply_order : str
        ``"top_k_first"``: ``top_p`` is of the probability of what top-k keeps. ``"joint"``: of the whole row.

    Returns
    -------
    torch.Tensor
        ``(batch,)``, dtype of ``indices``, int32 without.

    Examples
    --------
    >>> tokens = flashinfer.top_k_top_p_sampling_from_logits(torch.randn(4, 128256), 50, 0.9)
    """
    op = "top_k_top_p_sampling_from_logits"
    return draw(
        op, _method(op, filter_apply_order), logits, True, indices, top_k, top_p, generator,
        check_nan, seed, offset, 32, False,
    )  # type: ignore[return-value]  # fmt: skip


@flashinfer_api(trace=top_k_top_p_sampling_trace)
def top_k_top_p_sampling_from_probs(
    probs: torch.Tensor,
    top_k: Union[torch.Tensor, int],
    top_p: Union[torch.Tensor, float],
    indices: Optional[torch.Tensor] = None,
    filter_apply_order: str = "top_k_first",
    deterministic: bool = True,
    generator: Optional[torch.Generator] = None,
    check_nan: bool = False,
    seed: Optional[Number] = None,
    offset: Optional[Number] = None,
    return_valid: bool = False,
) -> Samples:
    r"""Draw a token of each row from what top-k and top-p keep.

    Parameters
    ----------
    probs : torch.Tensor
        ``(rows, vocab)``, each row summing up to 1.
    top_k, top_p
        As for :func:`top_k_sampling_from_probs` and :func:`top_p_sampling_from_probs`; tensors are by row of ``probs``.
    indices, deterministic, generator, check_nan, seed, offset, return_valid
        As for :func:`sampling_from_probs`.
    filter_apply_order : str
        ``"top_k_first"``: ``top_p`` is of the probability of what top-k keeps. ``"joint"``: of the whole row.

    Returns
    -------
    torch.Tensor, or a pair of them
        As for :func:`sampling_from_probs`.

    Examples
    --------
    >>> probs = torch.softmax(torch.randn(4, 128256), dim=-1)
    >>> tokens = flashinfer.top_k_top_p_sampling_from_probs(probs, 50, 0.9)
    """
    op = "top_k_top_p_sampling_from_probs"
    return draw(
        op, _method(op, filter_apply_order), probs, False, indices, top_k, top_p, generator,
        check_nan, seed, offset, 32, return_valid,
    )  # fmt: skip
