# SPDX-License-Identifier: Apache-2.0
"""Kernels that a program writes in the CuTe DSL: compiled once, kept as libraries in the cache, loaded through TVM-FFI.

No kernel of this package is written so. The DSL is asked for its support library where it is installed; what a program
passes needs only the method ``export_to_c`` of compiled kernels.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Callable, Optional

from .._runtime.errors import ArgumentError
from . import env as jit_env
from .load import load
from .toolchain import NO_CXX, find_cxx, tvm_ffi_paths
from .utils import locked, make_folder

__all__ = ["JitSpecCuteDsl"]


def _runtime_libraries() -> list[str]:
    """Return the libraries that compiled kernels of the DSL call; none without the DSL."""
    try:
        from cutlass.cute import runtime
    except ImportError:
        return []
    return [str(path) for path in runtime.find_runtime_libraries(enable_tvm_ffi=True)]


class JitSpecCuteDsl:
    """One kernel in the CuTe DSL.

    Parameters
    ----------
    module_name : str
        Folder of the cache.
    kernel_name : str
        Name of the exported function, and of the file.
    compile_fn : Callable[[], Any]
        Compiles the kernel for TVM-FFI: returns an object with ``export_to_c(object_file_path=, function_name=)``.
    source_sha256 : str
        Hash of what the kernel is made of. A library is of one hash; another hash is compiled anew.
    """

    def __init__(self, module_name: str, kernel_name: str, compile_fn: Callable[[], Any], source_sha256: str) -> None:
        for name, value in (("module_name", module_name), ("source_sha256", source_sha256)):
            if not isinstance(value, str) or Path(value).name != value or value in ("", ".."):
                raise ArgumentError(f"JitSpecCuteDsl: {name} must be a file name, got {value!r}")
        if not isinstance(kernel_name, str) or not kernel_name.isidentifier():
            raise ArgumentError(f"JitSpecCuteDsl: kernel_name must be a C name, got {kernel_name!r}")
        self.module_name = self.name = module_name
        self.kernel_name = kernel_name
        self.compile_fn = compile_fn
        self.source_sha256 = source_sha256

    def get_library_path(self) -> Path:
        """Return the path of the library, whether it is there or not."""
        return jit_env.jit_dir("cuda") / self.module_name / f"{self.kernel_name}.{self.source_sha256[:32]}.so"

    @property
    def is_compiled(self) -> bool:
        return self.get_library_path().is_file()

    def try_load(self) -> Optional[Any]:
        """Return the function if its library is in the cache and may be trusted, else None. Compiles nothing."""
        library = self.get_library_path()
        if not library.is_file():
            return None
        reason = jit_env.untrusted(library.parent, library)
        if reason is not None:
            jit_env.warn_untrusted(reason)
            return None
        return self.load()

    def build(self) -> None:
        """Compile the kernel unless its library is in the cache."""
        library = self.get_library_path()
        make_folder(library.parent)
        reason = jit_env.untrusted(library.parent, library)
        if reason is not None:
            raise RuntimeError(reason)
        with locked(library.parent):  # one of several processes compiles
            if not self.is_compiled:
                self.compile_and_persist()

    def compile_and_persist(self) -> Path:
        """Compile the kernel and store its library, in place of one that is there; return its path."""
        library = self.get_library_path()
        make_folder(library.parent)
        cxx = find_cxx()
        if cxx is None:
            raise RuntimeError(NO_CXX)
        compiled = self.compile_fn()
        if not hasattr(compiled, "export_to_c"):
            raise TypeError(
                "JitSpecCuteDsl: compile_fn must return a kernel compiled for TVM-FFI (with export_to_c), got a "
                f"{type(compiled).__name__}"
            )
        with tempfile.TemporaryDirectory(prefix=".build-", dir=library.parent) as private:
            built, made = Path(private, f"{self.kernel_name}.o"), Path(private, library.name)
            compiled.export_to_c(object_file_path=str(built), function_name=self.kernel_name)
            _, ffi = tvm_ffi_paths()
            command = [str(cxx), "-shared", "-o", str(made), str(built), f"-L{ffi}", "-ltvm_ffi", *_runtime_libraries()]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"JitSpecCuteDsl: {self.kernel_name} cannot be linked: {done.stderr.strip()}")
            os.replace(made, library)
        return library

    def load(self) -> Any:
        """Return the function of the library in the cache."""
        return getattr(load(self.get_library_path()), self.kernel_name)

    def build_and_load(self) -> Any:
        """Return the function; it is compiled first if its library is not in the cache."""
        function = self.try_load()
        if function is None:
            self.build()
            function = self.load()
        return function
