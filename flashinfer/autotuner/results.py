# SPDX-License-Identifier: Apache-2.0
"""Results of other processes: loading them, and merging ours into a file."""

from __future__ import annotations

import copy
import json
import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Callable, ClassVar, Collection, Mapping, Optional, Sequence, Union

from .._runtime.errors import ArgumentError
from .files import (
    GENERATION,
    METADATA,
    RECORDS,
    Fit,
    Results,
    classify_metadata,
    fit_of,
    locked,
    read_content,
    results_in,
    write_content,
)
from .runner import FALLBACK
from .store import ResultStore
from .tactics import as_hashable

__all__ = ["SavedResults"]

PathLike = Union[str, os.PathLike[str]]


class SavedResults(ABC):
    """Results loaded from files and results not saved yet. :class:`AutoTuner` adds the measured ones."""

    was_used: ClassVar[bool]  # Overrides defines it

    def __init__(self) -> None:
        self._file_configs: Results = {}  # runner class and tactic, by file key
        self._origins: dict[str, Path] = {}  # file that each of them was read from
        self._checked: set[str] = set()  # those whose tactic exists in this build; see _check_loaded
        self._refused: Results = {}  # those whose tactic does not
        self._dirty = False  # True if some result is in no file
        self._records: dict[str, dict[str, Any]] = {}  # loaded records, by namespace
        self._published: dict[str, dict[str, Any]] = {}  # records not saved yet, by namespace
        self._generations: dict[str, int] = {}  # generation of each file when the file was read
        self._stores: dict[Path, ResultStore] = {}  # stores that autotune_v2 has opened
        self._warned_cache_mismatch: set[str] = set()

    @abstractmethod
    def _metadata(self) -> dict[str, str]:
        """Return what describes this environment in a file of results."""

    @abstractmethod
    def _measured(self) -> Results:
        """Return the results that this process has measured, by file key."""

    @abstractmethod
    def _drop_measured(self, keys: Collection[str]) -> None:
        """Forget the results that this process has measured for these file keys."""

    @abstractmethod
    def _forget_choices(self) -> None:
        """Let every caller choose anew, after results have changed."""

    @abstractmethod
    def _warn(self, text: str, *arguments: Any) -> None:
        """Log a warning."""

    def load_configs(self, path: PathLike) -> bool:
        """Add the results of a file to those that were loaded before.

        Returns
        -------
        bool
            False, and nothing is loaded, if the file is of another environment or does not say of which.

        Raises
        ------
        FileNotFoundError
            There is no such file.
        json.JSONDecodeError
            It is no JSON.
        """
        content = read_content(Path(path))
        if self._fit(Path(path), content) is not Fit.YES:
            return False
        found = results_in(content)
        self._add_loaded(found, dict.fromkeys(found, Path(path)))
        type(self).was_used |= bool(self._file_configs)
        self._forget_choices()
        self._records.update(_records_in(content))
        self._generations[_name(path)] = _generation_of(content)
        return True

    def save_configs(self, path: PathLike) -> None:
        """Merge measured and loaded results into a file, which is replaced atomically.

        The file is read again, because other processes may have added results since the file was loaded. Results
        measured here replace those of the file. A file of another environment is not changed, and a warning is logged;
        a file without an environment, or one that cannot be read, is replaced. Metadata of a file that fits is kept.

        Raises
        ------
        RuntimeError
            Records were published, and the file has changed since it was read.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.parent):
            found = self._content_to_merge(path)
            if found is None:
                return
            generation = _generation_of(found)
            if self._published and generation != self._generations.get(_name(path), 0):
                raise RuntimeError(
                    f"autotune: {path} must have generation {self._generations.get(_name(path), 0)}, got {generation} "
                    "(another process has written it since it was read): load it, then publish the records again"
                )
            special = {METADATA: found.get(METADATA, self._metadata()), GENERATION: generation + 1}
            records = {**self._records, **_records_in(found), **self._published}
            if records:
                special[RECORDS] = records
            merged = {**self._file_configs, **results_in(found)}
            kept = {key: result for key, result in merged.items() if result != self._refused.get(key)}
            write_content(path, special, {**kept, **self._measured()})
        self._generations[_name(path)] = generation + 1
        self._records, self._published, self._dirty = records, {}, False

    def open_store(self, root: Path, policy: Optional[Mapping[str, Any]] = None) -> ResultStore:
        """Add the results of the store below ``root`` that fit this environment and policy, and return the store.

        The results of the store that was open before are no longer used.
        """
        store = ResultStore(root, {**self._metadata(), **(policy or {})})
        for other in [other for other in self._stores.values() if other.folder != store.folder]:
            for key in [key for key, path in self._origins.items() if path == other.path_of(key)]:
                self._file_configs.pop(key, None)
                del self._origins[key]
        self._stores = {root: store}
        self._take_stored(store, store.read())
        return store

    def reload_stores(self) -> None:
        """Take the results of all stores that were opened, in place of those that this process has measured."""
        for store in self._stores.values():
            stored = store.read()
            self._drop_measured(stored)
            self._take_stored(store, stored)

    def _take_stored(self, store: ResultStore, stored: Results) -> None:
        self._add_loaded(stored, {key: store.path_of(key) for key in stored})
        type(self).was_used |= bool(stored)
        self._forget_choices()

    def _add_loaded(self, found: Results, origins: Mapping[str, Path]) -> None:
        self._file_configs.update(found)
        self._origins.update(origins)
        self._checked -= found.keys()

    def _loaded(self, key: str, runner: str, op: str, valid: Callable[[], Sequence[Any]]) -> Optional[tuple[Any]]:
        """Return the loaded tactic of a runner as a tuple of one; None if there is none.

        A file of a build with other tiles and the same version, or a damaged one, holds any value. A tactic that is not
        among ``valid()`` is forgotten with a warning, so that it is measured anew. Each is compared once per load.
        """
        found = self._file_configs.get(key)
        if found is None or found[0] != runner:
            return None
        if key not in self._checked and found[1] != FALLBACK:
            wanted, known = as_hashable(found[1]), valid()
            same = [one for one in known if as_hashable(one) == wanted]
            if not same:
                text = "autotune: %s has the tactic %.80r for %s, which is none of the %d that exist: it is not used"
                self._warn(text, self._origins.get(key, "the file"), found[1], op, len(known))
                self._refused[key] = found
                self._file_configs.pop(key, None)
                return None
            if repr(wanted) != repr(as_hashable(same[0])):  # 48.0 for 48
                found = self._file_configs[key] = (runner, same[0])
        self._checked.add(key)
        return (found[1],)

    def get_namespaced_records(self, namespace: str) -> dict[str, Any]:
        """Return a copy of the records that a product keeps beside the results; empty if there are none."""
        return copy.deepcopy(self._published.get(namespace, self._records.get(namespace, {})))

    def publish_namespaced_records(self, namespace: str, records: Mapping[str, Any]) -> None:
        """Replace the records that a product keeps beside the results. The next save writes them."""
        if not isinstance(records, Mapping):
            raise ArgumentError(f"publish_namespaced_records: records must be a dict, got {records!r}")
        self._published[namespace] = json.loads(json.dumps(records))
        self._dirty = True

    def _forget_loaded(self) -> None:
        self._file_configs.clear()
        self._origins.clear()
        self._checked.clear()
        self._refused.clear()
        self._records.clear()
        self._forget_choices()

    def _fit(self, path: Path, content: Mapping[str, Any]) -> Fit:
        """Compare a file with this machine. Warns once for each reason not to use the file."""
        current = self._metadata()
        fit = fit_of(content, current)
        kind = "hard" if fit is Fit.NO else "soft"
        if fit is Fit.YES or kind in self._warned_cache_mismatch:
            return fit
        self._warned_cache_mismatch.add(kind)
        definite, unsaid = classify_metadata(content[METADATA], current)
        differences = ", ".join(f"{name} {there}, here {here}" for name, (there, here) in (definite or unsaid).items())
        if fit is Fit.NO:
            self._warn("autotune: %s is of a different environment (%s): it is not used and kept", path, differences)
        else:
            self._warn("autotune: %s may be of a different environment (%s): it is not used", path, differences)
        return fit

    def _content_to_merge(self, path: Path) -> Optional[dict[str, Any]]:
        """Read the content to merge into; empty if the file is to be replaced, None if the file is to be kept."""
        try:
            content = read_content(path)
        except FileNotFoundError:
            return {}
        except ValueError as error:
            self._warn("autotune: %s cannot be read (%s) and is replaced", path, error)
            return {}
        fit = self._fit(path, content)
        return content if fit is Fit.YES else None if fit is Fit.NO else {}


def _name(path: PathLike) -> str:
    return os.path.realpath(path)


def _generation_of(content: Mapping[str, Any]) -> int:
    generation = content.get(GENERATION, 0)
    return generation if isinstance(generation, int) else 0


def _records_in(content: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    records = content.get(RECORDS)
    return records if isinstance(records, dict) else {}
