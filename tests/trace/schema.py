# SPDX-License-Identifier: Apache-2.0
"""The judge of definitions: the model of the published flashinfer-bench package."""

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
    """Raise unless the package accepts the definition."""
    _model().model_validate(copy.deepcopy(definition))
