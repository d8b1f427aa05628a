# SPDX-License-Identifier: Apache-2.0
"""Index scores of prefill over ragged keys: values against float64 and over pages, layouts, edges, bad arguments."""

from __future__ import annotations

import pytest
import torch

from flashinfer.indexer import fp8_paged_mqa_logits, fp8_ragged_mqa_logits

from ..bad_arguments import check_refused
from .ragged import check, make, seen_of

E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize("heads, dim", [(64, 128), (8, 256), (4, 32), (12, 96), (20, 64), (32, 160), (8, 224)])
def test_scores(device, heads, dim):
    """Requests of several tokens, a causal mask, tokens without keys; token counts that fill no group of eight."""
    starts = [0] * 9 + [61] * 8 + [5, 40]
    ends = [*range(53, 62), *range(143, 151), 5, 30]
    made = make(device, starts, ends, heads=heads, dim=dim)
    actual = fp8_ragged_mqa_logits(**made)
    assert actual.dtype is torch.float32 and actual.is_contiguous()
    check(made, actual)
    half = fp8_ragged_mqa_logits(**made, output_dtype=torch.float16)
    assert half.dtype is torch.float16
    check(made, half, is_half=True)


def test_only_ranges_are_written(device):
    made = make(device, [3, 0, 100], [70, 0, 150])
    out = torch.full((3, 200), torch.inf, device=device)[:, :150]
    actual = fp8_ragged_mqa_logits(**made, out=out)
    assert actual.data_ptr() == out.data_ptr() and torch.equal(out == torch.inf, ~seen_of(made))
    check(made, actual)


def test_pages_give_the_same_bits():
    """The order of sums is that of the scores over pages, in one kernel of the CPU and in the other."""
    made = make("cpu", [0, 64], [64, 128], keys=128, heads=64)
    values, scales = made["k"].view(torch.uint8).view(2, -1), made["k_scales"].view(torch.uint8).view(2, -1)
    paged = fp8_paged_mqa_logits(
        made["q"][:, None], torch.cat((values, scales), 1).view(2, 64, 1, 132), made["weights"],
        torch.tensor([[0], [1]], dtype=torch.int32), torch.tensor([64, 64], dtype=torch.int32), 64,
    )  # fmt: skip
    ragged = fp8_ragged_mqa_logits(**made)
    assert torch.equal(torch.stack((ragged[0, :64], ragged[1, 64:])), paged)


def test_layouts(device):
    """Heads, weights and scales of wider tensors, keys apart, numbers at odd addresses."""
    made = make(device, [0, 3, 7], [150, 150, 90])
    expected = fp8_ragged_mqa_logits(**made)
    q = torch.zeros(3, 10, 131, dtype=torch.uint8, device=device).view(E4M3)[:, 1:9, 3:]
    k = torch.zeros(150, 2, 133, dtype=torch.uint8, device=device).view(E4M3)[:, 1, 5:]
    weights = torch.zeros(3, 16, device=device)[:, ::2]
    scales = torch.zeros(150, 4, device=device)[:, 2]
    for to, name in ((q, "q"), (k, "k"), (weights, "weights"), (scales, "k_scales")):
        to.copy_(made[name])
    actual = fp8_ragged_mqa_logits(**{**made, "q": q, "k": k, "weights": weights, "k_scales": scales})
    assert torch.equal(actual[seen_of(made)], expected[seen_of(made)])


@pytest.mark.parametrize("tokens, keys", [(0, 10), (2, 0)])
def test_empty(device, tokens, keys):
    made = make(device, [0] * tokens, [0] * tokens, keys=keys)
    assert fp8_ragged_mqa_logits(**made).shape == (tokens, keys)


def test_compiled(device):
    made = make(device, [0, 3], [150, 90])
    run = torch.compile(lambda **x: fp8_ragged_mqa_logits(**x) * 2, backend="eager", fullgraph=True)
    seen = seen_of(made)
    assert torch.equal(run(**made)[seen], fp8_ragged_mqa_logits(**made)[seen] * 2)


BAD = [
    ("q", lambda x: x[0], "q must be 3-D"),
    ("q", lambda x: x.float(), "q must be float8_e4m3fn, got float32"),
    ("q", lambda x: x[..., :48], "head_dim must be a multiple of 32 up to 256, got 48"),
    ("q", lambda x: x[:, :6], "num_heads must be a multiple of 4, got 6"),
    ("k", lambda x: x[None], "k must be 2-D"),
    ("k", lambda x: x[:, :64], "k.shape[1] must be 128 (q.shape[2]), got 64"),
    ("k_scales", lambda x: x[1:], "k_scales.shape[0] must be 150 (k.shape[0]), got 149"),
    ("k_scales", lambda x: x.half(), "k_scales must be float32, got float16"),
    ("weights", lambda x: x[:, :4], "weights.shape[1] must be 8 (q.shape[1]), got 4"),
    ("k_starts", lambda x: x.long(), "k_starts must be int32, got int64"),
    ("k_starts", lambda x: x - 1, "k_starts and k_ends must be 0 to 150 (k.shape[0]), got -1 and 150 for token 0"),
    ("k_ends", lambda x: x + 1, "k_starts and k_ends must be 0 to 150 (k.shape[0]), got 0 and 151 for token 0"),
    ("k_ends", lambda x: x[1:], "k_ends.shape[0] must be 2 (q.shape[0]), got 1"),
    ("output_dtype", torch.bfloat16, "output_dtype must be float32 or float16, got torch.bfloat16"),
    ("out", lambda x: torch.empty(2, 150).half(), "out must be torch.float32 (output_dtype), got torch.float16"),
    ("out", lambda x: torch.empty(2, 149), "out.shape[1] must be 150 (k.shape[0]), got 149"),
    ("out", lambda x: torch.empty(1, 150).expand(2, 150), "would share memory"),
]


@pytest.mark.parametrize("name, bad, text", BAD, ids=[f"{name}-{i}" for i, (name, _, _) in enumerate(BAD)])
def test_refused(name, bad, text):
    made = make("cpu", [0, 7], [150, 90])
    check_refused(fp8_ragged_mqa_logits, text, **{**made, name: bad(made.get(name)) if callable(bad) else bad})
