# SPDX-License-Identifier: Apache-2.0
"""Base of the wrappers that are made of other wrappers: POD, cascades, sparse attention, ``BatchAttention``."""

from __future__ import annotations

from typing import Any

from .locks import CallLock, lock_methods, new_with_lock
from .wrapper_copies import copy_wrapper, deepcopy_wrapper, refuse_pickling

__all__ = ["CompositeWrapper"]


class CompositeWrapper:
    """Base of wrappers without a plan of their own: their calls are serialized, and copies have plans of their own."""

    _lock: CallLock

    __new__ = new_with_lock
    __copy__ = copy_wrapper
    __deepcopy__ = deepcopy_wrapper
    __reduce_ex__ = refuse_pickling

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        lock_methods(cls)
