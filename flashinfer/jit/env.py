# SPDX-License-Identifier: Apache-2.0
"""Directories and companion packages. Read every name as an attribute of this module (``jit_env.FLASHINFER_JIT_DIR``).

The directories are computed when they are read, so importing touches no disk and no GPU, a changed environment is
seen at once, and AOT can rebind a name by assigning to it. Nothing here creates a directory, but for the temporary
one of last resort, which must be ours from the start.

    FLASHINFER_CACHE_DIR       <base>/.cache/flashinfer
    FLASHINFER_WORKSPACE_DIR   <cache>/<version>/<arch tag>
    FLASHINFER_JIT_DIR         <workspace>/cached_ops        one directory per module
    FLASHINFER_GEN_SRC_DIR     <workspace>/generated         rendered and copied sources
    FLASHINFER_CSRC_DIR, FLASHINFER_INCLUDE_DIR              sources shipped with the package, read only
    FLASHINFER_AOT_DIR                                       pre-built modules, read only
    FLASHINFER_AOT_PROVIDERS, FLASHINFER_AOT_DIRS            those of other distributions, and all folders
    FLASHINFER_BASE_DIR                                      where the cache is
    FLASHINFER_CUBIN_DIR                                     downloaded binaries
    CUTLASS_INCLUDE_DIRS                                     two, for users' modules, where CUTLASS was put
    CCCL_INCLUDE_DIRS, SPDLOG_INCLUDE_DIR                    three and one, for users' modules in the same way
    FLASHINFER_DATA                                          folder of what the package ships besides Python
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import os
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Iterator, Optional

from .._runtime.knobs import knobs
from .._runtime.log import configure_jit_log
from ..version import __version__
from .context import current_compilation_context
from .cpu_targets import cpu_arch_tag, target_tag
from .trust import refusal

logger = configure_jit_log()

_PACKAGE = Path(__file__).resolve().parent.parent

if TYPE_CHECKING:
    FLASHINFER_CACHE_DIR: Path
    FLASHINFER_WORKSPACE_DIR: Path
    FLASHINFER_JIT_DIR: Path
    FLASHINFER_GEN_SRC_DIR: Path
    FLASHINFER_CSRC_DIR: Path
    FLASHINFER_INCLUDE_DIR: Path
    FLASHINFER_AOT_DIR: Path
    FLASHINFER_CUBIN_DIR: Path
    CUTLASS_INCLUDE_DIRS: list[Path]
    CCCL_INCLUDE_DIRS: list[Path]
    SPDLOG_INCLUDE_DIR: Path
    FLASHINFER_DATA: Path
    FLASHINFER_BASE_DIR: Path
    FLASHINFER_AOT_PROVIDERS: tuple[AOTProvider, ...]
    FLASHINFER_AOT_DIRS: tuple[Path, ...]


@dataclasses.dataclass(frozen=True)
class AOTProvider:
    """One distribution of pre-built modules: those that it lists, for its CUDA architectures such as ``sm90a``."""

    provider_id: str
    distribution: str
    version: str
    jit_cache_dir: Path
    cuda_architectures: frozenset[str]
    modules: frozenset[str]


@dataclasses.dataclass(frozen=True)
class AOTArtifact:
    """One pre-built library of a module; None are the architectures of one that does not say."""

    provider_id: str
    path: Path
    cuda_architectures: Optional[frozenset[str]]


# ------------------------------------------------------------------------------------------------ cache base


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:  # no HOME and no passwd entry
        return Path("/nonexistent")


def _temporary_base() -> Path:
    """Return a directory of this user alone, the last resort: modules found there are loaded into the process."""
    try:
        parent = Path(tempfile.gettempdir())
    except FileNotFoundError:  # nothing can be written; existing modules still load
        parent = Path("/tmp")
    base = parent / f"flashinfer-{os.getuid()}"
    with contextlib.suppress(OSError):
        base.mkdir(mode=0o700)
    return base


def _is_writable(path: Path) -> bool:
    """Return True if ``path`` can be made or written. ``os.path`` returns False for a directory we may not enter."""
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    return os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK)


def _is_private(path: Path) -> bool:
    """Return True if no other user can write a module to ``path``."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022


@functools.cache
def _warn_fallback(wanted: str, used: str) -> None:
    logger.warning("cache directory %s is not writable; building in %s (set FLASHINFER_WORKSPACE_BASE)", wanted, used)


def preferred_base() -> Path:
    """Return the requested base directory, writable or not: built modules load from it even if it is read-only."""
    return (knobs.workspace_base or _home()).absolute()


def writable_base() -> Path:
    """Return the first writable one of ``FLASHINFER_WORKSPACE_BASE``, home, a temporary directory."""
    for base in (preferred_base(), _home()):
        if _is_writable(cache_dir(base)):
            return base
    return _temporary_base()


def check_base() -> None:
    """Check before a build: warn if it goes elsewhere than requested; refuse a directory that others can write."""
    if "FLASHINFER_JIT_DIR" in globals():
        return
    wanted, base = preferred_base(), writable_base()
    if base not in (wanted, _home()) and not _is_private(base):
        raise RuntimeError(f"cache directory {base} is not ours alone; set FLASHINFER_WORKSPACE_BASE to another place")
    if base != wanted:
        _warn_fallback(str(cache_dir(wanted)), str(cache_dir(base)))


# ------------------------------------------------------------------------------------------------ arch tags


def cuda_arch_tag() -> str:
    """Return the sorted targets joined by ``_`` (``80_90a``); empty without targets."""
    targets = sorted(current_compilation_context.TARGET_CUDA_ARCHS)
    return "_".join(f"{major}{minor}" for major, minor in targets)


def arch_tag(backend: Optional[str] = None, cpu_target: str = "") -> str:
    """Return the tag of one backend's directory; by default CUDA's, or the CPU's on a machine without CUDA targets."""
    if backend == "cpu":
        return target_tag(cpu_target)
    return cuda_arch_tag() or cpu_arch_tag()


def cache_dir(base: Path) -> Path:
    return base / ".cache" / "flashinfer"


def jit_dir(backend: str, cpu_target: str = "") -> Path:
    """Return ``cached_ops`` of a backend. AOT rebinds ``FLASHINFER_JIT_DIR``, which then holds for every backend.

    A CPU target that is named has a folder of its own in either.
    """
    rebound = globals().get("FLASHINFER_JIT_DIR")
    if rebound is not None:
        return rebound / target_tag(cpu_target) if cpu_target else rebound
    return cache_dir(writable_base()) / __version__ / arch_tag(backend, cpu_target) / "cached_ops"


def gen_src_dir(backend: str) -> Path:
    rebound = globals().get("FLASHINFER_GEN_SRC_DIR")
    return rebound or cache_dir(writable_base()) / __version__ / arch_tag(backend) / "generated"


def read_dirs(backend: str, cpu_target: str = "") -> Iterator[Path]:
    """Return the directories that may hold a built module, best first."""
    if "FLASHINFER_JIT_DIR" not in globals():
        bases = [preferred_base(), writable_base()]
        for base in dict.fromkeys(bases):
            if base in (bases[0], _home()) or _is_private(base):
                yield cache_dir(base) / __version__ / arch_tag(backend, cpu_target) / "cached_ops"
    else:
        yield jit_dir(backend, cpu_target)


def untrusted(folder: Path, *files: Path) -> Optional[str]:
    """Return the reason not to trust ``folder``, in ``jit_dir`` or ``gen_src_dir``, and these files; None if none."""
    rebound = (globals().get("FLASHINFER_JIT_DIR"), globals().get("FLASHINFER_GEN_SRC_DIR"))
    if folder.parent in rebound:
        return refusal((folder.parent, folder, *files))
    if folder.parent.parent in rebound:  # folder of a named CPU target
        return refusal((folder.parent.parent, folder.parent, folder, *files))
    modules, targets, version, cache, *above = folder.parents  # base/.cache/flashinfer/<version>/<targets>/cached_ops
    return refusal((cache, version, targets, modules, folder, *files), above[:2])


@functools.cache
def warn_untrusted(reason: str) -> None:
    logger.warning("not loaded: %s", reason)


# ------------------------------------------------------------------------------------------------ package data


def _package_data(name: str) -> Path:
    installed = _PACKAGE / "data" / name
    return installed if os.path.exists(installed) else _PACKAGE.parent / name


def companion_version(package: str) -> Optional[str]:
    """Return the version of a companion package, used or not; None if it is not installed."""
    if importlib.util.find_spec(package) is None:
        return None
    return str(getattr(importlib.import_module(package), "__version__", "unknown"))


def accepts_companion(version: str) -> bool:
    """Return True if a companion is of our release (ignoring what follows ``+``), or if the version check is off."""
    return version.split("+")[0] == __version__.split("+")[0] or not checks_versions()


def checks_versions() -> bool:
    """Tell whether the version of a companion matters."""
    return not knobs.disable_version_check and __version__ != "0.0.0+unknown"


def has_companion(package: str) -> bool:
    """Return True if a companion package is installed and usable; warn about one of another release.

    Kernel binaries have no local version (``+cu130``), so theirs must be equal to ours.
    """
    version = companion_version(package)
    is_whole = package != "flashinfer_cubin" or version == __version__ or not checks_versions()
    if version is not None and not (accepts_companion(version) and is_whole):
        _warn_companion(package, version)
        return False
    return version is not None


@functools.cache
def _warn_companion(package: str, version: str) -> None:
    logger.warning(
        "%s %s is ignored: flashinfer is %s. Install the matching release (flashinfer download-kernels), or set "
        "FLASHINFER_DISABLE_VERSION_CHECK=1",
        *(package, version, __version__),
    )


@functools.cache
def _warn_beaten(folder: str) -> None:
    logger.warning("flashinfer_cubin is installed and not used: FLASHINFER_CUBIN_DIR is %s", folder)


def has_flashinfer_jit_cache() -> bool:
    """Return True if the companion package of pre-built modules is installed."""
    return importlib.util.find_spec("flashinfer_jit_cache") is not None


def has_flashinfer_cubin() -> bool:
    """Return True if the companion package of kernel binaries is installed."""
    return importlib.util.find_spec("flashinfer_cubin") is not None


def _aot_dir() -> Path:
    if knobs.aot_dir:
        return knobs.aot_dir.absolute()
    if has_companion("flashinfer_jit_cache"):
        of_package = getattr(importlib.import_module("flashinfer_jit_cache"), "get_jit_cache_dir", None)
        if of_package is not None:  # one package with all modules, not one that names providers
            return Path(of_package())
    return _PACKAGE / "data" / "aot"


def _providers() -> Any:
    """Return the module that finds providers; it reads this one, so that it is imported when it is needed."""
    return importlib.import_module(".providers", __package__)


def _aot_providers() -> tuple[AOTProvider, ...]:
    found: tuple[AOTProvider, ...] = _providers().aot_providers()
    return found


def _read(name: str) -> Any:
    """Return a folder as callers see it, who may have rebound it."""
    return globals()[name] if name in globals() else _COMPUTED[name]()


def get_aot_artifacts(module_name: str) -> tuple[AOTArtifact, ...]:
    """Return the pre-built libraries of a module for the CUDA targets of this process.

    That of ``FLASHINFER_AOT_DIR`` alone, where there is one; else for each target the one of the provider whose code
    suits it best, by the names of providers.
    """
    own = _read("FLASHINFER_AOT_DIR") / module_name / f"{module_name}.so"
    if own.is_file():
        return (AOTArtifact("flashinfer-python", own, None),)
    targets = sorted(current_compilation_context.TARGET_CUDA_ARCHS)
    names = [f"sm{major}{minor}" for major, minor in targets]
    found: tuple[AOTArtifact, ...] = _providers().best_artifacts(module_name, names)
    return found


def get_aot_path(module_name: str) -> Path:
    """Return the first pre-built library of a module, or the path where one would be looked for."""
    found = get_aot_artifacts(module_name)
    return found[0].path if found else _read("FLASHINFER_AOT_DIR") / module_name / f"{module_name}.so"


def _cubin_dir() -> Path:
    if knobs.cubin_dir:
        if has_flashinfer_cubin():
            _warn_beaten(str(knobs.cubin_dir))
        return knobs.cubin_dir
    if has_companion("flashinfer_cubin"):
        return Path(importlib.import_module("flashinfer_cubin").get_cubin_dir())
    return cache_dir(preferred_base()) / "cubins"


def _cutlass_include_dirs() -> list[Path]:
    cutlass = _PACKAGE / "data" / "cutlass"
    return [cutlass / "include", cutlass / "tools" / "util" / "include"]


def _cccl_include_dirs() -> list[Path]:
    cccl = _PACKAGE / "data" / "cccl"
    return [cccl / "cub", cccl / "libcudacxx" / "include", cccl / "thrust"]


_COMPUTED: dict[str, Callable[[], Any]] = {
    "FLASHINFER_CACHE_DIR": lambda: cache_dir(writable_base()),
    "FLASHINFER_WORKSPACE_DIR": lambda: cache_dir(writable_base()) / __version__ / arch_tag(),
    "FLASHINFER_JIT_DIR": lambda: cache_dir(writable_base()) / __version__ / arch_tag() / "cached_ops",
    "FLASHINFER_GEN_SRC_DIR": lambda: cache_dir(writable_base()) / __version__ / arch_tag() / "generated",
    "FLASHINFER_CSRC_DIR": lambda: _package_data("csrc"),
    "FLASHINFER_INCLUDE_DIR": lambda: _package_data("include"),
    "FLASHINFER_AOT_DIR": _aot_dir,
    "FLASHINFER_AOT_PROVIDERS": _aot_providers,
    "FLASHINFER_AOT_DIRS": lambda: (
        _read("FLASHINFER_AOT_DIR"),
        *(provider.jit_cache_dir for provider in _read("FLASHINFER_AOT_PROVIDERS")),
    ),
    "FLASHINFER_BASE_DIR": writable_base,
    "FLASHINFER_CUBIN_DIR": _cubin_dir,
    "CUTLASS_INCLUDE_DIRS": _cutlass_include_dirs,
    "CCCL_INCLUDE_DIRS": _cccl_include_dirs,
    "SPDLOG_INCLUDE_DIR": lambda: _PACKAGE / "data" / "spdlog" / "include",
    "FLASHINFER_DATA": lambda: _PACKAGE / "data",
}


def __getattr__(name: str) -> Any:
    if name in _COMPUTED:
        return _COMPUTED[name]()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
