# SPDX-License-Identifier: Apache-2.0
"""Every cell of the table of functions and dtypes (matrix.py), and the page generated from it."""

from __future__ import annotations

import pytest
import torch

from flashinfer.aot import FAMILIES

from . import matrix

CELLS = [
    pytest.param(row, dtype, id=f"{row.path}-{row.varied[0]}-{dtype}")
    for row in matrix.ROWS
    for dtype in matrix.COLUMNS
    if dtype not in row.left_out
]
#: Functions of these names run on Hopper alone, among GPUs.
HOPPER = ("_sm90", "deepgemm", "_fp8_nt_")


@pytest.mark.parametrize("row, dtype", CELLS)
def test_cell(device, row, dtype):
    if device == "cuda" and any(part in row.path for part in HOPPER) and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("runs on Hopper")
    if dtype in row.dtypes(device):
        row.check(dtype, device)
    else:
        with pytest.raises((ValueError, TypeError), match=dtype):
            row.function(**row.arguments(dtype, device))


def test_every_family_has_rows():
    attention, private = {"decode", "prefill"}, {"api_log_stats", "scale"}
    of_groups = {"comm"}  # tests/comm has every dtype: a call needs a workspace
    assert {row.family for row in matrix.ROWS} == set(FAMILIES) - attention - private - of_groups


def test_page_is_current():
    assert matrix.PAGE.read_text() == matrix.page(), "run python -m tests.support.matrix --write"
