# SPDX-License-Identifier: Apache-2.0
"""Cascade attention equals attention over all keys: shared prefixes in pages and in dense tensors."""

from __future__ import annotations

import re

import pytest
import torch

import flashinfer
from flashinfer._runtime.errors import ArgumentError

from ..attention.inputs import LAYOUTS, to_layout
from .tree import DIM, HEADS, KV_HEADS, PAGE, SHARED, Tree

OWN = [5, 1, 0, 17]  # further keys of each request
GROUP = [9, 3]  # keys that the first two and the last two requests share in addition


def workspace(device, mib: int = 32) -> torch.Tensor:
    return torch.empty(mib << 20, dtype=torch.uint8, device=device)


def close(out: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(out.float(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "levels, rows",
    [
        ([[SHARED], OWN], [[4], [1, 1, 1, 1]]),
        ([[SHARED], GROUP, OWN], [[4], [2, 2], [1, 1, 1, 1]]),
        ([[SHARED], [20, 7, 9]], [[30], [20, 3, 7]]),
        ([[30, 12]], [[7, 12]]),
    ],
    ids=["decode", "three levels", "append", "one level"],
)
def test_levels_are_attention_over_all_keys(device, either_backend, layout, causal, levels, rows):
    tree = Tree(device, layout, levels, rows)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(len(levels), workspace(device), layout)
    wrapper.plan(tree.qo_indptr, *tree.tables(), HEADS, KV_HEADS, DIM, PAGE, causal=causal)
    if causal and rows[-1] == [1, 1, 1, 1]:
        causal = False  # a single row sees all its keys
    close(wrapper.run(tree.q, tree.cache), tree.expected(causal))


def test_aliases_and_workspaces(device):
    tree = Tree(device, "NHD", [[SHARED], OWN], [[4], [1, 1, 1, 1]])
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace(device, 1))
    wrapper.reset_workspace_buffer(workspace(device), [workspace(device, 8), workspace(device, 8)])
    assert wrapper.begin_forward.__func__ is wrapper.plan.__func__
    wrapper.begin_forward(tree.qo_indptr, *tree.tables(), HEADS, KV_HEADS, DIM, PAGE, sm_scale=0.5)
    expected = wrapper.run(tree.q, tree.cache)
    assert torch.equal(wrapper.forward(tree.q, (tree.cache[:, 0], tree.cache[:, 1])), expected)
    wrapper.end_forward()
    wrapper.prewarm_paged_kv_stride_variant()
    shared = flashinfer.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(workspace(device))
    with pytest.raises(RuntimeError, match=r"begin_forward\(\) must be called before"):
        shared.prewarm_paged_kv_stride_variant()
    shared.begin_forward(*(torch.zeros(2, dtype=torch.int32),) * 3, torch.zeros(1, dtype=torch.int32), 4, 2, 64, 16)
    shared.prewarm_paged_kv_stride_variant()
    assert not wrapper.is_cuda_graph_enabled


def test_cuda_graph_mode(device, either_backend):
    tree = Tree(device, "NHD", [[SHARED], OWN], [[4], [1, 1, 1, 1]])
    rows, *tables = (list(x) for x in (tree.qo_indptr, *tree.tables()))
    buffers = [[torch.zeros_like(x) for x in y] for y in (rows, *tables)]
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace(device), "NHD", True, *buffers)
    wrapper.plan(rows, *tables, HEADS, KV_HEADS, DIM, PAGE)
    expected = tree.expected(False)
    if device == "cpu":
        return close(wrapper.run(tree.q, tree.cache), expected)
    wrapper.run(tree.q, tree.cache)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = wrapper.run(tree.q, tree.cache)
    out.zero_()
    graph.replay()
    close(out, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shared_prefix_decode(device, layout):
    tree = Tree(device, layout, [[SHARED], OWN], [[4], [1, 1, 1, 1]])
    wrapper = flashinfer.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(workspace(device), layout)
    wrapper.begin_forward(*(x[1] for x in tree.tables()), HEADS, KV_HEADS, DIM, PAGE)
    k, v = (to_layout(x[:SHARED], layout) for x in (tree.k, tree.v))
    close(wrapper.forward(tree.q, k, v, tree.cache), tree.expected(False))
    wrapper.end_forward()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", [False, True])
def test_shared_prefix_prefill(device, either_backend, layout, causal):
    tree = Tree(device, layout, [[SHARED], [20, 7, 9]], [[30], [20, 3, 7]])
    wrapper = flashinfer.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(workspace(device), layout)
    wrapper.begin_forward(tree.qo_indptr[1], *(x[1] for x in tree.tables()), HEADS, KV_HEADS, DIM, PAGE)
    k, v = (to_layout(x[:SHARED], layout) for x in (tree.k, tree.v))
    for _ in range(2):  # the second run reuses the plan
        close(wrapper.forward(tree.q, k, v, tree.cache, causal=causal), tree.expected(causal))
    wrapper.reset_workspace_buffer(workspace(device), workspace(device, 8))
    close(wrapper.forward(tree.q, k, v, tree.cache, causal=causal), tree.expected(causal))


def test_forward_before_begin_forward(device):
    x = torch.zeros(2, 4, 64, dtype=torch.float16, device=device)
    for kind in (
        flashinfer.BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
        flashinfer.BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
    ):
        with pytest.raises(ValueError, match="must be called before"):
            kind(workspace(device)).forward(x, x, x, x.expand(2, 2, 2, 4, 64))


def test_wrong_numbers_of_levels(device):
    tree = Tree(device, "NHD", [[SHARED], OWN], [[4], [1, 1, 1, 1]])
    make = flashinfer.MultiLevelCascadeAttentionWrapper
    with pytest.raises(ArgumentError, match="num_levels must be at least 1, got 0"):
        make(0, workspace(device))
    with pytest.raises(ArgumentError, match="qo_indptr_buf_arr must have 2 elements"):
        make(2, workspace(device), use_cuda_graph=True)
    wrapper = make(2, workspace(device))
    with pytest.raises(ValueError, match=re.escape("plan: qo_indptr_arr must have 2 elements (num_levels), got 1")):
        wrapper.plan(tree.qo_indptr[:1], *tree.tables(), HEADS, KV_HEADS, DIM, PAGE)
    with pytest.raises(ValueError, match="int_workspace_buffers must have 2 elements"):
        wrapper.reset_workspace_buffer(workspace(device), [workspace(device)])
