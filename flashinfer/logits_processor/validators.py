# SPDX-License-Identifier: Apache-2.0
"""Validity checks on a list of ops, run before compilation."""

from __future__ import annotations

from itertools import pairwise
from typing import Callable, Sequence

from .op import Op
from .operators import SoftmaxOp
from .types import TensorType

__all__ = [
    "CompileError",
    "ValidityCheck",
    "default_validity_checks",
    "get_default_validity_checks",
    "validate_pipeline",
]


class CompileError(Exception):
    """Error of a list of ops that is not a valid pipeline."""


#: Raises :class:`CompileError`.
ValidityCheck = Callable[[Sequence[Op]], None]


def check_not_empty(ops: Sequence[Op]) -> None:
    if not ops:
        raise CompileError("the pipeline must have at least one op, got no ops")


def check_one_softmax(ops: Sequence[Op]) -> None:
    count = sum(isinstance(op, SoftmaxOp) for op in ops)
    if count > 1:
        raise CompileError(f"the pipeline must have at most one softmax, got {count} softmax ops")


def check_indices_are_last(ops: Sequence[Op]) -> None:
    for i, op in enumerate(ops[:-1]):
        if op.OUT is TensorType.INDICES:
            raise CompileError(
                f"op {{i}} ({op!r}) must be the last (it samples), got op {i + 1} ({ops[i + 1]!r}) after it"
            )


def check_types_match(ops: Sequence[Op]) -> None:
    for i, (op, following) in enumerate(pairwise(ops)):
        if op.OUT is not following.IN:
            raise CompileError(
                f"op {i + 1} ({following!r}) must take {op.OUT.name}, which {op!r} makes, got {following.IN.name}"
            )


def check_first_op(ops: Sequence[Op]) -> None:
    if ops and ops[0].IN not in (TensorType.LOGITS, TensorType.PROBS):
        raise CompileError(f"op 0 ({ops[0]!r}) must take LOGITS or PROBS, got {ops[0].IN.name}")


def default_validity_checks() -> list[ValidityCheck]:
    """Return the default checks, in the order in which they run."""
    return [check_not_empty, check_one_softmax, check_indices_are_last, check_types_match, check_first_op]


get_default_validity_checks = default_validity_checks  # its published name


def validate_pipeline(ops: Sequence[Op], custom_validity_checks: Sequence[ValidityCheck] = ()) -> None:
    """Raise :class:`CompileError` unless a list of ops is a valid pipeline."""
    for check in (*default_validity_checks(), *custom_validity_checks):
        check(ops)
