# SPDX-License-Identifier: Apache-2.0
"""State of a recorded MLA call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

__all__ = ["MLAState"]


@dataclass(slots=True, eq=False)
class MLAState:
    """Attributes of an MLA wrapper that a recorded call was built from (``CallState``)."""

    plan_info: Any
    kv_indices: Any
    num_rows: Optional[int]

    module: Any
    float_workspace: Any
    int_workspace: Any
    q_dtype: Any
    kv_dtype: Any
    causal: bool
    page_size: int
    num_heads: int
    max_num_rows: Optional[int]
    use_cuda_graph: bool
    use_profiler: bool

    @staticmethod
    def of(wrapper: Any) -> MLAState:
        return MLAState(
            plan_info=wrapper._plan_info,
            kv_indices=wrapper._kv_indices_buf,
            num_rows=wrapper._num_rows,
            module=wrapper._cached_module,
            float_workspace=wrapper._float_workspace_buffer,
            int_workspace=wrapper._int_workspace_buffer,
            q_dtype=wrapper._cached_q_data_type,
            kv_dtype=wrapper._cached_kv_data_type,
            causal=wrapper._causal,
            page_size=wrapper._page_size,
            num_heads=wrapper._num_heads,
            max_num_rows=wrapper._max_total_num_rows,
            use_cuda_graph=wrapper._use_cuda_graph,
            use_profiler=wrapper._use_profiler,
        )

    def has_plan_of(self, wrapper: Any) -> bool:
        return (
            wrapper._plan_info is self.plan_info
            and wrapper._kv_indices_buf is self.kv_indices
            and wrapper._num_rows == self.num_rows
        )

    def has_options_of(self, wrapper: Any) -> bool:
        return (
            wrapper._cached_module is self.module
            and wrapper._float_workspace_buffer is self.float_workspace
            and wrapper._int_workspace_buffer is self.int_workspace
            and wrapper._cached_q_data_type is self.q_dtype
            and wrapper._cached_kv_data_type is self.kv_dtype
            and wrapper._causal == self.causal
            and wrapper._page_size == self.page_size
            and wrapper._num_heads == self.num_heads
            and wrapper._max_total_num_rows == self.max_num_rows
            and wrapper._use_cuda_graph == self.use_cuda_graph
            and wrapper._use_profiler == self.use_profiler
        )

    def take_plan(self, wrapper: Any) -> None:
        self.plan_info = wrapper._plan_info
        self.kv_indices = wrapper._kv_indices_buf
        self.num_rows = wrapper._num_rows
