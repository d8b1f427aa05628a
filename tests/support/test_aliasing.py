# SPDX-License-Identifier: Apache-2.0
"""Outputs over inputs and over themselves: refused, or right (docs/support.md, the last section)."""

from __future__ import annotations

import random
import re

import pytest
import torch

import flashinfer
import flashinfer.fused_moe as moe
from flashinfer import gemm
from flashinfer.gemm.checks import refuse_shared_memory

BF16, F16, E4M3, INT = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int32
SHARED = r"must not share memory|unsupported operation"  # the second text is that of torch, which multiplies on CUDA


class Memory:
    """Tensors of one device; ``over`` gives one in the memory of another, some bytes behind its begin."""

    def __init__(self, device):
        self.device = device

    def rows(self, *shape, dtype=BF16):
        return torch.randn(shape, device=self.device).to(dtype)

    def ints(self, *values):
        return torch.tensor(values, dtype=INT, device=self.device)

    @staticmethod
    def over(x, offset, *shape, dtype=BF16):
        size = torch.Size(shape).numel() * dtype.itemsize
        return x.view(-1).view(torch.uint8)[offset : offset + size].view(dtype).view(shape)


def mm_bf16(m):
    x = m.rows(64, 256)
    gemm.mm_bf16(x, m.rows(256, 256).T, out=x)


def mm_bf16_over_a_part(m):
    x = m.rows(64, 256)
    gemm.mm_bf16(x[:32], m.rows(256, 256).T, out=x[16:48])


def mm_bf16_over_weights(m):
    w = m.rows(256, 64)
    gemm.mm_bf16(m.rows(16, 64), w.T, out=m.over(w, 0, 16, 256))


def bmm_bf16(m):
    x = m.rows(2, 64, 64)
    gemm.bmm_bf16(x, m.rows(2, 64, 64).mT, out=x)


def bmm_fp8(m):
    x, one = m.rows(2, 64, 64, dtype=E4M3), torch.ones((), device=m.device)
    gemm.bmm_fp8(x, m.rows(2, 32, 64, dtype=E4M3).mT, one, one, BF16, out=m.over(x, 0, 2, 64, 32))


def tinygemm_bf16(m):
    x = m.rows(8, 128)
    gemm.tinygemm_bf16(x, m.rows(128, 128), x)


def moe_permute(m):
    x = m.rows(8, 64)
    moe.moe_permute(x, x, None, m.ints(1, 0, 3, 2, 5, 4, 7, 6), None, 8, 1, 1)


def moe_unpermute(m):
    x = m.rows(8, 64)
    moe.moe_unpermute(x, x, m.ints(1, 0, 3, 2, 5, 4, 7, 6)[:, None], None, 8, 1)


def workspace_of_experts(m):
    x, ids, scales = m.rows(4, 64), torch.zeros(4, 2, dtype=INT, device=m.device), torch.ones(4, 2, device=m.device)
    workspace = torch.zeros(32 << 20, dtype=torch.uint8, device=m.device)
    out = m.over(workspace, 1 << 10, 4, 64)
    weights = (m.rows(4, 256, 64), m.rows(4, 64, 128))
    moe.cutlass_fused_moe(x, ids, scales, *weights, BF16, [], output=out, workspace_buffer=workspace)


def attention_over_queries(m):
    q, kv = m.rows(5, 4, 64, dtype=F16), m.rows(9, 2, 64, dtype=F16)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(torch.zeros(4 << 20, dtype=torch.uint8, device=m.device))
    wrapper.plan(m.ints(0, 5), m.ints(0, 9), 4, 2, 64, q_data_type=F16)
    wrapper.run(q, kv, kv.clone(), out=q)


def rmsnorm_over_a_part(m):
    x = m.rows(8, 64)
    flashinfer.rmsnorm(x[:4], torch.ones(64, device=m.device).to(BF16), out=x[1:5])


def silu_over_rows(m):
    x = m.rows(8, 64)
    flashinfer.silu_and_mul(x, out=m.over(x, 0, 8, 32))


def top_k_over_lengths(m):
    n, table = m.ints(*range(64, 64 + 16)), torch.arange(2 * 64, dtype=INT, device=m.device).view(2, 64)
    flashinfer.top_k_page_table_transform(m.rows(2, 64), table, n[:2] - 64, 8, out=table.view(-1)[:16].view(2, 8))


def residual_is_input(m):
    x = m.rows(8, 64)
    flashinfer.fused_add_rmsnorm(x, x, torch.ones(64, device=m.device).to(BF16))


REFUSED = (mm_bf16, mm_bf16_over_a_part, mm_bf16_over_weights, bmm_bf16, bmm_fp8, tinygemm_bf16)
REFUSED += (moe_permute, moe_unpermute, workspace_of_experts, attention_over_queries)
REFUSED += (rmsnorm_over_a_part, silu_over_rows, top_k_over_lengths, residual_is_input)


@pytest.mark.parametrize("call", REFUSED, ids=lambda call: call.__name__)
def test_outputs_over_inputs_are_refused(device, call):
    with pytest.raises(RuntimeError, match=SHARED):
        call(Memory(device))


@pytest.mark.parametrize("stride", [0, 1, 32, 63])
def test_rows_over_each_other_are_refused(device, stride):
    m = Memory(device)
    out = m.rows(4 * 64).as_strided((4, 64), (stride, 1))
    for call in (
        lambda: flashinfer.rmsnorm(m.rows(4, 64), m.rows(64), out=out),
        lambda: gemm.mm_bf16(m.rows(4, 32), m.rows(64, 32).T, out=out),
    ):
        with pytest.raises(
            RuntimeError, match=r"stride\(\d\) must (not be 0|be at least \d+) for an output|unsupported"
        ):
            call()


def test_outputs_in_place_are_right(device):
    m = Memory(device)
    x, w = m.rows(7, 128), m.rows(128)
    for call in (
        lambda x, out=None: flashinfer.rmsnorm(x, w, out=out),
        lambda x, out=None: flashinfer.gemma_rmsnorm(x, w, out=out),
    ):
        here = x.clone()
        assert torch.equal(call(here, out=here), call(x))
    for call in (flashinfer.silu_and_mul, flashinfer.gelu_and_mul, flashinfer.gelu_tanh_and_mul):
        here = x.clone()
        assert torch.equal(call(here, out=here[:, :64]), call(x))
    here, gate = x.clone(), m.rows(7, 128)
    assert torch.equal(flashinfer.swiglu(here, gate, out=here), flashinfer.swiglu(x, gate))


def test_columns_beside_each_other_are_apart(device):
    """Views of one buffer whose address ranges overlap, but not their elements."""
    m = Memory(device)
    qkv, w = m.rows(7, 3, 128), m.rows(128)
    q, k, _ = qkv.clone().unbind(1)
    assert torch.equal(flashinfer.rmsnorm(q, w, out=k), flashinfer.rmsnorm(qkv[:, 0], w))
    pos = torch.arange(7, dtype=INT, device=device)
    heads = m.rows(7, 4, 3, 64)  # q, k and v of each head side by side
    q, k, _ = heads.clone().unbind(2)
    flashinfer.apply_rope_pos_ids_inplace(q, k, pos)
    expected = flashinfer.apply_rope_pos_ids(heads[:, :, 0].contiguous(), heads[:, :, 1].contiguous(), pos)
    torch.testing.assert_close((q, k), expected)
    out = torch.zeros(7, 2 * 256, dtype=BF16, device=device)
    a, here = out[:, :256], out[:, 256:]
    a.copy_(m.rows(7, 256))
    b = m.rows(256, 256).T
    torch.testing.assert_close(gemm.mm_bf16(a, b, out=here), gemm.mm_bf16(a.contiguous(), b))


def refusal(call, *arguments, **named):
    try:
        call(*arguments, **named)
    except RuntimeError as error:
        return re.sub(r"^.*?(out)", r"\1", str(error))
    return ""


def test_checks_before_torch_are_those_of_the_launchers():
    """Outputs and inputs at random places of one buffer: what Python refuses is what the C++ checks refuse."""
    draw, verdicts = random.Random(0), set()
    weights = torch.zeros(4, 8, dtype=BF16)
    for _ in range(400):
        buffer = torch.zeros(256, dtype=BF16)
        a = buffer.as_strided((4, 8), (draw.choice((8, 16, 32)), 1), draw.randrange(64))
        out = buffer.as_strided((4, 4), (draw.choice((0, 2, 4, 8, 16, 32)), 1), draw.randrange(128))
        text = refusal(refuse_shared_memory, "mm_bf16", out, a=a, b=weights)
        assert text == refusal(gemm.mm_bf16, a, weights.T, out=out)
        verdicts.add(text[:25])
    assert len(verdicts) == 4, "each verdict is to be drawn"
