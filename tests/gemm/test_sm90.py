# SPDX-License-Identifier: Apache-2.0
"""The choice of the kernels for SM90 (no GPU needed), and calls on several streams and in graphs."""

from __future__ import annotations

import pytest
import torch

from flashinfer.gemm.launch import MASKED, product, sm90_kind

from ..graphs import capture
from ..hopper.devices import needs_hopper
from .references import BF16, E4M3, E5M2, FP16, FP32, SUM_OF_13_BITS, block_scales, check, dequantized, operand


@pytest.mark.parametrize(
    "dtype, granularity, kind",
    [
        (BF16, None, "bf16"),
        (E4M3, None, "fp8"),
        (E4M3, (1, 128, 128), "fp8_block"),
        (E4M3, (1, 1, 128), "fp8_block"),
        (E4M3, (128, 128, 128), None),
        (BF16, (1, 128, 128), None),
        (FP16, None, "fp16"),
        (FP16, (1, 128, 128), None),
        (E5M2, None, None),
    ],
)
def test_module_of_a_product(dtype, granularity, kind):
    assert sm90_kind(dtype, granularity, 1.0, 0.0) == kind
    assert sm90_kind(dtype, granularity, 0.5, 0.0) is None
    assert sm90_kind(dtype, granularity, 1.0, 1.0) is None


@needs_hopper
@pytest.mark.parametrize("out_dtype, weights", [(FP32, E4M3), (BF16, E5M2)])
def test_dtypes_of_the_general_kernel(out_dtype, weights):
    """Check products that the SM90 module leaves to the general kernel."""
    a, b = operand(8, 256, dtype=E4M3, device="cuda"), operand(64, 256, dtype=weights, device="cuda")
    out = torch.empty(8, 64, dtype=out_dtype, device="cuda")
    product(out, a, b)
    check(out, a.double(), b.double())


def small_product() -> tuple[torch.Tensor, torch.Tensor]:
    """Operands whose K is split among blocks."""
    return operand(8, 7168, dtype=BF16, device="cuda"), operand(512, 7168, dtype=BF16, device="cuda")


@needs_hopper
def test_calls_on_two_streams():
    a, b = small_product()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    outs = [torch.empty(8, 512, dtype=BF16, device="cuda") for _ in range(20)]
    torch.cuda.synchronize()
    for i, out in enumerate(outs):
        with torch.cuda.stream(streams[i % 2]):
            product(out, a, b)
    torch.cuda.synchronize()
    check(outs[0], a.double(), b.double())
    assert all(out.equal(outs[0]) for out in outs)


@needs_hopper
def test_graphs_replayed_at_the_same_time():
    a, b = small_product()
    graphs = []
    for _ in range(2):
        outs = [torch.empty(8, 512, dtype=BF16, device="cuda") for _ in range(5)]
        graph, _ = capture(lambda outs=outs: [product(out, a, b) for out in outs])
        graphs.append((graph, outs, torch.cuda.Stream()))
    for _ in range(10):
        for graph, outs, stream in graphs:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for out in outs:
                    out.fill_(torch.nan)
                graph.replay()
        torch.cuda.synchronize()
        for _, outs, _ in graphs:
            check(outs[0], a.double(), b.double())
            assert all(out.equal(graphs[0][1][0]) for out in outs)


@needs_hopper
@pytest.mark.parametrize("expected_m", [1, 16, 512])
def test_expected_rows_do_not_change_results(expected_m):
    counts = [0, 5, 512, 77]
    a, b = operand(4, 512, 1024, dtype=E4M3, device="cuda"), operand(4, 256, 1024, dtype=E4M3, device="cuda")
    a_scale, b_scale = block_scales(a, 1, 128), block_scales(b, 128, 128)
    out = torch.full((4, 512, 256), torch.nan, dtype=BF16, device="cuda")
    groups = torch.tensor(counts, dtype=torch.int32, device="cuda")
    blocks = {"a_scale": a_scale, "b_scale": b_scale, "granularity": (1, 128, 128)}
    product(out, a, b, **blocks, groups=groups, grouping=MASKED, expected_m=expected_m)
    tokens, weights = dequantized(a, a_scale, 1, 128), dequantized(b, b_scale, 128, 128)
    for i, count in enumerate(counts):
        check(out[i, :count], tokens[i, :count], weights[i], sum_error=SUM_OF_13_BITS)
