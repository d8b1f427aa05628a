# SPDX-License-Identifier: Apache-2.0
"""Attention compiles for CUDA: the modules of decoding, and of prefill a sample of its many units."""

from __future__ import annotations

import pytest
import torch

from flashinfer.jit import attention, gen_jit_spec

from .test_cuda_compile import NO_SPILLS

F16, I32 = torch.float16, torch.int32
#: A tile of each size; pages and rows; with and without masks.
UNITS = ("16_paged_masked", "64_paged", "64_ragged_masked", "128_ragged")


def sample() -> list[tuple[str, list, dict]]:
    """Name, units and generated files of what is compiled."""
    decode = attention.gen_batch_decode_module(F16, F16, F16, I32, 64, 64, 0, False, True, device="cuda")
    prefill = attention.gen_batch_prefill_module(
        "fa2", F16, F16, F16, I32, 128, 128, 0, False, False, False, device="cuda"
    )
    units = [source for source in prefill.sources if source.stem.partition("prefill_")[2] in UNITS]
    assert len(units) == len(UNITS)
    return [("decode", decode.sources, decode.generated), ("prefill", units, prefill.generated)]


@pytest.mark.parametrize("target", ["9.0a", "8.0"])
@pytest.mark.parametrize("which", [0, 1], ids=["decode", "prefill"])
def test_units(hopper, monkeypatch, target, which):
    """Units need no launcher to link; the decode module is whole."""
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", target)
    name, sources, generated = sample()[which]
    if name == "decode":  # tiles of 128 rows fill the register file, and a little goes to local memory
        monkeypatch.setenv("FLASHINFER_EXTRA_CUDAFLAGS", NO_SPILLS)
    folder = next(iter(generated)).parent
    host = frozenset(source for source in sources if source not in generated)
    spec = gen_jit_spec(f"{name}_sample", sources, generated=generated, extra_include_paths=[folder], host_sources=host)
    spec.build()
