# SPDX-License-Identifier: Apache-2.0
"""Tensors beside pages that nobody may touch, and calls drawn at random among them.

:func:`guarded` copies a tensor of the CPU so that its last byte (or its first) touches an unreadable page: a kernel
that goes one byte too far ends the process. :func:`check_calls` runs many drawn calls in a process of its own, and
fails with the call that ended it. A family has a module with ``CALLS``, a dictionary of functions that each draw a
call::

    def draw_rmsnorm(draw: Draw) -> Call:
        x = draw.tensor((draw.size(0, 1, 7), draw.size(1, 13, 64)), torch.bfloat16)
        return Call(flashinfer.rmsnorm, x, draw.tensor(x.shape[1] + draw.chance(0.1), torch.bfloat16))

    CALLS = {"rmsnorm": draw_rmsnorm}

and a test with ``check_calls("tests.norm.drawn_calls", share=0.05)``. ``FLASHINFER_TEST_CALLS=100000`` runs so many
calls in all families together, 2,000 without it; with ``FLASHINFER_TEST_RANDOM=1`` each run draws other calls.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import mmap
import os
import random
import re
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any, Callable, Iterator, Optional, Sequence, Union

import torch

from flashinfer._runtime.errors import ArgumentError, BackendSupportedError

from .fresh_process import run_python

__all__ = ["Call", "Draw", "check_calls", "guarded", "written_outside"]

PAGE = mmap.PAGESIZE
_PROT_NONE = 0
_CALLS_OF_ALL_FAMILIES = 2000
#: What fills the readable rest of the pages: NaN in every floating-point format, -1 in every integer.
_FILL = 0xFF
#: What a bad argument may raise; TypeError is for arguments of another type.
REFUSALS = (ArgumentError, BackendSupportedError, TypeError)

_PACKED = {getattr(torch, name) for name in ("float8_e8m0fnu", "float4_e2m1fn_x2") if hasattr(torch, name)}

_libc = ctypes.CDLL(None, use_errno=True)


def guarded(tensor: torch.Tensor, front: bool = False) -> torch.Tensor:
    """Return a copy with the same strides whose last byte lies before an unreadable page.

    With ``front``, its first byte lies behind such a page. Both pages exist in both cases; between the tensor and the
    other one are bytes of 0xFF, which :func:`written_outside` looks at. The address is a multiple of the element's
    size, no more. The memory is freed with the last tensor that shares it.
    """
    size = tensor.element_size() * _extent(tensor)
    room = -(-max(size, 1) // PAGE) * PAGE
    region = mmap.mmap(-1, room + 2 * PAGE)
    whole = torch.frombuffer(region, dtype=torch.uint8)  # the tensor keeps the region
    whole[PAGE:-PAGE] = _FILL
    for edge in (whole.data_ptr(), whole.data_ptr() + PAGE + room):
        if _libc.mprotect(ctypes.c_void_p(edge), ctypes.c_size_t(PAGE), _PROT_NONE):
            raise OSError(ctypes.get_errno(), "mprotect")
    begin = PAGE if front else PAGE + room - size
    numbers = whole[begin : begin + size].view(tensor.dtype)
    copy = numbers.as_strided(tensor.shape, tensor.stride())
    _once(copy).copy_(_once(tensor))
    guarded_copy: Any = copy
    guarded_copy.slack = (whole[PAGE:begin], whole[begin + size : -PAGE])
    return copy


def written_outside(tensor: torch.Tensor) -> bool:
    """Tell whether something was written to the rest of the pages of a :func:`guarded` tensor."""
    return any(bool((rest != _FILL).any()) for rest in getattr(tensor, "slack", ()))


def _extent(tensor: torch.Tensor) -> int:
    """Return the number of elements from the first to the last one in memory."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _once(tensor: torch.Tensor) -> torch.Tensor:
    """Leave out the repetitions of an expanded tensor, and view types that cannot be copied as bytes."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


class Draw(random.Random):
    """Random choices of one call; tensors are guarded, at their end or at their front."""

    def chance(self, probability: float) -> bool:
        return self.random() < probability

    def size(self, *sizes: int) -> int:
        return self.choice(sizes)

    def guard(self, tensor: torch.Tensor, front: Optional[bool] = None) -> torch.Tensor:
        return guarded(tensor, self.chance(0.3) if front is None else front)

    def tensor(self, shape: Union[int, Sequence[int]], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return normally distributed numbers; for integers and for bytes of packed types, all values."""
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        if (dtype.is_floating_point or dtype.is_complex) and dtype not in _PACKED:
            return self.guard(torch.randn(shape).to(dtype))
        if dtype is torch.bool:
            return self.guard(torch.rand(shape) < 0.5)
        values = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8)
        return self.guard(values.view(dtype).squeeze(-1))

    def indices(
        self,
        shape: Union[int, Sequence[int]],
        end: int,
        dtype: torch.dtype = torch.int64,
        outside: float = 0.2,
    ) -> torch.Tensor:
        """Return numbers below ``end``; with the probability ``outside``, some of them are negative or too large."""
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        numbers = torch.randint(0, max(end, 1), shape)
        if numbers.numel() and (self.chance(outside) or end <= 0):
            flat = numbers.view(-1)
            limits = torch.iinfo(dtype)
            for _ in range(self.randint(1, 3)):
                bad = self.choice((-1, -2, end, end + 1, 2 * end + 1, 1 << 20, limits.max, limits.min))
                flat[self.randrange(flat.numel())] = min(max(bad, limits.min), limits.max)
        return self.guard(numbers.to(dtype))

    def number(self, good: int, outside: float = 0.1) -> int:
        """Return ``good``, or with the probability ``outside`` a number that is no size."""
        return self.choice((-1, 0, good + 1, 2 * good, 1 << 40)) if self.chance(outside) else good


class Call:
    """A function and its arguments. ``check``, if there is one, looks at the result and raises AssertionError."""

    def __init__(
        self,
        function: Callable[..., Any],
        *args: Any,
        check: Optional[Callable[[Any], None]] = None,
        **kwargs: Any,
    ) -> None:
        self.function, self.args, self.kwargs, self.check = function, args, kwargs, check

    def __str__(self) -> str:
        words = [_describe(value) for value in self.args]
        words += [f"{name}={_describe(value)}" for name, value in self.kwargs.items()]
        return f"{getattr(self.function, '__name__', self.function)}({', '.join(words)})"

    def run(self) -> bool:
        """Make the call, and tell whether it was served; False: refused with a text that names the op."""
        try:
            result = self.function(*self.args, **self.kwargs)
        except REFUSALS as error:
            text = str(error)
            assert re.match(r"[\w.]+(: \S| does not support )|.*\bargument\b", text), f"the text names no op: {text}"
            return False
        finally:
            for tensor in _tensors((self.args, self.kwargs)):
                assert not written_outside(tensor), f"something was written beside {_describe(tensor)}"
        if self.check is not None:
            self.check(result)
        return True


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _describe(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        if isinstance(value, (tuple, list)):
            return f"[{', '.join(map(_describe, value))}]"
        return repr(value)
    words = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if value.numel() and value.dtype in (torch.int32, torch.int64):
        words += f" of {value.min()} to {value.max()}"
    return words if value.is_contiguous() else f"{words} strides {list(value.stride())}"


def check_calls(module: str, share: float) -> dict[str, list[int]]:
    """Run this share of all drawn calls, those of ``module.CALLS``, in a new process.

    Fail if the process crashes or hangs, if a call raises something else than an error of its arguments, if its check
    fails, or if something was written beside a tensor. Return the calls that were served and refused for each name;
    a name of which none was served fails too, because it tests nothing.
    """
    count = max(round(share * int(os.environ.get("FLASHINFER_TEST_CALLS") or _CALLS_OF_ALL_FAMILIES)), 1)
    seed = random.SystemRandom().randrange(1 << 32) if os.environ.get("FLASHINFER_TEST_RANDOM") else 0
    root = str(Path(__file__).parents[1])
    words = ["-c", f"import tests.guard_pages as g; g.run_calls({module!r}, {seed}, range({count}))"]
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    done = run_python(words, env={**os.environ, "PYTHONPATH": path}, cwd=root)
    *_, last = [line for line in done.stdout.splitlines() if line.startswith(("call ", "{"))] or ["no call"]
    if done.returncode != 0:
        reason = {0: "", 1: "failed"}.get(done.returncode, f"ended with status {done.returncode}")
        raise AssertionError(
            f"{last}\n{reason}\n{done.stderr[-4000:]}\nrepeat: PYTHONPATH=. python -c 'import tests.guard_pages as g; "
            f"g.run_calls({module!r}, {seed}, [{last.split()[1].rstrip(':')}])'"
        )
    counts: dict[str, list[int]] = json.loads(last)
    unserved = [name for name, (served, refused) in counts.items() if not served and refused > 5]
    assert not unserved, f"{unserved}: all calls were refused: {counts}"
    return counts


def run_calls(module: str, seed: int, indices: Sequence[int]) -> None:
    """Run calls in this process, naming each on standard output before it runs."""
    faulthandler.enable()
    draws = import_module(module).CALLS
    names = list(draws)
    counts = {name: [0, 0] for name in names}
    for index in indices:
        name = names[index % len(names)]
        torch.manual_seed(index + seed)
        call = draws[name](Draw(f"{seed} {index}"))
        os.write(1, f"call {index}: {call}\n".encode())  # at once: the process may end in the call
        try:
            counts[name][not call.run()] += 1
        except BaseException:
            traceback.print_exc()
            sys.exit(1)
    os.write(1, f"{json.dumps(counts)}\n".encode())
