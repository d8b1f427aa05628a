# SPDX-License-Identifier: Apache-2.0
"""Copies made by plan(): none from host arrays, one from device arrays; and plan() during a graph capture."""

from __future__ import annotations

from typing import Any, Callable, Iterator

import numpy as np
import pytest
import torch

from flashinfer.attention import index_arrays

from .inputs import Batch
from .reference import Attention
from .wrappers import close, paged, planned, ragged, workspace

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Counted(torch.Tensor):
    """Host tensor that claims to be on another device and counts the copies from there."""

    copies = 0
    is_cuda = True

    def cpu(self, *args: Any) -> torch.Tensor:
        Counted.copies += 1
        return self.as_subclass(torch.Tensor)


def on_device(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype).as_subclass(Counted)


@pytest.mark.parametrize(
    "tensors, copies",
    [
        ([torch.tensor([0, 2, 3]), torch.tensor([4, 5])], 0),
        ([on_device(0, 2, 3), on_device(4, 5)], 1),
        ([on_device(0, 2, 3), None, on_device(4, 5, dtype=torch.int64), on_device(7)], 1),
        ([torch.tensor([0, 2, 3]), on_device(4, 5)], 1),
    ],
)
def test_host_copies_are_made_together(tensors, copies):
    expected = [None if t is None else t.tolist() for t in tensors]
    Counted.copies = 0
    arrays = index_arrays.to_host("op", **{f"argument{i}": t for i, t in enumerate(tensors)})
    assert Counted.copies == copies
    assert [None if a is None else a.tolist() for a in arrays] == expected
    assert all(a is None or a.dtype == np.int32 for a in arrays)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64])
def test_each_array_answers_for_its_own_dtype(dtype):
    with pytest.raises(ValueError, match=f"op: second must have an integer dtype.*, got {dtype}"):
        index_arrays.to_host("op", first=on_device(0, 1), second=on_device(1, dtype=dtype), third=on_device(2))


def wrappers(batch: Batch, decode: Batch) -> Iterator[tuple[Callable[..., Any], tuple[torch.Tensor, ...]]]:
    """Yield plan() of each wrapper, called once so that modules are loaded, and its index arrays."""
    pages, decode_pages = batch.pages(8), decode.pages(8)
    for tensor_cores in (False, True):
        wrapper = planned(decode, decode_pages, tensor_cores=tensor_cores)
        yield lambda *a, w=wrapper: w.plan(*a, 4, 2, 64, 8), decode_pages.table
    wrapper = paged(batch, pages)
    mask = torch.ones(sum(q * k for q, k in zip(batch.qo_lens, batch.kv_lens, strict=True)), dtype=torch.bool)
    mask = mask.to(batch.device)
    for options in ({"causal": True}, {"custom_mask": mask}):
        plan = lambda *a, w=wrapper, o=options: w.plan(*a, 4, 2, 64, 8, **o)  # noqa: E731
        yield plan, (batch.qo_indptr, *pages.table)
    wrapper = ragged(batch)
    yield lambda *a, w=wrapper: w.plan(*a, 4, 2, 64, causal=True), (batch.qo_indptr, batch.kv_indptr)


@needs_gpu
def test_plan_on_the_gpu_waits_once_or_never(monkeypatch):
    batch, decode = Batch([5, 20], [40, 97], device="cuda"), Batch([1, 1], [40, 97], device="cuda")
    copies = []
    original = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda t, *a: copies.append(t) or original(t, *a))
    for plan, arrays in wrappers(batch, decode):
        plan(*arrays)  # loads the modules
        copies.clear()
        plan(*arrays)
        assert len(copies) == 1
        on_host = [a.cpu() for a in arrays]
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            plan(*on_host)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@needs_gpu
@pytest.mark.parametrize("plans_held", [100, 3, 1], ids=["many", "three", "one"])
def test_plans_in_a_row_do_not_mix(plans_held):
    """Check that no plan overwrites memory that the copy of an earlier plan still reads, part of the buffer or all."""
    batches = [Batch([1] * 64, [n] * 64, device="cuda") for n in (700, 30)]
    pages = [batch.pages(8) for batch in batches]
    tables = [[t.cpu() for t in p.table] for p in pages]
    wrapper = planned(batches[0], pages[0])
    size = max(wrapper.workspace_size(*table, 4, 2, 64, 8)[1] for table in tables)
    wrapper.reset_workspace_buffer(workspace("cuda"), torch.empty(plans_held * size, dtype=torch.uint8, device="cuda"))
    caches = [batch.cache(p) for batch, p in zip(batches, pages, strict=True)]
    torch.cuda._sleep(50_000_000)
    results = []
    for _ in range(10):
        for batch, table, cache in zip(batches, tables, caches, strict=True):
            wrapper.plan(*table, 4, 2, 64, 8)
            results.append(wrapper.run(batch.q, cache, return_lse=True))
    for batch, result in zip(10 * batches, results, strict=True):
        close(result, batch.expected())


def test_a_plan_holds_its_offsets(monkeypatch):
    """Check that the plan stores offsets where wrappers on a GPU read them; the planner is the same on both devices."""
    batch = Batch([5, 20, 1], [40, 97, 3], device="cpu")
    pages = batch.pages(8)
    wrapper = paged(batch, pages)
    wrapper.reset_workspace_buffer(workspace("cpu"), torch.empty(64, 1024, dtype=torch.int32))
    wrapper.plan(batch.qo_indptr, *pages.table, 4, 2, 64, 8)
    monkeypatch.setattr(wrapper, "_device_kind", "cuda")
    for which, expected in enumerate((pages.indptr, batch.qo_indptr)):
        view = wrapper._indptr_on_device(expected, which, True)
        assert torch.equal(view, expected) and view is wrapper._indptr_on_device(expected, which, True)
    wrapper._int_workspace_buffer = other = torch.zeros(1 << 20, dtype=torch.uint8)  # engines replace it
    assert wrapper._indptr_on_device(pages.indptr, 0, True).data_ptr() == other.data_ptr() + 16


@needs_gpu
def test_offsets_on_the_host_travel_with_the_plan():
    batch, decode = Batch([5, 20], [40, 97], device="cuda"), Batch([1, 1], [40, 97], device="cuda")
    pages, decode_pages = batch.pages(8), decode.pages(8)
    for tensor_cores in (False, True):
        wrapper = planned(decode, decode_pages, tensor_cores=tensor_cores)
        wrapper.plan(decode_pages.indptr.cpu(), *decode_pages.table[1:], 4, 2, 64, 8)
        assert torch.equal(wrapper._paged_kv_indptr_buf, decode_pages.indptr)
        close(wrapper.run(decode.q, decode.cache(decode_pages), return_lse=True), decode.expected())
    wrapper = paged(batch, pages)
    wrapper.plan(batch.qo_indptr.cpu(), pages.indptr.cpu(), *pages.table[1:], 4, 2, 64, 8)
    assert torch.equal(wrapper._qo_indptr_buf, batch.qo_indptr)
    close(wrapper.run(batch.q, batch.cache(pages), return_lse=True), batch.expected())
    wrapper = ragged(batch)
    wrapper.plan(batch.qo_indptr.cpu(), batch.kv_indptr.cpu(), 4, 2, 64)
    close(wrapper.run(batch.q, batch.k, batch.v, return_lse=True), batch.expected())


@needs_gpu
def test_capture_of_a_wrapper_that_is_not_made_for_it_is_refused():
    batch = Batch([1, 1], [40, 97], device="cuda")
    pages = batch.pages(8)
    wrapper = planned(batch, pages)
    cache = batch.cache(pages)
    wrapper.run(batch.q, cache)
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="use_cuda_graph=True"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        wrapper.run(batch.q, cache)


def test_torch_compile_follows_the_plan(device):
    """Check that a compiled graph holds the wrapper, not its plan: the next plan does not recompile."""
    first, second = (Batch([1, 1], lens, device=device) for lens in ([40, 97], [9, 130]))
    pages = first.pages(8)
    wrapper = planned(first, pages)

    def step(q, k, v):
        out, lse = wrapper.run(q, (k, v), return_lse=True)
        return out * 2, lse

    compiled = torch.compile(step, fullgraph=True, backend="eager" if device == "cpu" else "inductor")
    out, lse = compiled(first.q, *first.cache(pages))
    close((out / 2, lse), first.expected())
    pages = second.pages(8)
    wrapper.plan(*pages.table, 4, 2, 64, 8)
    out, lse = compiled(second.q, *second.cache(pages))
    close((out / 2, lse), second.expected())


def test_torch_compile_of_prefill(device):
    batch = Batch([5, 20], [40, 97], device=device)
    pages = batch.pages(8)
    one, two = paged(batch, pages, causal=True), ragged(batch, causal=True)

    def step(q, cache, k, v):
        return one.run(q, cache), two.run(q, k, v, return_lse=True)

    compiled = torch.compile(step, fullgraph=True, backend="eager" if device == "cpu" else "inductor")
    out, result = compiled(batch.q, batch.cache(pages, form="combined"), *batch.dense())
    expected = batch.expected(Attention(causal=True))
    close((out, result[1]), expected)
    close(result, expected)


def test_a_workspace_that_is_too_small_is_refused(device):
    batch = Batch([1], [8000], device=device)
    pages = batch.pages(8)
    wrapper = planned(batch, pages)
    wrapper.reset_workspace_buffer(workspace(device, 16), workspace(device, 16))
    with pytest.raises(RuntimeError, match="16"):
        wrapper.plan(*pages.table, 4, 2, 64, 8)
