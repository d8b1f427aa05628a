# SPDX-License-Identifier: Apache-2.0
"""Build and load a set of modules up front, so that nothing compiles while a server is serving."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Iterable, Union

import torch

from ._runtime.errors import ArgumentError

__all__ = ["WarmupReport", "warmup"]


@dataclass(frozen=True)
class WarmupReport:
    """Result of a warm-up: the loaded modules, the modules among them that were compiled, and the seconds it took."""

    modules: tuple[str, ...]
    built: tuple[str, ...]
    seconds: float


def warmup(
    names: Union[str, Iterable[str], None] = None,
    device: Union[str, torch.device, None] = None,
    progress: bool = True,
) -> WarmupReport:
    """Build, in one parallel graph, and load the modules of the given families.

    Parameters
    ----------
    names : Union[str, Iterable[str], None]
        Families (``"norm"``) or module names (``"norm_cpu"``); default: every family.
    device : Union[str, torch.device, None]
        ``"cuda"`` or ``"cpu"``; default: CUDA where there is a GPU, else the CPU.
    progress : bool
        Show a progress bar on stderr while something compiles.

    Returns
    -------
    WarmupReport
        Names, what was built, seconds.

    Examples
    --------
    >>> flashinfer.warmup(["norm"])
    """
    from .aot import FAMILIES, gen_family_modules
    from .jit.core import JitSpec, build_jit_specs
    from .jit.progress import ProgressBar, ProgressLine

    backend = _device_type(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if backend not in ("cpu", "cuda"):
        raise ArgumentError(f"warmup: device must be cpu or cuda, got {str(device)!r}")
    known = {family: list(gen_family_modules(family, backend)) for family in FAMILIES}
    by_name = {spec.name: spec for specs in known.values() for spec in specs}
    wanted = FAMILIES if names is None else (names,) if isinstance(names, str) else tuple(names)
    chosen: dict[str, JitSpec] = {}
    for name in wanted:
        if name not in known and name not in by_name:
            raise ArgumentError(
                f"warmup: name must be one of {', '.join(known)}, or a module for {backend} that "
                f"`flashinfer list-modules` names, got {name!r}"
            )
        specs = known[name] if name in known else [by_name[name]]
        chosen.update({spec.name: spec for spec in specs})

    start = time.perf_counter()
    stale = tuple(name for name, spec in chosen.items() if not spec.is_compiled)
    build_jit_specs(chosen.values(), progress=ProgressBar if progress and stale else ProgressLine)
    for spec in chosen.values():
        spec.build_and_load()
    return WarmupReport(tuple(chosen), stale, time.perf_counter() - start)


def _device_type(device: Union[str, torch.device]) -> str:
    try:
        return torch.device(device).type
    except RuntimeError:  # our error names cpu and cuda; torch's lists all device types
        return str(device)
