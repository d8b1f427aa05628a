# SPDX-License-Identifier: Apache-2.0
"""Compilers of this machine: nvcc and its toolkit, the host compiler, ninja, the TVM-FFI headers.

    nvcc           $FLASHINFER_NVCC, $CUDA_HOME/bin, $CUDA_PATH/bin, PATH, /usr/local/cuda, pip's nvidia-cuda-nvcc
    host compiler  $CXX (which may be several words), then c++, g++, clang++ on PATH

Everything is looked up when asked; nothing here is needed to load a module that is already built.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Iterator, Optional

from .._runtime.knobs import knobs, split_words

if TYPE_CHECKING:
    from packaging.version import Version

logger = logging.getLogger("flashinfer.jit")

#: The other remedy, for machines that shall have no compiler.
_PREBUILT = "install pre-built modules, which need no compiler (flashinfer-jit-cache: docs/distribution.md)"
NO_NVCC = (
    "cannot find nvcc: looked at $FLASHINFER_NVCC, $CUDA_HOME/bin, $CUDA_PATH/bin, PATH, /usr/local/cuda and the pip "
    f"package nvidia-cuda-nvcc. Either `pip install 'flashinfer-python[nvcc]'`, beside a host compiler such as g++, or "
    f"{_PREBUILT}. CPU modules work without it."
)
NO_CXX = (
    "cannot find a host C++ compiler: looked at $CXX, then c++, g++ and clang++ on PATH. Either install one "
    f"(apt-get install g++), or {_PREBUILT}"
)

_SYSTEM_TOOLKIT = Path("/usr/local/cuda")


@dataclass(frozen=True)
class Compiler:
    """A compiler binary and its version text."""

    path: Path
    version: str  #: last line(s) of ``--version``, without any path


# ------------------------------------------------------------------------------------------------ CUDA


def _pip_toolkits() -> Iterator[Path]:
    """Toolkit trees that pip's ``nvidia-*`` packages unpack into the namespace package ``nvidia``."""
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        for name in ("cu13", "cuda_nvcc"):
            yield Path(root) / name


def _nvcc_candidates() -> Iterator[Path]:
    if knobs.nvcc:
        yield Path(shutil.which(knobs.nvcc) or knobs.nvcc).absolute()
        return
    for home in (knobs.cuda_home, knobs.cuda_path):
        if home:
            yield Path(home).absolute() / "bin" / "nvcc"
    on_path = shutil.which("nvcc")
    if on_path:
        yield Path(on_path).absolute()
    yield _SYSTEM_TOOLKIT / "bin" / "nvcc"
    for toolkit in _pip_toolkits():
        yield toolkit / "bin" / "nvcc"


def find_nvcc() -> Optional[Path]:
    """Find the nvcc to use, or None."""
    return next((p for p in _nvcc_candidates() if os.access(p, os.X_OK) and p.is_file()), None)


def _toolkit_of(nvcc: Path) -> Path:
    for home in (knobs.cuda_home, knobs.cuda_path, str(nvcc.resolve().parent.parent)):
        if home and os.path.exists(Path(home) / "include" / "cuda_runtime.h"):
            return Path(home).absolute()
    return _toolkit_behind(nvcc)


@functools.cache
def _toolkit_behind(nvcc: Path) -> Path:
    """Find the toolkit of an nvcc that is a wrapper script outside its toolkit, by a dry run."""
    dry_run = subprocess.run(
        [str(nvcc), "--dryrun", "-E", "-x", "cu", "/dev/null"], capture_output=True, text=True, check=False
    )
    match = re.search(r"_HERE_=(.+)", dry_run.stderr + dry_run.stdout)
    if match and os.path.exists(Path(match[1]).parent / "include" / "cuda_runtime.h"):
        return Path(match[1]).parent
    return nvcc.resolve().parent.parent


def get_cuda_path() -> str:
    """Return the CUDA toolkit directory; RuntimeError if there is none."""
    nvcc = find_nvcc()
    if nvcc is None:
        raise RuntimeError(NO_NVCC)
    return str(_toolkit_of(nvcc))


def get_cuda_version() -> Version:
    """Return the release of nvcc, else of the toolkit torch was built with; 0.0 if neither is known."""
    from packaging.version import Version

    nvcc = find_nvcc()
    if nvcc is not None:
        match = re.search(r"release (\d+\.\d+)", identify(nvcc).version)
        if match:
            return Version(match[1])
    import torch

    return Version(torch.version.cuda or "0.0")


# ------------------------------------------------------------------------------------------------ host


def split_command(text: str) -> tuple[list[str], Optional[Path], list[str]]:
    """Split a command such as ``ccache g++ -m64`` into launcher, compiler (or None) and first flags."""
    words = [text] if shutil.which(text) else split_words(text)
    for i in reversed(range(len(words))):
        found = None if words[i].startswith("-") else shutil.which(words[i])
        if found:
            return words[:i], Path(found).absolute(), words[i + 1 :]  # absolute: ninja runs it from another directory
    return [], None, []


def split_cxx() -> tuple[list[str], Optional[Path], list[str]]:
    """Apply :func:`split_command` to the host C++ compiler."""
    if knobs.cxx:
        return split_command(knobs.cxx)
    found = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    return [], Path(found).absolute() if found else None, []


def find_cxx() -> Optional[Path]:
    """Find the host C++ compiler, or None."""
    return split_cxx()[1]


def find_ninja() -> str:
    """Find the ninja binary: the pip package's, else one on PATH."""
    spec = importlib.util.find_spec("ninja")
    if spec is not None:
        import ninja

        binary = Path(getattr(ninja, "BIN_DIR", "")) / "ninja"
        if os.path.exists(binary):
            return str(binary)
    found = shutil.which("ninja")
    if found is None:
        raise RuntimeError("cannot find ninja: `pip install ninja`")
    return found


def _warn_of_old_torch() -> None:
    """Warn that before torch 2.10, importing tvm_ffi silently compiles a tensor-exchange library, which takes 40 s."""
    import torch

    names = ("__dlpack_c_exchange_api__", "__c_dlpack_exchange_api__")
    if not any(hasattr(torch.Tensor, name) for name in names) and not importlib.util.find_spec("torch_c_dlpack_ext"):
        logger.warning(
            "torch is %s, expected 2.10 or newer: tvm-ffi may now compile a library for it, once, in ~/.cache/tvm-ffi; "
            "`pip install torch-c-dlpack-ext` has it compiled",
            torch.__version__,
        )


def find_tvm_ffi() -> ModuleType:
    """Import the module ``tvm_ffi``; the error names its package, which has another name than the module."""
    if "tvm_ffi" not in sys.modules:
        _warn_of_old_torch()
    try:
        return importlib.import_module("tvm_ffi")
    except ModuleNotFoundError as error:
        raise ImportError("cannot import tvm_ffi, which loads modules: `pip install apache-tvm-ffi`") from error


@functools.cache
def tvm_ffi_paths() -> tuple[Path, Path]:
    """Return (include directory, library directory) of apache-tvm-ffi."""
    libinfo = find_tvm_ffi().libinfo
    return Path(libinfo.find_include_path()), Path(libinfo.find_libtvm_ffi()).parent


# ------------------------------------------------------------------------------------------------ identity


@functools.cache
def _version_text(path: Path) -> str:
    output = subprocess.run([str(path), "--version"], capture_output=True, text=True, check=False).stdout
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if any("release" in line for line in lines):  # nvcc: copyright lines first, release and build last
        return " ".join(lines[-2:])
    # gcc and clang: "g++ (Debian 12.2.0-14) 12.2.0"; drop argv[0], which is a path or an alias
    return re.sub(r"^\S+ ", "", lines[0]) if lines else "unknown"


def identify(path: Path) -> Compiler:
    """Ask a compiler for its version (once per process)."""
    return Compiler(path, _version_text(path))


def binary_stamp(path: Path) -> Optional[list]:
    """Return path, size and mtime of a compiler binary: with an equal stamp, a warm start need not ask for the version.

    None for a script or a compiler cache: the compiler behind it can change while the script stays the same.
    """
    try:
        resolved = path.resolve()
        with open(resolved, "rb") as f:
            if f.read(2) == b"#!" or resolved.name in ("ccache", "distcc", "icecc", "sccache"):
                return None
        status = resolved.stat()
        return [str(resolved), status.st_size, status.st_mtime_ns]
    except OSError:
        return None


# ------------------------------------------------------------------------------------------------ parallelism


def _read(path: str) -> str:
    return Path(path).read_text()


def _available_bytes() -> int:
    """Return the bytes of memory still available within this container's limit."""
    try:
        info = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in _read("/proc/meminfo").splitlines()}
        available = info["MemAvailable"]
    except (OSError, KeyError, ValueError, IndexError):
        return 1 << 40
    try:
        limit = _read("/sys/fs/cgroup/memory.max").strip()
        used = int(_read("/sys/fs/cgroup/memory.current"))
        if limit.isdigit():
            available = min(available, int(limit) - used)
    except (OSError, ValueError):
        pass
    return available


def job_count() -> int:
    """Return ``MAX_JOBS``, else one job per usable core with 1.5 GiB for each job (the peak of nvcc on our units)."""
    if knobs.max_jobs is not None:
        return knobs.max_jobs
    cores = len(os.sched_getaffinity(0))
    return max(1, min(cores, _available_bytes() // (3 << 29)))
