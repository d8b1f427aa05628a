# SPDX-License-Identifier: Apache-2.0
"""Chunked Kimi delta attention for SM90 on the CPU (tests/emulation): ends of requests, gates, padding, checkpoints."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch

from flashinfer.trace.templates.recurrent_kda import recurrent_kda_trace

from ..emulation.build import Library, compile_emulated
from .gdn_inputs import BF16
from .softplus import HEADS, NUMBERS
from .softplus import check as check_softplus

LOG_DECAY, SOFTPLUS, BOUNDED = range(3)


class Call(ctypes.Structure):
    """Struct of emulated_kda_prefill.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "o", "g", "beta", "a_log", "dt_bias")),
        *((name, ctypes.c_int64) for name in ("heads", "value_heads", "tokens", "requests")),
        *((name, ctypes.c_void_p) for name in ("offsets", "initial", "checkpoints", "slots", "rows")),
        *((name, ctypes.c_int64) for name in ("interval", "keeps_starts", "gate", "normalise")),
        ("lower_bound", ctypes.c_double),
        ("blocks", ctypes.c_void_p),
        ("num_sms", ctypes.c_int64),
    ]


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Library:
    return compile_emulated("emulated_kda_prefill.cpp", tmp_path_factory)


def pointer(x) -> int:
    return 0 if x is None else x.data_ptr()


class Case:
    """Requests of ``lens`` tokens, a pool of states with one slot more than requests, and what is expected."""

    def __init__(self, lens, gate, heads=1, value_heads=1, g=None, slots=None, normalise=True):
        generator = torch.Generator().manual_seed(0)

        def normal(*shape):
            return torch.randn(shape, generator=generator)

        tokens, self.lens, self.gate, self.normalise = sum(lens), lens, gate, normalise
        self.q, self.k = (normal(1, tokens, heads, 128) for _ in range(2))
        if not normalise:
            self.q, self.k = (torch.nn.functional.normalize(x, dim=-1) for x in (self.q, self.k))
        self.q, self.k = self.q.to(BF16), self.k.to(BF16)
        self.v = normal(1, tokens, value_heads, 128).to(BF16)
        raw = normal(1, tokens, value_heads, 128)
        self.g = (g(raw) if g is not None else raw if gate else -raw.abs()).to(BF16)
        self.beta = (normal if gate else torch.rand)(1, tokens, value_heads).to(BF16)
        self.a_log, self.dt_bias = normal(value_heads), normal(value_heads * 128)
        self.pool = normal(len(lens) + 1, value_heads, 128, 128) * 0.1
        self.slots = torch.arange(len(lens)) if slots is None else torch.tensor(slots)
        self.offsets = torch.tensor([0, *lens]).cumsum(0)

    def run(self, library, num_sms=1, interval=0, keeps_starts=False, checkpoints=None, rows=None):
        """Return outputs, and the pool after the call."""
        tokens, value_heads = self.v.shape[1:3]
        out, pool = torch.full_like(self.v, torch.nan), self.pool.clone()
        size = library.call("bytes_of_blocks", len(self.lens), tokens, value_heads)
        blocks = torch.full((size,), 255, dtype=torch.uint8)  # NaN
        tensors = (self.q, self.k, self.v, out, self.g, self.beta, self.a_log, self.dt_bias)
        sizes = (self.q.shape[2], value_heads, tokens, len(self.lens))
        states = (self.offsets, pool, checkpoints, self.slots, rows)
        call = Call(
            *map(pointer, tensors), *sizes, *map(pointer, states), interval, keeps_starts, self.gate, self.normalise,
            -5.0, pointer(blocks), num_sms,
        )  # fmt: skip
        assert library.call("prefill", ctypes.byref(call)) == 0
        return out, pool

    def expected(self):
        gate = {"A_log": self.a_log, "dt_bias": self.dt_bias, "use_gate_in_kernel": self.gate != LOG_DECAY}
        return recurrent_kda_trace.reference(
            self.q, self.k, self.v, self.g, self.beta, **gate, scale=0.125, initial_state=self.pool,
            lower_bound=-5.0 if self.gate == BOUNDED else None, cu_seqlens=self.offsets, ssm_state_indices=self.slots,
            beta_is_logit=self.gate != LOG_DECAY, use_qk_l2norm_in_kernel=self.normalise,
        )  # fmt: skip

    def close(self, out, pool):
        expected, state = self.expected()
        torch.testing.assert_close(out.double(), expected.double(), atol=1e-2, rtol=1e-2)
        torch.testing.assert_close(pool.double(), state.double(), atol=5e-3, rtol=1e-3)


@pytest.mark.parametrize("num_sms", [1, 132])
def test_ends(library, num_sms):
    """Requests shorter and longer than a chunk, one without tokens; whole heads and halves of heads per CTA."""
    case = Case([130, 0, 1, 63], BOUNDED, value_heads=2)
    case.close(*case.run(library, num_sms))


@pytest.mark.parametrize("gate", [LOG_DECAY, SOFTPLUS])
def test_gates(library, gate):
    """Log decays, and gates without a bound."""
    case = Case([100], gate)
    case.close(*case.run(library))


def test_softplus(library):
    """The softplus of 64 tokens, read off a state to which nothing is added (test_softplus.py)."""
    case, numbers, rate = Case([64], SOFTPLUS), torch.tensor(NUMBERS).repeat(128 // HEADS), 0.5 / 64
    case.g = (numbers / 2).to(BF16).expand(1, 64, 1, 128).contiguous()
    case.dt_bias = numbers - case.g[0, 0, 0].float()
    case.a_log, case.beta = torch.full((1,), math.log(rate)), torch.full((1, 64, 1), -200.0).to(BF16)
    case.pool = torch.ones_like(case.pool)
    _, pool = case.run(library)
    channels = pool[:1].view(1, 1, 128, 128 // HEADS, HEADS)
    check_softplus(torch.ones_like(channels), channels, rate * 64, 4)


@pytest.mark.parametrize("least", [0.0, -5.0, -100.0])
def test_range(library, least):
    """Decays of 1 (with keys that are bf16), of e^-5 for each token, and for some of e^-100, which underflow."""

    def g(raw):
        return torch.where(raw > 0.5, 0.0, least) if least < -5 else torch.full_like(raw, least)

    case = Case([100 if least else 320], LOG_DECAY, g=g, normalise=least != 0)
    case.close(*case.run(library))


def test_padding_and_checkpoints(library):
    """A negative slot: outputs of 0, no state touched. Checkpoints before every 64 tokens, and after."""
    case = Case([70, 20, 130], BOUNDED, slots=[2, -1, 0])
    kept, rows = torch.full((5, 1, 128, 128), 7.0), torch.tensor([0, 2, 2, 5])
    out, pool = case.run(library, interval=64, keeps_starts=True, checkpoints=kept, rows=rows)
    assert not out[:, 70:90].any() and torch.equal(pool[1], case.pool[1])
    case.close(out, pool)
    assert torch.equal(kept[0], case.pool[2]) and torch.equal(kept[2], case.pool[0])
    after, ends = torch.full((3, 1, 128, 128), 7.0), torch.tensor([0, 1, 1, 3])
    case.run(library, interval=64, checkpoints=after, rows=ends)
    assert torch.equal(after[0], kept[1]) and torch.equal(after[1:], kept[3:])
