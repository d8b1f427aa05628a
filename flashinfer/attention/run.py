# SPDX-License-Identifier: Apache-2.0
"""Shared ``run()`` of the decode and prefill wrappers, after wrapper-specific validation.

Functions take the wrapper as their first argument. A wrapper has these methods for them, some of which are functions of
this module: ``_expected_rows()`` (rows that q must have), ``_refuse_query(q)``, ``_derived_scalars(...)``, and
``_new_plan()`` (arguments of the module's ``replan`` between the record and the tensors) if it sets ``_has_replan``.
"""

from __future__ import annotations

import operator
from typing import Any, Optional, Sequence, Union

import torch

from .._runtime.allocation import allocate
from .._runtime.checks import check_tensors
from .._runtime.codegen_wrapper import compiler, is_traced
from .._runtime.errors import ArgumentError
from .._runtime.probes import probes
from . import streams
from .call_records import CallRecord
from .locks import CLOSED
from .options import FP8, default_scale
from .outputs import add_sinks, check_lse_form, finish_lse, lse_buffer, output_buffer
from .scales import (
    Scale,
    convert_fp8_query,
    fp8_scales,
    product_of_numbers,
    scale_logits,
    scale_output,
    scale_output_per_head,
)
from .wrapper import Launch, run_planned

__all__ = [
    "Result",
    "attend",
    "builtin_scalars",
    "check_batch_size",
    "check_heads",
    "check_in_graph",
    "derived_scalars",
    "keeps_plan",
    "plan_and_table",
    "refuse_query",
    "repeat",
]

Result = Union[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]

_is_compiling = torch.compiler.is_compiling

#: Arguments of the module's ``replan`` between the record and the tensors: plan and page table of a wrapper.
plan_and_table = operator.attrgetter(
    "_float_workspace_buffer",
    "_int_workspace_buffer",
    "_plan_info",
    "_paged_kv_indptr_buf",
    "_paged_kv_indices_buf",
    "_paged_kv_last_page_len_buf",
)


def check_heads(op: str, num_qo_heads: int, num_kv_heads: int) -> None:
    if num_kv_heads < 1 or num_qo_heads % num_kv_heads:
        raise ArgumentError(
            f"{op}: num_qo_heads must be a multiple of num_kv_heads = {num_kv_heads}, got {num_qo_heads}"
        )


def check_batch_size(wrapper: Any, op: str, batch_size: int) -> None:
    """Check the batch size against the fixed size of the CUDA graph buffers."""
    if batch_size != wrapper._fixed_batch_size:
        raise ArgumentError(
            f"{op}: the batch size must be {wrapper._fixed_batch_size} (fixed by the buffers), got {batch_size}"
        )


def check_in_graph(wrapper: Any, launch: Launch) -> None:
    if launch.q.shape[0] != wrapper._expected_rows():
        wrapper._refuse_query(launch.q)


def refuse_query(wrapper: Any, q: torch.Tensor) -> None:
    raise ArgumentError(
        f"{wrapper._op}.run: q must have {wrapper._expected_rows()} rows (of plan()) and {wrapper._num_qo_heads} "
        f"heads, got {q.shape[0]} rows and {q.shape[1]} heads"
    )


def check_sinks(wrapper: Any, sinks: torch.Tensor) -> None:
    if wrapper._jit is not None:
        raise ArgumentError(f"{wrapper._op}.run: sinks must be None (a variant of jit_args has its own), got a value")
    check_tensors(f"{wrapper._op}.run", sinks=sinks)
    if sinks.shape != (wrapper._num_qo_heads,):
        raise ArgumentError(
            f"{wrapper._op}.run: sinks must have shape ({wrapper._num_qo_heads},) (num_qo_heads), got "
            f"{tuple(sinks.shape)}"
        )


def builtin_scalars(wrapper: Any, sm_scale: float) -> tuple[float, float, float, float]:
    """Return the scalars that every built-in module declares."""
    return (
        wrapper._logits_soft_cap or 0.0,
        sm_scale,
        1.0 / (wrapper._rope_scale or 1.0),
        1.0 / (wrapper._rope_theta or 1e4),
    )


def derived_scalars(wrapper: Any, sm_scale: float, q_scale: Scale, k_scale: Scale, v_scale: Scale) -> dict[str, Any]:
    """Return default values of scalars that a variant may declare and the caller may omit."""
    cap, sm_scale, rope_rcp_scale, rope_rcp_theta = builtin_scalars(wrapper, sm_scale)
    return {
        "logits_soft_cap": cap,
        "sm_scale": sm_scale,
        "rope_rcp_scale": rope_rcp_scale,
        "rope_rcp_theta": rope_rcp_theta,
        "scale_q_scalar": 1.0 if q_scale is None else q_scale,
        "scale_k_scalar": 1.0 if k_scale is None else k_scale,
        "scale_v_scalar": 1.0 if v_scale is None else v_scale,
    }


def attend(
    wrapper: Any,
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
    op = wrapper._op
    check_lse_form(op, lse_base, lse_layout)
    if sinks is not None:
        check_sinks(wrapper, sinks)
    shape = q.shape
    if len(shape) != 3:
        raise ArgumentError(f"{op}.run: q must have 3 dimensions (rows, num_qo_heads, head_dim), got {len(shape)}")
    rows, num_qo_heads, head_dim = shape
    is_compiling = _is_compiling()
    if num_qo_heads != wrapper._num_qo_heads:
        wrapper._refuse_query(q)
    if not is_compiling and rows != wrapper._expected_rows():  # compiled: run_planned checks the rows
        wrapper._refuse_query(q)
    sm_scale = default_scale(f"{op}.run", wrapper._sm_scale, head_dim)
    is_plain = wrapper._jit is None and not args and not wrapper._is_nvfp4 and q.dtype is wrapper._dtypes.compute
    scale_v: Scale = None
    if wrapper._jit is None and wrapper._dtypes.compute in FP8:
        of_heads = head_scales(wrapper, args)
        scales, sm_scale = fp8_scales(
            f"{op}.run", q, sm_scale, of_heads, wrapper._num_kv_heads, q_scale=q_scale, k_scale=k_scale
        )
        q_scale = k_scale = None
        factors = [*factors, *scales]
        is_plain = is_plain and not any(x is not None for x in scales)
    elif wrapper._jit is None and args:
        q, scale_v = convert(wrapper, q, args)
    elif wrapper._jit is None and q.dtype in FP8:
        q = q.to(wrapper._dtypes.compute)
    if q_scale is not None or k_scale is not None:
        q, sm_scale = scale_logits(f"{op}.run", q, sm_scale, q_scale=q_scale, k_scale=k_scale)
    scalars: Sequence[Any] = (sm_scale,)
    if wrapper._jit is not None:
        derived = wrapper._derived_scalars(sm_scale, q_scale, k_scale, v_scale)
        given, scalars = wrapper._jit.split(op, args, derived, product_of_numbers(q_scale, k_scale))
        factors = [*given, *factors]
    score, given_out = None, out
    o_dtype = wrapper._cached_o_data_type or q.dtype  # serving engines that replace plan() leave the output dtype None
    out = output_buffer(op, out, (rows, num_qo_heads, wrapper._head_dim_vo), o_dtype, q)
    if return_lse or lse is not None or sinks is not None:
        score = lse_buffer(op, lse if lse_layout == "NH" else None, (rows, num_qo_heads), q)
    if wrapper._first_row:
        clear_first_rows(wrapper, out if given_out is None else None, score if lse is None else None)
    launch = Launch(q, k, v, out, score, list(factors), list(scalars))
    if is_compiling:
        run_planned(wrapper._handle, *launch, enable_pdl)
    elif is_plain and not wrapper._first_row:
        wrapper._launch_kept(launch, enable_pdl, default_scale(f"{op}.run", None, head_dim))
    else:
        wrapper._launch(launch, enable_pdl)
    if scale_v is not None:
        scale_output_per_head(f"{op}.run", out, scale_v, wrapper._num_kv_heads)
    if v_scale is not None:
        scale_output(f"{op}.run", out, v_scale)
    if sinks is not None:
        add_sinks(out, score, sinks)  # type: ignore[arg-type]
    if score is None or not (return_lse or lse is not None):
        return out
    if lse_base != "log2" or lse_layout != "NH":
        score = finish_lse(op, score, lse_base, lse_layout, lse)
    return (out, score) if return_lse else out


def clear_first_rows(wrapper: Any, out: Optional[torch.Tensor], lse: Optional[torch.Tensor]) -> None:
    """Set rows before the first request to out = 0 and lse = -inf, in buffers that we allocated (None: skip)."""
    if out is not None:
        out[: wrapper._first_row] = 0
    if lse is not None:
        lse[: wrapper._first_row] = -torch.inf


def repeat(
    wrapper: Any,
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
    lock = wrapper._lock
    calls = lock.free
    is_nested = not calls
    if is_nested:
        if not lock._is_owned():
            return wrapper._repeat_alone(q, k, v, q_scale, k_scale, v_scale, out, lse, return_lse, enable_pdl)
        calls = [None]
    try:
        calls.pop()
    except IndexError:  # another thread was faster
        return wrapper._repeat_alone(q, k, v, q_scale, k_scale, v_scale, out, lse, return_lse, enable_pdl)
    except BaseException:  # a signal handler raised it after pop() returned
        calls.append(None)
        raise
    try:
        device = lock.cuda_index
        if is_nested or (lock.free is not CLOSED and (device is None or streams.raw_stream(device) == lock.stream)):
            record = wrapper._record
            if record is None or record.pdl_probe is not probes.device_support_pdl:
                return None
            state = record.state
            is_replanned = not (state.has_plan_of(wrapper) and state.has_options_of(wrapper)) or (
                record.least_pages and record.is_too_small(k)
            )
            if is_replanned:
                if not can_replan(wrapper, record, q):
                    return None
                record.shape = (q.shape[0], *record.shape[1:])  # contiguous strides are those of any row count
            sm_scale = wrapper._sm_scale
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
            # TVM-FFI follows lists in lists without end (_runtime/torch_ops.py).
            if q.__class__ is list or k.__class__ is list or v.__class__ is list or lse.__class__ is list:
                return None
            if out is None:
                out = allocate(record.shape, record.strides, record.dtype, record.device_index)
            elif out.__class__ is list:
                return None
            if lse is None and return_lse:
                lse = record.scores()
            pdl = record.pdl and enable_pdl is not False
            try:
                if is_replanned:
                    wrapper._cached_module.replan(record.memory, *wrapper._new_plan(), q, k, v, out, lse, sm_scale, pdl)
                    state.take_plan(wrapper)
                    record.least_pages = wrapper._least_pages(k)
                else:
                    record.rerun(record.memory, q, k, v, out, lse, sm_scale, pdl)
            except Exception:
                wrapper._record = None
                return None
            if v_scale is not None:
                scale_output(f"{wrapper._op}.run", out, v_scale)
            return (out, lse) if return_lse else out  # type: ignore[return-value]
    finally:
        calls.append(None)
    return wrapper._repeat_alone(q, k, v, q_scale, k_scale, v_scale, out, lse, return_lse, enable_pdl)


def can_replan(wrapper: Any, record: CallRecord, q: torch.Tensor) -> bool:
    """Return True if only the plan, the page table and the number of rows changed since the recorded call."""
    return bool(
        wrapper._has_replan
        and wrapper._plan_info is not None
        and not wrapper._first_row
        and record.state.has_options_of(wrapper)
        and q.shape[0] == wrapper._expected_rows()
    )


def convert(wrapper: Any, q: torch.Tensor, args: Sequence[Any]) -> tuple[torch.Tensor, Scale]:
    """Convert 8-bit queries to 16 bits, scaled. ``args``: scales of q, k and v. Also return the scale of v."""
    if q.dtype not in FP8:
        raise ArgumentError(
            f"{wrapper._op}.run: positional arguments after the tensors must be none (no jit_args), got {len(args)}"
        )
    scale_q, scale_k, scale_v = head_scales(wrapper, args)
    op, heads = f"{wrapper._op}.run", wrapper._num_kv_heads
    return convert_fp8_query(op, q, scale_q, scale_k, heads, wrapper._dtypes.compute), scale_v


def head_scales(wrapper: Any, args: Sequence[Any]) -> Sequence[Scale]:
    """Return the scales of 8-bit q, k and v, None if there are none."""
    if args and len(args) != 3:
        raise ArgumentError(f"{wrapper._op}.run: scales must be 3 (of q, k and v), got {len(args)}")
    return args or (None, None, None)


def keeps_plan(wrapper: Any, covers: bool) -> bool:
    """Return True if ``forward`` with new parameters must reuse the existing plan because a capture is in progress.

    A CUDA graph that captured a new plan would copy that plan to the device at each replay and overwrite the
    current plan. Kernels apply the mask themselves, so a plan that covers more keys than needed is correct.
    ``covers`` tells whether the existing plan covers all keys that the new parameters make visible.
    """
    if not wrapper._is_being_captured():
        return False
    if not covers:
        wrapper._plan_info = None
        raise ArgumentError(
            f"{wrapper._op}.forward: parameters must not show more keys than those of plan() during a capture (plan "
            "with them before it), got other parameters"
        )
    return True
