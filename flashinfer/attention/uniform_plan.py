# SPDX-License-Identifier: Apache-2.0
"""Plans for calls without ``plan()``, whose lengths only the device knows.

Such a call says how many requests there are, how many rows each has and how many keys any may have. That is enough for
a plan: work is laid out for the longest request there may be, and kernels end where a request really does. A plan is
made once for each set of sizes and kept, so that later calls do no planning, copy nothing and can be captured.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Hashable, NamedTuple

import torch

from ..errors import ArgumentError

__all__ = ["UniformPlan", "UniformSizes", "uniform_plan"]

_KEPT = 256  # plans; one is a few tens of kilobytes


class UniformSizes(NamedTuple):
    """What a plan depends on."""

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
    """A plan with the buffers it lives in, and the offsets that kernels want.

    Kernels take a request's keys from its work items, and their number from ``(pages - 1) * page_size +
    last_page_len``. With one page for each request in ``kv_indptr``, lengths can stand for ``last_page_len`` as they
    are. On the CPU, where the ids of a request's pages are looked at before a launch, ``kv_indptr`` says where its row
    of the table begins, and ``last_page_len`` is what its length has beyond the pages before the last.
    """

    info: Any
    int_workspace: torch.Tensor
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor


_plans: OrderedDict[Hashable, UniformPlan] = OrderedDict()
_captured: dict[Hashable, UniformPlan] = {}  # graphs hold the addresses of these


def _rounded(max_kv_len: int) -> int:
    """Up to an eighth more: a request that grows by a token needs no new plan, and few blocks go without work."""
    step = max(64, 1 << max(max_kv_len.bit_length() - 4, 0))
    return -(-max_kv_len // step) * step


def uniform_plan(
    op: str, module: Any, device: torch.device, float_workspace: torch.Tensor, sizes: UniformSizes
) -> UniformPlan:
    """The plan for ``sizes``, made if it is not known yet.

    Making one waits for the current stream, so that any stream may use it afterwards.
    """
    capacity = sizes.pages_per_request * sizes.page_size
    sizes = sizes._replace(max_kv_len=min(_rounded(min(sizes.max_kv_len, capacity)), capacity))
    key = (id(module), device, sizes)
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    plan = _plans.get(key) or _captured.get(key)
    if plan is None:
        if capturing:
            raise ArgumentError(
                f"{op}: is being captured in a CUDA graph with sizes it was not called with before, expected a call "
                "before the capture (it makes the plan that the graph replays)"
            )
        plan = _make(module, device, float_workspace, sizes)
        _plans[key] = plan
        if len(_plans) > _KEPT:
            _plans.popitem(last=False)
    elif capturing:
        _captured[key] = plan
    else:
        with contextlib.suppress(KeyError):  # it is a captured one, or another thread has dropped it
            _plans.move_to_end(key)
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
        no_mirror = torch.empty(0, dtype=torch.uint8, device="cpu")  # modules have pinned memory of their own
        info = module.plan_uniform(float_workspace, int_workspace, no_mirror, *arguments)
        rows = offsets if on_cuda else offsets * sizes.pages_per_request
        plan = UniformPlan(info, int_workspace, offsets * sizes.q_len, rows)
        if on_cuda:
            torch.cuda.current_stream(device).synchronize()
    return plan
