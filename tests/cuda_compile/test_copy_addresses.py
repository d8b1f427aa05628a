# SPDX-License-Identifier: Apache-2.0
"""Copy instructions that ptxas emits for the decode kernel: never the form that adds a uniform register to the address
in shared memory, which ptxas 13.0 encodes in a way that SM90 rejects as an illegal instruction.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from flashinfer.jit import attention, env

from .machine_code import COPY, COPY_UNIFORM, operations


@pytest.mark.parametrize("head_dims", [pytest.param((448, 256), marks=pytest.mark.full), (256, 192)])
def test_copies_of_rows_of_different_lengths(nvcc, tmp_path, head_dims):
    """Check head dimensions that had such copies; a GPU failed on 448 and 256."""
    dtypes = (torch.float16,) * 3
    spec = attention.gen_batch_prefill_module(
        "fa2", *dtypes, torch.int32, *head_dims, 0, False, False, False, device="cuda"
    )
    for path, text in spec.generated.items():
        (tmp_path / path.name).write_text(text)
    source, cubin = tmp_path / "batch_prefill_16_paged.cu", tmp_path / "unit.cubin"
    include: list[Path] = [env.FLASHINFER_INCLUDE_DIR, env.FLASHINFER_CSRC_DIR, tmp_path]
    flags = ["-std=c++17", "-O3", "-arch=sm_90a", "--expt-relaxed-constexpr", "-cubin"]
    subprocess.run([nvcc, *flags, *(f"-I{x}" for x in include), source, "-o", cubin], check=True)
    found = list(operations(cubin.read_bytes()))
    assert COPY in found and COPY_UNIFORM not in found
