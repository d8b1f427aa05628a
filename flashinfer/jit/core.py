# SPDX-License-Identifier: Apache-2.0
"""JitSpec, the description of one compiled module, and the registry of all specs. Independent of any op."""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import shlex
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Iterable, Mapping, Optional, Sequence, Union

from ..errors import ArgumentError, MissingJITCacheError
from . import env as jit_env
from .build import Progress, built, clear_modules, ensure_built
from .context import current_compilation_context
from .cpp_ext import Commands, ninja_text, translation_units
from .cpp_ext import get_nvcc_parallelism_flags as get_nvcc_parallelism_flags
from .cpp_ext import run_ninja as run_ninja
from .manifest import manifest_path, open_fresh
from .progress import ProgressLine
from .toolchain import find_tvm_ffi
from .utils import is_whole_library, write_if_different

__all__ = [
    "JitSpec",
    "JitSpecNvcc",
    "JitSpecRegistry",
    "JitSpecStatus",
    "MissingJITCacheError",
    "build_jit_specs",
    "check_cuda_arch",
    "clear_cache_dir",
    "gen_jit_spec",
    "jit_spec_registry",
    "write_if_different",
]

logger = logging.getLogger("flashinfer.jit")

_MAX_NAME = 230  # bytes: file systems allow 255; the manifest's temporary name is ``.<name>.manifest.json.xxxxxxxx``


@dataclass(eq=False)
class JitSpec:
    """One module: its sources and flags. Making a spec touches no disk; ``build_and_load`` does the work."""

    name: str
    sources: list[Path]
    extra_cflags: list[str] = field(default_factory=list)
    extra_cuda_cflags: list[str] = field(default_factory=list)
    extra_ldflags: list[str] = field(default_factory=list)
    extra_include_dirs: list[Path] = field(default_factory=list)
    is_class: bool = False
    needs_device_linking: bool = False
    backend: str = "cuda"  #: "cuda" or "cpu"
    host_sources: frozenset[Path] = frozenset()  #: ``.cu`` files without device code: the host compiler takes them
    generated: Mapping[Path, str] = field(default_factory=dict)  #: sources written inside the build lock
    supported_major_versions: Optional[list[int]] = None  #: limits the targets to these majors

    def __post_init__(self) -> None:
        self._found: Optional[Path] = None

    # paths ------------------------------------------------------------------------------------

    @property
    def library_name(self) -> str:
        return f"{self.name}.so"

    @property
    def build_dir(self) -> Path:
        return jit_env.jit_dir(self.backend) / self.name

    @property
    def ninja_path(self) -> Path:
        return self.build_dir / "build.ninja"

    @property
    def jit_library_path(self) -> Path:
        return self.build_dir / self.library_name

    @property
    def lock_path(self) -> Path:
        return jit_env.jit_dir(self.backend) / f"{self.name}.lock"

    @property
    def aot_path(self) -> Path:
        return jit_env.FLASHINFER_AOT_DIR / self.name / self.library_name

    def get_library_path(self) -> Path:
        """Return the path of the library that ``load`` would open."""
        return self.aot_path if self.is_aot else (self._found or self.jit_library_path)

    def get_object_paths(self) -> list[Path]:
        return [self.build_dir / unit.object_name for unit in translation_units(self)]

    # state ------------------------------------------------------------------------------------

    @property
    def is_aot(self) -> bool:
        return self.aot_path.exists()

    @property
    def is_compiled(self) -> bool:
        return self.is_aot or self.is_fresh()

    @property
    def is_ninja_generated(self) -> bool:
        return self.ninja_path.exists()

    def staleness(self) -> Optional[str]:
        """Return None if a fresh library is in the cache, else the reason why there is none."""
        reason, file = self._open_fresh()
        if file is not None:
            file.close()
        return reason

    def _open_fresh(self) -> tuple[Optional[str], Optional[BinaryIO]]:
        """Find a fresh library; return (None, the open file), or (the reason why there is none, None)."""
        if self.backend == "cuda" and not current_compilation_context.TARGET_CUDA_ARCHS:
            return "no CUDA target", None
        reason: Optional[str] = "not built"
        for directory in jit_env.read_dirs(self.backend):
            library = directory / self.name / self.library_name
            untrusted = jit_env.untrusted(library.parent, library, manifest_path(library))
            if untrusted is not None and library.exists():
                jit_env.warn_untrusted(untrusted)
                reason = untrusted
                continue
            reason, file = open_fresh(self, library)
            if file is not None:
                self._found = library
                return None, file
        self._found = None
        return reason, None

    def is_fresh(self) -> bool:
        return self.staleness() is None

    def source_text(self, source: Path) -> str:
        return self.generated[source] if source in self.generated else source.read_text(errors="replace")

    # life cycle -------------------------------------------------------------------------------

    def write_generated(self) -> None:
        """Write the generated sources whose text changed. A build calls this inside its lock."""
        for path, text in self.generated.items():
            write_if_different(path, text)

    def write_ninja(self) -> None:
        """Write ``build.ninja`` into the module's directory, if its text changed."""
        write_if_different(self.ninja_path, ninja_text(self, self.build_dir))

    def get_compile_commands(self) -> list[dict[str, str]]:
        """Entries of a compilation database, for editors and clangd."""
        commands = Commands(self)
        return [
            {
                "directory": str(self.build_dir),
                "command": f"{commands.compile(unit)} "
                + shlex.join(["-c", str(unit.source), "-o", str(self.build_dir / unit.object_name)]),
                "file": str(unit.source),
            }
            for unit in commands.units
        ]

    def build(self, verbose: Optional[bool] = None, need_lock: bool = True) -> None:
        """Compile the module unless it is fresh. The lock is always taken; ``need_lock`` is ignored."""
        check_target(self)
        ensure_built([self], verbose)

    def load(self, so_path: Union[str, Path, None] = None) -> Any:
        """Open the built library; its exported functions are attributes of the result."""
        path = Path(so_path) if so_path is not None else self.get_library_path()
        with open(path, "rb") as file:
            return _load(path, file)

    def _load_fresh(self) -> Optional[Any]:
        """Load the fresh library of the cache, from the same open file whose content was validated."""
        _, file = self._open_fresh()
        if file is None:
            return None
        with file:
            return _load(Path(file.name), file)

    def try_load(self) -> Optional[Any]:
        """Load the module if it is pre-built or fresh in the cache, else return None. Compiles nothing."""
        if self.is_aot:
            try:
                return self.load(self.aot_path)
            except Exception as error:
                logger.warning("pre-built %s cannot be loaded (%s); compiling it instead", self.aot_path, error)
        return self._load_fresh()

    def build_and_load(self) -> Any:
        """Return the loaded module: pre-built, else fresh in the cache, else compiled now."""
        try:
            module = self.try_load()
        except Exception as error:  # the content is fresh, but the library does not load: system libraries differ, say
            logger.warning("cached %s cannot be loaded (%s); building it again", self.name, error)
            with built([self], force=True):
                return self.load(self.jit_library_path)
        if module is None:
            check_target(self)
        while module is None:
            with built([self]) as locked:
                module = self._load_fresh()
                if module is None and locked:  # a header was edited during the build: load what was built
                    module = self.load(self.jit_library_path)
        return module


#: Published callers name the nvcc-built kind explicitly.
JitSpecNvcc = JitSpec


#: Loaded modules, never unloaded. Keys are ``id(module)``: graphs of torch.compile refer to modules by id.
loaded_modules: dict[int, Any] = {}

_loaded: dict[Path, Optional[tuple[int, int]]] = {}  #: path -> device and inode of the library loaded by that name


def _load(path: Path, file: BinaryIO) -> Any:
    module = _load_library(path, file)
    loaded_modules[id(module)] = module
    return module


def _load_library(path: Path, file: BinaryIO) -> Any:
    """Load ``file``, which was opened as ``path``, even if another file has taken the name ``path`` since."""
    tvm_ffi = find_tvm_ffi()
    tvm_ffi.register_error("ArgumentError", ArgumentError)
    if not is_whole_library(file):
        raise RuntimeError(f"{path} is not a complete shared library")
    logger.debug("loading %s", path)
    status = os.fstat(file.fileno())
    identity = (status.st_dev, status.st_ino)
    if _loaded.setdefault(path, identity) == identity:
        try:
            module = tvm_ffi.load_module(str(path))
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
        return tvm_ffi.load_module(str(alias))


def _identity(path: Path) -> Optional[tuple[int, int]]:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


# ------------------------------------------------------------------------------------------------ registry


@dataclass(frozen=True)
class JitSpecStatus:
    """One row of ``flashinfer module-status``."""

    name: str
    created_at: datetime.datetime
    is_compiled: bool
    library_path: Optional[Path]
    sources: list[Path]
    needs_device_linking: bool

    @property
    def status(self) -> str:
        return "Compiled" if self.is_compiled else "Not Compiled"


class JitSpecRegistry:
    """Every spec made in this process, by name."""

    def __init__(self) -> None:
        self._specs: dict[str, tuple[JitSpec, datetime.datetime]] = {}

    def register(self, spec: JitSpec) -> None:
        self._specs[spec.name] = (spec, datetime.datetime.now())

    def get_all_specs(self) -> dict[str, JitSpec]:
        return {name: spec for name, (spec, _) in self._specs.items()}

    def get_spec_status(self, name: str) -> Optional[JitSpecStatus]:
        if name not in self._specs:
            return None
        spec, created = self._specs[name]
        compiled = spec.is_compiled
        library = spec.get_library_path() if compiled else None
        return JitSpecStatus(name, created, compiled, library, list(spec.sources), spec.needs_device_linking)

    def get_all_statuses(self) -> list[JitSpecStatus]:
        return [status for name in self._specs if (status := self.get_spec_status(name)) is not None]

    def get_stats(self) -> dict[str, int]:
        compiled = sum(status.is_compiled for status in self.get_all_statuses())
        return {"total": len(self._specs), "compiled": compiled, "not_compiled": len(self._specs) - compiled}


jit_spec_registry = JitSpecRegistry()


# ------------------------------------------------------------------------------------------------ making and building


def check_cuda_arch() -> None:
    """Refuse targets that are all older than Turing."""
    targets = current_compilation_context.TARGET_CUDA_ARCHS
    newest = max((major * 10 + int("".join(c for c in minor if c.isdigit())) for major, minor in targets), default=None)
    if newest is not None and newest < 75:
        raise RuntimeError(f"FlashInfer requires GPUs with sm75 or higher, found {sorted(targets)}")


def check_target(spec: JitSpec) -> None:
    if spec.backend == "cuda" and not current_compilation_context.TARGET_CUDA_ARCHS:
        raise RuntimeError(
            f"{spec.name}: no CUDA target to compile for: no GPU is visible and FLASHINFER_CUDA_ARCH_LIST is not set "
            "(FlashInfer requires GPUs with sm75 or higher)"
        )


def _is_file_name(name: str) -> bool:
    return Path(name).name == name not in ("", "..") and name.isprintable() and len(os.fsencode(name)) <= _MAX_NAME


def gen_jit_spec(
    name: str,
    sources: Sequence[Union[str, Path]],
    extra_cflags: Optional[list[str]] = None,
    extra_cuda_cflags: Optional[list[str]] = None,
    extra_ldflags: Optional[list[str]] = None,
    extra_include_paths: Optional[Sequence[Union[str, Path]]] = None,
    needs_device_linking: bool = False,
    **more: Any,
) -> JitSpec:
    """Describe a module and register it. ``more`` passes on the fields of JitSpec that only generators of ours use."""
    if not isinstance(name, str) or not _is_file_name(name):
        raise ArgumentError(f"gen_jit_spec: name is {name!r}, expected a file name of at most {_MAX_NAME} bytes")
    if isinstance(sources, (str, Path)) or not sources or not all(isinstance(s, (str, Path)) for s in sources):
        raise ArgumentError(f"gen_jit_spec: {name}: sources is {sources!r}, expected a list of files")
    for kind, value in (("cflags", extra_cflags), ("cuda_cflags", extra_cuda_cflags), ("ldflags", extra_ldflags)):
        if isinstance(value, str):  # each letter of the string would become a flag
            raise ArgumentError(f"gen_jit_spec: {name}: extra_{kind} is {value!r}, expected a list of flags")
    if isinstance(extra_include_paths, (str, Path)):
        raise ArgumentError(
            f"gen_jit_spec: {name}: extra_include_paths is {extra_include_paths!r}, expected a list of folders"
        )
    if more.get("backend", "cuda") not in ("cuda", "cpu"):
        raise ArgumentError(f"gen_jit_spec: {name}: backend is {more['backend']!r}, expected cuda or cpu")
    spec = JitSpec(
        name=name,
        sources=[Path(source).absolute() for source in sources],  # ninja runs in another directory
        extra_cflags=list(extra_cflags or []),
        extra_cuda_cflags=list(extra_cuda_cflags or []),
        extra_ldflags=list(extra_ldflags or []),
        extra_include_dirs=[Path(path).absolute() for path in extra_include_paths or []],
        needs_device_linking=needs_device_linking,
        **more,
    )
    if spec.backend == "cuda":
        check_cuda_arch()
    jit_spec_registry.register(spec)
    return spec


def build_jit_specs(
    specs: Iterable[JitSpec], verbose: bool = False, skip_prebuilt: bool = True, progress: Progress = ProgressLine
) -> None:
    """Build many modules in parallel, as one ninja graph; pre-built and fresh modules are skipped."""
    wanted = [spec for spec in specs if not (skip_prebuilt and spec.is_aot)]
    for spec in wanted:
        check_target(spec)
    ensure_built(wanted, verbose or None, progress)


def clear_cache_dir() -> None:
    """Delete ``FLASHINFER_JIT_DIR``: every compiled module of this version, and their generated sources.

    Unless that name was bound to another folder, the modules of all targets are deleted. The function waits for modules
    that are being built; processes that start meanwhile build again.
    """
    if "FLASHINFER_JIT_DIR" in vars(jit_env):
        clear_modules(jit_env.FLASHINFER_JIT_DIR)
        return
    version = jit_env.FLASHINFER_WORKSPACE_DIR.parent
    for folder in sorted(version.iterdir()) if version.is_dir() else []:
        clear_modules(folder / "cached_ops", folder / "generated")
        with contextlib.suppress(OSError):  # another process builds again
            folder.rmdir()
    with contextlib.suppress(OSError):
        version.rmdir()
