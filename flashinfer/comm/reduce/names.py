# SPDX-License-Identifier: Apache-2.0
"""Names of workspaces: compiled programs, which cannot hold an object, find them by these."""

from __future__ import annotations

import itertools
import weakref
from typing import Any, Optional

from ..workspace_base import AllReduceFusionWorkspace

__all__ = ["forget", "name_of", "workspace_named"]

_named: weakref.WeakValueDictionary[str, AllReduceFusionWorkspace] = weakref.WeakValueDictionary()
_numbers: dict[str, Any] = {}


def name_of(workspace: AllReduceFusionWorkspace, sizes: str) -> str:
    """Return the name of a new workspace: what it is, and how many of its kind this process has created before.

    A process that creates the same workspaces in the same order finds those that a cached graph names.
    """
    kind = f"rank {workspace.rank} of {workspace.world_size}, {sizes}"
    number = next(_numbers.setdefault(kind, itertools.count(1)))
    name = f"{kind}, number {number}"
    _named[name] = workspace
    return name


def forget(name: str) -> None:
    """Forget a workspace that is destroyed."""
    _named.pop(name, None)


def workspace_named(name: str) -> Optional[AllReduceFusionWorkspace]:
    """Return a workspace of this process; None if nobody has created it, or it is destroyed."""
    return _named.get(name)
