# SPDX-License-Identifier: Apache-2.0
"""Data of batch decode: the planned batch, and the state of a recorded call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Optional, Union

import numpy as np
import torch

__all__ = ["DecodePlan", "DecodeState"]


@dataclass(slots=True)
class DecodePlan:
    """Batch of the last plan, kept to plan it again with other parameters."""

    indptr: Union[np.ndarray, torch.Tensor]  #: page offsets of the requests, on the host
    kv_lens: Optional[np.ndarray]  #: keys of each request; None if page offsets are enough
    fixed_split_size: int  #: pages of a work item; below 1: the planner chooses
    disable_split_kv: bool

    def with_batch(self, indptr: Union[np.ndarray, torch.Tensor], kv_lens: Optional[np.ndarray]) -> DecodePlan:
        return replace(self, indptr=indptr, kv_lens=kv_lens)


@dataclass(slots=True, eq=False)
class DecodeState:
    """Attributes of a decode wrapper that a recorded call was built from (``CallState``)."""

    plan_info: Any
    qo_indptr: Any
    kv_indptr: Any
    kv_indices: Any
    last_page_len: Any

    module: Any
    float_workspace: Any
    int_workspace: Any
    q_dtype: Any
    kv_dtype: Any
    o_dtype: Any
    custom_mask: Any
    mask_indptr: Any
    window_left: int
    logits_soft_cap: float
    rope_scale: Optional[float]
    rope_theta: Optional[float]
    num_qo_heads: int
    num_kv_heads: int
    use_cuda_graph: bool
    page_shape: tuple[int, int]
    q_len: Optional[int]

    @staticmethod
    def of(wrapper: Any) -> DecodeState:
        return DecodeState(
            plan_info=wrapper._plan_info,
            qo_indptr=wrapper._qo_indptr_buf,
            kv_indptr=wrapper._paged_kv_indptr_buf,
            kv_indices=wrapper._paged_kv_indices_buf,
            last_page_len=wrapper._paged_kv_last_page_len_buf,
            module=wrapper._cached_module,
            float_workspace=wrapper._float_workspace_buffer,
            int_workspace=wrapper._int_workspace_buffer,
            q_dtype=wrapper._cached_q_data_type,
            kv_dtype=wrapper._cached_kv_data_type,
            o_dtype=wrapper._cached_o_data_type,
            custom_mask=wrapper._custom_mask_buf,
            mask_indptr=wrapper._mask_indptr_buf,
            window_left=wrapper._window_left,
            logits_soft_cap=wrapper._logits_soft_cap,
            rope_scale=wrapper._rope_scale,
            rope_theta=wrapper._rope_theta,
            num_qo_heads=wrapper._num_qo_heads,
            num_kv_heads=wrapper._num_kv_heads,
            use_cuda_graph=wrapper._use_cuda_graph,
            page_shape=wrapper._page_shape,
            q_len=wrapper._planned_q_len,
        )

    def has_plan_of(self, wrapper: Any) -> bool:
        return (
            wrapper._plan_info is self.plan_info
            and wrapper._qo_indptr_buf is self.qo_indptr
            and wrapper._paged_kv_indptr_buf is self.kv_indptr
            and wrapper._paged_kv_indices_buf is self.kv_indices
            and wrapper._paged_kv_last_page_len_buf is self.last_page_len
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
            and wrapper._window_left == self.window_left
            and wrapper._logits_soft_cap == self.logits_soft_cap
            and wrapper._rope_scale == self.rope_scale
            and wrapper._rope_theta == self.rope_theta
            and wrapper._num_qo_heads == self.num_qo_heads
            and wrapper._num_kv_heads == self.num_kv_heads
            and wrapper._use_cuda_graph == self.use_cuda_graph
            and wrapper._page_shape == self.page_shape
            and wrapper._planned_q_len == self.q_len
        )

    def take_plan(self, wrapper: Any) -> None:
        self.plan_info = wrapper._plan_info
        self.qo_indptr = wrapper._qo_indptr_buf
        self.kv_indptr = wrapper._paged_kv_indptr_buf
        self.kv_indices = wrapper._paged_kv_indices_buf
        self.last_page_len = wrapper._paged_kv_last_page_len_buf
