# SPDX-License-Identifier: Apache-2.0
"""Calls of the reference in a written trace definition."""

from __future__ import annotations

import inspect
from typing import Any

from ..trace.schema import validate


def run_definition(definition: dict[str, Any], arguments: dict[str, Any]) -> Any:
    """Execute the reference text of a definition."""
    validate(definition)
    scope: dict[str, Any] = {}
    exec(definition["reference"], scope)
    names = inspect.signature(scope["run"]).parameters
    assert list(names) == list(definition["inputs"])
    return scope["run"](**{name: arguments[name] for name in names})
