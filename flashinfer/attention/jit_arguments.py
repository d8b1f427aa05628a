# SPDX-License-Identifier: Apache-2.0
"""Additional arguments of customized modules: collect them from the wrapper and from the caller of ``run``."""

from __future__ import annotations

from numbers import Real
from typing import Any, Mapping, Optional, Sequence

import torch

from .._runtime.errors import ArgumentError

__all__ = ["JitArguments", "prepare_jit_additional_args"]

_FRACTIONS = ("float", "double")
_SCALAR_TYPES = 10  # index of the scalar types in jit_args; variant name and source follow


def prepare_jit_additional_args(
    jit_additional_tensor_names: Sequence[str],
    known_bufs: Mapping[str, Optional[torch.Tensor]],
    user_args: Sequence[Any],
) -> list[Any]:
    """Return the additional arguments of a customized module: tensors, then scalars.

    Tensors are in the order of their declaration. A tensor named in ``known_bufs`` is taken from there; any other
    tensor is the next element of ``user_args``, or None if ``user_args`` is exhausted. The remaining ``user_args``
    follow.
    """
    rest = list(user_args)
    tensors = [
        known_bufs[name] if name in known_bufs else rest.pop(0) if rest else None
        for name in jit_additional_tensor_names
    ]
    return [*tensors, *rest]


class JitArguments:
    """Additional parameters that ``jit_args`` declares from index 7 on: names and types of tensors, of scalars.

    A tensor that the wrapper knows by name comes from the wrapper. The caller passes the other tensors, then the
    scalars, in the order of declaration. A missing tensor is null; a missing scalar gets a default value if its name is
    a known one (``sm_scale``, ...). Scales of q and k multiply ``sm_scale``, whether it is the caller's or the default.
    """

    def __init__(self, jit_args: Sequence[Any], known_tensors: Sequence[str]) -> None:
        if len(jit_args) <= _SCALAR_TYPES:
            raise ArgumentError(
                f"jit_args must have 13 elements (what generators of modules take after backend), got {len(jit_args)}"
            )
        self.head_dim_vo = int(jit_args[6])
        self.tensors = list(jit_args[7])
        self._tensor_types = dict(zip(self.tensors, jit_args[8], strict=False))
        self.scalars = list(jit_args[9])
        self._scalar_types = list(jit_args[_SCALAR_TYPES])
        self._known = frozenset(known_tensors)

    def split(
        self, op: str, args: Sequence[Any], derived: Mapping[str, float], logit_scale: float = 1.0
    ) -> tuple[list[Optional[torch.Tensor]], list[Any]]:
        """Return the caller's tensors and all scalars. ``logit_scale`` multiplies the caller's ``sm_scale``."""
        rest = list(args)
        tensors: list[Optional[torch.Tensor]] = []
        for name in self.tensors:
            if name not in self._known:
                given = len(rest) > 0 and (rest[0] is None or isinstance(rest[0], torch.Tensor))
                tensors.append(rest.pop(0) if given else None)
                self._check_tensor(op, name, tensors[-1])
        self._check_scalars(op, rest)
        if logit_scale != 1.0:
            rest = [x * logit_scale if name == "sm_scale" else x for name, x in zip(self.scalars, rest, strict=False)]
        missing = self.scalars[len(rest) :]
        for name in missing:
            if name not in derived:
                raise ArgumentError(f"{op}: scalar {name!r} must be among the positional arguments, got none")
        return tensors, [*rest, *(derived[name] for name in missing)]

    def _check_scalars(self, op: str, given: Sequence[Any]) -> None:
        if len(given) > len(self.scalars):
            raise TypeError(
                f"{op}.run: positional arguments after the tensors must be at most {len(self.scalars)} "
                f"({', '.join(self.scalars) or 'the variant declares no scalars'}), got {len(given)}"
            )
        for name, kind, x in zip(self.scalars, self._scalar_types, given, strict=False):
            if not isinstance(x, (float, int, Real)):  # torch.compile traces float and int, not Real
                raise TypeError(f"{op}.run: {name} must be a number, got a {type(x).__name__}")
            if kind not in _FRACTIONS:
                self._check_integer(f"{op}.run: {name}", kind, x)

    @staticmethod
    def _check_integer(what: str, kind: str, x: Any) -> None:
        if not isinstance(x, int) and x % 1 != 0:  # inf % 1 is nan, so infinity is rejected too
            raise TypeError(f"{what} must be an integer ({kind}), got {x}")
        bits, end = (32, 1 << 32) if "32" in kind else (64, 1 << 63)  # 32-bit types: signed or unsigned range
        if not -(1 << (bits - 1)) <= x < end:
            raise ArgumentError(f"{what} must fit {bits} bits, got {x}")

    def _check_tensor(self, op: str, name: str, x: Optional[torch.Tensor]) -> None:
        """Check a tensor against its declared type: kernels read its memory as that type. Kernels check the size."""
        kind = self._tensor_types.get(name)
        if x is not None and x.dtype.itemsize > 2 and x.dtype.is_floating_point != (kind in _FRACTIONS):
            raise TypeError(f"{op}.run: {name} must be {kind} (as declared), got {x.dtype}")

    def all_tensors(
        self, given: Sequence[Optional[torch.Tensor]], known: Mapping[str, Optional[torch.Tensor]]
    ) -> list[Optional[torch.Tensor]]:
        """Return all declared tensors in the order of declaration."""
        buffers = {name: known.get(name) for name in self._known}
        return prepare_jit_additional_args(self.tensors, buffers, given)[: len(self.tensors)]

    def typed(self, scalars: Sequence[float]) -> list[Any]:
        """Convert scalars to their declared types; a compiled graph passes all of them as floats."""
        kinds = [*self._scalar_types, *(["double"] * len(scalars))]
        return [x if kind in _FRACTIONS else int(x) for x, kind in zip(scalars, kinds, strict=False)]
