# SPDX-License-Identifier: Apache-2.0
"""Guard pages: an access of one byte too many ends the process, and the test that drew the call names it."""

from __future__ import annotations

import ctypes

import pytest
import torch

from .. import guard_pages
from ..fresh_process import run_python
from ..guard_pages import check_calls, guarded, written_outside

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.int64, torch.bool]


@pytest.mark.parametrize("front", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0,), (), (1,), (3, 5), (1025, 3)])
def test_copies_are_equal(shape, dtype, front):
    tensor = torch.randint(0, 100, shape).to(dtype)
    copy = guarded(tensor, front)
    assert copy.dtype is dtype and copy.shape == tensor.shape and copy.stride() == tensor.stride()
    assert torch.equal(copy.view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))
    if tensor.numel():
        end = copy.data_ptr() + (0 if front else copy.numel() * copy.element_size())
        assert end % guard_pages.PAGE == 0
    assert not written_outside(copy)


@pytest.mark.parametrize(
    "tensor", [torch.arange(24).view(4, 6).t(), torch.arange(24).view(4, 6)[:, 1:4], torch.ones(1).expand(5, 7)]
)
def test_strides_are_kept(tensor):
    copy = guarded(tensor)
    assert copy.stride() == tensor.stride() and torch.equal(copy, tensor)


def test_writes_beside_are_seen():
    copy = guarded(torch.ones(5))
    ctypes.memset(copy.data_ptr() - 1, 0, 1)
    assert written_outside(copy)


@pytest.mark.parametrize("front, where", [(False, "t.numel() * 2"), (True, "-1")])
def test_the_next_byte_ends_the_process(front, where):
    program = (
        "import ctypes, torch; from tests.guard_pages import guarded; "
        f"t = guarded(torch.ones(3, 5).half(), {front}); print(t.sum().item(), flush=True); "
        f"ctypes.string_at(t.data_ptr() + {where}, 1)"
    )
    done = run_python(["-c", program])
    assert done.returncode == -11 and done.stdout == "15.0\n"


@pytest.mark.parametrize(
    "kind, texts",
    [
        ("reads behind", ["call 1: read_behind(float32[3, 5])", "status -11", "repeat: "]),
        ("writes before", ["call 0: write_before(float32[3, 5])", "written beside float32[3, 5]"]),
        ("other error", ["call 0: use_table(float32[", "IndexError: list index out of range"]),
        ("wrong result", ["call 0: add_one(float32[", "the result must be zero"]),
        ("refused", ["refuse", "all calls were refused"]),
    ],
)
def test_faults_are_reported_with_their_call(monkeypatch, kind, texts):
    monkeypatch.setenv("DRAWN_FAULTS", kind)
    with pytest.raises(AssertionError) as caught:
        check_calls("tests.testing.drawn_faults", share=0.01)
    assert all(text in str(caught.value) for text in texts), str(caught.value)


def test_good_calls_are_counted(monkeypatch):
    monkeypatch.setenv("FLASHINFER_TEST_CALLS", "500")
    [(served, refused)] = check_calls("tests.testing.drawn_faults", share=0.1).values()
    assert served > 10 and refused > 5 and served + refused == 50
