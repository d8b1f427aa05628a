# SPDX-License-Identifier: Apache-2.0
"""Pre-built modules: which library of ``FLASHINFER_AOT_DIR`` fits this machine.

    <aot>/<name>/<name>.so                       CUDA; index.json tells the targets
    <aot>/cpu-x86-64-v3/<name>/<name>.so         CPU, for machines with these instructions
    <aot>/index.json                             {"schema": 1, "modules": {"<path>": {"targets": ["80", "90a"],
                                                     "version": "0.7.2", "sources": {"{include}/...": "<SHA-256>"}}}}

A library that ``index.json`` does not name is taken for one of this machine: somebody has put it there by hand. One of
another release, or made from other sources, is not loaded: a kernel whose arguments changed their meaning would give
wrong numbers. A
directory that ``FLASHINFER_AOT_DIR`` names must be trusted as a cache is. Modules of an installed package are trusted
as its Python code is.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import sys
from hashlib import sha256
from pathlib import Path
from typing import Iterator, Mapping, Optional, Sequence

from .._runtime.knobs import knobs
from . import env as jit_env
from .cpu_targets import supported_levels, target_tag
from .trust import refusal
from .utils import locked, write_atomically

__all__ = ["find_prebuilt", "find_provided", "prebuilt_folders", "read_index", "record_modules", "recorded_sources"]

logger = logging.getLogger("flashinfer.jit")

SCHEMA = 1
_TARGET = re.compile(r"([0-9]{1,2})([0-9])([af]?)")
Target = tuple[int, str]


def prebuilt_folders(backend: str, cpu_target: str = "") -> Iterator[Path]:
    """Return the folders that may hold a pre-built module for this machine, or for one CPU target; best first."""
    root = jit_env.FLASHINFER_AOT_DIR
    if backend == "cpu" and cpu_target:
        yield root / target_tag(cpu_target)
        return
    if backend == "cpu":
        yield root / target_tag("")
        yield from (root / target_tag(level) for level in supported_levels())
    yield root


def find_prebuilt(name: str, backend: str, cpu_target: str = "", targets: Sequence[Target] = ()) -> Optional[Path]:
    """Return the pre-built library of a module that runs on this machine; None if there is none.

    ``targets`` are the CUDA targets that the library must have code for.
    """
    if _is_foreign(jit_env.FLASHINFER_AOT_DIR):
        return None
    for folder in prebuilt_folders(backend, cpu_target):
        library = folder / name / f"{name}.so"
        if not (_exists(library) and _is_trusted(folder, library)):
            continue
        if (backend == "cpu" or _covers(library, targets)) and _is_of_these_sources(library):
            return library
    return None


def find_provided(name: str, targets: Sequence[Target]) -> tuple[jit_env.AOTArtifact, ...]:
    """Return libraries of providers (:mod:`.providers`) that together have code for all targets; none if one lacks."""
    if not targets:
        return ()
    from .providers import best_artifacts

    names = [f"sm{major}{minor}" for major, minor in targets]
    found = best_artifacts(name, names)
    for target in names:
        if not best_artifacts(name, [target]):
            return ()
    return found if all(_is_of_these_sources(artifact.path, artifact.path.parents[1]) for artifact in found) else ()


def _exists(library: Path) -> bool:
    """Tell whether there is a library. One in a folder that this user may not enter is none; say so once."""
    try:
        library.stat()
    except PermissionError as error:
        if knobs.aot_dir:
            jit_env.warn_untrusted(f"{library.parent} cannot be read ({error.strerror})")
        return False
    except (OSError, ValueError):  # none there, or NUL in FLASHINFER_AOT_DIR
        return False
    return True


def _is_foreign(root: Path) -> bool:
    """Tell whether modules are those of an installed package that we have not built: ours has an ``index.json``.

    Other projects use the name of the package and the names of its modules for kernels with other signatures.
    """
    package = sys.modules.get("flashinfer_jit_cache")
    of_package = getattr(package, "get_jit_cache_dir", None)  # a shim has none: its providers are checked one by one
    if of_package is None or str(root) != of_package() or (root / "index.json").exists():
        return False
    _warn_foreign(str(root))
    return True


@functools.cache
def _warn_foreign(root: str) -> None:
    logger.warning("pre-built modules in %s have no index.json, so they are not of this package: not loaded", root)


def _is_trusted(folder: Path, library: Path) -> bool:
    """Tell whether nobody else can have written a library of ``FLASHINFER_AOT_DIR``; warn once if somebody can."""
    if not knobs.aot_dir:
        return True
    root = jit_env.FLASHINFER_AOT_DIR
    reason = refusal(dict.fromkeys((root, folder, library.parent, library)), root.parents, "FLASHINFER_AOT_DIR")
    if reason is not None:
        jit_env.warn_untrusted(reason)
    return reason is None


def _covers(library: Path, targets: Sequence[Target]) -> bool:
    """Tell whether a CUDA library has code for each target; without a target, everything is taken."""
    root = library.parents[1]
    recorded = read_index(root).get(str(library.relative_to(root)), {}).get("targets")
    if recorded is None:
        return True
    recorded = list(map(str, recorded)) if isinstance(recorded, list) else []  # a damaged index names no target
    missing = [target for target in targets if not any(_runs(has, target) for has in recorded)]
    if missing:
        _warn_missing(str(root), " ".join(recorded), " ".join(f"{major}{minor}" for major, minor in missing))
    return not missing


def _is_of_these_sources(library: Path, root: Optional[Path] = None) -> bool:
    """Tell whether a library was made by this release from the sources that are here; what nobody recorded is."""
    root = jit_env.FLASHINFER_AOT_DIR if root is None else root
    facts = read_index(root).get(str(library.relative_to(root)))
    if facts is None or knobs.disable_version_check:
        return True
    version = facts.get("version", "an unknown release")
    if not jit_env.accepts_companion(str(version)):
        _warn_other(f"pre-built modules in {root} are of flashinfer {version}, not of {jit_env.__version__}")
        return False
    sources = facts.get("sources")
    for name, digest in sources.items() if isinstance(sources, dict) else ():
        if _digest_here(name) not in (digest, None):
            _warn_other(f"pre-built {library} was made from another {name}")
            return False
    return True


def _digest_here(name: str) -> Optional[str]:
    """Return the SHA-256 of a source that ``index.json`` names; None where the package has no sources."""
    kind, _, path = name.partition("/")
    folders = {"{include}": jit_env.FLASHINFER_INCLUDE_DIR, "{csrc}": jit_env.FLASHINFER_CSRC_DIR}
    folder = folders.get(kind)
    if folder is None or not os.path.isdir(folder):
        return None
    try:
        status = os.stat(folder / path)
        return _digest_of(str(folder / path), status.st_mtime_ns, status.st_ctime_ns, status.st_size)
    except (OSError, ValueError):
        return "missing"


@functools.lru_cache(maxsize=4096)
def _digest_of(path: str, *changed: int) -> str:
    """Return the SHA-256 of a file. Modules have most headers in common, so that each is read once."""
    return sha256(Path(path).read_bytes()).hexdigest()


@functools.cache
def _warn_other(text: str) -> None:
    logger.warning(
        "%s: compiling instead (build them again, or set FLASHINFER_DISABLE_VERSION_CHECK=1 to load them)", text
    )


def recorded_sources(files: Mapping[str, str]) -> dict[str, str]:
    """Select of a manifest's files those that the package ships."""
    return {name: digest for name, digest in files.items() if name.startswith(("{include}/", "{csrc}/"))}


def _runs(has: str, target: Target) -> bool:
    """Tell whether code for ``80`` or ``90a`` runs on a target: ``a`` on that one alone, else on later minors too."""
    found = _TARGET.fullmatch(has)
    if found is None:
        return False
    major, minor, letter = int(found[1]), int(found[2]), found[3]
    wanted = int(target[1].rstrip("af"))
    return major == target[0] and (minor == wanted if letter == "a" else minor <= wanted)


@functools.cache
def _warn_missing(root: str, recorded: str, missing: str) -> None:
    logger.warning("pre-built modules in %s are for %s, not for %s: compiling instead", root, recorded, missing)


def read_index(root: Path) -> dict[str, dict]:
    """Return what ``index.json`` of a folder of pre-built modules tells, by path; nothing without such a file."""
    path = root / "index.json"
    try:
        return _parse_index(str(path), path.stat().st_mtime_ns)
    except OSError:
        return {}


@functools.lru_cache(maxsize=8)
def _parse_index(path: str, changed: int) -> dict[str, dict]:
    try:
        index = json.loads(Path(path).read_bytes())
    except (ValueError, RecursionError):
        index = None
    modules = index.get("modules") if isinstance(index, dict) and index.get("schema") == SCHEMA else None
    if not isinstance(modules, dict):
        logger.warning("%s cannot be read, so that targets of pre-built modules are unknown", path)
        return {}
    return {name: facts for name, facts in modules.items() if isinstance(facts, dict)}


def record_modules(root: Path, modules: Mapping[str, dict]) -> None:
    """Add modules of this release to ``index.json``; those of other builds into the same folder stay."""
    ours = {name: {"version": jit_env.__version__, **facts} for name, facts in modules.items()}
    with locked(root):
        _parse_index.cache_clear()  # two processes may write within one tick of the clock
        known = {name: facts for name, facts in read_index(root).items() if (root / name).exists()}
        merged = {**known, **ours}
        text = json.dumps({"schema": SCHEMA, "modules": {name: merged[name] for name in sorted(merged)}}, indent=1)
        write_atomically(root / "index.json", text + "\n")
