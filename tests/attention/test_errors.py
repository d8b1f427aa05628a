# SPDX-License-Identifier: Apache-2.0
"""Arguments that the planned wrappers reject, with the error texts: plan, run, run before plan, frozen sizes."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flashinfer
from flashinfer._runtime.errors import ArgumentError

from . import calls
from .inputs import Batch, int32

Decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper
Paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper
Ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper

PAGE_SIZE = 4


class Scene:
    """A wrapper with valid arguments; each case changes one of them."""

    def __init__(self, kind, device, decode_q_len=1, **constructor):
        decode = kind is Decode
        self.batch = Batch([decode_q_len] * 2 if decode else [3, 5], [7, 9], device=device)
        self.pages = self.batch.pages(PAGE_SIZE)
        self.wrapper = kind(calls.workspace(device), **constructor)
        tables = {
            Decode: dict(zip(("indptr", "indices", "last_page_len"), self.pages.table, strict=True)),
            Paged: dict(
                zip(("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"),
                    (self.batch.qo_indptr, *self.pages.table), strict=True)
            ),
            Ragged: {"qo_indptr": self.batch.qo_indptr, "kv_indptr": self.batch.kv_indptr},
        }[kind]  # fmt: skip
        self.planned = {**tables, "num_qo_heads": 4, "num_kv_heads": 2, "q_data_type": torch.float16}
        self.planned |= {"head_dim" if decode else "head_dim_qk": 64} | (
            {} if kind is Ragged else {"page_size": PAGE_SIZE}
        )
        if kind is Ragged:
            self.given = {"q": self.batch.q, "k": self.batch.k, "v": self.batch.v}
        else:
            self.given = {"q": self.batch.q, "paged_kv_cache": self.batch.cache(self.pages, form="combined")}

    def plan(self, **changes):
        arguments = {**self.planned, **changes}
        if isinstance(self.wrapper, Decode):  # the first seven arguments are positional by contract
            names = ("indptr", "indices", "last_page_len", "num_qo_heads", "num_kv_heads", "head_dim", "page_size")
            first = [arguments.pop(name) for name in names]
            return self.wrapper.plan(*first, **arguments)
        return self.wrapper.plan(**arguments)

    def run(self, **changes):
        arguments = {**self.given, **changes}
        first = [arguments.pop(name) for name in self.given]
        return self.wrapper.run(*first, **arguments)


kinds = pytest.mark.parametrize("kind", [Decode, Paged, Ragged], ids=lambda kind: kind.__name__)
paged_kinds = pytest.mark.parametrize("kind", [Decode, Paged], ids=lambda kind: kind.__name__)
prefill_kinds = pytest.mark.parametrize("kind", [Paged, Ragged], ids=lambda kind: kind.__name__)


@kinds
def test_run_before_plan(device, kind):
    with pytest.raises(ValueError, match=r"plan\(\) must be called before run\(\), got no plan"):
        Scene(kind, device).run()


@kinds
def test_words(device, kind):
    with pytest.raises(KeyError, match=r"kv_layout must be one of NHD, HND.*, got 'HDN'"):
        kind(calls.workspace(device), "HDN")
    with pytest.raises(KeyError, match=r"pos_encoding_mode must be one of NONE, ROPE_LLAMA, ALIBI.*, got 'ROPE'"):
        Scene(kind, device).plan(pos_encoding_mode="ROPE")
    if device == "cpu":  # on an SM90 GPU, prefill has this backend
        with pytest.raises(NotImplementedError, match=r"backend must be fa2 .*, got 'fa3'.*usable: fa2"):
            Scene(kind, device, backend="fa3").plan()
    with pytest.raises(ValueError, match=r"backend must be 'auto'(, 'fa2' or 'fa3'| or 'fa2').*, got 'fa9'$"):
        Scene(kind, device, backend="fa9").plan()
    with pytest.raises(TypeError):
        Scene(kind, device).plan(q_data_type=16)


@kinds
def test_queries_without_columns(device, kind):
    scene = Scene(kind, device)
    scene.plan()
    with pytest.raises(ArgumentError, match=f"{kind.__name__}.run: q must have a head dimension of at least 1, got 0"):
        scene.run(q=scene.batch.q[..., :0])


def test_keys_that_are_no_rows(device):
    scene = Scene(Ragged, device)
    scene.plan()
    for name, value in (("k", scene.batch.k.tolist()), ("v", None)):
        with pytest.raises(TypeError, match=rf"Wrapper\.run: {name} must be a tensor.*, got a (list|NoneType)"):
            scene.run(**{name: value})
    with pytest.raises(ArgumentError, match=r"Wrapper\.run: k must have 3 dimensions.*, got 0"):
        scene.run(k=scene.batch.k[0, 0, 0])


@kinds
def test_heads(device, kind):
    with pytest.raises(ValueError, match=r"num_qo_heads must be a multiple of num_kv_heads = 2.*, got 5"):
        Scene(kind, device).plan(num_qo_heads=5)


@kinds
def test_dtypes_of_run(device, kind):
    scene = Scene(kind, device)
    scene.plan()
    with pytest.raises(ValueError, match=r"The dtype of q .*bfloat16 does not match the q_data_type .*float16"):
        scene.run(q=scene.batch.q.bfloat16())
    cache = {"paged_kv_cache": scene.given["paged_kv_cache"].bfloat16()} if kind is not Ragged else {}
    cache = cache or {name: scene.given[name].bfloat16() for name in ("k", "v")}
    with pytest.raises(ValueError, match=r"The dtype of k .*bfloat16 does not match the kv_data_type .*float16"):
        scene.run(**cache)


@kinds
def test_buffers_of_the_caller(device, kind):
    scene = Scene(kind, device)
    scene.plan()
    o, lse = scene.run(return_lse=True)
    for name, bad in (
        ("shape", {"out": o[:-1]}),
        ("dtype", {"out": o.bfloat16()}),
        ("shape", {"lse": lse[:, :-1], "return_lse": True}),
        ("dtype", {"lse": lse.half(), "return_lse": True}),
        ("device", {"out": torch.empty_like(o, device="meta")}),
    ):
        with pytest.raises(ValueError, match=f"Invalid {name} of {next(iter(bad))}"):
            scene.run(**bad)
    with pytest.raises(ValueError, match=r"out.stride\(0\) must not be 0"):
        scene.run(out=o[:1].expand(o.shape))
    out, score = torch.full_like(o, torch.nan), torch.full_like(lse, torch.nan)
    result = scene.run(out=out, lse=score, return_lse=True)
    assert result[0].data_ptr() == out.data_ptr() and result[1].data_ptr() == score.data_ptr()
    assert torch.equal(out, o) and torch.equal(score, lse)


@kinds
def test_tensors_without_memory(device, kind):
    """Check that errors name the argument as the caller knows it, also after a successful call of the same form."""
    scene = Scene(kind, device)
    scene.plan()
    scene.run()
    keys = list(scene.given)[1]
    for name, argument in (("q", "q"), ("k", keys)):
        given = scene.given[argument]
        with pytest.raises(ArgumentError, match=rf"{kind.__name__}\.run: {name} must be on the CPU or.*, got meta"):
            scene.run(**{argument: given.to("meta")})
        with pytest.raises(
            ArgumentError, match=rf"{kind.__name__}\.run: {name} must be a tensor with data .*, got a FakeTensor"
        ):
            scene.run(**{argument: FakeTensorMode().from_tensor(given)})
        with pytest.raises(
            ArgumentError, match=rf"{kind.__name__}\.run: {name} must be a dense tensor, got layout torch.sparse_coo"
        ):
            scene.run(**{argument: given.to_sparse()})


@prefill_kinds
def test_rows_of_prefill(device, kind):
    scene = Scene(kind, device)
    scene.plan()
    with pytest.raises(ValueError, match=r"q must have 8 rows.*, got 7"):
        scene.run(q=scene.batch.q[:7])
    with pytest.raises(ValueError, match=r"custom_mask must have 66 elements.*, got 5"):
        scene.plan(custom_mask=torch.ones(5, dtype=torch.bool, device=device))


def test_indptrs_of_different_lengths(device):
    with pytest.raises(ValueError, match=r"kv_indptr must have 3 elements.*, got 2"):
        Scene(Ragged, device).plan(kv_indptr=int32([0, 7], device))
    with pytest.raises(ValueError, match=r"paged_kv_indptr must have 3 elements.*, got 2"):
        Scene(Paged, device).plan(paged_kv_indptr=int32([0, 2], device))
    with pytest.raises(ValueError, match="qo_indptr must not decrease"):
        Scene(Paged, device).plan(qo_indptr=int32([0, 9, 8], device))


@kinds
def test_offsets_below_zero(device, kind):
    """Check negative offsets: they would address rows and pages in front of the tensors."""
    names = {Decode: ["indptr"], Paged: ["qo_indptr", "paged_kv_indptr"], Ragged: ["qo_indptr", "kv_indptr"]}
    for name in names[kind]:
        scene = Scene(kind, device)
        scene.planned[name][0] = -1
        with pytest.raises(ValueError, match="indptr must begin with 0 or more, got -1"):
            scene.plan()


@paged_kinds
def test_index_arrays_are_integers(device, kind):
    scene = Scene(kind, device)
    for name, values in scene.planned.items():
        if isinstance(values, torch.Tensor):
            for dtype in (torch.float32, torch.bool, torch.complex64):
                with pytest.raises(ValueError, match=rf"{name} must have an integer dtype.*, got {dtype}"):
                    scene.plan(**{name: values.to(dtype)})
            with pytest.raises(ValueError, match=rf"plan: {name} must have (.* dimension, got 0|shape .*, got \(\))"):
                scene.plan(**{name: values[0]})


@kinds
def test_dtypes_of_plan(device, kind):
    scene = Scene(kind, device)
    with pytest.raises(ArgumentError, match=r"plan: q_data_type must be a dtype with kernels, got torch.float64"):
        scene.plan(q_data_type=torch.float64)
    with pytest.raises(TypeError, match=r"plan: kv_data_type: dtype must be a torch.dtype.*, got 'half a byte'"):
        scene.plan(kv_data_type="half a byte")


@paged_kinds
@pytest.mark.parametrize("page_size", [0, -1, 2**31])
def test_pages_of_no_size(device, kind, page_size):
    with pytest.raises(ValueError, match=f"plan: page_size must be a positive number of 32 bits.*, got {page_size}"):
        Scene(kind, device).plan(page_size=page_size)


@paged_kinds
def test_lengths_need_pages(device, kind):
    scene = Scene(kind, device)
    name = "indptr" if kind is Decode else "paged_kv_indptr"
    with pytest.raises(ValueError, match=r"seq_lens\[0\] must be 0 \(it has no pages.*, got 4"):
        scene.plan(**{name: int32([0, 0, 3], device)}, seq_lens=int32([4, 9], device))
    with pytest.raises(ValueError, match=r"request 0 must have at most 8 keys \(its pages.*, got 9"):
        scene.plan(seq_lens=int32([9, 9], device))
    with pytest.raises(ValueError, match=r"seq_lens must have 2 elements.*, got 3"):
        scene.plan(seq_lens=int32([7, 9, 1], device))


@kinds
def test_a_plan_that_fails_leaves_none(device, kind):
    """Check that a failed plan leaves no plan: a mix of old and new tables and options would give wrong numbers."""
    scene = Scene(kind, device)
    scene.plan()
    scene.run()
    bad = {"pos_encoding_mode": "SINE"} if kind is Decode else {"custom_mask": torch.ones(3, device=device)}
    with pytest.raises((KeyError, ValueError)):
        scene.plan(window_left=1, **bad)
    with pytest.raises(ValueError, match=r"plan\(\) must be called before run"):
        scene.run()
    scene.plan()
    calls.check(scene.run(return_lse=True), scene.batch.expected(), torch.float16)


@prefill_kinds
def test_items_are_enough(device, kind):
    """Check sizes of the multi-item tensors against the elements that kernels read."""
    places = torch.zeros(14, dtype=torch.uint16, device=device)
    items = {"prefix_len_ptr": torch.tensor([4, 3], dtype=torch.uint32), "token_pos_in_items_len": 7}
    Scene(kind, device).plan(**items, token_pos_in_items_ptr=places[:13])
    for change, text in (
        ({"token_pos_in_items_ptr": None}, "token_pos_in_items_ptr must be a tensor.*, got None"),
        ({"token_pos_in_items_ptr": places[:12]}, "token_pos_in_items_ptr must have at least 13 elements .*, got 12"),
        ({"token_pos_in_items_ptr": places, "token_pos_in_items_len": 9}, "must have at least 15 elements"),
        (
            {"token_pos_in_items_ptr": places, "prefix_len_ptr": torch.tensor([4])},
            "prefix_len_ptr must have 2 elements .*, got 1",
        ),
    ):
        with pytest.raises(ValueError, match=text):
            Scene(kind, device).plan(**{**items, **change})


@kinds
def test_scales_are_single_numbers(device, kind):
    """Check that scales have one element: a tensor of 64 would multiply columns."""
    scene = Scene(kind, device)
    scene.plan()
    for name in ("q_scale", "k_scale", "v_scale"):
        with pytest.raises(
            ValueError, match=rf"run: {name} must be a number or a tensor of one element, got shape \(64,\)"
        ):
            scene.run(**{name: torch.ones(64, device=device)})
    ones = {name: torch.ones(1, 1, 1, 1, device=device) for name in ("q_scale", "k_scale", "v_scale")}
    calls.check(scene.run(return_lse=True, **ones), scene.batch.expected(), torch.float16)


@paged_kinds
def test_caches(device, kind):
    scene = Scene(kind, device)
    scene.plan()
    whole = scene.given["paged_kv_cache"]
    with pytest.raises(KeyError, match="must be a tensor or a tuple of two, got a list"):
        scene.run(paged_kv_cache=list(whole.unbind(1)))
    with pytest.raises(KeyError):
        scene.run(paged_kv_cache=None)
    with pytest.raises(ValueError, match=r"must have 5 dimensions .*, got 3"):
        scene.run(paged_kv_cache=whole[0, 0])
    with pytest.raises(ValueError, match=r"NHD pages of 4 tokens"):
        scene.run(paged_kv_cache=whole[:, :, :3])
    with pytest.raises(AssertionError, match=r"window_left must be -1 \(as planned.*, got 3"):
        scene.run(window_left=3)


@paged_kinds
def test_page_ids_are_enough(device, kind):
    scene = Scene(kind, device)
    name = "indices" if kind is Decode else "paged_kv_indices"
    used = int(scene.pages.indptr[-1])
    with pytest.raises(ValueError, match=f"{name} must have at least {used} elements.*, got {used - 1}"):
        scene.plan(**{name: scene.pages.indices[: used - 1]})


def test_pages_of_one_token_need_no_page_dimension(device):
    for layout in ("NHD", "HND"):
        batch = Batch([1, 1], [7, 9], device=device)
        pages = batch.pages(1)
        wrapper = Decode(calls.workspace(device), layout)
        wrapper.plan(*pages.table, *batch.heads, 64, 1, q_data_type=torch.float16)
        k, v = (pages.scatter(x, layout).squeeze(2 if layout == "HND" else 1) for x in (batch.k, batch.v))
        for cache in ((k, v), torch.stack([k, v], dim=1)):
            calls.check(wrapper.run(batch.q, cache, return_lse=True), batch.expected(), batch.dtype)


def test_decode_options(device):
    with pytest.raises(ValueError, match=r"fixed_split_size must be None without use_tensor_cores.*, got 2"):
        Scene(Decode, device).plan(fixed_split_size=2)
    with pytest.raises(ValueError, match=r"q_len_per_req must be 1 without use_tensor_cores.*, got 2"):
        Scene(Decode, device).plan(q_len_per_req=2)
    with pytest.raises(ValueError, match=r"q_len_per_req must be at least 1.*, got 0"):
        Scene(Decode, device).plan(q_len_per_req=0)
    with pytest.raises(ValueError, match="empty KV range"):
        Scene(Decode, device, use_tensor_cores=True).plan(q_len_per_req=8)
    with pytest.raises(NotImplementedError, match=r"window_right must be 0.*, got 1"):
        Scene(Decode, device).plan(window_right=1)
    scene = Scene(Decode, device)
    scene.plan()
    with pytest.raises(ValueError, match=r"q must have 2 \* 1 rows .batch size \* q_len_per_req.*, got 4 rows"):
        scene.run(q=scene.batch.q.repeat(2, 1, 1))


def test_legacy_positions_of_decode(device):
    scene = Scene(Decode, device)
    first = [*scene.pages.table, 4, 2, 64, PAGE_SIZE]
    with pytest.warns(DeprecationWarning, match="positionally"):
        scene.wrapper.plan(*first, "NONE", -1, None, torch.float16)
    calls.check(scene.run(return_lse=True), scene.batch.expected(), torch.float16)
    with pytest.raises(TypeError, match="at most 16"):
        scene.wrapper.plan(*first, *[None] * 17)
    with pytest.raises(TypeError, match=r"multiple values.*window_left"), pytest.warns(DeprecationWarning):
        scene.wrapper.plan(*first, "NONE", -1, window_left=3)


def test_workspaces(device):
    unaligned = torch.empty(1 << 20, dtype=torch.uint8, device=device)[1:]
    for kind in (Decode, Paged):
        with pytest.raises(ValueError, match="float_workspace_buffer must be 16-byte aligned"):
            kind(unaligned)
        with pytest.raises(ValueError, match=r"float_workspace_buffer must be contiguous, got strides \(2,\)"):
            kind(torch.empty(1 << 20, dtype=torch.uint8, device=device)[::2])
    scene = Scene(Paged, device)
    big = Batch([1, 1], [4000, 4000], 4, 2, device=device)
    scene.wrapper.reset_workspace_buffer(*(torch.empty(n, dtype=torch.uint8, device=device) for n in (64, 8 << 20)))
    with pytest.raises(ValueError, match=r"float.*workspace.*64"):
        names = ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
        tables = dict(zip(names, big.pages(PAGE_SIZE).table, strict=True))
        scene.plan(qo_indptr=big.qo_indptr, **tables, fixed_split_size=4)


@kinds
def test_other_workspaces_need_another_plan(device, kind):
    scene = Scene(kind, device)
    scene.plan()
    scene.run()
    scene.wrapper.reset_workspace_buffer(
        calls.workspace(device), torch.zeros(8 << 20, dtype=torch.uint8, device=device)
    )
    with pytest.raises(ValueError, match=r"plan\(\) must be called before run"):
        scene.run()
    scene.plan()
    calls.check(scene.run(return_lse=True), scene.batch.expected(), torch.float16)


@pytest.mark.parametrize("tensor_cores", [False, True])
def test_workspace_size_is_enough(device, tensor_cores):
    batch = Batch([1] * 3, [4000, 1, 700], device=device)
    pages = batch.pages(PAGE_SIZE)
    plan = (*pages.table, *batch.heads, 64, PAGE_SIZE)
    wrapper = Decode(calls.workspace(device), use_tensor_cores=tensor_cores)
    sizes = wrapper.workspace_size(*plan, q_data_type=torch.float16)
    assert wrapper._plan_info is None and all(n >= 0 for n in sizes)
    buffers = (torch.full((n,), 0x7F, dtype=torch.uint8, device=device) for n in sizes)
    wrapper.reset_workspace_buffer(*buffers)
    wrapper.plan(*plan, q_data_type=torch.float16)
    assert len(wrapper._plan_info) == 15
    calls.check(wrapper.run(batch.q, batch.cache(pages), return_lse=True), batch.expected(), batch.dtype)


def graph_buffers(kind, device):
    names = {
        Decode: ("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer"),
        Paged: ("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf"),
        Ragged: ("qo_indptr_buf", "kv_indptr_buf"),
    }[kind]
    sizes = {name: 3 if "indptr" in name else 8 if "indices" in name else 2 for name in names}
    return {name: torch.zeros(size, dtype=torch.int32, device=device) for name, size in sizes.items()}


@kinds
def test_frozen_sizes(device, kind):
    """Check the frozen sizes of plans for CUDA graphs, which the CPU makes too."""
    buffers = graph_buffers(kind, device)
    for name in buffers:
        with pytest.raises(ValueError, match=r"must be a tensor .*, got none"):
            kind(calls.workspace(device), use_cuda_graph=True, **{k: v for k, v in buffers.items() if k != name})
    short = next(reversed(buffers))
    if kind is Decode:
        with pytest.raises(ValueError, match=r"must have 2 elements .*, got 3"):
            kind(calls.workspace(device), use_cuda_graph=True, **{**buffers, short: buffers[short][:1]})
    scene = Scene(kind, device, use_cuda_graph=True, **buffers)
    scene.plan()
    calls.check(scene.run(return_lse=True), scene.batch.expected(), torch.float16)
    one = {name: value[:-1] for name, value in scene.planned.items() if "indptr" in name or "last_page_len" in name}
    with pytest.raises(ValueError, match=r"the batch size must be 2 \(fixed by the buffers.*, got 1"):
        scene.plan(**one)
    if kind is not Ragged:
        indices = next(name for name in scene.planned if "indices" in name)
        with pytest.raises(ValueError, match=r"must have at most 8 elements .*, got 9"):
            scene.plan(**{indices: int32(range(9), device)})
    if kind is not Decode:
        with pytest.raises(ValueError, match=r"q must have at most 8 rows \(those of the first plan.*, got 9"):
            scene.plan(qo_indptr=int32([0, 3, 9], device))


@kinds
def test_buffers_of_graphs(device, kind):
    """Check that errors name the buffers given to the constructor: kernels read them later under other names."""
    buffers = graph_buffers(kind, device)
    for name, good in buffers.items():
        for bad, text in (
            (good.long(), rf"{name} must be torch.int32.*, got torch.int64 on {device}.*"),
            (good[:, None], rf"{name} must have one dimension without gaps, got shape \({len(good)}, 1\) and strides"),
            (
                good.repeat_interleave(2)[::2],
                rf"{name} must have one dimension without gaps, got shape .* strides \(2,\)",
            ),
            (good.to("meta"), rf"{name} must be torch.int32 on {device}.*, got torch.int32 on meta"),
        ):
            with pytest.raises(ValueError, match=text):
                kind(calls.workspace(device), use_cuda_graph=True, **{**buffers, name: bad})


@prefill_kinds
def test_mask_buffers_of_graphs(device, kind):
    """Check mask buffers of dtype bool: copying packed mask bits into bools would change the bits."""
    for dtypes, text in (
        ((torch.bool, torch.int32), r"custom_mask_buf must be torch.uint8.*, got torch.bool on .*"),
        ((torch.uint8, torch.int64), r"mask_indptr_buf must be torch.int32.*, got torch.int64 on .*"),
        ((torch.int8, torch.int32), None),
    ):
        masks = [torch.zeros(64, dtype=dtype, device=device) for dtype in dtypes]
        names = {"custom_mask_buf": masks[0], "mask_indptr_buf": masks[1]}
        scene = Scene(kind, device, use_cuda_graph=True, **graph_buffers(kind, device), **names)
        mask = torch.ones(66, dtype=torch.bool, device=device)
        if text is None:
            scene.plan(custom_mask=mask)
            calls.check(scene.run(return_lse=True), scene.batch.expected(), torch.float16)
            continue
        with pytest.raises(ValueError, match=text):
            scene.plan(custom_mask=mask)


@prefill_kinds
def test_masks_of_graphs_need_buffers(device, kind):
    scene = Scene(kind, device, use_cuda_graph=True, **graph_buffers(kind, device))
    with pytest.raises(ValueError, match=r"custom_mask_buf must be a tensor.*, got none"):
        scene.plan(custom_mask=torch.ones(66, dtype=torch.bool, device=device))


@pytest.mark.parametrize("split", [{}, {"disable_split_kv": True}, {"fixed_split_size": 16}], ids=str)
@pytest.mark.parametrize("tensor_cores", [False, True])
@kinds
def test_a_graph_fits_every_plan(device, kind, split, tensor_cores):
    """Check that the plan info, which a captured launch depends on, is the same for all lengths."""
    if tensor_cores != ("fixed_split_size" in split) if kind is Decode else tensor_cores:
        pytest.skip("no such option, or the same as another one")
    buffers = graph_buffers(kind, device)
    for name in buffers:
        if "indices" in name:
            buffers[name] = torch.zeros(4096, dtype=torch.int32, device=device)
    options = {"use_tensor_cores": tensor_cores} if kind is Decode else {}
    wrapper = kind(calls.workspace(device), use_cuda_graph=True, **buffers, **options)
    first = None
    for qo_lens, kv_lens in (([90, 60], [300, 64]), ([1, 1], [5, 0]), ([0, 150], [1, 7000]), ([75, 75], [4000, 3000])):
        batch = Batch([1, 1] if kind is Decode else qo_lens, kv_lens, device=device)
        pages = batch.pages(PAGE_SIZE)
        tables = {
            Decode: pages.table,
            Paged: (batch.qo_indptr, *pages.table),
            Ragged: (batch.qo_indptr, batch.kv_indptr),
        }
        sizes = (*batch.heads, 64) if kind is Ragged else (*batch.heads, 64, PAGE_SIZE)
        wrapper.plan(*tables[kind], *sizes, q_data_type=torch.float16, **split)
        first = first or list(wrapper._plan_info)
        assert list(wrapper._plan_info) == first
        cache = (batch.k, batch.v) if kind is Ragged else (batch.cache(pages),)
        calls.check(wrapper.run(batch.q, *cache, return_lse=True), batch.expected(), torch.float16)


def test_workspaces_of_wrappers_made_of_others(device):
    """Check that errors name the public class."""
    workspace = calls.workspace(device)[1:]
    for make in (
        lambda: flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace),
        lambda: flashinfer.PODWithPagedKVCacheWrapper(workspace),
        lambda: flashinfer.BatchPODWithPagedKVCacheWrapper(workspace),
        lambda: flashinfer.BlockSparseAttentionWrapper(workspace),
    ):
        with pytest.raises(ValueError, match=r"^Batch\w+Wrapper: float_workspace_buffer must be 16-byte aligned"):
            make()


@kinds
@pytest.mark.parametrize("name", ["sm_scale", "rope_scale", "rope_theta"])
def test_numbers_that_are_none(device, kind, name):
    """Check numbers of a wrong type that only run() reads."""
    for bad in ("1", torch.ones(1)):
        with pytest.raises(TypeError, match=rf"plan: {name} must be float.*, got a {type(bad).__name__}"):
            Scene(kind, device).plan(**{name: bad})


def test_rows_beyond_32_bits(device):
    """Rows of all heads are counted in 32 bits: such a plan was empty, or took all memory."""
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(calls.workspace(device))
    indptr, one = torch.tensor([0, (1 << 31) - 1], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    with pytest.raises(ArgumentError, match=r"batch_prefill: qo_indptr must be at most 536870911 .*, got 2147483647"):
        wrapper.plan(indptr, one, one[:1], one[1:], 4, 2, 64, 16, q_data_type=torch.float16)
