# SPDX-License-Identifier: Apache-2.0
"""Download of one file over http, https or from a folder: resumed, checked, and published by renaming.

The bytes go to ``<file>.part`` inside a lock, so that several processes download a file once. An attempt that broke off
is resumed by the next one, in this process or in another. The file gets its name only when it is complete and its
SHA-256 is the expected one.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import random
import shutil
import stat
import time
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any, Callable, Optional, Union
from urllib.error import HTTPError
from urllib.parse import unquote, urlsplit

from .._runtime.errors import ArgumentError
from .._runtime.knobs import knobs

__all__ = ["download_file", "read_url", "verify_cubin"]

logger = logging.getLogger("flashinfer.jit")

_CHUNK = 1 << 20
_LATER = (408, 425, 429, 500, 502, 503, 504)  #: answers of a server that may be able to serve the file later


class _Refused(OSError):
    """The server will not serve this file, however often it is asked."""


def verify_cubin(cubin_path: Union[str, Path, bytes], expected_sha256: str) -> bool:
    """Return True if the SHA-256 is the expected one, or if ``FLASHINFER_CUBIN_CHECKSUM_DISABLED`` is set.

    ``cubin_path`` is a file, which must exist, or the bytes of one.
    """
    content = cubin_path if isinstance(cubin_path, bytes) else Path(cubin_path).read_bytes()
    return knobs.cubin_checksum_disabled or hashlib.sha256(content).hexdigest() == expected_sha256


def download_file(
    source: str,
    destination: Union[str, Path],
    retries: int = 4,
    delay: float = 5,
    timeout: float = 10,
    lock_timeout: float = 30,
    session: Optional[Any] = None,
    sha256: Optional[str] = None,
    check: Optional[Callable[[bytes], object]] = None,
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
        Ignored: published programs pass one.
    sha256 : Optional[str]
        Of the whole file. A file with another one is not kept; one that is here already is not downloaded again.
    check : Optional[Callable[[bytes], object]]
        Is given the content before the file gets its name; what it raises is raised here, and an older file stays.
    """
    from filelock import FileLock, Timeout

    target = Path(destination)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{target}.lock", timeout=lock_timeout):
            if sha256 and _matches(target, sha256):  # another process was faster
                return True
            return _attempts(source, target, retries, delay, timeout, sha256, check)
    except (ArgumentError, RuntimeError):
        raise
    except (OSError, ValueError) as error:
        if not isinstance(error, Timeout):  # a folder or a name that cannot be written
            logger.warning("download of %s: %s cannot be written (%s)", source, target, error)
            return False
        logger.warning("download of %s: another process holds %s.lock", source, target)
        return bool(sha256) and _matches(target, sha256 or "")


def _matches(path: Path, sha256: str) -> bool:
    return path.is_file() and verify_cubin(path.read_bytes(), sha256)


def _attempts(
    source: str,
    target: Path,
    retries: int,
    delay: float,
    timeout: float,
    sha256: Optional[str],
    check: Optional[Callable[[bytes], object]],
) -> bool:
    part = target.with_name(f"{target.name}.part")
    for attempt in range(retries):
        if attempt:
            time.sleep(delay * 2 ** (attempt - 1) * (1 + random.random() / 5))
        try:
            if not sha256:  # without it, nobody would notice that a resumed file has changed on the server
                part.unlink(missing_ok=True)
            _fetch(source, part, timeout)
            if sha256 and not _matches(part, sha256):
                part.unlink()  # a resumed download would keep the wrong bytes
                raise OSError(f"its SHA-256 is not {sha256}")
            if check is not None:
                _check_part(part, check)
            os.replace(part, target)
            return True
        except ArgumentError:
            raise
        except (OSError, HTTPException, ValueError) as error:  # ValueError: a redirection to what is no URL
            logger.warning("download of %s failed (attempt %d of %d): %s", source, attempt + 1, retries, error)
            if isinstance(error, (_Refused, FileNotFoundError)):
                break
    return False


def _check_part(part: Path, check: Callable[[bytes], object]) -> None:
    try:
        check(part.read_bytes())
    except BaseException:
        part.unlink()
        raise


def _open_part(part: Path, mode: str) -> IO[bytes]:
    """Open the file that is being downloaded. A link by its name is replaced: it would be written through."""
    with contextlib.suppress(FileNotFoundError):
        status = part.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            part.unlink()
            mode = "wb"
    return open(part, mode, opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW, 0o666))


def _local_path(source: str) -> Optional[str]:
    """Return the path of a local source, a path or ``file://`` URL; None for http and https."""
    scheme = urlsplit(source).scheme if "://" in source else ""
    if scheme in ("http", "https"):
        return None
    if scheme not in ("", "file"):
        raise ArgumentError(f"download_file: source must be http, https, file or a path, got {source!r}")
    return unquote(urlsplit(source).path) if scheme else source


def _fetch(source: str, part: Path, timeout: float) -> None:
    """Complete ``part``, from where an earlier attempt broke off if the server can do that."""
    from urllib.request import Request, urlopen

    local = _local_path(source)
    if local is not None:
        with open(local, "rb") as content, _open_part(part, "wb") as file:
            shutil.copyfileobj(content, file, _CHUNK)
        return
    is_ours = part.is_file() and not part.is_symlink() and part.stat().st_nlink == 1
    have = part.stat().st_size if is_ours else 0
    try:
        answer = urlopen(Request(source, headers={"Range": f"bytes={have}-"} if have else {}), timeout=timeout)
    except HTTPError as error:
        if error.code == 416:  # the part is as long as the file, or longer: start again
            part.unlink()
        elif error.code not in _LATER:
            raise _Refused(str(error)) from error
        raise
    with answer:
        resumed = have if answer.status == 206 else 0
        with _open_part(part, "r+b" if resumed else "wb") as file:
            file.seek(resumed)
            shutil.copyfileobj(answer, file, _CHUNK)
            size = file.tell()
        length = answer.headers.get("Content-Length")
        if length is not None and not length.isdecimal():
            raise OSError(f"its Content-Length is {length!r}")
        if length is not None and size != resumed + int(length):
            raise OSError(f"got {size} of {resumed + int(length)} bytes")


def read_url(source: str, timeout: float) -> str:
    """Return the text of a page, or of a local file. A failure is an OSError or an HTTPException."""
    from urllib.request import urlopen

    local = _local_path(source)
    if local is not None:
        return Path(local).read_text(errors="replace")
    with urlopen(source, timeout=timeout) as answer:
        return answer.read().decode(errors="replace")
