# SPDX-License-Identifier: Apache-2.0
"""Prefill of sizes that fill a Hopper GPU, by the backend that "auto" chooses there. Other devices skip."""

from __future__ import annotations

import pytest
import torch

from flashinfer import BatchPrefillWithRaggedKVCacheWrapper
from flashinfer.prefill import single_prefill_with_kv_cache_return_lse

from . import calls
from .inputs import LAYOUTS, Batch
from .reference import Attention
from .wrappers import close

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def hopper() -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs an SM90 GPU")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("qo_len, kv_len", [(128, 128), (177, 977), (1024, 2048)])
def test_single_prefill(qo_len, kv_len, head_dim, causal, layout):
    batch = Batch([qo_len], [kv_len], 8, 2, head_dim, dtype=BF16, device="cuda")
    got = single_prefill_with_kv_cache_return_lse(batch.q, *batch.dense(layout), causal=causal, kv_layout=layout)
    close(got, batch.expected(Attention(causal=causal)), 1e-2)


@pytest.mark.parametrize("causal", [False, True])
def test_batch_ragged_prefill(causal):
    batch = Batch([512, 1, 300, 77], [512, 900, 1300, 77], 8, 2, 128, dtype=BF16, device="cuda")
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(calls.workspace("cuda"))
    wrapper.plan(batch.qo_indptr, batch.kv_indptr, 8, 2, 128, causal=causal, q_data_type=BF16)
    close(wrapper.run(batch.q, batch.k, batch.v, return_lse=True), batch.expected(Attention(causal=causal)), 1e-2)
