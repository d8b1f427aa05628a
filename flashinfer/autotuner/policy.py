# SPDX-License-Identifier: Apache-2.0
"""Measurements of ``autotune_v2``: as graph replays or call by call, with a cold or warm L2 cache, by which clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

from .._runtime.errors import ArgumentError

__all__ = ["MeasurementPolicy"]

_MODES = ("auto", "cuda_graph", "eager")
_TIMERS = ("auto", "cupti", "events", "events_no_delay")


@dataclass(frozen=True)
class MeasurementPolicy:
    """Settings of trials; each operator decides about those that are None.

    Parameters
    ----------
    execution_mode : str
        ``"cuda_graph"``: replays of a graph. ``"eager"``: calls, whose time on the host counts. ``"auto"``: as the
        operator says.
    cold_l2 : Optional[bool]
        Whether calls find their inputs out of the L2 cache. None: as the operator says.

    Examples
    --------
    >>> flashinfer.MeasurementPolicy(execution_mode="cuda_graph").use_cuda_graph
    True
    """

    execution_mode: str = "auto"
    cold_l2: Optional[bool] = None
    _timer: str = "auto"

    def __post_init__(self) -> None:
        if self.execution_mode not in _MODES:
            raise ArgumentError(
                f"MeasurementPolicy.execution_mode must be one of {', '.join(_MODES)}, got {self.execution_mode!r}"
            )
        if self._timer not in _TIMERS:
            raise ArgumentError(f"MeasurementPolicy._timer must be one of {', '.join(_TIMERS)}, got {self._timer!r}")
        if self.execution_mode == "eager" and self._timer == "cupti":
            raise ArgumentError(
                "MeasurementPolicy: execution_mode='eager' rejects _timer='cupti', which does not see the host's time"
            )

    @property
    def use_cuda_graph(self) -> Optional[bool]:
        """True, False, or None where the operator decides."""
        return {"auto": None, "cuda_graph": True, "eager": False}[self.execution_mode]

    @property
    def timer(self) -> str:
        return self._timer

    def manifest_fields(self) -> dict[str, Any]:
        """Return what results depend on besides the environment: the fields that differ from the defaults."""
        fields: dict[str, Any] = {}
        if self.execution_mode != "auto":
            fields["measure_execution_mode"] = self.execution_mode
        if self.cold_l2 is not None:
            fields["measure_cold_l2"] = self.cold_l2
        if self._timer != "auto":
            fields["measure_timer"] = self._timer
        return fields
