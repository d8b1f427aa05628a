# SPDX-License-Identifier: Apache-2.0
"""Two cascade levels in one launch: keys that many rows share, and keys of decode requests. The CPU runs
them in turn.
"""

from __future__ import annotations

import pytest
import torch

import flashinfer

from ..attention.inputs import Pages, int32, offsets
from ..attention.reference import Attention
from ..tensors import randn

PAGE = 16


def workspace(device, mib: int = 64) -> torch.Tensor:
    return torch.empty(mib << 20, dtype=torch.uint8, device=device)


class Cascade:
    """Requests of ``rows`` tokens and ``own`` keys each; ``groups`` of them share entries of ``shared``."""

    def __init__(self, device, rows, own, groups, shared, heads=(8, 2), dim=64, dtype=torch.float16):
        self.device, self.rows, self.own, self.shared = device, rows, own, shared
        self.heads, self.dim, self.dtype = heads, dim, dtype
        self.pages = Pages([*shared, *own], PAGE, device)
        self.k, self.v = (randn(sum(shared) + sum(own), heads[1], dim, dtype=dtype, device=device) for _ in range(2))
        self.cache = torch.stack([self.pages.scatter(x, "NHD") for x in (self.k, self.v)], dim=1)
        starts = offsets(rows)
        self.entry_of = [entry for entry, n in enumerate(groups) for _ in range(n)]
        self.qo = [[starts[i] for i in offsets(groups)], starts]
        self.q = randn(starts[-1], heads[0], dim, dtype=dtype, device=device)

    def tables(self, index_device=None):
        """Return the four lists of plan."""
        indptr, n = self.pages.indptr, len(self.shared)
        parts = indptr[: n + 1], indptr[n:] - indptr[n]
        indices = self.pages.indices[: indptr[n]], self.pages.indices[indptr[n] :]
        last = self.pages.last_page_len[:n], self.pages.last_page_len[n:]
        qo = [int32(x, self.device) for x in self.qo]
        return [[x.to(index_device or self.device) for x in level] for level in (qo, parts, indices, last)]

    def expected(self, causal):
        at, out = offsets([*self.shared, *self.own]), []
        for request, entry in enumerate(self.entry_of):
            begin, end = self.qo[1][request : request + 2]
            if begin == end:
                continue
            parts = (entry, len(self.shared) + request)
            k, v = (torch.cat([x[at[i] : at[i + 1]] for i in parts]) for x in (self.k, self.v))
            out.append(Attention(causal=causal)(self.q[begin:end], k, v)[0])
        return torch.cat(out)

    def plan(self, wrapper, causal=False, index_device=None):
        sizes = (*self.heads, self.dim, PAGE)
        wrapper.plan(*self.tables(index_device), *sizes, causal=causal, q_data_type=self.dtype)

    def check(self, out, causal=False):
        tolerance = 1e-3 if self.dtype is torch.float16 else 1e-2
        torch.testing.assert_close(out.float(), self.expected(causal), rtol=tolerance, atol=tolerance)


def is_hopper(device) -> bool:
    return device != "cpu" and torch.cuda.get_device_capability() == (9, 0)


CASES = {
    "decode": {"rows": [1] * 64, "own": [100] * 64, "groups": [64], "shared": [2000]},
    "skewed": {"rows": [1] * 40, "own": [1, 700, 0, 64, 2000] * 8, "groups": [25, 15], "shared": [333, 5000]},
    "no keys": {"rows": [1] * 20, "own": [0] * 20, "groups": [10, 10], "shared": [0, 70]},
    "append": {"rows": [4, 1, 3, 2] * 6, "own": [40, 9, 3, 200] * 6, "groups": [13, 11], "shared": [129, 64]},
    "no rows": {"rows": [1, 0, 2] * 8, "own": [30, 5, 2] * 8, "groups": [12, 12], "shared": [400, 65]},
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_both_levels_are_attended_to(device, case, causal):
    cascade = Cascade(device, **case)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace(device))
    cascade.plan(wrapper, causal)
    assert wrapper._is_fused == is_hopper(device)
    once, again = (wrapper.run(cascade.q, cascade.cache) for _ in range(2))  # the second call is a cached one
    cascade.check(once, causal)
    assert torch.equal(once, again)


@pytest.mark.parametrize("heads", [(4, 4), (8, 1), (10, 2), (6, 2)], ids=lambda x: f"{x[0]}x{x[1]}")
@pytest.mark.parametrize("dim, dtype", [(64, torch.float16), (128, torch.bfloat16)])
def test_heads(device, heads, dim, dtype):
    if device == "cpu" and dim == 128:
        pytest.skip("nothing there depends on it")
    cascade = Cascade(device, [1] * 70, [17] * 70, [40, 30], [700, 300], heads, dim, dtype)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace(device))
    cascade.plan(wrapper, index_device="cpu")
    cascade.check(wrapper.run(cascade.q, (cascade.cache[:, 0], cascade.cache[:, 1])))


@pytest.mark.parametrize("change", [{"groups": [60, 4]}, {"rows": [5] * 64}], ids=["few share", "many rows"])
def test_what_goes_level_by_level(device, change):
    cascade = Cascade(device, **{**CASES["decode"], **change, "shared": [70] * len(change.get("groups", [0]))})
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace(device))
    cascade.plan(wrapper)
    assert not wrapper._is_fused
    cascade.check(wrapper.run(cascade.q, cascade.cache))


def test_small_workspaces_go_level_by_level(device):
    cascade = Cascade(device, **CASES["decode"])
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace(device, 1)[: 1 << 19])
    try:
        cascade.plan(wrapper)
    except ValueError as error:  # the smallest size does not fit either: the error names the required size
        assert "float_workspace_buffer must have at least" in str(error)
    assert not wrapper._is_fused
    wrapper.reset_workspace_buffer(workspace(device), [workspace(device, 8), workspace(device, 8)])
    cascade.plan(wrapper)
    assert wrapper._is_fused == is_hopper(device)
    cascade.check(wrapper.run(cascade.q, cascade.cache))


def test_graph_is_planned_anew(device):
    """Check that one graph serves later plans, with other keys and with requests that do not suit a fused launch."""
    first = Cascade(device, **CASES["decode"])
    rows = [[1] * 63 + [0], [1] * 30 + [8] + [0] * 33]
    later = [Cascade(device, x, [0, 350, 77, 1] * 16, [64], [n]) for x, n in zip(rows, (900, 40), strict=True)]
    buffers = [[torch.zeros_like(x) for x in table] for table in first.tables()]
    buffers[2] = [torch.zeros(1000, dtype=torch.int32, device=device) for _ in range(2)]
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace(device), "NHD", True, *buffers)
    first.plan(wrapper)
    first.check(wrapper.run(first.q, first.cache))
    if device == "cpu":
        return
    cache = torch.zeros(1000, *first.cache.shape[1:], dtype=first.dtype, device=device)
    q = first.q.clone()
    cache[: len(first.cache)] = first.cache
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = wrapper.run(q, cache)
    for cascade in (first, *later, first):
        cascade.plan(wrapper)
        cache[: len(cascade.cache)] = cascade.cache
        q[: len(cascade.q)] = cascade.q
        out.zero_()
        graph.replay()
        cascade.check(out[: len(cascade.q)])
