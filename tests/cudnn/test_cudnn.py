# SPDX-License-Identifier: Apache-2.0
"""Calls of cuDNN, tested with a fake frontend that only records the requests."""

from __future__ import annotations

import importlib.util
import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer._runtime.errors import ArgumentError, LibraryError
from flashinfer.cudnn import cudnn_batch_decode_with_kv_cache, cudnn_batch_prefill_with_kv_cache, graph

from ..attention.inputs import Batch
from ..attention.reference import Attention

HAS_CUDNN = importlib.util.find_spec("cudnn") is not None and torch.cuda.is_available()
BATCH, HEADS, KV_HEADS, DIM, PAGE = 3, 4, 2, 64, 16


class FakeTensor:
    def __init__(self, **description: Any) -> None:
        self.description, self.offset = description, None

    def set_ragged_offset(self, offset: Any) -> None:
        self.offset = offset

    def __getattr__(self, name: str) -> Any:
        assert name in ("set_output", "set_dim", "set_stride", "set_data_type")

        def setter(value: Any) -> FakeTensor:
            self.description[name.removeprefix("set_")] = value
            return self

        return setter


class FakeGraph:
    def __init__(self, **options: Any) -> None:
        self.options, self.steps = options, []

    def tensor(self, **description: Any) -> FakeTensor:
        return FakeTensor(**description)

    def sdpa(self, **arguments: Any) -> tuple[FakeTensor, FakeTensor]:
        self.arguments = arguments
        return FakeTensor(), FakeTensor()

    def get_workspace_size(self) -> int:
        return 1024

    def execute(self, tensors: dict, workspace: torch.Tensor, handle: Any) -> None:
        self.executed = {key.description.get("name", "result"): value for key, value in tensors.items()}
        FAKES.append(self)

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self.steps.append(name)


FAKES: list[FakeGraph] = []


@pytest.fixture
def fake_frontend(monkeypatch):
    names = ("HALF", "BFLOAT16", "FLOAT", "INT32", "INT64")
    fake = SimpleNamespace(
        data_type=SimpleNamespace(**{name: name for name in names}),
        heur_mode=SimpleNamespace(A=0, FALLBACK=1),
        pygraph=FakeGraph,
        set_stream=lambda **_: None,
    )
    monkeypatch.setitem(sys.modules, "cudnn", fake)
    monkeypatch.setattr(graph, "_handle", lambda device: "handle")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    graph._build.cache_clear()
    FAKES.clear()
    yield FAKES
    graph._build.cache_clear()


@pytest.fixture
def pretend_cuda(monkeypatch):
    """Accept CPU tensors as GPU tensors: nothing is computed here."""
    monkeypatch.setattr(graph, "_expect_cuda", lambda op, device: 0)


def half(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float16)


def workspace() -> torch.Tensor:
    return torch.empty(1024, dtype=torch.uint8)


def test_decode_graph(fake_frontend, pretend_cuda):
    q, cache, table = half(BATCH, HEADS, DIM), half(20, KV_HEADS, PAGE, DIM), torch.zeros(BATCH, 5, dtype=torch.int32)
    lengths = torch.ones(BATCH, 1, 1, 1, dtype=torch.int32)
    options = {"max_sequence_kv": 80, "actual_seq_lens_kv": lengths, "block_tables": table}
    for _ in range(2):
        out = cudnn_batch_decode_with_kv_cache(q, cache, cache, 0.125, workspace(), **options)
    assert out.shape == q.shape
    first, second = fake_frontend
    assert first is second  # built once
    assert first.steps == [
        "validate",
        "build_operation_graph",
        "create_execution_plans",
        "check_support",
        "build_plans",
    ]
    asked = first.arguments
    assert asked["q"].description["dim"] == [BATCH, HEADS, 1, DIM]
    assert asked["k"].description["dim"] == [20, KV_HEADS, PAGE, DIM]
    assert asked["paged_attention_k_table"].description["dim"] == [BATCH, 1, 5, 1]
    assert asked["paged_attention_max_seq_len_kv"] == 80 and asked["attn_scale"] == 0.125
    assert asked["is_inference"] and not asked["use_causal_mask_bottom_right"] and asked["use_padding_mask"]
    assert first.executed["q"] is q and first.executed["result"] is out


@pytest.mark.parametrize("paged", [False, True])
def test_prefill_graph(fake_frontend, pretend_cuda, paged):
    q = half(30, HEADS, DIM)
    cache = half(20, KV_HEADS, PAGE, DIM) if paged else half(70, KV_HEADS, DIM)
    lengths = [torch.full((BATCH, 1, 1, 1), n, dtype=torch.int32) for n in (10, 20)]
    table = torch.zeros(BATCH, 5, dtype=torch.int32) if paged else None
    out, lse = cudnn_batch_prefill_with_kv_cache(
        q, cache, cache, 0.125, workspace(), max_token_per_sequence=16, max_sequence_kv=64, block_tables=table,
        actual_seq_lens_q=lengths[0], actual_seq_lens_kv=lengths[1], causal=True, return_lse=True,
    )  # fmt: skip
    asked, executed = fake_frontend[0].arguments, fake_frontend[0].executed
    assert out.shape == q.shape and lse.shape == (BATCH, 16, HEADS)
    assert asked["q"].description["dim"] == [BATCH, HEADS, 16, DIM]
    assert asked["q"].description["stride"] == [16 * HEADS * DIM, DIM, HEADS * DIM, 1]
    assert executed["offsets_q"].flatten().tolist() == [0, 10 * 256, 20 * 256, 30 * 256]
    assert asked["use_causal_mask_bottom_right"] and not asked["is_inference"]
    assert ("paged_attention_k_table" in asked) == paged
    if not paged:
        assert asked["k"].description["dim"] == [BATCH, KV_HEADS, 64, DIM]
        assert executed["offsets_k"].flatten().tolist() == [0, 20 * 128, 40 * 128, 60 * 128]


def test_offsets_in_tokens(fake_frontend, pretend_cuda):
    q, kv = half(30, HEADS, DIM), half(70, KV_HEADS, DIM)
    lengths = torch.full((BATCH, 1, 1, 1), 10, dtype=torch.int32)
    offsets = torch.tensor([0, 10, 20, 30])
    cudnn_batch_prefill_with_kv_cache(
        q, kv, kv, 1.0, workspace(), max_token_per_sequence=16, max_sequence_kv=64, actual_seq_lens_q=lengths,
        actual_seq_lens_kv=lengths, causal=False, return_lse=False, batch_offsets_q=offsets,
        batch_offsets_units="tokens",
    )  # fmt: skip
    assert fake_frontend[0].executed["offsets_q"].flatten().tolist() == [0, 2560, 5120, 7680]


def test_decode_without_the_package(monkeypatch, device):
    monkeypatch.setitem(sys.modules, "cudnn", None)
    batch = Batch([1] * 3, [5, 64, 33], device=device)
    pages = batch.pages(PAGE)
    k, v = batch.cache(pages, "HND")
    options = {"actual_seq_lens_kv": pages.lens.view(-1, 1, 1, 1), "block_tables": pages.block_tables()}
    scratch = torch.empty(32 << 20, dtype=torch.uint8, device=device)
    out = cudnn_batch_decode_with_kv_cache(batch.q, k, v, 0.2, scratch, max_sequence_kv=64, **options)
    torch.testing.assert_close(out.float(), batch.expected(Attention(sm_scale=0.2))[0], rtol=2e-3, atol=2e-3)
    with pytest.raises(LibraryError, match="nvidia-cudnn-frontend must be installed"):
        graph.frontend("op")


@pytest.mark.parametrize("paged", [False, True])
def test_prefill_without_the_package(monkeypatch, device, paged):
    """Check rows with gaps between requests, contiguous or paged keys, and both bases of scores."""
    monkeypatch.setitem(sys.modules, "cudnn", None)
    batch = Batch([7, 1, 20], [9, 33, 20], device=device)
    pages = batch.pages(PAGE)
    lens = [torch.tensor(x, dtype=torch.int32, device=device) for x in (batch.qo_lens, batch.kv_lens)]
    options = {"max_token_per_sequence": 20, "max_sequence_kv": 33, "causal": True, "batch_offsets_units": "tokens"}
    options |= dict(zip(("actual_seq_lens_q", "actual_seq_lens_kv"), lens, strict=True))
    begins = torch.tensor([2, 9, 12, 32], dtype=torch.int32, device=device)
    rows = torch.tensor([*range(2, 10), *range(12, 32)], device=device)
    q = torch.full((32, HEADS, DIM), torch.nan, device=device).half()
    q[rows] = batch.q
    kv = batch.cache(pages, "HND") if paged else batch.dense()
    options |= {"block_tables": pages.block_tables() if paged else None, "batch_offsets_q": begins}
    scratch = torch.empty(32 << 20, dtype=torch.uint8, device=device)
    what = Attention(causal=True, sm_scale=0.2)
    out, scores = cudnn_batch_prefill_with_kv_cache(
        q, *kv, 0.2, scratch, return_lse=True, batch_offsets_o=begins, **options
    )
    expected, lse = batch.expected(what)
    torch.testing.assert_close(out[rows].float(), expected, rtol=2e-3, atol=2e-3)
    assert scores.shape == (3, 20, HEADS)
    flat = torch.cat([scores[i, :n] for i, n in enumerate(batch.qo_lens)])
    torch.testing.assert_close(flat, lse, rtol=2e-3, atol=2e-3)
    given = torch.empty(28, HEADS, device=device)
    out, none = cudnn_batch_prefill_with_kv_cache(
        q, *kv, 0.2, scratch, return_lse=False, lse=given, lse_base="ln", **options
    )
    assert none is None
    torch.testing.assert_close(given, flat * math.log(2))
    torch.testing.assert_close(out[:28].float(), expected, rtol=2e-3, atol=2e-3)
    with pytest.raises(ValueError, match="lse_base must be 'log2' or 'ln'"):
        cudnn_batch_prefill_with_kv_cache(q, *kv, 0.2, scratch, return_lse=True, lse_base="log10", **options)


def test_decode_of_a_few_tokens_with_lse_window_and_sinks(device):
    """Our own kernels run for arguments that the graph of one token does not have."""
    batch = Batch([2, 2], [9, 33], device=device)
    pages = batch.pages(PAGE)
    k, v = batch.cache(pages, "HND")
    sinks = torch.linspace(-1, 3, HEADS, device=device)
    scratch = torch.empty(32 << 20, dtype=torch.uint8, device=device)
    lens = torch.tensor(batch.kv_lens, dtype=torch.int32, device=device)
    options = {"max_sequence_kv": 33, "actual_seq_lens_kv": lens, "block_tables": pages.block_tables()}
    result = cudnn_batch_decode_with_kv_cache(
        batch.q, k, v, 0.2, scratch, q_len_per_req=2, return_lse=True, window_left=7, sinks=sinks, **options
    )
    what = Attention(causal=True, sm_scale=0.2, window_left=7, sinks=sinks)
    for found, expected in zip(result, batch.expected(what), strict=True):
        torch.testing.assert_close(found.float(), expected, rtol=2e-3, atol=2e-3)
    lse = torch.empty_like(result[1])
    out = cudnn_batch_decode_with_kv_cache(
        batch.q, k, v, 0.2, scratch, q_len_per_req=2, lse=lse, window_left=7, sinks=sinks, **options
    )
    assert torch.equal(out, result[0]) and torch.equal(lse, result[1])
    with pytest.raises(ValueError, match="q must have 6 rows"):
        cudnn_batch_decode_with_kv_cache(batch.q, k, v, 0.2, scratch, q_len_per_req=3, **options)


def test_callers_can_ask_for_the_package():
    expected = importlib.util.find_spec("cudnn") is not None
    assert flashinfer.cudnn.decode.CUDNN_AVAILABLE is flashinfer.cudnn.prefill.CUDNN_AVAILABLE is expected


def test_bad_arguments(fake_frontend):
    q, cache = half(BATCH, HEADS, DIM), half(20, KV_HEADS, PAGE, DIM)
    table, lengths = torch.zeros(BATCH, 5, dtype=torch.int32), torch.ones(BATCH, dtype=torch.int32)
    with pytest.raises(ArgumentError, match="q and k_cache must have 3 and 4 dimensions, got 2 and 4"):
        cudnn_batch_decode_with_kv_cache(q[0], cache, cache, 1.0, workspace(), max_sequence_kv=1)
    with pytest.raises(ArgumentError, match="block_tables or actual_seq_lens_kv must be tensors, got None"):
        cudnn_batch_decode_with_kv_cache(q, cache, cache, 1.0, workspace(), max_sequence_kv=1)
    options = {"max_sequence_kv": 80, "actual_seq_lens_kv": lengths, "block_tables": table}
    with pytest.raises(ArgumentError, match="q must be on a CUDA device"):
        cudnn_batch_decode_with_kv_cache(q, cache, cache, 1.0, workspace(), **options)


@pytest.mark.skipif(not HAS_CUDNN, reason="needs a GPU and cuDNN's frontend")
def test_decode_by_cudnn():
    torch.manual_seed(0)
    q = torch.randn(BATCH, HEADS, DIM, device="cuda").half()
    k, v = torch.randn(2, BATCH * 4, KV_HEADS, PAGE, DIM, device="cuda").half()
    table = torch.arange(BATCH * 4, device="cuda", dtype=torch.int32).view(BATCH, 4)
    lengths = torch.tensor([5, 64, 33], device="cuda", dtype=torch.int32)
    scratch = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    options = {"max_sequence_kv": 64, "actual_seq_lens_kv": lengths.view(-1, 1, 1, 1), "block_tables": table}
    out = cudnn_batch_decode_with_kv_cache(q, k, v, 0.125, scratch, **options)
    decode = flashinfer.decode.xqa_batch_decode_with_kv_cache
    expected = decode(q, (k, v), scratch, table, lengths, 64, 0.125, kv_layout="HND")
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)


def test_requests_are_found_by_offsets():
    """Check the probe that published tests call before they pass lengths without offsets."""
    assert not flashinfer.cudnn.prefill._cudnn_supports_direct_seqlens(torch.bfloat16, mixed=True)
