# SPDX-License-Identifier: Apache-2.0
"""Names of CUDA architectures, such as ``sm90a``, and which binary of several a device should run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Iterable, Optional

__all__ = [
    "CUDAArchitecture",
    "cuda_binary_target_compatibility_score",
    "parse_cuda_architecture",
    "select_compatible_cuda_architecture",
]

_NAME = re.compile(r"sm(\d{1,2})(\d)([af]?)")


@dataclass(frozen=True)
class CUDAArchitecture:
    """Compute capability of a binary or device; the suffix is ``a`` (one chip), ``f`` (a family) or empty."""

    major: int
    minor: int
    suffix: str = ""

    def __str__(self) -> str:
        return f"sm{self.major}{self.minor}{self.suffix}"


def parse_cuda_architecture(name: str) -> CUDAArchitecture:
    """Parse a name such as ``sm90a``."""
    found = _NAME.fullmatch(name)
    if found is None:
        raise ValueError(f"Invalid CUDA architecture: name must be like sm90a, got {name!r}")
    return CUDAArchitecture(int(found[1]), int(found[2]), found[3])


def cuda_binary_target_compatibility_score(binary: str, device: str) -> Optional[tuple[int, int]]:
    """Return how well code for ``binary`` suits ``device``, larger is better; None if it does not run there.

    Code for exactly the device comes first, then code for its chip (``a``), its family (``f``), and its major (no
    suffix); of the last two, the newest minor.
    """
    code, chip = parse_cuda_architecture(binary), parse_cuda_architecture(device)
    if binary == device:
        return (4, code.minor)
    if code.major != chip.major or code.minor > chip.minor:
        return None
    if code.suffix == "a":
        return (3, code.minor) if code.minor == chip.minor else None
    return (2 if code.suffix == "f" else 1, code.minor)


def select_compatible_cuda_architecture(device: str, available: Iterable[str]) -> Optional[str]:
    """Return the name in ``available`` whose code suits ``device`` best; None if none runs there."""
    scores = {name: cuda_binary_target_compatibility_score(name, device) for name in available}
    fitting = [(score, name) for name, score in scores.items() if score is not None]
    return max(fitting)[1] if fitting else None
