# SPDX-License-Identifier: Apache-2.0
"""Error messages for wrong tensors, and rows without a slot: no byte outside of the cache is written."""

from __future__ import annotations

import pytest
import torch

import flashinfer.page
from flashinfer._runtime.errors import ArgumentError

from ..bad_arguments import check_refused, pattern, with_bad
from .inputs import make_batch

BF16, FP16, U8, E4M3 = torch.bfloat16, torch.float16, torch.uint8, torch.float8_e4m3fn
PAGE, HEADS, DIM = 8, 4, 64

# Op -> shape and dtype of the arguments of a good call, without index tensors. PAGES stands for the page count.
PAGES = -1
KEYS = {"append_key": ((23, HEADS, DIM), BF16), "append_value": ((23, HEADS, DIM), BF16)}
NVFP4 = {
    **KEYS,
    "paged_kv_cache": ((PAGES, 2, PAGE, HEADS, DIM // 2), U8),
    "kv_cache_sf": ((PAGES, 2, PAGE, HEADS, DIM // 16), E4M3),
    "k_scale": 0.5,
    "v_scale": 2.0,
}
TABLE, MAPPED = "nvfp4_quantize_append_paged_kv_cache", "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping"
GOOD = {
    "append_paged_kv_cache": {**KEYS, "paged_kv_cache": ((PAGES, 2, PAGE, HEADS, DIM), BF16)},
    "append_paged_mla_kv_cache": {
        "append_ckv": ((23, 512), BF16),
        "append_kpe": ((23, 64), BF16),
        "ckv_cache": ((PAGES, PAGE, 512), BF16),
        "kpe_cache": ((PAGES, PAGE, 64), BF16),
    },
    TABLE: NVFP4,
    MAPPED: NVFP4,
}
APPEND, MLA = ["append_paged_kv_cache"], ["append_paged_mla_kv_cache"]
BY_TABLE = ["append_paged_kv_cache", "append_paged_mla_kv_cache", TABLE]
KV = ["append_paged_kv_cache", TABLE, MAPPED]
QUANT = [TABLE, MAPPED]


def make(op, device):
    batch = make_batch([21, 6], [20, 3], PAGE, device)
    arguments = {}
    for name, spec in GOOD[op].items():
        if isinstance(spec, float):
            arguments[name] = spec
            continue
        shape = [batch.num_pages if size == PAGES else size for size in spec[0]]
        arguments[name] = torch.ones(shape, device=device).to(spec[1])
    if op == MAPPED:
        return arguments | {"slot_mapping": torch.arange(23, device=device)}
    names = ("batch_indices", "positions", "kv_indices", "kv_indptr", "kv_last_page_len")
    return arguments | {name: getattr(batch, name) for name in names}


def ones(*shape, dtype=BF16):
    return lambda t: torch.ones(shape, dtype=torch.float32, device=t.device).to(dtype)


# (ops, argument, a function that changes the good value, text)
BAD = [
    (KV, "append_key", ones(23, 64), "append_key must have 3 dimensions.*, got 2"),
    (KV, "append_key", lambda t: t.repeat(1, 1, 2)[..., ::2], "append_key.stride(-1) must be 1.*, got 2"),
    (KV, "append_value", ones(22, HEADS, DIM), "append_value.shape[0] must be 23.*, got 22"),
    (KV, "append_value", ones(23, 5, DIM), "append_value.shape[1] must be 4.*, got 5"),
    (KV, "append_value", ones(23, HEADS, DIM, dtype=FP16), "append_value must be bfloat16.*, got float16"),
    (APPEND, "append_value", ones(23, HEADS, 32), "paged_kv_cache must have 32 elements per head.*, got 64"),
    (APPEND, "append_key", ones(23, HEADS, 0), "append_key.shape[2] must be at least 1.*, got 0"),
    (APPEND, "paged_kv_cache", lambda t: t.half(), "paged_kv_cache must be bfloat16.*, got float16"),
    (APPEND, "paged_kv_cache", lambda t: (t[:, 0], t[:, 1].half()), "cache[1] must be bfloat16.*, got float16"),
    (KV, "paged_kv_cache", lambda t: t[0, 0], "paged_kv_cache must have 4 to 5 dimensions.*, got 3"),
    (KV, "paged_kv_cache", lambda t: t[:, :1], "paged_kv_cache.shape[1] must be 2 (keys and values).*, got 1"),
    (KV, "paged_kv_cache", lambda t: (t[:, 0],), "paged_kv_cache must have 2 tensors"),
    (KV, "paged_kv_cache", lambda t: (t, t), "paged_kv_cache[0] must have 3 to 4 dimensions.*, got 5"),
    (KV, "paged_kv_cache", lambda t: t[:, :, :, :3], "must have 4 heads.*, got 3"),
    (KV, "paged_kv_cache", lambda t: t[..., :16], "elements per head.*, got 16"),
    (KV, "paged_kv_cache", lambda t: (t[:, 0], t[1:, 1]), "pages.*, got"),
    (KV, "paged_kv_cache", lambda t: (t[:, 0], t[:, 1, :4]), "must have 8 tokens per page.*, got 4"),
    (KV, "paged_kv_cache", lambda t: t[:, :, :0], "must have 1 tokens per page (or more), got 0"),
    (APPEND, "paged_kv_cache", lambda t: t.repeat(1, 1, 1, 1, 2)[..., ::2], "kv_cache.stride(-1) must be 1.*, got 2"),
    (KV, "paged_kv_cache", lambda t: t[:1].expand(t.shape), "paged_kv_cache.stride(0) must not be 0"),
    (MLA, "ckv_cache", lambda t: t[:1].expand(t.shape), "ckv_cache.stride(0) must not be 0"),
    (BY_TABLE, "batch_indices", lambda t: t[1:], "batch_indices.shape[0] must be 23.*, got 22"),
    (BY_TABLE, "positions", lambda t: t[1:], "positions.shape[0] must be 23.*, got 22"),
    (BY_TABLE, "positions", lambda t: t.float(), "positions must have an integer dtype.*, got torch.float32"),
    (BY_TABLE, "kv_indptr", lambda t: t.bool(), "kv_indptr must have an integer dtype.*, got torch.bool"),
    (BY_TABLE, "positions", lambda t: t.repeat(2)[::2], "positions must be contiguous"),
    (BY_TABLE, "kv_indptr", lambda t: t[:0], "kv_indptr must have batch_size + 1 entries, got 0"),
    (BY_TABLE, "kv_indices", lambda t: t.view(1, -1), "kv_indices must have 1 dimension.*, got 2"),
    (MLA, "append_kpe", ones(22, 64), "append_kpe.shape[0] must be 23.*, got 22"),
    (MLA, "append_kpe", ones(23, 0), "append_kpe.shape[1] must be at least 1.*, got 0"),
    (MLA, "append_kpe", ones(23, 64, dtype=FP16), "append_kpe must be bfloat16.*, got float16"),
    (MLA, "ckv_cache", lambda t: t[..., :500], "ckv_cache.shape[2] must be 512.*, got 500"),
    (MLA, "ckv_cache", lambda t: t[0], "ckv_cache must have 3 dimensions.*, got 2"),
    (MLA, "ckv_cache", lambda t: t.half(), "ckv_cache must be bfloat16.*, got float16"),
    (MLA, "kpe_cache", lambda t: t[1:], "kpe_cache.shape[0] must be 6.*, got 5"),
    (MLA, "kpe_cache", lambda t: t[:, 1:], "kpe_cache.shape[1] must be 8.*, got 7"),
    (QUANT, "append_key", ones(23, HEADS, DIM, dtype=torch.float32), "append_key must be float16 or bfloat16"),
    (QUANT, "append_value", ones(23, HEADS, 32), "append_value.shape[2] must be 64.*, got 32"),
    (QUANT, "paged_kv_cache", lambda t: t.to(torch.int8), "paged_kv_cache must be uint8"),
    (QUANT, "kv_cache_sf", lambda t: t.view(U8), "kv_cache_sf must be float8_e4m3fn.*, got uint8"),
    (QUANT, "kv_cache_sf", lambda t: t[..., :2], "kv_cache_sf (keys) must have 4 elements per head.*, got 2"),
    (QUANT, "kv_cache_sf", lambda t: t.repeat(1, 1, 1, 1, 2)[..., ::2], "innermost stride must be 1"),
    (QUANT, "k_scale", lambda s: 0.0, "k_scale must be a positive finite global decode scale.*, got 0.0"),
    (QUANT, "v_scale", lambda s: float("inf"), "v_scale must be a positive finite global decode scale.*, got inf"),
    (QUANT, "k_scale", lambda s: 1e39, "k_scale must be a positive finite global decode scale.*, got 1e+39"),
    (QUANT, "v_scale", lambda s: float("nan"), "v_scale must be a positive finite global decode scale.*, got nan"),
    ([MAPPED], "slot_mapping", lambda t: t.repeat(2), "append_key.shape[0] must be at least 46.*, got 23"),
    ([MAPPED], "slot_mapping", lambda t: t.float(), "slot_mapping must be int32 or int64.*, got float32"),
    ([MAPPED], "k_scale", lambda s: torch.ones(2), "k_scale must have one element.*, got (2,) torch.float32"),
    ([MAPPED], "k_scale", lambda s: torch.ones(1).half(), "k_scale must have one element.*, got (1,) torch.float16"),
    ([MAPPED], "v_scale", lambda s: torch.tensor(-1.0), "must be a positive finite global decode scale"),
]  # fmt: skip
CASES = [
    pytest.param(op, name, change, text, id=f"{op}-{name}-{text[:30]}") for ops, name, change, text in BAD for op in ops
]


@pytest.mark.parametrize("op", GOOD)
def test_the_table_starts_from_good_calls(device, op):
    getattr(flashinfer.page, op)(**make(op, device))


@pytest.mark.parametrize("op, argument, change, text", CASES)
def test_bad_argument(device, op, argument, change, text):
    check_refused(getattr(flashinfer.page, op), text, **with_bad(make(op, device), argument, change, device))


@pytest.mark.parametrize("op", KV)
def test_words_and_types(device, op):
    arguments = make(op, device)
    with pytest.raises(KeyError, match="kv_layout must be 'NHD' or 'HND', got 'DHN'"):
        getattr(flashinfer.page, op)(**arguments, kv_layout="DHN")
    arguments["paged_kv_cache"] = list(arguments["paged_kv_cache"].unbind(1))
    with pytest.raises(KeyError, match="paged_kv_cache must be a tensor or a tuple of two, got a list"):
        getattr(flashinfer.page, op)(**arguments)


def test_nvfp4_needs_blocks_of_sixteen(device):
    for op in QUANT:
        arguments = make(op, device) | {n: ones(23, HEADS, 24)(torch.ones(1, device=device)) for n in KEYS}
        with pytest.raises(ValueError, match=r"append_key.shape\[2\] must be a multiple of 16.*, got 24"):
            getattr(flashinfer.page, op)(**arguments)


def test_bad_buffers(device):
    indptr, lengths = torch.tensor([0, 3, 5], device=device), torch.tensor([3, 8], device=device)
    good = torch.empty(6, dtype=torch.int32, device=device)
    for batch_indices, positions, text in (
        (good[1:], good, "batch_indices: shape must be (6,).*, got (5,)"),
        (good.long(), good, "batch_indices: dtype must be torch.int32.*, got torch.int64"),
        (good, good[1:], "positions: shape must be (6,).*, got (5,)"),
        (good, good.float(), "positions: dtype must be torch.int32.*, got torch.float32"),
    ):
        with pytest.raises(ValueError, match=pattern(f"get_batch_indices_positions: {text}")):
            flashinfer.page.get_batch_indices_positions(indptr, lengths, 6, batch_indices, positions)
    with pytest.raises(ArgumentError, match=r"append_indptr.shape\[0\] must be 2.*, got 3"):
        flashinfer.page.get_batch_indices_positions(indptr, lengths[1:], 6)


def test_bad_lengths(device):
    indptr, lengths = torch.tensor([0, 3, 5], device=device), torch.tensor([3, 8], device=device)
    for bad_indptr, bad_lengths, nnz, text in (
        (indptr.float(), lengths, 6, "append_indptr must have an integer dtype.*, got torch.float32"),
        (indptr, lengths.bool(), 6, "seq_lens must have an integer dtype.*, got torch.bool"),
        (indptr, lengths, -1, "nnz must be 0 or more"),
        (indptr, lengths, 2**31, "nnz must be 0 or more and less than 2**31, got 2147483648"),
    ):
        with pytest.raises(ArgumentError, match=pattern(f"get_batch_indices_positions: {text}")):
            flashinfer.page.get_batch_indices_positions(bad_indptr, bad_lengths, nnz)
    for last_page_len in (lengths[:1], lengths[0], indptr):  # the first two would be broadcast
        with pytest.raises(ArgumentError, match="get_seq_lens: kv_indptr and kv_last_page_len must have shapes"):
            flashinfer.page.get_seq_lens(indptr, last_page_len, 16)
    for bad_indptr, bad_lengths, text in (
        (indptr.bool(), lengths, "kv_indptr must have an integer dtype.*, got torch.bool"),
        (indptr, lengths.float(), "kv_last_page_len must have an integer dtype.*, got torch.float32"),
    ):
        with pytest.raises(ArgumentError, match=pattern(f"get_seq_lens: {text}")):
            flashinfer.page.get_seq_lens(bad_indptr, bad_lengths, 16)


def test_offsets_that_fall():
    """Check decreasing offsets on the CPU only: on a GPU the check would have to wait."""
    indptr, lengths = torch.tensor([0, 4, 2], dtype=torch.int32), torch.tensor([3, 8], dtype=torch.int32)
    text = r"indptr\[1\] to \w*indptr\[2\] must not decrease, got 4 to 2"
    with pytest.raises(ArgumentError, match=f"get_batch_indices_positions: append_{text}"):
        flashinfer.get_batch_indices_positions(indptr, lengths, 6)
    for offsets in (indptr, indptr.long(), indptr.to(torch.uint8)):
        with pytest.raises(ArgumentError, match=r"kv_indptr must be non-decreasing, got kv_indptr\[1\] = 4 and .* = 2"):
            flashinfer.get_seq_lens(offsets, lengths, 16)


# Rows without a slot --------------------------------------------------------------------------------------------------


def put(index, value):
    def change(tensor):
        tensor[index] = value
        return tensor

    return change


# Requests of 21 and 6 tokens: 3 pages and 1; rows 0 to 19 belong to the first.
NO_SLOT = [
    ("batch_indices", put(20, 2), "batch_indices[20] must be less than 2 (kv_indptr has 2 requests).*, got 2"),
    ("positions", put(5, -1), "positions[5] must be 0 to 23 (request 0 has 3 pages of 8 tokens).*, got -1"),
    ("positions", put(5, 24), "positions[5] must be 0 to 23 (request 0 has 3 pages of 8 tokens).*, got 24"),
    ("positions", put(21, 8), "positions[21] must be 0 to 7 (request 1 has 1 pages of 8 tokens).*, got 8"),
    ("positions", put(21, 2**31 - 1), "positions[21] must be 0 to 7.*, got 2147483647"),
    ("kv_indices", put(1, 6), "kv_indices[1] must be 0 to 5 (the cache has 6 pages).*, got 6"),
    ("kv_indices", put(3, -7), "kv_indices[3] must be 0 to 5 (the cache has 6 pages).*, got -7"),
    (
        "kv_indptr",
        put(1, 9),
        "kv_indptr[0] to kv_indptr[1] must be within 0 to 4 (the length of kv_indices).*, got 0 to 9",
    ),
    ("kv_indptr", put(0, -3), "kv_indptr[0] to kv_indptr[1] must be within 0 to 4.*, got -3 to 3"),
]
ROWS = pytest.mark.parametrize("argument, change, text", NO_SLOT, ids=[text for _, _, text in NO_SLOT])


@ROWS
@pytest.mark.parametrize("op", BY_TABLE)
def test_validation_names_the_row_and_writes_nothing(device, op, argument, change, text, monkeypatch):
    monkeypatch.setattr(flashinfer.page.modules, "VALIDATE", True)  # the CPU always validates
    arguments = make(op, device)
    getattr(flashinfer.page, op)(**arguments)
    caches = {name: t.clone() for name, t in arguments.items() if "cache" in name}
    change(arguments[argument])
    for name in arguments:
        if name.startswith("append"):
            arguments[name] = arguments[name] * 2
    with pytest.raises(ArgumentError, match=pattern(f"{op}: {text}")):
        getattr(flashinfer.page, op)(**arguments)
    assert all(torch.equal(arguments[name].view(U8), before.view(U8)) for name, before in caches.items())


@ROWS
@pytest.mark.parametrize("op", BY_TABLE)
def test_unchecked_rows_without_a_slot_are_skipped(device, op, argument, change, text):
    """Check CUDA without validation: the other rows arrive, and nothing around the cache changes."""
    if device == "cpu":
        pytest.skip("the CPU always checks")
    arguments = make(op, device)
    guarded = {}
    for name, tensor in arguments.items():
        if "cache" in name:
            guard = torch.full((tensor.shape[0] + 2, *tensor.shape[1:]), 7, dtype=torch.float32, device=device).to(
                tensor.dtype
            )
            guarded[name], arguments[name] = guard, guard[1:-1]
    change(arguments[argument])
    getattr(flashinfer.page, op)(**arguments)
    torch.cuda.synchronize()
    for guard in guarded.values():
        assert (guard[0].float() == 7).all() and (guard[-1].float() == 7).all()
        assert (guard.float() != 7).any()


def test_knob(monkeypatch):
    from flashinfer._runtime.knobs import knobs

    assert not knobs.validate_inputs
    with knobs.override(validate_inputs="1"):
        assert knobs.validate_inputs
