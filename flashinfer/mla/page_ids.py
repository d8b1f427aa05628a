# SPDX-License-Identifier: Apache-2.0
"""Validation of page ids, enabled by ``FLASHINFER_VALIDATE_INPUTS``."""

from __future__ import annotations

import numpy as np
import torch

from .._runtime.errors import ArgumentError
from .._runtime.knobs import knobs

#: True if CUDA calls validate the values of their page tables. Read once at import: a lookup per call takes 1 us.
VALIDATE = knobs.validate_inputs


def lengths_of_works(
    rows: np.ndarray, lengths: np.ndarray, plan_info: tuple[int, ...], int_workspace: torch.Tensor
) -> np.ndarray:
    """Return the key counts of the requests as the plan in the workspace has them: engines may have made them smaller.

    ``plan_info`` names the arrays of its works (``PublishedWorks`` of attention/plan/types.h).
    """
    if int_workspace.is_cuda and torch.cuda.is_current_stream_capturing():
        return lengths
    plan = int_workspace.view(-1).view(torch.uint8)

    def read(offset: int, count: int) -> np.ndarray:
        return plan[offset : offset + 4 * count].view(torch.int32).cpu().numpy()

    count = int(read(plan_info[15], 2)[1])
    ends = np.zeros_like(lengths)
    if count and lengths.size:  # a request without rows has no work, and those with rows begin at different ones
        requests = np.searchsorted(rows, read(plan_info[2], count), side="right") - 1
        np.maximum.at(ends, np.clip(requests, 0, lengths.size - 1), read(plan_info[14], count))
    return np.minimum(ends, lengths)


def check_page_ids(
    op: str, kv_indices: torch.Tensor, begins: np.ndarray, lengths: np.ndarray, page_size: int, num_pages: int
) -> None:
    """Check that pages that hold keys are inside the cache. Waits for the GPU, so does nothing during a capture."""
    if kv_indices.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    ids = kv_indices.cpu().numpy()
    for request, (begin, count) in enumerate(zip(begins, -(-lengths // page_size), strict=False)):
        if count > 0 and (begin < 0 or begin + count > ids.size):
            raise ArgumentError(
                f"{op}: the pages of request {request} must be at 0 to {ids.size - 1} of kv_indices, got {begin} to "
                f"{begin + count - 1}"
            )
        used = ids[begin : begin + count] if count > 0 else ids[:0]
        bad = np.flatnonzero((used < 0) | (used >= num_pages))
        if bad.size:
            raise ArgumentError(
                f"{op}: kv_indices[{begin + bad[0]}] must be 0 to {num_pages - 1} (ckv_cache has {num_pages} pages), "
                f"got {used[bad[0]]}"
            )
