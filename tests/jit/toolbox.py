# SPDX-License-Identifier: Apache-2.0
"""Modules that compile in 0.1 s, compilers that count, and a CUDA toolkit without CUDA.

The modules speak TVM-FFI's C interface, because its C++ headers cost three seconds per source.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, Callable, Optional

from flashinfer.jit import JitSpec, gen_jit_spec

from .. import fresh_process

ROOT = Path(__file__).resolve().parents[2]
REAL_CXX = shutil.which("c++") or shutil.which("g++") or "c++"

TINY = """
#include <tvm/ffi/c_api.h>
#include "answer.h"
extern "C" __attribute__((visibility("default")))
int __tvm_ffi_answer(void*, const TVMFFIAny*, int, TVMFFIAny* result) {
  result->type_index = kTVMFFIInt;
  result->v_int64 = ANSWER;
  return 0;
}
"""

_CXX = """#!/bin/sh
if [ "$1" = --version ]; then echo "c++ (fake) {version}"; exit 0; fi
echo "$*" >> {log}
{before}
exec {cxx} "$@"
"""

# Compiles .cu files as C++ after dropping what only nvcc understands.
_NVCC = """#!/bin/sh
case "$*" in
  --version) echo "Cuda compilation tools, release {version}, V{version}.1"; echo "Build {build}"; exit 0;;
esac
echo "$*" >> {log}
n=$#
while [ $n -gt 0 ]; do
  a=$1; shift; n=$((n - 1))
  case "$a" in
    --generate-dependencies-with-compile) set -- "$@" -MD;;
    -gencode*|-X*|--threads*|-lineinfo|--device-debug|-O0|-use_fast_math|--compress-mode*) ;;
    *) set -- "$@" "$a";;
  esac
done
exec {cxx} -x c++ -fPIC "$@"
"""


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def fake_cxx(path: Path, version: str = "12.2.0", before: str = "") -> Path:
    """Write a host compiler that appends its arguments to ``<path>.log``, runs ``before``, then the real compiler."""
    log = f"{path}.log"
    return executable(path, _CXX.format(version=version, log=f"'{log}'", before=before, cxx=REAL_CXX))


def fake_nvcc(path: Path, version: str = "13.0", build: str = "1") -> Path:
    return executable(path, _NVCC.format(version=version, build=build, log=f"'{path}.log'", cxx=REAL_CXX))


def fake_toolkit(root: Path, version: str = "13.0", build: str = "1") -> Path:
    """Create bin/nvcc, the header that marks a toolkit, and a libcudart to link with."""
    fake_nvcc(root / "bin" / "nvcc", version, build)
    (root / "include").mkdir()
    (root / "include" / "cuda_runtime.h").touch()
    (root / "lib64").mkdir()
    name = f"libcudart.so.{version.split('.')[0]}"
    command = [REAL_CXX, "-shared", "-x", "c", "/dev/null", f"-Wl,-soname,{name}", "-o", str(root / "lib64" / name)]
    subprocess.run(command, check=True, env={"PATH": os.defpath})  # some tests empty PATH
    return root


def calls(compiler: Path) -> list[str]:
    """Return the command lines that a fake compiler has seen, without version queries."""
    log = Path(f"{compiler}.log")
    return log.read_text().splitlines() if log.exists() else []


class Workshop:
    """A source folder and an empty cache; host compilers count their calls."""

    def __init__(self, folder: Path) -> None:
        self.base = folder / "base"
        self.src = folder / "src"
        self.cxx = fake_cxx(folder / "bin" / "cxx")
        self.base.mkdir(parents=True)
        self.src.mkdir()
        self.set_answer(42)

    def set_answer(self, answer: object) -> None:
        (self.src / "answer.h").write_text(f"#define ANSWER {answer}\n")

    def source(self, name: str = "tiny", suffix: str = ".cpp", text: str = TINY) -> Path:
        path = self.src / f"{name}{suffix}"
        path.write_text(text)
        return path

    def spec(self, name: str = "tiny", backend: str = "cpu", text: Optional[str] = None, **more: Any) -> JitSpec:
        suffix = ".cu" if backend == "cuda" else ".cpp"
        path = self.src / f"{name}{suffix}"
        if text is not None or not path.exists():
            self.source(name, suffix, text or TINY)
        return gen_jit_spec(name, [path], backend=backend, **more)

    @property
    def calls(self) -> list[str]:
        return calls(self.cxx)


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program from the checkout in a new process."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", **environment}
    return fresh_process.run_python(["-c", code], env=env)


def _call(function: Callable[[int], Any], index: int, start: Any, results: Any) -> None:
    start.wait()
    try:
        results.put((index, function(index)))
    except BaseException as error:
        results.put((index, repr(error)))


def in_processes(count: int, function: Callable[[int], Any]) -> list[Any]:
    """``function(i)`` in ``count`` processes that start together; an exception arrives as its ``repr``.

    Forked, so that nobody pays for importing torch again.
    """
    context = multiprocessing.get_context("fork")
    start, results = context.Event(), context.Queue()
    arguments = [(function, i, start, results) for i in range(count)]
    processes = [context.Process(target=_call, args=each, daemon=True) for each in arguments]
    for process in processes:
        process.start()
    start.set()
    answers = dict(results.get(timeout=60) for _ in processes)
    for process in processes:
        process.join()
    return [answers[i] for i in range(count)]
