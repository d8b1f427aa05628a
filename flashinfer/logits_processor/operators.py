# SPDX-License-Identifier: Apache-2.0
"""The ops: one for each processor and type of input, and fused ones that do the work of several.

A fused op keeps the defaults of the ops it replaces. It draws what they would have drawn from the same seed and offset;
how far a CUDA generator moves on is up to the function of :mod:`flashinfer.sampling` that is called. So is which of
several ``top_k`` or ``min_p`` belongs to an output where ``indices`` are given: steps take that of the row, the
functions that of the output.
"""

from __future__ import annotations

from numbers import Real
from typing import Any, Mapping, Union

import torch

from .. import sampling
from .._runtime.errors import ArgumentError
from ..sampling.modules import per_row
from .op import ParameterizedOp
from .types import TaggedTensor, TensorType

__all__ = [
    "FusedProbsMinPSampleOp",
    "FusedProbsTopKSampleOp",
    "FusedProbsTopKTopPSampleOp",
    "FusedProbsTopPSampleOp",
    "FusedTemperatureSoftmaxOp",
    "LogitsSampleOp",
    "LogitsTopKOp",
    "MinPOp",
    "ProbsSampleOp",
    "ProbsTopKOp",
    "SoftmaxOp",
    "TemperatureOp",
    "TopPOp",
]

Parameter = Union[int, float, torch.Tensor]


def _is_number(x: Any) -> bool:
    return isinstance(x, Real) and not isinstance(x, bool)


def _per_row(x: torch.Tensor, parameter: Parameter) -> Parameter:
    """Turn a tensor with one number per row of ``x`` into a column; return other parameters unchanged."""
    if isinstance(parameter, torch.Tensor) and parameter.ndim == 1 and len(parameter) == len(x):
        return parameter.unsqueeze(-1)
    return parameter


class _FilterOp(ParameterizedOp):
    """Base of filters: reads their parameters. A number must be in range; the kernel validates a tensor."""

    def _temperature(self, kwargs: Mapping[str, Any]) -> Parameter:
        value = self._get_param("temperature", kwargs)
        if not isinstance(value, torch.Tensor) and not (_is_number(value) and value > 0):
            raise ArgumentError(f"{type(self).__name__}: temperature must be a positive float, got {value!r}")
        return value

    def _top_k(self, kwargs: Mapping[str, Any]) -> Union[int, torch.Tensor]:
        value = self._get_param("top_k", kwargs)
        if not isinstance(value, torch.Tensor) and not (_is_number(value) and value > 0 and value % 1 == 0):
            raise ArgumentError(f"{type(self).__name__}: top_k must be a positive integer, got {value!r}")
        return value

    def _share(self, name: str, kwargs: Mapping[str, Any]) -> Union[float, torch.Tensor]:
        value = self._get_param(name, kwargs)
        if not isinstance(value, torch.Tensor) and not (_is_number(value) and 0 < value <= 1):
            raise ArgumentError(f"{type(self).__name__}: {name} must be a float in (0, 1], got {value!r}")
        return value


class TemperatureOp(_FilterOp):
    """Divide logits by the temperature."""

    IN = OUT = TensorType.LOGITS

    def __call__(self, tensor: TaggedTensor, **kwargs: Any) -> TaggedTensor:
        x = self._data(tensor)
        return TaggedTensor.logits(x / _per_row(x, self._temperature(kwargs)))


class SoftmaxOp(ParameterizedOp):
    """Convert logits to probabilities, in float32, with :func:`flashinfer.softmax`.

    Functions that sample from logits compute the same probabilities. With those of ``torch.softmax``, which round in
    another way, a filter may keep other tokens in long rows.
    """

    IN, OUT = TensorType.LOGITS, TensorType.PROBS

    def __call__(self, tensor: TaggedTensor, **kwargs: Any) -> TaggedTensor:
        logits = self._data(tensor)
        enable_pdl = self._get_param("enable_pdl", kwargs, required=False)
        if logits.ndim == 2:
            return TaggedTensor.probs(sampling.softmax(logits, None, enable_pdl))
        rows = logits.reshape(-1, logits.shape[-1])
        return TaggedTensor.probs(sampling.softmax(rows, None, enable_pdl).view(logits.shape))


class LogitsTopKOp(_FilterOp):
    """Set all but the k largest logits to -inf."""

    IN = OUT = TensorType.LOGITS

    def __call__(self, tensor: TaggedTensor, **kwargs: Any) -> TaggedTensor:
        return TaggedTensor.logits(sampling.top_k_mask_logits(self._data(tensor), self._top_k(kwargs)))


class ProbsTopKOp(_FilterOp):
    """Set all but the k largest probabilities to 0 and normalise the rest."""

    IN = OUT = TensorType.PROBS

    def __call__(self, tensor: TaggedTensor, **kwargs: Any) -> TaggedTensor:
        return TaggedTensor.probs(sampling.top_k_renorm_probs(self._data(tensor), self._top_k(kwargs)))


class TopPOp(_FilterOp):
    """Set all but the likeliest tokens, whose probabilities add up to ``top_p``, to 0 and normalise the rest."""

    IN = OUT = TensorType.PROBS

    def __call__(self, tensor: TaggedTensor, **kwargs: Any) -> TaggedTensor:
        deterministic = bool(self._get_param("is_deterministic", kwargs, required=False))
        return TaggedTensor.probs(
            sampling.top_p_renorm_probs(self._data(tensor), self._share("top_p", kwargs), deterministic)
        )


class MinPOp(_FilterOp):
    """Set tokens less likely than ``min_p`` times the likeliest to 0 and normalise the rest. NaN counts as 0."""

    IN = OUT = TensorType.PROBS

    def __call__(self, tensor: TaggedTensor, **kwargs: Any) -> TaggedTensor:
        probs = self._data(tensor)
        probs = probs.masked_fill(probs.isnan(), 0)
        rows, number = per_row(type(self).__name__, "min_p", self._share("min_p", kwargs), torch.float32, probs)
        least = (number if rows is None else rows.unsqueeze(-1)) * probs.amax(dim=-1, keepdim=True)
        kept = probs.masked_fill(probs < least, 0)
        total = kept.sum(dim=-1, keepdim=True)
        return TaggedTensor.probs(kept / total.masked_fill(total == 0, 1))


class _SampleOp(_FilterOp):
    """Base of sampling ops: collects the arguments of a draw."""

    OUT = TensorType.INDICES

    def _arguments(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        arguments = {
            name: self._get_param(name, kwargs, required=False)
            for name in ("indices", "generator", "seed", "offset", "check_nan", "deterministic")
        }
        arguments["check_nan"] = bool(arguments["check_nan"])
        if kwargs.get("is_deterministic") is not None:
            arguments["deterministic"] = kwargs["is_deterministic"]
        arguments["deterministic"] = arguments["deterministic"] is not False
        return arguments


class LogitsSampleOp(_SampleOp):
    """Draw a token from logits."""

    IN = TensorType.LOGITS

    def __call__(self, tensor: TaggedTensor, **kwargs: Any) -> TaggedTensor:
        return TaggedTensor.indices(sampling.sampling_from_logits(self._data(tensor), **self._arguments(kwargs)))


class ProbsSampleOp(_SampleOp):
    """Draw a token from probabilities."""

    IN = TensorType.PROBS

    def __call__(self, tensor: TaggedTensor, **kwargs: Any) -> TaggedTensor:
        return TaggedTensor.indices(sampling.sampling_from_probs(self._data(tensor), **self._arguments(kwargs)))


class FusedTemperatureSoftmaxOp(_FilterOp):
    """Fusion of :class:`TemperatureOp` and :class:`SoftmaxOp`."""

    IN, OUT = TensorType.LOGITS, TensorType.PROBS

    def __call__(self, tensor: TaggedTensor, **kwargs: Any) -> TaggedTensor:
        temperature = self._temperature(kwargs)
        logits = self._data(tensor)
        if isinstance(temperature, torch.Tensor):  # per row, however it was to be broadcast
            temperature = temperature.reshape(-1)
            temperature = temperature.expand(len(logits)) if len(temperature) == 1 else temperature
        enable_pdl = self._get_param("enable_pdl", kwargs, required=False)
        return TaggedTensor.probs(sampling.softmax(logits, temperature, enable_pdl))


class FusedProbsTopKSampleOp(_SampleOp):
    """Fusion of :class:`ProbsTopKOp` and :class:`ProbsSampleOp`."""

    IN = TensorType.PROBS

    def __call__(self, tensor: TaggedTensor, **kwargs: Any) -> TaggedTensor:
        top_k, arguments = self._top_k(kwargs), self._arguments(kwargs)
        return TaggedTensor.indices(sampling.top_k_sampling_from_probs(self._data(tensor), top_k, **arguments))


class FusedProbsTopPSampleOp(_SampleOp):
    """Fusion of :class:`TopPOp` and :class:`ProbsSampleOp`."""

    IN = TensorType.PROBS

    def __call__(self, tensor: TaggedTensor, **kwargs: Any) -> TaggedTensor:
        top_p, arguments = self._share("top_p", kwargs), self._arguments(kwargs)
        return TaggedTensor.indices(sampling.top_p_sampling_from_probs(self._data(tensor), top_p, **arguments))


class FusedProbsMinPSampleOp(_SampleOp):
    """Fusion of :class:`MinPOp` and :class:`ProbsSampleOp`."""

    IN = TensorType.PROBS

    def __call__(self, tensor: TaggedTensor, **kwargs: Any) -> TaggedTensor:
        min_p, arguments = self._share("min_p", kwargs), self._arguments(kwargs)
        return TaggedTensor.indices(sampling.min_p_sampling_from_probs(self._data(tensor), min_p, **arguments))


class FusedProbsTopKTopPSampleOp(_SampleOp):
    """Draw a token that passes both filters, each applied to the unfiltered probabilities ("joint")."""

    IN = TensorType.PROBS

    def __call__(self, tensor: TaggedTensor, **kwargs: Any) -> TaggedTensor:
        samples = sampling.top_k_top_p_sampling_from_probs(
            self._data(tensor),
            self._top_k(kwargs),
            self._share("top_p", kwargs),
            filter_apply_order="joint",
            **self._arguments(kwargs),
        )
        return TaggedTensor.indices(samples)
