# SPDX-License-Identifier: Apache-2.0
"""JitSpec, the published form of a module's description, and the functions that make and build specs."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
from pathlib import Path
from typing import Any, Callable, Iterable, Mapping, Optional, Sequence, Union

from .._runtime.errors import ArgumentError, MissingJITCacheError
from .._runtime.knobs import knobs
from . import cpp_ext
from . import env as jit_env
from .build import Progress, build_and_load, build_modules, clear_modules, write_generated, write_ninja
from .context import current_compilation_context
from .cpp_ext import Commands, translation_units
from .cpp_ext import get_nvcc_parallelism_flags as get_nvcc_parallelism_flags
from .cpp_ext import run_ninja as run_ninja
from .load import is_compiled, is_fresh, library_path, load, staleness, try_load
from .progress import ProgressLine
from .registry import JitSpecRegistry, JitSpecStatus
from .spec import ModuleSpec
from .utils import make_folder, write_if_different

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

logger = logging.getLogger("flashinfer.jit")  # published code imports it from here
_MAX_NAME = 230  # bytes: file systems allow 255; the manifest's temporary name is ``.<name>.manifest.json.xxxxxxxx``


class JitSpec(ModuleSpec):
    """One module: its sources and flags, with the published methods that build and load it.

    Making a spec touches no disk; ``build_and_load`` does the work.
    """

    def get_library_path(self) -> Path:
        """Return the path of the library that ``load`` would open."""
        return library_path(self)

    def get_object_paths(self) -> list[Path]:
        return [self.build_dir / unit.object_name for unit in translation_units(self)]

    @property
    def is_compiled(self) -> bool:
        return is_compiled(self)

    def staleness(self) -> Optional[str]:
        """Return None if a fresh library is in the cache, else the reason why there is none."""
        return staleness(self)

    def is_fresh(self) -> bool:
        return is_fresh(self)

    def write_generated(self) -> None:
        """Write the generated sources whose text changed. A build calls this inside its lock."""
        write_generated(self)

    def write_ninja(self) -> None:
        """Write ``build.ninja`` into the module's directory, if its text changed."""
        write_ninja(self)

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
        """Compile the module unless it is fresh. The lock is always taken; ``need_lock`` is ignored.

        A program that has replaced ``run_ninja`` of this module, or ``write_ninja`` of the spec, builds in its own way:
        the two are called, and nothing else.
        """
        if run_ninja is not cpp_ext.run_ninja or getattr(self.write_ninja, "__func__", None) is not _WRITE_NINJA:
            self.write_ninja()
            run_ninja(self.build_dir, self.ninja_path, knobs.jit_verbose if verbose is None else verbose)
            return
        build_modules([self], verbose)

    def load(self, so_path: Union[str, Path, None] = None) -> Any:
        """Open the built library; its exported functions are attributes of the result."""
        return load(library_path(self) if so_path is None else Path(so_path))

    def try_load(self) -> Optional[Any]:
        """Load the module if it is pre-built or fresh in the cache, else return None. Compiles nothing."""
        return try_load(self)

    def build_and_load(self) -> Any:
        """Return the loaded module: pre-built, else fresh in the cache, else compiled now."""
        module = build_and_load(self)
        return module if self.post_load_adapter is None else self.post_load_adapter(module)

    def get_library_paths(self) -> list[Path]:
        """Return the paths of the libraries that serve this module: the pre-built ones, else the one of the cache."""
        return [artifact.path for artifact in self.aot_artifacts] or [self.get_library_path()]


_WRITE_NINJA = JitSpec.write_ninja

#: Published callers name the nvcc-built kind explicitly.
JitSpecNvcc = JitSpec

jit_spec_registry: JitSpecRegistry[JitSpec] = JitSpecRegistry()


def check_cuda_arch() -> None:
    """Refuse targets that are all older than Turing."""
    targets = current_compilation_context.TARGET_CUDA_ARCHS
    newest = max((major * 10 + int("".join(c for c in minor if c.isdigit())) for major, minor in targets), default=None)
    if newest is not None and newest < 75:
        raise RuntimeError(f"FlashInfer requires GPUs with sm75 or higher, found {sorted(targets)}")


def _is_file_name(name: str) -> bool:
    return Path(name).name == name not in ("", "..") and name.isprintable() and len(os.fsencode(name)) <= _MAX_NAME


def describe_module(
    name: str,
    sources: Sequence[Union[str, Path]],
    extra_cflags: Optional[list[str]] = None,
    extra_cuda_cflags: Optional[list[str]] = None,
    extra_ldflags: Optional[list[str]] = None,
    extra_include_paths: Optional[Sequence[Union[str, Path]]] = None,
    needs_device_linking: bool = False,
    **more: Any,
) -> JitSpec:
    """Describe a module of this package and register it: its flags are those given, without those of gen_jit_spec.

    ``more`` passes on the other fields of JitSpec.
    """
    if not isinstance(name, str) or not _is_file_name(name):
        raise ArgumentError(f"gen_jit_spec: name must be a file name of at most {_MAX_NAME} bytes, got {name!r}")
    if (
        isinstance(sources, (str, Path))
        or not isinstance(sources, Iterable)
        or not all(isinstance(s, (str, Path)) for s in sources)
    ):
        raise ArgumentError(f"gen_jit_spec: {name}: sources must be a list of files, got {sources!r}")
    for kind, value in (("cflags", extra_cflags), ("cuda_cflags", extra_cuda_cflags), ("ldflags", extra_ldflags)):
        if isinstance(value, str):  # each letter of the string would become a flag
            raise ArgumentError(f"gen_jit_spec: {name}: extra_{kind} must be a list of flags, got {value!r}")
    if isinstance(extra_include_paths, (str, Path)):
        raise ArgumentError(
            f"gen_jit_spec: {name}: extra_include_paths must be a list of folders, got {extra_include_paths!r}"
        )
    if more.get("backend", "cuda") not in ("cuda", "cpu"):
        raise ArgumentError(f"gen_jit_spec: {name}: backend must be cuda or cpu, got {more['backend']!r}")
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


def gen_jit_spec(
    name: str,
    sources: Sequence[Union[str, Path]],
    extra_cflags: Optional[list[str]] = None,
    extra_cuda_cflags: Optional[list[str]] = None,
    extra_ldflags: Optional[list[str]] = None,
    extra_include_paths: Optional[Sequence[Union[str, Path]]] = None,
    needs_device_linking: bool = False,
    post_load_adapter: Optional[Callable[[Any], Any]] = None,
    embedded_cubin_factory: Optional[Callable[[Path], Mapping[str, Path]]] = None,
    use_fast_math: bool = True,
    extra_cuda_cflags_by_source: Optional[Mapping[Union[str, Path], list[str]]] = None,
    **more: Any,
) -> JitSpec:
    """Describe a module and register it.

    Parameters
    ----------
    name : str
        Name of the module, its folder and its library.
    sources : Sequence[Union[str, Path]]
        Files to compile.
    extra_cflags, extra_cuda_cflags, extra_ldflags : Optional[list[str]]
        Flags of the host compiler, of nvcc and of the linker. A CUDA module gets those of published modules besides;
        ``FLASHINFER_JIT_DEBUG`` (where it is unset, ``FLASHINFER_JIT_VERBOSE``) decides between ``-O3`` and ``-O0``.
    extra_include_paths : Optional[Sequence[Union[str, Path]]]
        Folders of headers.
    needs_device_linking : bool
        Link with nvcc.
    post_load_adapter : Optional[Callable]
        Takes the loaded module and returns what ``build_and_load`` returns.
    embedded_cubin_factory : Optional[Callable]
        Takes the folder of the build and returns files by symbol; the bytes of each are linked between ``<symbol>`` and
        ``<symbol>_end``.
    use_fast_math : bool
        Compile CUDA sources with ``-use_fast_math``.
    extra_cuda_cflags_by_source : Optional[Mapping]
        Flags of single sources in place of ``extra_cuda_cflags`` and of fast math.
    **more
        Other fields of JitSpec, such as ``backend="cpu"``.
    """
    defaults: dict[str, Any] = {}
    if more.get("backend", "cuda") == "cuda" and not any(
        isinstance(value, str) for value in (extra_cflags, extra_cuda_cflags)
    ):
        host, cuda = _published_flags(list(extra_cflags or []), list(extra_cuda_cflags or []), use_fast_math)
        extra_cflags, extra_cuda_cflags = [*host, *(extra_cflags or [])], [*cuda, *(extra_cuda_cflags or [])]
        defaults["default_cuda_cflags"] = tuple(cuda)
    by_source = {Path(s).absolute(): list(flags) for s, flags in (extra_cuda_cflags_by_source or {}).items()}
    return describe_module(
        name,
        sources,
        extra_cflags,
        extra_cuda_cflags,
        extra_ldflags,
        extra_include_paths,
        needs_device_linking,
        post_load_adapter=post_load_adapter,
        embedded_cubin_factory=embedded_cubin_factory,
        cuda_cflags_by_source=by_source,
        **defaults,
        **more,
    )


def _published_flags(cflags: list[str], cuda_cflags: list[str], use_fast_math: bool) -> tuple[list[str], list[str]]:
    """Return the flags that published modules have, for the host compiler and for nvcc."""
    is_debug = knobs.jit_debug if os.environ.get("FLASHINFER_JIT_DEBUG") else knobs.jit_verbose
    host = [] if any(flag.startswith("-std=") for flag in cflags) else ["-std=c++17"]
    host += ["-Wno-switch-bool"]
    host += ["-O0", "-g"] if is_debug else ["-DNDEBUG"]
    cuda = [] if any(flag.startswith(("-std=", "--std=")) for flag in cuda_cflags) else ["-std=c++17"]
    cuda += [*get_nvcc_parallelism_flags(), *(["-use_fast_math"] if use_fast_math else [])]
    cuda += ["-Xfatbin=-compress-all", "--compress-mode=size", *cpp_ext.ENABLED_DTYPES]
    # Not -G: compiler caches refuse it.
    cuda += ["-g", "-O0", "--device-debug", "-lineinfo"] if is_debug else ["-O3", "-DNDEBUG"]
    return host, cuda


def refresh_current_compilation_context() -> None:
    """Find the CUDA targets anew at the next use, as after the GPUs of this process have changed."""
    current_compilation_context.forget()


def get_tmpdir() -> Path:
    """Return the folder ``tmp`` beside the modules, which is made if it is missing."""
    folder = jit_env.FLASHINFER_JIT_DIR / "tmp"
    make_folder(folder)
    return folder


class FlashInferJITLogger(logging.Logger):
    """Logger with the level of ``FLASHINFER_LOGGING_LEVEL`` and methods that log each message once."""

    def __init__(self, name: str = "flashinfer.jit") -> None:
        super().__init__(name)
        self.setLevel(knobs.logging_level)
        self.addHandler(logging.StreamHandler())
        self._said: set[tuple[int, str]] = set()

    def _once(self, level: int, message: str, *arguments: Any) -> None:
        text = message % arguments if arguments else message
        if (level, text) not in self._said:
            self._said.add((level, text))
            self.log(level, "%s", text)

    def debug_once(self, message: str, *arguments: Any) -> None:
        self._once(logging.DEBUG, message, *arguments)

    def info_once(self, message: str, *arguments: Any) -> None:
        self._once(logging.INFO, message, *arguments)

    def warning_once(self, message: str, *arguments: Any) -> None:
        self._once(logging.WARNING, message, *arguments)


def build_jit_specs(
    specs: Iterable[JitSpec], verbose: bool = False, skip_prebuilt: bool = True, progress: Progress = ProgressLine
) -> None:
    """Build many modules in parallel, as one ninja graph; pre-built and fresh modules are skipped."""
    wanted = [spec for spec in specs if not (skip_prebuilt and spec.is_aot)]
    build_modules(wanted, verbose or None, progress)


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
