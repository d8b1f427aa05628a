# SPDX-License-Identifier: Apache-2.0
"""Results that processes share: a folder for each environment, with a file for each result.

    <root>/<digest of versions and GPU>/<digest of the key>.json  {"_metadata": {...}, "<key>": [runner class, tactic]}

A file appears complete, and the first process to publish a result wins: whoever reads the store later chooses alike.
"""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Mapping

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
        for path in sorted(self.folder.glob("*.json")):
            try:
                content = read_content(path)
            except (OSError, ValueError) as error:
                _log.warning("autotune: %s cannot be read (%s): it is not used", path, error)
                continue
            if content.get(METADATA) == self.metadata:
                found.update(results_in(content))
        return found

    def publish(self, results: Results) -> None:
        """Add the results that the store does not have; OSError if the folder cannot be written."""
        make_folder(self.folder)
        for key, (runner, tactic) in results.items():
            path = self.folder / f"{_digest(key)}.json"
            if not path.exists():
                content = {METADATA: self.metadata, key: [runner, to_json(tactic)]}
                write_atomically(path, json.dumps(content, indent=2, sort_keys=True) + "\n", keeps_first=True)
