# SPDX-License-Identifier: Apache-2.0
"""Installation of companion packages with pip: ``flashinfer-jit-cache`` (pre-built modules) and ``flashinfer-cubin``.

No index serves companions of this package: they are built with ``python -m flashinfer.aot`` and served by whoever wants
to. Packages of these names elsewhere hold other kernels, so an index must be named.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Callable, Optional, Sequence

from .._runtime.errors import ArgumentError

__all__ = ["Wheel", "cubin_wheel", "jit_cache_wheel", "wheel_label"]

NO_INDEX = (
    "no index serves companions of this package: expected --index-url with one of your own (python -m flashinfer.aot "
    "builds the modules); packages of this name elsewhere hold other kernels"
)


@dataclass(frozen=True)
class Wheel:
    """A package to install, and the lines that describe it."""

    package: str
    title: str
    requirement: str
    index_url: Optional[str]
    lines: tuple[str, ...]
    is_nightly: bool

    def describe(self) -> str:
        return "\n".join(
            [
                f"=== {self.title} Wheel Install ===",
                *self.lines,
                f"Wheel index: {self.index_url or 'none'}",
                f"Requirement: {self.requirement}",
            ]
        )

    def install(self, run: Callable[..., Any]) -> None:
        """Run pip without a shell. ``run`` is ``subprocess.run``. A failure is a RuntimeError with its reason."""
        if self.index_url is None:
            raise RuntimeError(f"{self.package}: {NO_INDEX}")
        before = [sys.executable, "-m", "pip", "install", "--upgrade", "--no-deps", *["--pre"] * self.is_nightly]
        done = run([*before, "--index-url", self.index_url, self.requirement], check=False)
        if done.returncode:
            raise RuntimeError(f"pip install failed with exit code {done.returncode}.")


def cubin_wheel(version: str, index_url: Optional[str], is_nightly: bool) -> Wheel:
    public = version.partition("+")[0]
    lines = (f"FlashInfer version: {public}",)
    return Wheel("flashinfer-cubin", "Cubin", f"flashinfer-cubin=={public}", index_url, lines, is_nightly)


def jit_cache_wheel(
    version: str, index_url: Optional[str], is_nightly: bool, cuda: str, labels: Sequence[str]
) -> Wheel:
    public, label = version.partition("+")[0], wheel_label(cuda, labels)
    lines = (f"FlashInfer version: {public}", f"CUDA version: {cuda}", f"Wheel CUDA label: {label}")
    requirement = f"flashinfer-jit-cache=={public}+{label}"
    return Wheel("flashinfer-jit-cache", "JIT Cache", requirement, index_url, lines, is_nightly)


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
