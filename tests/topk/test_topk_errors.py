# SPDX-License-Identifier: Apache-2.0
"""Error messages for wrong arguments: they name the op, the argument, the actual and the expected value."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import flashinfer
from flashinfer._runtime.errors import BackendSupportedError

from ..bad_arguments import check_refused, make_arguments, with_bad

FP32, INT32 = torch.float32, torch.int32
INPUT, ROWS, OUT = ((4, 100), FP32), ((4,), INT32), ((4, 8), INT32)
GOOD = {
    "top_k": {"input": INPUT, "k": 8},
    "top_k_page_table_transform": {
        "input": INPUT,
        "src_page_table": ((4, 100), INT32),
        "lengths": ROWS,
        "k": 8,
        "row_to_batch": ROWS,
        "row_starts": ROWS,
        "page_table_row_starts": ROWS,
        "out": OUT,
        "out_raw_indices": OUT,
    },
    "top_k_ragged_transform": {"input": INPUT, "offsets": ROWS, "lengths": ROWS, "k": 8, "row_starts": ROWS},
    "top_k_varlen": {"logits": INPUT, "seq_lens": ROWS, "top_k": 8, "out_indices": OUT, "out_values": ((4, 8), FP32)},
}
PAGED, RAGGED, VARLEN = "top_k_page_table_transform", "top_k_ragged_transform", "top_k_varlen"


def every_other(t):
    return t.repeat_interleave(2, dim=-1)[..., ::2]


def columns_of_wider(t):
    return torch.cat([t, t], dim=-1)[..., : t.shape[-1]]


# (op, argument, (shape, dtype) or a function that changes the good tensor or another value, text)
BAD = [
    ("top_k", "input", ((100,), FP32), "input must have 2 dimensions, got 1"),
    ("top_k", "input", ((4, 100), torch.float64), "input must be float32.*, got float64"),
    ("top_k", "input", ((4, 100), INT32), "input must be float32.*, got int32"),
    ("top_k", "input", every_other, "input.stride(-1) must be 1.*, got 2"),
    ("top_k", "k", 0, "k must be at least 1"),
    ("top_k", "k", -3, "k must be at least 1"),
    ("top_k", "tie_break", 3, "tie_break must be a TopKTieBreak"),
    (PAGED, "input", ((2, 4, 100), FP32), "input must have 2 dimensions, got 3"),
    (PAGED, "src_page_table", ((100,), INT32), "src_page_table must have 2 dimensions.*, got 1"),
    (PAGED, "src_page_table", ((4, 100), torch.int64), "src_page_table must be int32.*, got int64"),
    (PAGED, "lengths", ((3,), INT32), "lengths.shape[0] must be 4 (input.shape[0]).*, got 3"),
    (PAGED, "lengths", ((4,), torch.int64), "lengths must be int32.*, got int64"),
    (PAGED, "row_to_batch", ((4, 1), INT32), "row_to_batch must have 1 dimension.*, got 2"),
    (PAGED, "row_starts", every_other, "row_starts must be contiguous"),
    (PAGED, "page_table_row_starts", ((5,), INT32), "page_table_row_starts.shape[0] must be 4.*, got 5"),
    (PAGED, "k", 0, "k must be at least 1"),
    (PAGED, "k", 9, "out.shape[1] must be 9 (k).*, got 8"),
    (PAGED, "page_size", 0, "page_size must be a power of two"),
    (PAGED, "page_size", 48, "page_size must be a power of two"),
    (PAGED, "page_size", 1 << 31, "page_size must be a power of two"),
    (PAGED, "tie_break", -1, "tie_break must be a TopKTieBreak: none, small or large, got -1"),
    (PAGED, "out", ((4, 9), INT32), "out.shape[1] must be 8 (k).*, got 9"),
    (PAGED, "out", ((3, 8), INT32), "out.shape[0] must be 4.*, got 3"),
    (PAGED, "out", ((4, 8), torch.int64), "out must be int32.*, got int64"),
    (PAGED, "out", columns_of_wider, "out must be contiguous"),
    (PAGED, "out_raw_indices", columns_of_wider, "out_raw_indices must be contiguous"),
    (RAGGED, "input", every_other, "input.stride(-1) must be 1.*, got 2"),
    (RAGGED, "offsets", ((4,), torch.int64), "offsets must be int32.*, got int64"),
    (RAGGED, "lengths", ((4, 1), INT32), "lengths must have 1 dimension.*, got 2"),
    (RAGGED, "k", -1, "k must be at least 1"),
    (VARLEN, "logits", ((100,), FP32), "logits must have 2 dimensions, got 1"),
    (VARLEN, "seq_lens", ((4,), torch.int64), "seq_lens must have dtype torch.int32, got torch.int64"),
    (VARLEN, "seq_lens", ((3,), INT32), "seq_lens.shape[0] must be 4.*, got 3"),
    (VARLEN, "top_k", 0, "top_k must be at least 1, got 0"),
    (VARLEN, "next_n", 0, "next_n and compress_ratio must be at least 1, got 0 and 1"),
    (VARLEN, "next_n", 3, "logits.shape[0] must be a multiple of next_n = 3.*, got 4"),
    (VARLEN, "compress_ratio", 0, "next_n and compress_ratio must be at least 1, got"),
    (VARLEN, "out_indices", ((4, 8), torch.int64), "out_indices must be int32.*, got int64"),
    (VARLEN, "out_values", ((4, 8), torch.float16), "out_values must be float32.*, got float16"),
]


@pytest.mark.parametrize("op", GOOD)
def test_the_table_starts_from_good_calls(device, op):
    getattr(flashinfer, op)(**make_arguments(GOOD[op], device))


@pytest.mark.parametrize("op, argument, bad, text", [pytest.param(*row, id=f"{row[0]}-{row[3]}") for row in BAD])
def test_bad_argument(device, op, argument, bad, text):
    arguments = with_bad(make_arguments(GOOD[op], device), argument, bad, device)
    check_refused(getattr(flashinfer, op), text, **arguments)


# (argument, its values, the resulting location of the window of row 1)
BEYOND = [
    ("lengths", [4, 9], "row 1, columns 0 to 8"),
    ("row_to_batch", [1, 2], "row 2, columns 0 to 5"),
    ("row_to_batch", [1, -1], "row -1, columns 0 to 5"),
    ("page_table_row_starts", [0, 3], "row 1, columns 3 to 8"),
    ("page_table_row_starts", [0, -2], "row 1, columns -2 to 3"),
]


@pytest.mark.parametrize("argument, values, where", BEYOND)
def test_windows_beyond_the_page_table(device, argument, values, where):
    """Check windows beyond the table: a CPU call is rejected; a GPU writes -1 for the part beyond."""
    table = torch.arange(16, dtype=INT32, device=device).view(2, 8)
    arguments = {"lengths": [4, 6], "row_to_batch": [0, 1], "row_starts": [0, 0], "page_table_row_starts": [0, 0]}
    arguments |= {argument: values}
    moved = {name: torch.tensor(value, dtype=INT32, device=device) for name, value in arguments.items()}
    scores = torch.arange(10.0, device=device).repeat(2, 1)
    if device == "cpu":
        with pytest.raises(ValueError, match=f"the window of row 1 must be within.*, got {where}"):
            flashinfer.top_k_page_table_transform(scores, table, **moved, k=10)
        return
    out = flashinfer.top_k_page_table_transform(scores, table, **moved, k=10).tolist()
    first, columns = arguments["page_table_row_starts"][1], range(arguments["lengths"][1])
    row = arguments["row_to_batch"][1]
    found = [8 * row + first + r if 0 <= row < 2 and 0 <= first + r < 8 else -1 for r in columns]
    assert out[1] == found + [-1] * (10 - len(found))
    assert out[0][:4] == [8 * arguments["row_to_batch"][0] + r for r in range(4)]


@pytest.mark.parametrize("k", [2.0, "2", torch.tensor(2), None])
def test_k_is_an_integer(device, k):
    with pytest.raises(TypeError, match=f"top_k: k must be an int, got a {type(k).__name__}"):
        flashinfer.top_k(torch.randn(2, 8, device=device), k)


def test_integers_of_numpy(device):
    scores, table = torch.randn(2, 8, device=device), torch.zeros(2, 4, dtype=INT32, device=device)
    assert flashinfer.top_k(scores, np.int64(3))[1].shape == (2, 3)
    lengths = torch.full((2,), 8, dtype=INT32, device=device)
    paged = flashinfer.top_k_page_table_transform(scores, table, lengths, 8, page_size=np.int64(2))
    assert paged.tolist() == [[0, 1] * 4] * 2
    with pytest.raises(TypeError, match="top_k_page_table_transform: page_size must be an int, got a float"):
        flashinfer.top_k_page_table_transform(scores, table, lengths, 8, page_size=2.0)


def test_pages_need_their_own_starts(device):
    arguments = make_arguments(GOOD[PAGED], device) | {"page_size": 16, "page_table_row_starts": None}
    with pytest.raises(ValueError, match="page_table_row_starts must be a tensor"):
        flashinfer.top_k_page_table_transform(**arguments)


@pytest.mark.parametrize("backend", ["gvr", "radix", "no_such_backend"])
def test_backends_of_other_devices(device, backend):
    with pytest.raises(BackendSupportedError, match=f"does not support backend '{backend}'"):
        flashinfer.top_k_varlen(**make_arguments(GOOD[VARLEN], device), backend=backend)


@pytest.mark.parametrize("op, argument", [(op, n) for op, g in GOOD.items() for n in g if isinstance(g[n], tuple)])
def test_other_device(device, op, argument):
    if device == "cpu":
        pytest.skip("a CPU alone has no other device")
    arguments = make_arguments(GOOD[op], device)
    if sum(isinstance(x, torch.Tensor) for x in arguments.values()) == 1:
        pytest.skip("the only tensor: it decides where the call runs")
    arguments[argument] = arguments[argument].cpu()
    with pytest.raises(RuntimeError, match=f"{op}: "):
        getattr(flashinfer, op)(**arguments)
