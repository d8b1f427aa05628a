# SPDX-License-Identifier: Apache-2.0
"""Conversion of processors to ops: each processor gets the tensor type that the previous one produces."""

from __future__ import annotations

from typing import Optional, Sequence

from .op import Op
from .processors import LogitsProcessor
from .types import TensorType

__all__ = ["LegalizationError", "infer_initial_type", "legalize_processors", "validate_processor_chain"]


class LegalizationError(Exception):
    """Error of a processor at a place where its input has the wrong type."""


def legalize_processors(
    processors: Sequence[LogitsProcessor], initial_type: TensorType = TensorType.LOGITS
) -> list[Op]:
    """Return the ops of a list of processors that starts from a tensor of ``initial_type``.

    Examples
    --------
    >>> from flashinfer.logits_processor import Softmax, TopP, legalize_processors
    >>> [type(op).__name__ for op in legalize_processors([Softmax(), TopP()])]
    ['SoftmaxOp', 'TopPOp']
    """
    ops: list[Op] = []
    for i, processor in enumerate(processors):
        try:
            ops += processor.legalize(ops[-1].OUT if ops else initial_type)
        except ValueError as error:
            raise LegalizationError(f"processor {i}: {error}") from error
    return ops


def _accepts(processor: LogitsProcessor, input_type: TensorType) -> bool:
    try:
        processor.legalize(input_type)
    except ValueError:
        return False
    return True


def infer_initial_type(processor: LogitsProcessor) -> TensorType:
    """Return the input type of the first processor, if it accepts exactly one type."""
    accepted = [t for t in (TensorType.LOGITS, TensorType.PROBS) if _accepts(processor, t)]
    if len(accepted) != 1:
        raise LegalizationError(
            f"input_type must be given where it cannot be inferred, got None and {processor!r}, which takes "
            f"{' and '.join(t.name for t in accepted) or 'neither logits nor probabilities'}"
        )
    return accepted[0]


def validate_processor_chain(processors: Sequence[LogitsProcessor], initial_type: Optional[TensorType] = None) -> None:
    """Raise :class:`LegalizationError` unless each processor takes what the one before it gives."""
    if not processors:
        raise LegalizationError("the chain must have at least one processor, got none")
    legalize_processors(processors, initial_type or infer_initial_type(processors[0]))
