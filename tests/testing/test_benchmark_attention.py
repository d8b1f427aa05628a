# SPDX-License-Identifier: Apache-2.0
"""Attention benchmarks: the baseline results, and the backends of other packages."""

import sys

import torch
from torch.nn.functional import scaled_dot_product_attention

from .benchmark_path import BENCHMARKS  # noqa: F401  isort: skip
import attention_inputs
import bench_decode


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
