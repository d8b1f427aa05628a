# SPDX-License-Identifier: Apache-2.0
"""Prefill of Kimi delta attention in two steps: offsets once per batch, then a call for each layer."""

from __future__ import annotations

from typing import Any, Optional, Union

import torch

from .._runtime.errors import ArgumentError
from ..api_logging import flashinfer_api
from .kda import recurrent_kda

__all__ = ["RecurrentKDAPrefillWorkspace", "RecurrentKDAPrefillWrapper"]

_PLAN, _RUN = "RecurrentKDAPrefillWrapper.plan", "RecurrentKDAPrefillWrapper.run"


class RecurrentKDAPrefillWorkspace:
    """Place of a batch's offsets, which a wrapper keeps from plan to plan: their addresses do not change while the
    number of sequences does not grow.

    Parameters
    ----------
    device : Union[str, torch.device]
    """

    def __init__(self, device: Union[str, torch.device] = "cuda") -> None:
        self.device = torch.device(device)
        self._offsets: Optional[torch.Tensor] = None

    def offsets(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory for ``count`` offsets."""
        if self._offsets is None or self._offsets.dtype is not dtype or len(self._offsets) < count:
            self._offsets = torch.empty(count, dtype=dtype, device=self.device)
        return self._offsets[:count]


class RecurrentKDAPrefillWrapper:
    """:func:`recurrent_kda` over packed sequences whose offsets are planned once and used by all layers.

    Parameters
    ----------
    device : Union[str, torch.device]
        Device of the tokens.

    Examples
    --------
    >>> wrapper = flashinfer.RecurrentKDAPrefillWrapper("cpu")
    >>> wrapper.plan(torch.tensor([0, 3, 7]))
    >>> q, k, v, g = (torch.randn(1, 7, 2, 64).bfloat16() for _ in range(4))
    >>> beta, states = torch.rand(1, 7, 2).bfloat16(), torch.zeros(2, 2, 64, 64)
    >>> output, _ = wrapper.run(q, k, v, -g.abs(), beta, initial_state=states)
    """

    def __init__(self, device: Union[str, torch.device] = "cuda") -> None:
        self.workspace = RecurrentKDAPrefillWorkspace(device)
        self._cu_seqlens: Optional[torch.Tensor] = None
        self._tokens: Optional[int] = None  # known if the offsets came from the host

    @flashinfer_api(trace=None)
    def plan(self, cu_seqlens: torch.Tensor, *, non_blocking: bool = True) -> None:
        """Take the offsets of a batch.

        Parameters
        ----------
        cu_seqlens : torch.Tensor
            ``(N + 1,)`` int32 or int64 on any device: first tokens of the sequences, and the end. They are copied, so
            the caller may change them after this. Those on the CPU are checked.
        non_blocking : bool
            Copy offsets in pinned memory without waiting.
        """
        if not isinstance(cu_seqlens, torch.Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
            found = cu_seqlens.dtype if isinstance(cu_seqlens, torch.Tensor) else type(cu_seqlens).__name__
            raise ArgumentError(f"{_PLAN}: cu_seqlens must be a tensor of int32 or int64, got {found}")
        if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2:
            raise ArgumentError(f"{_PLAN}: cu_seqlens must have shape (N + 1,), got {tuple(cu_seqlens.shape)}")
        self._tokens = None
        if cu_seqlens.device.type == "cpu":
            if cu_seqlens[0] != 0 or bool((cu_seqlens.diff() < 0).any()):
                raise ArgumentError(f"{_PLAN}: cu_seqlens must begin with 0 and not fall, got {cu_seqlens.tolist()}")
            self._tokens = int(cu_seqlens[-1])
        self._cu_seqlens = self.workspace.offsets(len(cu_seqlens), cu_seqlens.dtype)
        self._cu_seqlens.copy_(cu_seqlens, non_blocking=non_blocking)

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        A_log: Optional[torch.Tensor] = None,
        dt_bias: Optional[torch.Tensor] = None,
        scale: Optional[float] = None,
        initial_state: Optional[torch.Tensor] = None,
        output_final_state: bool = False,
        **options: Any,
    ) -> tuple[Any, ...]:
        """Compute the planned sequences, ``(1, tokens, ...)``. Arguments and results are those of
        :func:`recurrent_kda`, without ``cu_seqlens``; so are entries of the log and traces.
        """
        if self._cu_seqlens is None:
            raise ArgumentError(f"{_RUN}: plan must be called before run, got no offsets")
        if "cu_seqlens" in options:
            raise ArgumentError(f"{_RUN}: cu_seqlens must be given to plan, got it here too")
        if self._tokens is not None and q.shape[1] != self._tokens:
            raise ArgumentError(f"{_RUN}: q must have the {self._tokens} planned tokens, got {q.shape[1]}")
        options.setdefault("prefill_workspace", self.workspace)
        return recurrent_kda(
            q, k, v, g, beta, A_log, dt_bias, scale, initial_state, output_final_state, cu_seqlens=self._cu_seqlens,
            **options,
        )  # fmt: skip
