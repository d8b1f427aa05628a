# SPDX-License-Identifier: Apache-2.0
"""Trust in a cache directory: modules found there are loaded into this process.

A module is loaded only from folders that belong to this user or to root, and that nobody else can write. A folder above
the cache may belong to others (the home of a container that runs as root), but if everybody may write there, it must
have the sticky bit, as ``/tmp`` has: a user who can rename the cache could replace it between the check and the load.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Iterable, Iterator, Optional

_MOST_LINKS = 40  # as Linux follows at most


def refusal(
    inside: Iterable[Path], above: Iterable[Path] = (), variable: str = "FLASHINFER_WORKSPACE_BASE"
) -> Optional[str]:
    """Return the reason not to load from these folders and files of a cache, and a remedy; None if they can be trusted.

    ``above`` are the folders above the cache, ``variable`` is what chooses it. A path that does not exist is trusted.
    Of a symbolic link, its target counts, and the folder that the target lies in: who can write there can replace it.
    """
    remedy = f"or set {variable} to a directory of your own"
    user = os.geteuid()
    inside, above = list(inside), list(above)
    for folder, is_of_file in [found for path in inside for found in _behind(path)]:
        (inside if is_of_file else above).append(folder)
    for path in inside:
        status = _status(path)
        if status is None:
            continue
        if status.st_uid not in (0, user):
            return (
                f"{path} belongs to user {status.st_uid}, not to user {user} who runs this, and could hold any code: "
                f"delete or chown it, {remedy}"
            )
        if status.st_mode & 0o022:
            return _writable(path, status, "-R go-w", remedy)
    for path in above:
        status = _status(path)
        if status is not None and status.st_mode & 0o002 and not status.st_mode & stat.S_ISVTX:
            return _writable(path, status, "o-w", remedy)
    return None


def _behind(path: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the folder of each target of a chain of links, and whether the link is one to a file."""
    is_file = os.path.isfile(path)  # as islink, False where this user may not look
    for _ in range(_MOST_LINKS):
        if not os.path.islink(path):
            return
        target = path.parent / os.readlink(path)
        folder = Path(os.path.realpath(target.parent))
        yield folder, is_file
        path = folder / target.name


def _writable(path: Path, status: os.stat_result, change: str, remedy: str) -> str:
    return (
        f"{path} is writable by others (mode {stat.S_IMODE(status.st_mode):04o}) and could hold any code: "
        f"run `chmod {change} {path}` if you trust its content, {remedy}"
    )


def _status(path: Path) -> Optional[os.stat_result]:
    try:
        return os.stat(path)
    except OSError:
        return None
