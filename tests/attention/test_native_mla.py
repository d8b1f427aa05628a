# SPDX-License-Identifier: Apache-2.0
"""The native MLA module against the reference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from flashinfer.jit.attention import gen_batch_mla_module

from .inputs import Pages, int32, offsets
from .native import load
from .reference import Attention, ragged


@pytest.mark.parametrize("natural", [False, True])
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim_pe, dtype", [(64, torch.bfloat16), (0, torch.float16)])
def test_mla(device: str, causal: bool, page_size: int, graph: bool, natural: bool, dim_pe: int, dtype: Any) -> None:
    heads, dim = 16, 128
    qo_lens, kv_lens = [1, 3, 0, 17], [300, 3, 5, 0]
    module = load(gen_batch_mla_module, "fa2", dtype, dtype, dtype, torch.int32, dim, dim_pe, False, device)
    q = torch.randn(sum(qo_lens), heads, dim + dim_pe, device=device).to(dtype)
    keys = torch.randn(sum(kv_lens), 1, dim + dim_pe, device=device).to(dtype)
    pages = Pages(kv_lens, page_size, device)
    cache = pages.scatter(keys, "NHD")[:, :, 0]
    float_ws, int_ws = (torch.full((n << 20,), 0x7F, dtype=torch.uint8, device=device) for n in (32, 8))
    pinned = torch.empty(8 << 20, dtype=torch.uint8, pin_memory=device != "cpu")
    rows, lengths = int32(offsets(qo_lens), "cpu"), int32(kv_lens, "cpu")
    tables = (float_ws, int_ws, pinned, rows, pages.indptr.cpu(), lengths, heads, dim, causal)
    plan = module.plan_ext(*tables, page_size, True, q.shape[0]) if graph else module.plan(*tables)
    o = torch.full((*q.shape[:2], dim), math.nan, device=device).to(dtype)
    lse = torch.full(q.shape[:2], math.nan, device=device)
    q_nope, q_pe, ckv, kpe = q[..., :dim], q[..., dim:], cache[..., :dim], cache[..., dim:]
    run = (float_ws, int_ws, plan, q_nope, q_pe, ckv, kpe, pages.indices, o, lse)
    module.run(*run, int(causal), heads, page_size, 0.1, natural, False)
    what = Attention(causal=causal, sm_scale=0.1)
    expected = ragged(what, q, keys, keys[..., :dim], offsets(qo_lens), offsets(kv_lens))
    tolerance = 2e-3 if dtype == torch.float16 else 1.6e-2
    torch.testing.assert_close(o.float(), expected[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse, expected[1] * (math.log(2) if natural else 1), rtol=2e-3, atol=2e-3)
