# SPDX-License-Identifier: Apache-2.0
"""Data of batch prefill: the planned batch, and the state of a recorded call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Optional

import numpy as np

from ..attention.index_arrays import as_tensor

__all__ = ["PrefillPlan", "PrefillState"]


@dataclass(slots=True)
class PrefillPlan:
    """Batch of the last plan, kept to plan it again with other parameters."""

    qo_indptr: np.ndarray  #: row offsets of the requests, on the host
    kv_indptr: np.ndarray  #: page offsets (paged) or token offsets (ragged) of the requests, on the host
    kv_lens: np.ndarray  #: keys of each request
    num_rows: int  #: rows of q; with a CUDA graph, the most that any plan may have
    batch_size: int
    num_qo_heads: int
    num_kv_heads: int
    page_size: int  #: 1 for ragged keys
    use_cuda_graph: bool
    head_dim_qk: int
    head_dim_vo: int
    fixed_split_size: int  #: pages of a work item; below 1: the planner chooses
    disable_split_kv: bool
    uniform_q_len: int  #: rows of every request; 0 if they differ or are not known

    def with_batch(
        self, qo_indptr: np.ndarray, kv_indptr: np.ndarray, kv_lens: np.ndarray, num_rows: int
    ) -> PrefillPlan:
        return replace(
            self, qo_indptr=qo_indptr, kv_indptr=kv_indptr, kv_lens=kv_lens, num_rows=num_rows, batch_size=len(kv_lens)
        )

    def native_arguments(self, causal: bool, window_left: int, num_colocated_ctas: int) -> tuple[Any, ...]:
        """Return the arguments of the native plan after the workspaces."""
        return (
            as_tensor(self.qo_indptr),
            as_tensor(self.kv_indptr),
            as_tensor(self.kv_lens),
            self.num_rows,
            self.batch_size,
            self.num_qo_heads,
            self.num_kv_heads,
            self.page_size,
            self.use_cuda_graph,
            self.head_dim_qk,
            self.head_dim_vo,
            causal,
            window_left,
            self.fixed_split_size,
            self.disable_split_kv,
            num_colocated_ctas,
            self.uniform_q_len,
        )


@dataclass(slots=True, eq=False)
class PrefillState:
    """Attributes of a prefill wrapper that a recorded call was built from (``CallState``)."""

    plan_info: Any
    qo_indptr: Any
    kv_indptr: Any
    kv_indices: Any
    last_page_len: Any
    num_rows: Optional[int]

    module: Any
    float_workspace: Any
    int_workspace: Any
    q_dtype: Any
    kv_dtype: Any
    o_dtype: Any
    custom_mask: Any
    mask_indptr: Any
    prefix_len: Any
    token_pos_in_items: Any
    max_item_len: Any
    ragged_kv_indptr: Any
    token_pos_in_items_len: Optional[int]
    window_left: int
    logits_soft_cap: float
    rope_scale: Optional[float]
    rope_theta: Optional[float]
    num_qo_heads: int
    num_kv_heads: int
    use_cuda_graph: bool
    causal: bool
    page_shape: Optional[tuple[int, int]]
    ragged_num_keys: int

    @staticmethod
    def of(wrapper: Any) -> PrefillState:
        return PrefillState(
            plan_info=wrapper._plan_info,
            qo_indptr=wrapper._qo_indptr_buf,
            kv_indptr=wrapper._paged_kv_indptr_buf,
            kv_indices=wrapper._paged_kv_indices_buf,
            last_page_len=wrapper._paged_kv_last_page_len_buf,
            num_rows=wrapper._qo_indptr_last,
            module=wrapper._cached_module,
            float_workspace=wrapper._float_workspace_buffer,
            int_workspace=wrapper._int_workspace_buffer,
            q_dtype=wrapper._cached_q_data_type,
            kv_dtype=wrapper._cached_kv_data_type,
            o_dtype=wrapper._cached_o_data_type,
            custom_mask=wrapper._custom_mask_buf,
            mask_indptr=wrapper._mask_indptr_buf,
            prefix_len=wrapper._prefix_len_ptr,
            token_pos_in_items=wrapper._token_pos_in_items_ptr,
            max_item_len=wrapper._max_item_len_ptr,
            ragged_kv_indptr=wrapper._kv_indptr_buf,
            token_pos_in_items_len=wrapper._token_pos_in_items_len,
            window_left=wrapper._window_left,
            logits_soft_cap=wrapper._logits_soft_cap,
            rope_scale=wrapper._rope_scale,
            rope_theta=wrapper._rope_theta,
            num_qo_heads=wrapper._num_qo_heads,
            num_kv_heads=wrapper._num_kv_heads,
            use_cuda_graph=wrapper._use_cuda_graph,
            causal=wrapper._causal,
            page_shape=wrapper._page_shape,
            ragged_num_keys=wrapper._kv_indptr_last,
        )

    def has_plan_of(self, wrapper: Any) -> bool:
        return (
            wrapper._plan_info is self.plan_info
            and wrapper._qo_indptr_buf is self.qo_indptr
            and wrapper._paged_kv_indptr_buf is self.kv_indptr
            and wrapper._paged_kv_indices_buf is self.kv_indices
            and wrapper._paged_kv_last_page_len_buf is self.last_page_len
            and wrapper._qo_indptr_last == self.num_rows
        )

    def has_options_of(self, wrapper: Any) -> bool:
        return (
            wrapper._cached_module is self.module
            and wrapper._float_workspace_buffer is self.float_workspace
            and wrapper._int_workspace_buffer is self.int_workspace
            and wrapper._cached_q_data_type is self.q_dtype
            and wrapper._cached_kv_data_type is self.kv_dtype
            and wrapper._cached_o_data_type is self.o_dtype
            and wrapper._custom_mask_buf is self.custom_mask
            and wrapper._mask_indptr_buf is self.mask_indptr
            and wrapper._prefix_len_ptr is self.prefix_len
            and wrapper._token_pos_in_items_ptr is self.token_pos_in_items
            and wrapper._max_item_len_ptr is self.max_item_len
            and wrapper._kv_indptr_buf is self.ragged_kv_indptr
            and wrapper._token_pos_in_items_len == self.token_pos_in_items_len
            and wrapper._window_left == self.window_left
            and wrapper._logits_soft_cap == self.logits_soft_cap
            and wrapper._rope_scale == self.rope_scale
            and wrapper._rope_theta == self.rope_theta
            and wrapper._num_qo_heads == self.num_qo_heads
            and wrapper._num_kv_heads == self.num_kv_heads
            and wrapper._use_cuda_graph == self.use_cuda_graph
            and wrapper._causal == self.causal
            and wrapper._page_shape == self.page_shape
            and wrapper._kv_indptr_last == self.ragged_num_keys
        )

    def take_plan(self, wrapper: Any) -> None:
        self.plan_info = wrapper._plan_info
        self.qo_indptr = wrapper._qo_indptr_buf
        self.kv_indptr = wrapper._paged_kv_indptr_buf
        self.kv_indices = wrapper._paged_kv_indices_buf
        self.last_page_len = wrapper._paged_kv_last_page_len_buf
        self.num_rows = wrapper._qo_indptr_last
