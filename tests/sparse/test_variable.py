# SPDX-License-Identifier: Apache-2.0
"""Block-sparse patterns of any block size, different for each head, against attention with the same masks."""

from __future__ import annotations

import pytest
import torch

import flashinfer
from flashinfer._runtime.errors import ArgumentError

from ..attention.reference import Attention
from ..attention.wrappers import close, workspace
from ..bad_arguments import pattern
from ..tensors import randn
from .inputs import cut

DIM = 64


def expected(q, k, v, pattern, rows, columns, **options):
    group, outs, lses = q.shape[0] // k.shape[0], [], []
    for head in range(k.shape[0]):
        mask = pattern[head].repeat_interleave(rows[head], 0).repeat_interleave(columns[head], 1)
        mine = slice(head * group, (head + 1) * group)
        out, lse = Attention(mask=mask, **options)(
            *(x.transpose(0, 1) for x in (q[mine], k[head : head + 1], v[head : head + 1]))
        )
        outs.append(out.transpose(0, 1))
        lses.append(lse.T)
    return torch.cat(outs), torch.cat(lses)


@pytest.mark.parametrize("heads, kv_heads", [(4, 2), (2, 2), (7, 1)])
def test_pattern(device, heads, kv_heads):
    qo_len, kv_len, MB, NB = 70, 130, 6, 9
    pattern = torch.rand(kv_heads, MB, NB) < 0.4
    pattern[0, 2] = False
    rows = torch.tensor([cut(qo_len, MB) for _ in range(kv_heads)])
    columns = torch.tensor([cut(kv_len, NB) for _ in range(kv_heads)])
    q = randn(heads, qo_len, DIM, dtype=torch.float16, device=device)
    k, v = (randn(kv_heads, kv_len, DIM, dtype=torch.float16, device=device) for _ in range(2))
    wrapper = flashinfer.VariableBlockSparseAttentionWrapper(workspace(device))
    wrapper.plan(*(x.to(device) for x in (pattern, rows, columns)), heads, kv_heads, DIM, sm_scale=0.2)
    reference = tuple(
        x.to(device) for x in expected(*(x.cpu() for x in (q, k, v)), pattern, rows, columns, sm_scale=0.2)
    )
    result = wrapper.run(q, k, v, return_lse=True)
    assert result[0].shape == q.shape and result[1].shape == q.shape[:2]
    close(result, reference)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device=device)
    assert wrapper.run(q, k, v, out=out, lse=lse) is out
    close((out, lse), reference)
    inner = torch.empty(kv_heads * qo_len, heads // kv_heads, DIM, dtype=torch.float16, device=device)
    close((wrapper.run(q, k, v, out=inner), lse), reference)


def test_as_many_rows_as_heads_in_a_group(device):
    """Check q with as many rows as heads in a group: its shape then equals that of the permuted results."""
    group, kv_heads = 4, 2
    plan = torch.ones(kv_heads, 1, 1, dtype=torch.bool), torch.full((kv_heads, 1), group), torch.full((kv_heads, 1), 9)
    wrapper = flashinfer.VariableBlockSparseAttentionWrapper(workspace(device))
    wrapper.plan(*plan, group * kv_heads, kv_heads, DIM)
    q = randn(group * kv_heads, group, DIM, dtype=torch.float16, device=device)
    k, v = (randn(kv_heads, 9, DIM, dtype=torch.float16, device=device) for _ in range(2))
    result = wrapper.run(q, k, v, return_lse=True)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device=device)
    assert wrapper.run(q, k, v, out=out, lse=lse) is out
    assert torch.equal(out, result[0]) and torch.equal(lse, result[1])


def test_legacy_names(device):
    pattern, rows, columns = torch.ones(1, 1, 2, dtype=torch.bool), torch.tensor([[5]]), torch.tensor([[4, 3]])
    wrapper = flashinfer.VariableBlockSparseAttentionWrapper(workspace(device))
    wrapper.begin_forward(pattern, rows, columns, 2, 1, DIM, causal=True)
    q, k, v = (randn(n, m, DIM, dtype=torch.float16, device=device) for n, m in ((2, 5), (1, 7), (1, 7)))
    mine = (x.transpose(0, 1) for x in (q, k, v))
    reference = Attention(causal=True, sm_scale=0.5)(*mine)[0].transpose(0, 1)
    torch.testing.assert_close(wrapper.forward(q, k, v, sm_scale=0.5).float(), reference, rtol=1e-3, atol=1e-3)
    wrapper.end_forward()


PLAN = {
    "block_mask_map": torch.ones(2, 3, 4, dtype=torch.bool),
    "block_row_sz": torch.full((2, 3), 5),
    "block_col_sz": torch.full((2, 4), 5),
    "num_qo_heads": 4,
}
BAD = [
    ({"block_mask_map": torch.ones(1, 3, 4)}, "block_mask_map must have shape (2, MB, NB).*, got (1, 3, 4)"),
    ({"block_row_sz": torch.ones(2, 4)}, "block_row_sz must have shape (2, 3).*, got (2, 4)"),
    ({"block_col_sz": torch.ones(2, 3)}, "block_col_sz must have shape (2, 4).*, got (2, 3)"),
    (
        {"block_row_sz": torch.tensor([[5, 5, 5], [5, 5, 6]])},
        "the rows of block_row_sz must sum to one length for all heads, got [15, 16]",
    ),
    ({"block_row_sz": torch.tensor([[5, 5, 5], [-5, 5, 15]])}, "block_row_sz must be 0 or more, got -5"),
    ({"num_qo_heads": 3}, "num_qo_heads must be a multiple of 2.*, got 3"),
    ({"num_kv_heads": 0}, "num_qo_heads must be a multiple of 0.*, got 4"),
]


@pytest.mark.parametrize("change, text", BAD, ids=[text for _, text in BAD])
def test_bad_plan(device, change, text):
    wrapper = flashinfer.VariableBlockSparseAttentionWrapper(workspace(device))
    with pytest.raises(AssertionError, match=pattern(text)):
        wrapper.plan(**({**PLAN, "num_kv_heads": 2} | change), head_dim=DIM)


def test_bad_run(device):
    wrapper = flashinfer.VariableBlockSparseAttentionWrapper(workspace(device))
    q, k = (torch.empty(n, m, DIM, dtype=torch.float16, device=device) for n, m in ((4, 15), (2, 20)))
    for call in (wrapper.run, wrapper.forward):
        with pytest.raises(ArgumentError, match=r"plan\(\) must be called before run"):
            call(q, k, k)
    wrapper.plan(**PLAN, num_kv_heads=2, head_dim=DIM)
    with pytest.raises(ArgumentError, match=pattern("q must have shape (4, 15, head_dim).*, got (4, 14, 64)")):
        wrapper.run(q[:, 1:], k, k)
    with pytest.raises(ArgumentError, match=pattern("v must have shape (2, 20, head_dim).*, got (2, 19, 64)")):
        wrapper.run(q, k, k[:, 1:])
    for name, bad in (("shape", q[:, 1:]), ("dtype", q.float()), ("shape", q.expand(2, 4, 15, DIM))):
        with pytest.raises(ValueError, match=f"Invalid {name} of out"):
            wrapper.run(q, k, k, out=bad)
    for name, bad in (("shape", q[..., 0].T), ("dtype", q[..., 0])):
        with pytest.raises(ValueError, match=f"Invalid {name} of lse"):
            wrapper.run(q, k, k, lse=bad, return_lse=True)
