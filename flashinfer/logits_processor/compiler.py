# SPDX-License-Identifier: Apache-2.0
"""Validation and fusion of a list of ops."""

from __future__ import annotations

from typing import Optional, Sequence

from .fusion_rules import FusionRule, default_fusion_rules
from .op import Op
from .validators import CompileError, ValidityCheck, default_validity_checks

__all__ = ["CompileError", "Compiler", "compile_pipeline"]

_MAX_FUSIONS = 1000  # fusions in one list; rules that undo each other would never end


class Compiler:
    """Validates, then fuses from left to right: at each place by the first matching rule, then one place back."""

    def __init__(self) -> None:
        self.validity_checks: list[ValidityCheck] = default_validity_checks()
        self.rules: list[FusionRule] = []
        for rule in default_fusion_rules():
            self.register_fusion_rule(rule)

    def register_fusion_rule(self, rule: FusionRule) -> None:
        """Add ``rule``; among rules of the same priority, those registered first are tried first."""
        if not rule.pattern:
            raise CompileError("a fusion rule must have at least one op in its pattern, got none")
        self.rules.append(rule)
        self.rules.sort(key=lambda r: -r.prio)

    def register_validity_check(self, check: ValidityCheck) -> None:
        """Add ``check``; ``check(ops)`` raises :class:`CompileError` for an invalid list."""
        self.validity_checks.append(check)

    def compile(self, ops: Sequence[Op]) -> list[Op]:
        """Return the ops to execute instead; :class:`CompileError` if a check fails."""
        for check in self.validity_checks:
            check(ops)
        compiled, place, fusions = list(ops), 0, 0
        while place < len(compiled):
            rule = self._find_rule(compiled, place)
            if rule is None:
                place += 1
                continue
            end = place + len(rule.pattern)
            compiled[place:end] = [rule.build(compiled[place:end])]
            place, fusions = max(place - 1, 0), fusions + 1
            if fusions > _MAX_FUSIONS:
                raise CompileError(f"fusion did not end after {_MAX_FUSIONS} steps: a rule builds what it matches")
        return compiled

    def _find_rule(self, ops: Sequence[Op], place: int) -> Optional[FusionRule]:
        for rule in self.rules:
            window = ops[place : place + len(rule.pattern)]
            if len(window) < len(rule.pattern):
                continue
            if all(isinstance(op, t) for op, t in zip(window, rule.pattern, strict=True)) and rule.guard(window):
                return rule
        return None


def compile_pipeline(
    ops: Sequence[Op],
    custom_fusion_rules: Optional[Sequence[FusionRule]] = None,
    custom_validity_checks: Optional[Sequence[ValidityCheck]] = None,
) -> list[Op]:
    """Compile with the default rules and checks, and with these in addition.

    Examples
    --------
    >>> from flashinfer.logits_processor import Sample, Temperature, compile_pipeline, legalize_processors
    >>> ops = legalize_processors([Temperature(), Sample()])
    >>> [type(op).__name__ for op in compile_pipeline(ops)]
    ['TemperatureOp', 'LogitsSampleOp']
    """
    compiler = Compiler()
    for rule in custom_fusion_rules or ():
        compiler.register_fusion_rule(rule)
    for check in custom_validity_checks or ():
        compiler.register_validity_check(check)
    return compiler.compile(ops)
