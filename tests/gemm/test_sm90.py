# SPDX-License-Identifier: Apache-2.0
"""The choice of the kernels for SM90 (no GPU needed), and calls on several streams and in graphs."""

from __future__ import annotations

from typing import Any, Optional

import pytest
import torch

from flashinfer.gemm.native import MASKED, product, sm90_serves

from ..graphs import capture
from ..hopper.devices import needs_hopper
from .references import BF16, E4M3, E5M2, FP16, FP32, SUM_OF_13_BITS, block_scales, check, dequantized, operand


def kind_of(
    a: torch.Tensor,
    b: torch.Tensor,
    out: Optional[torch.Tensor] = None,
    *,
    a_scale: Optional[torch.Tensor] = None,
    b_scale: Optional[torch.Tensor] = None,
    bias: Optional[torch.Tensor] = None,
    granularity: tuple[int, int, int] = (1, 128, 128),
    alpha: float = 1.0,
    beta: float = 0.0,
) -> Optional[str]:
    if out is None:
        out = torch.empty(*a.shape[:-1], b.shape[-2], dtype=BF16, device=a.device)
    return sm90_serves(out, a, b, a_scale, b_scale, bias, granularity, alpha, beta)


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


ONE = torch.ones(1)
#: Scales of (32, 256) tokens and (200, 256) weights, by row, by block of 128 rows and by row.
TOKEN_SCALES, BLOCK_SCALES, ROW_SCALES = torch.ones(2, 32).mT, torch.ones(2, 2), torch.ones(200, 2)

SERVED: list[tuple[torch.dtype, dict[str, Any], str]] = [
    (BF16, {}, "bf16"),
    (BF16, {"a_scale": ONE, "bias": empty(200)}, "bf16"),
    (E4M3, {}, "fp8"),
    (E4M3, {"a_scale": ONE, "b_scale": ONE}, "fp8"),
    (E4M3, {"a_scale": TOKEN_SCALES, "b_scale": BLOCK_SCALES}, "fp8_block"),
    (E4M3, {"a_scale": TOKEN_SCALES, "b_scale": ROW_SCALES, "granularity": (1, 1, 128)}, "fp8_block"),
]


@pytest.mark.parametrize("dtype, options, kind", SERVED)
@pytest.mark.parametrize("out_dtype", [BF16, FP16, FP32])
def test_served(dtype, options, kind, out_dtype):
    a, b = empty(32, 256, dtype=dtype), empty(200, 256, dtype=dtype)
    is_exact = dtype is not BF16 and out_dtype is FP32  # the tensor cores keep 13 bits of sums of 8-bit products
    assert kind_of(a, b, empty(32, 200, dtype=out_dtype), **options) == (None if is_exact else kind)


NOT_SERVED: list[tuple[torch.dtype, dict[str, Any]]] = [
    (FP16, {}),
    (FP32, {}),
    (E5M2, {}),
    (BF16, {"alpha": 0.5}),
    (BF16, {"beta": 1.0}),
    (BF16, {"bias": empty(200, dtype=FP32)}),
    (BF16, {"a_scale": TOKEN_SCALES, "b_scale": BLOCK_SCALES}),
    (E4M3, {"a_scale": TOKEN_SCALES}),
    (E4M3, {"a_scale": ONE, "b_scale": BLOCK_SCALES}),
    (E4M3, {"a_scale": torch.ones(1, 2), "b_scale": BLOCK_SCALES, "granularity": (128, 128, 128)}),
]


@pytest.mark.parametrize("dtype, options", NOT_SERVED)
def test_not_served(dtype, options):
    assert kind_of(empty(32, 256, dtype=dtype), empty(200, 256, dtype=dtype), **options) is None


def test_one_row_of_block_scales_is_served():
    """A scale of one element is a block scale where the other operand has blocks and the shape fits."""
    a, b = empty(1, 128, dtype=E4M3), empty(256, 128, dtype=E4M3)
    assert kind_of(a, b, a_scale=torch.ones(1, 1), b_scale=torch.ones(2, 1)) == "fp8_block"


LAYOUTS = [
    (empty(32, 264)[:, :256], True),  # rows at multiples of 16 bytes
    (empty(32, 260)[:, :256], False),
    (empty(256, 32).mT, False),
    (empty(1, 255), True),  # the distance between rows does not matter
    (empty(2, 255), False),
    (empty(32, 0), False),
    (torch.empty(32 * 256 + 1, dtype=BF16)[1:].view(32, 256), False),  # address
    (empty(4, 32, 256), True),
    (empty(32, 4, 256).transpose(0, 1), True),
    (empty(1, 32, 256).expand(4, 32, 256), False),
]


@pytest.mark.parametrize("x, served", LAYOUTS)
def test_layouts_of_operands(x, served):
    """As tokens, and as weights whose results are padded to rows of a multiple of 16 bytes."""
    *batch, rows, k = x.shape
    other = empty(*batch, 64, k + -k % 8 + 8)[..., :k]
    assert (kind_of(x, other) is not None) == served
    assert (kind_of(other, x, empty(*batch, 64, rows + -rows % 8)[..., :rows]) is not None) == served


@pytest.mark.parametrize("columns, served", [(64, True), (60, False)])
def test_layouts_of_results(columns, served):
    assert (kind_of(empty(32, 128), empty(columns, 128)) is not None) == served
    assert kind_of(empty(32, 128), empty(64, 128), empty(64, 32).mT) is None


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
    product(out, a, b, a_scale=a_scale, b_scale=b_scale, groups=groups, grouping=MASKED, expected_m=expected_m)
    tokens, weights = dequantized(a, a_scale, 1, 128), dequantized(b, b_scale, 128, 128)
    for i, count in enumerate(counts):
        check(out[i, :count], tokens[i, :count], weights[i], sum_error=SUM_OF_13_BITS)
