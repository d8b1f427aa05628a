# SPDX-License-Identifier: Apache-2.0
"""Base of the two batch prefill wrappers: options, masks, module selection and native arguments."""

from __future__ import annotations

import dataclasses
from typing import Any, Mapping, Optional, Sequence

import numpy as np
import torch

from .._runtime.errors import ArgumentError
from ..attention.attend import AttentionWrapper, Result
from ..attention.masks import byte_offsets, check_items, pack_batch_mask
from ..attention.modules import get_batch_prefill_module, get_customize_batch_prefill_module
from ..attention.options import (
    ALIBI,
    CAUSAL,
    CUSTOM,
    MULTI_ITEM,
    NON_CAUSAL,
    Dtypes,
    alibi_slopes,
    fa3_is_faster,
    fa3_multiplies_fp8,
    fa3_serves,
    resolve_backend,
)
from ..attention.plan_options import AttentionOptions
from ..attention.scales import Scale
from ..attention.wrapper import Launch
from .plan import PrefillPlan, PrefillState

__all__ = ["BatchPrefillWrapper", "Result"]


class BatchPrefillWrapper(AttentionWrapper):
    """Base of the paged and the ragged wrapper."""

    _causal: bool
    _planned: PrefillPlan
    #: Tables of the other wrapper, which a recorded call compares too.
    _paged_kv_indptr_buf: Optional[torch.Tensor] = None
    _paged_kv_indices_buf: Optional[torch.Tensor] = None
    _paged_kv_last_page_len_buf: Optional[torch.Tensor] = None
    _page_shape: Optional[tuple[int, int]] = None
    _kv_indptr_buf: Optional[torch.Tensor] = None
    _kv_indptr_last: int = 0
    _module_key: tuple[Dtypes, int, int, bool]

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str,
        use_cuda_graph: bool,
        custom_mask_buf: Optional[torch.Tensor],
        mask_indptr_buf: Optional[torch.Tensor],
        backend: str,
        jit_args: Optional[Sequence[Any]],
        jit_kwargs: Optional[Mapping[str, Any]],
        variant_owns_mask: bool,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend, jit_args)
        self._requested_backend = backend  # "auto" chooses for each plan
        if variant_owns_mask and jit_args is None:
            raise ArgumentError(
                f"{self._op}: variant_owns_mask must be False without jit_args (a variant with a mask), got True"
            )
        self._variant_owns_mask = variant_owns_mask
        if jit_args is not None:
            self._backend = resolve_backend(self._op, backend, self.device)
            self._jit_module = get_customize_batch_prefill_module(
                self._backend, *jit_args, device=self._device_kind, **(jit_kwargs or {})
            )
        self._custom_mask_buf = custom_mask_buf
        self._mask_indptr_buf = mask_indptr_buf
        self._max_total_num_rows: Optional[int] = None
        self._qo_indptr_last: Optional[int] = None
        self._prefix_len_ptr: Optional[torch.Tensor] = None
        self._token_pos_in_items_ptr: Optional[torch.Tensor] = None
        self._token_pos_in_items_len: Optional[int] = 0
        self._max_item_len_ptr: Optional[torch.Tensor] = None
        self._block_tables: Optional[torch.Tensor] = None
        self._max_q_len: Optional[int] = None
        self._max_kv_len: Optional[int] = None

    # plan -------------------------------------------------------------------------------------

    def _check_rows(self, op: str, batch_size: int, rows: int) -> None:
        """Check batch size and rows against the sizes that a CUDA graph fixes."""
        if not self._use_cuda_graph:
            return
        self._check_batch_size(op, batch_size)
        if self._max_total_num_rows is not None and rows > self._max_total_num_rows:
            raise ArgumentError(
                f"{op}: q must have at most {self._max_total_num_rows} rows (those of the first plan), got {rows}"
            )

    def _check_mask_buffers(self, op: str, num_bytes: int, num_offsets: int) -> None:
        """Check that the mask buffers of a CUDA graph are large enough."""
        self._require_graph_buffers(torch.uint8, torch.int8, custom_mask_buf=self._custom_mask_buf)
        self._require_graph_buffers(torch.int32, mask_indptr_buf=self._mask_indptr_buf)
        assert self._custom_mask_buf is not None and self._mask_indptr_buf is not None
        if num_bytes > len(self._custom_mask_buf) or num_offsets > len(self._mask_indptr_buf):
            raise ArgumentError(
                f"{op}: the mask must have at most {len(self._custom_mask_buf)} bytes and {len(self._mask_indptr_buf)} "
                f"offsets (custom_mask_buf and mask_indptr_buf), got {num_bytes} and {num_offsets}"
            )

    def _store_mask(
        self,
        op: str,
        custom_mask: Optional[torch.Tensor],
        packed_custom_mask: Optional[torch.Tensor],
        qo_lens: np.ndarray,
        kv_lens: np.ndarray,
        non_blocking: bool,
    ) -> None:
        if custom_mask is None and packed_custom_mask is None:
            if not self._use_cuda_graph:
                self._custom_mask_buf = self._mask_indptr_buf = None
            elif self._custom_mask_buf is not None:  # run() reads the mask buffer even without a new mask
                self._check_mask_buffers(op, int(byte_offsets(qo_lens, kv_lens)[-1]), qo_lens.size + 1)
            return
        packed, offsets = pack_batch_mask(
            op, custom_mask, packed_custom_mask, qo_lens, kv_lens, self.device, non_blocking
        )
        if not self._use_cuda_graph:
            self._custom_mask_buf, self._mask_indptr_buf = packed, offsets
            return
        self._check_mask_buffers(op, len(packed), len(offsets))
        assert self._custom_mask_buf is not None and self._mask_indptr_buf is not None
        self._custom_mask_buf[: len(packed)].copy_(packed, non_blocking=non_blocking)
        self._mask_indptr_buf[: len(offsets)].copy_(offsets, non_blocking=non_blocking)

    def _store_items(
        self,
        op: str,
        prefix_len_ptr: Optional[torch.Tensor],
        token_pos_in_items_ptr: Optional[torch.Tensor],
        token_pos_in_items_len: Optional[int],
        max_item_len_ptr: Optional[torch.Tensor],
        kv_lens: np.ndarray,
    ) -> None:
        """Store the arrays of multi-item scoring: prefix lengths, and positions of later tokens in their items."""
        if prefix_len_ptr is not None:
            check_items(op, prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len or 0, kv_lens)

        def stored(x: Optional[torch.Tensor], dtype: torch.dtype) -> Optional[torch.Tensor]:
            if x is None:
                return None
            x = x.to(self.device, copy=self._device_kind == "cpu").reshape(-1)
            return x.contiguous() if x.dtype == dtype else x.to(torch.int64).to(dtype)

        self._prefix_len_ptr = stored(prefix_len_ptr, torch.uint32)
        self._token_pos_in_items_ptr = stored(token_pos_in_items_ptr, torch.uint16)
        self._token_pos_in_items_len = token_pos_in_items_len
        self._max_item_len_ptr = stored(max_item_len_ptr, torch.uint16)

    def _select_module(self, dtypes: Dtypes, head_dim_qk: int, head_dim_vo: int, use_fp16_qk_reduction: bool) -> None:
        """Select the module for the planned options; the legacy ``forward`` calls this again with other parameters."""
        self._module_key = (dtypes, head_dim_qk, head_dim_vo, use_fp16_qk_reduction)
        self._head_dim_vo = head_dim_vo
        if self._jit_module is not None:
            self._cached_module = self._jit_module
            return
        if self._backend == "fa3" and fa3_multiplies_fp8(
            dtypes.q, dtypes.kv, dtypes.o, head_dim_qk, head_dim_vo, self._pos_encoding
        ):
            dtypes = dataclasses.replace(dtypes, compute=dtypes.q)
        self._dtypes = dtypes
        self._cached_module = get_batch_prefill_module(
            self._backend, dtypes.compute, dtypes.kv, dtypes.o, torch.int32, head_dim_qk, head_dim_vo,
            self._pos_encoding, self._window_left >= 0, bool(self._logits_soft_cap), use_fp16_qk_reduction,
            device=self._device_kind,
        )  # fmt: skip

    def _choose_backend(self, dtypes: Dtypes, head_dim_qk: int, head_dim_vo: int) -> str:
        """Return the backend of the planned batch. A CUDA graph keeps that of its first plan.

        With splits that are the same in every batch, so is the backend: results then do not depend on the batch.
        """
        if self._requested_backend != "auto" or self._jit_module is not None:
            return resolve_backend(self._op, self._requested_backend, self.device)
        if self._max_total_num_rows is not None:
            return self._backend
        planned = self._planned
        if planned.fixed_split_size > 0 or planned.disable_split_kv:
            return "fa2"
        if not fa3_serves(self.device, dtypes.q, dtypes.kv, dtypes.o, head_dim_qk, head_dim_vo, self._pos_encoding):
            return "fa2"
        rows = planned.num_rows * (self._num_qo_heads // self._num_kv_heads)
        return "fa3" if fa3_is_faster(rows, planned.batch_size, self._mask_mode()) else "fa2"

    def _freeze_rows(self) -> None:
        """Fix the maximal number of rows of a CUDA graph to the rows of the first successful plan."""
        if self._use_cuda_graph and self._max_total_num_rows is None:
            self._max_total_num_rows = self._qo_indptr_last

    def _plan_work(self) -> None:
        self._plan_info = self._planned_info = self._native_plan(self._cached_module.plan, *self._work())

    def _work(self) -> tuple[Any, ...]:
        """Return the arguments of the native plan after the workspaces."""
        mask_mode = self._mask_mode()
        # Below 0: decode and prefill items do not share a launch, so neither kind leaves SM resources for the other.
        num_colocated_ctas = 0 if self._is_paged and mask_mode in (CAUSAL, NON_CAUSAL) else -1
        is_causal = mask_mode in (CAUSAL, MULTI_ITEM)
        return self._planned.native_arguments(is_causal, self._window_left, num_colocated_ctas)

    def _state(self) -> PrefillState:
        return PrefillState.of(self)

    def _mask_mode(self) -> int:
        if self._prefix_len_ptr is not None:
            return MULTI_ITEM
        if self._custom_mask_buf is not None or self._variant_owns_mask:
            return CUSTOM
        return CAUSAL if self._causal else NON_CAUSAL

    def _replace_parameters(self, causal: bool, options: AttentionOptions) -> None:
        """Replace parameters of the plan by arguments of the legacy ``forward``, and plan again if necessary."""
        self._require_plan()
        planned = (self._causal, self._pos_encoding, self._window_left, bool(self._logits_soft_cap))
        was_causal, window = self._mask_mode() in (CAUSAL, MULTI_ITEM), self._window_left
        self._set_parameters(options)
        self._causal = causal
        if planned != (self._causal, self._pos_encoding, self._window_left, bool(self._logits_soft_cap)):
            is_causal = self._mask_mode() in (CAUSAL, MULTI_ITEM)
            covers = (is_causal or not was_causal) and (window < 0 or 0 <= options.window_left <= window)
            self._plan_again(covers)

    def _plan_again(self, covers: bool) -> None:
        """Plan again after parameters changed. ``covers``: the old plan covers all keys that these make visible."""
        backend = self._choose_backend(*self._module_key[:3])
        if backend == self._backend and self._keeps_plan(covers):
            return self._select_module(*self._module_key)
        self._backend = backend
        if self._plan_info is not self._planned_info:  # an engine replaced the plan: read the batch from its tables
            qo_host, kv_host, kv_lens = self._batch_of_tables(f"{self._op}.forward")
            rows = self._max_total_num_rows or int(qo_host[-1])
            self._planned = self._planned.with_batch(qo_host, kv_host, kv_lens, rows)
        self._plan_info = None  # if the rest fails, no valid plan remains
        self._select_module(*self._module_key)
        self._plan_work()

    def _batch_of_tables(self, op: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the offsets of rows, the offsets of keys or pages, and the number of keys of each request."""
        raise AssertionError("a subclass knows")

    def _native_workspace_size(self) -> tuple[int, int]:
        float_bytes, int_bytes = self._cached_module.workspace_size(*self._work())
        return int(float_bytes), int(int_bytes)

    # run --------------------------------------------------------------------------------------

    def _expected_rows(self) -> int:
        return self._qo_indptr_last  # type: ignore[return-value]  # not None after plan()

    def _derived_scalars(self, sm_scale: float, q_scale: Scale, k_scale: Scale, v_scale: Scale) -> dict[str, Any]:
        derived = super()._derived_scalars(sm_scale, q_scale, k_scale, v_scale)
        return {**derived, "token_pos_in_items_len": self._token_pos_in_items_len or 0}

    def _extras(self, launch: Launch) -> tuple[Any, ...]:
        """Return the additional parameters of the module, in the order of its declaration."""
        tensors, scalars = launch.tensors, launch.scalars
        slopes = alibi_slopes(self._num_qo_heads, launch.q.device) if self._pos_encoding == ALIBI else None
        state = (
            self._custom_mask_buf,
            self._mask_indptr_buf,
            slopes,
            self._prefix_len_ptr,
            self._token_pos_in_items_ptr,
            self._max_item_len_ptr,
        )
        if self._jit is None:
            return (*state, *tensors, *self._numbers(scalars[0]), self._token_pos_in_items_len or 0)
        factors = tensors[len(tensors) - 2 :] if self._is_nvfp4 else (None, None)
        names = (
            "maybe_custom_mask",
            "maybe_mask_indptr",
            "maybe_alibi_slopes",
            "maybe_prefix_len_ptr",
            "maybe_token_pos_in_items_ptr",
            "maybe_max_item_len_ptr",
            "maybe_k_cache_sf",
            "maybe_v_cache_sf",
        )
        known = dict(zip(names, (*state, *factors), strict=True))
        return (*self._jit.all_tensors(tensors, known), *self._jit.typed(scalars))

    def _call_with(self, tables: Sequence[Optional[torch.Tensor]], launch: Launch, enable_pdl: bool) -> tuple[Any, ...]:
        """Return the arguments of a native run."""
        return (
            self._float_workspace_buffer,
            self._int_workspace_buffer,
            self._plan_info,
            launch.q,
            launch.k,
            launch.v,
            *tables,
            launch.out,
            launch.lse,
            self._mask_mode(),
            self._layout,
            self._window_left,
            enable_pdl,
            *self._extras(launch),
        )
