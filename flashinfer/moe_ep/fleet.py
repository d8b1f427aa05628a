# SPDX-License-Identifier: Apache-2.0
"""Transports: a fleet is what the ranks of a layer exchange tokens with, a handle is one exchange of it."""

from __future__ import annotations

import abc
from typing import Any, Callable, Optional, Sequence, TypeVar

import torch

from .algo_knobs import AlgoKnob, _index_knobs
from .config import (
    BootstrapConfig,
    CombineInputParams,
    CombineOutput,
    DispatchInputParams,
    DispatchOutput,
    FleetParams,
    HandleParams,
)
from .errors import MoEEpFaultToleranceUnsupportedError

__all__ = ["Fleet", "Handle", "create_fleet"]


class Handle(abc.ABC):
    """One exchange: tokens go to their experts, results come back."""

    @abc.abstractmethod
    def dispatch(self, params: DispatchInputParams) -> DispatchOutput:
        """Send tokens to the ranks of their experts; return what this rank received."""

    @abc.abstractmethod
    def combine(self, params: CombineInputParams) -> CombineOutput:
        """Send results back; return the sums over the experts of this rank's tokens."""

    def dispatch_send_only(self, params: DispatchInputParams) -> None:
        """Send without waiting for what other ranks send."""
        raise NotImplementedError(f"{type(self).__name__}: dispatch must be one call, got dispatch_send_only")

    def dispatch_recv_only(self) -> DispatchOutput:
        """Receive what :meth:`dispatch_send_only` of all ranks sent."""
        raise NotImplementedError(f"{type(self).__name__}: dispatch must be one call, got dispatch_recv_only")

    @abc.abstractmethod
    def complete(self) -> None:
        """Wait until the exchange is done."""

    @abc.abstractmethod
    def destroy(self) -> None:
        """Give memory back; any number of times."""


class Fleet(abc.ABC):
    """A transport with its memory. Masks are int32 ``(world_size,)``, 1 for a rank that takes part."""

    def __init__(self, bootstrap: BootstrapConfig, params: FleetParams, algo_knobs: Sequence[AlgoKnob] = ()) -> None:
        self.bootstrap, self.params, self.knobs = bootstrap, params, _index_knobs(algo_knobs)

    @abc.abstractmethod
    def create_handle(self, params: HandleParams, algo_knobs: Sequence[AlgoKnob] = ()) -> Handle:
        """Start an exchange of tokens with these experts."""

    @abc.abstractmethod
    def update_topology(self, bootstrap: BootstrapConfig, algo_knobs: Sequence[AlgoKnob] = ()) -> None:
        """Go on with another group of ranks."""

    @abc.abstractmethod
    def destroy(self) -> None:
        """Give memory back; any number of times."""

    @property
    def supports_fault_tolerance(self) -> bool:
        """Return True if the transport goes on without a rank."""
        return False

    @property
    def active_mask_epoch(self) -> int:
        """Number of changes of the mask so far."""
        return 0

    def query_active_mask(self, out: Optional[torch.Tensor] = None) -> torch.Tensor:
        """Return the mask of the ranks that take part."""
        raise self._cannot("query_active_mask")

    def query_fault(self) -> Any:
        """Return the fault that was found last."""
        raise self._cannot("query_fault")

    def set_active_mask(self, mask: torch.Tensor) -> None:
        """Go on with the ranks of a mask."""
        raise self._cannot("set_active_mask")

    def reconcile_active_mask(self, timeout_s: Optional[float] = None) -> torch.Tensor:
        """Agree on one mask among the ranks."""
        raise self._cannot("reconcile_active_mask")

    def clear_faults(self, *, readmit: bool = False) -> None:
        """Forget faults; ``readmit`` takes the ranks back that were left out."""
        raise self._cannot("clear_faults")

    def _cannot(self, call: str) -> MoEEpFaultToleranceUnsupportedError:
        return MoEEpFaultToleranceUnsupportedError(
            f"{type(self).__name__}.{call}: the transport must support fault tolerance, got one that ends with a rank"
        )


_BACKEND_REGISTRY: dict[str, type[Fleet]] = {}

F = TypeVar("F", bound=type[Fleet])


def _register_fleet(name: str) -> Callable[[F], F]:
    """Return a decorator that makes a class known to :func:`create_fleet`."""

    def register(cls: F) -> F:
        _BACKEND_REGISTRY[name] = cls
        return cls

    return register


class _UnknownTransport(KeyError, ValueError):
    """A name of no transport; callers look for either base."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError shows the representation of its argument


def _transport_name(backend: Any) -> str:
    """Return the name that ``backend`` is or has."""
    name = backend if isinstance(backend, str) else getattr(backend, "backend_name", None)
    if not isinstance(name, str):
        raise TypeError(
            f"create_fleet: backend must be a name or an object with backend_name, got {type(backend).__name__}"
        )
    return name


def create_fleet(
    bootstrap: BootstrapConfig, params: FleetParams, algo_knobs: Sequence[AlgoKnob] = (), backend: Any = "nccl_ep"
) -> Fleet:
    """Make a transport.

    Parameters
    ----------
    bootstrap : BootstrapConfig
        The group of ranks.
    params : FleetParams
        Sizes of what they exchange.
    algo_knobs : Sequence[AlgoKnob]
        Options; of several of a class the last one counts.
    backend : Any
        ``"nccl_ep"`` or ``"nixl_ep"`` (several GPUs; ``MoEEpNotBuiltError`` here), ``"local"`` (one rank, any device),
        or a configuration that has such a ``backend_name``.
    """
    name = _transport_name(backend)
    if name not in _BACKEND_REGISTRY:
        raise _UnknownTransport(f"create_fleet: backend must be one of {sorted(_BACKEND_REGISTRY)}, got {name!r}")
    return _BACKEND_REGISTRY[name](bootstrap, params, algo_knobs)
