# SPDX-License-Identifier: Apache-2.0
"""The functions of the family with positional arguments only: parameters as array and number, no defaults."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any, Callable, Optional

import torch

from . import draw, joint, rows, speculative

_RANDOM = ("deterministic", "generator", "seed", "offset")


def _pick(array: Optional[torch.Tensor], value: Any) -> Any:
    return value if array is None else array


def _drawn(function: Callable[..., Any], parameters: int) -> Callable[..., Any]:
    """``f(input, indices, [array, value] * parameters, deterministic, generator, seed, offset, return_valid)``."""

    def call(input: torch.Tensor, indices: Optional[torch.Tensor], *rest: Any) -> Any:
        values = [_pick(rest[2 * i], rest[2 * i + 1]) for i in range(parameters)]
        random = dict(zip((*_RANDOM, "return_valid"), rest[2 * parameters :], strict=False))
        return function(input, *values, indices=indices, **random)

    return functools.wraps(function)(call)


def _renormed(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return ``f(input, array, value)``."""

    def call(input: torch.Tensor, array: Optional[torch.Tensor], value: Any, *_: Any) -> torch.Tensor:
        return function(input, _pick(array, value))

    return functools.wraps(function)(call)


def _softmax(
    logits: torch.Tensor, array: Optional[torch.Tensor], value: float, enable_pdl: Optional[bool] = None
) -> torch.Tensor:
    return rows.softmax(logits, _pick(array, value), enable_pdl)


def _joint(*arguments: Any) -> Any:
    call = functools.partial(joint.top_k_top_p_sampling_from_probs, filter_apply_order="joint")
    return _drawn(functools.update_wrapper(call, joint.top_k_top_p_sampling_from_probs), 2)(*arguments)


@functools.cache
def get_sampling_module() -> SimpleNamespace:
    """Return the functions in the form the logits pipeline calls: positional arguments, tensors first.

    A parameter is two arguments: an array or None, and the number to use if the array is None. Random functions also
    take ``deterministic, generator, seed, offset, return_valid``.
    """
    return SimpleNamespace(
        softmax=_softmax,
        sampling_from_probs=_drawn(draw.sampling_from_probs, 0),
        sampling_from_logits=_drawn(draw.sampling_from_logits, 0),
        top_p_sampling_from_probs=_drawn(draw.top_p_sampling_from_probs, 1),
        top_k_sampling_from_probs=_drawn(draw.top_k_sampling_from_probs, 1),
        min_p_sampling_from_probs=_drawn(draw.min_p_sampling_from_probs, 1),
        top_k_top_p_sampling_from_probs=_joint,
        top_p_renorm_probs=_renormed(rows.top_p_renorm_probs),
        top_k_renorm_probs=_renormed(rows.top_k_renorm_probs),
        top_k_mask_logits=_renormed(rows.top_k_mask_logits),
        chain_speculative_sampling=speculative.chain_speculative_sampling,
    )
