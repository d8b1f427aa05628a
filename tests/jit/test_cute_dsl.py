# SPDX-License-Identifier: Apache-2.0
"""Kernels in the CuTe DSL in the cache; a compiled kernel is stood for by a C function with the ABI of TVM-FFI."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from flashinfer._runtime.errors import ArgumentError
from flashinfer.jit import JitSpecCuteDsl, env
from flashinfer.jit.toolchain import find_cxx, tvm_ffi_paths

SOURCE = """
#include <tvm/ffi/c_api.h>
extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_%s(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny* result) {
  result->type_index = kTVMFFIInt;
  result->zero_padding = 0;
  result->v_int64 = args[0].v_int64 + %d;
  return 0;
}
"""


class Compiled:
    """Stands for the kernel that the DSL returns: it writes an object file."""

    def __init__(self, addend: int) -> None:
        self.addend = addend

    def export_to_c(self, object_file_path: str, function_name: str) -> None:
        source = Path(object_file_path).with_suffix(".cpp")
        source.write_text(SOURCE % (function_name, self.addend))
        include, _ = tvm_ffi_paths()
        command = [str(find_cxx()), "-fPIC", f"-I{include}", "-c", str(source), "-o", object_file_path]
        subprocess.run(command, check=True)


def spec(compiled: list[int], addend: int = 1, sha: str = "ab" * 32) -> JitSpecCuteDsl:
    """Describe a kernel that adds a number; compilations are noted."""

    def compile_fn() -> Compiled:
        compiled.append(addend)
        return Compiled(addend)

    return JitSpecCuteDsl("own_kernels", "add", compile_fn, sha)


def test_a_kernel_is_compiled_once_for_a_hash(workshop):
    compiled: list[int] = []
    one = spec(compiled)
    assert one.try_load() is None and not one.is_compiled and compiled == []
    assert one.build_and_load()(41) == 42 and one.is_compiled
    one.build()
    assert spec(compiled).try_load()(1) == 2 and spec(compiled).load()(2) == 3
    assert compiled == [1]
    other = spec(compiled, 5, "cd" * 32)
    assert other.get_library_path().parent == one.get_library_path().parent == env.jit_dir("cuda") / "own_kernels"
    assert other.build_and_load()(1) == 6 and compiled == [1, 5]
    assert other.compile_and_persist() == other.get_library_path() and compiled == [1, 5, 5]
    assert sorted(path.suffix for path in one.get_library_path().parent.iterdir()) == [".so", ".so"]


def test_libraries_that_others_may_write_are_refused(workshop):
    one = spec([])
    one.build()
    one.get_library_path().chmod(0o666)
    assert one.try_load() is None
    with pytest.raises(RuntimeError, match="is writable by others"):
        one.build_and_load()


def test_failures(workshop):
    with pytest.raises(ArgumentError, match="kernel_name must be a C name, got 'a-b'"):
        JitSpecCuteDsl("own_kernels", "a-b", lambda: None, "00")
    with pytest.raises(ArgumentError, match=r"module_name must be a file name, got '\.\./x'"):
        JitSpecCuteDsl("../x", "add", lambda: None, "00")
    with pytest.raises(TypeError, match=r"compile_fn must return a kernel compiled for TVM-FFI .*, got a NoneType"):
        JitSpecCuteDsl("own_kernels", "add", lambda: None, "00").build()
