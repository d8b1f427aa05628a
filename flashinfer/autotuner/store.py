# SPDX-License-Identifier: Apache-2.0
"""Results that processes share: a folder for each environment, with a file for each result.

    <root>/v2/<digest of versions, GPU and policy>/manifest.json          these, as JSON
                                                  /entries/<digest>.json  {"key": ..., "runner": ..., "tactic": ...}

A file appears complete, and the first process to publish a result wins: whoever reads the store later chooses alike.
A file that holds no result, because it is damaged, is replaced. This is the layout of published ``autotune_v2``.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping, Optional, Union

import torch

from .._runtime.knobs import knobs
from ..jit import env as jit_env
from ..jit.utils import make_folder, write_atomically
from .files import Results, collect_metadata, read_json
from .tactics import from_json, to_json

__all__ = ["ManagedAutotuneCache", "ManagedCacheEntry", "ResultStore", "get_default_cache_root"]

_log = logging.getLogger("flashinfer")
_SCHEMA = {"cache_schema": "v2"}


def get_default_cache_root() -> Path:
    """Return ``FLASHINFER_AUTOTUNE_CACHE_DIR``, else ``FLASHINFER_AUTOTUNE_DIR``, else ``autotune`` in the cache."""
    named = knobs.autotune_cache_dir or knobs.autotune_dir
    return Path(named).expanduser().absolute() if named else jit_env.FLASHINFER_CACHE_DIR / "autotune"


def _digest(text: str, digits: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:digits]


def _plain(value: Any) -> Any:
    """Return the JSON form of a part of a key: dtypes and tuples are marked, what JSON cannot express is its text."""
    if isinstance(value, torch.dtype):
        return {"__dtype__": str(value).removeprefix("torch.")}
    if isinstance(value, tuple):
        return {"__tuple__": [_plain(part) for part in value]}
    if isinstance(value, list):
        return [_plain(part) for part in value]
    if isinstance(value, dict):
        return {str(name): _plain(part) for name, part in value.items()}
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


@dataclass(frozen=True)
class ManagedCacheEntry:
    """One stored result."""

    runner: str
    tactic: Any
    profiling_policy: Any = None


class ResultStore:
    """Results of one environment below ``root``."""

    def __init__(self, root: Path, metadata: Mapping[str, Any]) -> None:
        self.metadata = {**metadata, **_SCHEMA}
        text = json.dumps(self.metadata, sort_keys=True, separators=(",", ":"))
        self.folder = root / "v2" / _digest(text, 16)

    @property
    def _manifest(self) -> Path:
        return self.folder / "manifest.json"

    def path_of(self, key: str) -> Path:
        """Return the file of a result."""
        return self.folder / "entries" / f"{_digest(key, 24)}.json"

    def read(self) -> Results:
        """Return all results; files that cannot be read, or that are of another environment, are left out."""
        found: Results = {}
        try:
            if self._manifest.is_file() and not self._is_ours():
                _log.warning("autotune: %s is of another environment: it is not used", self.folder)
                return found
            paths = sorted((self.folder / "entries").glob("*.json"))
        except (OSError, ValueError) as error:  # a name that is too long, or that holds NUL
            _log.warning("autotune: %s cannot be read (%s): it is not used", self.folder, error)
            paths = []
        for path in paths:
            try:
                content = read_json(path)
            except (OSError, ValueError) as error:
                _log.warning("autotune: %s cannot be read (%s): it is not used", path, error)
                continue
            entry = self._entry(path, content)
            if entry is not None:
                found[content["key"]] = (entry.runner, entry.tactic)
        return found

    def _is_ours(self) -> bool:
        try:
            return bool(read_json(self._manifest) == self.metadata)
        except ValueError:
            return False

    def _entry(self, path: Path, content: Any, key: Optional[str] = None) -> Optional[ManagedCacheEntry]:
        """Return the result in a file; None if it holds none, or one of another key than its name says."""
        if not isinstance(content, dict) or not isinstance(content.get("key"), str) or "tactic" not in content:
            return None
        if not isinstance(content.get("runner"), str) or self.path_of(content["key"]) != path:
            return None
        if key is not None and content["key"] != key:
            return None
        return ManagedCacheEntry(content["runner"], from_json(content["tactic"]), content.get("profiling_policy"))

    def find(self, key: str) -> Optional[ManagedCacheEntry]:
        """Return the result of a key; None for a file that is missing, broken or of another key."""
        path = self.path_of(key)
        try:
            return self._entry(path, read_json(path), key)
        except (OSError, ValueError):
            return None

    def publish(self, results: Results, refused: Optional[Results] = None) -> None:
        """Add the results that the store does not have; OSError or ValueError if the folder cannot be written.

        Files that hold one of the results ``refused``, whose tactics this build does not have, are replaced.
        """
        for key, (runner, tactic) in results.items():
            path = self.path_of(key)
            entry = self.find(key)
            if entry is None or (entry.runner, entry.tactic) == (refused or {}).get(key):
                self.write(key, runner, tactic, keeps_first=not path.exists())

    def write(self, key: str, runner: str, tactic: Any, keeps_first: bool = False, **more: Any) -> None:
        """Write one result, and what describes the environment before the first."""
        path = self.path_of(key)
        make_folder(path.parent)
        if not self._manifest.is_file() or not self._is_ours():
            write_atomically(self._manifest, json.dumps(self.metadata, indent=2, sort_keys=True) + "\n")
        content = {"key": key, "runner": runner, "tactic": to_json(tactic), **more}
        write_atomically(path, json.dumps(content, indent=2, sort_keys=True) + "\n", keeps_first=keeps_first)


class ManagedAutotuneCache:
    """Results of one environment, looked up by key one at a time; what was found is remembered.

    Parameters
    ----------
    manifest : Optional[Mapping]
        What describes the environment; default: the versions and the GPU of this process.
    root : Union[str, Path, None]
        Folder of the store; default: :func:`get_default_cache_root`.
    """

    def __init__(self, manifest: Optional[Mapping[str, Any]] = None, root: Union[str, Path, None] = None) -> None:
        place = get_default_cache_root() if root is None else Path(root).expanduser().absolute()
        self._store = ResultStore(place, collect_metadata() if manifest is None else manifest)
        self._memo: dict[str, ManagedCacheEntry] = {}

    @property
    def manifest(self) -> dict[str, Any]:
        return dict(self._store.metadata)

    @property
    def folder(self) -> Path:
        """The folder of this environment."""
        return self._store.folder

    def lookup(self, key: Any) -> Optional[ManagedCacheEntry]:
        """Return the result of a key, a text or what has ``file_key``; None if there is none."""
        text = _text(key)
        if text not in self._memo:
            found = self._store.find(text)
            if found is None:
                return None
            self._memo[text] = found
        return self._memo[text]

    def publish(
        self,
        key: Any,
        runner_name: str,
        tactic: Any,
        key_fields: Optional[Mapping[str, Any]] = None,
        profiling_policy: Any = None,
    ) -> None:
        """Write a result, in place of an earlier one."""
        more = {"profiling_policy": profiling_policy} if profiling_policy is not None else {}
        if key_fields is not None:
            more["key_fields"] = _plain(dict(key_fields))
        self._store.write(_text(key), runner_name, tactic, **more)
        self._memo[_text(key)] = ManagedCacheEntry(runner_name, from_json(to_json(tactic)), profiling_policy)

    def preload(self) -> tuple[int, int, int]:
        """Read all results; return how many were read, how many files there are, and how many of them are no result."""
        found = self._store.read()
        total = len(list((self._store.folder / "entries").glob("*.json")))
        for key in found:
            self.lookup(key)
        return len(found), total, total - len(found)

    def clear_memo(self) -> None:
        """Read files again at the next look-up."""
        self._memo.clear()


def _text(key: Any) -> str:
    return key if isinstance(key, str) else str(getattr(key, "file_key", key))
