# SPDX-License-Identifier: Apache-2.0
"""Python functions as expression trees, for :func:`define_variant`: parsing, and evaluation by torch.

A tree knows no statements. Assignments are put where their names are used, and ``if ...: return`` becomes a
conditional expression.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import math
from dataclasses import dataclass
from typing import Any, Callable, Iterator, Mapping, NoReturn, Optional, Sequence

import torch

__all__ = ["Expression", "evaluate", "parse_function"]

_BINARY = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.Pow: "**",
    ast.BitAnd: "&",
    ast.BitOr: "|",
    ast.BitXor: "^",
    ast.LShift: "<<",
    ast.RShift: ">>",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.And: "and",
    ast.Or: "or",
}
_UNARY = {ast.USub: "negative", ast.UAdd: "positive", ast.Invert: "~", ast.Not: "not"}
#: Functions that may be called, and how often they take an argument: once, or at least twice.
_FUNCTIONS: dict[Any, tuple[str, bool]] = {
    abs: ("abs", False),
    bool: ("bool", False),
    float: ("float", False),
    int: ("int", False),
    max: ("max", True),
    min: ("min", True),
    math.exp: ("exp", False),
    math.log: ("log", False),
    math.sqrt: ("sqrt", False),
    math.tanh: ("tanh", False),
}
_WORDS = {
    ast.For: "a for loop",
    ast.While: "a while loop",
    ast.With: "a with block",
    ast.Try: "a try block",
    ast.AugAssign: "an augmented assignment",
    ast.Subscript: "indexing",
    ast.Lambda: "a lambda",
    ast.ListComp: "a comprehension",
    ast.GeneratorExp: "a generator",
    ast.NamedExpr: "an assignment expression",
    ast.JoinedStr: "a string",
    ast.Is: "`is`",
    ast.IsNot: "`is not`",
    ast.In: "`in`",
    ast.NotIn: "`not in`",  # codespell:ignore notin
    ast.MatMult: "`@`",
    ast.Expr: "an expression statement",
    ast.Pass: "`pass`",
}


@dataclass(frozen=True)
class Expression:
    """A node: ``op`` is an operator, the name of a function, ``if``, ``name`` or ``constant``."""

    op: str
    operands: tuple[Expression, ...] = ()
    value: Any = None

    def walk(self) -> Iterator[Expression]:
        yield self
        for operand in self.operands:
            yield from operand.walk()


def parse_function(function: Callable[..., Any], op: str) -> Expression:
    """The tree of what ``function`` returns; names are its parameters.

    Numbers found outside the function (globals, closures) are taken as they are now.

    Raises
    ------
    TypeError
        ``function`` is no Python function.
    ValueError
        It has no source, or uses something that has no place in an expression, which the text names.
    """
    if not inspect.isfunction(function):
        raise TypeError(f"{op}: function is {type(function).__name__}, expected a Python function")
    return _Parser(function, op).parse()


class _Parser:
    def __init__(self, function: Any, op: str) -> None:
        self.function, self.op = function, op
        self.parameters = list(inspect.signature(function).parameters)
        outer = inspect.getclosurevars(function)
        self.outer: dict[str, Any] = {**vars(builtins), **function.__globals__, **outer.nonlocals}

    def parse(self) -> Expression:
        node = self._definition()
        names = {name: Expression("name", value=name) for name in self.parameters}
        if isinstance(node, ast.Lambda):
            return self.expression(node.body, names)
        return self.block(node.body, names)

    def _definition(self) -> ast.FunctionDef | ast.Lambda:
        name, line = self.function.__name__, self.function.__code__.co_firstlineno
        try:
            tree = ast.parse("".join(inspect.findsource(self.function)[0]))
        except (OSError, SyntaxError) as error:
            raise ValueError(f"{self.op}: the source of {name} cannot be read ({error}); define it in a file") from None
        found = [node for node in ast.walk(tree) if self._may_be(node, line)]
        if len(found) != 1:
            raise ValueError(f"{self.op}: {len(found)} functions in line {line} could be {name}, expected 1; use def")
        return found[0]  # type: ignore[return-value]

    def _may_be(self, node: ast.AST, line: int) -> bool:
        if self.function.__name__ == "<lambda>":
            if not isinstance(node, ast.Lambda) or node.lineno != line:
                return False
        elif not isinstance(node, ast.FunctionDef) or _first_line(node) != line:
            return False
        a = node.args
        arguments = [*a.posonlyargs, *a.args, *([a.vararg] if a.vararg else []), *a.kwonlyargs]
        return [x.arg for x in (*arguments, *([a.kwarg] if a.kwarg else []))] == self.parameters

    def refuse(self, node: ast.AST, what: Optional[str] = None) -> NoReturn:
        what = what or _WORDS.get(type(node), type(node).__name__)
        line = f", line {number}" if (number := getattr(node, "lineno", 0)) else ""
        raise ValueError(f"{self.op}: {self.function.__name__}{line}: {what} is not supported in a variant")

    def block(self, body: Sequence[ast.stmt], names: Mapping[str, Expression]) -> Expression:
        """What a list of statements returns."""
        if not body:
            self.refuse(ast.Pass(), "a path that ends without return")
        first, rest = body[0], body[1:]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            return self.block(rest, names)  # docstring
        if isinstance(first, ast.Return):
            if first.value is None:
                self.refuse(first, "return without a value")
            return self.expression(first.value, names)
        if isinstance(first, ast.Assign) and len(first.targets) == 1 and isinstance(first.targets[0], ast.Name):
            return self.block(rest, {**names, first.targets[0].id: self.expression(first.value, names)})
        if isinstance(first, ast.AnnAssign) and isinstance(first.target, ast.Name) and first.value is not None:
            return self.block(rest, {**names, first.target.id: self.expression(first.value, names)})
        if isinstance(first, ast.If):
            condition = self.expression(first.test, names)
            taken = self.block([*first.body, *rest], names)
            return Expression("if", (condition, taken, self.block([*first.orelse, *rest], names)))
        self.refuse(first)

    def expression(self, node: ast.expr, names: Mapping[str, Expression]) -> Expression:
        if isinstance(node, ast.Constant):
            return self.constant(node, node.value)
        if isinstance(node, (ast.Name, ast.Attribute)):
            if isinstance(node, ast.Name) and node.id in names:
                return names[node.id]
            return self.constant(node, self.outside(node))
        if isinstance(node, ast.BinOp):
            return self.binary(node.op, [self.expression(x, names) for x in (node.left, node.right)])
        if isinstance(node, ast.BoolOp):
            return self.binary(node.op, [self.expression(x, names) for x in node.values])
        if isinstance(node, ast.UnaryOp):
            return Expression(_UNARY[type(node.op)], (self.expression(node.operand, names),))
        if isinstance(node, ast.Compare):
            values = [self.expression(x, names) for x in (node.left, *node.comparators)]
            pairs = [self.binary(op, values[i : i + 2]) for i, op in enumerate(node.ops)]
            return pairs[0] if len(pairs) == 1 else self.binary(ast.And(), pairs)
        if isinstance(node, ast.IfExp):
            return Expression("if", tuple(self.expression(x, names) for x in (node.test, node.body, node.orelse)))
        if isinstance(node, ast.Call):
            return self.call(node, names)
        self.refuse(node)

    def binary(self, operator: Any, operands: Sequence[Expression]) -> Expression:
        if type(operator) not in _BINARY:
            self.refuse(operator)
        tree = operands[0]
        for operand in operands[1:]:
            tree = Expression(_BINARY[type(operator)], (tree, operand))
        return tree

    def call(self, node: ast.Call, names: Mapping[str, Expression]) -> Expression:
        text = ast.unparse(node.func)
        known = isinstance(node.func, (ast.Name, ast.Attribute)) and text not in names
        target = self.outside(node.func) if known else None
        if not callable(target) or target not in _FUNCTIONS:
            self.refuse(node, f"a call of {text}()")
        name, variadic = _FUNCTIONS[target]
        operands = [self.expression(x, names) for x in node.args]
        if node.keywords or (len(operands) < 2 if variadic else len(operands) != 1):
            self.refuse(node, f"{text}() with {len(operands)} positional and {len(node.keywords)} named arguments")
        tree = Expression(name, (operands[0],)) if not variadic else operands[0]
        for operand in operands[1:]:
            tree = Expression(name, (tree, operand))
        return tree

    def outside(self, node: ast.expr) -> Any:
        """A value that the function finds in a closure, a module or among the builtins."""
        if isinstance(node, ast.Name):
            if node.id not in self.outer:
                self.refuse(node, f"the name {node.id}, which is unknown here,")
            return self.outer[node.id]
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in self.outer:
            owner = self.outer[node.value.id]
            if inspect.ismodule(owner) and hasattr(owner, node.attr):
                return getattr(owner, node.attr)
        self.refuse(node, f"the attribute {ast.unparse(node)}")

    def constant(self, node: ast.AST, value: Any) -> Expression:
        if not isinstance(value, (bool, int, float)):
            self.refuse(node, f"a value of type {type(value).__name__}")
        return Expression("constant", value=value)


def _first_line(node: ast.FunctionDef) -> int:
    return node.decorator_list[0].lineno if node.decorator_list else node.lineno


def _floor_divide(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.div(a, b, rounding_mode="floor")


_TORCH: dict[str, Callable[..., torch.Tensor]] = {
    "+": torch.add,
    "-": torch.sub,
    "*": torch.mul,
    "/": torch.true_divide,
    "//": _floor_divide,
    "%": torch.remainder,
    "**": torch.pow,
    "&": torch.bitwise_and,
    "|": torch.bitwise_or,
    "^": torch.bitwise_xor,
    "<<": torch.bitwise_left_shift,
    ">>": torch.bitwise_right_shift,
    "==": torch.eq,
    "!=": torch.ne,
    "<": torch.lt,
    "<=": torch.le,
    ">": torch.gt,
    ">=": torch.ge,
    "and": torch.logical_and,
    "or": torch.logical_or,
    "not": torch.logical_not,
    "negative": torch.neg,
    "positive": torch.positive,
    "~": torch.bitwise_not,
    "abs": torch.abs,
    "min": torch.minimum,
    "max": torch.maximum,
    "exp": torch.exp,
    "log": torch.log,
    "sqrt": torch.sqrt,
    "tanh": torch.tanh,
    "if": torch.where,
    "bool": lambda x: x != 0,
    "int": lambda x: x.trunc().long() if x.is_floating_point() else x.long(),
    "float": lambda x: x.float(),
}


def evaluate(tree: Expression, names: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The value of ``tree`` for tensors that broadcast; integers are int64, fractions float32."""
    if tree.op == "name":
        return names[tree.value]
    if tree.op == "constant":
        dtype = {bool: torch.bool, int: torch.int64, float: torch.float32}[type(tree.value)]
        return torch.tensor(tree.value, dtype=dtype, device="cpu")  # a CPU scalar goes with tensors of any device
    return _TORCH[tree.op](*(evaluate(operand, names) for operand in tree.operands))
