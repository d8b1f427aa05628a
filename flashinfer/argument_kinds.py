# SPDX-License-Identifier: Apache-2.0
"""What was wrong with a call that native code refused: it can only number its arguments, this names them."""

from __future__ import annotations

import inspect
from typing import Any, Callable, Optional, get_args, get_type_hints

import torch

from .errors import ArgumentError

__all__ = ["explain_kinds"]

_ACCEPTED: dict[type, tuple[type, ...]] = {
    torch.Tensor: (torch.Tensor,),
    float: (float, int),
    int: (int, torch.SymInt),
    bool: (bool, int),
    str: (str,),
}


def explain_kinds(op: str, func: Callable[..., Any], error: Exception, *args: Any, **kwargs: Any) -> None:
    """Raise an error that names the first argument of a wrong type, or on a device without kernels; else return.

    Called after ``func(*args, **kwargs)`` raised ``error``, so it may take its time.
    """
    if isinstance(error, ArgumentError):  # which names it already
        return
    try:
        hints = get_type_hints(func)
    except NameError:  # of a function of somebody else, whose annotations are for type checkers only
        hints = {}
    arguments = inspect.signature(func).bind(*args, **kwargs).arguments
    for name, value in sorted(arguments.items(), key=lambda item: "out" in item[0]):  # outputs are made like inputs
        if isinstance(value, torch.Tensor) and value.device.type not in ("cpu", "cuda"):
            raise ArgumentError(f"{op}: {name} is on {value.device}, expected the CPU or a CUDA device") from error
        expected = _missed(hints.get(name), value)
        if expected is not None:
            raise TypeError(f"{op}: {name} is a {type(value).__name__}, expected {expected}") from error


def _missed(hint: Any, value: Any) -> Optional[str]:
    """The type that ``value`` should have had, or None when it has it."""
    kinds = get_args(hint) or (hint,)
    known = [kind for kind in kinds if kind in _ACCEPTED]
    accepted = tuple(kind for name in known for kind in _ACCEPTED[name])
    if not known or isinstance(value, accepted) or (value is None and type(None) in kinds):
        return None
    return " or ".join(kind.__name__ for kind in known)
