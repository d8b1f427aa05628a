# SPDX-License-Identifier: Apache-2.0
"""Index scores for SM90 compile without spills; ptxas neither serialises wgmma nor ignores setmaxnreg."""

from __future__ import annotations

import subprocess

import pytest

from flashinfer.compilation_context import sm90a_nvcc_flags
from flashinfer.jit import env as jit_env
from flashinfer.jit.indexer import gen_mqa_logits_sm90_module


@pytest.mark.parametrize("shape", [(64, 128, 1), (8, 256, 2)])
def test_kernel(hopper, nvcc, tmp_path, shape):
    spec = gen_mqa_logits_sm90_module(*shape)
    for path, text in spec.generated.items():
        (tmp_path / path.name).write_text(text)
    includes = [f"-I{jit_env.FLASHINFER_INCLUDE_DIR}", f"-I{tmp_path}"]
    options = ["-std=c++17", "-O3", *sm90a_nvcc_flags, *includes, "-cubin", "-Xptxas=-v"]
    command = [nvcc, *options, tmp_path / "mqa_logits_sm90_kernels.cu", "-o", tmp_path / "unit.cubin"]
    done = subprocess.run([str(x) for x in command], capture_output=True, text=True)
    log = done.stdout + done.stderr
    assert done.returncode == 0, log
    assert "0 bytes spill stores, 0 bytes spill loads" in log
    assert "(C75" not in log, log  # C7508: setmaxnreg ignored; C7510 to C7519: wgmma serialised
