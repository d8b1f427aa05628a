# SPDX-License-Identifier: Apache-2.0
"""Arguments that are not a tensor or number as expected: the error names call and argument, whichever layer
rejects it.
"""

from __future__ import annotations

import inspect
from typing import Any, Optional, Union

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flashinfer
from flashinfer._runtime.errors import ArgumentError
from flashinfer._runtime.explain_error import explain_type_errors

F16, INT = torch.float16, torch.int32


def half(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=F16)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=INT)


def bytes_(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.uint8)


HEADS = {"q": half(9, 4, 64), "k": half(9, 2, 64)}
TOKENS = torch.arange(9, dtype=INT)
MLA = {"q_rope": half(9, 4, 64), "k_rope": half(9, 64), "q_nope": half(9, 4, 512), "k_nope": half(9, 512)}
TABLE = {"cos_sin_cache": torch.ones(32, 64), "pos_ids": TOKENS}
PAGES = {"kv_indices": ints(3, 1, 0), "kv_indptr": ints(0, 1, 3), "batch_indices": TOKENS // 3, "positions": TOKENS % 3}
CACHES = tuple(torch.zeros(5, 4, width).to(torch.float8_e4m3fn) for width in (512, 64))
PROBS = torch.full((4, 50), 0.02)
WORKSPACE = torch.zeros(1 << 20, dtype=torch.uint8)

CALLS: list[tuple[Any, dict[str, Any]]] = [
    (flashinfer.apply_rope, {**HEADS, "indptr": ints(0, 3, 9), "offsets": ints(0, 5)}),
    (flashinfer.apply_rope_pos_ids, {**HEADS, "pos_ids": TOKENS}),
    (flashinfer.apply_llama31_rope_pos_ids, {**HEADS, "pos_ids": TOKENS}),
    (
        flashinfer.apply_rope_with_cos_sin_cache_inplace,
        {"positions": TOKENS, "query": half(9, 4, 64), "key": half(9, 2, 64), "head_size": 64},
    ),
    (
        flashinfer.apply_rope_with_cos_sin_cache_inplace,
        {
            "positions": TOKENS,
            "query": half(9, 256),
            "key": half(9, 128),
            "head_size": 64,
            "cos_sin_cache": torch.ones(32, 64),
        },
    ),
    (flashinfer.rope.rope_quantize_fp8, {**MLA, **TABLE}),
    (
        flashinfer.rope.rope_quantize_fp8_append_paged_kv_cache,
        {**MLA, "v": None, **TABLE, **PAGES, "paged_kv_cache": CACHES},
    ),
    (flashinfer.get_batch_indices_positions, {"append_indptr": ints(0, 3, 9), "seq_lens": ints(5, 9), "nnz": 9}),
    (flashinfer.get_seq_lens, {"kv_indptr": ints(0, 1, 3), "kv_last_page_len": ints(3, 2), "page_size": 4}),
    (flashinfer.packbits, {"x": torch.ones(9, dtype=torch.bool)}),
    (flashinfer.segment_packbits, {"x": torch.ones(9, dtype=torch.bool), "indptr": ints(0, 3, 9)}),
    (flashinfer.mxfp8_quantize, {"input": half(6, 64), "alignment": 32}),
    (flashinfer.quantization.mxfp4_dequantize_host, {"weight": bytes_(8, 64), "scale": bytes_(8, 4), "group_size": 32}),
    (flashinfer.block_scale_interleave, {"unswizzled_sf": bytes_(128, 16)}),
    (flashinfer.shuffle_matrix_a, {"input_tensor": bytes_(128, 64), "epilogue_tile_m": 128}),
    (flashinfer.merge_state, {"v_a": half(6, 4, 64)}),
    (flashinfer.merge_states, {"v": half(6, 3, 4, 64)}),
    (flashinfer.rmsnorm, {"input": half(6, 64)}),
    (flashinfer.gemma_rmsnorm, {"input": half(6, 64)}),
    (flashinfer.silu_and_mul, {"input": half(6, 64)}),
    (flashinfer.gelu_and_mul, {"input": half(6, 64)}),
    (flashinfer.gelu_tanh_and_mul, {"input": half(6, 64)}),
    (flashinfer.swiglu, {"x": half(6, 64), "gate": half(6, 64)}),
    (flashinfer.norm.rmsnorm_quant, {"out": half(6, 64), "input": half(6, 64), "scale": torch.ones(1)}),
    (flashinfer.norm.fused_rmsnorm_silu, {"input": half(6, 64)}),
    (flashinfer.sampling_from_probs, {"probs": PROBS}),
    (flashinfer.top_p_sampling_from_probs, {"probs": PROBS, "top_p": 0.9}),
    (flashinfer.min_p_sampling_from_probs, {"probs": PROBS, "min_p": 0.1}),
    (flashinfer.top_k_top_p_sampling_from_logits, {"logits": PROBS, "top_k": 5, "top_p": 0.9}),
    (flashinfer.softmax, {"logits": PROBS, "temperature": 0.7}),
    (flashinfer.top_k_renorm_probs, {"probs": PROBS, "top_k": 5}),
    (flashinfer.top_k_mask_logits, {"logits": PROBS, "top_k": 5}),
    (flashinfer.top_k, {"input": PROBS, "k": 5}),
    (
        flashinfer.top_k_ragged_transform,
        {"input": PROBS, "offsets": ints(0, 0, 0, 0), "lengths": ints(9, 9, 9, 9), "k": 5},
    ),
    (
        flashinfer.top_k_page_table_transform,
        {
            "input": PROBS,
            "src_page_table": TOKENS[:, None],
            "lengths": ints(9, 9, 9, 9),
            "k": 5,
            "row_to_batch": TOKENS,
        },
    ),
    (flashinfer.top_k_varlen, {"logits": PROBS, "seq_lens": ints(9, 9, 9, 9), "top_k": 5}),
    (flashinfer.single_decode_with_kv_cache, {"q": half(4, 64), "v": half(33, 2, 64)}),
    (flashinfer.single_prefill_with_kv_cache, {"q": half(9, 4, 64), "k": half(33, 2, 64), "v": half(33, 2, 64)}),
]
DECODE = {"indptr": ints(0, 1, 3), "indices": ints(3, 1, 0), "last_page_len": ints(3, 2)}
PREFILL = {"qo_indptr": ints(0, 3, 9), "paged_kv_indptr": ints(0, 1, 3), "paged_kv_indices": ints(3, 1, 0)}
SIZES = {"num_qo_heads": 4, "num_kv_heads": 2, "page_size": 4}
PLANS: list[tuple[Any, dict[str, Any]]] = [
    (flashinfer.BatchDecodeWithPagedKVCacheWrapper, {**DECODE, **SIZES, "head_dim": 64}),
    (
        flashinfer.BatchPrefillWithPagedKVCacheWrapper,
        {**PREFILL, "paged_kv_last_page_len": ints(3, 2), **SIZES, "head_dim_qk": 64},
    ),
    (flashinfer.PODWithPagedKVCacheWrapper, {**DECODE, **SIZES, "head_dim": 64}),
]


def replaced(calls: list[tuple[Any, dict[str, Any]]]) -> list[Any]:
    """Return each argument of each call, once replaced by a string: neither a tensor nor a number."""
    return [
        pytest.param(call, arguments, name, id=f"{call.__name__}-{name}")
        for call, arguments in calls
        for name, value in arguments.items()
        if value is not None
    ]


@pytest.mark.parametrize("function, arguments, name", replaced(CALLS))
@pytest.mark.parametrize("bad", ["a string", [1, 2]], ids=["str", "list"])
def test_arguments_of_functions(function, arguments, name, bad):
    others = {
        p.name: torch.ones(1)
        for p in inspect.signature(function).parameters.values()
        if p.default is p.empty and p.name not in arguments
    }
    with pytest.raises((TypeError, ArgumentError), match=rf"^{function.__name__}: {name}(\[0\])? (is|must) "):
        function(**others | arguments | {name: bad})


@pytest.mark.parametrize("wrapper, arguments, name", replaced(PLANS))
def test_arguments_of_plans(wrapper, arguments, name):
    with pytest.raises(TypeError, match=rf"^{wrapper.__name__}.plan: {name} must be .*, got a str"):
        wrapper(WORKSPACE).plan(**arguments | {name: "a string"}, q_data_type=F16)


def test_workspaces():
    for wrapper, _ in PLANS:
        with pytest.raises(
            TypeError, match=f"^{wrapper.__name__}: float_workspace_buffer must be Tensor.*, got a NoneType"
        ):
            wrapper(None)


PagedCache = Union[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]


class Pages:
    @explain_type_errors
    def __init__(self, size: int) -> None:
        self.size = size + 0

    @explain_type_errors(name="append")
    def _append(self, cache: PagedCache, scale: Optional[float] = None, dtype: Union[str, torch.dtype] = F16) -> None:
        raise AttributeError("of something else")


def test_decorated_functions():
    x: Any = torch.ones(1)
    with pytest.raises(TypeError, match=r"^Pages: size must be int.*, got a NoneType$"):
        Pages(None)
    pages = Pages(3)
    arguments: Any
    for arguments, text in (
        ((None,), "Pages.append: cache must be Tensor or a sequence.*, got a NoneType"),
        (((x, None),), r"Pages.append: cache\[1\] must be Tensor.*, got a NoneType"),
        ((x, "1"), "Pages.append: scale must be float.*, got a str"),
        ((x, 1, 16), "Pages.append: dtype must be str or dtype.*, got a int"),
    ):
        with pytest.raises(TypeError, match=f"^{text}$"):
            pages._append(*arguments)
    for arguments, text in (
        ((x.to_sparse(),), "Pages.append: cache must be a dense tensor, got layout torch.sparse_coo"),
        (((x, x.to("meta")),), r"Pages.append: cache\[1\] must be on the CPU or a CUDA device.*, got meta"),
        ((x, 2**70), f"Pages.append: scale must be a number of 64 bits.*, got {2**70}"),
    ):
        with pytest.raises(ArgumentError, match=f"^{text}$"):
            pages._append(*arguments)
    with pytest.raises(AttributeError, match=r"^of something else$"):
        pages._append((x, x), 1, "float16")


@pytest.mark.parametrize(
    "call, argument",
    [
        (lambda: flashinfer.rmsnorm(half(4, 64), half(64)), "input"),
        (lambda: flashinfer.silu_and_mul(half(4, 64)), "input"),
        (lambda: flashinfer.sampling.softmax(torch.ones(4, 64)), "logits"),
        (lambda: flashinfer.single_prefill_with_kv_cache(half(3, 4, 64), half(9, 2, 64), half(9, 2, 64)), "q"),
    ],
    ids=["rmsnorm", "silu_and_mul", "softmax", "single_prefill"],
)
def test_tensors_without_memory(call, argument):
    """Check fake tensors: an error, not a crash, though their addresses are 0."""
    with (
        FakeTensorMode(),
        pytest.raises(ArgumentError, match=f": {argument} must be a tensor with data.*, got a FakeTensor"),
    ):
        call()


class Standing(torch.Tensor):
    """Tensor subclass that stands for another tensor, as distributed tensors do; results are wrapped too."""

    @staticmethod
    def __new__(cls, other: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, other.shape, dtype=other.dtype, device=other.device)

    def __init__(self, other: torch.Tensor) -> None:
        self.other = other

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = [x.other if isinstance(x, cls) else x for x in args]
        kwargs = {name: x.other if isinstance(x, cls) else x for name, x in (kwargs or {}).items()}
        return cls(func(*args, **kwargs))


@pytest.mark.parametrize(
    "call, argument",
    [
        (lambda x: flashinfer.rmsnorm(x, half(64)), "rmsnorm: input"),
        (lambda x: flashinfer.rmsnorm(half(4, 64), x[0]), "rmsnorm: weight"),
        (lambda x: flashinfer.softmax(x.float()), "softmax: logits"),
        (lambda x: flashinfer.sampling_from_probs(x.float()), "sampling_from_probs: probs"),
        (lambda x: flashinfer.top_k(x, 3), "top_k: input"),
        (
            lambda x: flashinfer.apply_rope_pos_ids_inplace(half(4, 1, 64), x[:, None], TOKENS[:4]),
            "apply_rope_pos_ids: k",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_tensors_that_stand_for_others(call, argument):
    with pytest.raises(ArgumentError, match=f"^{argument} must be a tensor with data.*, got a Standing"):
        call(Standing(half(4, 64)))


def test_tensors_inside_torch_func():
    with pytest.raises(
        ArgumentError, match=r"^rmsnorm: input must be a tensor with data .*torch\.func.*, got a Tensor"
    ):
        torch.vmap(lambda x: flashinfer.rmsnorm(x, half(64)))(half(2, 4, 64))


def test_words_that_are_lists():
    """Check lists in place of words: a list has no hash, so a lookup in a table of words would raise TypeError."""
    q, k, page = half(1, 2, 64), half(3, 2, 64), half(1, 2, 4, 2, 64)
    where = ints(0), ints(0), page, ints(0), ints(0, 1), ints(1)
    with pytest.raises(KeyError, match=r"single_decode_with_kv_cache: kv_layout must be one of.*, got \['NHD'\]"):
        flashinfer.single_decode_with_kv_cache(q[0], k, k, kv_layout=["NHD"])
    with pytest.raises(KeyError, match=r"pos_encoding_mode must be one of .*, got \['NONE'\]"):
        flashinfer.single_prefill_with_kv_cache(q, k, k, pos_encoding_mode=["NONE"])
    with pytest.raises(KeyError, match=r"append_paged_kv_cache: kv_layout must be 'NHD' or 'HND', got \['NHD'\]"):
        flashinfer.append_paged_kv_cache(q, q, *where, kv_layout=["NHD"])
    with pytest.raises(ValueError, match=r"Invalid filter_apply_order: \['joint'\]"):
        flashinfer.top_k_top_p_sampling_from_probs(PROBS, 5, 0.9, filter_apply_order=["joint"])


def nested(is_endless):
    """Return a list that contains itself, or one of 100,000 levels."""
    value: list[Any] = []
    if is_endless:
        value.append(value)
    for _ in range(0 if is_endless else 100_000):
        value = [value]
    return value


@pytest.mark.parametrize("is_endless", [True, False], ids=["endless", "deep"])
@pytest.mark.parametrize("name", ["weight", "eps", "out", "enable_pdl"])
def test_nested_lists(is_endless, name):
    arguments = {"input": half(2, 8), "weight": half(8), name: nested(is_endless)}
    with pytest.raises(TypeError, match=f"^rmsnorm: {name} must be .*, got a list"):
        flashinfer.rmsnorm(**arguments)


@pytest.mark.parametrize("name", ["q", "k", "v", "out", "lse"])
def test_nested_lists_in_a_repeated_run(name):
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
    wrapper.plan(ints(0, 3), ints(0, 9), 4, 2, 64, q_data_type=F16)
    good = {"q": half(3, 4, 64), "k": half(9, 2, 64), "v": half(9, 2, 64)}
    wrapper.run(**good)
    with pytest.raises((TypeError, ArgumentError), match=f"{name} must be"):
        wrapper.run(**good | {name: nested(True)})


def test_a_list_for_a_backend():
    with pytest.raises(ArgumentError, match=r"^single_prefill_with_kv_cache: backend must be .*, got \[\]"):
        flashinfer.single_prefill_with_kv_cache(half(9, 4, 64), *half(2, 33, 2, 64), backend=[])
