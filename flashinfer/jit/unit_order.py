# SPDX-License-Identifier: Apache-2.0
"""Estimate how long a unit compiles, from the size of what it includes: a build starts the longest units first."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from typing import Optional

from . import env as jit_env
from .spec import ModuleSpec

__all__ = ["own_bytes"]

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*[<"]([^">\n]+)[">]', re.MULTILINE)
_KERNELS = (".cuh", "_cpu.h")


def own_bytes(spec: ModuleSpec, source: Path, has_kernels: bool) -> int:
    """Return the bytes of a source and of all headers of this package that it includes, directly or not.

    The headers of compilers and libraries take about the same time in each unit. Sources without kernels include
    kernels under conditions that do not hold; other conditions of the preprocessor are not looked at. A header that was
    edited after it was read first counts with its size of then.
    """
    skipped = () if has_kernels else _KERNELS
    generated = {path.name: path for path in spec.generated}
    folders = (str(jit_env.FLASHINFER_INCLUDE_DIR), str(jit_env.FLASHINFER_CSRC_DIR))
    sizes: dict[Path, int] = {}
    pending = [source]
    while pending:
        path = pending.pop()
        if path in sizes:
            continue
        sizes[path], names = _measure(spec.generated[path]) if path in spec.generated else _measure_file(path)
        for name in names:
            found = generated.get(name) or _locate(name, path.parent, folders)
            if found is not None and not name.endswith(skipped):
                pending.append(found)
    return sum(sizes.values())


def _measure(text: str) -> tuple[int, list[str]]:
    return len(text), _INCLUDE.findall(text)


@functools.cache
def _measure_file(path: Path) -> tuple[int, list[str]]:
    return _measure(path.read_text(errors="replace"))


@functools.cache
def _locate(name: str, folder: Path, more: tuple[str, ...]) -> Optional[Path]:
    """Return the file that ``#include`` of a name in a file of ``folder`` reads, if it is one of this package."""
    paths = (os.path.normpath(os.path.join(place, name)) for place in (str(folder), *more))
    return next((Path(path) for path in paths if os.path.isfile(path)), None)
