# SPDX-License-Identifier: Apache-2.0
"""Processors: steps as a user names them. The input type of a processor determines its ops."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Callable, ClassVar, Mapping, Optional

from .._runtime.errors import ArgumentError
from .op import Op
from .operators import (
    LogitsSampleOp,
    LogitsTopKOp,
    MinPOp,
    ProbsSampleOp,
    ProbsTopKOp,
    SoftmaxOp,
    TemperatureOp,
    TopPOp,
)
from .types import TensorType

__all__ = ["LogitsProcessor", "MinP", "Sample", "Softmax", "Temperature", "TopK", "TopP"]


_Ops = Mapping[TensorType, Callable[..., Op]]


class LogitsProcessor(ABC):
    """A step as a user names it. Keyword arguments of the constructor are defaults of its parameters."""

    def __init__(self, **params: Any) -> None:
        self.params = params

    @abstractmethod
    def legalize(self, input_type: TensorType) -> list[Op]:
        """Return the ops for an input of this type; ``ValueError`` if there are none."""

    def __repr__(self) -> str:
        params = getattr(self, "params", {})  # a subclass with its own constructor may not set params
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in params.items())})"


class _OneOp(LogitsProcessor):
    """A processor that is one op for each type it can be applied to."""

    OPS: ClassVar[_Ops]

    def legalize(self, input_type: TensorType) -> list[Op]:
        if input_type not in self.OPS:
            expected = " or ".join(t.name for t in self.OPS)
            raise ArgumentError(f"{type(self).__name__}: the input must be of type {expected}, got {input_type.name}")
        return [self.OPS[input_type](**self.params)]


class Temperature(_OneOp):
    """Divide logits by ``temperature``: a positive float, or a tensor with one for each row."""

    OPS: ClassVar[_Ops] = {TensorType.LOGITS: TemperatureOp}


class Softmax(_OneOp):
    """Convert logits to probabilities."""

    OPS: ClassVar[_Ops] = {TensorType.LOGITS: SoftmaxOp}

    def __init__(self, enable_pdl: Optional[bool] = None, **params: Any) -> None:
        super().__init__(enable_pdl=enable_pdl, **params)


class TopK(_OneOp):
    """Keep the ``top_k`` largest: logits are masked, probabilities normalised.

    Parameters
    ----------
    joint_topk_topp : bool
        If :class:`TopP` and :class:`Sample` follow, and the pipeline is compiled, both filters see the probabilities as
        they come. Otherwise top-p sees what top-k left.
    **params
        Kept for the op, which has no others.
    """

    OPS: ClassVar[_Ops] = {TensorType.LOGITS: LogitsTopKOp, TensorType.PROBS: ProbsTopKOp}

    def __init__(self, joint_topk_topp: bool = False, **params: Any) -> None:
        super().__init__(joint_topk_topp=joint_topk_topp, **params)


class TopP(_OneOp):
    """Keep the likeliest tokens whose probabilities add up to ``top_p``."""

    OPS: ClassVar[_Ops] = {TensorType.PROBS: TopPOp}


class MinP(_OneOp):
    """Keep the tokens at least ``min_p`` times as likely as the likeliest."""

    OPS: ClassVar[_Ops] = {TensorType.PROBS: MinPOp}


class Sample(_OneOp):
    """Draw a token. Takes ``indices``, ``generator``, ``seed``, ``offset`` and ``check_nan`` of a call."""

    OPS: ClassVar[_Ops] = {TensorType.LOGITS: LogitsSampleOp, TensorType.PROBS: ProbsSampleOp}

    def __init__(self, deterministic: bool = True, **params: Any) -> None:
        super().__init__(deterministic=deterministic, **params)
