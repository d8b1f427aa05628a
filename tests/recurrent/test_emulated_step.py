# SPDX-License-Identifier: Apache-2.0
"""The CUDA step kernels on the CPU (tests/emulation), against the references."""

from __future__ import annotations

import ctypes
import math
from typing import Any, Optional

import pytest
import torch

from flashinfer.trace.templates.recurrent_rules import delta_rule, gdn_gates

from ..emulation.build import Library, compile_emulated
from .gdn_inputs import BF16, FP32, projections, states
from .softplus import HEADS, NUMBERS
from .softplus import check as check_softplus


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return compile_emulated("emulated_step.cpp", tmp_path_factory)


def run(
    library: Library, name: str, kw: dict[str, torch.Tensor], state: torch.Tensor, slots: Any, each: Any, is_any: bool
) -> torch.Tensor:
    q, v = kw["q"], kw["v"]
    sizes = (ctypes.c_int64 * 6)(*q.shape[:3], v.shape[2], q.shape[3], v.shape[3])
    out = torch.full(v.shape, 7.0)
    tensors = [out, *(kw[key] for key in ("q", "k", "v", "a", "b", "A_log", "dt_bias")), state, slots, each]
    pointers = [0 if x is None else x.data_ptr() for x in tensors]
    assert library.call(name, ctypes.addressof(sizes), *pointers, int(state.dtype == BF16), int(is_any)) == 0
    return out


def close(got: torch.Tensor, expected: torch.Tensor, dtype: Optional[torch.dtype] = None) -> None:
    limit = 8e-3 if (dtype or got.dtype) == BF16 else 2e-5
    torch.testing.assert_close(got.double(), expected.double(), rtol=limit, atol=limit)


@pytest.mark.parametrize("is_any", [False, True])
@pytest.mark.parametrize("state", [FP32, BF16], ids=str)
@pytest.mark.parametrize(
    "batch, tokens, heads, value_dim", [(2, 1, 1, 40), (40, 1, 4, 128), (2, 9, 2, 24), (35, 2, 4, 128)]
)
def test_gdn(library, batch, tokens, heads, value_dim, state, is_any):
    """Few and many rows in a lane; one token, several, and more than fit into shared memory at once."""
    if is_any and batch > 2:
        pytest.skip("the kernel for everything has one shape")
    kw = projections(batch, tokens, 1, heads, 128, value_dim, device="cpu")
    pool = states(batch + 1, heads, 128, value_dim, dtype=state, device="cpu")
    slots = torch.arange(batch, dtype=torch.int32) + 1
    if batch == 2:
        slots[1] = -1
    each = torch.zeros(batch, tokens, heads, value_dim, 128, dtype=state) if tokens > 1 else None
    gates = gdn_gates(kw["A_log"], kw["a"], kw["dt_bias"], kw["b"])
    output, after = delta_rule(kw["q"], kw["k"], kw["v"], *gates, pool[slots.clamp(min=0).long()], 0.5)
    used, expected = slots >= 0, pool.clone()
    expected[slots[used].long()] = after[used, -1].to(state)
    got = run(library, "gdn", kw, pool, slots, each, is_any)
    close(got[used], output[used])
    assert not got[~used].any()
    close(pool, expected)
    if each is not None:
        close(each[used], after[used], state)


@pytest.mark.parametrize("state", [FP32, BF16], ids=str)
@pytest.mark.parametrize("key_dim, tokens, is_any", [(128, 1, False), (64, 3, False), (64, 1, True)])
def test_kda(library, key_dim, tokens, state, is_any):
    kw = projections(2, tokens, 2, 2, key_dim, 48, device="cpu")
    kw["a"] = torch.randn(2, tokens, 2, key_dim).to(BF16)
    kw["dt_bias"] = torch.randn(2, key_dim)
    pool = states(2, 2, key_dim, 48, dtype=state, device="cpu")
    x = kw["A_log"].double().exp()[:, None] * (kw["a"].double() + kw["dt_bias"].double())
    beta = torch.sigmoid(kw["b"].double())
    output, after = delta_rule(kw["q"], kw["k"], kw["v"], -5 * torch.sigmoid(x), beta, pool, 0.5)
    close(run(library, "kda", kw, pool, None, None, is_any), output)
    close(pool, after[:, -1])


@pytest.mark.parametrize("tokens, is_any", [(1, False), (3, False), (1, True)])
def test_softplus_of_kda(library, tokens, is_any):
    """The kernels' softplus, read off a state to which nothing is added (test_softplus.py)."""
    kw = projections(1, tokens, 1, 1, 128, 48, device="cpu")
    numbers, rate = torch.tensor(NUMBERS).repeat(128 // HEADS), 0.5 / tokens
    kw["a"] = (numbers / 2).to(BF16).expand(1, tokens, 1, 128).contiguous()
    kw["dt_bias"] = (numbers - kw["a"][0, 0, 0].float())[None]
    kw["A_log"], kw["b"] = torch.full((1,), math.log(rate)), torch.full((1, tokens, 1), -200.0).to(BF16)
    state = torch.ones(1, 1, 48, 128)
    run(library, "kda_softplus", kw, state, None, None, is_any)
    channels = state.view(1, 1, 48, 128 // HEADS, HEADS)
    check_softplus(torch.ones_like(channels), channels, rate * tokens, 4)


@pytest.mark.parametrize("key_dim", [64, 128, 256])
def test_k_major(library, key_dim):
    kw = projections(2, 1, 1, 2, key_dim, 64, device="cpu")
    state = states(2, 2, 64, key_dim, device="cpu")
    gates = gdn_gates(kw["A_log"], kw["a"], kw["dt_bias"], kw["b"])
    output, after = delta_rule(kw["q"], kw["k"], kw["v"], *gates, state.transpose(2, 3), 0.5)
    close(run(library, "k_major", kw, state, None, None, False), output)
    close(state, after[:, -1].transpose(2, 3))
