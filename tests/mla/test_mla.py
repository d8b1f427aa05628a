# SPDX-License-Identifier: Apache-2.0
"""MLA: values, caches in 8 bits, batches in CUDA graphs, and rejected arguments."""

from __future__ import annotations

import importlib
import inspect
import math
import warnings

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flashinfer
from flashinfer import BatchMLAPagedAttentionWrapper
from flashinfer._runtime.errors import ArgumentError, BackendSupportedError, GPUArchitectureError
from flashinfer._runtime.knobs import knobs
from flashinfer.jit.attention import gen_batch_mla_module
from flashinfer.mla import _core, page_ids

from ..attention.inputs import Pages
from ..bad_arguments import pattern
from ..graphs import capture
from .latent import BF16, CKV, F16, FP8, HEADS, KPE, KV_LENS, SCALE, Latent, close, workspace


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("causal", [False, True])
def test_latent_attention(device, page_size, causal):
    batch = Latent(device, page_size)
    wrapper = batch.wrapper(causal)
    expected = batch.expected(causal)
    close(wrapper.run(*batch.arguments, return_lse=True), expected)
    out, lse = torch.empty_like(batch.q_nope), torch.empty(batch.q_nope.shape[:2], device=device)
    result = wrapper.run(*batch.arguments, out=out, lse=lse, return_lse=True, return_lse_base_on_e=True)
    assert result[0] is out and result[1] is lse
    close((out, lse / math.log(2)), expected)


@pytest.mark.parametrize("heads", [1, 16, 128])
def test_decode_batch(device, heads):
    batch = Latent(device, 32, [1] * 4, [700, 1, 64, 0], heads=heads)
    close(batch.wrapper(True).run(*batch.arguments, return_lse=True), batch.expected())


def test_tables_longer_than_needed(device):
    batch = Latent(device)
    wrapper = BatchMLAPagedAttentionWrapper(workspace(device))
    rows, pages, indices, lens = batch.tables
    pages, indices = torch.cat([pages, pages[-1:] + 7]), torch.cat([indices, indices])
    wrapper.plan(rows, pages, indices, lens, HEADS, CKV, KPE, 16, False, SCALE, F16, F16)
    close(wrapper.run(*batch.arguments, return_lse=True), batch.expected())


def test_without_positions(device):
    batch = Latent(device, kpe=0)
    close(batch.wrapper().run(*batch.arguments, return_lse=True), batch.expected())


@pytest.mark.parametrize("ckv_scale, kpe_scale", [(1.0, 1.0), (0.5, 0.25), (np.float32(0.5), 2)])
def test_fp8_cache(device, ckv_scale, kpe_scale):
    batch = Latent(device, dtype=BF16, kv_dtype=FP8)
    result = batch.wrapper().run(*batch.arguments, return_lse=True, ckv_scale=ckv_scale, kpe_scale=kpe_scale)
    close(result, batch.expected(ckv=batch.ckv.float() * ckv_scale, kpe=batch.kpe.float() * kpe_scale), 2e-2)


def test_fp8_cache_with_scales_of_tokens(device):
    batch = Latent(device, dtype=BF16, kv_dtype=FP8)
    scales = 0.25 + torch.rand(sum(KV_LENS), CKV // 128, device=device)
    ckv = batch.ckv.float() * scales.repeat_interleave(128, -1).unsqueeze(1)
    array = scatter_rows(batch.pages, scales)
    result = batch.wrapper().run(*batch.arguments, return_lse=True, ckv_scale_arr=array, kpe_scale=0.5)
    close(result, batch.expected(ckv=ckv, kpe=batch.kpe.float() * 0.5), 2e-2)


def scatter_rows(pages: Pages, rows: torch.Tensor) -> torch.Tensor:
    """Write the rows of all requests into pages, with NaN elsewhere."""
    return pages.scatter(rows.unsqueeze(1), "NHD").squeeze(2)


def graph_wrapper(batch: Latent) -> BatchMLAPagedAttentionWrapper:
    rows, pages, _, lens = batch.tables
    indices = torch.zeros(200, dtype=torch.int32, device=batch.device)
    buffers = (torch.empty_like(rows), torch.empty_like(pages), indices, torch.empty_like(lens))
    return BatchMLAPagedAttentionWrapper(workspace(batch.device), True, *buffers)


def test_cuda_graph_mode(device):
    first = Latent(device, 16, [2, 2, 2], [300, 5, 64])
    wrapper = first.plan(graph_wrapper(first), True)
    close(wrapper.run(*first.arguments, return_lse=True), first.expected(True))
    second = Latent(device, 16, [2, 1, 2], [4, 400, 63])
    if device == "cpu":
        second.plan(wrapper, True)
        return close(wrapper.run(*second.arguments, return_lse=True), second.expected(True))
    caches = [torch.zeros(200, 16, n, dtype=F16, device=device) for n in (CKV, KPE)]
    queries = [x.clone() for x in (first.q_nope, first.q_pe)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = wrapper.run(*queries, *caches, return_lse=True)
    second.plan(wrapper, True)
    for buffer, values in zip((*queries, *caches), second.arguments, strict=True):
        buffer[: len(values)].copy_(values)
    graph.replay()
    rows = len(second.q_nope)
    close((out[:rows], lse[:rows]), second.expected(True))


def test_rows_rise_after_the_first_plan(device):
    """A graph of four requests whose first plan had one row takes a row of each; the layout of the plan stays."""
    one, four = Latent(device, 16, [1, 0, 0, 0], [300, 0, 0, 0]), Latent(device, 16, [1, 1, 1, 1], [300, 5, 64, 7])
    wrapper = graph_wrapper(four)
    one.plan(wrapper)
    fixed = list(wrapper._plan_info)
    for batch in (four, one, four):
        batch.plan(wrapper)
        close(wrapper.run(*batch.arguments, return_lse=True), batch.expected())
        assert list(wrapper._plan_info) == fixed
    with pytest.raises(ValueError, match=r"rows must be at most 4 .*, got 5"):
        Latent(device, 16, [2, 1, 1, 1], [300, 5, 64, 7]).plan(wrapper)


def test_plans_of_engines_whose_result_is_dropped(device):
    """Check SGLang's use: between replays it writes the tables, calls the module's plan and drops the result."""
    first = Latent(device, 16, [1, 1, 1], [300, 5, 64])
    wrapper = first.plan(graph_wrapper(first), False)
    caches = [torch.zeros(200, 16, n, dtype=F16, device=device) for n in (CKV, KPE)]
    tensors = (first.q_nope.clone(), first.q_pe.clone(), *caches)

    def fill(batch: Latent) -> None:
        for buffer, values in zip(tensors, batch.arguments, strict=True):
            buffer[: len(values)].copy_(values)

    fill(first)
    result = wrapper.run(*tensors, return_lse=True)
    close(result, first.expected())
    graph = None
    if device == "cuda":
        graph, result = capture(lambda: wrapper.run(*tensors, return_lse=True))
    for kv_lens in ([4, 700, 63], [0, 1, 900]):
        batch = Latent(device, 16, [1, 1, 1], kv_lens)
        fill(batch)
        rows, pages, indices, lens = batch.tables
        wrapper._kv_indices_buf[: len(indices)].copy_(indices)
        memory = ("_float_workspace_buffer", "_int_workspace_buffer", "_pin_memory_int_workspace_buffer")
        wrapper._cached_module.plan(
            *(getattr(wrapper, name) for name in memory), *(x.cpu() for x in (rows, pages, lens)), HEADS, CKV, False
        )
        if graph is not None:
            graph.replay()
            close(result, batch.expected())
        close(wrapper.run(*tensors, return_lse=True), batch.expected())


def test_torch_compile(device):
    batch = Latent(device)
    wrapper = batch.wrapper()
    compiled = torch.compile(lambda *x: wrapper.run(*x) * 2, fullgraph=True, backend="eager")
    assert torch.equal(compiled(*batch.arguments), wrapper.run(*batch.arguments) * 2)


# Rejected arguments ------------------------------------------------------------------------------

BAD_PLANS = [
    ({"kv_indptr": torch.tensor([-7, *range(2, 8)])}, "indptr must begin with 0 or more, got -7"),
    ({"qo_indptr": torch.tensor([-1, *range(2, 8)])}, "indptr must begin with 0 or more, got -1"),
    ({"kv_data_type": torch.int8}, "kv_data_type must be float16, bfloat16 or float8_e4m3fn.*, got torch.int8"),
    ({"head_dim_kpe": -1}, "head_dim_kpe must be 0 or more.*, got -1"),
    ({"kv_data_type": FP8}, "q_data_type=torch.bfloat16"),
    ({"kv_data_type": FP8, "q_data_type": BF16, "head_dim_ckv": 256}, "must be 512 and 0 or 64 for an FP8 cache"),
    ({"kv_data_type": FP8, "q_data_type": BF16, "head_dim_kpe": 32}, "must be 512 and 0 or 64 for an FP8 cache"),
    ({"qo_indptr": torch.zeros(3, dtype=torch.int32)}, "qo_indptr must have 7 elements (batch_size + 1).*, got 3"),
    ({"kv_indptr": torch.zeros(3, dtype=torch.int32)}, "kv_indptr must have at least 7 elements.*, got 3"),
    ({"kv_indptr": torch.zeros(1, 7, dtype=torch.int32)}, "kv_indptr must have 1 dimension.*, got 2"),
    ({"kv_indices": torch.zeros(3, dtype=torch.int32)}, "kv_indices must have .* elements.*, got 3"),
    ({"page_size": 0}, "page_size must be at least 1.*, got 0"),
]


def plan_arguments(batch: Latent):
    names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
    sizes = {"num_heads": HEADS, "head_dim_ckv": CKV, "head_dim_kpe": KPE, "page_size": 16}
    types = {"q_data_type": F16, "kv_data_type": F16}
    return {**dict(zip(names, batch.tables, strict=True)), **sizes, "causal": False, "sm_scale": SCALE, **types}


@pytest.mark.parametrize("change, text", BAD_PLANS, ids=[text for _, text in BAD_PLANS])
def test_bad_plan(device, change, text):
    wrapper = BatchMLAPagedAttentionWrapper(workspace(device))
    with pytest.raises(ValueError, match=pattern(text)):
        wrapper.plan(**(plan_arguments(Latent(device)) | change))


def put(tensor: torch.Tensor, place: int, value: int) -> torch.Tensor:
    changed = tensor.clone()
    changed[place] = value
    return changed


@pytest.mark.parametrize("place, value", [(0, -1), (3, 1 << 20)])
def test_page_ids(device, monkeypatch, place, value):
    """Check page ids out of range: a CPU rejects them, a GPU only with FLASHINFER_VALIDATE_INPUTS."""
    monkeypatch.setattr(page_ids, "VALIDATE", torch.device(device).type == "cuda")
    batch = Latent(device)
    wrapper = batch.wrapper()
    expected, good = wrapper.run(*batch.arguments), batch.tables
    tables = (*good[:2], put(good[2], place, value), good[3])
    wrapper.plan(*tables, HEADS, CKV, KPE, 16, False, SCALE, F16, F16)
    with pytest.raises(ArgumentError, match=pattern(f"kv_indices[{place}] must be 0 to.*, got {value}")):
        wrapper.run(*batch.arguments)
    batch.plan(wrapper)._kv_indices_buf = good[2][:1]  # engines replace the buffer
    with pytest.raises(ArgumentError, match=r"must be at 0 to 0 of kv_indices"):
        wrapper.run(*batch.arguments)
    assert torch.equal(batch.plan(wrapper).run(*batch.arguments), expected)


def test_page_ids_without_validation():
    """Check that page ids are not validated on a GPU by default: the call would wait for the GPU."""
    assert not page_ids.VALIDATE
    with knobs.override(validate_inputs="1"):
        assert importlib.reload(page_ids).VALIDATE
    assert not importlib.reload(page_ids).VALIDATE


def test_run_of_the_older_wrapper_before_plan(device):
    wrapper = flashinfer.BatchDecodeMlaWithPagedKVCacheWrapper(workspace(device))
    with pytest.raises(ArgumentError, match=r"plan\(\) must be called before run"):
        wrapper.run(*Latent(device).arguments)


def test_bad_runs(device):
    batch = Latent(device)
    wrapper = BatchMLAPagedAttentionWrapper(workspace(device))
    with pytest.raises(ArgumentError, match=r"plan\(\) must be called before run"):
        wrapper.run(*batch.arguments)
    batch.plan(wrapper)
    for i, name in enumerate(("q_nope", "q_pe", "ckv_cache", "kpe_cache")):
        arguments = list(batch.arguments)
        arguments[i] = arguments[i].to(BF16)
        with pytest.raises(ValueError, match=pattern(f"{name}.dtype must be torch.float16.*, got torch.bfloat16")):
            wrapper.run(*arguments)
    with pytest.raises(ValueError, match="o_scale is only supported with the cutlass"):
        wrapper.run(*batch.arguments, o_scale=1.0)
    with pytest.raises(ValueError, match=r"ckv_scale must be None.*, got a value"):
        wrapper.run(*batch.arguments, ckv_scale=1.0)
    with pytest.raises(ValueError, match=r"q_nope must have 26 rows.*, got 25"):
        wrapper.run(batch.q_nope[1:], batch.q_pe[1:], *batch.caches)
    batch.plan(wrapper, use_profiler=True)
    with pytest.raises(ValueError, match=r"profiler_buffer must be a tensor .*, got None"):
        wrapper.run(*batch.arguments)


@pytest.mark.parametrize("name", ["q_nope", "q_pe", "ckv_cache", "kpe_cache"])
def test_tensors_without_memory(device, name):
    """Check tensors without data: q_pe and kpe_cache are optional in native calls and must be validated too."""
    batch = Latent(device, qo_lens=[1], kv_lens=[33])
    wrapper = batch.wrapper()
    given = dict(zip(("q_nope", "q_pe", "ckv_cache", "kpe_cache"), batch.arguments, strict=True))
    with pytest.raises(ArgumentError, match=rf"\.run: {name} must be a tensor with data.*, got a FakeTensor"):
        wrapper.run(**{**given, name: FakeTensorMode().from_tensor(given[name])})
    with pytest.raises(ArgumentError, match=rf"\.run: {name} must be on the CPU or a CUDA device.*, got meta"):
        wrapper.run(**{**given, name: given[name].to("meta")})
    with pytest.raises(ValueError, match=r"\.run: \w+ and \w+ must both be provided"):
        wrapper.run(**{**given, name: None})


def test_bad_scales(device):
    batch = Latent(device, dtype=BF16, kv_dtype=FP8)
    wrapper = batch.wrapper()
    array = torch.ones(*batch.caches[0].shape[:2], 4, device=device)
    bad = [
        ({"kpe_scale": 1.0}, "Exactly one of ckv_scale or ckv_scale_arr"),
        ({"ckv_scale": 1.0, "ckv_scale_arr": array, "kpe_scale": 1.0}, "Exactly one of ckv_scale or ckv_scale_arr"),
        ({"ckv_scale_arr": array[..., :3], "kpe_scale": 1.0}, "Invalid shape of ckv_scale_arr"),
        ({"ckv_scale_arr": array.double(), "kpe_scale": 1.0}, "must be contiguous float32"),
        ({"ckv_scale": 1.0}, r"kpe_scale is required when kv_data_type is FP8\..*, got None"),
        ({"ckv_scale": 0.0, "kpe_scale": 1.0}, "ckv_scale must be a finite number above 0.*, got 0.0"),
        ({"ckv_scale": math.inf, "kpe_scale": 1.0}, "ckv_scale must be a finite number above 0.*, got inf"),
    ]
    for scales, text in bad:
        with pytest.raises(ValueError, match=text):
            wrapper.run(*batch.arguments, **scales)
    parameters = inspect.signature(BatchMLAPagedAttentionWrapper.run).parameters
    names = ("ckv_scale", "ckv_scale_arr", "kpe_scale")
    assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in names)


def test_what_an_fp8_cache_needs_is_said_before_what_the_backend_needs():
    wrapper = BatchMLAPagedAttentionWrapper(workspace("cpu"))
    wrapper._requested_backend = "fa3"
    with pytest.raises(ValueError, match=r"q_data_type=torch\.bfloat16"):
        wrapper._check_types(F16, FP8, 512, 64)


def test_page_counts():
    """Pages of a request are those that its keys need, unless page offsets are longer than the batch."""
    batch = Latent("cpu", 16, [1, 1], [30, 5])
    rows, pages, indices, lens = batch.tables
    lens = lens - torch.tensor([20, 0], dtype=torch.int32)
    sizes = (HEADS, CKV, KPE, 16, False, SCALE, F16, F16)
    wrapper = BatchMLAPagedAttentionWrapper(workspace("cpu"))
    text = r"page counts in kv_indptr must equal ceil\(kv_len_arr / page_size\)\. Request 0 must have 1 pages, got 2"
    with pytest.raises(ValueError, match=text):
        wrapper.plan(rows, pages, indices, lens, *sizes)
    wrapper.plan(rows, torch.cat([pages, pages[-1:]]), indices, lens, *sizes)


def test_bad_wrappers(device):
    batch = Latent(device, 16, [2, 2], [30, 5])
    with pytest.raises(ArgumentError, match=r"kv_indices must be a tensor.*, got none"):
        BatchMLAPagedAttentionWrapper(workspace(device), True, batch.qo_indptr, batch.pages.indptr)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cutlass = BatchMLAPagedAttentionWrapper(workspace(device), backend="cutlass")
    with pytest.raises(GPUArchitectureError, match=r"run: backend must be fa2 here, got 'cutlass', which needs SM100"):
        cutlass.run(*batch.arguments, out=torch.empty_like(batch.q_nope), o_scale=1.0)
    with pytest.raises(GPUArchitectureError, match=r"plan: backend must be fa2 here, got 'cutlass', which needs SM100"):
        batch.plan(cutlass)
    unplanned = BatchMLAPagedAttentionWrapper(workspace(device))
    with pytest.raises(ValueError, match="o_scale is only supported with the cutlass"):
        unplanned.run(*(x.float() for x in batch.arguments), o_scale=1.0)
    wrapper = batch.plan(graph_wrapper(batch))
    for qo_lens, kv_lens, text in (
        ([2], [30], "the batch must have 2 requests.*, got 1"),
        ([2, 3], [30, 5], "rows must be at most 4 .*, got 5"),
        ([2, 2], [4000, 5], "kv_indices must have at most 200 elements.*, got 251"),
    ):
        with pytest.raises(ValueError, match=text):
            Latent(device, 16, qo_lens, kv_lens).plan(wrapper)


def test_warning_on_blackwell(monkeypatch):
    class Buffer:
        is_cuda, device = True, torch.device("cuda")

    monkeypatch.setattr(_core, "get_compute_capability", lambda device: (10, 0))
    monkeypatch.setattr(BatchMLAPagedAttentionWrapper, "_blackwell_auto_fallback_warned", False)
    with pytest.warns(UserWarning, match="not Blackwell-native"):
        assert BatchMLAPagedAttentionWrapper._resolve(Buffer(), "auto") == "fa2"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        BatchMLAPagedAttentionWrapper._resolve(Buffer(), "auto")


def test_hopper_backend(monkeypatch):
    """Only an SM90 device has the kernels of "fa3", which take caches of 512 and 64 or 0 columns."""

    class Buffer:
        is_cuda, device = True, torch.device("cuda")

    resolve = BatchMLAPagedAttentionWrapper._resolve
    monkeypatch.setattr(_core, "get_compute_capability", lambda device: (9, 0))
    assert (resolve(Buffer(), "fa3"), resolve(Buffer(), "auto")) == ("fa3", "fa2")
    with pytest.raises(
        NotImplementedError, match="backend must be fa2 here, got 'fa3', which needs an SM90 device; usable: fa2"
    ):
        resolve(workspace("cpu"), "fa3")
    wrapper = BatchMLAPagedAttentionWrapper(workspace("cpu"))
    wrapper._backend = wrapper._requested_backend = "fa3"
    with pytest.raises(ArgumentError, match=r"kv_data_type must be q_data_type, .*got torch.bfloat16.*usable: fa2"):
        Latent("cpu", 16, [1], [3], dtype=F16, kv_dtype=BF16).plan(wrapper)
    with pytest.raises(ArgumentError, match="must be 512 and 0 or 64 with backend 'fa3', got 512 and 32; usable: fa2"):
        Latent("cpu", 16, [1], [3], kpe=32).plan(wrapper)
    for device, dtypes, dims, text in (
        ("cpu", (F16,) * 3, (512, 64), "backend 'fa3' is not available on cpu"),
        ("cuda", (F16, FP8, F16), (512, 64), "must be all float16 or all bfloat16"),
        ("cuda", (F16,) * 3, (256, 64), "must be 512 and 0 or 64 for backend 'fa3', got 256 and 64"),
    ):
        with pytest.raises((ArgumentError, BackendSupportedError), match=text):
            gen_batch_mla_module("fa3", *dtypes, torch.int32, *dims, False, device=device)


# The older wrapper -------------------------------------------------------------------------------


def test_legacy_wrapper(device):
    batch = Latent(device, 16, [1] * 3, [33, 97, 0])
    wrapper = flashinfer.BatchDecodeMlaWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(*batch.pages.table, HEADS, CKV, 16, SCALE, data_type=F16)
    if device == "cuda" and torch.cuda.get_device_capability() != (8, 0):
        with pytest.raises(flashinfer.GPUArchitectureError, match="must be an SM80, got another"):
            wrapper.run(*batch.arguments)
        return
    close(wrapper.run(*batch.arguments, return_lse=True), batch.expected())
    close(wrapper.run_return_lse(*batch.arguments), batch.expected())
    doubled = wrapper.run(*batch.arguments, q_scale=torch.tensor(2.0, device=device), k_scale=0.5, v_scale=2.0)
    torch.testing.assert_close(doubled.float(), 2 * batch.expected()[0], rtol=4e-3, atol=4e-3)
    with pytest.raises(ValueError, match=r"q_nope must have 3 rows.*, got 2"):
        wrapper.run(batch.q_nope[:2], batch.q_pe[:2], *batch.caches)
    with pytest.raises(ArgumentError, match="window_left and logits_soft_cap must be -1 and None, got 5"):
        wrapper.plan(*batch.pages.table, HEADS, CKV, 16, SCALE, window_left=5)


def test_legacy_buffers_hold_the_page_table():
    batch = Latent("cpu", 16, [1] * 3, [33, 97, 0])
    buffers = [torch.zeros_like(x) for x in batch.pages.table]
    wrapper = flashinfer.BatchDecodeMlaWithPagedKVCacheWrapper(workspace("cpu"), True, False, *buffers)
    wrapper.plan(*batch.pages.table, HEADS, CKV, 16, SCALE, data_type=F16)
    for buffer, given in zip(buffers, batch.pages.table, strict=True):
        torch.testing.assert_close(buffer, given)
    close(wrapper.run(*batch.arguments, return_lse=True), batch.expected())


def test_dimensions_of_models():
    from flashinfer import mla

    assert mla.deepseek_mla_dimensions == mla.MLAHeadDimensions(128, 64, 128, 512)
    assert mla.supported_mla_head_dimensions == [
        mla.deepseek_mla_dimensions,
        mla.MLAHeadDimensions(64, 64, 128, 256),
        mla.MLAHeadDimensions(256, 0, 256, 512),
    ]
    assert [(x.head_dimensions.kv_lora_rank, x.num_heads) for x in mla.supported_mla_layer_dimensions] == [
        (512, 128),
        (512, 64),
        (256, 32),
    ]
    sizes = flashinfer.utils.get_trtllm_gen_multi_ctas_kv_counter_bytes
    assert (sizes(3, 7, 1), sizes(1, 1, 132)) == (4 * 24, 4 * 136)
