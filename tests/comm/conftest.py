# SPDX-License-Identifier: Apache-2.0
"""Fixtures of tests with several ranks."""

from __future__ import annotations

from typing import Callable

import pytest

from .ranks import LIMIT_S, Ranks, started_ranks


@pytest.fixture
def ranks() -> Callable[[int], Ranks]:
    """Return a function that gives the worker processes of a group of some size."""
    return started_ranks


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks that are threads of the test give up soon: a test that fails must not wait for the default of 600 s."""
    monkeypatch.setenv("FLASHINFER_COMM_TIMEOUT_S", str(LIMIT_S))
