# SPDX-License-Identifier: Apache-2.0
"""Repository of kernel binaries: what it holds, what of it is here, and its download.

This package compiles its kernels where they run and publishes no binaries, so without ``FLASHINFER_CUBINS_REPOSITORY``
and without the companion package ``flashinfer-cubin`` there is nothing to list and nothing to download.
``python -m flashinfer.jit.cubins`` makes such a repository.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from typing import Any, ClassVar, Iterable, Iterator, Mapping, Optional, Union

from ._runtime.errors import ArgumentError
from ._runtime.knobs import knobs
from .jit import cubin_loader
from .jit import env as jit_env
from .jit.cubin_loader import (
    DSL_FMHA,
    download_dir,
    download_file,
    find_artifact,
    rebound_dir,
    safe_urljoin,
    verify_cubin,
)
from .jit.download import read_url
from .version import __version__

__all__ = [
    "ArtifactPath",
    "CheckSumHash",
    "clear_cubin",
    "download_artifacts",
    "download_file",
    "get_artifacts_status",
    "get_available_cubin_files",
    "get_available_header_files",
    "get_checksums",
    "get_subdir_file_list",
    "temp_env_var",
    "verify_cubin",
]

_CHECKSUM = re.compile(r"([0-9a-fA-F]{64}) [ *]?(\S.*)")  # as sha256sum writes it
_SHOWN = 5  # names in the error of failed downloads
_LINK = re.compile(r'href="([^"?#]+)"')


class ArtifactPath:
    """Folders of a repository, one for each kind of kernel. Ours are in the first; the others are published names."""

    FLASHINFER_KERNELS: str = f"flashinfer/{__version__.partition('+')[0]}/"

    TRTLLM_GEN_FMHA: str = "trtllm-gen/fmha/"
    TRTLLM_GEN_BMM: str = "trtllm-gen/bmm/"
    TRTLLM_GEN_GEMM: str = "trtllm-gen/gemm/"
    CUDNN_SDPA: str = "cudnn/sdpa/"
    DEEPGEMM: str = "deep-gemm/"
    DSL_FMHA: str = DSL_FMHA
    DSL_FMHA_ARCHS: tuple[str, ...] = ()


class CheckSumHash:
    """SHA-256 of the file ``checksums.txt`` in each folder. No binaries are published, so all are empty."""

    TRTLLM_GEN_FMHA: str = ""
    TRTLLM_GEN_BMM: str = ""
    TRTLLM_GEN_GEMM: str = ""
    DEEPGEMM: str = ""
    DSL_FMHA_CHECKSUMS: ClassVar[dict[str, str]] = {}
    map_checksums: ClassVar[dict[str, str]] = {}


def __getattr__(name: str) -> Any:
    if name in ("FLASHINFER_CUBIN_DIR", "FLASHINFER_CUBINS_REPOSITORY"):
        return getattr(cubin_loader, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _folders() -> list[str]:
    """Return the folders that are downloaded: only those of this package's own kernels."""
    return [ArtifactPath.FLASHINFER_KERNELS]


@contextlib.contextmanager
def temp_env_var(key: str, value: str) -> Iterator[None]:
    """Set an environment variable inside a ``with`` block."""
    before = os.environ.get(key)
    os.environ[key] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = before


def _links(source: str, retries: int, delay: float, timeout: float, what: str) -> list[str]:
    """Return the links of a directory page; a RuntimeError if the server answers each attempt with an error."""
    for attempt in range(retries):
        if attempt:
            time.sleep(delay)
        try:
            return _LINK.findall(read_url(source, timeout))
        except ArgumentError:
            raise
        except (OSError, HTTPException, ValueError) as error:  # ValueError: a redirection to what is no URL
            cubin_loader.logger.warning("%s cannot be read (attempt %d of %d): %s", source, attempt + 1, retries, error)
    raise RuntimeError(f"Failed to fetch the {what} artifact index {source} in {retries} attempts")


def get_available_cubin_files(source: str, retries: int = 3, delay: float = 5, timeout: float = 10) -> tuple[str, ...]:
    """Return the links of a directory page that end in ``.cubin``; a RuntimeError if the page cannot be read."""
    return tuple(link for link in _links(source, retries, delay, timeout, "cubin") if link.endswith(".cubin"))


def get_available_header_files(source: str, retries: int = 3, delay: float = 5, timeout: float = 10) -> tuple[str, ...]:
    """Return the ``.h`` files of a directory page and of the pages below it, by their paths relative to ``source``.

    A RuntimeError names the page that cannot be read.
    """
    found: list[str] = []
    folders, seen = [""], {""}
    while folders:
        folder = folders.pop(0)
        for link in _links(safe_urljoin(source, folder) if folder else source, retries, delay, timeout, "header"):
            path = f"{folder}{link.removeprefix('./')}"
            if link.endswith(".h"):
                found.append(path)
            elif link.endswith("/") and not cubin_loader.leaves_folder(link) and path not in seen:
                seen.add(path)
                folders.append(path)
    return tuple(found)


def get_checksums(subdirs: Iterable[str]) -> dict[str, str]:
    """Return ``{path of a file: SHA-256}`` from the ``checksums.txt`` of each folder.

    The file of an earlier download is used where the repository does not answer. Without either, a RuntimeError names
    the folder. An answer with another content, such as the page of a proxy, is a RuntimeError that names the file; it
    does not replace an earlier one.
    """
    sums = {}
    for subdir in subdirs:
        path = safe_urljoin(subdir, "checksums.txt")
        repository = knobs.cubins_repository
        if repository and not knobs.no_download:
            source = safe_urljoin(repository, path)
            cubin_loader.fetch(path, check=functools.partial(_parse_checksums, source))
        local = _local_checksums(path)
        if local is None:
            raise RuntimeError(
                f"get_checksums: Failed to fetch the checksum manifest for artifact pin {subdir}: there is no "
                f"checksums.txt here, and none came from {repository or '(no repository)'}"
            )
        for name, sha256 in _parse_checksums(local, local.read_bytes()).items():
            sums[safe_urljoin(subdir, name)] = sha256
    return sums


def _parse_checksums(source: Union[str, Path], content: bytes) -> dict[str, str]:
    """Return SHA-256 by name from the text of a ``checksums.txt``; a RuntimeError names ``source`` and the bad line."""
    sums = {}
    for number, line in enumerate(content.decode(errors="surrogateescape").splitlines(), 1):
        found = _CHECKSUM.fullmatch(line.strip())
        if found is None and not line.strip():
            continue
        if found is not None and cubin_loader.leaves_folder(found[2]):
            folder = str(source).rpartition("/")[0]
            raise RuntimeError(f"get_checksums: files of {folder} must lie in it, got {found[2]}")
        if found is None or cubin_loader.is_no_name(found[2]):
            raise RuntimeError(
                f"get_checksums: each line of {source} must be a SHA-256 (64 hexadecimal digits), a space and a name, "
                f"got {line[:80]!r} in line {number}"
            )
        sums[found[2]] = found[1].lower()
    if not sums:
        raise RuntimeError(f"get_checksums: {source} must name a file, got {len(content)} bytes without one")
    return sums


def _local_checksums(path: str) -> Optional[Path]:
    places = (download_dir() / path, (rebound_dir() or jit_env.FLASHINFER_CUBIN_DIR) / path)
    return next((place for place in places if place.is_file()), None)


def get_subdir_file_list() -> Iterator[tuple[str, str]]:
    """Return path and SHA-256 of each file of the repository, or of the companion package; nothing without either."""
    folders = _folders()
    if knobs.cubins_repository or any(_local_checksums(safe_urljoin(f, "checksums.txt")) for f in folders):
        yield from get_checksums(folders).items()


def get_artifacts_status() -> tuple[tuple[str, bool], ...]:
    """Return each file of the repository and whether it is here, complete."""
    return tuple((path, _find(path, sha256) is not None) for path, sha256 in get_subdir_file_list())


def _find(path: str, sha256: str) -> Optional[Path]:
    return find_artifact(path, sha256, lambda file, wanted: verify_cubin(str(file), wanted))


def download_artifacts() -> None:
    """Download what is missing, and delete downloads that the repository no longer names.

    A RuntimeError names the files that failed. With ``FLASHINFER_CUBIN_RETRY_WINDOW_SECONDS``, failed ones are tried
    again, with growing pauses drawn at random, until so many seconds of this call are over.
    """
    give_up = time.monotonic() + _retry_window()
    files = dict(get_subdir_file_list())
    missing = [path for path, sha256 in files.items() if _find(path, sha256) is None]
    has_source = bool(knobs.cubins_repository) or download_file is not cubin_loader.download_file
    if missing and (knobs.no_download or not has_source):
        why = "FLASHINFER_NO_DOWNLOAD is set" if knobs.no_download else "FLASHINFER_CUBINS_REPOSITORY is not set"
        raise RuntimeError(f"download_artifacts: {missing[0]} is missing, and {why}")
    failed, pause = _fetch_all(missing, files), 1.0
    while failed and (left := give_up - time.monotonic()) > 0:
        time.sleep(min(left, pause * (1 + random.random())))  # machines that failed together do not return together
        failed, pause = _fetch_all(failed, files), 2 * pause
    if failed:
        more = f", ... (+{len(failed) - _SHOWN} more)" if len(failed) > _SHOWN else ""
        raise RuntimeError(f"Failed to download cubins: {', '.join(failed[:_SHOWN])}{more}")
    wrong = [path for path, sha256 in files.items() if _find(path, sha256) is None]
    if wrong:
        raise RuntimeError(f"Failed to download cubins: checksum mismatch of {wrong[0]} and {len(wrong) - 1} more")
    if files:
        _delete_unlisted(files)


def _retry_window() -> int:
    text = os.environ.get("FLASHINFER_CUBIN_RETRY_WINDOW_SECONDS", "")
    try:
        return knobs.cubin_retry_window_seconds
    except ArgumentError as error:
        raise RuntimeError(f"Invalid FLASHINFER_CUBIN_RETRY_WINDOW_SECONDS value {text!r}: {error}") from error


def _fetch_all(paths: list[str], files: Mapping[str, str]) -> list[str]:
    """Download these files at once; return those that failed."""
    from tqdm import tqdm

    def fetch(path: str) -> bool:
        return cubin_loader.fetch(path, download=download_file, sha256=files[path])

    with ThreadPoolExecutor(max(knobs.cubin_download_threads, 1)) as pool:
        done = list(tqdm(pool.map(fetch, paths), total=len(paths), unit="file", desc="downloading", disable=not paths))
    return [path for path, is_here in zip(paths, done, strict=True) if not is_here]


def _delete_unlisted(files: Mapping[str, str]) -> None:
    """Delete what the list does not name: downloads, and any file of a folder that a program has bound."""
    root = download_dir()
    kept = {*files, cubin_loader.DOWNLOADS, *(safe_urljoin(folder, "checksums.txt") for folder in _folders())}
    names = set(cubin_loader.downloads())
    if rebound_dir() is not None:
        names |= {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() and path.suffix != ".lock"}
    for name in names - kept:
        if not cubin_loader.leaves_folder(name):
            with contextlib.suppress(OSError, ValueError):
                (root / name).unlink()


def clear_cubin() -> None:
    """Delete what was downloaded; the folder of the cache is all ours.

    Other files of the folder that the variable ``FLASHINFER_CUBIN_DIR`` names stay. A folder bound to the name
    ``FLASHINFER_CUBIN_DIR`` of this module or of ``jit.cubin_loader`` is deleted, and nothing outside of it.
    """
    root = download_dir()
    if root != knobs.cubin_dir:
        shutil.rmtree(root, ignore_errors=True)
        return
    names = {*cubin_loader.downloads(), *_listed_here(root), cubin_loader.DOWNLOADS}
    for name in names:
        if not cubin_loader.leaves_folder(name):
            for path in (root / f"{name}{suffix}" for suffix in ("", ".part", ".lock")):
                with contextlib.suppress(OSError, ValueError):
                    path.unlink()
    for folder in sorted({root / parent for name in names for parent in Path(name).parents}, reverse=True):
        with contextlib.suppress(OSError, ValueError):  # others have files there
            folder.rmdir()


def _listed_here(root: Path) -> Iterator[str]:
    """Yield the files that a ``checksums.txt`` of earlier releases names; these kept no list of downloads."""
    for folder in _folders():
        path = safe_urljoin(folder, "checksums.txt")
        with contextlib.suppress(OSError, RuntimeError):
            yield from (safe_urljoin(folder, name) for name in _parse_checksums(path, (root / path).read_bytes()))
            yield path
