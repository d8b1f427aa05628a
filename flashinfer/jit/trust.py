# SPDX-License-Identifier: Apache-2.0
"""Whose code a cache directory can hold: what is found there is loaded into this process.

A module is loaded only from folders that belong to this user or to root, and that nobody else can write. Above the
cache, a folder may belong to others (the home of a container that runs as root), but everybody may write there only
under the sticky bit, as in ``/tmp``: who can rename the cache can put another in its place between a look and a load.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Iterable, Optional

_REMEDY = "or set FLASHINFER_WORKSPACE_BASE to a directory of your own"


def refusal(inside: Iterable[Path], above: Iterable[Path] = ()) -> Optional[str]:
    """Why nothing is loaded from these folders and files of a cache, and what to do; None when they can be trusted.

    ``above`` are the folders that the cache is in. What does not exist is no reason.
    """
    user = os.geteuid()
    for path in inside:
        status = _status(path)
        if status is None:
            continue
        if status.st_uid not in (0, user):
            return (
                f"{path} belongs to user {status.st_uid}, not to user {user} who runs this, and could hold any code: "
                f"delete or chown it, {_REMEDY}"
            )
        if status.st_mode & 0o022:
            return _writable(path, status, "-R go-w")
    for path in above:
        status = _status(path)
        if status is not None and status.st_mode & 0o002 and not status.st_mode & stat.S_ISVTX:
            return _writable(path, status, "o-w")
    return None


def _writable(path: Path, status: os.stat_result, change: str) -> str:
    return (
        f"{path} is writable by others (mode {stat.S_IMODE(status.st_mode):04o}) and could hold any code: "
        f"`chmod {change} {path}` if you trust what is there, {_REMEDY}"
    )


def _status(path: Path) -> Optional[os.stat_result]:
    try:
        return os.stat(path)
    except OSError:
        return None
