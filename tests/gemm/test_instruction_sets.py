# SPDX-License-Identifier: Apache-2.0
"""The CPU kernels of the general product without AVX-512: with AVX2, and with what every x86-64 has."""

from __future__ import annotations

import ctypes
import platform
import subprocess
from pathlib import Path
from typing import Optional

import pytest
import torch

from flashinfer.jit import env
from flashinfer.jit.cpp_ext import find_cxx

from .references import BF16, E4M3, E5M2, FP16, FP32, block_scales, check, dequantized, operand

#: Element types by number, as in include/flashinfer/gemm.h.
ELEMENTS = (FP32, FP16, BF16, E4M3, E5M2)


@pytest.fixture(scope="module", params=["-march=x86-64", "-march=x86-64-v3"])
def library(request, tmp_path_factory):
    if platform.machine() != "x86_64" or (request.param.endswith("v3") and "avx2" not in cpu_flags()):
        pytest.skip("this machine cannot run it")
    compiler = find_cxx()
    if compiler is None:
        pytest.skip("no C++ compiler")
    made = tmp_path_factory.mktemp("probe") / "probe.so"
    # Hidden as in modules: two libraries of one process would otherwise share the static objects of inline functions.
    flags = f"-std=c++17 -O1 {request.param} -fvisibility=hidden -Wall -Wextra -Werror -fopenmp -shared -fPIC".split()
    source = Path(__file__).with_name("cpu_probe.cpp")
    subprocess.run([compiler, *flags, f"-I{env.FLASHINFER_INCLUDE_DIR}", source, "-o", made], check=True)
    return ctypes.CDLL(str(made))


def cpu_flags() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().split() if path.exists() else []


def address(x: Optional[torch.Tensor]) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if x is None else x.data_ptr())


#: Few rows with streamed weights, and more rows with packed ones; tails of all vector lengths.
@pytest.mark.parametrize("shape", [(3, 70, 131), (45, 70, 300)], ids=str)
@pytest.mark.parametrize("is_k_major", [True, False])
@pytest.mark.parametrize("dtype", ELEMENTS, ids=str)
def test_products(library, dtype, shape, is_k_major):
    m, n, k = shape
    a, b = operand(m, k, dtype=dtype, device="cpu"), operand(n, k, dtype=dtype, device="cpu")
    scales = (block_scales(a, 1, 128), block_scales(b, 128, 128)) if dtype.itemsize == 1 else (None, None)
    stored = b if is_k_major else b.mT.contiguous()
    out = torch.full((m, n), torch.nan)
    sizes = map(ctypes.c_int64, shape)
    element = ctypes.c_int64(ELEMENTS.index(dtype))
    library.Multiply(*map(address, (out, a, stored, *scales)), element, ctypes.c_bool(is_k_major), *sizes)
    check(out, dequantized(a, scales[0], 1, 128), dequantized(b, scales[1], 128, 128))
