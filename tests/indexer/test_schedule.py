# SPDX-License-Identifier: Apache-2.0
"""Schedule of index scores: exact numbers, against numpy and against the reference of the template."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import flashinfer
from flashinfer.attn_scores import compute_paged_mqa_logits_schedule, min_block_table_width, padded_seq_len
from flashinfer.trace.templates.indexer import compute_paged_mqa_logits_schedule_trace

from ..bad_arguments import check_refused
from ..graphs import capture

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

LENGTHS = [
    [],
    [0],
    [1],
    [256],
    [257],
    [0, 0, 5, 0],
    [300, 0, 1000, 256, 257, 0],
    [131072],
    [8192] * 64,
    list(range(0, 40000, 97)),
    [1] * 1500 + [0] * 100 + [70000],
    [-5, 300],
]


def expected(lengths, blocks):
    splits = [(max(x, 0) + 255) // 256 for x in lengths]
    ends = np.cumsum(splits, dtype=np.int64)
    total = int(ends[-1]) if len(lengths) else 0
    rows = []
    for i in range(blocks + 1):
        split = i * (total // blocks) + min(i, total % blocks)
        j = int((ends <= split).sum())
        rows.append((j, split - (int(ends[j - 1]) if j else 0) if j < len(lengths) else 0))
    return rows


@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda x: f"{len(x)}_{sum(x)}")
@pytest.mark.parametrize("blocks", [1, 3, 132])
def test_numbers(lengths, blocks):
    """No request, empty ones, one more key than a split, fewer and more splits than blocks."""
    out = torch.full((blocks + 1, 2), -7, dtype=torch.int32)
    tensor = torch.tensor(lengths, dtype=torch.int32)
    assert compute_paged_mqa_logits_schedule(tensor, out=out) is out
    assert [tuple(row) for row in out.tolist()] == expected(lengths, blocks)
    reference = compute_paged_mqa_logits_schedule_trace.reference(tensor, out=out)
    assert torch.equal(reference, out)


@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda x: f"{len(x)}_{sum(x)}")
def test_devices(device, lengths):
    """Default blocks, strided lengths, lengths on the CPU, and the form without a GPU kernel give the same rows."""
    tensor = torch.tensor(lengths, dtype=torch.int32, device=device)
    rows = compute_paged_mqa_logits_schedule(tensor)
    assert [tuple(row) for row in rows.tolist()] == expected(lengths, len(rows) - 1)
    strided = torch.stack((tensor, tensor + 1), 1)[:, 0]
    for other in (
        compute_paged_mqa_logits_schedule(strided, next_n=2, variant="fp4"),
        compute_paged_mqa_logits_schedule(tensor.cpu(), device),
        compute_paged_mqa_logits_schedule(tensor, use_gpu_kernel=False),
    ):
        assert other.device == rows.device and torch.equal(other, rows)


@needs_cuda
def test_graph():
    device = "cuda"
    lengths = torch.tensor([300, 0, 1000], dtype=torch.int32, device=device)
    graph, rows = capture(lambda: compute_paged_mqa_logits_schedule(lengths))
    lengths.copy_(torch.tensor([5000, 7, 0]))
    graph.replay()
    assert [tuple(row) for row in rows.tolist()] == expected([5000, 7, 0], len(rows) - 1)


def test_sizes():
    assert [padded_seq_len(n) for n in (0, 1, 256, 257)] == [0, 256, 256, 512]
    assert [min_block_table_width(n, 64) for n in (0, 1, 64, 65)] == [0, 1, 1, 2]
    for name in flashinfer.attn_scores.__all__:
        assert getattr(flashinfer, name) is getattr(flashinfer.attn_scores, name)


def test_refused(device):
    function = compute_paged_mqa_logits_schedule
    lengths = torch.tensor([300, 7], dtype=torch.int32, device=device)
    check_refused(function, "variant must be 'fp8' or 'fp4', got 'fp6'", lengths, variant="fp6")
    check_refused(function, "next_n must be >= 1, got 0", lengths, next_n=0)
    check_refused(function, "seq_lens must be int32, got torch.int64", lengths.long())
    check_refused(function, "seq_lens must be 1-D, got 2-D", lengths[None])
    check_refused(function, "out must have shape [blocks + 1, 2]", lengths, out=lengths.new_empty(1, 2))
    check_refused(function, "out must have shape [blocks + 1, 2]", lengths, out=lengths.new_empty(5, 3))
    check_refused(function, "out must be contiguous int32", lengths, out=torch.empty(133, 2, device=device))
    check_refused(function, "out must be on", lengths, device, out=torch.empty(133, 2, device="meta").int())
