# SPDX-License-Identifier: Apache-2.0
"""Names that serving engines import: they always exist, and their errors tell which GPU or package is missing."""

from __future__ import annotations

import importlib
import inspect
from typing import Callable

import pytest
import torch

import flashinfer
from flashinfer._runtime.errors import BackendSupportedError

BLACKWELL = {
    "flashinfer": ["nvfp4_attention_sm120_fwd", "trtllm_sage_attention_quantize", "xqa_mla"],
    "flashinfer.activation": ["silu_and_mul_scaled_nvfp4_experts_quantize"],
    "flashinfer.decode": ["trtllm_batch_decode_with_kv_cache_mla", "prims_ts_batch_decode_with_kv_cache"],
    "flashinfer.prefill": [
        "fmha_v2_prefill_deepseek",
        "fmha_v2_prefill_sm120",
        "fmha_varlen",
        "trtllm_batch_context_with_kv_cache",
        "trtllm_ragged_attention_deepseek",
    ],
    "flashinfer.mla": [
        "trtllm_batch_decode_with_kv_cache_mla",
        "xqa_batch_decode_with_kv_cache_mla",
        "DSV4HCAMetadata",
    ],
    "flashinfer.msa_ops": ["msa_topk_select"],
    "flashinfer.nvfp4_attention_sm120": ["nvfp4_attention_sm120_quantize_qkv"],
    "flashinfer.jit": ["gen_trtllm_gen_fmha_module", "gen_cudnn_fmha_module"],
}


def required_parameters(function: Callable[..., object]) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


@pytest.mark.parametrize("module, name", [(module, name) for module, names in BLACKWELL.items() for name in names])
def test_names_without_kernels(module, name):
    function = getattr(importlib.import_module(module), name)
    assert function.__name__ == name and function.__doc__.startswith("Not available here")
    with pytest.raises(BackendSupportedError, match=f"^{name}: ") as caught:
        function(**dict.fromkeys(required_parameters(function), 1))
    assert module == "flashinfer.jit" or isinstance(caught.value, (ValueError, RuntimeError))


@pytest.mark.parametrize("module", ["decode", "prefill", "mla", "msa_ops"])
def test_other_names_are_missing(module):
    module = importlib.import_module(f"flashinfer.{module}")
    assert not hasattr(module, "no_such_name")
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        _ = module.no_such_name


def test_names_that_hide_their_modules():
    assert callable(flashinfer.xqa) and importlib.import_module("flashinfer.xqa").xqa is flashinfer.xqa
    assert flashinfer.trtllm_fmha_v2_prefill is flashinfer.prefill.trtllm_fmha_v2_prefill


def test_names_of_other_modules():
    for family, name in (
        ("decode", "cudnn_batch_decode_with_kv_cache"),
        ("prefill", "cudnn_batch_prefill_with_kv_cache"),
    ):
        module = importlib.import_module(f"flashinfer.{family}")
        assert getattr(module, name) is getattr(flashinfer.cudnn, name)
    assert flashinfer.decode.get_seq_lens is flashinfer.page.get_seq_lens  # import path of vLLM and SGLang
    legacy = flashinfer.decode.BatchDecodeMlaWithPagedKVCacheWrapper
    assert legacy is flashinfer.mla.BatchDecodeMlaWithPagedKVCacheWrapper


def test_generators_are_found_in_one_place():
    assert flashinfer.jit.gen_page_module is flashinfer.page.gen_page_module
    for name in ("cascade", "quantization", "pod", "batch_pod", "batch_attention", "batch_mla", "single_decode"):
        assert callable(getattr(flashinfer.jit, f"gen_{name}_module"))


def test_modules_behind_other_names():
    spec = flashinfer.jit.gen_fmha_v2_module("PACKED_QKV", torch.float8_e4m3fn, device="cpu")
    assert spec.name.startswith("batch_prefill") and "e4m3" in spec.name
    sizes = flashinfer.mla.MLAHeadDimensions(128, 64, 128, 512)
    assert flashinfer.mla.MLALayerDimensions(sizes, 16).head_dimensions.kv_lora_rank == 512


def test_majors_of_the_tutorial(monkeypatch):
    """Check the tutorial's MLA generator: other targets raise what the context raises, its own what is missing."""
    from flashinfer.jit import current_compilation_context as context
    from flashinfer.jit.attention import gen_mla_module

    monkeypatch.setattr(context, "TARGET_CUDA_ARCHS", {(9, "0a")})
    with pytest.raises(RuntimeError, match=r"No supported CUDA architectures found for major versions \[10, 11\]"):
        gen_mla_module()
    monkeypatch.setattr(context, "TARGET_CUDA_ARCHS", {(10, "0a")})
    with pytest.raises(BackendSupportedError, match="needs kernels for SM100"):
        gen_mla_module()
