# SPDX-License-Identifier: Apache-2.0
"""Identity of built-in attention modules: published names and published generators agree, because both are the key."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from flashinfer.jit import attention
from flashinfer.jit.attention.key import AttentionKey

F16, BF16, I32 = torch.float16, torch.bfloat16, torch.int32
KEY = AttentionKey("batch_prefill", F16, BF16, F16, I32, 192, 128, 2, True)


@pytest.mark.parametrize(
    "kind, published, arguments",
    [
        ("single_decode", "single_decode_with_kv_cache", (F16, BF16, F16, 192, 128, 2, False, True)),
        ("batch_decode", "batch_decode_with_kv_cache", (F16, BF16, F16, I32, 192, 128, 2, False, True)),
        ("single_prefill", "single_prefill_with_kv_cache", ("fa2", F16, BF16, F16, 192, 128, 2, False, True, False)),
        ("batch_prefill", "batch_prefill_with_kv_cache", ("fa2", F16, BF16, F16, I32, 192, 128, 2, False, True, False)),
        ("batch_fused", "batch_fused", (F16, BF16, F16, I32, 192, 128, 2, True)),
        ("batch_attention", "batch_prefill_with_kv_cache", (F16, BF16, F16, I32, 192, 128, 2, True, False)),
        ("pod", "batch_prefill_with_kv_cache", (F16, BF16, F16, 128, 2, False, True, False, I32, 0, False, False)),
        ("batch_mla", "batch_mla_attention", ("fa2", F16, BF16, F16, I32, 512, 64, False)),
    ],
)
def test_generator_and_name_agree(kind, published, arguments, monkeypatch):
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    on_device = {} if kind == "batch_fused" else {"device": "cuda"}
    spec = getattr(attention, f"gen_{kind}_module")(*arguments, **on_device)
    assert spec.name == getattr(attention, f"get_{kind}_uri")(*arguments)
    assert spec.name.startswith(f"{published}_dtype_q_f16_dtype_kv_bf16_dtype_o_f16_")


def test_name_of_a_key():
    assert KEY.uri == (
        "batch_prefill_with_kv_cache_dtype_q_f16_dtype_kv_bf16_dtype_o_f16_dtype_idx_i32_head_dim_qk_192_head_dim_vo_128"
        "_posenc_2_use_logits_cap_True"
    )


@pytest.mark.parametrize(
    "change",
    [
        {"dtype_kv": F16},
        {"head_dim_vo": 192},
        {"pos_encoding_mode": 0},
        {"use_logits_soft_cap": False},
        {"backend": "fa3"},
    ],
)
def test_modules_that_differ_have_different_names(change):
    assert dataclasses.replace(KEY, **change).uri != KEY.uri
