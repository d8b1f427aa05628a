# SPDX-License-Identifier: Apache-2.0
"""Trace definitions of the cuDNN calls. Their references agree with our own kernels, which run without a GPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer.cudnn import cudnn_batch_decode_with_kv_cache, cudnn_batch_prefill_with_kv_cache

from ..attention.definitions import run_definition
from ..attention.inputs import Batch, int32
from ..attention.tables import Tables, close, workspace

QO_LENS, KV_LENS, PAGE = [17, 1, 40], [33, 9, 97], 16


def lengths(values: list[int]) -> torch.Tensor:
    return int32(values, "cpu").view(-1, 1, 1, 1)


def test_decode():
    call = Tables("cpu", "HND")
    k, v = call.cache.unbind(1)
    inputs = {"q": call.batch.q, "k_cache": k, "v_cache": v, "scale": 0.2, "block_tables": call.tables}
    inputs["actual_seq_lens_kv"] = lengths(call.batch.kv_lens)
    inputs["max_sequence_kv"] = 130
    made = cudnn_batch_decode_with_kv_cache.fi_trace(**inputs, workspace_buffer=call.workspace)
    assert made["name"] == "cudnn_batch_decode_lengths_h4_kv2_d64_ps16"
    expected = run_definition(made, inputs)
    close(flashinfer.decode.trtllm_batch_decode_with_kv_cache(*call.decode, bmm1_scale=0.2), [expected.float()])


def test_decode_without_lengths():
    """Check the published definition: every request has ``max_sequence_kv`` keys."""
    call = Tables("cpu", "HND", kv_lens=[70] * 3)
    k, v = call.cache.unbind(1)
    inputs = {"q": call.batch.q, "k_cache": k, "v_cache": v, "scale": 0.2, "block_tables": call.tables}
    inputs |= {"max_sequence_kv": 70, "workspace_buffer": call.workspace}
    made = cudnn_batch_decode_with_kv_cache.fi_trace(**inputs)
    assert made["name"] == "cudnn_batch_decode_h4_kv2_d64_ps16"
    expected = run_definition(made, inputs)
    close(flashinfer.decode.trtllm_batch_decode_with_kv_cache(*call.decode, bmm1_scale=0.2), [expected.float()])


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_prefill(paged, return_lse, causal):
    batch = Batch(QO_LENS, KV_LENS)
    pages = batch.pages(PAGE)
    inputs: dict[str, Any] = {"q": batch.q, "k_cache": batch.k, "v_cache": batch.v, "scale": 0.2, "causal": causal}
    if paged:
        k, v = batch.cache(pages, "HND", "combined").unbind(1)
        inputs |= {"k_cache": k, "v_cache": v, "block_tables": pages.block_tables()}
    inputs |= {"actual_seq_lens_q": lengths(QO_LENS), "actual_seq_lens_kv": lengths(KV_LENS)}
    inputs["max_token_per_sequence"] = 48
    rest = {"workspace_buffer": workspace("cpu"), "max_sequence_kv": 97, "return_lse": return_lse}
    made = cudnn_batch_prefill_with_kv_cache.fi_trace(**inputs, **rest)
    assert list(made["outputs"]) == (["output", "lse"] if return_lse else ["output"])
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace("cpu"))
    wrapper.plan(batch.qo_indptr, batch.kv_indptr, 4, 2, 64, causal=causal, sm_scale=0.2)
    out, lse = wrapper.run(batch.q, batch.k, batch.v, return_lse=True)
    result = run_definition(made, inputs)
    close(out, [(result[0] if return_lse else result).float()])
    if return_lse:
        padded = torch.full((3, 48, 4), math.nan)  # unwritten entries are not compared
        for i, rows in enumerate(lse.split(QO_LENS)):
            padded[i, : len(rows)] = rows * math.log(2)
        scope: dict[str, Any] = {}
        exec(made["check"], scope)
        reference = dict(zip(("output", "lse"), result, strict=True))
        assert scope["check"](reference, {"output": result[0], "lse": padded})
        padded[1, 0, 0] += 0.5
        assert not scope["check"](reference, {"output": result[0], "lse": padded})


@pytest.mark.parametrize("return_lse", [False, True])
def test_dtype_of_the_output(return_lse):
    batch = Batch(QO_LENS, KV_LENS)
    inputs = {"q": batch.q, "k_cache": batch.k, "v_cache": batch.v, "scale": 1.0, "causal": True}
    inputs |= {"actual_seq_lens_q": lengths(QO_LENS), "actual_seq_lens_kv": lengths(KV_LENS)}
    inputs["max_token_per_sequence"] = 48
    for option, dtype in (
        ({}, torch.float16),
        ({"o_data_type": torch.bfloat16}, torch.bfloat16),
        ({"out": batch.q.float()}, torch.float32),
    ):
        made = cudnn_batch_prefill_with_kv_cache.fi_trace(**inputs, return_lse=return_lse, **option)
        assert made["outputs"]["output"]["dtype"] == str(dtype).removeprefix("torch.")
        result = run_definition(made, inputs)
        assert (result[0] if return_lse else result).dtype == dtype
