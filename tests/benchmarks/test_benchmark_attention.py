# SPDX-License-Identifier: Apache-2.0
"""Attention benchmarks: the baseline results, and the backends of other packages."""

import sys

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from .benchmark_path import BENCHMARKS  # noqa: F401  isort: skip
import attention_inputs
import bench_decode
import flashinfer_benchmark as command
import measure


def test_the_baseline_takes_results_of_any_strides(monkeypatch):
    """Check the baseline with strides of a GPU result, which has rows before heads."""

    def with_rows_first(*args, **kwargs):
        return scaled_dot_product_attention(*args, **kwargs).transpose(1, 2).contiguous().transpose(1, 2)

    q, k, v = torch.randn(3, 4, 64), torch.randn(3, 2, 9, 64), torch.randn(3, 2, 9, 64)
    expected = attention_inputs.torch_attention(q, k, v, causal=False)
    monkeypatch.setattr(attention_inputs, "scaled_dot_product_attention", with_rows_first)
    torch.testing.assert_close(attention_inputs.torch_attention(q, k, v, causal=False), expected)


def test_decoding_by_cudnn_is_the_same_call(monkeypatch):
    """Check the cuDNN call without its package (our kernels serve it), with requests of different lengths."""
    monkeypatch.setitem(sys.modules, "cudnn", None)
    batch = attention_inputs.PagedBatch(3, 40, 2, 64, 64, 16, torch.float16, True)
    q = torch.randn(3, 4, 64).half()
    reference = bench_decode.batch_decode_trace(paged_kv_cache=(batch.k_cache, batch.v_cache)).reference
    indptr, indices, last_page_len = batch.table
    expected, _ = reference(q, batch.k_cache, batch.v_cache, indptr, indices, kv_last_page_len=last_page_len)
    got = bench_decode.by_cudnn(batch)(q, batch.k_cache, batch.v_cache)
    torch.testing.assert_close(got.float(), expected.float(), rtol=2e-3, atol=2e-3)


#: The command of the contributors' guide, on a small batch of this machine.
DECODE = """--routine BatchDecodeWithPagedKVCacheWrapper --backends fa2 cudnn --device cpu --page_size 16 --batch_size 2
    --s_kv 40 --num_qo_heads 4 --num_kv_heads 2 --head_dim_qk 64 --head_dim_vo 64 --dtype fp16 --refcheck -vv
    --num_iters 1 --dry_run_iters 1"""


@pytest.fixture
def peak(monkeypatch):
    """Set peak rates: a float16 product that measures them takes a minute where the CPU has no such instruction."""
    monkeypatch.setattr(measure.Peak, "bytes_per_sec", 1e9)
    monkeypatch.setattr(measure.Peak, "flops_per_sec", lambda self, dtype: 1e12)


def test_the_command_runs_cudnn_where_it_is_installed(peak, monkeypatch, capsys):
    """Two rows that agree with the reference. Our own kernels stand in for cuDNN, which needs a GPU."""
    monkeypatch.setitem(sys.modules, "cudnn", None)
    monkeypatch.setattr(bench_decode, "cudnn_needs", lambda q, *dtypes: "")
    assert command.main(DECODE.split()) == 0
    out = capsys.readouterr().out
    for backend in ("fa2", "cudnn"):
        assert f"[REFCHECK] {backend} agrees with the reference" in out and f"[PERF] {backend} " in out


@pytest.mark.parametrize("installed, text", [(False, "pip install nvidia-cudnn-frontend"), (True, "--device cuda")])
def test_the_command_says_what_cudnn_needs(peak, monkeypatch, capsys, installed, text):
    monkeypatch.setattr(bench_decode, "CUDNN_AVAILABLE", installed)
    assert command.main(DECODE.split()) == 0
    out = capsys.readouterr().out
    assert "backend 'cudnn' is skipped, it needs" in out and text in out and "[PERF] fa2 " in out
