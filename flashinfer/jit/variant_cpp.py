# SPDX-License-Identifier: Apache-2.0
"""C++ of an expression tree with Python's semantics: ``//`` and ``%`` round down, ``/`` makes fractions.

Indices, lengths and run-time parameters are 32-bit. Sums and products of them are 64-bit, so that no window or stride
that a caller may pass overflows; quotients and remainders stay 32-bit where both operands are, because a GPU divides 64
bits in software. Fractions are float.

A node with several parents becomes a local variable of the C++ code too, so the text grows with the function and not
with its paths. Locals are computed before any condition is evaluated, so an integer divided by 0 is 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Mapping, NoReturn

from .variant_expression import Expression

__all__ = ["HELPERS", "CppWriter", "Typed"]

#: Members of the struct that the text of an expression may call.
HELPERS = """
  template <typename T>
  static FLASHINFER_HD T FloorDivide(T a, T b) {
    if (b == 0) return 0;
    const T quotient = a / b;
    return quotient - T(quotient * b != a && (a < 0) != (b < 0));
  }
  static FLASHINFER_HD float FloorDivide(float a, float b) {
    const float quotient = (a - ::fmodf(a, b)) / b;
    const float below = ::floorf(quotient);
    const float nearest = quotient - below > 0.5f ? below + 1.f : below;
    return nearest - float(NeedsStep(::fmodf(a, b), b));
  }
  template <typename T>
  static FLASHINFER_HD T FloorModulo(T a, T b) {
    if (b == 0) return 0;
    const T rest = a % b;
    return NeedsStep(rest, b) ? rest + b : rest;
  }
  static FLASHINFER_HD float FloorModulo(float a, float b) {
    const float rest = ::fmodf(a, b);
    return NeedsStep(rest, b) ? rest + b : rest;
  }
  template <typename T>
  static FLASHINFER_HD bool NeedsStep(T rest, T b) {
    return rest != 0 && (rest < 0) != (b < 0);
  }
  template <typename T>
  static FLASHINFER_HD T Absolute(T a) {
    return a < 0 ? -a : a;
  }
  template <typename T>
  static FLASHINFER_HD T Least(T a, T b) {
    return b < a ? b : a;
  }
  template <typename T>
  static FLASHINFER_HD T Greatest(T a, T b) {
    return a < b ? b : a;
  }
"""

_ARTICLES = {"bool": "a truth value", "int": "an integer", "float": "a fraction"}
_COMPARISONS = ("==", "!=", "<", "<=", ">", ">=")
_CALLS = {"//": "FloorDivide", "%": "FloorModulo", "min": "Least", "max": "Greatest"}
_MATH = {"exp": "::expf", "log": "::logf", "sqrt": "::sqrtf", "tanh": "::tanhf"}


@dataclass(frozen=True)
class Typed:
    """C++ text of a value. ``kind`` is bool, int or float; a ``wide`` int has 64 bits."""

    text: str
    kind: str
    wide: bool = False

    @property
    def type(self) -> str:
        return ("int64_t" if self.wide else "int32_t") if self.kind == "int" else self.kind

    def as_float(self) -> str:
        return self.text if self.kind == "float" else f"float({self.text})"

    def as_int(self, wide: bool) -> str:
        return f"int64_t({self.text})" if wide and not self.wide else self.text


def shared_nodes(tree: Expression) -> set[int]:
    """Return the ids of the nodes below ``tree`` that have several parents."""
    seen, shared, ahead = {id(tree)}, set(), [tree]
    while ahead:
        for operand in ahead.pop().operands:
            if id(operand) in seen:
                shared.add(id(operand))
            else:
                seen.add(id(operand))
                ahead.append(operand)
    return shared


class CppWriter:
    """Writer of trees over ``names``. ``where`` begins errors; ``statements`` define the locals of the last tree."""

    def __init__(self, names: Mapping[str, Typed], where: str) -> None:
        self.names, self.where = names, where
        self.statements: list[str] = []
        self.shared: set[int] = set()
        self.locals: dict[int, Typed] = {}

    def refuse(self, what: str, found: str, expected: str) -> NoReturn:
        raise TypeError(f"{self.where}: {what} must be {expected}, got {_ARTICLES[found]}")

    def write(self, tree: Expression) -> Typed:
        self.shared, self.statements, self.locals = shared_nodes(tree), [], {}
        return self.node(tree)

    def node(self, tree: Expression) -> Typed:
        if tree.op == "name":
            return self.names[tree.value]
        if tree.op == "constant":
            return self.constant(tree.value)
        if id(tree) not in self.shared:
            return self.operation(tree, [self.node(operand) for operand in tree.operands])
        if id(tree) not in self.locals:
            value = self.operation(tree, [self.node(operand) for operand in tree.operands])
            name = f"local_{len(self.locals)}"
            self.statements.append(f"const {value.type} {name} = {value.text};")
            self.locals[id(tree)] = Typed(name, value.kind, value.wide)
        return self.locals[id(tree)]

    def operation(self, tree: Expression, operands: list[Typed]) -> Typed:
        if tree.op in ("and", "or", "not", "if"):
            return self.logic(tree.op, operands)
        if tree.op in ("bool", "int", "float"):
            return self.convert(tree.op, operands[0])
        if tree.op in ("&", "|", "^", "<<", ">>", "~"):
            return self.bits(tree.op, operands)
        for operand in operands:
            if operand.kind == "bool" and tree.op not in ("==", "!="):
                self.refuse(f"an operand of `{tree.op}`", "bool", "a number")
        if tree.op in _MATH:
            return Typed(f"{_MATH[tree.op]}({operands[0].as_float()})", "float")
        if len(operands) == 1:
            return self.sign(tree.op, operands[0])
        if tree.op in _COMPARISONS:
            return self.compare(tree.op, *operands)
        return self.arithmetic(tree, *operands)

    def constant(self, value: object) -> Typed:
        if isinstance(value, bool):
            return Typed("true" if value else "false", "bool")
        if isinstance(value, int):
            if not -(2**63) < value < 2**63:
                raise ValueError(f"{self.where}: a constant must fit 64 bits, got {value}, which is not supported")
            wide = not -(2**31) < value < 2**31
            return Typed(f"int64_t({value}ll)" if wide else f"int32_t({value})", "int", wide)
        assert isinstance(value, float)
        if math.isinf(value):
            return Typed("math::inf" if value > 0 else "(-math::inf)", "float")
        return Typed(f"float({value!r})" if not math.isnan(value) else "float(NAN)", "float")

    def logic(self, op: str, operands: list[Typed]) -> Typed:
        truths = operands[:1] if op == "if" else operands
        for operand in truths:
            if operand.kind != "bool":
                self.refuse("a condition" if op == "if" else f"an operand of `{op}`", operand.kind, "a truth value")
        if op == "not":
            return Typed(f"(!{operands[0].text})", "bool")
        if op != "if":
            return Typed(f"({operands[0].text} {'&&' if op == 'and' else '||'} {operands[1].text})", "bool")
        condition, taken, other = operands
        if "bool" in (taken.kind, other.kind) and taken.kind != other.kind:
            number = other if taken.kind == "bool" else taken
            self.refuse("one side of a conditional", "bool", f"{_ARTICLES[number.kind]} as on the other")
        a, b, kind, wide = self.common(taken, other)
        return Typed(f"({condition.text} ? {a} : {b})", kind, wide)

    def convert(self, op: str, operand: Typed) -> Typed:
        if op == "float":
            return Typed(operand.as_float(), "float")
        if op == "bool":
            return operand if operand.kind == "bool" else Typed(f"({operand.text} != 0)", "bool")
        return operand if operand.kind == "int" else Typed(f"int64_t({operand.text})", "int", True)

    def bits(self, op: str, operands: list[Typed]) -> Typed:
        kinds = {x.kind for x in operands}
        if kinds == {"bool"} and op in ("&", "|", "^"):
            return Typed(f"({operands[0].text} {op} {operands[1].text})", "bool")
        if kinds == {"bool", "int"} and op in ("&", "|", "^"):
            self.refuse(f"one operand of `{op}`", "bool", "an integer as on the other side")
        if kinds != {"int"}:
            found = "float" if "float" in kinds else "bool"
            self.refuse(f"an operand of `{op}`", found, "an integer")
        wide = op in ("<<", "~") or any(x.wide for x in operands)
        texts = [x.as_int(wide) for x in operands]
        return Typed(f"(~{texts[0]})" if op == "~" else f"({texts[0]} {op} {texts[1]})", "int", wide)

    def sign(self, op: str, operand: Typed) -> Typed:
        if op == "positive":
            return operand
        wide = operand.kind == "int"  # the negative of the lowest integer needs more bits
        text = operand.as_int(True) if wide else operand.text
        return Typed(f"(-{text})" if op == "negative" else f"Absolute({text})", operand.kind, wide)

    def common(self, a: Typed, b: Typed, widen: bool = False) -> tuple[str, str, str, bool]:
        """Convert two operands to their common type; return both, the kind, and whether it is wide."""
        if a.kind == b.kind == "bool":
            return a.text, b.text, "bool", False
        if "float" in (a.kind, b.kind):
            return a.as_float(), b.as_float(), "float", False
        wide = widen or a.wide or b.wide
        return a.as_int(wide), b.as_int(wide), "int", wide

    def compare(self, op: str, a: Typed, b: Typed) -> Typed:
        if "bool" in (a.kind, b.kind) and a.kind != b.kind:
            self.refuse(f"one operand of `{op}`", "bool", "a number as on the other side")
        left, right, _, _ = self.common(a, b)
        return Typed(f"({left} {op} {right})", "bool")

    def arithmetic(self, tree: Expression, a: Typed, b: Typed) -> Typed:
        if tree.op == "/":
            return Typed(f"({a.as_float()} / {b.as_float()})", "float")
        if tree.op == "**":
            return self.power(a, b, tree.operands[1])
        left, right, kind, wide = self.common(a, b, widen=tree.op in ("+", "-", "*"))
        if tree.op in _CALLS:
            return Typed(f"{_CALLS[tree.op]}({left}, {right})", kind, wide)
        return Typed(f"({left} {tree.op} {right})", kind, wide)

    def power(self, a: Typed, b: Typed, exponent: Expression) -> Typed:
        """Raise to a power: integers to a small constant power stay integers; everything else is a fraction."""
        if a.kind == b.kind == "int":
            n = exponent.value
            if exponent.op != "constant" or not 0 <= n <= 8:
                raise ValueError(
                    f"{self.where}: `**` of integers is not supported unless the exponent is one of 0 to 8"
                )
            if n < 2:  # in parentheses, a cast alone in front of `*` reads as a type
                return Typed(a.as_int(True) if n else "int64_t(1)", "int", True)
            return Typed(f"({' * '.join([a.as_int(True)] * n)})", "int", True)
        return Typed(f"::powf({a.as_float()}, {b.as_float()})", "float")
