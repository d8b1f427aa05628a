# SPDX-License-Identifier: Apache-2.0
"""Error messages for wrong tensors: they name the op, the argument, the actual and the expected value."""

from __future__ import annotations

import pytest
import torch

import flashinfer
from flashinfer._runtime.errors import ArgumentError

from ..bad_arguments import check_refused, make_arguments, pattern, with_bad

FP16, FP32 = torch.float16, torch.float32
V, S = ((4, 2, 64), FP16), ((4, 2), FP32)
GOOD = {
    "merge_state": {"v_a": V, "s_a": S, "v_b": V, "s_b": S},
    "merge_state_in_place": {"v": V, "s": S, "v_other": V, "s_other": S, "mask": ((4,), torch.bool)},
    "merge_states": {"v": ((4, 3, 2, 64), FP16), "s": ((4, 3, 2), FP32)},
    "variable_length_merge_states": {"v": V, "s": S, "indptr": ((3,), torch.int32)},
}


def every_other(t):
    return t.repeat_interleave(2, dim=-1)[..., ::2]


def one_row(t):
    return t[:1].expand(t.shape)


# (op, argument, (shape, dtype) or a function that changes the good tensor, text)
BAD = [
    ("merge_state", "v_a", ((4, 64), FP16), "v_a must have 3 dimensions.*, got 2"),
    ("merge_state", "v_a", ((4, 2, 64), torch.int32), "v_a must be float16.*, got int32"),
    ("merge_state", "v_a", every_other, "v_a.stride(-1) must be 1.*, got 2"),
    ("merge_state", "v_b", ((4, 2, 32), FP16), "v_b must have shape (4, 2, 64) (the shape of v_a).*, got (4, 2, 32)"),
    ("merge_state", "v_b", ((4, 2, 64), FP32), "v_b must be float16 (the dtype of v_a).*, got float32"),
    ("merge_state", "v_b", every_other, "v_b.stride(-1) must be 1.*, got 2"),
    ("merge_state", "s_a", ((4, 3), FP32), "s_a.shape[1] must be 2 (that of v_a).*, got 3"),
    ("merge_state", "s_b", ((5, 2), FP32), "s_b.shape[0] must be 4 (that of v_b).*, got 5"),
    ("merge_state", "s_b", ((4, 2, 1), FP32), "s_b must have 2 dimensions.*, got 3"),
    ("merge_state_in_place", "v", ((4, 2, 64), torch.float64), "v must be float16.*, got float64"),
    ("merge_state_in_place", "v", every_other, "v.stride(-1) must be 1.*, got 2"),
    ("merge_state_in_place", "v", ((64,), FP16), "v must have 3 dimensions.*, got 1"),
    ("merge_state_in_place", "v", one_row, "v.stride(0) must not be 0"),
    ("merge_state_in_place", "s", one_row, "s.stride(0) must not be 0"),
    ("merge_state_in_place", "v_other", ((4, 3, 64), FP16), "v_other must have shape (4, 2, 64).*, got (4, 3, 64)"),
    ("merge_state_in_place", "s", ((3, 2), FP32), "s.shape[0] must be 4 (that of v).*, got 3"),
    ("merge_state_in_place", "s_other", ((4,), FP32), "s_other must have 2 dimensions.*, got 1"),
    ("merge_state_in_place", "mask", ((3,), torch.bool), "mask.shape[0] must be 4 (v.shape[0]).*, got 3"),
    ("merge_state_in_place", "mask", ((4, 2), torch.bool), "mask must have 1 dimension.*, got 2"),
    ("merge_state_in_place", "mask", ((4,), torch.int32), "mask must be bool or uint8.*, got int32"),
    ("merge_states", "v", ((4, 2, 64), FP16), "v must have 4 dimensions, got 3"),
    ("merge_states", "v", ((4, 3, 2, 64), torch.int32), "v must be float16.*, got int32"),
    ("merge_states", "v", every_other, "v.stride(-1) must be 1.*, got 2"),
    ("merge_states", "s", ((4, 2, 2), FP32), "s.shape[1] must be 3 (that of v).*, got 2"),
    ("merge_states", "s", ((4, 3), FP32), "s must have 3 dimensions.*, got 2"),
    ("variable_length_merge_states", "v", ((4, 64), FP16), "v must have 3 dimensions, got 2"),
    ("variable_length_merge_states", "indptr", ((3,), FP32), "indptr must have an integer dtype.*, got torch.float32"),
    (
        "variable_length_merge_states",
        "indptr",
        ((3, 1), torch.int32),
        "indptr must have shape (seq_len + 1,), got (3, 1)",
    ),
]


@pytest.mark.parametrize("op", GOOD)
def test_the_table_starts_from_good_calls(device, op):
    getattr(flashinfer, op)(**make_arguments(GOOD[op], device))


@pytest.mark.parametrize("op, argument, bad, text", [pytest.param(*row, id=f"{row[0]}-{row[3]}") for row in BAD])
def test_bad_argument(device, op, argument, bad, text):
    arguments = with_bad(make_arguments(GOOD[op], device), argument, bad, device)
    check_refused(getattr(flashinfer, op), text, **arguments)


@pytest.mark.parametrize(
    "offsets, text",
    [
        ([0, 3, 5], "indptr[2] must be an offset from 3 to 4 (the number of states).*, got 5"),
        ([0, 5, 4], "indptr[1] must be an offset from 0 to 4.*, got 5"),
        ([0, 3, 2], "indptr[2] must be an offset from 3 to 4.*, got 2"),
        ([-1, 3, 4], "indptr[0] must be an offset from 0 to 4.*, got -1"),
        ([0, 3, 2**32 + 4], "indptr must contain numbers of 32 bits, got 4294967300"),
    ],
)
def test_offsets_beyond_the_states_on_the_cpu(offsets, text):
    v, s = torch.ones(4, 2, 64), torch.ones(4, 2)
    check_refused(flashinfer.variable_length_merge_states, text, v, s, torch.tensor(offsets))


def test_heads_without_elements(device):
    v, s = torch.ones(4, 3, 2, 0, device=device), torch.ones(4, 3, 2, device=device)
    with pytest.raises(ArgumentError, match=pattern("merge_states: v.shape[-1] must be at least 1.*, got 0")):
        flashinfer.merge_states(v, s)


@pytest.mark.parametrize("op, argument", [(op, name) for op, names in GOOD.items() for name in names])
def test_other_device(device, op, argument):
    if device == "cpu":
        pytest.skip("a CPU alone has no other device")
    arguments = make_arguments(GOOD[op], device)
    arguments[argument] = arguments[argument].cpu()
    with pytest.raises(RuntimeError, match=f"{op}: "):
        getattr(flashinfer, op)(**arguments)
