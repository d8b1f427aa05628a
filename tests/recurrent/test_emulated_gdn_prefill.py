# SPDX-License-Identifier: Apache-2.0
"""The chunked gated delta rule for SM90 on the CPU (tests/emulation): ends of requests, shared heads, states."""

from __future__ import annotations

import ctypes

import pytest
import torch

from ..emulation.build import Library, compile_emulated
from .delta import F16, Case, close


class Call(ctypes.Structure):
    """Struct of emulated_gdn_prefill.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "o", "g", "beta")),
        *((name, ctypes.c_int64) for name in ("q_heads", "k_heads", "v_heads", "tokens", "requests")),
        *((name, ctypes.c_void_p) for name in ("offsets", "initial", "final", "checkpoints", "slots", "rows")),
        ("interval", ctypes.c_int64),
        ("blocks", ctypes.c_void_p),
        ("num_sms", ctypes.c_int64),
        ("segment", ctypes.c_int64),
        ("parts", ctypes.c_void_p),
        ("scale", ctypes.c_double),
    ]


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Library:
    return compile_emulated("emulated_gdn_prefill.cpp", tmp_path_factory)


@pytest.fixture(scope="module")
def portable(tmp_path_factory) -> Library:
    return compile_emulated("emulated_gdn_prefill.cpp", tmp_path_factory, arch=800, defines=("PORTABLE",))


def pointer(x) -> int:
    return 0 if x is None else x.data_ptr()


def run(library: Library, name: str, case: Case, num_sms: int, interval: int = 0, segment: int = 0):
    """Return outputs, final states and checkpoints."""
    out = torch.full((case.tokens, case.heads, 128), torch.nan, dtype=case.dtype)
    final = torch.full((len(case.lens), case.heads, 128, 128), 7.0)
    counts = [n // interval if interval else 0 for n in case.lens]
    kept = torch.full((sum(counts), case.heads, 128, 128), torch.nan)
    rows = torch.tensor([0, *counts]).cumsum(0)
    blocks = torch.empty(library.call("bytes_of_blocks", len(case.lens), case.tokens, case.heads), dtype=torch.uint8)
    parts = torch.full((3 * (case.tokens // 64 + len(case.lens)) * case.heads, 128, 128), torch.nan)
    tensors = [pointer(x) for x in (case.q, case.k, case.v, out, case.g, case.beta)]
    sizes = [case.q.shape[1], case.k.shape[1], case.v.shape[1], case.tokens, len(case.lens)]
    more = [pointer(x) for x in (case.offsets, case.initial, final, kept if interval else None, None, rows)]
    call = Call(*tensors, *sizes, *more, interval, pointer(blocks), num_sms, segment, pointer(parts), case.scale)
    dtype = "f16" if case.dtype == F16 else "bf16"
    assert library.call(f"{name}_{dtype}", ctypes.byref(call)) == 0
    return out, final, kept


@pytest.mark.parametrize("num_sms", [1, 132])
def test_ends(library, num_sms):
    """Requests shorter and longer than a chunk, one without tokens, whole heads and halves of heads per block."""
    case = Case([130, 0, 1, 63], heads=(1, 1, 2))
    out, final, _ = run(library, "prefill", case, num_sms)
    close(case, out, final)
    assert torch.equal(final[1], torch.full_like(final[1], 7.0))  # no tokens: not written


def test_portable(portable):
    """The kernels for any GPU from SM80 on."""
    case = Case([130, 0, 1, 63], heads=(1, 1, 2))
    out, final, _ = run(portable, "prefill", case, 132)
    close(case, out, final)


def test_split(library):
    """Parts of requests side by side; a request of one part, one without tokens, and states at ends of parts."""
    case = Case([200, 0, 64, 70], heads=(1, 1, 1))
    out, final, kept = run(library, "prefill", case, 1, interval=64, segment=64)
    close(case, out, final)
    _, _, expected = run(library, "prefill", case, 1, interval=64)
    torch.testing.assert_close(kept, expected, atol=5e-3, rtol=1e-3)
    assert torch.equal(final[1], torch.full_like(final[1], 7.0))


def test_without_decay(library):
    """Rounding errors stay in a state that does not decay."""
    case = Case([256], heads=(1, 1, 1), g=None)
    close(case, *run(library, "prefill", case, 132)[:2])


def test_half(library):
    """fp16, whose operands over tokens are sums of two."""
    case = Case([150], heads=(1, 1, 1), dtype=F16, g=None)
    close(case, *run(library, "prefill", case, 132)[:2])
