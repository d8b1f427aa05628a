# SPDX-License-Identifier: Apache-2.0
"""Freshness of a ``.so``: a manifest beside each library decides by content, never by modification times.

A module is fresh when its manifest equals what a build would record now: package version, targets, flags, the SHA-256
of every source and of every header the compiler's dep-file named, the compilers' versions and the library itself.
Directories are stored as ``{tokens}``, so a moved package, a second spelling of the toolkit path or a restored cache
stays fresh. Compilers that are not on this machine are not asked for: loading needs none.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, Callable, Optional, Union

from ..version import __version__
from . import env as jit_env
from .cpp_ext import expand, flag_tokens, module_flags, tokenise, translation_units
from .spec import ModuleSpec
from .toolchain import binary_stamp, find_cxx, find_nvcc, find_tvm_ffi, identify
from .utils import write_atomically

SCHEMA = 1


def manifest_path(library: Path) -> Path:
    return library.with_suffix(".manifest.json")


def _digest(data: bytes) -> str:
    return sha256(data).hexdigest()


def identity(spec: ModuleSpec) -> dict[str, Any]:
    """Return everything that determines the result except file contents and compiler versions."""
    flags, tokens = module_flags(spec), flag_tokens(spec)
    of_sources = {tokenise(str(path), tokens): own for path, own in spec.cuda_cflags_by_source.items()}
    return {
        **({"flags_by_source": of_sources} if of_sources else {}),  # absent in manifests of other modules
        "schema": SCHEMA,
        "name": spec.name,
        "version": __version__,
        "arch": jit_env.arch_tag(spec.backend, spec.cpu_target),
        "tvm_ffi": find_tvm_ffi().__version__,
        "flags": {kind: list(values) for kind, values in asdict(flags).items()},
        "device_link": spec.needs_device_linking,
        "units": [
            [tokenise(str(u.source), tokens), u.tool, u.needs_helper, u.has_kernels] for u in translation_units(spec)
        ],
    }


def _compilers(spec: ModuleSpec) -> dict[str, Optional[Path]]:
    found = {"cxx": find_cxx()}
    if spec.backend == "cuda":
        found["nvcc"] = find_nvcc()
    return found


def _dep_files(private: Path) -> set[str]:
    """Return the paths in the dep-files of a build (make syntax: ``target: a b \\`` with escaped blanks, # and $).

    The target ends in ``.o``; nvcc escapes nothing in the target, which may therefore contain blanks and colons.
    """
    paths = set()
    for depfile in private.glob("*.d"):
        text = depfile.read_text().replace("\\\n", " ")
        for word in re.findall(r"(?:\\ |\S)+", re.split(r"\.o ?: ", text, maxsplit=1)[-1]):
            plain = word.replace("\\ ", " ").replace("\\#", "#").replace("$$", "$")
            paths.add(os.path.normpath(plain))
    return paths


def source_digests(spec: ModuleSpec) -> dict[str, str]:
    """Return the digests of the listed sources. Taken before the compiler reads the sources."""
    return {os.path.normpath(source): _digest(_content(spec, source)) for source in spec.sources}


def write_manifest(spec: ModuleSpec, private: Path, library: Path, sources: dict[str, str]) -> None:
    """Record how ``library`` came to be. Called after it has been published.

    ``sources`` are the digests from before the build. A header is known only afterwards; one that was edited in the
    meantime, or is gone, is recorded without a digest, so that the module is built again at the next use.
    """
    tokens, was_edited = flag_tokens(spec), _edited_since(private / "build.ninja")
    files = dict(sources)
    for path in _dep_files(private) - set(files):
        try:
            files[path] = "" if was_edited(path) else _digest(_content(spec, Path(path)))
        except OSError:
            files[path] = ""
    manifest = {
        **identity(spec),
        "files": {tokenise(path, tokens): files[path] for path in sorted(files)},
        "compilers": {
            tool: {"version": identify(path).version, "stamp": binary_stamp(path)}
            for tool, path in _compilers(spec).items()
            if path is not None
        },
        "library": _digest(library.read_bytes()),
    }
    write_atomically(manifest_path(library), json.dumps(manifest, indent=1) + "\n")


def _edited_since(start: Path) -> Callable[[str], bool]:
    """Return a function that tells whether a file changed between the writing of ``start`` and now.

    The function reads ctime, which only the system sets: unpacking an archive sets mtime to any value. A ctime in the
    future does not count as a recent edit: it comes from a clock that was wrong.
    """
    began, end = start.stat().st_ctime_ns, start.with_suffix(".end")
    end.touch()
    now = end.stat().st_ctime_ns
    return lambda path: began < os.stat(path).st_ctime_ns <= now


def _content(spec: ModuleSpec, path: Path) -> bytes:
    """Return the content that a build would see: a source generated during the build counts as its text."""
    return spec.generated[path].encode() if path in spec.generated else path.read_bytes()


def unreadable(path: Union[Path, str], error: OSError) -> str:
    """Return the words for a file that this user may not read, as where root has made an image for others."""
    return f"{path} cannot be read ({error.strerror or error})"


def _read_manifest(library: Path) -> Optional[dict[str, Any]]:
    """Return the manifest; None if there is none, or none that we wrote. PermissionError if it cannot be read."""
    try:
        manifest = json.loads(manifest_path(library).read_bytes())
    except PermissionError:
        raise
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(manifest, dict) or "library" not in manifest:
        return None
    files, compilers = manifest.get("files"), manifest.get("compilers")
    if not isinstance(files, dict) or not isinstance(compilers, dict):
        return None
    # A damaged file can be valid JSON: a path with a NUL raises ValueError where a missing file raises OSError.
    is_ours = all("\0" not in path for path in files) and all(isinstance(facts, dict) for facts in compilers.values())
    return manifest if is_ours else None


def files_of(library: Path) -> dict[str, str]:
    """Return the sources and headers that a library was made from, as ``{token}/path``, with their SHA-256."""
    return dict((_read_manifest(library) or {"files": {}})["files"])


def staleness(spec: ModuleSpec, library: Path) -> Optional[str]:
    """Return None if ``library`` is fresh, else the first reason why it is not."""
    reason, file = open_fresh(spec, library)
    if file is not None:
        file.close()
    return reason


def open_fresh(spec: ModuleSpec, library: Path) -> tuple[Optional[str], Optional[BinaryIO]]:
    """Return the reason why ``library`` is stale, or the open fresh file: another file may take its name any time."""
    try:
        manifest = _read_manifest(library)
    except PermissionError as error:
        return unreadable(manifest_path(library), error), None
    reason = "not built" if manifest is None else _difference(spec, manifest)
    if manifest is None or reason is not None:
        return reason, None
    try:
        file = open(library, "rb")  # noqa: SIM115  (the caller loads it, and closes it)
        if _digest(file.read()) == manifest["library"]:
            return None, file
        file.close()
        return "library changed", None
    except PermissionError as error:
        return unreadable(library, error), None
    except OSError:
        return "library missing", None


def _difference(spec: ModuleSpec, manifest: dict[str, Any]) -> Optional[str]:
    """Return the first thing, other than the library, that changed since ``manifest`` was written."""
    try:
        now = identity(spec)
    except PermissionError as error:
        return unreadable(error.filename, error)
    except OSError as error:
        return f"source missing: {error}"
    for key, value in now.items():
        if manifest.get(key) != value:
            return f"{key} changed"
    tokens = flag_tokens(spec)
    for path, digest in manifest["files"].items():
        try:
            if _digest(_content(spec, Path(expand(path, tokens)))) != digest:
                return f"{path} changed"
        except PermissionError as error:
            return unreadable(expand(path, tokens), error)
        except OSError:
            return f"{path} is gone"
    for tool, path in _compilers(spec).items():
        recorded = manifest["compilers"].get(tool, {})
        if path is None or (binary_stamp(path) is not None and binary_stamp(path) == recorded.get("stamp")):
            continue
        if identify(path).version != recorded.get("version"):
            return f"{tool} changed"
    return None
