# SPDX-License-Identifier: Apache-2.0
"""Installation of companion packages with pip: ``flashinfer-jit-cache`` (pre-built modules) and ``flashinfer-cubin``.

No index serves companions of this package by default: they are built with ``python -m flashinfer.aot`` and served by
whoever wants to. Packages of these names elsewhere hold other kernels, so an index must be named, by an option or by
``FLASHINFER_WHEEL_INDEX``.

A release may split its pre-built modules into *providers*, one package per architecture
(``flashinfer-jit-cache-sm90a``); ``flashinfer-jit-cache`` then only requires them. The mode ``minimal`` installs it and
the providers that the GPUs need.
"""

from __future__ import annotations

import email
import importlib.util
import os
import re
import shlex
import shutil
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Optional, Sequence

from packaging.requirements import Requirement

from .._runtime.errors import ArgumentError
from .._runtime.knobs import knobs
from ._cuda_architecture import parse_cuda_architecture, select_compatible_cuda_architecture
from .context import current_compilation_context

__all__ = ["Wheel", "cubin_wheel", "jit_cache_wheel", "minimal_jit_cache_wheel", "wheel_label"]

NO_INDEX = (
    "no index serves companions of this package: expected --index-url or FLASHINFER_WHEEL_INDEX with one of your own "
    "(python -m flashinfer.aot builds the modules); packages of this name elsewhere hold other kernels"
)
SHIM = "flashinfer-jit-cache"
Run = Callable[..., Any]  #: ``subprocess.run``


@dataclass(frozen=True)
class Wheel:
    """Packages to install, and the lines that describe them."""

    package: str
    title: str
    requirement: str
    index_url: Optional[str]
    lines: tuple[str, ...]
    is_nightly: bool
    has_dependencies: bool = False  #: whether pip installs what the package requires
    providers: tuple[str, ...] = ()  #: requirements of further packages

    def describe(self) -> str:
        return "\n".join(
            [
                f"=== {self.title} Wheel Install ===",
                *self.lines,
                f"Wheel index: {self.index_url or 'none'}",
                f"Requirement: {self.requirement}",
                f"Command: {shlex.join(self.command)}",
            ]
        )

    @property
    def command(self) -> list[str]:
        options = ["--no-deps"] * (not self.has_dependencies) + ["--pre"] * self.is_nightly
        index = ["--index-url", self.index_url] if self.index_url else []
        return [*_installer(), "--upgrade", *options, *index, self.requirement, *self.providers]

    def install(self, run: Run) -> None:
        """Run the command without a shell. A failure is a RuntimeError with its reason."""
        if self.index_url is None:
            raise RuntimeError(f"{self.package}: {NO_INDEX}")
        done = run(self.command, check=False)
        if done.returncode:
            raise RuntimeError(f"pip install failed with exit code {done.returncode}.")


def _installer() -> list[str]:
    """Return the command of pip, or of uv where it is on the path and made the environment, or there is no pip."""
    uv = shutil.which("uv")
    settings = Path(sys.prefix) / "pyvenv.cfg"
    is_made_by_uv = settings.exists() and re.search(r"^\s*uv\s*=", settings.read_text(), re.M) is not None
    if uv and (is_made_by_uv or importlib.util.find_spec("pip") is None):
        return [uv, "pip", "install", "--python", sys.executable]
    return [sys.executable, "-m", "pip", "install"]


def _index(given: Optional[str], is_nightly: bool, *folders: str) -> Optional[str]:
    """Return the index that an option names, else the folder of ``FLASHINFER_WHEEL_INDEX``; None without both."""
    if given or not knobs.wheel_index:
        return given
    return "/".join([knobs.wheel_index.rstrip("/"), *["nightly"] * is_nightly, *folders])


def _public(version: str) -> str:
    """Return a version without its local part, for a requirement."""
    if version == "0.0.0+unknown":
        raise RuntimeError("Could not determine the installed FlashInfer version.")
    return version.partition("+")[0]


def cubin_wheel(version: str, index_url: Optional[str], is_nightly: bool) -> Wheel:
    """Describe the installation of the kernels' binaries."""
    requirement = f"flashinfer-cubin=={_public(version)}"
    lines = (f"FlashInfer version: {version}",)
    return Wheel("flashinfer-cubin", "Cubin", requirement, _index(index_url, is_nightly), lines, is_nightly)


def jit_cache_wheel(
    version: str, index_url: Optional[str], is_nightly: bool, cuda: str, labels: Sequence[str]
) -> Wheel:
    """Describe the installation of the pre-built modules for every architecture."""
    label = wheel_label(cuda, labels)
    lines = (
        f"FlashInfer version: {version}",
        "CUDA version: {}.{}".format(*_numbers(cuda)),
        f"Wheel CUDA label: {label}",
        "Install mode: all",
        "Providers: all",
    )
    requirement, index = f"{SHIM}=={_public(version)}+{label}", _index(index_url, is_nightly, label)
    return Wheel(SHIM, "JIT Cache", requirement, index, lines, is_nightly, has_dependencies=True)


def minimal_jit_cache_wheel(wheel: Wheel, architectures: Sequence[str], run: Run) -> Wheel:
    """Reduce the installation of all pre-built modules to those for some architectures, or for the GPUs here.

    The package is downloaded, because its metadata list the providers that exist.
    """
    targets = [_architecture(text) for text in architectures] or [
        f"sm{major}{minor}" for major, minor in sorted(current_compilation_context.TARGET_CUDA_ARCHS)
    ]
    if not targets:
        raise RuntimeError("No CUDA architecture could be detected: expected --sm, such as --sm 90a")
    if wheel.index_url is None:
        raise RuntimeError(f"{wheel.package}: {NO_INDEX}")
    published = _providers(wheel, run)
    chosen = []
    for target in targets:
        best = select_compatible_cuda_architecture(target, published)
        if best is None:
            known = ", ".join(sorted(published)) or "none"
            raise RuntimeError(
                f"No published jit-cache provider is compatible with {target}. Available providers: {known}"
            )
        chosen.append(best)
    names = sorted(set(chosen))
    lines = (*wheel.lines[:-2], "Install mode: minimal", f"Providers: {', '.join(names)}")
    requirements = tuple(published[name] for name in names)
    return Wheel(
        wheel.package, wheel.title, wheel.requirement, wheel.index_url, lines, wheel.is_nightly, False, requirements
    )


def _architecture(text: str) -> str:
    """Return ``sm90a`` for it, ``9.0a``, ``90a``, ``compute_90a`` or ``sm_90a``."""
    bare = re.sub(r"^(sm_?|compute_?)", "", text.strip().lower()).replace(".", "")
    try:
        return str(parse_cuda_architecture(f"sm{bare}"))
    except ValueError:
        raise ArgumentError(f"Invalid SM architecture: --sm must be like sm80, 9.0a or sm_120f, got {text!r}") from None


def _providers(wheel: Wheel, run: Run) -> dict[str, str]:
    """Download the package that requires the providers; return architecture -> requirement."""
    with tempfile.TemporaryDirectory(prefix="flashinfer-jit-cache-") as folder:
        options = ["--disable-pip-version-check", "--no-deps", "--only-binary=:all:", "--dest", folder]
        options += ["--pre"] * wheel.is_nightly
        command = [sys.executable, "-m", "pip", "download", *options, "--index-url", str(wheel.index_url)]
        done = run([*command, wheel.requirement], check=False)
        if done.returncode:
            raise RuntimeError(f"pip download failed with exit code {done.returncode}.")
        files = [name for name in os.listdir(folder) if name.endswith(".whl")]
        if len(files) != 1:
            raise RuntimeError(f"pip download of {wheel.requirement} must give one wheel, got {files}")
        with zipfile.ZipFile(Path(folder) / files[0]) as archive:
            (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
            metadata = email.message_from_bytes(archive.read(name))
    found = {}
    for text in metadata.get_all("Requires-Dist") or []:
        requirement = Requirement(text)
        if requirement.name.startswith(f"{SHIM}-"):
            pins = [s.version for s in requirement.specifier if s.operator == "=="]
            if len(pins) != 1:
                raise RuntimeError(f"{SHIM}: each provider must be pinned with ==, got {text}")
            found[requirement.name.removeprefix(f"{SHIM}-")] = f"{requirement.name}=={pins[0]}"
    return found


def _numbers(version: str) -> tuple[int, int]:
    """Return major and minor of ``12.9``, ``12.9.1`` or ``cu129``."""
    text = version.strip().lower()
    if text.startswith("cu") and text[2:].isdigit() and len(text) > 3:
        return int(text[2:-1]), int(text[-1])
    parts = text.split(".")
    if len(parts) < 2 or not (parts[0].isdigit() and parts[1].isdigit()):
        raise ArgumentError(f"--cuda-version must be major.minor or a label such as cu129, got {version!r}")
    return int(parts[0]), int(parts[1])


def wheel_label(cuda: str, supported: Sequence[str]) -> str:
    """Return the label, such as ``cu129``, of the newest supported release with the same major that is not newer."""
    major, minor = _numbers(cuda)
    known = sorted(_numbers(version) for version in supported)
    fitting = [version for version in known if version[0] == major and version[1] <= minor]
    if not fitting:
        labels = ", ".join("cu{}{}".format(*version) for version in known)
        raise RuntimeError(
            f"No compatible flashinfer-jit-cache wheel found for CUDA {cuda}\nSupported wheel labels: {labels}"
        )
    return "cu{}{}".format(*fitting[-1])
