# SPDX-License-Identifier: Apache-2.0
"""Communication backends as engines write them: ranks, sizes, ``allgather`` and ``barrier`` hold, nothing else does."""

from __future__ import annotations

from typing import Any


class EngineBackend:
    """A backend over another one: it returns lists, has no ``bcast`` for sub-groups, and splits nothing."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def Get_rank(self) -> int:
        return self._inner.Get_rank()

    def Get_size(self) -> int:
        return self._inner.Get_size()

    def allgather(self, data: Any) -> list[Any]:
        return list(self._inner.allgather(data))

    def bcast(self, data: Any, root: int) -> Any:
        raise AssertionError("set-up must not call bcast of a foreign backend")

    def barrier(self) -> None:
        self._inner.barrier()

    def Split(self, color: int, key: int) -> EngineBackend:
        return self
