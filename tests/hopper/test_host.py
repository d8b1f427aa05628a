# SPDX-License-Identifier: Apache-2.0
"""Host arithmetic of the Hopper layer: wgmma descriptors, swizzles, limits of TMA. No GPU."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch

from flashinfer.jit import env
from flashinfer.jit.cpp_ext import find_cxx, find_nvcc
from flashinfer.jit.toolchain import get_cuda_path


@pytest.fixture(scope="module")
def probe(tmp_path_factory):
    compiler = find_cxx()
    if compiler is None or find_nvcc() is None:
        pytest.skip("needs a C++ compiler and the CUDA headers")
    library = tmp_path_factory.mktemp("probe") / "probe.so"
    source = Path(__file__).with_name("host_probe.cpp")
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unused-function", "-shared", "-fPIC"]
    includes = [f"-I{env.FLASHINFER_INCLUDE_DIR}", f"-isystem{get_cuda_path()}/include"]
    subprocess.run([compiler, *flags, *includes, source, "-o", library], check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.fault.restype = ctypes.c_char_p
    loaded.takes_bulk_copies.restype = ctypes.c_bool
    for name in ("k_major", "mn_major", "advance"):
        getattr(loaded, name).restype = ctypes.c_uint64
    return loaded


def test_swizzle_moves_chunks_within_rows(probe):
    for row in range(16):
        for chunk in range(8):
            assert probe.swizzle(row * 128 + chunk * 16 + 5) == row * 128 + (chunk ^ (row % 8)) * 16 + 5


def fields(descriptor: int) -> tuple[int, int, int, int]:
    """Return address, leading and stride offsets in bytes, and the swizzle mode."""
    bits = [(descriptor >> low) & 0x3FFF for low in (0, 16, 32)]
    assert descriptor & ~(0x3FFF | 0x3FFF << 16 | 0x3FFF << 32 | 3 << 62) == 0
    return (*(16 * x for x in bits), descriptor >> 62)


def test_descriptors(probe):
    address = ctypes.c_uint32(0x2F400)
    assert fields(probe.k_major(address)) == (0x2F400, 16, 1024, 1)
    assert fields(probe.mn_major(address, 64)) == (0x2F400, 64 * 128, 1024, 1)
    further = probe.advance(ctypes.c_uint64(probe.k_major(address)), 32)
    assert fields(further) == (0x2F400 + 32, 16, 1024, 1)


GOOD = (0x1000, 2, 4096, 100, 3, 8192, 819200, 64, 128, 1)


@pytest.mark.parametrize(
    "change, swizzle, text",
    [
        ({}, True, None),
        ({0: 0x1008}, True, "data must be aligned to 16 bytes"),
        ({1: 3}, True, "element_bytes must be 1, 2 or 4"),
        ({3: 0}, True, "sizes must be in"),
        ({5: 8200}, True, "strides must be multiples of 16 bytes"),
        ({6: 8}, True, "strides must be multiples of 16 bytes"),
        ({4: 1, 6: 8}, True, None),  # the stride of a size-1 dimension is never used
        ({7: 128}, True, "swizzle must be at most 128 bytes"),
        ({7: 128}, False, None),
        ({7: 4}, True, "the inner size of a box must be a multiple of 16 bytes"),
        ({8: 257}, True, "box sizes must be in 1 .. 256"),
    ],
)
def test_what_the_copy_engine_accepts(probe, change, swizzle, text):
    numbers = [change.get(i, x) for i, x in enumerate(GOOD)]
    fault = probe.fault((ctypes.c_uint64 * len(numbers))(*numbers), swizzle)
    assert fault is None if text is None else text in fault.decode()


def halves(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16, device="meta")


@pytest.mark.parametrize(
    "x, offset, taken",
    [
        (halves(32, 256), 0, True),
        (halves(32, 256), 2, False),  # the address
        (halves(32, 264)[:, :256], 0, True),  # rows at multiples of 16 bytes
        (halves(32, 260)[:, :256], 0, False),
        (halves(256, 32).mT, 0, False),
        (halves(1, 255), 0, True),  # the distance between rows does not matter
        (halves(2, 255), 0, False),
        (halves(4, 32, 256), 0, True),
        (halves(32, 4, 256).transpose(0, 1), 0, True),
        (halves(1, 32, 256).expand(4, 32, 256), 0, False),
    ],
)
def test_layouts_of_bulk_copies(probe, x, offset, taken):
    sizes, strides = ((ctypes.c_int64 * x.ndim)(*numbers) for numbers in (x.shape, x.stride()))
    data = ctypes.c_void_p(0x1000 + offset)
    assert probe.takes_bulk_copies(data, x.element_size(), x.ndim, sizes, strides) == taken
