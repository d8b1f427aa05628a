# SPDX-License-Identifier: Apache-2.0
"""Attention compiles for CUDA: the decode modules, and a sample of the many prefill units."""

from __future__ import annotations

import pytest
import torch

from flashinfer.jit import attention, gen_jit_spec
from flashinfer.jit.attention.front_doors import draft_decl, prompt_decl

from ..attention.sigmoid import SIGMOID
from .fatbin import compile_units
from .options import NO_SPILLS

F16, I32 = torch.float16, torch.int32
#: A tile of each size; paged and ragged; with and without masks.
UNITS = ("16_paged_masked", "64_paged", "64_ragged_masked", "128_ragged")


def sample() -> list[tuple[str, list, dict]]:
    """Return name, units and generated files of the compiled modules."""
    decode = attention.gen_batch_decode_module(F16, F16, F16, I32, 64, 64, 0, False, True, device="cuda")
    prefill = attention.gen_batch_prefill_module(
        "fa2", F16, F16, F16, I32, 128, 128, 0, False, False, False, device="cuda"
    )
    units = [source for source in prefill.sources if source.stem.partition("prefill_")[2] in UNITS]
    assert len(units) == len(UNITS)
    return [("decode", decode.sources, decode.generated), ("prefill", units, prefill.generated)]


@pytest.mark.parametrize(
    "which, target",
    [
        pytest.param(0, "9.0a", id="decode-9.0a"),
        pytest.param(0, "8.0", id="decode-8.0"),
        pytest.param(1, "9.0a", id="prefill-9.0a"),
        pytest.param(1, "8.0", id="prefill-8.0", marks=pytest.mark.full),
    ],
)
def test_units(hopper, monkeypatch, tmp_path, which, target):
    """Compile the whole decode module for Hopper, its kernels for Ampere, and a sample of prefill units."""
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", target)
    name, sources, generated = sample()[which]
    if name == "decode":  # prefill tiles of 128 rows fill the register file and spill a little
        monkeypatch.setenv("FLASHINFER_EXTRA_CUDAFLAGS", NO_SPILLS)
    if (name, target) != ("decode", "9.0a"):
        compile_units(tmp_path, [source for source in sources if source in generated], generated)
        return
    folder = next(iter(generated)).parent
    host = frozenset(source for source in sources if source not in generated)
    spec = gen_jit_spec(f"{name}_sample", sources, generated=generated, extra_include_paths=[folder], host_sources=host)
    spec.build()


@pytest.mark.parametrize("target", ["9.0a", "8.0"])
def test_pair(hopper, monkeypatch, tmp_path, target):
    """Compile a unit that fuses two work lists in one launch; on SM80, where blocks do not fit, the unit reports it."""
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", target)
    pair = attention.gen_batch_fused_module(F16, F16, F16, I32, 128, 128, 0, False)
    sources = [source for source in pair.sources if source.stem == "batch_fused_64"]
    compile_units(tmp_path, sources, pair.generated)


def test_variants_of_front_doors(hopper, tmp_path):
    """Compile one unit each: masks of draft tokens; chunks, caps, slopes and statistics of prompts; MLA."""
    types, dims = (F16, F16, F16, I32), (128, 128)
    tensors, scalars = ("maybe_sink", "draft_mask"), ("sm_scale", "draft_words")
    drafts = attention.gen_customize_batch_prefill_module(
        "fa2", "drafts", *types, *dims, tensors, ("float", "uint16_t"), scalars, ("double", "int64_t"),
        "DraftAttention", draft_decl, device="cuda",
    )  # fmt: skip
    tensors = ("maybe_sink", "maybe_alibi_slopes", "maybe_stats")
    scalars = ("sm_scale", "logits_soft_cap", "chunk_mask", "stats_scale")
    numbers = ("double", "double", "int64_t", "double")
    prompt = attention.gen_customize_batch_prefill_module(
        "fa2", "prompt", *types, *dims, tensors, ("float",) * 3, scalars, numbers,
        "PromptAttention<true, true, true, true>", prompt_decl, device="cuda",
    )  # fmt: skip
    latent = attention.gen_batch_mla_module("fa2", *types, 512, 64, False, device="cuda")
    for spec, unit in ((drafts, "16_paged_masked"), (prompt, "64_ragged_masked"), (latent, "64_paged")):
        sources = [source for source in spec.sources if source.stem.endswith(f"_{unit}")]
        assert len(sources) == 1
        compile_units(tmp_path, sources, spec.generated)


@pytest.mark.parametrize("target", ["9.0a", pytest.param("8.0", marks=pytest.mark.full)])
def test_bidirectional_ranges(hopper, monkeypatch, tmp_path, target):
    """Compile the variant that reads ranges: a tile of few rows and one of many, with windows and without masks."""
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", target)
    monkeypatch.setenv("FLASHINFER_EXTRA_CUDAFLAGS", NO_SPILLS)
    bf16 = torch.bfloat16
    spec = attention.gen_batch_prefill_bidirectional_ranges_module(
        "fa2", bf16, bf16, bf16, I32, 128, 128, device="cuda"
    )
    units = ("16_paged", "64_paged")
    sources = [source for source in spec.sources if source.stem.partition("prefill_")[2] in units]
    assert len(sources) == len(units)
    compile_units(tmp_path, sources, spec.generated)


def test_a_variant_without_softmax_or_members(hopper, tmp_path):
    """Compile a variant class without scale: tiles of few rows, as in decode, and of many."""
    types, dims = (F16, F16, F16, I32), (64, 64)
    variant = ((), (), ("factor", "bias"), ("double", "double"), "Sigmoid", SIGMOID)
    spec = attention.gen_customize_batch_prefill_module("fa2", "sigmoid", *types, *dims, *variant, device="cuda")
    units = ("16_paged_masked", "64_ragged")
    sources = [source for source in spec.sources if source.stem.partition("prefill_")[2] in units]
    assert len(sources) == len(units)
    compile_units(tmp_path, sources, spec.generated)
