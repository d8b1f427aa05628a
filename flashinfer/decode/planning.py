# SPDX-License-Identifier: Apache-2.0
"""Planning of batch decode: validation, lengths, page tables, the module and its arguments."""

from __future__ import annotations

from typing import Any, Optional, Union

import numpy as np
import torch

from .._runtime.checks import narrowed
from .._runtime.errors import ArgumentError
from ..attention.attend import AttentionWrapper
from ..attention.host import (
    as_tensor,
    kv_lens_given,
    kv_lens_of_pages,
    range_buffer,
    rows_on_host,
    segment_lens,
    to_device,
    to_host,
)
from ..attention.modules import get_batch_decode_module, get_batch_prefill_module
from ..attention.options import Dtypes
from ..attention.plan_options import AttentionOptions
from .plan import DecodePlan, DecodeState

__all__ = ["DecodePlanner"]

_INT32 = torch.int32


class DecodePlanner(AttentionWrapper):
    """Base of the decode wrapper: code shared by ``plan``, ``workspace_size`` and ``fast_decode_plan``."""

    _has_replan = True
    _is_paged = True

    _module_key: Any = None  #: key of ``_module_found``, a cache of one module: a lookup takes 1 us
    _module_found: Any = None
    _use_tensor_cores: bool
    _head_dim: int
    _page_size: int
    _planned: DecodePlan
    _planned_q_len: Optional[int]
    _frozen_q_len: Optional[int] = None  #: q_len_per_req of the first successful plan with use_cuda_graph
    _paged_kv_indptr_buf: Optional[torch.Tensor]
    _paged_kv_indices_buf: Optional[torch.Tensor]
    _paged_kv_last_page_len_buf: Optional[torch.Tensor]
    _qo_indptr_buf: Optional[torch.Tensor]

    def _check_options(self, op: str, q_len_per_req: int, fixed_split_size: Optional[int]) -> None:
        if q_len_per_req < 1:
            raise ArgumentError(f"{op}: q_len_per_req must be at least 1, got {q_len_per_req}")
        if fixed_split_size is not None and not self._use_tensor_cores:
            raise ArgumentError(f"{op}: fixed_split_size must be None without use_tensor_cores, got {fixed_split_size}")
        if q_len_per_req > 1:
            if not self._use_tensor_cores:
                raise ArgumentError(f"{op}: q_len_per_req must be 1 without use_tensor_cores=True, got {q_len_per_req}")
            if self._backend not in ("auto", "fa2"):
                raise NotImplementedError(
                    f"{op}: q_len_per_req must be 1 with backend {self._backend!r}, got {q_len_per_req}; usable: fa2"
                )
        if self._use_cuda_graph and self._frozen_q_len not in (None, q_len_per_req):
            raise ArgumentError(
                f"{op}: q_len_per_req must be {self._frozen_q_len} (frozen by the first plan, use_cuda_graph=True), "
                f"got {q_len_per_req}"
            )

    def _check_buffers(self, op: str, batch_size: int, num_indices: int) -> None:
        if not self._use_cuda_graph:
            return
        self._check_batch_size(op, batch_size)
        assert self._paged_kv_indices_buf is not None
        if num_indices > len(self._paged_kv_indices_buf):
            raise ArgumentError(
                f"{op}: indices must have at most {len(self._paged_kv_indices_buf)} elements (length of "
                f"paged_kv_indices_buffer), got {num_indices}"
            )

    @staticmethod
    def _lengths(
        op: str,
        indptr: torch.Tensor,
        last_page_len: torch.Tensor,
        seq_lens: Optional[torch.Tensor],
        page_size: int,
        q_len_per_req: int,
        is_exact: bool,
    ) -> tuple[Union[np.ndarray, torch.Tensor], Optional[np.ndarray]]:
        """Return the page offsets and the keys of each request on the host, in at most one copy from the device.

        The keys are None if page offsets are enough for planning: ``last_page_len`` is on the device, and reading it
        would wait. ``is_exact`` forces exact key counts, for plans whose splits must depend on the keys only. The
        native plan checks that offsets are non-decreasing.
        """
        if last_page_len.is_cuda and seq_lens is None and not (indptr.is_cuda or is_exact or q_len_per_req > 1):
            if indptr.dtype is not _INT32 or not indptr.is_contiguous():
                indptr = narrowed(indptr, f"{op}: indptr").contiguous()
            shape = last_page_len.shape
            if len(shape) != 1 or indptr.shape != (shape[0] + 1,):
                raise ArgumentError(
                    f"{op}: last_page_len must have shape ({indptr.numel() - 1},) (batch size), got {tuple(shape)}"
                )
            return indptr, None
        lengths = {"last_page_len": last_page_len} if seq_lens is None else {"seq_lens": seq_lens}
        indptr_host, lens = to_host(op, indptr=indptr, **lengths)
        if seq_lens is None:
            kv_lens = kv_lens_of_pages(op, "indptr", indptr_host, lens, page_size)
        else:
            kv_lens = kv_lens_given(op, lens, segment_lens(op, "indptr", indptr_host))
        if q_len_per_req > 1 and kv_lens.size and kv_lens.min() < q_len_per_req:
            raise ArgumentError(
                f"{op}: a request must have at least q_len_per_req = {q_len_per_req} keys (its first query would have "
                f"an empty KV range), got {kv_lens.min()}"
            )
        return indptr_host, kv_lens

    def _store_tables(
        self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor, non_blocking: bool
    ) -> None:
        if self._use_cuda_graph:
            assert self._paged_kv_indptr_buf is not None and self._paged_kv_indices_buf is not None
            assert self._paged_kv_last_page_len_buf is not None
            self._paged_kv_indptr_buf.copy_(indptr, non_blocking=non_blocking)
            numbers = narrowed(indices, f"{self._op}.plan: indices")
            self._paged_kv_indices_buf[: len(indices)].copy_(numbers, non_blocking=non_blocking)
            self._paged_kv_last_page_len_buf.copy_(last_page_len, non_blocking=non_blocking)
        else:
            self._paged_kv_indptr_buf = self._indptr_on_device(indptr, 0, non_blocking)
            where: tuple[Any, ...] = (self.device, non_blocking)
            self._paged_kv_indices_buf = to_device(self._op, "indices", indices, *where)
            self._paged_kv_last_page_len_buf = to_device(self._op, "last_page_len", last_page_len, *where)

    def _store_options(
        self,
        *,
        batch_size: int,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        q_len_per_req: int,
        dtypes: Dtypes,
        options: AttentionOptions,
    ) -> None:
        self._check_heads(f"{self._op}.plan", num_qo_heads, num_kv_heads)
        self._batch_size = batch_size
        self._num_qo_heads, self._num_kv_heads = num_qo_heads, num_kv_heads
        self._head_dim, self._page_size = head_dim, page_size
        self._head_dim_vo = head_dim if self._jit is None else self._jit.head_dim_vo
        self._planned_q_len = q_len_per_req
        self._store_dtypes(dtypes)
        self._page_shape = (page_size, num_kv_heads) if self._layout == 0 else (num_kv_heads, page_size)
        if self._use_tensor_cores:
            rows = range_buffer(batch_size + 1, self.device)
            if not self._use_cuda_graph and q_len_per_req == 1:
                self._qo_indptr_buf = rows
            elif not self._use_cuda_graph or self._frozen_q_len is None:
                self._qo_indptr_buf = rows * q_len_per_req  # separate tensor: a graph keeps its address
        self._set_parameters(options)

    def _module(self) -> Any:
        if self._jit_module is not None:
            return self._jit_module
        key = (self._dtypes, self._head_dim, self._pos_encoding, self._window_left >= 0, self._logits_soft_cap > 0)
        if key != self._module_key:
            d, tail = key[0], (_INT32, key[1], *key[1:])
            if self._use_tensor_cores:
                module = get_batch_prefill_module("fa2", d.compute, d.kv, d.o, *tail, False, device=self._device_kind)
            else:
                module = get_batch_decode_module(d.compute, d.kv, d.o, *tail, device=self._device_kind)
            self._module_key, self._module_found = key, module
        return self._module_found

    def _work(self) -> tuple[Any, ...]:
        """Return the arguments of the native plan after the workspaces."""
        planned = self._planned
        indptr, kv_lens = as_tensor(planned.indptr), as_tensor(planned.kv_lens)
        batch_size, q_len = indptr.shape[0] - 1, self._planned_q_len
        if self._use_tensor_cores:
            assert q_len is not None
            qo_indptr = rows_on_host(batch_size, q_len)
            return (
                qo_indptr,
                indptr,
                kv_lens,
                batch_size * q_len,
                batch_size,
                self._num_qo_heads,
                self._num_kv_heads,
                self._page_size,
                self._use_cuda_graph,
                self._head_dim,
                self._head_dim,
                q_len > 1,  # causal
                self._window_left,
                planned.fixed_split_size,
                planned.disable_split_kv,
                0,  # num_colocated_ctas
                q_len,
            )
        return (
            indptr,
            kv_lens,
            q_len,
            self._num_qo_heads,
            self._num_kv_heads,
            self._page_size,
            self._use_cuda_graph,
            self._window_left,
            planned.fixed_split_size,
            planned.disable_split_kv,
        )

    def _plan_again(self, covers: bool) -> None:
        """Plan again after parameters changed. ``covers``: the old plan covers all keys that these make visible."""
        if self._keeps_plan(covers):
            self._cached_module = self._module()
            return
        if self._plan_info is not self._planned_info:  # an engine replaced the plan: read the batch from its tables
            indptr, last_page_len = self._paged_kv_indptr_buf, self._paged_kv_last_page_len_buf
            assert indptr is not None and last_page_len is not None and self._planned_q_len is not None
            indptr_host, kv_lens = self._lengths(
                f"{self._op}.forward", indptr, last_page_len, None, self._page_size, self._planned_q_len, True
            )
            self._planned = self._planned.with_batch(indptr_host, kv_lens)
        self._plan_info = None  # if the rest fails, no valid plan remains
        self._cached_module = self._module()
        self._plan_work()

    def _state(self) -> DecodeState:
        return DecodeState.of(self)

    def _new_plan(self) -> tuple[Any, ...]:
        plan = super()._new_plan()
        return (*plan, self._qo_indptr_buf) if self._use_tensor_cores else plan

    def _plan_work(self) -> None:
        module = self._cached_module
        self._plan_info = self._planned_info = self._native_plan(
            module.plan if self._use_tensor_cores else module.plan_with_lens, *self._work()
        )
        if self._use_cuda_graph:
            self._frozen_q_len = self._planned_q_len
