# SPDX-License-Identifier: Apache-2.0
"""The 16-bit and 8-bit numbers of the CPU kernels against torch, bit by bit, on each supported instruction set."""

from __future__ import annotations

import ctypes
import platform
import subprocess
from pathlib import Path

import pytest
import torch

from flashinfer.jit import env
from flashinfer.jit.cpp_ext import find_cxx

TYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}
# The host's instruction set, and on x86 also the lowest: no F16C, four lanes, no fused multiply-add.
TARGETS = ["-march=native"] + (["-march=x86-64"] if platform.machine() == "x86_64" else [])


@pytest.fixture(scope="module", params=TARGETS)
def probe(request, tmp_path_factory):
    compiler = find_cxx()
    if compiler is None:
        pytest.skip("no C++ compiler")
    library = tmp_path_factory.mktemp("probe") / "probe.so"
    source = Path(__file__).with_name("cpu_probe.cpp")
    flags = f"-std=c++17 -O2 {request.param} -ffp-contract=fast -Wall -Wextra -Werror -shared -fPIC".split()
    subprocess.run([compiler, *flags, f"-I{env.FLASHINFER_INCLUDE_DIR}", source, "-o", library], check=True)
    return ctypes.CDLL(str(library))


def call(function, source: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    function(ctypes.c_void_p(source.data_ptr()), ctypes.c_void_p(result.data_ptr()), ctypes.c_int64(source.numel()))
    return result


def patterns(dtype: torch.dtype) -> torch.Tensor:
    """Return every value of the type."""
    if dtype.itemsize == 1:
        return torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)


def hard_floats(dtype: torch.dtype) -> torch.Tensor:
    """Return every value of the type, midpoints of neighbours, the floats around those, and random bits."""
    values = patterns(dtype).float()
    values = values[values.isfinite()].double().unique()
    middle = ((values[1:] + values[:-1]) / 2).float()
    largest = values[-1].item()
    ends = [largest * f for f in (1 + 2**-12, 1 + 2**-5, 1.125, 1.5, 2.0)] + [1e38, 1e-45, 1e-38, 0.0, torch.inf]
    ends = torch.tensor(ends, dtype=torch.float64).float()
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(-(2**31), 2**31, (100_003,), generator=generator).to(torch.int32).view(torch.float32)
    above, below = (torch.nextafter(middle, torch.tensor(to)) for to in (torch.inf, -torch.inf))
    return torch.cat([values.float(), middle, above, below, ends, -ends, random, torch.tensor([torch.nan, -torch.nan])])


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.dtype.itemsize])


@pytest.mark.parametrize("path", ["scalar", "vector"])
@pytest.mark.parametrize("name", TYPES)
def test_to_float(probe, name, path):
    stored = patterns(TYPES[name])
    expected = stored.float()
    actual = call(getattr(probe, f"{name}_decode_{path}"), stored, torch.empty(stored.numel()))
    nan = expected.isnan()
    assert torch.equal(actual.isnan(), nan)
    assert torch.equal(bits(actual)[~nan], bits(expected)[~nan])


@pytest.mark.parametrize("path", ["scalar", "vector"])
@pytest.mark.parametrize("name", TYPES)
def test_from_float(probe, name, path):
    dtype = TYPES[name]
    x = hard_floats(dtype)
    limit = torch.finfo(dtype).max if dtype.itemsize == 1 else torch.inf
    expected = x.clamp(-limit, limit).to(dtype)  # torch's fp8 conversion overflows to NaN; ours saturates
    actual = call(getattr(probe, f"{name}_encode_{path}"), x, torch.empty(x.numel(), dtype=dtype))
    nan = x.isnan()
    assert actual.float()[nan].isnan().all()
    wrong = (bits(actual) != bits(expected)) & ~nan
    assert not wrong.any(), f"{x[wrong][:5]} became {actual.float()[wrong][:5]}, expected {expected.float()[wrong][:5]}"


def test_exponential(probe):
    x = torch.linspace(-86, 88, 100_003)
    actual = call(probe.exponential, x, torch.empty_like(x))
    torch.testing.assert_close(actual.double(), x.double().exp(), rtol=2e-7, atol=0)
    ends = torch.tensor([-1e30, -torch.inf, -200.0, -0.0, 0.0, 90.0, torch.inf, torch.nan])
    assert torch.equal(call(probe.exponential, ends, torch.empty_like(ends))[:-1], ends.exp()[:-1])
    assert call(probe.exponential, ends, torch.empty_like(ends))[-1].isnan()


@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 33, 1000])
def test_sum(probe, n):
    probe.sum.restype = ctypes.c_float
    x = torch.arange(n, dtype=torch.float32)
    assert probe.sum(ctypes.c_void_p(x.data_ptr()), ctypes.c_int64(n)) == n * (n - 1) / 2
