# SPDX-License-Identifier: Apache-2.0
"""The kernels of test_primitives.py on the CPU: what holds on an H200 holds in the emulation (tests/emulation)."""

from __future__ import annotations

import re

import pytest
import torch

from flashinfer.jit import env

from ..emulation.build import EMULATION, Library, compile_emulated

BF16, F16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Library:
    return compile_emulated("emulated_primitives.cpp", tmp_path_factory)


#: dtype, columns, A and B MN-major: by the number of the form in emulated_primitives.cpp.
FORMS = [
    (BF16, 96, False, False),
    (F16, 8, False, False),
    (E4M3, 256, False, False),
    (BF16, 128, True, False),
    (BF16, 128, False, True),
    (BF16, 128, True, True),
    (BF16, 128, False, False),  # A from registers
    (BF16, 128, False, True),  # A from registers
]


@pytest.mark.parametrize("form", range(len(FORMS)))
def test_wgmma(library, form):
    dtype, n, of_a, of_b = FORMS[form]
    a, b = (torch.randint(-4, 5, (rows, 128 // dtype.itemsize)).float() for rows in (64, n))
    c = torch.full((64, n), torch.nan)
    stored = [(x.T if is_transposed else x).contiguous().to(dtype) for x, is_transposed in ((a, of_a), (b, of_b))]
    assert library.call("product", form, c.data_ptr(), *(x.data_ptr() for x in stored)) == 0
    assert torch.equal(c, a @ b.T)


@pytest.mark.parametrize("rows", [1, 65, 400])
def test_ring_with_multicast(library, rows):
    """Boxes past the end: loads give zeros and stores are dropped."""
    x, y = torch.randn(rows, 64).to(BF16), torch.full((rows + 1, 64), torch.nan).to(BF16)
    assert library.call("ring_copy", y.data_ptr(), x.data_ptr(), rows) == 0
    assert torch.equal(y[:rows], x)
    assert y[rows].isnan().all()


def test_store_matrix(library):
    plain, transposed = (torch.zeros(16, 16, dtype=torch.int16) for _ in range(2))
    assert library.call("store_matrix", plain.data_ptr(), transposed.data_ptr()) == 0
    expected = torch.arange(256, dtype=torch.int16).view(16, 16)
    assert torch.equal(plain, expected)
    assert torch.equal(transposed, expected.T)


PTX = env.FLASHINFER_INCLUDE_DIR / "flashinfer" / "ptx"


@pytest.mark.parametrize("header", sorted(x.name for x in PTX.iterdir()))
def test_each_wrapper_is_emulated(header):
    """A kernel that uses a new wrapper must not lose its emulated tests."""
    wrappers = set(re.findall(r"__device__ __forceinline__ [\w:]+[ *&]+(\w+)\(", (PTX / header).read_text()))
    text = (EMULATION / "ptx" / header).read_text()
    text += "".join((EMULATION / "ptx" / name).read_text() for name in re.findall(r'#include "(.*)"', text))
    missing = {x for x in wrappers if not re.search(rf"\b{x}\(", text)} - {"ReduceByShuffles"}
    assert not missing, f"tests/emulation/ptx/{header} lacks {missing}"
