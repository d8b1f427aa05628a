# SPDX-License-Identifier: Apache-2.0
"""CUDA-only behaviour of merging: graphs, streams, large tensors."""

from __future__ import annotations

import pytest
import torch

from flashinfer.cascade import merge_state_in_place, merge_states
from flashinfer.testing import assert_close
from flashinfer.trace.templates.cascade import merge_states_trace

from ..graphs import capture
from .inputs import states

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_graph_capture():
    v, s = states(99, 5, 32, 128, dtype=torch.bfloat16, device="cuda")
    total = torch.zeros_like(v[:, 0]), torch.full_like(s[:, 0], -torch.inf)

    def step():
        merge_state_in_place(*total, *merge_states(v, s))

    graph, _ = capture(step)
    v.normal_()
    total[0].zero_()
    total[1].fill_(-torch.inf)
    graph.replay()
    assert_close(total, merge_states_trace.reference(v, s))


def test_runs_on_the_current_stream():
    v, s = states(99, 5, 32, 128, dtype=torch.bfloat16, device="cuda")
    merge_states(v, s)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # a merge on any other stream would run before the fill
        v.fill_(1.0)
        merged, _ = merge_states(v, s)
    stream.synchronize()
    assert_close(merged, torch.ones_like(merged))


def test_more_than_2_31_elements():
    v = torch.zeros(66_000, 8, 32, 128, dtype=torch.bfloat16, device="cuda")
    s = torch.randn(66_000, 8, 32, device="cuda")
    v[-4:].normal_()
    merged = merge_states(v, s)
    assert_close(tuple(x[-4:] for x in merged), merge_states_trace.reference(v[-4:], s[-4:]))
    assert not merged[0][:-4].any()
