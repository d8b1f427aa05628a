# SPDX-License-Identifier: Apache-2.0
"""Results that processes share: a folder for each environment, with a file for each result.

    <root>/<digest of versions and GPU>/<digest of the key>.json  {"_metadata": {...}, "<key>": [runner class, tactic]}

A file appears complete, and the first process to publish a result wins: whoever reads the store later chooses alike.
A file that holds no result, because it is damaged, is replaced.
"""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Mapping, Optional

from ..jit.utils import make_folder, write_atomically
from .files import METADATA, Results, read_content, results_in
from .tactics import to_json

__all__ = ["ResultStore"]

_log = logging.getLogger("flashinfer")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class ResultStore:
    """Results of one environment below ``root``."""

    def __init__(self, root: Path, metadata: Mapping[str, str]) -> None:
        self.metadata = dict(metadata)
        self.folder = root / _digest(json.dumps(self.metadata, sort_keys=True))

    def read(self) -> Results:
        """Return all results; files that cannot be read, or that name another environment, are left out."""
        found: Results = {}
        try:
            paths = sorted(self.folder.glob("*.json"))
        except (OSError, ValueError) as error:  # a name that is too long, or that holds NUL
            _log.warning("autotune: %s cannot be read (%s): it is not used", self.folder, error)
            paths = []
        for path in paths:
            try:
                content = read_content(path)
            except (OSError, ValueError) as error:
                _log.warning("autotune: %s cannot be read (%s): it is not used", path, error)
                continue
            if content.get(METADATA) == self.metadata:
                found.update(results_in(content))
        return found

    def path_of(self, key: str) -> Path:
        """Return the file of a result."""
        return self.folder / f"{_digest(key)}.json"

    def publish(self, results: Results, refused: Optional[Results] = None) -> None:
        """Add the results that the store does not have; OSError or ValueError if the folder cannot be written.

        Files that hold one of the results ``refused``, whose tactics this build does not have, are replaced.
        """
        make_folder(self.folder)
        for key, (runner, tactic) in results.items():
            path = self.path_of(key)
            state = self._holds(path, key, (refused or {}).get(key))
            if not state:
                content = {METADATA: self.metadata, key: [runner, to_json(tactic)]}
                text = json.dumps(content, indent=2, sort_keys=True) + "\n"
                write_atomically(path, text, keeps_first=state is None)

    def _holds(self, path: Path, key: str, refused: object) -> Optional[bool]:
        """Tell whether a file holds a result for ``key`` that is not the refused one; None if there is no file."""
        try:
            content = read_content(path)
        except FileNotFoundError:
            return None
        except ValueError:
            return False
        return content.get(METADATA) == self.metadata and results_in(content).get(key, refused) != refused
