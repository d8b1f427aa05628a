# SPDX-License-Identifier: Apache-2.0
"""Plans for calls without ``plan()``, whose sequence lengths are known only on the device.

Such a call gives the number of requests, the rows per request and an upper bound of the keys per request. These sizes
are enough for a plan: the planner splits work for the longest possible request, and kernels stop at the actual length
of each request. A plan is made once per set of sizes and stream, and cached, so later calls do not plan, copy nothing
and can be captured in a CUDA graph. Streams do not share plans: kernels count finished tiles in the plan's memory.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Hashable, NamedTuple

import torch

from .._runtime.errors import ArgumentError
from . import streams

__all__ = ["UniformPlan", "UniformSizes", "uniform_plan"]

_KEPT = 256  # plans in the cache; each takes a few tens of kilobytes


class UniformSizes(NamedTuple):
    """Sizes that a plan depends on: the key of the plan cache."""

    batch_size: int
    q_len: int
    pages_per_request: int
    page_size: int
    max_kv_len: int
    num_qo_heads: int
    num_kv_heads: int
    causal: bool


@dataclass(frozen=True, eq=False)
class UniformPlan:
    """Plan, the int workspace that holds it, and the offset arrays that kernels read.

    Kernels locate the keys of a request by its work items, and compute the number of keys as ``(pages - 1) * page_size
    + last_page_len``. On a GPU, ``kv_indptr`` declares one page per request, so that the sequence lengths can be passed
    as ``last_page_len`` unchanged. The CPU validates the page ids of a request before a launch; there, ``kv_indptr``
    holds the start of each row of the page table, and ``last_page_len`` is the sequence length minus
    ``(pages - 1) * page_size``.
    """

    info: Any
    int_workspace: torch.Tensor
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor


_plans: OrderedDict[tuple[Any, ...], UniformPlan] = OrderedDict()
_captured: dict[Hashable, UniformPlan] = {}  # plans whose addresses CUDA graphs hold, for graphs only; never evicted


def _rounded(max_kv_len: int) -> int:
    """Round up by at most an eighth (or to 64 keys): a growing request reuses its plan, and few blocks stay idle."""
    step = max(64, 1 << max(max_kv_len.bit_length() - 4, 0))
    return -(-max_kv_len // step) * step


def uniform_plan(
    op: str, module: Any, device: torch.device, float_workspace: torch.Tensor, sizes: UniformSizes
) -> UniformPlan:
    """Return the plan of the current stream for ``sizes`` from the cache, or make it.

    A graph that is being captured takes a plan over from the stream that made it: a replay may run beside that stream.
    Making a plan waits for the current stream, so that a graph may use the plan on another stream.
    """
    capacity = sizes.pages_per_request * sizes.page_size
    sizes = sizes._replace(max_kv_len=min(_rounded(min(sizes.max_kv_len, capacity)), capacity))
    wanted = (id(module), device, sizes)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return _plan_for_graph(op, wanted)
    key = (*wanted, streams.raw_stream(device.index) if device.type == "cuda" else None)
    plan = _plans.get(key)
    if plan is None:
        plan = _plans[key] = _make(module, device, float_workspace, sizes)
        if len(_plans) > _KEPT:
            _plans.popitem(last=False)
    else:
        with contextlib.suppress(KeyError):  # another thread evicted the plan
            _plans.move_to_end(key)
    return plan


def _plan_for_graph(op: str, wanted: tuple[int, torch.device, UniformSizes]) -> UniformPlan:
    plan = _captured.get(wanted)
    if plan is None:
        key = next((key for key in reversed(_plans) if key[:-1] == wanted), None)
        if key is None:
            raise ArgumentError(
                f"{op}: must be called with these sizes before a capture in a CUDA graph (the call makes the plan that "
                "the graph replays), got sizes it was not called with before"
            )
        plan = _captured[wanted] = _plans.pop(key)
    return plan


def _make(module: Any, device: torch.device, float_workspace: torch.Tensor, sizes: UniformSizes) -> UniformPlan:
    arguments = (
        sizes.batch_size,
        sizes.q_len,
        sizes.pages_per_request,
        sizes.max_kv_len,
        sizes.num_qo_heads,
        sizes.num_kv_heads,
        sizes.page_size,
        sizes.causal,
    )
    on_cuda = device.type == "cuda"
    with torch.cuda.device(device) if on_cuda else contextlib.nullcontext():
        int_bytes = max(int(module.uniform_workspace_size(*arguments)[1]), 16)
        int_workspace = torch.empty(int_bytes, dtype=torch.uint8, device=device)
        offsets = torch.arange(sizes.batch_size + 1, dtype=torch.int32, device=device)
        no_mirror = torch.empty(0, dtype=torch.uint8, device="cpu")  # unused: modules have their own pinned memory
        info = module.plan_uniform(float_workspace, int_workspace, no_mirror, *arguments)
        rows = offsets if on_cuda else offsets * sizes.pages_per_request
        plan = UniformPlan(info, int_workspace, offsets * sizes.q_len, rows)
        if on_cuda:
            torch.cuda.current_stream(device).synchronize()
    return plan
