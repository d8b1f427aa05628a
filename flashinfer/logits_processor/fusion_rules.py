# SPDX-License-Identifier: Apache-2.0
"""Fusion rules: sequences of ops and the fused op that replaces each."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Sequence

from .op import Op, ParameterizedOp
from .operators import (
    FusedProbsMinPSampleOp,
    FusedProbsTopKSampleOp,
    FusedProbsTopKTopPSampleOp,
    FusedProbsTopPSampleOp,
    FusedTemperatureSoftmaxOp,
    MinPOp,
    ProbsSampleOp,
    ProbsTopKOp,
    SoftmaxOp,
    TemperatureOp,
    TopPOp,
)

__all__ = ["FusionRule", "default_fusion_rules", "get_default_fusion_rules"]


class FusionRule(NamedTuple):
    """Replace adjacent ops of the types ``pattern`` by ``build(ops)`` if ``guard(ops)``; higher ``prio`` first."""

    pattern: tuple[type[Op], ...]
    guard: Callable[[Sequence[Op]], bool]
    build: Callable[[Sequence[Op]], Op]
    prio: int = 0


def _always(ops: Sequence[Op]) -> bool:
    return True


def _is_joint(ops: Sequence[Op]) -> bool:
    return isinstance(ops[0], ParameterizedOp) and bool(ops[0].default_params.get("joint_topk_topp"))


def _fuse(fused: type[ParameterizedOp]) -> Callable[[Sequence[Op]], Op]:
    """Make one op with the default parameters of all."""

    def build(ops: Sequence[Op]) -> Op:
        defaults: dict[str, Any] = {}
        for op in ops:
            assert isinstance(op, ParameterizedOp)
            defaults |= op.default_params
        return fused(**defaults)

    return build


def default_fusion_rules() -> list[FusionRule]:
    return [
        FusionRule((TemperatureOp, SoftmaxOp), _always, _fuse(FusedTemperatureSoftmaxOp), 100),
        FusionRule((ProbsTopKOp, TopPOp, ProbsSampleOp), _is_joint, _fuse(FusedProbsTopKTopPSampleOp), 100),
        FusionRule((ProbsTopKOp, ProbsSampleOp), _always, _fuse(FusedProbsTopKSampleOp), 10),
        FusionRule((TopPOp, ProbsSampleOp), _always, _fuse(FusedProbsTopPSampleOp), 10),
        FusionRule((MinPOp, ProbsSampleOp), _always, _fuse(FusedProbsMinPSampleOp), 10),
    ]


get_default_fusion_rules = default_fusion_rules  # its published name
