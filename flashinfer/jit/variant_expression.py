# SPDX-License-Identifier: Apache-2.0
"""Expression trees of Python functions, for :func:`define_variant`: parsing, and evaluation by torch.

A tree knows no statements. Assignments are put where their names are used, and ``if ...: return`` becomes a
conditional expression.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Callable, Mapping, NoReturn, Optional, Sequence

import numpy as np
import torch

__all__ = ["Expression", "evaluate", "parse_function", "plain_number"]

_MOST_PATHS = 1000

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
    ast.Assign: "an assignment to other than one name",
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
    """A node: ``op`` is an operator, the name of a function, ``if``, ``name`` or ``constant``.

    A local that is used twice is one node with two parents: walk over nodes, not over paths to them.
    """

    op: str
    operands: tuple[Expression, ...] = ()
    value: Any = None


def parse_function(function: Callable[..., Any], op: str) -> Expression:
    """Parse the expression that ``function`` returns into a tree; its names are the function's parameters.

    Numbers found outside the function (globals, closures) are taken as they are now.

    Raises
    ------
    TypeError
        ``function`` is no Python function.
    ValueError
        It has no source, or uses something that has no place in an expression, which the text names.
    """
    if not inspect.isfunction(function):
        raise TypeError(f"{op}: function must be a Python function, got {type(function).__name__}")
    try:
        return _Parser(function, op).parse()
    except RecursionError:
        raise ValueError(
            f"{op}: {function.__name__}: expressions nested as deeply as here are not supported in a variant"
        ) from None


def plain_number(value: Any) -> Any:
    """Convert a number of numpy, an enumeration or the like to a Python number; return anything else unchanged."""
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


class _Parser:
    def __init__(self, function: Any, op: str) -> None:
        self.function, self.op = function, op
        self.parameters = list(inspect.signature(function).parameters)
        self.paths = 0
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
            raise ValueError(
                f"{self.op}: line {line} must have 1 function that could be {name}, got {len(found)}; use def"
            )
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
        """Return the expression that a list of statements returns."""
        self.paths += 1
        if self.paths > _MOST_PATHS:
            self.refuse(ast.Pass(), f"a choice of more than {_MOST_PATHS} paths to a return")
        for i, statement in enumerate(body):
            if isinstance(statement, ast.Return):
                if statement.value is None:
                    self.refuse(statement, "return without a value")
                return self.expression(statement.value, names)
            if isinstance(statement, ast.If) and _returns(statement):
                condition, rest = self.expression(statement.test, names), body[i + 1 :]
                taken = self.block([*statement.body, *rest], names)
                return Expression("if", (condition, taken, self.block([*statement.orelse, *rest], names)))
            names = self.assigned(statement, names)
        self.refuse(ast.Pass(), "a path that ends without return")

    def assigned(self, statement: ast.stmt, names: Mapping[str, Expression]) -> Mapping[str, Expression]:
        """Return ``names`` after a statement that does not return."""
        match statement:
            case ast.Expr(value=ast.Constant(value=str())):  # docstring
                return names
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=ast.expr() as value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                return {**names, name: self.expression(value, names)}
        if not isinstance(statement, ast.If):
            self.refuse(statement)
        condition = self.expression(statement.test, names)
        taken = functools.reduce(lambda known, x: self.assigned(x, known), statement.body, names)
        other = functools.reduce(lambda known, x: self.assigned(x, known), statement.orelse, names)
        return {
            name: value if value is other[name] else Expression("if", (condition, value, other[name]))
            for name, value in taken.items()
            if name in other
        }

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
        """Return a value that the function finds in a closure, a module or among the builtins."""
        if isinstance(node, ast.Name):
            if node.id in self.function.__code__.co_varnames:
                self.refuse(node, f"the name {node.id}, which has no value on a path to here,")
            if node.id not in self.outer:
                self.refuse(node, f"the name {node.id}, which is unknown here,")
            return self.outer[node.id]
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in self.outer:
            owner = self.outer[node.value.id]
            if inspect.ismodule(owner) and hasattr(owner, node.attr):
                return getattr(owner, node.attr)
        self.refuse(node, f"the attribute {ast.unparse(node)}")

    def constant(self, node: ast.AST, value: Any) -> Expression:
        number = plain_number(value)
        if not isinstance(number, (bool, int, float)):
            self.refuse(node, f"a value of type {type(value).__name__}")
        return Expression("constant", value=number)


def _returns(statement: ast.stmt) -> bool:
    return any(isinstance(node, ast.Return) for node in ast.walk(statement))


def _first_line(node: ast.FunctionDef) -> int:
    return node.decorator_list[0].lineno if node.decorator_list else node.lineno


def _floor_divide(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return _unless_zero(lambda x, y: torch.div(x, y, rounding_mode="floor"), a, b)


def _remainder(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return _unless_zero(torch.remainder, a, b)


def _unless_zero(divide: Callable[..., torch.Tensor], a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Divide; an integer divided by 0 is 0, because torch also computes the branches that are not taken."""
    if a.is_floating_point() or b.is_floating_point():
        return divide(a, b)
    return divide(a, b.masked_fill(b == 0, 1)).masked_fill(b == 0, 0)


_TORCH: dict[str, Callable[..., torch.Tensor]] = {
    "+": torch.add,
    "-": torch.sub,
    "*": torch.mul,
    "/": torch.true_divide,
    "//": _floor_divide,
    "%": _remainder,
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
    """Evaluate ``tree`` for tensors that broadcast; integers are int64, fractions float32."""
    known: dict[int, torch.Tensor] = {}

    def value(node: Expression) -> torch.Tensor:
        if node.op == "name":
            return names[node.value]
        if node.op == "constant":
            dtype = {bool: torch.bool, int: torch.int64, float: torch.float32}[type(node.value)]
            return torch.tensor(node.value, dtype=dtype, device="cpu")  # a CPU scalar works with tensors of any device
        if id(node) not in known:
            known[id(node)] = _TORCH[node.op](*[value(operand) for operand in node.operands])
        return known[id(node)]

    return value(tree)
