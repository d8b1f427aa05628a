# SPDX-License-Identifier: Apache-2.0
"""Fixture of tests with several ranks."""

from __future__ import annotations

from typing import Callable

import pytest

from .ranks import Ranks, started_ranks


@pytest.fixture
def ranks() -> Callable[[int], Ranks]:
    """Return a function that gives the worker processes of a group of some size."""
    return started_ranks
