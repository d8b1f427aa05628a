# SPDX-License-Identifier: Apache-2.0
"""GEMM for SM90 compiles without spills; ptxas neither serialises wgmma nor ignores setmaxnreg. One unit per form."""

from __future__ import annotations

import re
import subprocess

import pytest

from flashinfer.compilation_context import sm90a_nvcc_flags
from flashinfer.jit import env as jit_env
from flashinfer.jit.gemm import gen_dense_gemm_sm90_module, gen_gemm_w4_sm90_module, gen_quantize_1x128_module

from .fatbin import compile_units
from .options import NO_SPILLS

UNITS = [("bf16", "tile_128x256"), ("fp8_block", "tile_256x128"), ("fp8_block", "swapped_64x128")]
UNITS += [("fp8_block", "tile_128x256"), ("fp8_block", "tile_128x192")]  # products in flight during additions
UNITS += [("fp8_block", "swapped_64x64"), ("bf16", "swapped_8x64")]  # warpgroups that share K
UNITS += [("fp8_block", "quantizing_8x64")]  # tokens quantised by producer warps
UNITS += [("fp8_block", "split_128x128"), ("fp8_block", "split_128x192")]  # K split by the blocks of a cluster
UNITS += [("fp8_block", "gather_128x256")]  # rows copied by producer warps
W4_UNITS = [("mxfp4", f"tile_{tile}") for tile in ("8x128", "16x128", "192x128", "64x256", "128x256")]
W4_UNITS += [
    ("mxfp4_fp8", "tile_16x128"),
    ("mxfp4_fp8", "tile_64x128"),
    ("int4", "tile_16x128"),
    ("int4", "tile_32x128"),
    ("int4", "tile_128x256"),
]

#: Bytes that a unit may spill: block-scaled 128 x 192 tiles keep the numbers of a warpgroup and row outside their loop.
SPILLS = {"GemmSm90<float8_e4m3_t, Scaling::kBlock, 128, 192>": 8}


@pytest.mark.parametrize("kind, unit", UNITS)
def test_unit(hopper, nvcc, tmp_path, kind, unit):
    compile_unit(nvcc, tmp_path, gen_dense_gemm_sm90_module(kind), f"gemm_sm90_{unit}")


@pytest.mark.parametrize("kind, unit", W4_UNITS)
def test_four_bits(hopper, nvcc, tmp_path, kind, unit):
    compile_unit(nvcc, tmp_path, gen_gemm_w4_sm90_module(kind), f"gemm_w4_sm90_{unit}")


def compile_unit(nvcc, tmp_path, spec, stem):
    text = next(text for path, text in spec.generated.items() if path.stem == stem)
    source = tmp_path / "unit.cu"
    source.write_text(text)
    include = f"-I{jit_env.FLASHINFER_INCLUDE_DIR}"
    command = [nvcc, "-std=c++17", "-O3", *sm90a_nvcc_flags, include, "-cubin", "-Xptxas=-v", source]
    done = subprocess.run([*map(str, command), "-o", str(tmp_path / "unit.cubin")], capture_output=True, text=True)
    log = done.stdout + done.stderr
    assert done.returncode == 0, log
    spilled = max(int(x) for x in re.findall(r"(\d+) bytes spill stores", log))
    assert spilled <= max((count for name, count in SPILLS.items() if name in text), default=0), log
    assert "(C75" not in log, log  # C7508: setmaxnreg ignored; C7510 to C7519: wgmma serialised


def test_quantizer(hopper, monkeypatch, tmp_path):
    """Compile the kernels for a chip without PDL; test_units of test_cuda_compile.py has Hopper, and the launcher."""
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "8.0")
    monkeypatch.setenv("FLASHINFER_EXTRA_CUDAFLAGS", NO_SPILLS)
    spec = gen_quantize_1x128_module()
    compile_units(tmp_path, [source for source in spec.sources if source in spec.generated], spec.generated)
