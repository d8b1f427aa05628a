# SPDX-License-Identifier: Apache-2.0
"""Levels of a cascade. Planning waits until all levels are known, because two levels may share a launch."""

from __future__ import annotations

from typing import Any, Optional

import numpy as np
import torch

from .._runtime.arch import get_compute_capability
from ..api_logging import flashinfer_api
from ..attention.index_arrays import as_tensors, to_device
from ..attention.modules import get_batch_fused_module
from ..attention.options import CAUSAL, DECODE_TILE, Dtypes
from ..attention.wrapper import Launch
from ..prefill import BatchPrefillWithPagedKVCacheWrapper
from ..prefill.planning import call_with

__all__ = ["Level"]

_HEAD_DIMS = (64, 128)  # head dimensions at which an SM holds two blocks
_LARGE_SHARED_MEMORY = ((9, 0), (10, 0), (10, 3), (11, 0))  # capabilities with 227 KiB of shared memory per block


class Level(BatchPrefillWithPagedKVCacheWrapper):
    """One level: ``plan`` validates and stores, then ``plan_alone`` or ``plan_with`` plans the launch."""

    _op = BatchPrefillWithPagedKVCacheWrapper._op
    _shared: Optional[Level] = None  #: level whose keys are part of the same launch; None: this level only

    def _select_module(self, dtypes: Dtypes, head_dim_qk: int, head_dim_vo: int, use_fp16_qk_reduction: bool) -> None:
        self._module_key = (dtypes, head_dim_qk, head_dim_vo, use_fp16_qk_reduction)
        self._head_dim_vo = head_dim_vo

    def _plan_work(self) -> None:
        """Do nothing: ``plan_alone`` or ``plan_with`` plans the launch later."""

    def _indptr_on_device(self, indptr: torch.Tensor, which: int, non_blocking: bool) -> torch.Tensor:
        # A plan for two levels does not copy the offset arrays to the device.
        return to_device(self._op, ("paged_kv_indptr", "qo_indptr")[which], indptr, self.device, non_blocking)

    @flashinfer_api(trace=None)  # logged like plan() and run(): a replay of the log calls it between them
    def plan_alone(self) -> None:
        """Plan a launch for this level only."""
        self._shared = None
        super()._select_module(*self._module_key)
        super()._plan_work()

    def suits(self, shared: Level) -> bool:
        """Return True if ``batch_fused`` can run both levels in one launch: few rows share keys here, many there.

        Tensor cores process the keys of ``shared``, for all rows together, while the keys of this level are loaded.
        """
        dtypes, head_dim, *_ = self._module_key
        indptr, shared_indptr = self._planned.qo_indptr, shared._planned.qo_indptr
        group = self._num_qo_heads // self._num_kv_heads
        return bool(
            self._device_kind == "cuda"
            and get_compute_capability(self.device) in _LARGE_SHARED_MEMORY
            and dtypes.q == dtypes.kv == dtypes.o
            and dtypes.q in (torch.float16, torch.bfloat16)
            and head_dim in _HEAD_DIMS
            and self._pos_encoding_mode == "NONE"
            and self._window_left < 0
            and indptr[0] == shared_indptr[0] == 0
            and indptr[-1] == shared_indptr[-1] > 0
            and np.diff(indptr).max() * group <= DECODE_TILE < np.diff(shared_indptr).min() * group
        )

    @flashinfer_api(trace=None)
    def plan_with(self, shared: Level) -> bool:
        """Plan one launch for the keys of both levels; return False if the workspaces are too small for it."""
        dtypes, head_dim, *_ = self._module_key
        module = get_batch_fused_module(
            *(dtypes.q, dtypes.kv, dtypes.o, torch.int32, head_dim, head_dim),
            *(self._pos_encoding, bool(self._logits_soft_cap)),
        )
        own, other = self._planned, shared._planned
        plan_info = self._native_plan(
            module.plan,
            *as_tensors((other.qo_indptr, other.kv_indptr, other.kv_lens, other.batch_size)),
            *as_tensors((own.qo_indptr, own.kv_indptr, own.kv_lens, own.batch_size)),
            own.num_rows,
            own.num_qo_heads,
            own.num_kv_heads,
            own.page_size,
            own.use_cuda_graph,
            self._mask_mode() == CAUSAL,
        )
        if not len(plan_info):
            return False
        self._cached_module, self._shared = module, shared
        self._plan_info = shared._plan_info = plan_info
        return True

    def _native_call(self, launch: Launch, enable_pdl: bool) -> tuple[Any, str, tuple[Any, ...]]:
        if self._shared is None:
            return super()._native_call(launch, enable_pdl)
        tables = (
            table
            for level in (self._shared, self)
            for table in (
                level._qo_indptr_buf,
                level._paged_kv_indptr_buf,
                level._paged_kv_indices_buf,
                level._paged_kv_last_page_len_buf,
            )
        )
        return self._cached_module, "run", call_with(self, tuple(tables), launch, enable_pdl)
