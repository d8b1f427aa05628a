# SPDX-License-Identifier: Apache-2.0
"""Index scores: values against float64, layouts, schedules, edges, refused arguments."""

from __future__ import annotations

import pytest
import torch

from flashinfer.attn_scores import (
    compute_paged_mqa_logits_schedule,
    fp4_paged_mqa_logits,
    fp8_paged_mqa_logits,
    precompile_paged_mqa_logits,
)
from flashinfer.indexer import scores
from flashinfer.trace.templates.indexer import fp8_paged_mqa_logits_trace

from ..bad_arguments import check_refused
from ..graphs import capture
from .paged import check, limits, make

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

LENGTHS = [300, 0, 1, 64, 257, 0, 65]


@pytest.mark.parametrize(
    "heads, dim, next_n, block_size",
    [
        (64, 128, 1, 64),  # DeepSeek-V3.2
        (64, 128, 2, 32),  # with a draft token
        (8, 256, 2, 32),  # Step
        (4, 128, 2, 128),  # two slots in the columns of one product
        (12, 128, 2, 64),  # a slot that ends within eight columns
        (64, 128, 4, 64),  # more columns than one product has
        (8, 32, 1, 128),
        (16, 96, 3, 32),
        (32, 64, 1, 64),
    ],
)
def test_scores(device, heads, dim, next_n, block_size):
    lengths = [x if x == 0 else max(x, next_n) for x in LENGTHS]
    made = make(device, lengths, num_heads=heads, head_dim=dim, next_n=next_n, block_size=block_size)
    actual = fp8_paged_mqa_logits(**made)
    check(made, actual)
    assert actual.stride(0) % 256 == 0 and actual.dtype is torch.float32
    half = fp8_paged_mqa_logits(**made, output_dtype=torch.float16, epi_dtype=torch.float16, acc_dtype=torch.float16)
    assert half.dtype is torch.float16
    check(made, half, is_half=True)


def test_schedule(device):
    """With and without the schedule the scores are the same bits; one of other lengths writes nothing outside."""
    made = make(device, [3000, 5, 0, 700])
    meta = compute_paged_mqa_logits_schedule(made["seq_lens"])
    out = torch.full((6, 4096), torch.inf, device=device)
    scored = fp8_paged_mqa_logits(**made, schedule_meta=meta, out=out)
    assert scored.data_ptr() == out.data_ptr() and scored.shape == (4, 3000)
    seen = torch.arange(3000, device=device)[None, :] < limits(made)[:, None]
    assert torch.equal(scored[seen], fp8_paged_mqa_logits(**made)[seen])
    check(made, scored)
    assert bool(out[4:].isinf().all() and out[:, 3072:].isinf().all() and out[2].isinf().all())
    for stale in ([9, 0, 100000, 4000], [0, 0, 0, 0], [100000] * 4):
        other = compute_paged_mqa_logits_schedule(torch.tensor(stale, dtype=torch.int32, device=device))
        out.fill_(torch.inf)
        fp8_paged_mqa_logits(**made, schedule_meta=other, out=out)
        assert bool(out[4:].isinf().all() and out[:, 3072:].isinf().all() and out[2].isinf().all())


def test_layouts(device):
    """Heads and weights of wider tensors, pages apart, strided lengths and tables, rows of results apart."""
    made = make(device, [130, 64, 7], num_heads=8, next_n=2, block_size=32)
    q, kv, lens = made["q"], made["kv_fused"], made["seq_lens"]
    wide = torch.zeros(3, 2, 24, 128, dtype=torch.uint8, device=device).view(q.dtype)
    wide[:, :, 8:16] = q
    pages = torch.full((len(kv), kv[0].numel() + 48), 255, dtype=torch.uint8, device=device)
    pages[:, : kv[0].numel()] = kv.reshape(len(kv), -1)
    weights = torch.full((6, 20), torch.nan, device=device)
    weights[:, 4:12] = made["weights"]
    tables = torch.full((3, 9), 1 << 30, dtype=torch.int32, device=device)
    tables[:, : made["block_tables"].shape[1]] = made["block_tables"]
    strided = {
        "q": wide[:, :, 8:16],
        "kv_fused": pages.as_strided(kv.shape, (pages.stride(0), *kv.stride()[1:])),
        "weights": weights[:, 4:12],
        "block_tables": tables[:, : made["block_tables"].shape[1]],
        "seq_lens": torch.stack((lens, lens), 1)[:, 1],
    }
    out = torch.empty(8, 600, device=device)[:, :512]
    actual = fp8_paged_mqa_logits(**{**made, **strided}, out=out)
    check(made, actual)
    odd = torch.zeros(q.numel() + 1, dtype=torch.uint8, device=device).view(q.dtype)[1:].view(q.shape)
    odd.copy_(q)
    assert torch.equal(fp8_paged_mqa_logits(**{**made, "q": odd})[0, :100], actual[0, :100])


def test_nan_stays_nan(device):
    made = make(device, [64], num_heads=8, block_size=64)
    made["kv_fused"].view(1, -1)[0, 5 * 128] = 0x7F
    actual = fp8_paged_mqa_logits(**made)
    assert bool(actual[0, 5].isnan()) and int(actual.isnan().sum()) == 1


def test_empty(device):
    made = make(device, [], num_heads=8)
    assert fp8_paged_mqa_logits(**made).shape == (0, 0)
    made = make(device, [0, 0], num_heads=8)
    assert fp8_paged_mqa_logits(**made).shape == (2, 0)


def test_capabilities():
    answers = fp8_paged_mqa_logits.is_compute_capability_supported
    assert answers(90) and answers(80) and not answers(75)
    with pytest.raises(ValueError, match="SM100"):
        fp4_paged_mqa_logits(*[None] * 7)
    precompile_paged_mqa_logits("cpu", variants=("fp4",))


def test_compiled(device):
    """torch.compile makes one graph of the call."""
    made = make(device, [130, 7], num_heads=8)
    run = torch.compile(lambda **x: fp8_paged_mqa_logits(**x) * 2, backend="eager", fullgraph=True)
    check({**made, "weights": made["weights"] * 2}, run(**made))


def wide(x: torch.Tensor) -> torch.Tensor:
    return torch.stack((x, x), -1)[..., 0]


BAD = [
    ("q", lambda x: x[0], "q must be 4-D"),
    ("q", lambda x: x.float(), "requires q.dtype == float8_e4m3fn"),
    ("q", wide, "innermost stride must be 1"),
    ("q", lambda x: x[..., :48], "head_dim must be a multiple of 32"),
    ("q", lambda x: x[:, :, :6], "num_heads must be a multiple of 4"),
    ("q", lambda x: x[:, :, :4], "next_n * num_heads must be a multiple of 8"),
    ("kv_fused", lambda x: x.int(), "kv_fused must be uint8"),
    ("kv_fused", lambda x: x[:, :48], "block_size (kv_fused.shape[1]) must divide"),
    ("kv_fused", lambda x: x[..., :130], "head_dim+4=132"),
    ("kv_fused", wide, "pages must be contiguous"),
    ("kv_fused", lambda x: x.to("meta"), "kv_fused is on meta but q is on"),
    ("weights", lambda x: x.double(), "weights must be float32"),
    ("weights", lambda x: x[1:], "weights must have shape [2, 8], got [1, 8]"),
    ("block_tables", lambda x: x.long(), "block_tables must be int32"),
    ("block_tables", wide, "innermost stride must be 1"),
    ("seq_lens", lambda x: x.long(), "seq_lens must be an int32 CUDA tensor"),
    ("seq_lens", lambda x: x[1:], "seq_lens must have shape [2], got [1]"),
    ("max_seq_len", -1, "max_seq_len must be 0 or more, got -1"),
    ("max_seq_len", 1 << 30, "rows * row stride of the result must be below 2**31"),
    ("output_dtype", torch.bfloat16, "output_dtype, epi_dtype and acc_dtype must be float32 or float16"),
    ("out", lambda x: torch.empty(2, 255), "out must be at least [2, 256], got [2, 255]"),
    ("out", lambda x: torch.empty(2, 256).half(), "out must be torch.float32"),
    ("out", lambda x: torch.empty(1, 256).expand(2, 256), "out's rows overlap"),
    ("out", lambda x: torch.empty(2, 512)[:, ::2], "out's innermost stride must be 1"),
    ("schedule_meta", lambda x: torch.zeros(1, 2).int(), "schedule_meta must have shape"),
    ("schedule_meta", lambda x: torch.zeros(133, 3).int(), "schedule_meta must have shape"),
    ("schedule_meta", lambda x: torch.zeros(133, 2), "schedule_meta must be contiguous int32"),
]


@pytest.mark.parametrize("name, bad, text", BAD, ids=[f"{name}-{i}" for i, (name, _, _) in enumerate(BAD)])
def test_refused(name, bad, text):
    made = make("cpu", [130, 7], num_heads=8)
    check_refused(fp8_paged_mqa_logits, text, **{**made, name: bad(made.get(name)) if callable(bad) else bad})


def test_values_are_checked_on_the_cpu():
    made = make("cpu", [130, 7], num_heads=8)
    function = fp8_paged_mqa_logits
    check_refused(function, "seq_lens[0] must be at most 129 (max_seq_len", **{**made, "max_seq_len": 129})
    tables = made["block_tables"].clone()
    tables[0, 2] = -1
    check_refused(function, "block_tables[0, 2] must be 0 to 5, got -1", **{**made, "block_tables": tables})
    check_refused(function, "seq_lens[0] must be at most 64", **{**made, "block_tables": tables[:, :1]})


def test_values_are_checked_when_asked(device, monkeypatch):
    monkeypatch.setattr(scores, "VALIDATE", True)
    made = make(device, [130, 7], num_heads=8)
    meta = compute_paged_mqa_logits_schedule(made["seq_lens"])
    check(made, fp8_paged_mqa_logits(**made, schedule_meta=meta))
    refused = {
        "max_seq_len must be at least max(seq_lens) = 130, got 129": {"max_seq_len": 129},
        "block_tables must have 3 columns": {"block_tables": made["block_tables"][:, :2]},
        "block_tables[1, 0] must be 0 to 5, got 6": {"block_tables": torch.full_like(made["block_tables"], 6)},
        "schedule_meta must be the schedule of seq_lens": {"schedule_meta": meta + 1},
    }
    refused["block_tables[0, 0] must be 0 to 5, got 6"] = refused.pop("block_tables[1, 0] must be 0 to 5, got 6")
    for text, change in refused.items():
        check_refused(fp8_paged_mqa_logits, text, **{**made, **change})


@needs_cuda
def test_graph():
    """A replay follows the lengths, with a schedule that is computed inside."""
    device = "cuda"
    made = make(device, [1000, 300])
    graph, actual = capture(lambda: fp8_paged_mqa_logits(**made))
    made["seq_lens"].copy_(torch.tensor([70, 200]))
    graph.replay()
    check(made, actual)


@needs_cuda
def test_out_of_range_pages_are_zeros():
    device = "cuda"
    made = make(device, [130, 7], num_heads=8)
    made["block_tables"][0, 1] = -5
    made["block_tables"][1, 0] = 1 << 30
    actual = fp8_paged_mqa_logits(**made)
    assert not actual[0, 64:128].any() and not actual[1, :7].any()
    assert actual[0, :64].any()


@needs_cuda
def test_drawn():
    """Random lengths, many of them 0, against float64, and twice the same bits."""
    device = "cuda"
    torch.manual_seed(0)
    for batch in (1, 3, 40, 300):
        lengths = (torch.randint(0, 3000, (batch,)) * torch.randint(0, 3, (batch,)).clamp_max(1)).tolist()
        made = make(device, [max(x, 2) if x else 0 for x in lengths], num_heads=64, next_n=2, block_size=64)
        actual = fp8_paged_mqa_logits(**made)
        check(made, actual)
        seen = torch.arange(actual.shape[1], device=device)[None, :] < limits(made)[:, None]
        assert torch.equal(actual[seen], fp8_paged_mqa_logits(**made)[seen])


def test_reference_is_the_formula():
    """The reference agrees with three loops for a small call."""
    made = make("cpu", [3], num_heads=8, head_dim=32, block_size=32)
    flat = made["kv_fused"].reshape(-1)
    keys = flat[: 32 * 32].view(torch.float8_e4m3fn).view(32, 32).double()
    scale = flat[32 * 32 :].view(torch.float32).double()
    for pos in range(3):
        want = sum(
            float(made["weights"][0, h]) * max(float(made["q"][0, 0, h].double() @ keys[pos]), 0.0) for h in range(8)
        )
        got = fp8_paged_mqa_logits_trace.reference(**{**made, "output_dtype": torch.float64})[0, pos]
        assert abs(float(got) - want * float(scale[pos])) < 1e-9


def test_checks_may_be_left_out(device):
    """``skip_check`` leaves the checks of Python out; the launcher still keeps a kernel within its tensors."""
    made = make(device, [130, 7], num_heads=8)
    check(made, fp8_paged_mqa_logits(**made, skip_check=True))
    with pytest.raises(ValueError, match="weights"):
        fp8_paged_mqa_logits(**{**made, "weights": made["weights"][1:]}, skip_check=True)
