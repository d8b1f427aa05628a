# SPDX-License-Identifier: Apache-2.0
"""Benchmark cases: ``Bench`` is one measurement, ``Case`` builds one for each of its points."""

from __future__ import annotations

import inspect
import itertools
from dataclasses import dataclass, field
from typing import Any, Callable, Mapping, Optional, Sequence, Union

import torch

from flashinfer.testing import Tolerance

__all__ = ["Bench", "Case", "Point", "Run"]

Point = dict[str, Any]
Run = Callable[..., Any]


@dataclass
class Bench:
    """One measurement, with its tensors allocated.

    Attributes
    ----------
    run : callable, or mapping from backend name to callable
        Called as ``run(*args)``. A plain callable is the backend named after the device.
    args : sequence
        Arguments of ``run``, ``baseline`` and ``reference``. Tensors passed here, rather than captured by a closure,
        can be rotated inside a CUDA graph and copied for the check.
    baseline : callable, optional
        The same result from torch alone.
    bytes, flops : int
        Least memory traffic (each input read once, each output written once), and operations; 0 if not meaningful.
    flops_dtype : torch.dtype
        Operand dtype of the matrix product that the operations are compared with.
    reference : callable, optional
        Expected result for ``--refcheck``: the reference of the op's trace template.
    results : sequence of int
        Positions in ``args`` that hold the result of an in-place op; empty when ``run`` returns it.
    tolerance : Tolerance, optional
        Tolerance of the check; default: that of the result's dtype. Give the reason in a comment where you pass one.
    missing : mapping of str to str
        Backends that cannot run here, and what they need.
    """

    run: Union[Run, Mapping[str, Run]]
    args: Sequence[Any] = ()
    baseline: Optional[Run] = None
    bytes: int = 0
    flops: int = 0
    flops_dtype: torch.dtype = torch.bfloat16
    reference: Optional[Run] = None
    results: Sequence[int] = ()
    tolerance: Optional[Tolerance] = None
    missing: Mapping[str, str] = field(default_factory=dict)

    def backends(self, device: str) -> dict[str, Run]:
        """Return all backends by name, including the baseline as ``torch``."""
        found = dict(self.run) if isinstance(self.run, Mapping) else {device: self.run}
        return {**found, "torch": self.baseline} if self.baseline else found


@dataclass
class Case:
    """A registered benchmark: a build function and the points to build on each device."""

    name: str
    build: Callable[..., Bench]
    points: dict[str, list[Point]] = field(default_factory=dict)

    @property
    def parameters(self) -> dict[str, Any]:
        """Parameters of ``build`` with their defaults; ``inspect.Parameter.empty`` for a parameter without a default.

        A build function with ``**shape`` has the parameters of its points.
        """
        found: dict[str, Any] = {}
        for name, parameter in inspect.signature(self.build).parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                points = itertools.chain.from_iterable(self.points.values())
                found |= {key: inspect.Parameter.empty for point in points for key in point if key not in found}
            else:
                found[name] = parameter.default
        return found

    def make(self, device: str, point: Mapping[str, Any], seed: int = 0) -> Bench:
        """Build with tensors on ``device`` and the same random numbers every time."""
        torch.manual_seed(seed)
        with torch.device(device):
            return self.build(**point)
