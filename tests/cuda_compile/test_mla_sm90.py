# SPDX-License-Identifier: Apache-2.0
"""MLA for SM90 compiles without spills; ptxas neither serialises wgmma nor ignores setmaxnreg."""

from __future__ import annotations

import subprocess

import pytest
import torch

from flashinfer.compilation_context import sm90a_nvcc_flags
from flashinfer.jit import env as jit_env
from flashinfer.jit.attention import gen_batch_mla_module

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


@pytest.mark.parametrize(
    "unit, stored, kpe", [("boxes", BF16, 64), ("rows", BF16, 64), ("launch", BF16, 64), ("rows", FP8, 0)]
)
def test_kernel(hopper, nvcc, tmp_path, unit, stored, kpe):
    """Pages copied by TMA, rows of other pages copied with cp.async, rows that are converted, and the merge."""
    spec = gen_batch_mla_module("fa3", BF16, stored, BF16, torch.int32, 512, kpe, False, device="cuda")
    for path, text in spec.generated.items():
        (tmp_path / path.name).write_text(text)
    includes = [f"-I{jit_env.FLASHINFER_INCLUDE_DIR}", f"-I{tmp_path}"]
    options = ["-std=c++17", "-O3", *sm90a_nvcc_flags, *includes, "-cubin", "-Xptxas=-v"]
    command = [nvcc, *options, tmp_path / f"batch_mla_{unit}.cu", "-o", tmp_path / "unit.cubin"]
    done = subprocess.run([str(x) for x in command], capture_output=True, text=True)
    log = done.stdout + done.stderr
    assert done.returncode == 0, log
    assert "0 bytes spill stores, 0 bytes spill loads" in log
    assert "(C75" not in log, log  # C7508: setmaxnreg ignored; C7510 to C7519: wgmma serialised
