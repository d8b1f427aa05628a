# SPDX-License-Identifier: Apache-2.0
"""Find the library of a module, pre-built or fresh in the cache, and load it. Compiles nothing."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path
from typing import Any, BinaryIO, Optional, Sequence

from .._runtime.errors import ArgumentError, InternalError
from . import env as jit_env
from .context import current_compilation_context
from .cuda_runtime import load_missing_cudart
from .manifest import manifest_path, open_fresh
from .spec import ModuleSpec
from .toolchain import find_tvm_ffi
from .utils import is_whole_library

__all__ = ["is_compiled", "is_fresh", "library_path", "load", "load_fresh", "loaded_modules", "staleness", "try_load"]

logger = logging.getLogger("flashinfer.jit")

#: Loaded modules, never unloaded. Keys are ``id(module)``: graphs of torch.compile refer to modules by id.
loaded_modules: dict[int, Any] = {}

_loaded: dict[Path, Optional[tuple[int, int]]] = {}  #: path -> device and inode of the library loaded by that name


def find_fresh(spec: ModuleSpec) -> tuple[Optional[str], Optional[BinaryIO]]:
    """Find a fresh library; return (None, the open file), or (the reason why there is none, None)."""
    if spec.backend == "cuda" and not current_compilation_context.TARGET_CUDA_ARCHS:
        return "no CUDA target", None
    reason: Optional[str] = "not built"
    for directory in jit_env.read_dirs(spec.backend, spec.cpu_target):
        library = directory / spec.name / spec.library_name
        untrusted = jit_env.untrusted(library.parent, library, manifest_path(library))
        if untrusted is not None and library.exists():
            jit_env.warn_untrusted(untrusted)
            reason = untrusted
            continue
        reason, file = open_fresh(spec, library)
        if file is not None:
            spec.found = library
            return None, file
    spec.found = None
    return reason, None


def staleness(spec: ModuleSpec) -> Optional[str]:
    """Return None if a fresh library is in the cache, else the reason why there is none."""
    reason, file = find_fresh(spec)
    if file is not None:
        file.close()
    return reason


def is_fresh(spec: ModuleSpec) -> bool:
    return staleness(spec) is None


def is_compiled(spec: ModuleSpec) -> bool:
    """Return True if nothing has to be compiled: the module is pre-built, or fresh in the cache."""
    return spec.is_aot or is_fresh(spec)


def library_path(spec: ModuleSpec) -> Path:
    """Return the path of the library that :func:`load` would open."""
    return spec.aot_path if spec.is_aot else (spec.found or spec.jit_library_path)


def load(path: Path) -> Any:
    """Load a library; its exported functions are attributes of the result."""
    with open(path, "rb") as file:
        return _load(path, file)


def load_fresh(spec: ModuleSpec) -> Optional[Any]:
    """Load the fresh library of the cache, from the same open file whose content was validated."""
    _, file = find_fresh(spec)
    if file is None:
        return None
    with file:
        return _load(Path(file.name), file)


def try_load(spec: ModuleSpec) -> Optional[Any]:
    """Load the module if it is pre-built or fresh in the cache, else return None."""
    artifacts = spec.aot_artifacts
    if artifacts:
        try:
            return _load_artifacts(artifacts)
        except Exception as error:
            logger.warning("pre-built %s cannot be loaded (%s); compiling it instead", artifacts[0].path, error)
    return load_fresh(spec)


def _load_artifacts(artifacts: Sequence[jit_env.AOTArtifact]) -> Any:
    """Load the libraries of one module; several answer as one, by the device of a call."""
    if len(artifacts) == 1:
        return load(artifacts[0].path)
    from .providers import ModuleByDevice

    return ModuleByDevice((one.cuda_architectures or frozenset(), load(one.path)) for one in artifacts)


def _load(path: Path, file: BinaryIO) -> Any:
    module = _load_library(path, file)
    loaded_modules[id(module)] = module
    return module


def _load_library(path: Path, file: BinaryIO) -> Any:
    """Load ``file``, which was opened as ``path``, even if another file has taken the name ``path`` since."""
    tvm_ffi = find_tvm_ffi()
    for kind in (ArgumentError, InternalError, NotImplementedError):  # others of native code become RuntimeError
        tvm_ffi.register_error(kind.__name__, kind)
    if not is_whole_library(file):
        raise RuntimeError(f"{path} is not a complete shared library")
    logger.debug("loading %s", path)
    status = os.fstat(file.fileno())
    identity = (status.st_dev, status.st_ino)
    if _loaded.setdefault(path, identity) == identity:
        try:
            module = _open(tvm_ffi, path)
        except Exception:
            if _identity(path) == identity:
                raise
        else:
            if _identity(path) == identity:  # unchanged before and after the load, so the loaded file is ours
                return module
        _loaded[path] = None  # the file was replaced or deleted meanwhile
    # The dynamic linker knows another library by this name, so load through a new name.
    descriptor = Path(f"/proc/self/fd/{file.fileno()}")
    with tempfile.TemporaryDirectory() as directory:
        alias = Path(directory) / path.name
        alias.symlink_to(descriptor if descriptor.exists() else path.absolute())
        return _open(tvm_ffi, alias)


def _open(tvm_ffi: Any, path: Path) -> Any:
    try:
        return tvm_ffi.load_module(str(path))
    except Exception as error:
        if not load_missing_cudart(str(error)):
            raise
    return tvm_ffi.load_module(str(path))


def _identity(path: Path) -> Optional[tuple[int, int]]:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
