# SPDX-License-Identifier: Apache-2.0
"""Prefill together with decoding gives what each part gives alone."""

from __future__ import annotations

import pytest
import torch

import flashinfer
from flashinfer.errors import ArgumentError

from ..attention.inputs import LAYOUTS, Batch
from ..attention.reference import Attention
from ..attention.test_batch_decode import workspace


def close(out: torch.Tensor, expected) -> None:
    torch.testing.assert_close(out.float(), expected[0], rtol=1e-3, atol=1e-3)


def decode_part(device: str, layout: str):
    batch = Batch([1, 1, 1], [9, 130, 0], device=device)
    pages = batch.pages(8)
    return batch, pages, batch.cache(pages, layout, "combined")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", [False, True])
def test_pod(device, layout, causal):
    prompt = Batch([40], [97], device=device)
    batch, pages, cache = decode_part(device, layout)
    wrapper = flashinfer.PODWithPagedKVCacheWrapper(workspace(device), layout)
    wrapper.plan(*pages.table, *batch.heads, 64, 8, sm_scale=0.3)
    k, v = prompt.dense(layout)
    options = {"causal_p": causal, "kv_layout_p": layout, "sm_scale_p": 0.2, "window_left_p": 30}
    out_p, out_d = wrapper.run(prompt.q, k, v, batch.q, cache, **options, sm_scale_d=9.0, k_scale=0.5, v_scale=2.0)
    close(out_p, prompt.expected(Attention(causal=causal, sm_scale=0.2, window_left=30)))
    close(out_d, batch.expected(Attention(sm_scale=0.3, k_scale=0.5, v_scale=2.0)))
    wrapper.end_forward()
    assert not wrapper.is_cuda_graph_enabled


def test_pod_masks_of_the_prompt(device):
    prompt = Batch([5], [12], device=device)
    batch, pages, cache = decode_part(device, "NHD")
    mask = torch.rand(5, 12, device=device) < 0.5
    wrapper = flashinfer.PODWithPagedKVCacheWrapper(workspace(device))
    wrapper.begin_forward(*pages.table, *batch.heads, 64, 8)
    expected = prompt.expected(Attention(mask=mask))
    close(wrapper.run(prompt.q, prompt.k, prompt.v, batch.q, cache, custom_mask_p=mask)[0], expected)
    packed = flashinfer.packbits(mask.reshape(-1), bitorder="little")
    close(wrapper.run(prompt.q, prompt.k, prompt.v, batch.q, cache, packed_custom_mask_p=packed)[0], expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_batch_pod(device, layout):
    prompts, (batch, pages, cache) = Batch([17, 40], [33, 97], device=device), decode_part(device, layout)
    prompt_pages = prompts.pages(8)
    prompt_cache = prompts.cache(prompt_pages, layout, "pair")
    wrapper = flashinfer.BatchPODWithPagedKVCacheWrapper(workspace(device), layout)
    tables = (prompts.qo_indptr, *prompt_pages.table, batch.qo_indptr, *pages.table)
    wrapper.plan(*tables, *batch.heads, 64, 8)
    arguments = (prompts.q, prompt_cache, batch.q, cache)
    for causal in (True, True, False):
        out_p, out_d = wrapper.run(*arguments, causal_p=causal)
        close(out_p, prompts.expected(Attention(causal=causal)))
        close(out_d, batch.expected())
    masks = [torch.rand(q, kv, device=device) < 0.5 for q, kv in ((17, 33), (40, 97))]
    flat = torch.cat([mask.reshape(-1) for mask in masks])
    (out_p, out_d), (lse_p, lse_d) = wrapper.run(*arguments, custom_mask_p=flat, return_lse=True)
    expected = prompts.expected([Attention(mask=mask) for mask in masks])
    close(out_p, expected)
    torch.testing.assert_close(lse_p, expected[1], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(lse_d, batch.expected()[1], rtol=1e-3, atol=1e-3)
    close(wrapper.run(*arguments, causal_p=True)[0], prompts.expected(Attention(causal=True)))


def test_batch_pod_before_plan(device):
    wrapper = flashinfer.BatchPODWithPagedKVCacheWrapper(workspace(device))
    x = torch.empty(0, device=device)
    with pytest.raises(ArgumentError, match=r"plan\(\) was not called"):
        wrapper.run(x, x, x, x)
