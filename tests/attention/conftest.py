# SPDX-License-Identifier: Apache-2.0
"""Modules that many attention tests need are built side by side before the first of them."""

from __future__ import annotations

import pytest

from flashinfer.jit import build_jit_specs
from flashinfer.knobs import knobs

from ..conftest import DEVICES
from . import matrix


@pytest.fixture(scope="session", autouse=True)
def modules(request: pytest.FixtureRequest) -> None:
    """Only where the whole table runs: a single test builds what it needs."""
    cells = [
        item for item in request.session.items if item.nodeid.partition("[")[0].endswith("test_matrix.py::test_cell")
    ]
    if len(cells) > 100 and not knobs.disable_jit:
        build_jit_specs([spec for device in DEVICES for spec in matrix.specs(device)])
