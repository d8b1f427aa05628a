# SPDX-License-Identifier: Apache-2.0
"""Faults of the chaos suite. Each is injected into one of several processes that start cold on one cache, or into it.

A fault is a function of ``Round``. ``before`` faults change the cache or the clock of its files while nobody runs;
``during`` faults run in the first process of the round, which may then fail with an error, but not with a wrong answer.
"""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

from flashinfer.jit import JitSpec, clear_cache_dir
from flashinfer.jit.manifest import manifest_path

DAY = 86400


@dataclass
class Round:
    """State that a fault can change: the module of this round, the folder of its sources, and random numbers."""

    spec: JitSpec
    sources: Path
    numbers: random.Random


# ------------------------------------------------------------------------------------------------ before


def skew_clock(of: Round) -> None:
    """Move the times of sources and of the cache by up to a day, into the past or the future."""
    for folder in (of.sources, of.spec.build_dir):
        for path in folder.glob("*"):
            moved = time.time() + of.numbers.uniform(-DAY, DAY)
            os.utime(path, (moved, moved))


def damage_library(of: Round) -> None:
    """Flip a byte of the library, or cut it short, as a full disk or a lost page would."""
    library = of.spec.jit_library_path
    data = bytearray(library.read_bytes())
    place = of.numbers.randrange(len(data))
    if of.numbers.random() < 0.5:
        del data[place:]
    else:
        data[place] ^= 0xFF
    replace(library, bytes(data))


def damage_manifest(of: Round) -> None:
    """Cut the manifest short at any place."""
    path = manifest_path(of.spec.jit_library_path)
    data = path.read_bytes()
    replace(path, data[: of.numbers.randrange(len(data))])


def leave_foreign_module(of: Round, key: str, value: Any) -> None:
    """Leave a library that must not be loaded, with a manifest that says why: it is of another ``key``.

    Its bytes are no library at all: loading them would fail where an illegal instruction would end the process.
    """
    path = manifest_path(of.spec.jit_library_path)
    content = json.loads(path.read_text())
    foreign = b"of another machine"
    from hashlib import sha256

    replace(of.spec.jit_library_path, foreign)
    content = {**content, key: value, "library": sha256(foreign).hexdigest()}
    replace(path, json.dumps(content).encode())


def of_another_version(of: Round) -> None:
    leave_foreign_module(of, "version", "0.0.1")


def of_another_cpu(of: Round) -> None:
    leave_foreign_module(of, "arch", "cpu-x86_64-avx9000-0123456789")


def of_another_compiler(of: Round) -> None:
    leave_foreign_module(of, "compilers", {"cxx": {"version": "(fake) 99.0", "stamp": None}})


def replace(path: Path, data: bytes) -> None:
    """Replace a file by another, so that a process that has the old one open keeps it."""
    temporary = path.with_name(f".{path.name}.chaos")
    temporary.write_bytes(data)
    os.replace(temporary, path)


# ------------------------------------------------------------------------------------------------ during


def fail_rename(of: Round) -> None:
    """Let a rename fail, as a network file system does: one of the first few of this process."""
    real, left = os.replace, of.numbers.randrange(3)

    def failing(source: Any, target: Any, **options: Any) -> None:
        nonlocal left
        left -= 1
        if left == -1:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(target))
        real(source, target, **options)

    os.replace = failing


def fill_disk(of: Round) -> None:
    """Let writes fail beyond a few KiB, in this process and in the compilers it starts."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # write() then fails, instead of ending the process
    limit = of.numbers.choice([0, 512, 4096, 12288])
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


def clear_cache(of: Round) -> None:
    """Delete the cache again and again while the others build."""
    for _ in range(of.numbers.randrange(1, 5)):
        clear_cache_dir()
        time.sleep(of.numbers.uniform(0, 0.05))


Fault = Callable[[Round], None]

BEFORE: dict[str, Fault] = {
    "clock skew": skew_clock,
    "damaged library": damage_library,
    "damaged manifest": damage_manifest,
    "cache of another version": of_another_version,
    "cache of another CPU": of_another_cpu,
    "cache of another compiler": of_another_compiler,
}
DURING: dict[str, Fault] = {"failed rename": fail_rename, "full disk": fill_disk, "cleared cache": clear_cache}
KILL = "killed builder"  #: SIGKILL after a random time; the compilers it started go on
