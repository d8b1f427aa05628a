# SPDX-License-Identifier: Apache-2.0
"""The native attention modules with every feature, against the reference."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from .inputs import Batch
from .native import Native
from .reference import Attention, Result

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}

MIXED = ([1, 37, 0, 80, 5], [70, 37, 9, 333, 0])


def check(native: Native, got: Result) -> None:
    o, lse = native.batch.expected(native.what)
    tolerance = TOLERANCE[native.o.dtype]
    torch.testing.assert_close(got[0], o, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(got[1], lse, rtol=2e-3, atol=2e-3)


def places(length: int) -> torch.Tensor:
    """Return token positions in items of 1, 2, 3, ... tokens with delimiters before them."""
    values = itertools.chain.from_iterable(range(n) for n in range(1, length))
    return torch.tensor(list(itertools.islice(values, length)))


FEATURES = {
    "plain": Attention(),
    "causal": Attention(causal=True),
    "window": Attention(window_left=20),
    "causal_window": Attention(causal=True, window_left=11),
    "sm_scale": Attention(sm_scale=0.3),
    "soft_cap": Attention(causal=True, logits_soft_cap=2.0),
    "alibi": Attention(alibi=True),
    "alibi_soft_cap": Attention(alibi=True, logits_soft_cap=30.0),
    "rope": Attention(causal=True, rope=True, rope_scale=2.0, rope_theta=1e3),
    "items": Attention(prefix_len=10, token_pos=places(400)),
    "items_window": Attention(prefix_len=10, token_pos=places(400), window_left=30),
}


@pytest.mark.parametrize("page_size", [0, 1, 16])
@pytest.mark.parametrize("feature", FEATURES)
def test_prefill(device: str, feature: str, page_size: int) -> None:
    native = Native(Batch(*MIXED, device=device), FEATURES[feature], layout="HND" if page_size else "NHD")
    check(native, native.prefill(page_size))


@pytest.mark.parametrize("page_size", [0, 5])
@pytest.mark.parametrize("window_left", [-1, 100])
def test_custom_mask(device: str, page_size: int, window_left: int) -> None:
    mask = torch.rand(80, 333) < 0.5
    batch = Batch(*MIXED, num_qo_heads=6, device=device)
    native = Native(batch, Attention(mask=mask, window_left=window_left))
    each = [native.what.with_(mask=mask[:n, :m]) for n, m in zip(batch.qo_lens, batch.kv_lens, strict=True)]
    o, lse = native.prefill(page_size)
    expected = batch.expected(each)
    torch.testing.assert_close(o, expected[0], rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(lse, expected[1], rtol=2e-3, atol=2e-3)


KINDS = {
    "bf16": Batch([1, 37, 0, 80, 5], [70, 37, 9, 333, 0], dtype=torch.bfloat16),
    "bf16_192_128": Batch([40, 3], [90, 70], 5, 1, 192, 128, torch.bfloat16),
    "fp16_48_112": Batch([40, 3], [90, 70], 5, 1, 48, 112),
    "e4m3": Batch([1, 37, 80], [70, 37, 333], kv_dtype=torch.float8_e4m3fn),
    "e5m2": Batch([1, 37, 80], [70, 37, 333], dtype=torch.bfloat16, kv_dtype=torch.float8_e5m2),
    "nvfp4": Batch([1, 37, 80], [70, 37, 333], kv_dtype=torch.uint8),
    "fp32_256": Batch([1, 37, 80], [70, 37, 333], 2, 2, 256, dtype=torch.float32),
}


#: Modules whose element type and head dimensions two others of this file or of matrix.py have.
REPEATED = ("bf16_192_128", "fp32_256")


@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.full if k in REPEATED else ()) for k in KINDS])
@pytest.mark.parametrize("page_size", [0, 3])
def test_prefill_kinds(device: str, kind: str, page_size: int) -> None:
    if device != "cpu" and KINDS[kind].dtype == torch.float32:
        pytest.skip("16-bit queries on CUDA")
    native = Native(replace(KINDS[kind], device=device), Attention(causal=True))
    check(native, native.prefill(page_size))


@pytest.mark.parametrize("feature", ["plain", "window", "soft_cap", "rope"])
@pytest.mark.parametrize("with_lens", [True, False])
def test_decode(device: str, feature: str, with_lens: bool) -> None:
    batch = Batch([1] * 6, [1, 700, 0, 33, 16, 1030], num_qo_heads=8, device=device)
    native = Native(batch, FEATURES[feature].with_(causal=False))
    check(native, native.decode(16, with_lens=with_lens, form="separate"))


@pytest.mark.parametrize("heads", [(1, 1), (24, 1), (7, 7)])
def test_decode_heads(device: str, heads: tuple[int, int]) -> None:
    native = Native(Batch([1] * 3, [5, 64, 300], *heads, device=device), layout="HND")
    check(native, native.decode(1, form="combined"))


@pytest.mark.parametrize("kv_dtype", [torch.uint8, torch.float16])
def test_decode_several_tokens(device: str, kv_dtype: torch.dtype) -> None:
    batch = Batch([5] * 3, [5, 77, 300], kv_dtype=kv_dtype, device=device)
    native = Native(batch, Attention(causal=True, window_left=50))
    check(native, native.decode(4, q_len=5))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("kv_len", [0, 1, 1000, 4000])
def test_single_decode(device: str, kv_len: int, layout: str) -> None:
    native = Native(Batch([1], [kv_len], device=device), Attention(window_left=900), layout=layout)
    check(native, native.single_decode())


@pytest.mark.parametrize("feature", ["causal", "window", "rope", "items_window"])
def test_single_prefill(device: str, feature: str) -> None:
    native = Native(Batch([70], [400], device=device), FEATURES[feature], layout="HND")
    check(native, native.single_prefill())


@pytest.mark.parametrize("lengths", [(3, 2000), (200, 100), (0, 7), (7, 0)])
def test_single_prefill_shapes(device: str, lengths: tuple[int, int]) -> None:
    native = Native(Batch([lengths[0]], [lengths[1]], device=device), Attention(causal=True))
    check(native, native.single_prefill())


def test_single_prefill_custom_mask(device: str) -> None:
    native = Native(Batch([33], [129], device=device), Attention(mask=torch.rand(33, 129) < 0.3))
    check(native, native.single_prefill())


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("split", [{"fixed_split": 64}, {"disable_split": True}, {}])
def test_results_do_not_depend_on_the_batch(device: str, split: dict[str, Any], graph: bool) -> None:
    """Check that results do not depend on the batch: to the bit with fixed splits or none, otherwise to rounding."""
    whole = Batch([1, 70, 9], [500, 300, 77], device=device)
    native = Native(whole, Attention(causal=True), graph=graph, **split)
    o, lse = native.prefill(0)
    check(native, (o, lse))
    rows, keys = slice(1, 71), slice(500, 800)
    part = Batch([70], [300], device=device)
    part.q, part.k, part.v = whole.q[rows], whole.k[keys], whole.v[keys]
    alone = Native(part, Attention(causal=True), **split).prefill(0)
    if split:
        assert torch.equal(alone[0], o[rows]) and torch.equal(alone[1], lse[rows])


def test_fully_masked_rows(device: str) -> None:
    native = Native(Batch([20], [8], device=device), Attention(causal=True))
    o, lse = native.prefill(0)
    assert (o[:12] == 0).all() and (lse[:12] == -math.inf).all() and lse[12:].isfinite().all()


def test_small_workspaces(device: str) -> None:
    native = Native(Batch([1] * 4, [4000] * 4, device=device))
    native.int_ws = native.int_ws[:64]
    with pytest.raises(ValueError, match=r"int_workspace_buffer must have at least \d+ bytes.*, got 64"):
        native.decode(16)
