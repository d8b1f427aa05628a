# SPDX-License-Identifier: Apache-2.0
"""Operation and byte counts, blockwise fp8, kineto, seeds."""

import random

import numpy as np
import pytest
import torch

from flashinfer import testing
from flashinfer.testing import utils


def test_attention_flops_full():
    assert testing.attention_flops(2, 3, 5, 64, 32, 4, causal=False) == 2 * 2 * 3 * 5 * 4 * (64 + 32)


@pytest.mark.parametrize("qo, kv", [(1, 1), (1, 7), (4, 7), (7, 7)])
def test_causal_flops_count_the_visible_pairs_twice(qo, kv):
    """Check causal FLOPs: query i of qo sees kv - qo + i + 1 keys. As published, the formula omits half a diagonal."""
    pairs = sum(kv - qo + i + 1 for i in range(qo))
    assert testing.attention_flops(1, qo, kv, 1, 1, 1, causal=True) // 2 == 2 * pairs - qo


def test_causal_queries_must_fit():
    with pytest.raises(ValueError, match=r"qo_seqlen must be at most kv_seqlen = 3 \(causal\), got 4"):
        testing.attention_flops(1, 4, 3, 64, 64, 1, causal=True)


def test_ragged_counts_add_up():
    q, kv = torch.tensor([1, 3]), torch.tensor([[4], [3]])
    dims = (64, 32, 8)
    total = testing.attention_flops_with_actual_seq_lens(q, kv, *dims, True)
    assert total == testing.attention_flops(1, 1, 4, *dims, True) + testing.attention_flops(1, 3, 3, *dims, True)
    assert testing.attention_tflops_per_sec_with_actual_seq_lens(q, kv, *dims, True, 2.0) == total / 2e-3 / 1e12


def test_rates():
    assert testing.attention_tflops_per_sec(1, 1, 1, 1, 1, 1, False, 1e-9) == pytest.approx(4.0)  # 4 operations in 1 ps
    # q 2*4*64, o 2*4*32 bf16 elements; k and v 8*1*(64+32) fp8 elements; batch of 3; in 1 ms
    size = 3 * ((2 * 4 * (64 + 32)) * 2 + 8 * (64 + 32))
    rate = testing.attention_tb_per_sec(3, 2, 8, 64, 32, 4, 1, 1.0, kv_dtype=torch.float8_e4m3fn)
    assert rate == pytest.approx(size / 1e-3 / 1e12)
    assert testing.attention_tb_per_sec(1, 1, 1, 1, 1, 1, 1, 0.0) == 0.0


def test_count_bytes():
    x = torch.empty(3, dtype=torch.float16)
    assert utils.count_bytes(x, None, [x, {"a": torch.empty(2)}], 7) == 6 + 6 + 8


def test_set_seed_repeats_every_generator():
    def draw():
        testing.set_seed(11)
        return random.random(), np.random.rand(), torch.rand(1).item()

    assert draw() == draw()


@pytest.mark.parametrize("mode, shape", [("K", (8, 2)), ("MN", (2, 8))])
def test_quantize_round_trip(mode, shape):
    x = torch.randn(8, 256) * torch.logspace(-3, 3, 8)[:, None]
    values, scale = utils.quantize_fp8(x, shape, (1, 128), mode)
    assert values.dtype == torch.float8_e4m3fn and scale.shape == shape and scale.dtype == torch.float32
    assert torch.equal(scale.log2(), scale.log2().round())
    back = utils.dequantize_fp8(values, scale, mode)
    torch.testing.assert_close(back, x, rtol=0.07, atol=float(scale.max()) * 2**-9)


def test_quantize_batched_tiles():
    x = torch.randn(3, 256, 384)
    values, scale = utils.quantize_fp8(x, (3, 3, 2), (1, 128, 128), "MN")
    assert scale.shape == (3, 3, 2)
    assert (utils.dequantize_fp8(values, scale, "MN") - x).norm() / x.norm() < 0.05


def test_quantize_uses_the_whole_range_and_survives_zero():
    values, scale = utils.quantize_fp8(torch.zeros(1, 128), (1, 1), (1, 128), "K")
    assert not values.float().any() and scale.item() > 0
    values, _ = utils.quantize_fp8(torch.full((1, 128), 448.0), (1, 1), (1, 128), "K")
    assert values.float().max() == 448


@pytest.mark.parametrize(
    "shape, tile, mode, text",
    [
        ((8, 2), (1, 100), "K", "tile_shape must divide"),
        ((2, 8), (1, 128), "K", "scale_shape must be"),
        ((8, 2), (1, 128), "row", "'K' or 'MN'"),
    ],
)
def test_quantize_errors(shape, tile, mode, text):
    with pytest.raises(ValueError, match=text):
        utils.quantize_fp8(torch.ones(8, 256), shape, tile, mode)


def test_casts_pad_to_whole_blocks():
    x = torch.randn(130, 200)
    values, scale = utils.per_token_cast_to_fp8(x)
    assert values.shape == x.shape and scale.shape == (130, 2)
    values, scale = utils.per_block_cast_to_fp8(x)
    assert values.shape == x.shape and scale.shape == (2, 2)
    spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:130, :200]
    assert (values.float() * spread - x).norm() / x.norm() < 0.05


@pytest.mark.skipif(torch.cuda.is_available(), reason="names CPU operators")
def test_kineto_reports_seconds_per_call(tmp_path):
    x = torch.randn(64, 64)
    trace = tmp_path / "trace.json"
    both = utils.bench_kineto(lambda: x.mm(x).exp(), ("aten::mm", "aten::exp"), num_tests=3, trace_path=str(trace))
    assert len(both) == 2 and all(0 < t < 1 for t in both) and trace.stat().st_size > 0
    with pytest.raises(ValueError, match="must match one kernel, got 'aten::nothing'"):
        utils.bench_kineto(lambda: x.mm(x), "aten::nothing", num_tests=1, flush_l2=False)


def test_output_can_be_suppressed(capfd):
    with utils.suppress_stdout_stderr():
        print("hidden")
    with utils.empty_suppress():
        print("shown")
    assert capfd.readouterr().out == "shown\n"


def test_every_published_name_exists():
    for module in (testing, utils):
        assert all(hasattr(module, name) for name in module.__all__)
