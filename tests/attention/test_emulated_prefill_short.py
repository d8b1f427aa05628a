# SPDX-License-Identifier: Apache-2.0
"""The Hopper prefill kernel in its form for short items, on the CPU (tests/emulation), against float64."""

from __future__ import annotations

import pytest

from .emulated_cases import CAP, CAUSAL, CUSTOM, LENGTHS, Case, compiled


@pytest.fixture(scope="module")
def d128(tmp_path_factory):
    return compiled(tmp_path_factory, (128, 128), "rows", "pages", "short")


@pytest.fixture(scope="module")
def d64(tmp_path_factory):
    return compiled(tmp_path_factory, (64, 64), "rows", "cap", "short")


@pytest.fixture(scope="module")
def d96(tmp_path_factory):
    """The last slab of columns is half empty; hooks of a user, which change queries, and a mask of each pair."""
    return compiled(tmp_path_factory, (96, 96), "pages", "masks", "hooks", "short")


@pytest.fixture(scope="module")
def masked(tmp_path_factory):
    return compiled(tmp_path_factory, (128, 96), "rows", "masks", "short")


@pytest.mark.parametrize("mask_mode, seed", [(0, 1), (CAUSAL, 2), (CAUSAL, 3)])
def test_ragged(d128, mask_mode, seed):
    case = Case(d128, *LENGTHS, (4, 2), mask_mode=mask_mode)
    case.check(seed=seed)
    assert case.items == 2 * (2 + 3 + 2 + 2)  # tiles of 64 rows


def test_group_that_does_not_divide_a_tile(d128):
    """Consumers copy the queries."""
    Case(d128, [61, 50], [70, 140], (3, 1), mask_mode=CAUSAL).check()


@pytest.mark.parametrize("window", [0, 100])
def test_window(d128, window):
    Case(d128, [150, 30], [400, 30], (1, 1), mask_mode=CAUSAL, window=window).check()


def test_split_keys(d128):
    """Items write partial states, and the last merge."""
    case = Case(d128, [40, 20], [700, 90], (2, 1), mask_mode=CAUSAL, split=192)
    case.check()
    assert case.items == 2 * 4 + 1


@pytest.mark.parametrize("page_size, layout", [(1, "NHD"), (16, "HND"), (64, "NHD")])
def test_pages(d128, page_size, layout):
    """Pages of one row are copied by cp.async, others by TMA. Rows that were never written are NaN."""
    Case(d128, *LENGTHS, (4, 2), mask_mode=CAUSAL, page_size=page_size, layout=layout).check()


def test_soft_cap(d64):
    Case(d64, *LENGTHS, (6, 2), mask_mode=CAUSAL).check(soft_cap=CAP)


def test_custom_mask(masked):
    Case(masked, [50, 20], [190, 131], (2, 1), mask_mode=CUSTOM).check()


@pytest.mark.parametrize("page_size", [5, 32])
def test_hooks(d96, page_size):
    Case(d96, [40, 3, 25], [150, 0, 25], (4, 2), mask_mode=CAUSAL, page_size=page_size).check(has_hooks=True)
