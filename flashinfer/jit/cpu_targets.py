# SPDX-License-Identifier: Apache-2.0
"""CPU targets: the instruction sets that modules can be compiled for ahead of time, and those that this machine has.

A module that is compiled on first use takes every instruction of the machine (``-march=native``). A module that is
shipped is compiled for one of ``LEVELS``, and is loaded only where /proc/cpuinfo names all instructions of the level.
"""

from __future__ import annotations

import functools
import platform
from hashlib import sha256

from .._runtime.errors import ArgumentError

__all__ = ["LEVELS", "check_target", "cpu_arch_tag", "march", "supported_levels", "target_tag"]

_V2 = "cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3"
_V3 = f"{_V2} abm avx avx2 bmi1 bmi2 f16c fma movbe xsave"

#: Levels, best first, by machine: the value of ``-march`` and the instructions that /proc/cpuinfo must name.
LEVELS: dict[str, dict[str, str]] = {
    "x86_64": {
        "x86-64-v4": f"{_V3} avx512bw avx512cd avx512dq avx512f avx512vl",
        "x86-64-v3": _V3,
        "x86-64-v2": _V2,
    },
    "aarch64": {"armv8-a": "asimd fp"},
}


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Return the instruction sets that /proc/cpuinfo names; none where there is no such file."""
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.split(":")[0].strip().lower() in ("flags", "features"):
                    return frozenset(line.split(":", 1)[1].split())
    except OSError:
        pass
    return frozenset()


@functools.cache
def cpu_arch_tag() -> str:
    """``cpu-x86_64-avx512-3f2a1c``: machine, widest vector set, and a hash of all feature flags.

    CPU modules are built with ``-march=native``, so a home directory shared by different machines needs one
    directory for each instruction set.
    """
    known = ("avx512_bf16", "avx512f", "avx2", "sve2", "sve", "asimd", "sse2")
    level = next((k for k in known if k in cpu_flags()), "generic").replace("_", "")
    flags = " ".join(sorted(cpu_flags()))
    return f"cpu-{platform.machine()}-{level}-{sha256(flags.encode()).hexdigest()[:6]}"


def supported_levels() -> list[str]:
    """Return the levels whose instructions this machine has, best first."""
    levels = LEVELS.get(platform.machine(), {})
    return [level for level, flags in levels.items() if cpu_flags() >= set(flags.split())]


def check_target(target: str) -> str:
    """Return ``target`` if modules can be compiled for it on this machine: ``native`` or a level of its kind of CPU."""
    known = ["native", *LEVELS.get(platform.machine(), {})]
    if target not in known:
        raise ArgumentError(
            f"aot: cpu_target must be one of {', '.join(known)} on {platform.machine()}, got {target!r}"
        )
    return target


def target_tag(target: str) -> str:
    """Return the folder of a target: ``cpu-x86-64-v3``; of ``native`` and of no target, that of this very machine."""
    return cpu_arch_tag() if target in ("", "native") else f"cpu-{target}"


def march(target: str) -> str:
    return f"-march={target or 'native'}"
