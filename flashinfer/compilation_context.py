# SPDX-License-Identifier: Apache-2.0
"""CUDA targets of a build, and the nvcc flags for them.

Targets come from ``FLASHINFER_CUDA_ARCH_LIST``, else from the GPUs that are visible. A target is ``(major, minor)``
with the minor as text, because it carries nvcc's suffix: ``a`` runs on exactly that capability and may use its special
instructions, ``f`` and no suffix run on the same major from that minor on.
"""

from __future__ import annotations

import logging
import re
from typing import Iterable, Optional

from ._runtime.arch import get_visible_capabilities
from ._runtime.errors import ArgumentError
from ._runtime.knobs import knobs

__all__ = [
    "CompilationContext",
    "cutlass_supports_sm107",
    "sm100a_nvcc_flags",
    "sm100f_nvcc_flags",
    "sm103a_nvcc_flags",
    "sm110a_nvcc_flags",
    "sm120a_nvcc_flags",
    "sm120f_nvcc_flags",
    "sm121a_nvcc_flags",
    "sm90a_nvcc_flags",
]

logger = logging.getLogger("flashinfer.jit")

Target = tuple[int, str]

COMMON_NVCC_FLAGS = ["-DFLASHINFER_ENABLE_FP8_E8M0", "-DFLASHINFER_ENABLE_FP4_E2M1"]

_TOKEN = re.compile(r"(\d{1,2})\.(\d)([af]?)")


def gencode(target: Target) -> str:
    name = f"{target[0]}{target[1]}"
    return f"-gencode=arch=compute_{name},code=sm_{name}"


sm90a_nvcc_flags = [gencode((9, "0a")), *COMMON_NVCC_FLAGS]
sm100a_nvcc_flags = [gencode((10, "0a")), *COMMON_NVCC_FLAGS]
sm100f_nvcc_flags = [gencode((10, "0f")), *COMMON_NVCC_FLAGS]
sm103a_nvcc_flags = [gencode((10, "3a")), *COMMON_NVCC_FLAGS]
sm110a_nvcc_flags = [gencode((11, "0a")), *COMMON_NVCC_FLAGS]
sm120a_nvcc_flags = [gencode((12, "0a")), *COMMON_NVCC_FLAGS]
sm120f_nvcc_flags = [gencode((12, "0f")), *COMMON_NVCC_FLAGS]
sm121a_nvcc_flags = [gencode((12, "1a")), *COMMON_NVCC_FLAGS]


def cutlass_supports_sm107() -> bool:
    """Return whether CUTLASS knows capability 10.7: False, because this package has no CUTLASS.

    SGLang then compiles its own kernels for the family target 10.0f, which runs on 10.7.
    """
    return False


def _cuda_has_families() -> bool:
    """Return True if nvcc knows ``f`` targets and sm_121 (CUDA 12.9 on), or if there is no nvcc to ask."""
    from .jit.toolchain import get_cuda_version

    release = get_cuda_version().release[:2]
    return release == (0, 0) or release >= (12, 9)


def _with_suffix(major: int, minor: int) -> Target:
    """Add the architecture suffix that unlocks most features of the chip to a target without a suffix."""
    if major < 9:
        return (major, str(minor))
    if (major, minor) == (12, 0):
        return (12, "0f" if _cuda_has_families() else "0a")
    if (major, minor) == (12, 1) and not _cuda_has_families():
        raise RuntimeError("the CUDA target 12.1 needs CUDA 12.9 or newer")
    return (major, f"{minor}a")


def _parse(text: str) -> set[Target]:
    targets = set()
    for token in re.split(r"[\s,;]+", text.strip(" \t\r\n,;")):
        match = _TOKEN.fullmatch(token)
        if match is None:
            raise ValueError(
                "FLASHINFER_CUDA_ARCH_LIST: target must be major.minor with an optional letter a or f, such as '8.0 "
                f"9.0a 12.0f' (separated by spaces, commas or semicolons), got {token!r}"
            )
        major, minor, letter = int(match[1]), int(match[2]), match[3]
        targets.add((major, f"{minor}{letter}") if letter else _with_suffix(major, minor))
    return targets


class CompilationContext:
    """CUDA targets of this process, determined by the first read of ``TARGET_CUDA_ARCHS``, not by the constructor."""

    def __init__(self) -> None:
        self._known: Optional[tuple[str, set[Target]]] = None  # text of the variable, and the targets it named
        self._warned = False

    @property
    def TARGET_CUDA_ARCHS(self) -> set[Target]:
        """Targets such as ``{(8, '0'), (9, '0a')}``.

        Read again when ``FLASHINFER_CUDA_ARCH_LIST`` changes, and as long as no GPU was found: a process may ask
        before its GPU is usable.
        """
        text = knobs.cuda_arch_list.strip(" \t\r\n,;")
        if self._known is None or self._known[0] != text or not self._known[1]:
            self._known = (text, _parse(text) if text else self._detect())
        return self._known[1]

    @TARGET_CUDA_ARCHS.setter
    def TARGET_CUDA_ARCHS(self, targets: Iterable[Target]) -> None:
        plain = {(major, str(minor)) for major, minor in targets}  # published callers name the minor as an int
        self._known = (knobs.cuda_arch_list.strip(" \t\r\n,;"), plain)

    def forget(self) -> None:
        """Determine the targets anew at the next read."""
        self._known = None

    @staticmethod
    def _normalize_cuda_arch(major: int, minor: int) -> Target:
        """Return the target of a device, such as ``(9, "0a")``; vLLM asks for it to word an error."""
        return _with_suffix(major, minor)

    def _detect(self) -> set[Target]:
        """Return the targets of the visible GPUs. Having none is reported only when something is to be compiled."""
        try:
            return {_with_suffix(*capability) for capability in get_visible_capabilities()}
        except (RuntimeError, AssertionError) as error:  # raised after a fork, with an old driver, without CUDA
            reason = str(error).splitlines()[0]
        if not self._warned:
            self._warned = True
            logger.warning("no CUDA target: %s. Set FLASHINFER_CUDA_ARCH_LIST, such as '9.0a', to compile.", reason)
        return set()

    def get_nvcc_flags_list(
        self, supported_major_versions: Optional[list[int]] = None, map_sm107_to_100f: bool = False
    ) -> list[str]:
        """Flags for every target, or for those whose major is listed.

        Parameters
        ----------
        supported_major_versions : Optional[List[int]]
            Majors the kernel is written for, such as ``arch.HOPPER_ON_MAJORS``; ``None`` takes every target.
        map_sm107_to_100f : bool
            Compile 10.7 as the family target 10.0f, for compilers that do not know it.

        Returns
        -------
        List[str]
            One ``-gencode`` per target in ascending order, then the defines that every CUDA source gets.
        """
        if isinstance(supported_major_versions, (int, str)):
            raise ArgumentError(
                f"get_nvcc_flags_list: supported_major_versions must be a list of int, got {supported_major_versions!r}"
            )
        targets = {
            target
            for target in self.TARGET_CUDA_ARCHS
            if supported_major_versions is None or target[0] in supported_major_versions
        }
        if map_sm107_to_100f:
            targets = {(10, "0f") if (t[0], t[1][:1]) == (10, "7") else t for t in targets}
        if not targets:
            present = " ".join(f"{major}.{minor}" for major, minor in sorted(self.TARGET_CUDA_ARCHS)) or "none"
            raise RuntimeError(
                f"No supported CUDA architectures found for major versions {supported_major_versions}. "
                f"Targets: {present} (from FLASHINFER_CUDA_ARCH_LIST, else the visible GPUs)."
            )
        return [gencode(target) for target in sorted(targets)] + COMMON_NVCC_FLAGS
