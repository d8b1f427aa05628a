# SPDX-License-Identifier: Apache-2.0
"""Prefill together with decode gives the results of each part alone."""

from __future__ import annotations

import pytest
import torch

import flashinfer
from flashinfer import pod
from flashinfer._runtime.errors import ArgumentError

from ..attention.inputs import LAYOUTS, Batch, Pages, int32, offsets
from ..attention.launches import kernels
from ..attention.reference import Attention
from ..attention.wrappers import workspace
from ..tensors import randn
from .inputs import decode_part


def close(out: torch.Tensor, expected) -> None:
    torch.testing.assert_close(out.float(), expected[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", [False, True])
def test_pod(device, either_backend, layout, causal):
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


def test_pod_masks_of_the_prompt(device, either_backend):
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
def test_batch_pod(device, either_backend, layout):
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
    with pytest.raises(ArgumentError, match=r"plan\(\) must be called before run"):
        wrapper.run(x, x, x, x)


# ------------------------------------------------------------------------------------------------ one launch for both

HEADS, PAGE = (32, 8), 16


class Work:
    """Prompts and decode requests. On a GPU the prompts have 432 tiles, which is enough for a fused launch."""

    def __init__(self, device, dim, dtype, prompts):
        self.dim, self.dtype = dim, dtype
        lens = prompts if device == "cuda" else [x // 20 for x in prompts]
        keys = [700, 3000, 64, 0, 129, 1] * 4
        self.pages_p, self.pages_d = Pages([x + 100 for x in lens], PAGE, device), Pages(keys, PAGE, device)
        self.qo_p, self.qo_d = (int32(offsets(x), device) for x in (lens, [1] * len(keys)))
        options = {"dtype": dtype, "device": device}
        self.cache_p, self.cache_d = (
            randn(pages.num_pages, 2, PAGE, HEADS[1], dim, **options) for pages in (self.pages_p, self.pages_d)
        )
        self.q_p, self.q_d = (randn(n, HEADS[0], dim, **options) for n in (sum(lens), len(keys)))
        self.k_p, self.v_p = (randn(sum(lens) + 100, HEADS[1], dim, **options) for _ in range(2))
        self.sizes = (*HEADS, dim, PAGE)

    def decode_alone(self, device, **run):
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), use_tensor_cores=True)
        wrapper.plan(*self.pages_d.table, *self.sizes, q_data_type=self.dtype, window_left=2000)
        return wrapper.run(self.q_d, self.cache_d, **run)

    def pod(self, device):
        wrapper = flashinfer.PODWithPagedKVCacheWrapper(workspace(device))
        wrapper.plan(*self.pages_d.table, *self.sizes, q_data_type=self.dtype, window_left=2000)
        options = {"causal_p": True, "window_left_p": 900, "k_scale": 0.5, "v_scale": 2.0}
        return lambda: wrapper.run(self.q_p, self.k_p, self.v_p, self.q_d, self.cache_d, **options)

    def batch_pod(self, device):
        wrapper = flashinfer.BatchPODWithPagedKVCacheWrapper(workspace(device))
        tables = (self.qo_p, *self.pages_p.table, self.qo_d, *self.pages_d.table)
        wrapper.plan(*tables, *self.sizes, q_data_type=self.dtype)
        arguments = (self.q_p, self.cache_p, self.q_d, self.cache_d)
        return lambda **run: wrapper.run(*arguments, causal_p=True, v_scale=2.0, **run)


TYPES = [(128, torch.bfloat16), (64, torch.float16), (256, torch.float16)]  # the last type has no fused launch
#: The CPU has no fused launch: other types would only be other modules of single requests.
SINGLE_TYPES = TYPES if torch.cuda.is_available() else [(64, torch.float16)]


@pytest.fixture
def one_call(monkeypatch):
    """Run both parts in one call of the module, however small they are."""
    monkeypatch.setattr(pod, "_is_much", lambda *_: True)


@pytest.mark.parametrize("dim, dtype", SINGLE_TYPES)
def test_pod_is_what_both_parts_are_alone(device, either_backend, one_call, dim, dtype):
    work = Work(device, dim, dtype, [1700])
    out_p, out_d = work.pod(device)()
    options = {"causal": True, "window_left": 900}
    assert torch.equal(out_p, flashinfer.single_prefill_with_kv_cache(work.q_p, work.k_p, work.v_p, **options))
    assert torch.equal(out_d, work.decode_alone(device, k_scale=0.5, v_scale=2.0))


@pytest.mark.parametrize("dim, dtype", TYPES)
def test_batch_pod_is_what_both_parts_are_alone(device, either_backend, one_call, dim, dtype):
    work = Work(device, dim, dtype, [700, 1000])
    outs, lses = work.batch_pod(device)(return_lse=True)
    parts = ((work.qo_p, work.pages_p, work.q_p, work.cache_p), (work.qo_d, work.pages_d, work.q_d, work.cache_d))
    for out, lse, causal, (qo_indptr, pages, q, cache) in zip(outs, lses, (True, False), parts, strict=True):
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), backend=either_backend)
        wrapper.plan(qo_indptr, *pages.table, *work.sizes, causal=causal, q_data_type=dtype)
        expected, expected_lse = wrapper.run(q, cache, v_scale=2.0, return_lse=True)
        assert torch.equal(out, expected) and torch.equal(lse, expected_lse)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_both_parts_are_one_launch(device, either_backend, dtype):
    if device == "cpu" or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU whose multiprocessors hold a block of each part")
    work = Work(device, 128, dtype, [1700])
    for call in (work.pod(device), work.batch_pod(device)):
        names = kernels(call)
        ours = [name for name in names if "flashinfer" in name]
        assert len(ours) == 1 and {"fa2": "FusedKernel", "fa3": "MixedSm90Kernel"}[either_backend] in ours[0], names


def test_pod_of_other_types_and_rows_that_kernels_cannot_read(device, either_backend, one_call):
    """Check parts that need different modules, and rows that do not start at multiples of 16 bytes."""
    work = Work(device, 64, torch.float16, [60])
    wrapper = flashinfer.PODWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(*work.pages_d.table, *work.sizes, q_data_type=work.dtype)
    rest = (work.q_d, work.cache_d)
    decoded = wrapper._decode.run(*rest)
    bf16 = [x.bfloat16() for x in (work.q_p, work.k_p, work.v_p)]
    odd = [torch.nn.functional.pad(x, (0, 1))[..., :-1] for x in (work.q_p, work.k_p, work.v_p)]
    for q, k, v in (bf16, odd):
        out_p, out_d = wrapper.run(q, k, v, *rest, causal_p=True)
        assert torch.equal(out_p, flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True))
        assert torch.equal(out_d, decoded)


def test_prompts_of_any_length_after_each_other(device, either_backend, monkeypatch):
    """Check that one call and two calls with the same plan do not mix up their cached launches."""
    work = Work(device, 64, torch.float16, [60])
    wrapper = flashinfer.PODWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(*work.pages_d.table, *work.sizes, q_data_type=work.dtype)
    expected = flashinfer.single_prefill_with_kv_cache(work.q_p, work.k_p, work.v_p)
    decoded = wrapper._decode.run(work.q_d, work.cache_d)
    for is_much in (False, True, False, False, True, True):
        monkeypatch.setattr(pod, "_is_much", lambda *_, answer=is_much: answer)
        out_p, out_d = wrapper.run(work.q_p, work.k_p, work.v_p, work.q_d, work.cache_d)
        assert torch.equal(out_p, expected) and torch.equal(out_d, decoded)
