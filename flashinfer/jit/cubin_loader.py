# SPDX-License-Identifier: Apache-2.0
"""Files of a repository of kernel binaries: fetched into ``FLASHINFER_CUBIN_DIR``, with their SHA-256 compared.

No binaries are published for this package. ``FLASHINFER_CUBINS_REPOSITORY`` names a repository of one's own: a URL or a
local folder.
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any, Optional, Union
from urllib.parse import urljoin

from ..knobs import knobs
from . import env as jit_env

__all__ = [
    "download_file",
    "ensure_symlink",
    "get_artifact",
    "get_cubin",
    "get_meta_hash",
    "safe_urljoin",
    "verify_cubin",
    "verify_symlinked_headers",
]

logger = logging.getLogger("flashinfer.jit")


def __getattr__(name: str) -> Any:
    if name == "FLASHINFER_CUBIN_DIR":
        return jit_env.FLASHINFER_CUBIN_DIR
    if name == "FLASHINFER_CUBINS_REPOSITORY":
        return knobs.cubins_repository
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def safe_urljoin(base: str, path: str) -> str:
    """Join ``path`` to the folder ``base``, with or without a slash at its end; a leading slash replaces the path."""
    return urljoin(base if base.endswith("/") else f"{base}/", path)


def download_file(
    source: str,
    destination: Union[str, Path],
    retries: int = 4,
    delay: float = 5,
    timeout: float = 10,
    lock_timeout: float = 30,
    session: Optional[Any] = None,
) -> bool:
    """Copy a URL or a local file to ``destination``; return False if that fails after ``retries`` attempts.

    The file appears complete or not at all, also if several processes download it.

    Parameters
    ----------
    delay : float
        Seconds before the second attempt; each further wait is twice as long, with up to a fifth added by chance.
    timeout, lock_timeout : float
        Seconds without an answer, and seconds to wait for another process.
    session : Optional[requests.Session]
        Keeps connections open.
    """
    from filelock import FileLock, Timeout

    target = Path(destination)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        with FileLock(f"{target}.lock", timeout=lock_timeout):
            for attempt in range(retries):
                if attempt:
                    time.sleep(delay * 2 ** (attempt - 1) * (1 + random.random() / 5))
                try:
                    _fetch(source, part, timeout, session)
                    os.replace(part, target)
                    return True
                except OSError as error:  # errors of requests are of this type too
                    logger.warning("download of %s failed (attempt %d of %d): %s", source, attempt + 1, retries, error)
    except Timeout:
        logger.warning("download of %s: another process holds %s.lock", source, target)
    finally:
        part.unlink(missing_ok=True)
    return False


def _fetch(source: str, target: Path, timeout: float, session: Optional[Any]) -> None:
    if "://" not in source:
        shutil.copyfile(source, target)
        return
    import requests

    answer = (session or requests).get(source, timeout=timeout)
    answer.raise_for_status()
    target.write_bytes(answer.content)


def verify_cubin(cubin: bytes, expected_sha256: str) -> bool:
    """Return True if the SHA-256 is the expected one, or if ``FLASHINFER_CUBIN_CHECKSUM_DISABLED`` is set."""
    return knobs.cubin_checksum_disabled or hashlib.sha256(cubin).hexdigest() == expected_sha256


def get_artifact(file_name: str, sha256: str, session: Optional[Any] = None) -> bytes:
    """Return a file of the repository, from ``FLASHINFER_CUBIN_DIR`` if it is there.

    Returns
    -------
    bytes
        Empty if the download failed or the file differs from what was expected. A RuntimeError if downloads are
        forbidden or there is no repository.
    """
    local = jit_env.FLASHINFER_CUBIN_DIR / file_name
    if local.is_file() and verify_cubin(found := local.read_bytes(), sha256):
        return found
    for why, reason in ((knobs.no_download, "FLASHINFER_NO_DOWNLOAD is set"), (not knobs.cubins_repository, _NONE)):
        if why:
            raise RuntimeError(f"get_artifact: {local} must exist with SHA-256 {sha256}, it does not ({reason})")
    if not download_file(safe_urljoin(knobs.cubins_repository, file_name), local, session=session):
        return b""
    found = local.read_bytes()
    if verify_cubin(found, sha256):
        return found
    logger.warning("%s has another SHA-256 than %s", local, sha256)
    return b""


#: The published name of an older release.
get_cubin = get_artifact
_NONE = "FLASHINFER_CUBINS_REPOSITORY is not set, and no binaries are published for this package"


def get_meta_hash(checksums_bytes: bytes, target_file: str = "flashinferMetaInfo.h") -> str:
    """Return the SHA-256 of the file in the text of a ``checksums.txt``."""
    for line in checksums_bytes.decode().splitlines():
        sha256, _, name = line.strip().partition(" ")
        if Path(name.strip()).name == target_file:
            return sha256
    raise ValueError(f"get_meta_hash: checksums must name {target_file}, got {len(checksums_bytes)} bytes without it")


def ensure_symlink(link: Path, target: Path) -> None:
    """Let ``link`` point to ``target``, in one step: other processes see the old link or the new one."""
    if link.is_symlink() and Path(os.readlink(link)) == target:
        return
    link.parent.mkdir(parents=True, exist_ok=True)
    part = link.with_name(f"{link.name}.{os.getpid()}.part")
    part.unlink(missing_ok=True)
    part.symlink_to(target)
    os.replace(part, link)


def verify_symlinked_headers(symlink_path: Path, headers: list[str], checksums: dict[str, str]) -> None:
    """Check the SHA-256 of each header in a folder; a RuntimeError names the first that differs."""
    for header in headers:
        path = Path(symlink_path) / header
        if not path.is_file() or not verify_cubin(path.read_bytes(), checksums[header]):
            raise RuntimeError(f"verify_symlinked_headers: {path} must have SHA-256 {checksums[header]}, it does not")
