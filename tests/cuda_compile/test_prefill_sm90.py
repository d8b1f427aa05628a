# SPDX-License-Identifier: Apache-2.0
"""The Hopper prefill kernel compiles without spills; ptxas neither serialises wgmma nor ignores setmaxnreg."""

from __future__ import annotations

import re
import subprocess

import pytest
import torch

from flashinfer._runtime.errors import BackendSupportedError
from flashinfer.compilation_context import sm90a_nvcc_flags
from flashinfer.jit import env as jit_env
from flashinfer.jit.attention import gen_batch_prefill_module, gen_customize_batch_prefill_module
from flashinfer.jit.core import JitSpec

from ..attention.sm90_form import SCALED, SCALED_PARAMETERS

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
SPILLS = r"(\d+) bytes spill stores, (\d+) bytes spill loads"


def module(
    head_dim_qk: int,
    head_dim_vo: int,
    dtype_kv: torch.dtype = BF16,
    pos_encoding_mode: int = 0,
    dtype_q: torch.dtype = BF16,
) -> JitSpec:
    types, dims = (dtype_q, dtype_kv, BF16, torch.int32), (head_dim_qk, head_dim_vo)
    return gen_batch_prefill_module("fa3", *types, *dims, pos_encoding_mode, False, False, False, device="cuda")


@pytest.mark.parametrize(
    "head_dim, unit, dtype_q, dtype_kv",
    [
        (128, "128_ragged", BF16, BF16),
        (128, "64_ragged", BF16, BF16),
        (64, "64_paged_masked", BF16, BF16),
        (256, "128_paged", BF16, BF16),
        (64, "192_ragged", BF16, E4M3),
        (128, "128_paged", BF16, E4M3),
        (128, "128_ragged", E4M3, E4M3),
        (128, "128_paged_masked", E4M3, E4M3),
        (256, "128_paged", E4M3, E4M3),
        (64, "192_paged_masked", E4M3, E4M3),
    ],
)
def test_unit(hopper, nvcc, tmp_path, head_dim, unit, dtype_q, dtype_kv):
    """Compile a unit: its kernels for TMA and for cp.async, or the one that converts keys or transposes values."""
    log = compiled(nvcc, tmp_path, head_dim, unit, dtype_q, dtype_kv)
    spills = re.findall(SPILLS, log)
    has_boxes = dtype_kv == BF16 or (dtype_q == E4M3 and head_dim == 128 and not unit.endswith("masked"))
    assert spills == [("0", "0")] * (2 if has_boxes else 1), log


def test_published_form_of_a_variant(hopper, nvcc, tmp_path):
    """Compile a variant in the form for SM90, with host code, which has no bodies of device functions."""
    types, parameters = (BF16, BF16, BF16, torch.int32, 128, 128), (*SCALED_PARAMETERS, "Scaled", SCALED)
    spec = gen_customize_batch_prefill_module("fa3", "scaled", *types, *parameters, device="cuda")
    assert re.findall(SPILLS, compiled_unit(nvcc, tmp_path, spec, "128_paged", "-c")) == [("0", "0")] * 2


def test_fused_unit(hopper, nvcc, tmp_path):
    """Compile decode and prefill in one kernel. Decode alone has more registers; a few numbers of an item spill."""
    ((stored, loaded),) = re.findall(SPILLS, compiled(nvcc, tmp_path, 128, "fused", BF16, BF16))
    assert int(stored) <= 32 and int(loaded) <= 32


def compiled(nvcc, tmp_path, head_dim: int, unit: str, dtype_q: torch.dtype, dtype_kv: torch.dtype) -> str:
    """Return what ptxas says about a unit of a built-in module."""
    return compiled_unit(nvcc, tmp_path, module(head_dim, head_dim, dtype_kv, dtype_q=dtype_q), unit)


def compiled_unit(nvcc, tmp_path, spec: JitSpec, unit: str, kind: str = "-cubin") -> str:
    for path, text in spec.generated.items():
        (tmp_path / path.name).write_text(text)
    source = tmp_path / f"batch_prefill_{unit}.cu"
    includes = [f"-I{jit_env.FLASHINFER_INCLUDE_DIR}", f"-I{tmp_path}"]
    command = [nvcc, "-std=c++17", "-O3", *sm90a_nvcc_flags, *includes, kind, "-Xptxas=-v", source]
    done = subprocess.run([*map(str, command), "-o", str(tmp_path / "unit.cubin")], capture_output=True, text=True)
    log = done.stdout + done.stderr
    assert done.returncode == 0, log
    assert "(C75" not in log, log  # C7508: setmaxnreg ignored; C7510 to C7519: wgmma serialised
    return log


def test_units(hopper):
    """The module has tiles of both forms of the Hopper kernel, and is compiled for Hopper only."""
    spec = module(64, 64)
    tiles = {path.name.split("_")[2] for path in spec.generated if path.name.endswith("ed.cu")}
    assert tiles == {"16", "64", "192"}
    assert any(path.name.endswith("_fused.cu") for path in module(128, 128).generated)
    assert spec.supported_major_versions == [9]


def test_units_of_fp8_queries(hopper):
    """All rows are in tiles of the Hopper kernel, which has the scales of each head among its parameters."""
    generated = {path.name: text for path, text in module(128, 128, E4M3, dtype_q=E4M3).generated.items()}
    assert {name.split("_")[2] for name in generated if name.endswith("ed.cu")} == {"128"}
    params = generated["attention_params.inc"]
    assert "HAS_DECODE_KERNEL = false" in params and "float* maybe_scale_v" in params


@pytest.mark.parametrize(
    "arguments, text",
    [
        ((80, 80), "head dimensions must be .* one of 64.*, got 80 and 80"),
        ((128, 128, torch.float16), "dtype_kv must be dtype_q or have 8 bits"),
        ((128, 128, BF16, 1), "a transform of keys"),
        ((128, 128, BF16, 0, E4M3), "dtype_kv must be dtype_q .*, got torch.bfloat16"),
        ((48, 64, E4M3, 0, E4M3), "head_dim_qk a multiple of 32 .* and 48"),
    ],
)
def test_refusals(hopper, arguments, text):
    with pytest.raises(BackendSupportedError, match=f"{text}.*usable here: fa2"):
        module(*arguments)


def test_another_target(hopper, monkeypatch):
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "8.0")
    with pytest.raises(BackendSupportedError, match=r"targets must have 9\.0a.*, got 8\.0"):
        module(128, 128)
