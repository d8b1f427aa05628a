# SPDX-License-Identifier: Apache-2.0
"""Build the modules that many attention tests need in parallel before the first test runs."""

from __future__ import annotations

import pytest

from flashinfer._runtime.knobs import knobs
from flashinfer.jit import build_jit_specs

from ..conftest import DEVICES
from . import matrix

_MANY = 50  # selected cells; smaller selections build their modules on first use, one after the other


@pytest.fixture(scope="session", autouse=True)
def modules(request: pytest.FixtureRequest) -> None:
    if knobs.disable_jit:
        return
    wanted = []
    for device in DEVICES:
        cells = [item for item in request.session.items if f"test_matrix.py::test_cell[{device}-" in item.nodeid]
        wanted += matrix.specs(device) if len(cells) > _MANY else []
    build_jit_specs(wanted)
