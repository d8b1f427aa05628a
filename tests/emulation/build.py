# SPDX-License-Identifier: Apache-2.0
"""Kernels on the CPU: compile the kernel headers with the host compiler against an emulated device.

A test has a C++ file that includes kernel headers and exports functions, and compiles it once::

    // tests/<family>/emulated.cpp                      # tests/<family>/test_emulated.py
    #include <flashinfer/<family>/kernel_sm90.cuh>      from ..emulation.build import compile_emulated
    EMULATION_EXPORT int run(const float* x, int n) {   @pytest.fixture(scope="module")
      return int(Launcher(x, n, nullptr));              def library(tmp_path_factory):
    }                                                       return compile_emulated("emulated.cpp", tmp_path_factory)

    library.call("run", x.data_ptr(), n)  # CPU tensors; integers are passed as int64; raises EmulationError

The C++ file sees the whole CUDA side: ``LaunchConfig(...).Launch(kernel, ...)`` runs the grid, ``cudaLaunchKernelEx``,
``cudaFuncSetAttribute`` and ``hopper::EncodeTensorMap`` work, ``__CUDA_ARCH__`` is 900. ``<<<>>>`` does not exist.

* Threads are fibres (fibre.h) that run until they wait, in random order; ``library.seed(n)`` chooses another order.
  A launch is a loop over clusters; only the blocks of one cluster run at the same time.
* Shared memory starts as NaN. What is copied lands late, and its place is NaN until then. Products of wgmma read shared
  memory at a random time before their wait; accumulators are NaN until it. So a missing wait, a slot that is released
  too early and a wrong swizzle show as wrong results.
* These are errors with a text: a deadlock (what each group of threads waits for), too many arrivals at an mbarrier, an
  mbarrier that is overwritten, addresses outside of shared memory, warpgroups whose threads issue different products, a
  product without WgmmaFence, a thread that returns before its products or stores are done, and ordinary stores that
  wgmma or TMA reads without FenceAsyncProxy. (Each thread must fence its own stores: this is checked for
  ptx::StoreShared* and stmatrix. Stores through pointers are compared with the memory at the last fence of any thread.)
* Not emulated: the 13 bits of fp8 sums (sums are fp32), approximate functions (exact here), order of memory between
  threads (stores are seen at once), boxes with rows narrower than their swizzle, waiting for another cluster.

Each header of ``include/flashinfer/ptx/`` has a counterpart in ``tests/emulation/ptx/`` with the same names and
signatures. A new wrapper needs one there, made of what tma.h, wgmma.h and barriers.h offer: ``LoadBoxLater``,
``LoadBulkLater``, ``StoreBoxLater``, ``CopyLater``, ``SendLater``, ``Named``, ``Arrive``, ``WaitMbarrier``,
``MeetWarp`` (words of all lanes), ``Memory`` (bytes at a shared address), ``Later`` (what happens at a random time).
Functions of nvcc are in intrinsics.h, of the CUDA runtime in cuda_api.h.
"""

from __future__ import annotations

import ctypes
import inspect
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from flashinfer.jit import env
from flashinfer.jit.cpp_ext import find_cxx, find_nvcc
from flashinfer.jit.toolchain import get_cuda_path

EMULATION = Path(__file__).parent
HEADER = "emulation.h"
FLAGS = ["-std=c++17", "-O1", "-w", "-Wno-psabi", "-shared", "-fPIC", "-fvisibility=hidden", "-DFLASHINFER_EMULATED"]
_precompiled: dict[tuple[str, ...], Path] = {}
_copied: list[Path] = []
ALIGNMENT = r"(?:(?:__align__|alignas)\((\d+)\)\s*)?"


class EmulationError(AssertionError):
    """A failure of an emulated kernel: a deadlock, a wrong address, a barrier used wrongly."""


class Library:
    """A compiled source with emulated kernels."""

    def __init__(self, path: Path) -> None:
        self.loaded = ctypes.CDLL(str(path))
        self.loaded.emulation_error.restype = ctypes.c_char_p

    def seed(self, number: int) -> None:
        """Choose the order of threads and of events."""
        self.loaded.emulation_seed(ctypes.c_uint64(number))

    def call(self, name: str, *arguments: Any) -> int:
        """Call an exported function. Integers are int64 or pointers, floats are double."""
        converted = [ctypes.c_double(x) if isinstance(x, float) else x for x in arguments]
        converted = [ctypes.c_int64(x) if isinstance(x, int) else x for x in converted]
        result = getattr(self.loaded, name)(*converted)
        text = self.loaded.emulation_error().decode()
        if text:
            raise EmulationError(f"{name}: {text}")
        return result


def rewrite_shared(text: str) -> str:
    """Turn shared variables into pointers and references to the memory of the block that runs."""
    text = re.sub(
        rf"extern __shared__ {ALIGNMENT}([\w:]+(?: \w+)?) (\w+)\[\];",
        lambda m: f"{m[2]}* const {m[3]} = emulation::DynamicShared<{m[2]}>({m[1] or 16});",
        text,
    )

    def static(m: re.Match[str]) -> str:
        kind, declared = m[2], re.findall(r"(\w+)((?:\[[^\]]*\])*)\s*(?:,|$)", m[3])
        return " ".join(
            f"using {name}_shared = {kind}{size}; "
            f"{name}_shared& {name} = emulation::StaticShared<{name}_shared, {m[1] or 1}>([] {{}});"
            for name, size in declared
        )

    return re.sub(rf"\b__shared__ {ALIGNMENT}((?:unsigned |long )?[\w:]+(?:<[^;>]*>)?) ([^;]*);", static, text)


def rewrite_parameters(text: str) -> str:
    """Pass the parameters of kernels by reference: compilers for Arm align copies of them to 16 bytes only."""
    return re.sub(r"const __grid_constant__ ((?:typename )?[\w:]+(?:<[^;>()]*>)?) (\w+)", r"const \1& \2", text)


def copy_rewritten(source: Path, target: Path) -> None:
    target.write_text(rewrite_parameters(rewrite_shared(source.read_text())))


def copied_headers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the kernel headers and emulated wrappers in place of ``ptx/``, copied once by a process."""
    if _copied:
        return _copied[0]
    folder = tmp_path_factory.mktemp("emulation_include")
    include = folder / "flashinfer"
    shutil.copytree(env.FLASHINFER_INCLUDE_DIR / "flashinfer", include)
    for header in include.rglob("*.*h"):
        copy_rewritten(header, header)
    for header in (include / "ptx").iterdir():
        header.write_text(f'#error "tests/emulation/ptx/{header.name} is missing"\n')
    shutil.copytree(EMULATION / "ptx", include / "ptx", dirs_exist_ok=True)
    _copied.append(folder)
    return folder


def compile_emulated(
    source: str | Path,
    tmp_path_factory: pytest.TempPathFactory,
    *,
    arch: int | None = 900,
    defines: tuple[str, ...] = (),
) -> Library:
    """Compile a C++ file, a path relative to the caller's folder, against the emulated device.

    ``arch`` is the value of ``__CUDA_ARCH__``; None leaves it undefined. Skips the test without a compiler or without
    CUDA headers.
    """
    compiler = find_cxx()
    if compiler is None or find_nvcc() is None:
        pytest.skip("needs a C++ compiler and the CUDA headers")
    source = Path(inspect.stack()[1].filename).parent / source
    folder = tmp_path_factory.mktemp("emulation")
    copied = folder / source.name
    for file in (source, *source.parent.glob("*.*h")):
        copy_rewritten(file, folder / file.name)
    flags = [*FLAGS, *([f"-DEMULATION_ARCH={arch}"] if arch else []), f"-isystem{get_cuda_path()}/include"]
    first = precompiled(compiler, flags, tmp_path_factory)
    headers = copied_headers(tmp_path_factory)
    includes = [f"-I{first}", f"-I{folder}", f"-I{headers}", f"-I{EMULATION}", "-include", HEADER]
    target = folder / "emulated.so"
    run_compiler(compiler, *flags, *(f"-D{x}" for x in defines), *includes, copied, "-o", target)
    return Library(target)


def precompiled(compiler: Any, flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what is included first, parsed: CUDA's headers take a second of each compilation.

    The compiler falls back on the text where the definitions of a source concern these headers.
    """
    key = (str(compiler), *flags)
    if key not in _precompiled:
        folder = tmp_path_factory.mktemp("emulation_header")
        run_compiler(compiler, *flags, "-x", "c++-header", EMULATION / HEADER, "-o", folder / f"{HEADER}.gch")
        _precompiled[key] = folder
    return _precompiled[key]


def run_compiler(*command: Any) -> None:
    done = subprocess.run([str(x) for x in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-8000:]
