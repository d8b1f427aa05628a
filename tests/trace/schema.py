# SPDX-License-Identifier: Apache-2.0
"""Validation of definitions by the model of the published flashinfer-bench package."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest


@functools.cache
def _model() -> Any:
    return pytest.importorskip(
        "flashinfer_bench.data", reason="needs flashinfer-bench (pip install -e .[test])"
    ).Definition


def validate(definition: dict[str, Any]) -> None:
    """Raise unless the package accepts the definition.

    It wants other names for outputs than for inputs. Data sets name an output like the input that it overwrites, and so
    do ours; that one rule is not asked for.
    """
    renamed = copy.deepcopy(definition)
    renamed["outputs"] = {
        f"{name}_out" if name in renamed["inputs"] else name: entry for name, entry in renamed["outputs"].items()
    }
    _model().model_validate(renamed)
