# SPDX-License-Identifier: Apache-2.0
"""Tables of wrong arguments: good calls as ``name -> (shape, dtype)``, and the error text after each change."""

from __future__ import annotations

import re
from typing import Any, Callable, Mapping

import pytest
import torch

from flashinfer._runtime.errors import ArgumentError


def made(value: Any, device: str) -> Any:
    """Make a tensor for ``(shape, dtype)``; return anything else unchanged."""
    return torch.ones(value[0], device=device).to(value[1]) if isinstance(value, tuple) else value


def make_arguments(good: Mapping[str, Any], device: str) -> dict[str, Any]:
    return {name: made(value, device) for name, value in good.items()}


def with_bad(arguments: Mapping[str, Any], name: str, bad: Any, device: str) -> dict[str, Any]:
    """Return ``arguments`` with one replaced: by the result of ``bad`` if it is callable, else by ``bad`` itself."""
    return {**arguments, name: bad(arguments[name]) if callable(bad) else made(bad, device)}


def pattern(text: str) -> str:
    """Return a regular expression for ``text``, in which ``.*`` stands for anything and the rest for itself."""
    return ".*".join(map(re.escape, text.split(".*")))


def check_refused(function: Callable[..., Any], text: str, *args: Any, **kwargs: Any) -> None:
    """Check that the call is rejected with a message that begins with the function's name and contains ``text``.

    ``.*`` in the text stands for anything.
    """
    with pytest.raises(ArgumentError, match=pattern(text)) as caught:
        function(*args, **kwargs)
    assert str(caught.value).startswith(f"{function.__name__}: ")
