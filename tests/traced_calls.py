# SPDX-License-Identifier: Apache-2.0
"""Calls made by the ``init`` of a trace, with one thing changed at random; :mod:`tests.guard_pages` runs them.

    CALLS = {"rmsnorm": traced(flashinfer.rmsnorm, batch_size=(0, 1, 7), hidden_size=(1, 13, 64))}

Every tensor lies beside an unreadable page. An unchanged call must be served, and give what it gives to tensors in
ordinary memory. One of these changes is made to the others:

- numbers of an integer tensor lie outside of everything: the call is refused, unless they are documented otherwise;
- a tensor is a view with gaps, lies in memory of the other sign, or has another integer dtype: the call is refused, or
  its result is the same;
- an output lies over an input, or its rows lie half over each other: the same;
- a tensor is shorter in one dimension: the call may be served or refused;
- an argument is a list that contains itself, or is nested 100,000 deep: the call may be served if it does not need the
  argument; Python's own RecursionError is a refusal too.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, Callable, Iterator, Optional

import torch

from .guard_pages import REFUSALS, Call, Draw, guarded

__all__ = ["ExpectedCall", "traced"]

Arguments = dict[str, Any]
Path = tuple[Any, ...]  #: keys that lead to a tensor: ("q",) or ("paged_kv_cache", 1)

_OUTSIDE = (-2, -(1 << 31), (1 << 31) - 1, 1 << 27)
_DEPTH = 100_000


class ExpectedCall(Call):
    """A call of which it is known whether it is served (True), refused (False), or that either is right (None)."""

    expected: Optional[bool] = None
    change = ""
    has_python_checks = False

    def __str__(self) -> str:
        return super().__str__() + self.change

    def run(self) -> bool:
        if self.has_python_checks and self.change.endswith(_nested.__name__):
            try:
                self.function(*self.args, **self.kwargs)
            except (*REFUSALS, AttributeError, RecursionError):
                return False
            return True
        try:
            served = super().run()
        except (RecursionError, KeyError):  # append_paged_kv_cache raises KeyError, as published
            if not self.change.endswith(_nested.__name__):
                raise
            return False
        if self.expected is not None:
            assert served == self.expected, "served, though it must be refused" if served else "refused"
        return served


def traced(
    function: Callable[..., Any],
    *,
    any_number: tuple[str, ...] = (),
    any_strides: tuple[str, ...] = (),
    keeps_rest: bool = False,
    has_python_checks: bool = False,
    more: Optional[Callable[[Draw, Arguments], Arguments]] = None,
    init: Optional[Callable[..., Arguments]] = None,
    **axes: tuple[int, ...],
) -> Callable[[Draw], Call]:
    """Return a function that draws a call.

    Parameters
    ----------
    function : Callable
        The API.
    any_number : tuple of str
        Integer tensors in which any number is right, which may not be read as a whole, or in which numbers outside are
        documented to be left out.
    any_strides : tuple of str
        Tensors that kernels read with any strides, so that a view with the other sign is not seen (docs/support.md).
    keeps_rest : bool
        True if parts of the result are not written, so that results are not compared.
    has_python_checks : bool
        True if the function asks for the shape of a tensor before a launcher sees it: the error for a list is Python's.
    more : Callable
        Returns further arguments, given those of ``init``.
    init : Callable
        Makes the arguments in place of the trace's ``init``.
    axes : tuple of int
        Sizes to choose from.
    """

    def draw_call(draw: Draw) -> Call:
        sizes = {name: draw.choice(values) for name, values in axes.items()}
        if init is not None:
            made = init(**sizes)
        else:
            made = function.fi_init(**sizes, device="cpu")  # type: ignore[attr-defined]
        if more is not None:
            made |= more(draw, made)
        changes = [None, None, None, _view, _negative, _other_integer, _shorter, _nested]
        if "out" in inspect.signature(function).parameters:
            changes += [_over_input, _over_itself]
        if any(_is_index(x) for _, x in _tensors(made)):
            changes += [_outside, _outside]
        change = draw.choice(changes)
        wanted = None if keeps_rest or change in (_outside, _shorter, _nested) else _results(function, made)
        changed = _copy(made)
        expected = True if change is None else change(draw, function, changed)
        if change is _outside and expected is not None:
            expected = None if set(any_number) & _different(made, changed) else False
        if change is _negative and set(any_strides) & _different(made, changed):
            change, changed, expected = None, _copy(made), True
        if wanted is None and expected:
            expected = None
        if change not in (_negative, _over_input):  # these lie in memory of their own
            changed = _guard(changed, draw)
        call = ExpectedCall(_with_lists(function), **changed)
        call.has_python_checks = has_python_checks
        call.expected, call.change = expected, "" if change is None else f" with {change.__name__}"
        if wanted is not None:
            is_moved = change is _over_input  # then the call overwrites an input
            call.check = lambda result: _compare(
                *((result, wanted[0]) if is_moved else ((result, _written(function, changed)), wanted))
            )
        torch.manual_seed(0)
        return call

    return draw_call


def _with_lists(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(**arguments: Any) -> Any:
        return function(**{name: value.of if isinstance(value, Nested) else value for name, value in arguments.items()})

    return call


def _different(made: Arguments, changed: Arguments) -> set[str]:
    """Return the names of tensors of which one is another view, or has other numbers."""
    changes = set()
    for (path, x), (_, y) in zip(_tensors(made), _tensors(changed), strict=True):
        if x.stride() != y.stride() or (_is_index(x) and not torch.equal(x, y)):
            changes.add(path[0])
    return changes


def _written(function: Callable[..., Any], arguments: Arguments) -> list[torch.Tensor]:
    """Return the tensors among the arguments, any of which the call may have written to."""
    return [x for path, x in _tensors(arguments) if path[0] != "out"]


def _results(function: Callable[..., Any], arguments: Arguments) -> Any:
    """Return what the call gives with tensors in ordinary memory, or None if it is refused."""
    copies = _copy(arguments)
    torch.manual_seed(0)
    try:
        result = function(**copies)
    except REFUSALS:
        return None
    return _copy(result), _written(function, copies)


def _compare(got: Any, wanted: Any) -> None:
    got, wanted = ([x for _, x in _tensors({"": value})] for value in (got, wanted))
    assert len(got) == len(wanted)
    for x, y in zip(got, wanted, strict=True):
        if _is_index(x) and _is_index(y):
            x, y = x.long(), y.long()
        assert x.shape == y.shape and x.dtype == y.dtype
        if x.dtype.itemsize == 1 and x.dtype.is_floating_point:
            x, y = x.view(torch.uint8), y.view(torch.uint8)
        if not torch.equal(x, y):
            torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2, equal_nan=True)


# Changes: they alter the arguments and say whether the call must be served (True), refused (False), or neither (None).


def _outside(draw: Draw, function: Any, arguments: Arguments) -> Optional[bool]:
    path, x = draw.choice([(path, x) for path, x in _tensors(arguments) if _is_index(x)])
    if x.numel() == 0:
        return None
    limits = torch.iinfo(x.dtype)
    x = x.clone()
    number = min(max(draw.choice(_OUTSIDE), limits.min), limits.max)
    x.view(-1)[draw.randrange(x.numel())] = number
    _put(arguments, path, x)
    return False


def _view(draw: Draw, function: Any, arguments: Arguments) -> Optional[bool]:
    path, x = draw.choice(list(_tensors(arguments)))
    if x.ndim:
        wide = [*x.shape]
        dim = draw.randrange(x.ndim)
        step = draw.choice((1, 1, 2))
        wide[dim] = wide[dim] * step + draw.choice((1, 3, 8, 16))
        whole = torch.zeros(wide, dtype=x.dtype)
        view = whole[(slice(None),) * dim + (slice(0, x.shape[dim] * step, step),)]
        _fill(view, x)
        _put(arguments, path, view)
    return None


def _negative(draw: Draw, function: Any, arguments: Arguments) -> Optional[bool]:
    floats = [(path, x) for path, x in _tensors(arguments) if x.dtype in (torch.float32, torch.float16)]
    if floats:
        path, x = draw.choice(floats)
        view = torch.view_as_complex(torch.stack([torch.zeros_like(x), -x], dim=-1)).conj().imag
        if x.ndim and x.shape[-1] > 1 and not view.is_contiguous():  # others look like tensors of one column
            _put(arguments, path, view)
    return None


def _other_integer(draw: Draw, function: Any, arguments: Arguments) -> Optional[bool]:
    indices = [(path, x) for path, x in _tensors(arguments) if _is_index(x)]
    if indices:
        path, x = draw.choice(indices)
        _put(arguments, path, x.to(torch.int64 if x.dtype is torch.int32 else torch.int32))
    return None


def _shorter(draw: Draw, function: Any, arguments: Arguments) -> Optional[bool]:
    path, x = draw.choice(list(_tensors(arguments)))
    if x.ndim:
        dim = draw.randrange(x.ndim)
        x = x.narrow(dim, 0, max(x.shape[dim] - draw.choice((1, 1, 2, x.shape[dim])), 0))
        _put(arguments, path, x.contiguous() if draw.chance(0.5) else x)
    return None


def _nested(draw: Draw, function: Any, arguments: Arguments) -> Optional[bool]:
    value: list[Any] = []
    if is_itself := draw.chance(0.5):
        value.append(value)
    for _ in range(0 if is_itself else _DEPTH):
        value = [value]
    names = [p.name for p in inspect.signature(function).parameters.values() if p.kind != p.VAR_KEYWORD]
    arguments[draw.choice(names)] = Nested(value, "a list in itself" if is_itself else "a deep list")
    return None


def _over_input(draw: Draw, function: Any, arguments: Arguments) -> Optional[bool]:
    """Put the output into the memory of an input, at its begin or at its second half."""
    out, inputs = _output(function, arguments), [x for _, x in _tensors(arguments) if x.numel()]
    if out is not None and out.numel() and inputs:
        source = max(inputs, key=lambda x: x.nbytes) if draw.chance(0.5) else draw.choice(inputs)
        memory = torch.empty(2 * (out.nbytes + source.nbytes) + 64, dtype=torch.uint8)
        for path, x in list(_tensors(arguments)):
            if x is source:
                moved = memory[: _bytes(x)].view(x.dtype).as_strided(x.shape, x.stride())
                _fill(moved, x)
                _put(arguments, path, moved)
        begin = draw.choice((0, 0, _bytes(source) // 2 // 16 * 16))
        arguments["out"] = memory[begin : begin + out.nbytes].view(out.dtype).view(out.shape)
    return None


def _over_itself(draw: Draw, function: Any, arguments: Arguments) -> Optional[bool]:
    """Let the rows of an output lie half over each other."""
    out = _output(function, arguments)
    if out is not None and out.ndim > 1 and out.shape[-1] > 1 and out.shape[-2] > 1:
        strides = [*out.stride()]
        strides[-2] = draw.choice((out.shape[-1] // 2, out.shape[-1] - 1))
        arguments["out"] = torch.zeros(out.numel(), dtype=out.dtype).as_strided(out.shape, strides)
    return None


def _output(function: Any, arguments: Arguments) -> Optional[torch.Tensor]:
    if arguments.get("out") is not None:
        return arguments["out"]
    torch.manual_seed(0)
    try:
        result = function(**_copy(arguments))
    except REFUSALS:
        return None
    return result if isinstance(result, torch.Tensor) else None


# Tensors in arguments -------------------------------------------------------------------------------------------


class Nested:
    """Stands for a nested list where arguments are copied and described, which would not end."""

    def __init__(self, of: list[Any], text: str) -> None:
        self.of, self.text = of, text

    def __repr__(self) -> str:
        return self.text


def _is_index(x: torch.Tensor) -> bool:
    return x.dtype in (torch.int32, torch.int64)


def _tensors(arguments: Arguments) -> Iterator[tuple[Path, torch.Tensor]]:
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            yield (name,), value
        elif isinstance(value, (tuple, list)):
            for path, x in _tensors(dict(enumerate(value))):
                yield (name, *path), x


def _put(arguments: Arguments, path: Path, x: torch.Tensor) -> None:
    name, *rest = path
    if rest:
        values = dict(enumerate(arguments[name]))
        _put(values, tuple(rest), x)
        arguments[name] = tuple(values.values())
    else:
        arguments[name] = x


def _copy(value: Any) -> Any:
    """Copy tensors with their strides."""
    if isinstance(value, dict):
        return {name: _copy(one) for name, one in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_copy(one) for one in value) if not hasattr(value, "_fields") else value
    if not isinstance(value, torch.Tensor):
        return value
    copy = torch.empty(_bytes(value), dtype=torch.uint8).view(value.dtype).as_strided(value.shape, value.stride())
    _fill(copy, value)
    return copy


def _bytes(x: torch.Tensor) -> int:
    if x.numel() == 0:
        return 0
    return x.element_size() * (1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)))


def _fill(to: torch.Tensor, source: torch.Tensor) -> None:
    """Copy elements; torch copies neither packed types nor to repeated elements."""
    for dim, stride in enumerate(source.stride()):
        if stride == 0 and to.stride(dim) == 0 and source.shape[dim] > 1:
            to, source = to.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    if source.dtype.itemsize == 1:
        to, source = to.view(torch.uint8), source.view(torch.uint8)
    to.copy_(source)


def _guard(value: Any, draw: Draw) -> Any:
    if isinstance(value, dict):
        return {name: _guard(one, draw) for name, one in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_guard(one, draw) for one in value)
    return guarded(value, draw.chance(0.3)) if isinstance(value, torch.Tensor) else value
