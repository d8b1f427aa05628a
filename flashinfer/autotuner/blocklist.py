# SPDX-License-Identifier: Apache-2.0
"""Tactics that must not be tried, such as those that hang or corrupt memory, which a trial cannot survive.

A list is a JSON file, ``{"_metadata": {...}, "invalid_tactics": {"op::Runner": [tactic, ...]}}``. The tuner loads the
one that ``FLASHINFER_TACTICS_BLOCKLIST`` names.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any, Iterable, Mapping, Optional, Sequence, Union

from .._runtime.errors import ArgumentError
from ..jit.utils import write_atomically
from .files import METADATA as _METADATA_KEY
from .files import collect_metadata as _collect_metadata
from .files import read_json
from .tactics import as_hashable as _tactic_to_json_hashable
from .tactics import to_json as _tactic_to_json

__all__ = ["TacticsBlocklist"]

PathLike = Union[str, os.PathLike[str]]

_TACTICS = "invalid_tactics"
_VERSION = "1.0"
_ANY = "*"
_log = logging.getLogger("flashinfer")


def _here() -> dict[str, str]:
    """Describe this environment, by the function of the published module, which programs replace there."""
    published = sys.modules.get("flashinfer.tactics_blocklist")
    return getattr(published, "_collect_metadata", _collect_metadata)()


class TacticsBlocklist:
    """Tactics to leave out, by operator and class of runner. Tactics that are lists and tuples compare equal."""

    def __init__(self) -> None:
        self._tactics: dict[str, set[Any]] = {}
        self._path: Optional[str] = None

    @property
    def is_loaded(self) -> bool:
        """True if tactics have been loaded."""
        return bool(self._tactics)

    @property
    def loaded_path(self) -> Optional[str]:
        """The file that was loaded last."""
        return self._path

    def load(self, path: PathLike) -> bool:
        """Add the tactics of a file to those of files loaded before.

        Returns
        -------
        bool
            False, and nothing is added, if the file names another version or GPU (CPU, without a GPU), or does not say
            which. ``"*"`` is any.

        Raises
        ------
        FileNotFoundError
            There is no such file.
        json.JSONDecodeError
            It is no JSON.
        """
        content = read_json(Path(path))
        tactics = content.get(_TACTICS, {}) if isinstance(content, dict) else None
        if not isinstance(tactics, dict):
            raise ArgumentError(
                f"TacticsBlocklist: {path} must have an object {_TACTICS!r} of lists by 'op::Runner', got none"
            )
        for key, listed in tactics.items():
            if not isinstance(listed, list):
                raise ArgumentError(f"TacticsBlocklist: {path} must have a list of tactics for {key!r}, got {listed!r}")
        said = content.get(_METADATA_KEY)
        said = said if isinstance(said, dict) else {}
        here = _here()
        differences = ", ".join(
            f"{name} {said.get(name)}, here {value}"
            for name, value in here.items()
            if said.get(name) not in (value, _ANY) or name not in said
        )
        if differences:
            _log.warning("TacticsBlocklist: %s is of a different environment (%s): not used", path, differences)
            return False
        for key, listed in tactics.items():
            self._tactics.setdefault(key, set()).update(map(_tactic_to_json_hashable, listed))
        self._path = str(path)
        return True

    def filter(self, custom_op: str, runner: Any, tactics: Iterable[Any]) -> list[Any]:
        """Return the tactics that may be tried, in order. ``runner`` is a runner, its class, or the class name."""
        cls = runner if isinstance(runner, (str, type)) else type(runner)
        blocked = self._tactics.get(f"{custom_op}::{cls if isinstance(cls, str) else cls.__name__}")
        return (
            list(tactics) if not blocked else [one for one in tactics if _tactic_to_json_hashable(one) not in blocked]
        )

    def summary(self) -> dict[str, int]:
        """Return the number of blocked tactics, by ``op::Runner``."""
        return {key: len(tactics) for key, tactics in self._tactics.items()}

    @staticmethod
    def save(
        path: PathLike, invalid_tactics: Mapping[str, Sequence[Any]], metadata: Optional[Mapping[str, Any]] = None
    ) -> None:
        """Write a list; the file is replaced atomically.

        Parameters
        ----------
        path : str
            The file.
        invalid_tactics : Mapping[str, Sequence[Any]]
            Tactics by ``op::Runner``.
        metadata : Optional[Mapping[str, Any]]
            What the list is good for. Default: the versions and the GPU of this process.
        """
        said = {
            **(_here() if metadata is None else metadata),
            "generated_at": datetime.datetime.now(datetime.timezone.utc).isoformat(),
            "generator_version": _VERSION,
        }
        listed = {key: [_tactic_to_json(tactic) for tactic in tactics] for key, tactics in invalid_tactics.items()}
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(Path(path), json.dumps({_METADATA_KEY: said, _TACTICS: listed}, indent=2) + "\n")
