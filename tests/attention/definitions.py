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


def run_reference(api: Any, definition: dict[str, Any], arguments: dict[str, Any]) -> Any:
    """Call the reference of the template behind a definition, with arguments that the definition does not have, too."""
    template = api._trace_template
    templates = getattr(template, "templates", (template,))
    chosen = [one for one in templates if one.inputs.keys() == definition["inputs"].keys()]
    validate(definition)
    return next(one for one in chosen if definition["name"].startswith(one.prefix)).reference(**arguments)
