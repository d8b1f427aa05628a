# SPDX-License-Identifier: Apache-2.0
"""Error messages for wrong arguments: they name the op, the argument, the actual and the expected value."""

from __future__ import annotations

import re

import pytest
import torch

import flashinfer.rope
from flashinfer._runtime.errors import ArgumentError

from ..bad_arguments import check_refused

FP16, FP32, FP8, INT = torch.float16, torch.float32, torch.float8_e4m3fn, torch.int32

# Op -> arguments of a good call, name -> (shape, dtype) of zeros or a value.
HEADS = {"q": ((4, 8, 64), FP16), "k": ((4, 2, 64), FP16)}
RAGGED = {**HEADS, "indptr": ((3,), INT), "offsets": ((2,), INT)}
POS_IDS = {**HEADS, "pos_ids": ((4,), INT)}
CACHE = {
    "positions": ((4,), INT),
    "query": ((4, 8 * 64), FP16),
    "key": ((4, 2 * 64), FP16),
    "head_size": 64,
    "cos_sin_cache": ((8, 32), FP32),
}
TABLE = {"cos_sin_cache": ((8, 64), FP32), "pos_ids": ((4,), INT)}
MLA = {
    "q_rope": ((4, 8, 64), FP16),
    "k_rope": ((4, 64), FP16),
    "q_nope": ((4, 8, 32), FP16),
    "k_nope": ((4, 32), FP16),
    **TABLE,
}
PAGES = {
    "kv_indices": ((2,), INT),
    "kv_indptr": torch.tensor([0, 1, 2], dtype=INT),
    "batch_indices": ((4,), INT),
    "positions": ((4,), INT),
}
GQA = {**MLA, "k_rope": ((4, 2, 64), FP16), "k_nope": ((4, 2, 32), FP16), "v": ((4, 2, 96), FP16)}
KV = [((3, 16, 2, 96), FP8), ((3, 16, 2, 96), FP8)]
GOOD = {
    "apply_rope": RAGGED,
    "apply_llama31_rope": RAGGED,
    "apply_rope_pos_ids": POS_IDS,
    "apply_llama31_rope_pos_ids": POS_IDS,
    "apply_rope_with_cos_sin_cache": CACHE,
    "rope_quantize_fp8": {**MLA, "q_rope_out": ((4, 8, 64), FP8), "k_nope_out": ((4, 32), FP8)},
    "rope_quantize_fp8_append_paged_kv_cache": {**GQA, **PAGES, "paged_kv_cache": KV},
}

# (ops, argument, (shape, dtype) or a function that changes the good value, text)
APPLY = [op for op in GOOD if op.startswith(("apply_rope", "apply_llama")) and "cache" not in op]
POSITIONED = [op for op in APPLY if "pos_ids" in op]
RAGGEDS = [op for op in APPLY if "pos_ids" not in op]
LLAMA31 = [op for op in APPLY if "llama31" in op]
TABLED, QUANT, APPEND = (
    ["apply_rope_with_cos_sin_cache"],
    ["rope_quantize_fp8"],
    ["rope_quantize_fp8_append_paged_kv_cache"],
)
FUSED = QUANT + APPEND
BAD = [
    (APPLY, "q", ((4, 512), FP16), "q has 2 dimensions, expected 3"),
    (APPLY, "q", ((4, 8, 64), torch.int32), "q has dtype int32, expected float16"),
    (APPLY, "q", ((4, 8, 63), FP16), "k.shape[2] = 64, expected 63"),
    (APPLY, "q", lambda t: t.repeat(1, 1, 2)[..., ::2], "q.stride(-1) = 2, expected 1"),
    (APPLY, "k", ((5, 2, 64), FP16), "k.shape[0] = 5, expected 4 (the number of tokens)"),
    (APPLY, "k", ((4, 2, 64), torch.bfloat16), "k has dtype bfloat16, expected float16 (the dtype of q)"),
    (APPLY, "rotary_dim", 0, "rotary_dim is 0, expected an even number from 2 to 64"),
    (APPLY, "rotary_dim", -1, "rotary_dim is -1, expected an even number from 2 to 64"),
    (APPLY, "rotary_dim", 33, "rotary_dim is 33, expected an even number"),
    (APPLY, "rotary_dim", 66, "rotary_dim is 66, expected an even number from 2 to 64"),
    (APPLY, "rope_theta", 0.0, "rope_theta is 0 and rope_scale "),
    (APPLY, "rope_theta", -1.0, ", expected a positive number and one that is not 0"),
    (APPLY, "rope_scale", 0.0, "and rope_scale 0, expected a positive number and one that is not 0"),
    (LLAMA31, "high_freq_factor", 1.0, "low_freq_factor and high_freq_factor are equal, expected two numbers"),
    (POSITIONED, "pos_ids", ((5,), INT), "pos_ids.shape[0] = 5, expected 4"),
    (POSITIONED, "pos_ids", ((4,), FP32), "pos_ids has dtype float32, expected int32 or int64"),
    (POSITIONED, "pos_ids", ((2, 2), INT), "pos_ids has 2 dimensions, expected 1"),
    (RAGGEDS, "indptr", ((4,), INT), "indptr.shape[0] = 4, expected 3 (offsets.shape[0] + 1)"),
    (RAGGEDS, "indptr", ((3,), torch.int64), "indptr has dtype int64, expected int32 (the dtype of offsets)"),
    (RAGGEDS, "offsets", ((2,), FP16), "offsets has dtype float16, expected int32 or int64"),
    (TABLED, "query", ((4, 500), FP16), "query.shape[-1] = 500, expected a multiple of 64 (head_size)"),
    (TABLED, "key", ((5, 128), FP16), "key.shape[0] = 5, expected 4"),
    (TABLED, "cos_sin_cache", ((8, 128), FP32), "cos_sin_cache.shape[1] is 128, expected an even number from 2 to 64"),
    (TABLED, "cos_sin_cache", ((0, 32), FP32), "cos_sin_cache has no rows"),
    (TABLED, "positions", ((), INT), "positions has 0 dimensions, expected 1"),
    (TABLED, "query", ((4, 8, 60), FP16), "query or key has shape (4, 8, 60) and strides (480, 60, 1), expected what"),
    (TABLED, "head_size", 0, "head_size is 0, expected at least 1"),
    (TABLED, "positions", ((3,), INT), "positions.shape[0] = 3, expected 4"),
    (TABLED + FUSED, "cos_sin_cache", ((8, 32), FP16), "cos_sin_cache should be float32"),
    (FUSED, "cos_sin_cache", ((8, 32), FP32), "cos_sin_cache.shape[1] = 32, expected 64 (q_rope.shape[2])"),
    (FUSED, "k_rope", ((4, 2, 32), FP16), "k_rope.shape[-1] = 32, expected 64"),
    (FUSED, "q_nope", ((4, 7, 32), FP16), "q_nope.shape[1] = 7, expected 8"),
    (FUSED, "quantize_dtype", FP16, "must have dtype torch.float16"),
    (QUANT, "q_rope_out", ((4, 8, 32), FP8), "q_rope_out has shape (4, 8, 32), expected (4, 8, 64)"),
    (
        QUANT,
        "k_nope_out",
        ((4, 32), torch.float8_e5m2),
        "k_nope_out must have dtype torch.float8_e4m3fn",
    ),
    (QUANT, "q_rope_out", lambda t: t[:1].expand(4, 8, 64), "q_rope_out.stride(0) must not be 0"),
    (FUSED, "q_nope_out", ((4, 8, 16), FP8), "q_nope_out has shape (4, 8, 16), expected (4, 8, 32)"),
    (QUANT, "k_nope", None, "k_nope_out.shape[-1] = 32, expected 0 (k_nope is None)"),
    (APPEND, "v", None, "v must be a tensor"),
    (APPEND, "k_rope", ((4, 64), FP16), "v must be None"),
    (APPEND, "paged_kv_cache", lambda pair: pair[:1], "paged_kv_cache must be a tuple of 2"),
    (APPEND, "paged_kv_cache", lambda pair: (pair[0][0], pair[1]), "k_cache must have 4 dimensions"),
    (APPEND, "paged_kv_cache", lambda pair: (pair[0], pair[1].half()), "v_cache must have dtype"),
    (
        APPEND,
        "paged_kv_cache",
        lambda pair: (pair[0], pair[1][..., :64]),
        "v_cache.shape[-1] = 64, expected 96 (the width of v)",
    ),
    (
        APPEND,
        "paged_kv_cache",
        lambda pair: (pair[0], pair[1][:2]),
        "v_cache.shape[0] = 2, expected 3 (the pages of the first cache)",
    ),
    (
        APPEND,
        "paged_kv_cache",
        lambda pair: (pair[0], pair[1][:1].expand(3, 16, 2, 96)),
        "v_cache.stride(0) must not be 0",
    ),
    (APPEND, "paged_kv_cache", lambda pair: None, "paged_kv_cache must be a tuple of 2 tensors, got a NoneType"),
    (APPEND, "positions", ((4,), FP32), "positions has dtype torch.float32, expected integers"),
    (APPEND, "page_size", 8, "k_cache.shape[1] = 16, expected 8 (page_size)"),
    (APPEND, "kv_layout", "HDN", "kv_layout must be 'NHD' or 'HND', got 'HDN'"),
    (APPEND, "batch_indices", ((3,), INT), "batch_indices.shape[0] = 3, expected 4"),
]
CASES = [
    pytest.param(op, argument, change, text, id=f"{op}-{text}") for ops, argument, change, text in BAD for op in ops
]


def make(value, device):
    if isinstance(value, list):
        return tuple(make(item, device) for item in value)
    if isinstance(value, tuple):
        return torch.zeros(value[0], device=device).to(value[1])
    return value.to(device, copy=True) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("op", GOOD)
def test_the_table_starts_from_good_calls(device, op):
    getattr(flashinfer.rope, op)(**{name: make(value, device) for name, value in GOOD[op].items()})


@pytest.mark.parametrize("op, argument, change, text", CASES)
def test_bad_argument(device, op, argument, change, text):
    arguments = {name: make(value, device) for name, value in GOOD[op].items()}
    arguments[argument] = change(arguments[argument]) if callable(change) else make(change, device)
    check_refused(getattr(flashinfer.rope, op), text, **arguments)


@pytest.mark.parametrize("op", RAGGEDS)
@pytest.mark.parametrize("dtype", [INT, torch.int64])
def test_offsets_that_fall(op, dtype):
    """Check decreasing offsets on the CPU only: on a GPU the check would have to wait."""
    arguments = {name: make(value, "cpu") for name, value in GOOD[op].items()}
    arguments["offsets"] = arguments["offsets"].to(dtype)
    arguments["indptr"] = torch.tensor([0, 4, 2], dtype=dtype)
    text = r"indptr\[1\] to indptr\[2\] = 4 to 2, expected offsets that rise"
    with pytest.raises(ArgumentError, match=f"{op.removesuffix('_inplace')}: {text}"):
        getattr(flashinfer.rope, op)(**arguments)


@pytest.mark.parametrize("op, argument", [(op, name) for op, names in GOOD.items() for name in names])
def test_other_device(device, op, argument):
    """Check a tensor on another device."""
    if torch.device(device).type == "cpu":
        pytest.skip("a CPU alone has no other device")
    arguments = {name: make(value, device) for name, value in GOOD[op].items()}
    value = arguments[argument]
    if not isinstance(value, (torch.Tensor, tuple)):
        pytest.skip(f"{argument} is no tensor")
    arguments[argument] = value.cpu() if isinstance(value, torch.Tensor) else tuple(t.cpu() for t in value)
    with pytest.raises(RuntimeError, match=f"{op}: "):
        getattr(flashinfer.rope, op)(**arguments)


@pytest.mark.parametrize("op", [*APPLY, *TABLED])
def test_nothing_is_rotated_twice(device, op):
    """Check expanded tensors: an in-place call would rotate their heads several times."""
    arguments = {name: make(value, device) for name, value in GOOD[op].items()}
    name = "key" if op in TABLED else "k"
    arguments[name] = arguments[name][:1].expand(arguments[name].shape)
    with pytest.raises(ArgumentError, match=rf"{name}.stride\(0\) must not be 0"):
        getattr(flashinfer.rope, f"{op}_inplace")(**arguments)


def test_indices_outside_of_the_cache():
    """Check indices that only a CPU can reject. Request 0 has one page: its position 16 would be a token of
    request 1.
    """
    op = "rope_quantize_fp8_append_paged_kv_cache"
    for name, value, text in [
        ("batch_indices", 2, "batch_indices[0] = 2, expected less than 2 (kv_indptr has 2 requests)"),
        ("positions", 16, "positions[0] = 16, expected 0 to 15 (request 0 has 1 pages of 16 tokens)"),
        ("positions", -1, "positions[0] = -1, expected 0 to 15 (request 0 has 1 pages of 16 tokens)"),
        ("kv_indices", 3, "kv_indices[0] = 3, expected 0 to 2 (the cache has 3 pages)"),
        ("kv_indptr", -1, "kv_indptr[0] to kv_indptr[1] = -1 to 1, expected within 0 to 2"),
        ("pos_ids", 8, "the position of token 0 is 8, expected 0 to 7"),
    ]:
        arguments = {key: make(good, "cpu") for key, good in GOOD[op].items()}
        arguments[name][0] = value
        with pytest.raises(ArgumentError, match=re.escape(text)):
            getattr(flashinfer.rope, op)(**arguments)


def test_rotary_dim_of_a_gpu_has_a_limit():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    q = torch.zeros(1, 1, 2048, device="cuda", dtype=FP16)
    with pytest.raises(RuntimeError, match="rotary_dim is 2048, expected an even number from 2 to 1024"):
        flashinfer.rope.apply_rope_pos_ids(q, q, torch.zeros(1, dtype=INT, device="cuda"))


@pytest.mark.parametrize("name, value", [("batch_indices", 2), ("positions", 16), ("positions", -1), ("kv_indices", 3)])
def test_tokens_without_a_slot_on_a_gpu(name, value):
    """Check that such tokens write nothing: no page of another request, nothing outside of the cache, no query."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    op = "rope_quantize_fp8_append_paged_kv_cache"
    arguments = {key: make(good, "cuda") for key, good in GOOD[op].items()}
    arguments["v"] += 1
    arguments["q_rope_out"] = torch.full((4, 8, 64), 2, device="cuda").to(FP8)
    arguments[name][:] = value
    flashinfer.rope.rope_quantize_fp8_append_paged_kv_cache(**arguments)
    assert all((cache.float() == 0).all() for cache in arguments["paged_kv_cache"])
    assert (arguments["q_rope_out"].float() == 2).all()
