# SPDX-License-Identifier: Apache-2.0
"""The CUDA code compiles: for Hopper without register spills, and samples for other chips.

``make test`` compiles each kernel unit for one element type and one tile, ``make test-all`` all AOT modules.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flashinfer import aot
from flashinfer.jit import gen_jit_spec
from flashinfer.jit.codegen import NO_SPECIAL_FUNCTIONS
from flashinfer.jit.core import JitSpec
from flashinfer.jit.cpp_ext import Commands
from flashinfer.jit.load import _load_library
from flashinfer.jit.norm import gen_norm_block_quant_module, gen_norm_module

from .fatbin import compile_units
from .options import COMPILES, NO_SPILLS

ROOT = Path(__file__).resolve().parents[2]

SPILLING = """
__global__ void __launch_bounds__(1024, 2) Spill(float* x) {
  float v[64], sum = 0;
#pragma unroll
  for (int i = 0; i < 64; ++i) v[i] = x[threadIdx.x + 1024 * i];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 64; ++i) sum += v[i] * v[(i + 1) % 64];
  x[threadIdx.x] = sum;
#pragma unroll
  for (int i = 0; i < 64; ++i) x[threadIdx.x + 1024 * i] += v[63 - i];
}
"""


def libraries(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*.so")}


def expected(family: str) -> set[str]:
    return {f"{spec.name}/{spec.name}.so" for spec in aot.gen_family_modules(family)}


def load(path: Path) -> Any:
    with path.open("rb") as file:
        return _load_library(path, file)


def test_family_by_command(hopper, tmp_path):
    """Run ``python -m flashinfer.aot`` in a subprocess, as a packager does, for the family with the least code."""
    command = [sys.executable, "-m", "flashinfer.aot", "--family", SMALLEST, "--out-dir", "out"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "FLASHINFER_EXTRA_CUDAFLAGS": NO_SPILLS}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "built 1 modules for 9.0a in out" in done.stdout
    assert libraries(tmp_path / "out") == expected(SMALLEST)
    for name in expected(SMALLEST):
        assert callable(load(tmp_path / "out" / name).concat_mla_k)


SMALLEST = "concat_ops"
OTHERS = [family for family in aot.FAMILIES if family not in ("decode", "prefill", "mla")]  # test_attention.py


#: Kernels that spill, with the measured gain: sampling's softmax (8 bytes; five blocks per SM instead of four took 64
#: rows of 128256 from 26.0 to 23.8 us) and draws from rows too long for a cluster (56 bytes; two blocks instead of one
#: took 512 rows from 388 to 133 us), and pairs of rows (8 bytes, outside of loops; 512 rows 156 us instead of 176). The
#: rest is in functions that are called for unusual rows only. Their units are compiled with less optimisation.
SPILLS_MEASURED = ("sampling",)


#: Modules of recurrent layers with kernels that spill: the portable scan of Mamba-2 with states of 256 columns (16
#: bytes), and the replay of e4m3 states with 256 columns (4 bytes). Recorded times include it.
SPILLS_KNOWN = ("ssd", "ssu_replay_float8_e4m3fn_bfloat16")

#: Parts of a unit's name that only say for which element type, width of rows or tile its templates are instantiated.
REPETITION = re.compile(r"_(b?float16(_t)?|float|b?fp?16|fp8|w\d\d+|\d+x\d+)(?=_|$)")

#: The same of a module's name: dtypes without scales, and numbers of a shape.
REPEATED_MODULE = re.compile(r"_(b?float(16|32)|[hdn]\d+)(?=_|$)")

#: Units of forms that test_gemm.py, test_gemm_sm90.py and test_mqa_logits_sm90.py compile, with more checks.
ELSEWHERE = {("gemm", "gemm"), ("gemm_sm90_bf16", "gemm_sm90_tile"), ("gemm_sm90_bf16", "gemm_sm90_swapped")} | {
    ("gemm_sm90_fp8_block", f"gemm_sm90_{f}") for f in ("tile", "gather", "split", "swapped", "quantizing")
}
ELSEWHERE |= {(f"gemm_w4_sm90_{kind}", "gemm_w4_sm90_tile") for kind in ("mxfp4", "mxfp4_fp8", "int4")}
ELSEWHERE |= {("gemm_sm90_fp8", "gemm_sm90_swapped")}  # the swapped form of bf16; the factor is that of its plain form
ELSEWHERE |= {("gemm_sm90_fp16", f"gemm_sm90_{f}") for f in ("tile", "swapped")}  # those of bf16
ELSEWHERE |= {("mqa_logits_sm90_h8_d256_n2", "mqa_logits_sm90_kernels")}


def modules_of(family: str, is_full: bool) -> list[JitSpec]:
    """Return the modules of a family, in the lane without those that repeat another one for a different type."""
    modules = list(aot.gen_family_modules(family))
    # States of 8 bits have scales, whichever their type.
    by_form = {REPEATED_MODULE.sub("", spec.name).replace("float8_e4m3fn", "int8"): spec for spec in modules}
    return modules if is_full else list(by_form.values())


def units_of(spec: JitSpec, is_full: bool) -> list[Path]:
    """Return the kernel units of a module, in the lane without repetitions for a different type, width or tile."""
    units = [unit.source for unit in Commands(spec).units if unit.tool == "nvcc"]
    if is_full:
        return units
    by_form = {REPETITION.sub("", unit.stem): unit for unit in units}
    return [unit for form, unit in by_form.items() if (spec.name, form) not in ELSEWHERE]


@pytest.mark.parametrize(
    "family, is_full",
    [pytest.param(family, False, id=family) for family in OTHERS if family != SMALLEST]
    + [pytest.param("recurrent", True, id="recurrent-all", marks=pytest.mark.full)],  # test_family allows spills
)
def test_units(hopper, monkeypatch, tmp_path, family, is_full):
    """Compile the kernel units of a family for one element type and tile; parse its launchers with their bindings."""
    for spec in modules_of(family, is_full):
        may_spill = family in SPILLS_MEASURED or spec.name in SPILLS_KNOWN
        monkeypatch.setenv("FLASHINFER_EXTRA_CUDAFLAGS", COMPILES if may_spill else NO_SPILLS)
        for path, text in spec.generated.items():  # the launcher includes some
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        if units := units_of(spec, is_full):
            compile_units(tmp_path, units, spec.generated)
        commands = Commands(spec)
        launcher, *bindings = (unit for unit in commands.units if unit.tool == "cxx")
        words = [word for unit in bindings for word in ("-include", str(unit.source))]
        command = f"{commands.compile(launcher)} {shlex.join(words)} -fsyntax-only {launcher.source}"
        done = subprocess.run(command, shell=True, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


@pytest.mark.full
@pytest.mark.parametrize("family", OTHERS)
def test_family(hopper, tmp_path, monkeypatch, family):
    if family not in (*SPILLS_MEASURED, "recurrent"):
        monkeypatch.setenv("FLASHINFER_EXTRA_CUDAFLAGS", NO_SPILLS)
    aot.compile_and_package_modules(tmp_path / "out", tmp_path / "build", config={"families": [family]})
    assert libraries(tmp_path / "out") == expected(family)
    for name in expected(family):
        load(tmp_path / "out" / name)


def test_spills_would_be_noticed(hopper, tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHINFER_EXTRA_CUDAFLAGS", NO_SPILLS)
    source = tmp_path / "spill.cu"
    source.write_text(SPILLING)
    with pytest.raises(RuntimeError, match=r"Registers are spilled to local memory in function '.*Spill"):
        gen_jit_spec("spill", [source]).build()


def test_special_functions(hopper, tmp_path):
    """Leave the special functions of C++17, a third of an empty unit, out of our units, not out of users' modules."""
    assert NO_SPECIAL_FUNCTIONS in gen_norm_module("cuda").extra_cuda_cflags
    source = tmp_path / "special.cu"
    source.write_text("#include <cmath>\ndouble Special(double x) { return std::beta(x, x); }\n")
    gen_jit_spec("special", [source]).build()
    with pytest.raises(RuntimeError, match="beta"):
        gen_jit_spec("none", [source], extra_cuda_cflags=[NO_SPECIAL_FUNCTIONS]).build()


@pytest.mark.parametrize("targets", ["7.5", pytest.param("8.0 8.9 10.0a 12.0a", marks=pytest.mark.full)])
def test_other_targets(hopper, monkeypatch, tmp_path, targets):
    """Compile one kernel unit of each family for Turing, in the lane full up to Blackwell, without launchers."""
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", targets)
    monkeypatch.setenv("FLASHINFER_EXTRA_CUDAFLAGS", COMPILES)
    generated, units = {}, []
    for family in OTHERS:
        spec = next(aot.gen_family_modules(family))
        generated.update(spec.generated)
        units.append(next(source for source in spec.sources if source in spec.generated))
    compile_units(tmp_path, units, generated)


def test_quantising_norm_on_other_targets(hopper, monkeypatch, tmp_path):
    """Compile the residual norm with e4m3 blocks where conversions to e4m3 are instructions, and where they are not."""
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "8.0 8.9 10.0a")
    monkeypatch.setenv("FLASHINFER_EXTRA_CUDAFLAGS", NO_SPILLS)
    spec = gen_norm_block_quant_module("cuda")
    compile_units(tmp_path, list(spec.generated), spec.generated)


def test_device_linking(hopper, tmp_path):
    """Link a device function of another unit with nvcc, for the targets that the units were compiled for."""
    caller, callee = tmp_path / "caller.cu", tmp_path / "callee.cu"
    caller.write_text(
        "__device__ int f(int);\n__global__ void K(int* x) { *x = f(*x); }\nvoid Run(int* x) { K<<<1, 1>>>(x); }\n"
    )
    callee.write_text("__device__ int f(int x) { return x + 1; }\n")
    spec = gen_jit_spec("linked", [caller, callee], extra_cuda_cflags=["-rdc=true"], needs_device_linking=True)
    spec.build()
    library = spec.jit_library_path.read_bytes()
    assert b"sm_90a" in library
    assert b"sm_75" not in library  # nvcc's default target, for which it would link without a warning
