# SPDX-License-Identifier: Apache-2.0
"""FLASHINFER_CPU_BACKENDS=any: programs that name a backend of Hopper run on CPU tensors."""

from __future__ import annotations

import pytest
import torch

import flashinfer
from flashinfer._runtime.knobs import knobs

from ..attention.inputs import int32
from ..mla.latent import BF16, CKV, F16, KPE, Latent, close

WORKSPACE = 32 << 20


def prefill(backend: str) -> torch.Tensor:
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(torch.empty(WORKSPACE, dtype=torch.uint8), backend=backend)
    tables = (int32([0, 5], "cpu"), int32([0, 1], "cpu"), int32([0], "cpu"), int32([7], "cpu"))
    wrapper.plan(*tables, 4, 2, 64, 16, causal=True)
    g = torch.Generator().manual_seed(0)
    q, cache = torch.randn(5, 4, 64, generator=g).half(), torch.randn(1, 2, 16, 2, 64, generator=g).half()
    return wrapper.run(q, cache)


def test_off_by_default():
    with pytest.raises(NotImplementedError, match="backend must be fa2 on cpu"):
        prefill("fa3")
    with pytest.raises(NotImplementedError, match="needs an SM90 device"):
        flashinfer.BatchMLAPagedAttentionWrapper(torch.empty(WORKSPACE, dtype=torch.uint8), backend="fa3")


def test_backends_of_hopper_by_name():
    with knobs.override(cpu_backends="any"):
        assert torch.equal(prefill("fa3"), prefill("fa2"))
        q, k = torch.randn(3, 2, 64).half(), torch.randn(9, 2, 64).half()
        named = flashinfer.single_prefill_with_kv_cache(q, k, k, causal=True, backend="fa3")
        assert torch.equal(named, flashinfer.single_prefill_with_kv_cache(q, k, k, causal=True, backend="fa2"))
        batch = Latent("cpu")
        wrapper = flashinfer.BatchMLAPagedAttentionWrapper(torch.empty(WORKSPACE, dtype=torch.uint8), backend="fa3")
        close(batch.plan(wrapper).run(*batch.arguments, return_lse=True), batch.expected())


def test_what_the_backend_lacks_on_cuda_is_refused():
    with knobs.override(cpu_backends="any"):
        wrapper = flashinfer.BatchMLAPagedAttentionWrapper(torch.empty(WORKSPACE, dtype=torch.uint8), backend="fa3")
        batch = Latent("cpu", kv_dtype=BF16)
        with pytest.raises(ValueError, match="kv_data_type must be q_data_type"):
            wrapper.plan(*batch.tables, 16, CKV, KPE, 16, False, 0.1, F16, BF16)
        with pytest.raises(NotImplementedError, match="which needs SM100"):
            prefill("trtllm-gen")
    with knobs.override(cpu_backends="all"), pytest.raises(ValueError, match="must be one of any, got 'all'"):
        prefill("fa3")
