# SPDX-License-Identifier: Apache-2.0
"""Data of one compiled module: name, sources, flags, and where its files lie. Independent of any op.

``manifest`` and ``cpp_ext`` read a spec, ``load`` opens its library, ``build`` makes it. None of them is known here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Mapping, Optional

from . import env as jit_env
from .context import current_compilation_context
from .prebuilt import Target, find_prebuilt, find_provided

__all__ = ["ModuleSpec"]


@dataclass(eq=False)
class ModuleSpec:
    """One module: its sources and flags. Making a spec touches no disk."""

    name: str
    sources: list[Path]
    extra_cflags: list[str] = field(default_factory=list)
    extra_cuda_cflags: list[str] = field(default_factory=list)
    extra_ldflags: list[str] = field(default_factory=list)
    extra_include_dirs: list[Path] = field(default_factory=list)
    is_class: bool = False
    needs_device_linking: bool = False
    backend: str = "cuda"  #: "cuda" or "cpu"
    host_sources: frozenset[Path] = frozenset()  #: ``.cu`` files without kernels, for the host compiler with -O2
    generated: Mapping[Path, str] = field(default_factory=dict)  #: sources written inside the build lock
    supported_major_versions: Optional[list[int]] = None  #: limits the targets to these majors
    left_out: Mapping[Target, str] = field(default_factory=dict)  #: targets that cannot hold the module, and the reason
    default_cuda_cflags: tuple[str, ...] = ()  #: the part of extra_cuda_cflags that gen_jit_spec added
    cuda_cflags_by_source: Mapping[Path, list[str]] = field(default_factory=dict)  #: in place of extra_cuda_cflags
    post_load_adapter: Optional[Callable[[Any], Any]] = None  #: wraps what build_and_load returns
    embedded_cubin_factory: Optional[Callable[[Path], Mapping[str, Path]]] = None  #: folder -> files by symbol
    cpu_target: str = ""  #: instruction set of a CPU module built ahead of time; empty: all that this machine has

    def __post_init__(self) -> None:
        for name in ("extra_cflags", "extra_cuda_cflags", "extra_ldflags", "extra_include_dirs"):
            if getattr(self, name) is None:  # published callers pass None for an empty list
                setattr(self, name, [])
        self.embedded: list[str] = []  #: objects made of the files of embedded_cubin_factory, when it was built
        self.found: Optional[Path] = None  #: the fresh library that was found last; the cache has several folders

    @property
    def library_name(self) -> str:
        return f"{self.name}.so"

    @property
    def build_dir(self) -> Path:
        return jit_env.jit_dir(self.backend, self.cpu_target) / self.name

    @property
    def ninja_path(self) -> Path:
        return self.build_dir / "build.ninja"

    @property
    def jit_library_path(self) -> Path:
        return self.build_dir / self.library_name

    @property
    def lock_path(self) -> Path:
        return jit_env.jit_dir(self.backend, self.cpu_target) / f"{self.name}.lock"

    @property
    def cuda_targets(self) -> list[Target]:
        """Return the CUDA targets that the module is compiled for, in ascending order."""
        majors = self.supported_major_versions
        return [
            target
            for target in sorted(current_compilation_context.TARGET_CUDA_ARCHS)
            if (majors is None or target[0] in majors) and target not in self.left_out
        ]

    @property
    def aot_artifacts(self) -> tuple[jit_env.AOTArtifact, ...]:
        """Return the pre-built libraries of this module that this machine can use; none if it has to be compiled."""
        targets = self.cuda_targets if self.backend == "cuda" else ()
        found = find_prebuilt(self.name, self.backend, self.cpu_target, targets)
        if found is not None:
            return (jit_env.AOTArtifact("flashinfer-python", found, None),)
        return find_provided(self.name, targets)

    @property
    def _prebuilt(self) -> Optional[Path]:
        found = self.aot_artifacts
        return found[0].path if found else None

    @property
    def aot_path(self) -> Path:
        """Return the path of the pre-built library for this machine, or the path where one would be looked for last."""
        return self._prebuilt or jit_env.FLASHINFER_AOT_DIR / self.name / self.library_name

    @property
    def is_aot(self) -> bool:
        return self._prebuilt is not None

    @property
    def is_ninja_generated(self) -> bool:
        return self.ninja_path.exists()

    def source_text(self, source: Path) -> str:
        return self.generated[source] if source in self.generated else source.read_text(errors="replace")
