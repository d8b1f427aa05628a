# SPDX-License-Identifier: Apache-2.0
"""Error messages for wrong arguments: they name the op, the argument, the actual and the expected value."""

from __future__ import annotations

import pytest
import torch

import flashinfer.rope
from flashinfer._runtime.errors import ArgumentError

from ..bad_arguments import check_refused, pattern

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
    (APPLY, "q", ((4, 512), FP16), "q must have 3 dimensions.*, got 2"),
    (APPLY, "q", ((4, 8, 64), torch.int32), "q must be float16.*, got int32"),
    (APPLY, "q", ((4, 8, 63), FP16), "k.shape[2] must be 63.*, got 64"),
    (APPLY, "q", lambda t: t.repeat(1, 1, 2)[..., ::2], "q.stride(-1) must be 1.*, got 2"),
    (APPLY, "k", ((5, 2, 64), FP16), "k.shape[0] must be 4 (the number of tokens).*, got 5"),
    (APPLY, "k", ((4, 2, 64), torch.bfloat16), "k must be float16 (the dtype of q).*, got bfloat16"),
    (APPLY, "rotary_dim", 0, "rotary_dim must be an even number from 2 to 64.*, got 0"),
    (APPLY, "rotary_dim", -1, "rotary_dim must be an even number from 2 to 64.*, got -1"),
    (APPLY, "rotary_dim", 33, "rotary_dim must be an even number.*, got 33"),
    (APPLY, "rotary_dim", 66, "rotary_dim must be an even number from 2 to 64.*, got 66"),
    (APPLY, "rope_theta", 0.0, "rope_theta must be positive and rope_scale not 0, got 0 and "),
    (APPLY, "rope_theta", -1.0, "rope_theta must be positive and rope_scale not 0, got -1 and "),
    (APPLY, "rope_scale", 0.0, "rope_theta must be positive and rope_scale not 0.* and 0"),
    (LLAMA31, "high_freq_factor", 1.0, "low_freq_factor and high_freq_factor must differ, got equal numbers"),
    (POSITIONED, "pos_ids", ((5,), INT), "pos_ids.shape[0] must be 4.*, got 5"),
    (POSITIONED, "pos_ids", ((4,), FP32), "pos_ids must be int32 or int64.*, got float32"),
    (POSITIONED, "pos_ids", ((2, 2), INT), "pos_ids must have 1 dimension.*, got 2"),
    (RAGGEDS, "indptr", ((4,), INT), "indptr.shape[0] must be 3 (offsets.shape[0] + 1).*, got 4"),
    (RAGGEDS, "indptr", ((3,), torch.int64), "indptr must be int32 (the dtype of offsets).*, got int64"),
    (RAGGEDS, "offsets", ((2,), FP16), "offsets must be int32 or int64.*, got float16"),
    (TABLED, "query", ((4, 500), FP16), "query.shape[-1] must be a multiple of 64 (head_size).*, got 500"),
    (TABLED, "key", ((5, 128), FP16), "key.shape[0] must be 4.*, got 5"),
    (
        TABLED,
        "cos_sin_cache",
        ((8, 128), FP32),
        "cos_sin_cache.shape[1] must be an even number from 2 to 64.*, got 128",
    ),
    (TABLED, "cos_sin_cache", ((0, 32), FP32), "cos_sin_cache must have one row for each position"),
    (TABLED, "positions", ((), INT), "positions must have 1 dimension.*, got 0"),
    (
        TABLED,
        "query",
        ((4, 8, 60), FP16),
        "query and key must be viewable as.*, got shape (4, 8, 60) and strides (480, 60, 1)",
    ),
    (TABLED, "head_size", 0, "head_size must be at least 1.*, got 0"),
    (TABLED, "positions", ((3,), INT), "positions.shape[0] must be 4.*, got 3"),
    (TABLED + FUSED, "cos_sin_cache", ((8, 32), FP16), "cos_sin_cache should be float32"),
    (FUSED, "cos_sin_cache", ((8, 32), FP32), "cos_sin_cache.shape[1] must be 64 (q_rope.shape[2]).*, got 32"),
    (FUSED, "k_rope", ((4, 2, 32), FP16), "k_rope.shape[-1] must be 64.*, got 32"),
    (FUSED, "q_nope", ((4, 7, 32), FP16), "q_nope.shape[1] must be 8.*, got 7"),
    (FUSED, "quantize_dtype", FP16, "must have dtype torch.float16"),
    (QUANT, "q_rope_out", ((4, 8, 32), FP8), "q_rope_out must have shape (4, 8, 64).*, got (4, 8, 32)"),
    (
        QUANT,
        "k_nope_out",
        ((4, 32), torch.float8_e5m2),
        "k_nope_out must have dtype torch.float8_e4m3fn",
    ),
    (QUANT, "q_rope_out", lambda t: t[:1].expand(4, 8, 64), "q_rope_out.stride(0) must not be 0"),
    (FUSED, "q_nope_out", ((4, 8, 16), FP8), "q_nope_out must have shape (4, 8, 32).*, got (4, 8, 16)"),
    (QUANT, "k_nope", None, "k_nope_out.shape[-1] must be 0 (k_nope is None).*, got 32"),
    (APPEND, "v", None, "v must be a tensor"),
    (APPEND, "k_rope", ((4, 64), FP16), "v must be None"),
    (APPEND, "paged_kv_cache", lambda pair: pair[:1], "paged_kv_cache must be a tuple of 2"),
    (APPEND, "paged_kv_cache", lambda pair: (pair[0][0], pair[1]), "k_cache must have 4 dimensions"),
    (APPEND, "paged_kv_cache", lambda pair: (pair[0], pair[1].half()), "v_cache must have dtype"),
    (
        APPEND,
        "paged_kv_cache",
        lambda pair: (pair[0], pair[1][..., :64]),
        "v_cache.shape[-1] must be 96 (the width of v).*, got 64",
    ),
    (
        APPEND,
        "paged_kv_cache",
        lambda pair: (pair[0], pair[1][:2]),
        "v_cache.shape[0] must be 3 (the pages of the first cache).*, got 2",
    ),
    (
        APPEND,
        "paged_kv_cache",
        lambda pair: (pair[0], pair[1][:1].expand(3, 16, 2, 96)),
        "v_cache.stride(0) must not be 0",
    ),
    (APPEND, "paged_kv_cache", lambda pair: None, "paged_kv_cache must be a tuple of 2 tensors, got a NoneType"),
    (APPEND, "positions", ((4,), FP32), "positions must have an integer dtype.*, got torch.float32"),
    (APPEND, "page_size", 8, "k_cache.shape[1] must be 8 (page_size).*, got 16"),
    (APPEND, "kv_layout", "HDN", "kv_layout must be 'NHD' or 'HND', got 'HDN'"),
    (APPEND, "batch_indices", ((3,), INT), "batch_indices.shape[0] must be 4.*, got 3"),
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
    text = r"indptr\[1\] to indptr\[2\] must not decrease, got 4 to 2"
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
        ("batch_indices", 2, "batch_indices[0] must be less than 2 (kv_indptr has 2 requests).*, got 2"),
        ("positions", 16, "positions[0] must be 0 to 15 (request 0 has 1 pages of 16 tokens).*, got 16"),
        ("positions", -1, "positions[0] must be 0 to 15 (request 0 has 1 pages of 16 tokens).*, got -1"),
        ("kv_indices", 3, "kv_indices[0] must be 0 to 2 (the cache has 3 pages).*, got 3"),
        ("kv_indptr", -1, "kv_indptr[0] to kv_indptr[1] must be within 0 to 2.*, got -1 to 1"),
        ("pos_ids", 8, "the position of token 0 must be 0 to 7.*, got 8"),
    ]:
        arguments = {key: make(good, "cpu") for key, good in GOOD[op].items()}
        arguments[name][0] = value
        with pytest.raises(ArgumentError, match=pattern(text)):
            getattr(flashinfer.rope, op)(**arguments)


def test_rotary_dim_of_a_gpu_has_a_limit():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    q = torch.zeros(1, 1, 2048, device="cuda", dtype=FP16)
    with pytest.raises(RuntimeError, match=r"rotary_dim must be an even number from 2 to 1024.*, got 2048"):
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
