# SPDX-License-Identifier: Apache-2.0
"""CUDA-only behaviour of top_k: graphs, streams, clusters, large tensors, the cached buffer that engines look up."""

from __future__ import annotations

import pytest
import torch

from flashinfer import top_k, top_k_page_table_transform, top_k_varlen, utils
from flashinfer._runtime.knobs import knobs
from flashinfer.topk import get_num_cached_for_topk
from flashinfer.trace.templates.topk import top_k_page_table_transform_trace, top_k_trace, top_k_varlen_trace

from ..graphs import capture
from .inputs import KINDS, make

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_graph_capture():
    x = torch.randn(3, 128256, device="cuda")
    graph, (values, indices) = capture(lambda: top_k(x, 2048, sorted=True))
    x.normal_()
    graph.replay()
    expected = torch.topk(x, 2048)
    assert torch.equal(values, expected.values) and torch.equal(indices, expected.indices)


def test_lengths_tables_and_scores_change_between_replays():
    x, table = torch.randn(4, 9000, device="cuda"), torch.randint(0, 99, (4, 9000), dtype=torch.int32, device="cuda")
    lengths = torch.tensor([9000, 3, 0, 500], dtype=torch.int32, device="cuda")
    options = {"deterministic": True, "dsa_graph_safe": True}
    graph, out = capture(lambda: top_k_page_table_transform(x, table, lengths, 256, **options))
    varlen_graph, (indices, _) = capture(lambda: top_k_varlen(x, lengths, 256))
    for new in ([1, 9000, 8000, 256], [0, 257, 9000, 9000]):
        x.normal_()
        table.random_(0, 10000)
        lengths.copy_(torch.tensor(new))
        graph.replay()
        varlen_graph.replay()
        expected = top_k_page_table_transform_trace.reference(x, table, lengths, 256, deterministic=True)
        assert torch.equal(out, expected)
        assert torch.equal(indices, top_k_varlen_trace.reference(x, lengths, 256))


def test_runs_on_the_current_stream():
    x = torch.zeros(8, 50000, device="cuda")
    top_k(x, 5)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # a selection on any other stream would run before the fill
        x[:, 777] = 1.0
        values, indices = top_k(x, 1)
    stream.synchronize()
    assert (indices == 777).all() and (values == 1).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 7, 20, 60, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_size_of_cluster(kind, rows, dtype):
    """Check clusters of eight blocks for few rows, down to one block per row for many."""
    x = make(kind, min(rows, 2), 128256, dtype, "cuda").repeat(-(-rows // 2), 1)[:rows]
    repeated = top_k_trace.reference(x[:2], 2048, sorted=True)[1].repeat(-(-rows // 2), 1)[:rows]
    for algorithm in ("", "multi_cta", "filtered"):
        with knobs.override(topk_algo=algorithm):
            _, indices = top_k(x, 2048, sorted=True)
            unordered = top_k(x, 2048)[1].sort(dim=1).values
        assert torch.equal(indices, repeated) and torch.equal(unordered, repeated.sort(dim=1).values)


@pytest.mark.parametrize("k", [2047, 4096, 8192, 12288, 20000, 100000])
def test_every_capacity(k):
    x = torch.randn(3, 128256, device="cuda")
    for options in ({}, {"deterministic": True}, {"sorted": True}):
        values, indices = top_k(x, k, **options)
        expected = torch.topk(x, k)
        assert torch.equal(values.sort(dim=1, descending=True).values, expected.values)
        assert torch.equal(values, x.gather(1, indices))
        if options.get("sorted"):
            assert torch.equal(indices, expected.indices)
    assert (get_num_cached_for_topk(x.device, k) > 0) == (k <= 12288) or torch.cuda.get_device_capability() != (9, 0)


def test_more_than_2_32_elements():
    x = torch.zeros(32769, 131072, dtype=torch.float16, device="cuda")
    x[-1, -5:] = torch.tensor([3.0, 1.0, 5.0, 2.0, 4.0]).half()
    x[12345, 131071] = 9.0
    values, indices = top_k(x, 5, sorted=True)
    assert indices[-1].tolist() == [131069, 131071, 131067, 131070, 131068]
    assert indices[12345].tolist() == [131071, 0, 1, 2, 3] and values[12345, 0] == 9


def test_the_buffer_engines_look_for():
    device = torch.device("cuda", torch.cuda.current_device())
    key = (f"radix_topk_row_states_{device}", device)
    utils._cache_buf.pop(key, None)
    x = torch.randn(4, 20000, device="cuda")
    top_k(x, 5)
    buffer = utils._cache_buf[key]
    top_k(x, 50, deterministic=True)
    assert utils._cache_buf[key] is buffer
