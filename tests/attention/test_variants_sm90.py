# SPDX-License-Identifier: Apache-2.0
"""Users' variants in the published form for SM90: any backend takes them."""

from __future__ import annotations

import pytest
import torch

from flashinfer import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper
from flashinfer._runtime.errors import ArgumentError, BackendSupportedError
from flashinfer.jit.attention import gen_customize_batch_prefill_module, gen_customize_single_prefill_module
from flashinfer.prefill import single_prefill_with_kv_cache_with_jit_module

from ..hopper.devices import has_hopper
from .inputs import Batch
from .reference import Attention
from .sm90_form import GATED, GATED_PARAMETERS, SCALED, SCALED_PARAMETERS
from .wrappers import F16, close, workspace


@pytest.fixture(params=["fa2", "fa3"])
def backend(request, device):
    if request.param == "fa3" and (device == "cpu" or not has_hopper()):
        pytest.skip("needs a GPU of capability 9.0")
    return request.param


def weights_expected(batch: Batch, gate: torch.Tensor, factor: float) -> torch.Tensor:
    """Return what GATED computes: weights are factor * q . k + gate of the head, without softmax."""
    outs, group = [], batch.heads[0] // batch.heads[1]
    q_at, k_at = 0, 0
    for q_len, kv_len in zip(batch.qo_lens, batch.kv_lens, strict=True):
        q = batch.q[q_at : q_at + q_len].double()
        k, v = (x[k_at : k_at + kv_len].double().repeat_interleave(group, 1) for x in (batch.k, batch.v))
        s = torch.einsum("qhd,khd->hqk", q, k) * factor + gate.double()[:, None, None]
        outs.append(torch.einsum("hqk,khd->qhd", s, v))
        q_at, k_at = q_at + q_len, k_at + kv_len
    return torch.cat(outs).float()


def test_batches_without_softmax(device, backend):
    """Numbers of a row come from block_coord: its head, and the request that it is in."""
    batch = Batch([9, 30], [40, 97], device=device)
    gate = torch.rand(4, device=device) - 0.5
    arguments = (f"test_sm90_gated_{backend}", F16, F16, F16, torch.int32, 64, 64, *GATED_PARAMETERS, "Gated", GATED)
    expected = weights_expected(batch, gate, 0.01)
    pages = batch.pages(8)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace(device), backend=backend, jit_args=arguments)
    wrapper.plan(batch.qo_indptr, *pages.table, *batch.heads, 64, 8)
    out = wrapper.run(batch.q, batch.cache(pages), gate, 0.01)
    torch.testing.assert_close(out.float(), expected, rtol=5e-3, atol=5e-3)
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace(device), backend=backend, jit_args=arguments)
    wrapper.plan(batch.qo_indptr, batch.kv_indptr, *batch.heads, 64)
    out = wrapper.run(batch.q, *batch.dense(), gate, 0.01)
    torch.testing.assert_close(out.float(), expected, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("kv_len", [97, 3000])
def test_single_request_with_softmax(device, backend, kv_len):
    """Each head has its scale, each KV head that of its values, however keys are split; a mask hides keys."""
    batch = Batch([20], [kv_len], device=device)
    scales, of_values = torch.rand(4, device=device) + 0.5, torch.tensor([2.0, 0.5], device=device)
    dims = (F16, F16, F16, 64, 64)
    module = gen_customize_single_prefill_module(
        backend, f"test_sm90_scaled_{backend}", *dims, *SCALED_PARAMETERS, "Scaled", SCALED, device=device
    ).build_and_load()
    extras = {"mask_mode": 2, "return_lse": True}
    got = single_prefill_with_kv_cache_with_jit_module(module, batch.q, *batch.dense(), scales, of_values, 3, **extras)
    batch.q = (batch.q.float() * scales[:, None] * 8).double()  # the reference divides by 8
    hidden = torch.arange(kv_len, device=device) % 3 == 0
    out, lse = batch.expected(Attention(mask=(~hidden).expand(20, -1)))
    close(got, (out * of_values.repeat_interleave(2)[:, None], lse), 5e-3)


@pytest.mark.parametrize(
    "text, error, match",
    [
        (GATED.replace("DefaultUpdater", "MyUpdater"), BackendSupportedError, "must return OnlineSoftmax or Default"),
        (GATED + "// cute::Tensor", BackendSupportedError, "must not use CuTe .*, got cute::"),
        (GATED + "REGISTER_OUTPUT_TRANSFORM", ArgumentError, "must be REGISTER_LOGITS_TRANSFORM .*OUTPUT_TRANSFORM"),
    ],
)
def test_what_the_form_cannot_have_here(text, error, match):
    arguments = (F16, F16, F16, torch.int32, 64, 64, *GATED_PARAMETERS, "Gated", text)
    with pytest.raises(error, match=f"gen_customize_batch_prefill_module: .*{match}"):
        gen_customize_batch_prefill_module("fa2", "test_sm90_refused", *arguments, device="cpu")
