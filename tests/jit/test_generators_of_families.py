# SPDX-License-Identifier: Apache-2.0
"""Generators as attributes of the families that use them, and the module of ``xqa``."""

from __future__ import annotations

import importlib

import pytest
import torch

import flashinfer
from flashinfer.attention import modules
from flashinfer.jit.attention import customize
from flashinfer.jit.xqa import gen_xqa_module

BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
FAMILIES = {
    "gen_single_decode_module": "decode",
    "gen_batch_decode_module": "decode",
    "gen_single_prefill_module": "prefill",
    "gen_batch_prefill_module": "prefill",
    "gen_batch_attention_module": "attention",
}


@pytest.mark.parametrize("name", FAMILIES)
def test_generators_are_attributes_of_families(name):
    family = importlib.import_module(f"flashinfer.{FAMILIES[name]}")
    assert getattr(family, name) is getattr(flashinfer.jit.attention, name)


@pytest.mark.parametrize("name", [name for name in FAMILIES if FAMILIES[name] != "attention"])
def test_a_replaced_generator_is_used(name, monkeypatch):
    class Spec:
        def build_and_load(self):
            return "loaded"

    monkeypatch.setattr(f"flashinfer.{FAMILIES[name]}.{name}", lambda *args, **kwargs: Spec())
    get_module = getattr(modules, name.replace("gen_", "get_"))
    assert get_module.__wrapped__("fa2") == "loaded"  # bypasses the cache


def test_customised_generators_are_where_published_code_looks():
    names = [name for name in customize.__all__ if name.startswith("gen_customize")]
    assert len(names) == 7
    for name in names:
        assert getattr(flashinfer.jit.attention.modules, name) is getattr(customize, name)
    assert flashinfer.jit.attention.modules.jit_env is flashinfer.jit.env
    with pytest.raises(AttributeError, match="has no attribute 'gen_customize_nothing'"):
        _ = flashinfer.jit.attention.modules.gen_customize_nothing


def test_module_of_xqa():
    one = gen_xqa_module(BF16, E4M3, 16, 128, 8, False, BF16, device="cpu")
    decode = (BF16, E4M3, BF16, torch.int32, 128, 128, 0, False, False)
    assert one.name == flashinfer.jit.attention.gen_batch_decode_module(*decode, device="cpu").name
    assert gen_xqa_module(BF16, E4M3, 64, 128, 4, True, E4M3, device="cpu").name == one.name
    drafts = gen_xqa_module(FP16, FP16, 16, 128, 8, False, FP16, 4, True, device="cpu")
    assert drafts.name.startswith("batch_prefill_drafts_")


@pytest.mark.parametrize(
    "change, text",
    [
        ({"input_dtype": torch.float32}, "input_dtype must be .* got torch.float32"),
        ({"kv_cache_dtype": torch.uint8}, "kv_cache_dtype must be .* got torch.uint8"),
        ({"output_dtype": FP16}, "output_dtype must be .* got torch.float16"),
        ({"page_size": 8}, "page_size must be .* got 8"),
        ({"head_dim": 120}, "head_dim must be .* got 120"),
        ({"head_group_ratio": 0}, "head_group_ratio and q_seq_len must be at least 1, got 0"),
        ({"head_dim": 512, "q_seq_len": 2}, "q_seq_len must be 1 .* got 2 and 8 for 512"),
    ],
)
def test_combinations_without_a_module(change, text):
    good = {
        "input_dtype": BF16, "kv_cache_dtype": BF16, "page_size": 16, "head_dim": 128, "head_group_ratio": 8,
        "use_sliding_window": False, "output_dtype": BF16,
    }  # fmt: skip
    with pytest.raises(ValueError, match=f"gen_xqa_module: {text}"):
        gen_xqa_module(**good | change, device="cpu")
