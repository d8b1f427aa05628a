# SPDX-License-Identifier: Apache-2.0
"""Tactics in files and in sets. JSON has no tuples: a tactic that was a tuple or a list is read as a tuple."""

from __future__ import annotations

from typing import Any

__all__ = ["as_hashable", "from_json", "to_json"]


def to_json(tactic: Any) -> Any:
    """Return the tactic with lists in place of tuples; TypeError for a value that JSON cannot express."""
    if isinstance(tactic, (tuple, list)):
        return [to_json(part) for part in tactic]
    if isinstance(tactic, dict):
        return {key: to_json(part) for key, part in tactic.items()}
    if tactic is None or isinstance(tactic, (bool, int, float, str)):
        return tactic
    raise TypeError(
        f"autotune: a tactic must be made of numbers, strings, None, lists and tuples of them, got {tactic!r}"
    )


def from_json(value: Any) -> Any:
    """Return the tactic that :func:`to_json` was given."""
    if isinstance(value, dict):
        return {key: from_json(part) for key, part in value.items()}
    return tuple(map(from_json, value)) if isinstance(value, list) else value


def as_hashable(tactic: Any) -> Any:
    """Convert to a hashable value; a list and a tuple of equal parts give the same value."""
    if isinstance(tactic, (tuple, list)):
        return tuple(map(as_hashable, tactic))
    if isinstance(tactic, dict):
        return tuple(sorted((key, as_hashable(part)) for key, part in tactic.items()))
    return tactic
