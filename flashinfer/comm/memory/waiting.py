# SPDX-License-Identifier: Apache-2.0
"""Waiting for peers with an end: what exchanges over one table of rows share."""

from __future__ import annotations

import ctypes
import time
from typing import Any, Callable, Optional

import torch

from ..._runtime.arch import get_device_sm_count
from ..._runtime.errors import ArgumentError
from ..comm_backend import seconds_of
from ..errors import CommTimeoutError

__all__ = ["Waiting", "waiting_for"]

_WAIT_US = 50_000  # a call on the CPU returns to Python after this time, so that signals are handled
_ABORTED = 12  # bytes of ExchangeHead (include/flashinfer/comm/alltoall/params.h) in front of its word `aborted`
_STAGES = {1: "send its tokens", 2: "show its results"}


class Waiting:
    """Waiting of one rank on a table: the time-out, and the errors of a peer that does not come."""

    def __init__(self, table: torch.Tensor, rank: int, seconds: float, max_blocks: int = 0) -> None:
        self._base, self._stride, self.world = table.data_ptr(), table.stride(0) * table.element_size(), table.shape[0]
        self.rank, self.seconds, self.broken = rank, seconds, ""
        self._record: Optional[torch.Tensor] = None
        self._found: Any = None
        self.max_blocks = self._reserved = 0
        if table.is_cuda:
            self._record = torch.zeros(4, dtype=torch.int32, pin_memory=True)
            self._found = ctypes.c_int32.from_address(self._record.data_ptr())
            self.max_blocks = max_blocks or get_device_sm_count(table.device)

    def reserve(self, nbytes: int) -> int:
        """Return the bytes per token for which receive buffers have room: what was asked for first."""
        self._reserved = self._reserved or nbytes
        if nbytes > self._reserved:
            raise ArgumentError(
                f"moe_a2a_dispatch: input_payloads must have at most {self._reserved} bytes per token, for which the "
                f"first call laid the table out, got {nbytes}"
            )
        return self._reserved

    def check(self, op: str) -> None:
        """Raise if an earlier call on CUDA waited in vain."""
        if self._found is not None and self._found.value and not self.broken:
            assert self._record is not None
            _, rank, call, stage = self._record.tolist()
            if stage == 3:
                self._found.value = 0
                raise ArgumentError(self._differ(op, rank, call & 0xFFFFFFFF))
            self.broken = self._late(op, rank, call & 0xFFFFFFFF, stage)
        if self.broken:
            raise CommTimeoutError(f"{self.broken}; destroy the workspace")

    def _late(self, op: str, rank: int, call: int, stage: int) -> str:
        what = _STAGES.get(stage, "come")
        return f"{op}: rank {rank} must {what} within {self.seconds:g} s, rank {self.rank} got nothing of call {call}"

    def _differ(self, op: str, rank: int, call: int) -> str:
        what = "runtime_max_tokens_per_rank, top_k, num_experts and payloads"
        if op.startswith("decode_cp"):
            what = "shapes and dtypes of partial_o and its statistics"
        return f"{op}: {what} must be equal on all ranks, got others on rank {rank} in call {call}"

    def run(self, op: str, stage: int, call: Callable[[bool, int, int, int, int], int]) -> None:
        """Run ``call(resume, wait_us, max_blocks, timeout_ns, record)`` until it is done; on CUDA it is at once."""
        self.check(op)
        record = 0 if self._record is None else self._record.data_ptr()
        fixed = (_WAIT_US, self.max_blocks, int(self.seconds * 1e9), record)
        outcome, start = call(False, *fixed), time.monotonic()
        while outcome != -1:
            self._judge(op, stage, outcome, time.monotonic() - start)
            outcome = call(True, *fixed)

    def _judge(self, op: str, stage: int, outcome: int, waited: float) -> None:
        done = ctypes.c_uint32.from_address(self._base + self.rank * self._stride).value
        number = done + (stage == 1 and outcome < 128)
        if outcome >= 128:
            raise ArgumentError(self._differ(op, outcome - 128, number))
        if outcome >= 64:
            self.broken = self._late(op, outcome - 64, number, stage) + ", as another rank found"
        elif self.seconds and waited > self.seconds:
            self.broken = self._late(op, outcome, number, stage)
            for peer in range(self.world):
                ctypes.c_uint32.from_address(self._base + peer * self._stride + _ABORTED).value = 1 + outcome
        if self.broken:
            raise CommTimeoutError(f"{self.broken}; destroy the workspace")


_known: dict[tuple[int, int], Waiting] = {}


def waiting_for(
    table: torch.Tensor, rank: int, *, comm: Any = None, max_blocks: int = 0, is_new: bool = False
) -> Waiting:
    """Return how this rank waits on a table; ``is_new`` forgets what became of an earlier one at that address."""
    key = (table.data_ptr(), rank)
    found = _known.get(key)
    if found is not None and found.broken:  # a table in which nobody gave up is another one at the same address
        is_new = is_new or not table[rank].view(torch.uint8)[_ABORTED : _ABORTED + 4].any()
    if found is None or is_new:
        found = _known[key] = Waiting(table, rank, seconds_of(comm), max_blocks)
    return found
