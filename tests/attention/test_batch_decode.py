# SPDX-License-Identifier: Apache-2.0
"""The batch decode wrapper: results, options of plan and run, and rejected arguments."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch

import flashinfer
from flashinfer import BatchDecodeWithPagedKVCacheWrapper
from flashinfer.decode import CUDAGraphBatchDecodeWithPagedKVCacheWrapper, fast_decode_plan

from .inputs import FORMS, LAYOUTS
from .reference import Attention
from .wrappers import F16, LENS, close, decode_batch, planned, workspace


@pytest.mark.parametrize("tensor_cores", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", FORMS)
def test_layouts_and_forms(device, layout, form, tensor_cores):
    batch = decode_batch(device)
    pages = batch.pages(8)
    wrapper = planned(batch, pages, layout, tensor_cores)
    cache = batch.cache(pages, layout, form)
    if form == "separate" and not tensor_cores:
        with pytest.raises(Exception, match="must have identical strides"):
            wrapper.run(batch.q, cache)
        return
    close(wrapper.run(batch.q, cache, return_lse=True), batch.expected())
    out = torch.empty_like(batch.q)
    assert wrapper.run(batch.q, cache, out=out) is out
    assert wrapper.run_return_lse(batch.q, cache)[1].shape == batch.q.shape[:2]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_of_one_token_need_no_page_dimension(device, layout):
    batch = decode_batch(device)
    pages = batch.pages(1)
    wrapper = planned(batch, pages, layout)
    page_dim = 1 if layout == "NHD" else 2
    k, v = (x.squeeze(page_dim) for x in batch.cache(pages, layout, "pair"))
    close(wrapper.run(batch.q, (k, v), return_lse=True), batch.expected())
    combined = batch.cache(pages, layout, "combined").squeeze(page_dim + 1)
    close(wrapper.run(batch.q, combined, return_lse=True), batch.expected())


@pytest.mark.parametrize("tensor_cores", [False, True])
@pytest.mark.parametrize(
    "options, what",
    [
        ({"window_left": 20}, Attention(window_left=20)),
        ({"logits_soft_cap": 5.0}, Attention(logits_soft_cap=5.0)),
        ({"sm_scale": 0.5}, Attention(sm_scale=0.5)),
        ({"pos_encoding_mode": "ALIBI"}, Attention(alibi=True)),
        (
            {"pos_encoding_mode": "ROPE_LLAMA", "rope_scale": 2.0, "rope_theta": 1e3},
            Attention(rope=True, rope_scale=2.0, rope_theta=1e3),
        ),
    ],
)
def test_options(device, tensor_cores, options, what):
    batch = decode_batch(device)
    pages = batch.pages(8)
    wrapper = planned(batch, pages, tensor_cores=tensor_cores, **options)
    close(wrapper.run(batch.q, batch.cache(pages), return_lse=True), batch.expected(what), 5e-3)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_scales(device, as_tensor):
    batch = decode_batch(device)
    pages = batch.pages(8)
    wrapper = planned(batch, pages)
    scales = {"q_scale": 0.5, "k_scale": 3.0, "v_scale": 2.0}
    expected = batch.expected(Attention(**scales))
    given = {k: torch.tensor([v], device=device) for k, v in scales.items()} if as_tensor else scales
    close(wrapper.run(batch.q, batch.cache(pages), return_lse=True, **given), expected, 5e-3)


@pytest.mark.parametrize("tensor_cores", [False, True])
def test_a_buffer_for_the_lse_is_filled_unasked(device, tensor_cores):
    """Check that the LSE buffer is filled without ``return_lse``, in the first run after a plan and in later runs."""
    batch = decode_batch(device)
    pages = batch.pages(8)
    wrapper, cache, expected = planned(batch, pages, tensor_cores=tensor_cores), batch.cache(pages), batch.expected()
    for _ in range(3):
        lse = torch.full(expected[1].shape, torch.nan, device=device)
        close((wrapper.run(batch.q, cache, lse=lse), lse), expected)


def test_requests_without_keys_give_zero(device):
    batch = decode_batch(device, kv_lens=[0, 40, 0])
    pages = batch.pages(8)
    out, lse = planned(batch, pages).run(batch.q, batch.cache(pages), return_lse=True)
    assert (out[[0, 2]] == 0).all() and (lse[[0, 2]] == -torch.inf).all()
    close((out, lse), batch.expected())


@pytest.mark.parametrize("page_size", [16, 48, 24])  # one iteration reads keys of one page, or of several
def test_long_requests_in_one_piece(device, page_size):
    """Check long requests without split-KV: a warp holds page ids of 32 iterations of 64 keys, then reads more."""
    batch = decode_batch(device, kv_lens=[2500, 7, 4200])
    pages = batch.pages(page_size)
    wrapper = planned(batch, pages, disable_split_kv=True)
    close(wrapper.run(batch.q, batch.cache(pages), return_lse=True), batch.expected())


def test_short_requests_of_which_blocks_take_more(device):
    """Check KV heads that do not divide the blocks: idle ones take the remaining work, some of it without keys."""
    heads = {"num_qo_heads": 10, "num_kv_heads": 5, "head_dim_qk": 128 if device == "cuda" else 64}
    batch = decode_batch(device, kv_lens=[37 * i % 90 for i in range(300)], **heads)
    pages = batch.pages(16)
    close(planned(batch, pages).run(batch.q, batch.cache(pages), return_lse=True), batch.expected())


@pytest.mark.parametrize("q_len", [2, 5])
def test_several_tokens_per_request_are_causal(device, q_len):
    batch = decode_batch(device, q_len, kv_lens=[q_len, 54, 97])
    pages = batch.pages(8)
    wrapper = planned(batch, pages, tensor_cores=True, q_len_per_req=q_len)
    cache = batch.cache(pages)
    close(wrapper.run(batch.q, cache, return_lse=True), batch.expected(Attention(causal=True)))
    with pytest.warns(DeprecationWarning):
        wrapper.run(batch.q, cache, q_len_per_req=q_len)
    with pytest.warns(DeprecationWarning), pytest.raises(ValueError, match="q_len_per_req"):
        wrapper.run(batch.q, cache, q_len_per_req=q_len + 1)
    with pytest.raises(ValueError, match="q_len_per_req"):
        wrapper.run(batch.q[: len(batch.kv_lens)], cache)


@pytest.mark.parametrize("fixed", [{"fixed_split_size": 4}, {"disable_split_kv": True}])
def test_fixed_splits_do_not_depend_on_the_batch(device, fixed):
    batch = decode_batch(device, kv_lens=[200, 3, 300])
    pages = batch.pages(8)
    cache = batch.cache(pages)
    out = planned(batch, pages, tensor_cores=True, **fixed).run(batch.q, cache)
    close((out, batch.expected()[1]), batch.expected())
    alone = BatchDecodeWithPagedKVCacheWrapper(workspace(device), use_tensor_cores=True)
    first, last = pages.indptr_host[2:4]
    indptr = torch.tensor([0, last - first], dtype=torch.int32)
    table = (indptr, pages.indices[first:last], pages.last_page_len[2:])
    alone.plan(*table, *batch.heads, 64, 8, **fixed)
    assert torch.equal(alone.run(batch.q[2:], cache)[0], out[2])


def test_seq_lens_replace_last_page_len(device):
    batch = decode_batch(device)
    pages = batch.pages(8)
    wrong = torch.ones_like(pages.last_page_len)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace(device), use_tensor_cores=True)
    wrapper.plan(pages.indptr, pages.indices, wrong, *batch.heads, 64, 8, seq_lens=pages.lens)
    close(wrapper.run(batch.q, batch.cache(pages), return_lse=True), batch.expected())


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn])
def test_fp8_cache(device, kv_dtype):
    batch = decode_batch(device, kv_dtype=kv_dtype)
    pages = batch.pages(8)
    wrapper = planned(batch, pages, q_data_type=F16, kv_data_type=kv_dtype)
    assert wrapper._cached_kv_data_type == kv_dtype and wrapper._cached_o_data_type == F16
    close(wrapper.run(batch.q, batch.cache(pages), return_lse=True), batch.expected(), 5e-3)


@pytest.mark.parametrize("size", [1e-30, 1e-6, 1.0, 1e6, 1e30])
def test_fp8_cache_and_queries_of_any_size(device, size):
    """Check fp8 keys with bf16 queries of any magnitude: kernels may multiply in fp16, whose range is smaller."""
    fp8 = torch.float8_e4m3fn
    batch = decode_batch(device, dtype=torch.bfloat16, kv_dtype=fp8)
    pages, scale = batch.pages(8), 0.1 / size
    batch.q[:] = (batch.q.float() * size).bfloat16()
    batch.q[:, 0] *= 2.0**-12  # rows of one tile differ in magnitude
    options = {"q_data_type": torch.bfloat16, "kv_data_type": fp8, "sm_scale": scale}
    wrapper = planned(batch, pages, tensor_cores=True, **options)
    expected = batch.expected(Attention(sm_scale=scale))
    assert not expected[0].isnan().any()
    close(wrapper.run(batch.q, batch.cache(pages), return_lse=True), expected, 1e-2)


@pytest.mark.parametrize("tensor_cores", [False, True])
def test_fp8_queries(device, tensor_cores):
    fp8 = torch.float8_e4m3fn
    batch = decode_batch(device, dtype=fp8)
    pages = batch.pages(8)
    wrapper = planned(batch, pages, tensor_cores=tensor_cores, q_data_type=fp8, kv_data_type=fp8, o_data_type=F16)
    scales = torch.rand(4, device=device) + 0.5, torch.rand(2, device=device) + 0.5, torch.rand(2, device=device) + 0.5
    q = batch.q.float() * scales[0][:, None]
    k, v = batch.k.float() * scales[1][:, None], batch.v.float() * scales[2][:, None]
    parts = [
        Attention()(q[i : i + 1], k[a:b], v[a:b])
        for i, (a, b) in enumerate(zip(batch.kv_indptr_host[:-1], batch.kv_indptr_host[1:], strict=True))
    ]
    got = wrapper.run(batch.q, batch.cache(pages), *scales, return_lse=True)
    close(got, (torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])), 1e-2)


def test_nvfp4_cache(device):
    batch = decode_batch(device, kv_dtype=torch.uint8)
    pages = batch.pages(8)
    wrapper = planned(batch, pages, tensor_cores=True, q_data_type=F16, kv_data_type=torch.uint8)
    cache, factors = batch.cache(pages), batch.cache_sf(pages)
    expected = batch.expected(Attention(k_scale=0.5, v_scale=0.25))
    got = wrapper.run(batch.q, cache, kv_cache_sf=factors, k_scale=0.5, v_scale=0.25, return_lse=True)
    close(got, expected, 1e-2)
    with pytest.raises(ValueError, match="kv_cache_sf"):
        wrapper.run(batch.q, cache)
    strided = tuple(torch.stack([x.view(torch.uint8)] * 2, dim=-1)[..., 0] for x in factors)
    with pytest.raises(Exception, match="innermost stride must be 1"):
        wrapper.run(batch.q, cache, kv_cache_sf=strided)


def test_workspace_size_is_enough_and_exact(device):
    batch = decode_batch(device, kv_lens=[4096, 17])
    pages = batch.pages(16)
    arguments = (*pages.table, *batch.heads, 64, 16)
    for tensor_cores in (False, True):
        probe = BatchDecodeWithPagedKVCacheWrapper(workspace(device), use_tensor_cores=tensor_cores)
        sizes = probe.workspace_size(*arguments)
        assert probe._plan_info is None and all(isinstance(size, int) for size in sizes)
        assert sizes[1] > 0
        float_ws, int_ws = (torch.empty(size, dtype=torch.uint8, device=device) for size in sizes)
        wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace(device), use_tensor_cores=tensor_cores)
        wrapper.reset_workspace_buffer(float_ws, int_ws)
        wrapper.plan(*arguments)
        close(wrapper.run(batch.q, batch.cache(pages), return_lse=True), batch.expected())
        if sizes[0]:
            wrapper.reset_workspace_buffer(float_ws[: sizes[0] // 32 * 16], int_ws)
            with pytest.raises(Exception, match=str(sizes[0])):
                wrapper.plan(*arguments)


def test_legacy_forward_replaces_the_parameters(device):
    batch = decode_batch(device)
    pages = batch.pages(8)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    wrapper.begin_forward(*pages.table, *batch.heads, 64, 8, window_left=5, sm_scale=3.0)
    cache = batch.cache(pages)
    close((wrapper.forward(batch.q, cache), batch.expected()[1]), batch.expected())
    got = wrapper.forward_return_lse(batch.q, cache, window_left=30, logits_soft_cap=5.0)
    close(got, batch.expected(Attention(window_left=30, logits_soft_cap=5.0)))
    wrapper.end_forward()


def test_deprecated_positional_options(device):
    batch = decode_batch(device)
    pages = batch.pages(8)
    arguments = (*pages.table, *batch.heads, 64, 8)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    with pytest.warns(DeprecationWarning, match="positionally"):
        wrapper.plan(*arguments, "NONE", 20)
    assert wrapper._window_left == 20
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(TypeError, match="at most 16"):
            wrapper.plan(*arguments, *range(17))
        with pytest.raises(TypeError, match=r"multiple values.*window_left"):
            wrapper.plan(*arguments, "NONE", 20, window_left=20)


def test_attributes_that_engines_use(device):
    batch = decode_batch(device)
    pages = batch.pages(8)
    wrapper = planned(batch, pages, tensor_cores=True)
    assert wrapper._backend == "fa2" and wrapper._use_tensor_cores and wrapper.use_tensor_cores
    assert wrapper._logits_soft_cap == 0.0 and wrapper._sm_scale is None and wrapper._window_left == -1
    assert wrapper._cached_q_data_type is F16 and wrapper._batch_size == len(LENS)
    assert (wrapper._num_qo_heads, wrapper._num_kv_heads) == batch.heads
    assert len(wrapper._plan_info) == 15 and wrapper._kv_layout == "NHD" and wrapper.device.type == device
    assert wrapper._qo_indptr_buf.tolist() == list(range(len(LENS) + 1))
    assert not wrapper.is_cuda_graph_enabled and wrapper._fixed_batch_size == 0
    assert wrapper._pin_memory_int_workspace_buffer.shape == wrapper._int_workspace_buffer.shape
    # Engines replace plan() by the module's plan, with as many arguments as the release that they were written for has.
    plan = wrapper._cached_module.plan
    arguments = (
        *(wrapper._float_workspace_buffer, wrapper._int_workspace_buffer, wrapper._pin_memory_int_workspace_buffer),
        *(torch.arange(len(LENS) + 1, dtype=torch.int32), pages.indptr.cpu(), pages.lens.cpu(), len(LENS), len(LENS)),
        *(*batch.heads, 8, False, 64, 64, False, -1),
    )
    expected = [*plan(*arguments, -1, False, 0, 0)]
    for tail in ((), (-1, False, 0), (-1, False, 0, 0)):
        wrapper._plan_info = plan(*arguments, *tail)
        assert [*wrapper._plan_info] == expected
        close(wrapper.run(batch.q, batch.cache(pages), return_lse=True), batch.expected())
    for wrong in (arguments[:-1], (*arguments, -1, False, 0, 0, 0)):
        with pytest.raises(TypeError, match=f"plan: arguments must be 20, got {len(wrong)}"):
            plan(*wrong)
    core = planned(batch, pages)
    empty = torch.empty(0, dtype=F16, device=device)
    core._plan_info = core._cached_module.plan(
        *(core._float_workspace_buffer, core._int_workspace_buffer, core._pin_memory_int_workspace_buffer),
        *(pages.indptr.cpu(), len(LENS), *batch.heads, 8, False, -1, 0.0, 64, 64, empty, empty),
    )
    close(core.run(batch.q, batch.cache(pages), return_lse=True), batch.expected())


@pytest.mark.parametrize("tensor_cores", [False, True])
@pytest.mark.parametrize("graph", [False, True])
def test_forward_after_plans_of_engines(device, tensor_cores, graph):
    """Check ``forward`` after a plan of the native module: SGLang plans that way and passes a model's soft cap only to
    ``forward``. The plan then describes the last batch, not the last call of ``plan``.
    """
    first, batch = decode_batch(device, kv_lens=[3, 9, 30, 2]), decode_batch(device)
    sizes = (len(LENS) + 1, 256, len(LENS))
    buffers = [torch.zeros(n, dtype=torch.int32, device=device) for n in sizes] if graph else []
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace(device), "NHD", graph, tensor_cores, *buffers)
    pages, what = first.pages(8), Attention(logits_soft_cap=0.5, window_left=6)
    wrapper.plan(*pages.table, *first.heads, 64, 8, q_data_type=F16)
    options = {"logits_soft_cap": 0.5, "window_left": 6}
    close(wrapper.forward_return_lse(first.q, first.cache(pages), **options), first.expected(what))
    pages = batch.pages(8)
    for name, table in zip(("indptr", "indices", "last_page_len"), pages.table, strict=True):
        if graph:
            getattr(wrapper, f"_paged_kv_{name}_buf")[: len(table)].copy_(table)
        else:
            setattr(wrapper, f"_paged_kv_{name}_buf", table)
    memory = (wrapper._float_workspace_buffer, wrapper._int_workspace_buffer, wrapper._pin_memory_int_workspace_buffer)
    indptr, empty = pages.indptr.cpu(), torch.empty(0, dtype=F16, device=device)
    if tensor_cores:
        rows = torch.arange(len(LENS) + 1, dtype=torch.int32)
        tables = (rows, indptr, pages.lens.cpu(), len(LENS), len(LENS), *batch.heads, 8, graph, 64, 64, False, -1)
    else:
        tables = (indptr, len(LENS), *batch.heads, 8, graph, -1, 0.0, 64, 64, empty, empty)
    wrapper._plan_info = wrapper._cached_module.plan(*memory, *tables)
    wrapper._window_left, wrapper._logits_soft_cap = -1, 0.0
    close(wrapper.forward_return_lse(batch.q, batch.cache(pages), **options), batch.expected(what))


@pytest.mark.parametrize("tensor_cores", [False, True])
def test_fast_decode_plan(device, tensor_cores):
    first = decode_batch(device, kv_lens=[3, 9, 30, 2])
    pages = first.pages(8)
    wrapper = planned(first, pages, tensor_cores=tensor_cores)
    wrapper.plan = functools.partial(fast_decode_plan, wrapper)
    batch = decode_batch(device)
    pages = batch.pages(8)
    wrapper.plan(*pages.table, *batch.heads, 64, 8, q_data_type=F16)
    close(wrapper.run(batch.q, batch.cache(pages), return_lse=True), batch.expected())
    override = {"global_override_indptr_cpu": pages.indptr.cpu()}
    wrapper.plan(*pages.table, *batch.heads, 64, 8, q_data_type=F16, **override)
    assert wrapper._paged_kv_indptr_buf is pages.indptr
    close(wrapper.run(batch.q, batch.cache(pages), return_lse=True), batch.expected())
    wrapper.plan(*pages.table, *batch.heads, 64, 8, q_data_type=F16, logits_soft_cap=0.5, window_left=6)
    capped = batch.expected(Attention(logits_soft_cap=0.5, window_left=6))
    close(wrapper.run(batch.q, batch.cache(pages), return_lse=True), capped)
    fresh = BatchDecodeWithPagedKVCacheWrapper(workspace(device), use_tensor_cores=True)
    with pytest.raises(ValueError, match="prior plan"):
        fast_decode_plan(fresh, *pages.table, *batch.heads, 64, 8, q_len_per_req=2)
    wrapper._float_workspace_buffer = torch.empty(0, dtype=torch.uint8, device=device)
    wrapper._int_workspace_buffer = torch.empty(0, dtype=torch.uint8, device=device)
    with pytest.raises(RuntimeError, match="Error in standard plan"):
        wrapper.plan(*pages.table, *batch.heads, 64, 8, q_data_type=F16)


def graph_wrapper(device: str, batch_size: int = 4, capacity: int = 64, **options):
    buffers = [torch.zeros(n, dtype=torch.int32, device=device) for n in (batch_size + 1, capacity, batch_size)]
    return CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(device), *buffers, **options)


@pytest.mark.parametrize("tensor_cores", [False, True])
def test_graph_buffers_are_written_and_sizes_frozen(device, tensor_cores):
    batch = decode_batch(device)
    pages = batch.pages(8)
    wrapper = graph_wrapper(device, use_tensor_cores=tensor_cores)
    buffers = (wrapper._paged_kv_indptr_buf, wrapper._paged_kv_indices_buf, wrapper._paged_kv_last_page_len_buf)
    addresses = [buffer.data_ptr() for buffer in buffers]
    wrapper.plan(*pages.table, *batch.heads, 64, 8)
    qo_indptr = wrapper._qo_indptr_buf
    assert buffers[0].tolist() == pages.indptr_host and wrapper.is_cuda_graph_enabled
    close(wrapper.run(batch.q, batch.cache(pages), return_lse=True), batch.expected())
    other = decode_batch(device, kv_lens=[130, 1, 1, 9])
    pages = other.pages(8)
    wrapper.plan(*pages.table, *batch.heads, 64, 8)
    assert wrapper._qo_indptr_buf is qo_indptr
    close(wrapper.run(other.q, other.cache(pages), return_lse=True), other.expected())
    assert [b.data_ptr() for b in buffers] == addresses
    with pytest.raises(ValueError, match=r"batch size must be 4.*, got 3"):
        wrapper.plan(pages.indptr[:-1], pages.indices, pages.last_page_len[:-1], *batch.heads, 64, 8)
    with pytest.raises(ValueError, match="at most 64"):
        wrapper.plan(pages.indptr, pages.indices.repeat(9), pages.last_page_len, *batch.heads, 64, 8)
    if tensor_cores:
        with pytest.raises(ValueError, match="frozen"):
            wrapper.plan(*pages.table, *batch.heads, 64, 8, q_len_per_req=2)


def test_bad_graph_buffers(device):
    buffers = [torch.zeros(n, dtype=torch.int32, device=device) for n in (5, 64, 4)]
    with pytest.raises(ValueError, match=r"paged_kv_last_page_len_buffer must be a tensor.*, got none"):
        BatchDecodeWithPagedKVCacheWrapper(workspace(device), "NHD", True, False, *buffers[:2])
    with pytest.raises(ValueError, match=r"must have 5 elements .*, got 4"):
        BatchDecodeWithPagedKVCacheWrapper(workspace(device), "NHD", True, False, buffers[0][:4], *buffers[1:])


PLAN_ERRORS = [
    ({"window_right": 1}, NotImplementedError, "window_right must be 0 .*, got 1"),
    ({"pos_encoding_mode": "SINE"}, KeyError, "SINE"),
    ({"q_data_type": 3}, TypeError, "q_data_type must be str or dtype.*, got a int"),
    ({"fixed_split_size": 2}, ValueError, "fixed_split_size must be None without use_tensor_cores, got 2"),
    ({"q_len_per_req": 2}, ValueError, "use_tensor_cores"),
    ({"q_len_per_req": 0}, ValueError, "q_len_per_req must be at least 1, got 0"),
    ({"o_data_type": torch.float8_e4m3fn}, AssertionError, "must be a 16-bit type"),
]


@pytest.mark.parametrize("options, error, text", PLAN_ERRORS)
def test_bad_plans(options, error, text):
    batch = decode_batch("cpu")
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"))
    with pytest.raises(error, match=text):
        wrapper.plan(*batch.pages(8).table, *batch.heads, 64, 8, **options)


def test_bad_plans_with_tensor_cores():
    batch = decode_batch("cpu", kv_lens=[1, 9])
    table = batch.pages(8).table
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"), use_tensor_cores=True)
    with pytest.raises(ValueError, match="empty KV range"):
        wrapper.plan(*table, *batch.heads, 64, 8, q_len_per_req=2)
    for backend in ("fa3", "trtllm-gen"):
        wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"), use_tensor_cores=True, backend=backend)
        for options in ({}, {"q_len_per_req": 2}):
            with pytest.raises(NotImplementedError, match="fa2"):
                wrapper.plan(*table, *batch.heads, 64, 8, **options)
    with pytest.raises(KeyError, match=r"kv_layout must be one of .*, got 'DHN'"):
        BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"), "DHN")
    with pytest.raises(ValueError, match="must be 16-byte aligned"):
        BatchDecodeWithPagedKVCacheWrapper(workspace("cpu")[1:])
    with pytest.raises(ValueError, match=r"num_qo_heads must be a multiple of .*, got 3"):
        wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"))
        wrapper.plan(*table, 3, 2, 64, 8)


def test_bad_runs(device):
    batch = decode_batch(device)
    pages = batch.pages(8)
    cache = batch.cache(pages)
    with pytest.raises(ValueError, match=r"plan\(\) must be called before run"):
        BatchDecodeWithPagedKVCacheWrapper(workspace(device)).run(batch.q, cache)
    wrapper = planned(batch, pages, window_left=3)
    for run, error, text in (
        (lambda: wrapper.run(batch.q.float(), cache), ValueError, "dtype of q .* does not match the q_data_type"),
        (lambda: wrapper.run(batch.q, (cache[0].bfloat16(), cache[1])), ValueError, "does not match the kv_data_type"),
        (lambda: wrapper.run(batch.q, list(cache)), KeyError, "list"),
        (lambda: wrapper.run(batch.q, cache[0][0, 0]), ValueError, "must have 5 dimensions .*, got 2"),
        (lambda: wrapper.run(batch.q, cache, window_left=4), AssertionError, "window_left must be 3.*, got 4"),
        (lambda: wrapper.run(batch.q.repeat(2, 1, 1), cache), ValueError, "q_len_per_req"),
        (lambda: wrapper.run(batch.q[0], cache), ValueError, "q must have 3 dimensions.*, got 2"),
        (lambda: wrapper.run(batch.q[:, :2], cache), ValueError, "4 query heads"),
        (lambda: wrapper.run(batch.q, tuple(x.transpose(1, 2) for x in cache)), ValueError, "pages of 8 tokens"),
        (lambda: wrapper.run(batch.q, cache, out=batch.q[1:]), ValueError, "Invalid shape of out"),
        (lambda: wrapper.run(batch.q, cache, out=batch.q.float()), ValueError, "Invalid dtype of out"),
        (lambda: wrapper.run(batch.q, cache, lse=batch.q[..., 0], return_lse=True), ValueError, "Invalid dtype of lse"),
        (lambda: wrapper.run(batch.q, cache, out=batch.q.to("meta")), ValueError, "Invalid device of out"),
        (lambda: wrapper.run(batch.q, cache, 1.0), ValueError, "must be none"),
    ):
        with pytest.raises(error, match=text):
            run()


def test_top_level_names():
    for name in ("fast_decode_plan", "BatchDecodeWithPagedKVCacheWrapper", "single_decode_with_kv_cache"):
        assert hasattr(flashinfer, name)
