# SPDX-License-Identifier: Apache-2.0
"""Shared ``run()`` of the decode and prefill wrappers, after wrapper-specific validation."""

from __future__ import annotations

import operator
from typing import Any, Optional, Sequence, Union

import torch

from .. import utils
from .._runtime.allocation import allocate
from .._runtime.checks import check_tensors
from .._runtime.codegen_wrapper import compiler, is_traced
from .._runtime.errors import ArgumentError
from . import streams
from .locks import CLOSED
from .options import FP8, default_scale
from .outputs import add_sinks, check_lse_form, finish_lse, lse_buffer, output_buffer
from .records import CallRecord
from .scales import (
    Scale,
    convert_fp8_query,
    fp8_scales,
    product_of_numbers,
    scale_logits,
    scale_output,
    scale_output_per_head,
)
from .wrapper import Launch, PlannedWrapper, run_planned

__all__ = ["AttentionWrapper", "Result"]

Result = Union[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]

_is_compiling = torch.compiler.is_compiling

_plan_and_table = operator.attrgetter(
    "_float_workspace_buffer",
    "_int_workspace_buffer",
    "_plan_info",
    "_paged_kv_indptr_buf",
    "_paged_kv_indices_buf",
    "_paged_kv_last_page_len_buf",
)


class AttentionWrapper(PlannedWrapper):
    """Base of the decode and prefill wrappers."""

    _head_dim_vo: int
    _first_row = 0  #: index of the first row of the first request; earlier rows belong to no request

    @staticmethod
    def _check_heads(op: str, num_qo_heads: int, num_kv_heads: int) -> None:
        if num_kv_heads < 1 or num_qo_heads % num_kv_heads:
            raise ArgumentError(
                f"{op}: num_qo_heads must be a multiple of num_kv_heads = {num_kv_heads}, got {num_qo_heads}"
            )

    def _check_batch_size(self, op: str, batch_size: int) -> None:
        """Check the batch size against the fixed size of the CUDA graph buffers."""
        if batch_size != self._fixed_batch_size:
            raise ArgumentError(
                f"{op}: the batch size must be {self._fixed_batch_size} (fixed by the buffers), got {batch_size}"
            )

    def _expected_rows(self) -> int:
        """Return the number of rows that q must have."""
        raise AssertionError("a subclass knows")

    def _check_in_graph(self, launch: Launch) -> None:
        if launch.q.shape[0] != self._expected_rows():
            self._refuse_query(launch.q)

    def _refuse_query(self, q: torch.Tensor) -> None:
        raise ArgumentError(
            f"{self._op}.run: q must have {self._expected_rows()} rows (of plan()) and {self._num_qo_heads} heads, got "
            f"{q.shape[0]} rows and {q.shape[1]} heads"
        )

    def _check_sinks(self, sinks: torch.Tensor) -> None:
        if self._jit is not None:
            raise ArgumentError(f"{self._op}.run: sinks must be None (a variant of jit_args has its own), got a value")
        check_tensors(f"{self._op}.run", sinks=sinks)
        if sinks.shape != (self._num_qo_heads,):
            raise ArgumentError(
                f"{self._op}.run: sinks must have shape ({self._num_qo_heads},) (num_qo_heads), got "
                f"{tuple(sinks.shape)}"
            )

    def _numbers(self, sm_scale: float) -> tuple[float, float, float, float]:
        """Return the scalars that every built-in module declares."""
        return (
            self._logits_soft_cap or 0.0,
            sm_scale,
            1.0 / (self._rope_scale or 1.0),
            1.0 / (self._rope_theta or 1e4),
        )

    def _derived_scalars(self, sm_scale: float, q_scale: Scale, k_scale: Scale, v_scale: Scale) -> dict[str, Any]:
        """Return default values of scalars that a variant may declare and the caller may omit."""
        cap, sm_scale, rope_rcp_scale, rope_rcp_theta = self._numbers(sm_scale)
        return {
            "logits_soft_cap": cap,
            "sm_scale": sm_scale,
            "rope_rcp_scale": rope_rcp_scale,
            "rope_rcp_theta": rope_rcp_theta,
            "scale_q_scalar": 1.0 if q_scale is None else q_scale,
            "scale_k_scalar": 1.0 if k_scale is None else k_scale,
            "scale_v_scalar": 1.0 if v_scale is None else v_scale,
        }

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        args: Sequence[Any],
        factors: Sequence[Optional[torch.Tensor]],
        q_scale: Scale,
        k_scale: Scale,
        v_scale: Scale,
        out: Optional[torch.Tensor],
        lse: Optional[torch.Tensor],
        return_lse: bool,
        enable_pdl: Optional[bool],
        lse_base: str = "log2",
        lse_layout: str = "NH",
        sinks: Optional[torch.Tensor] = None,
    ) -> Result:
        op = self._op
        check_lse_form(op, lse_base, lse_layout)
        if sinks is not None:
            self._check_sinks(sinks)
        shape = q.shape
        if len(shape) != 3:
            raise ArgumentError(f"{op}.run: q must have 3 dimensions (rows, num_qo_heads, head_dim), got {len(shape)}")
        rows, num_qo_heads, head_dim = shape
        is_compiling = _is_compiling()
        if num_qo_heads != self._num_qo_heads:
            self._refuse_query(q)
        if not is_compiling and rows != self._expected_rows():  # compiled: run_planned checks the rows
            self._refuse_query(q)
        sm_scale = default_scale(f"{op}.run", self._sm_scale, head_dim)
        is_plain = self._jit is None and not args and not self._is_nvfp4 and q.dtype is self._dtypes.compute
        scale_v: Scale = None
        if self._jit is None and self._dtypes.compute in FP8:
            of_heads = self._head_scales(args)
            scales, sm_scale = fp8_scales(
                f"{op}.run", q, sm_scale, of_heads, self._num_kv_heads, q_scale=q_scale, k_scale=k_scale
            )
            q_scale = k_scale = None
            factors = [*factors, *scales]
            is_plain = is_plain and not any(x is not None for x in scales)
        elif self._jit is None and args:
            q, scale_v = self._convert(q, args)
        elif self._jit is None and q.dtype in FP8:
            q = q.to(self._dtypes.compute)
        if q_scale is not None or k_scale is not None:
            q, sm_scale = scale_logits(f"{op}.run", q, sm_scale, q_scale=q_scale, k_scale=k_scale)
        scalars: Sequence[Any] = (sm_scale,)
        if self._jit is not None:
            derived = self._derived_scalars(sm_scale, q_scale, k_scale, v_scale)
            given, scalars = self._jit.split(op, args, derived, product_of_numbers(q_scale, k_scale))
            factors = [*given, *factors]
        score, given_out = None, out
        o_dtype = self._cached_o_data_type or q.dtype  # serving engines that replace plan() leave the output dtype None
        out = output_buffer(op, out, (rows, num_qo_heads, self._head_dim_vo), o_dtype, q)
        if return_lse or lse is not None or sinks is not None:
            score = lse_buffer(op, lse if lse_layout == "NH" else None, (rows, num_qo_heads), q)
        if self._first_row:
            self._clear_first_rows(out if given_out is None else None, score if lse is None else None)
        launch = Launch(q, k, v, out, score, list(factors), list(scalars))
        if is_compiling:
            run_planned(self._handle, *launch, enable_pdl)
        elif is_plain and not self._first_row:
            self._launch_kept(launch, enable_pdl, default_scale(f"{op}.run", None, head_dim))
        else:
            self._launch(launch, enable_pdl)
        if scale_v is not None:
            scale_output_per_head(f"{op}.run", out, scale_v, self._num_kv_heads)
        if v_scale is not None:
            scale_output(f"{op}.run", out, v_scale)
        if sinks is not None:
            add_sinks(out, score, sinks)  # type: ignore[arg-type]
        if score is None or not (return_lse or lse is not None):
            return out
        if lse_base != "log2" or lse_layout != "NH":
            score = finish_lse(op, score, lse_base, lse_layout, lse)
        return (out, score) if return_lse else out

    def _clear_first_rows(self, out: Optional[torch.Tensor], lse: Optional[torch.Tensor]) -> None:
        """Set rows before the first request to out = 0 and lse = -inf, in buffers that we allocated (None: skip)."""
        if out is not None:
            out[: self._first_row] = 0
        if lse is not None:
            lse[: self._first_row] = -torch.inf

    def _repeat(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: Optional[torch.Tensor],
        q_scale: Scale,
        k_scale: Scale,
        v_scale: Scale,
        out: Optional[torch.Tensor],
        lse: Optional[torch.Tensor],
        return_lse: bool,
        enable_pdl: Optional[bool],
    ) -> Optional[Result]:
        """Fast path: repeat the previous launch with new tensors. Return None if anything else changed.

        If ``v`` is None, ``k`` is one tensor that holds keys and values. The native call rejects tensors that do not
        match the previous launch. The result is None then too, and the caller takes the slow path, which raises an
        error with the reason.

        The lock is written out here because a function for it would cost as much as the lock (locks.py).
        """
        if is_traced() or compiler._is_compiling_flag:
            return None
        lock = self._lock
        calls = lock.free
        is_nested = not calls
        if is_nested:
            if not lock._is_owned():
                return self._repeat_alone(q, k, v, q_scale, k_scale, v_scale, out, lse, return_lse, enable_pdl)
            calls = [None]
        try:
            calls.pop()
        except IndexError:  # another thread was faster
            return self._repeat_alone(q, k, v, q_scale, k_scale, v_scale, out, lse, return_lse, enable_pdl)
        except BaseException:  # a signal handler raised it after pop() returned
            calls.append(None)
            raise
        try:
            device = self._cuda_index
            if is_nested or (
                lock.free is not CLOSED and (device is None or streams.raw_stream(device) == self._stream)
            ):
                record = self._record
                if record is None or record.pdl_probe is not utils.device_support_pdl:
                    return None
                state = record.state
                is_replanned = not (state.has_plan_of(self) and state.has_options_of(self)) or (
                    record.least_pages and record.is_too_small(k)
                )
                if is_replanned:
                    if not self._can_replan(record, q):
                        return None
                    record.shape = (q.shape[0], *record.shape[1:])  # contiguous strides are those of any row count
                sm_scale = self._sm_scale
                if sm_scale is None:
                    sm_scale = record.default_scale
                if q_scale is not None:
                    if type(q_scale) is not float:
                        return None
                    sm_scale *= q_scale
                if k_scale is not None:
                    if type(k_scale) is not float:
                        return None
                    sm_scale *= k_scale
                if out is None:
                    out = allocate(record.shape, record.strides, record.dtype, record.device_index)
                if lse is None and return_lse:
                    lse = record.scores()
                pdl = record.pdl and enable_pdl is not False
                try:
                    if is_replanned:
                        self._cached_module.replan(record.memory, *self._new_plan(), q, k, v, out, lse, sm_scale, pdl)
                        state.take_plan(self)
                        record.least_pages = self._least_pages(k)
                    else:
                        record.rerun(record.memory, q, k, v, out, lse, sm_scale, pdl)
                except Exception:
                    self._record = None
                    return None
                if v_scale is not None:
                    scale_output(f"{self._op}.run", out, v_scale)
                return (out, lse) if return_lse else out  # type: ignore[return-value]
        finally:
            calls.append(None)
        return self._repeat_alone(q, k, v, q_scale, k_scale, v_scale, out, lse, return_lse, enable_pdl)

    def _can_replan(self, record: CallRecord, q: torch.Tensor) -> bool:
        """Return True if only the plan, the page table and the number of rows changed since the recorded call."""
        return bool(
            self._has_replan
            and self._plan_info is not None
            and not self._first_row
            and record.state.has_options_of(self)
            and q.shape[0] == self._expected_rows()
        )

    def _new_plan(self) -> tuple[Any, ...]:
        """Return the arguments of the module's ``replan`` between the record and the tensors."""
        return _plan_and_table(self)

    def _convert(self, q: torch.Tensor, args: Sequence[Any]) -> tuple[torch.Tensor, Scale]:
        """Convert 8-bit queries to 16 bits, scaled. ``args``: scales of q, k and v. Also return the scale of v."""
        if q.dtype not in FP8:
            raise ArgumentError(
                f"{self._op}.run: positional arguments after the tensors must be none (no jit_args), got {len(args)}"
            )
        scale_q, scale_k, scale_v = self._head_scales(args)
        op, heads = f"{self._op}.run", self._num_kv_heads
        return convert_fp8_query(op, q, scale_q, scale_k, heads, self._dtypes.compute), scale_v

    def _head_scales(self, args: Sequence[Any]) -> Sequence[Scale]:
        """Return the scales of 8-bit q, k and v, None if there are none."""
        if args and len(args) != 3:
            raise ArgumentError(f"{self._op}.run: scales must be 3 (of q, k and v), got {len(args)}")
        return args or (None, None, None)

    # Method names of older releases.

    def _keeps_plan(self, covers: bool) -> bool:
        """Return True if ``forward`` with new parameters must reuse the existing plan because a capture is in progress.

        A CUDA graph that captured a new plan would copy that plan to the device at each replay and overwrite the
        current plan. Kernels apply the mask themselves, so a plan that covers more keys than needed is correct.
        ``covers`` tells whether the existing plan covers all keys that the new parameters make visible.
        """
        if not self._is_being_captured():
            return False
        if not covers:
            self._plan_info = None
            raise ArgumentError(
                f"{self._op}.forward: parameters must not show more keys than those of plan() during a capture (plan "
                "with them before it), got other parameters"
            )
        return True

    def end_forward(self) -> None:
        """Do nothing; programs written for older releases call it."""

    def run_return_lse(self, *args: Any, **kwargs: Any) -> Result:
        """Call ``run`` with ``return_lse=True``."""
        return self.run(*args, return_lse=True, **kwargs)  # type: ignore[attr-defined]  # subclasses define run()
