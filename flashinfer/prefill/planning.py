# SPDX-License-Identifier: Apache-2.0
"""Functions of the two batch prefill wrappers: options, masks, module selection and native arguments.

Functions take the wrapper as their first argument. The wrappers' classes have some of them as methods, so that a
subclass may replace them: those that are called here as methods of ``wrapper``.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Mapping, Optional, Sequence

import numpy as np
import torch

from .._runtime.errors import ArgumentError
from ..attention.masks import byte_offsets, check_items, pack_batch_mask
from ..attention.modules import get_batch_prefill_module, get_customize_batch_prefill_module
from ..attention.options import (
    ALIBI,
    CAUSAL,
    CUSTOM,
    DECODE_TILE,
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
from ..attention.run import builtin_scalars, check_batch_size, derived_scalars, keeps_plan
from ..attention.scales import Scale
from ..attention.wrapper import Launch
from .plan import PrefillState

__all__ = [
    "KNOWN_TENSORS",
    "begin_prefill",
    "call_with",
    "check_rows",
    "choose_backend",
    "expected_rows",
    "freeze_rows",
    "mask_mode",
    "native_arguments",
    "native_workspace_size",
    "plan_work",
    "prefill_scalars",
    "replace_parameters",
    "select_module",
    "state_of",
    "store_items",
    "store_mask",
]

#: Tensors that a variant of a user may name and the wrapper passes.
KNOWN_TENSORS = (
    "maybe_custom_mask",
    "maybe_mask_indptr",
    "maybe_alibi_slopes",
    "maybe_prefix_len_ptr",
    "maybe_token_pos_in_items_ptr",
    "maybe_max_item_len_ptr",
    "maybe_k_cache_sf",
    "maybe_v_cache_sf",
)


def begin_prefill(
    wrapper: Any,
    custom_mask_buf: Optional[torch.Tensor],
    mask_indptr_buf: Optional[torch.Tensor],
    backend: str,
    jit_args: Optional[Sequence[Any]],
    jit_kwargs: Optional[Mapping[str, Any]],
    variant_owns_mask: bool,
) -> None:
    """Set the attributes that both wrappers have before the first plan."""
    wrapper._requested_backend = backend  # "auto" chooses for each plan
    if variant_owns_mask and jit_args is None:
        raise ArgumentError(
            f"{wrapper._op}: variant_owns_mask must be False without jit_args (a variant with a mask), got True"
        )
    wrapper._variant_owns_mask = variant_owns_mask
    if jit_args is not None:
        wrapper._backend = resolve_backend(wrapper._op, backend, wrapper.device)
        wrapper._variant = (jit_args, jit_kwargs or {})
        if backend != "auto" or not wrapper._has_portable_variant:
            load_variant(wrapper)
    wrapper._custom_mask_buf = custom_mask_buf
    wrapper._mask_indptr_buf = mask_indptr_buf
    wrapper._max_total_num_rows = None
    wrapper._qo_indptr_last = None
    wrapper._prefix_len_ptr = None
    wrapper._token_pos_in_items_ptr = None
    wrapper._token_pos_in_items_len = 0
    wrapper._max_item_len_ptr = None
    wrapper._block_tables = None
    wrapper._max_q_len = None
    wrapper._max_kv_len = None


def load_variant(wrapper: Any) -> None:
    """Load the module of the user's variant for the chosen backend."""
    if wrapper._jit_module is None or wrapper._jit_backend != wrapper._backend:
        (uri, *rest), options = wrapper._variant
        suffix = f"_{wrapper._backend}" if wrapper._has_portable_variant and wrapper._backend != "fa2" else ""
        wrapper._jit_backend = wrapper._backend
        wrapper._jit_module = get_customize_batch_prefill_module(
            wrapper._backend, f"{uri}{suffix}" if suffix else uri, *rest, device=wrapper._device_kind, **options
        )


def check_rows(wrapper: Any, op: str, batch_size: int, rows: int) -> None:
    """Check batch size and rows against the sizes that a CUDA graph fixes."""
    if not wrapper._use_cuda_graph:
        return
    check_batch_size(wrapper, op, batch_size)
    if wrapper._max_total_num_rows is not None and rows > wrapper._max_total_num_rows:
        raise ArgumentError(
            f"{op}: q must have at most {wrapper._max_total_num_rows} rows (those of the first plan), got {rows}"
        )


def check_mask_buffers(wrapper: Any, op: str, num_bytes: int, num_offsets: int) -> None:
    """Check that the mask buffers of a CUDA graph are large enough."""
    wrapper._require_graph_buffers(torch.uint8, torch.int8, custom_mask_buf=wrapper._custom_mask_buf)
    wrapper._require_graph_buffers(torch.int32, mask_indptr_buf=wrapper._mask_indptr_buf)
    assert wrapper._custom_mask_buf is not None and wrapper._mask_indptr_buf is not None
    if num_bytes > len(wrapper._custom_mask_buf) or num_offsets > len(wrapper._mask_indptr_buf):
        raise ArgumentError(
            f"{op}: the mask must have at most {len(wrapper._custom_mask_buf)} bytes and "
            f"{len(wrapper._mask_indptr_buf)} offsets (custom_mask_buf and mask_indptr_buf), got {num_bytes} and "
            f"{num_offsets}"
        )


def store_mask(
    wrapper: Any,
    op: str,
    custom_mask: Optional[torch.Tensor],
    packed_custom_mask: Optional[torch.Tensor],
    qo_lens: np.ndarray,
    kv_lens: np.ndarray,
    non_blocking: bool,
) -> None:
    if custom_mask is None and packed_custom_mask is None:
        if not wrapper._use_cuda_graph:
            wrapper._custom_mask_buf = wrapper._mask_indptr_buf = None
        elif wrapper._custom_mask_buf is not None:  # run() reads the mask buffer even without a new mask
            check_mask_buffers(wrapper, op, int(byte_offsets(qo_lens, kv_lens)[-1]), qo_lens.size + 1)
        return
    packed, offsets = pack_batch_mask(
        op, custom_mask, packed_custom_mask, qo_lens, kv_lens, wrapper.device, non_blocking
    )
    if not wrapper._use_cuda_graph:
        wrapper._custom_mask_buf, wrapper._mask_indptr_buf = packed, offsets
        return
    check_mask_buffers(wrapper, op, len(packed), len(offsets))
    assert wrapper._custom_mask_buf is not None and wrapper._mask_indptr_buf is not None
    wrapper._custom_mask_buf[: len(packed)].copy_(packed, non_blocking=non_blocking)
    wrapper._mask_indptr_buf[: len(offsets)].copy_(offsets, non_blocking=non_blocking)


def store_items(
    wrapper: Any,
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
        x = x.to(wrapper.device, copy=wrapper._device_kind == "cpu").reshape(-1)
        return x.contiguous() if x.dtype == dtype else x.to(torch.int64).to(dtype)

    wrapper._prefix_len_ptr = stored(prefix_len_ptr, torch.uint32)
    wrapper._token_pos_in_items_ptr = stored(token_pos_in_items_ptr, torch.uint16)
    wrapper._token_pos_in_items_len = token_pos_in_items_len
    wrapper._max_item_len_ptr = stored(max_item_len_ptr, torch.uint16)


def select_module(
    wrapper: Any, dtypes: Dtypes, head_dim_qk: int, head_dim_vo: int, use_fp16_qk_reduction: bool
) -> None:
    """Select the module for the planned options; the legacy ``forward`` calls this again with other parameters."""
    wrapper._module_key = (dtypes, head_dim_qk, head_dim_vo, use_fp16_qk_reduction)
    wrapper._head_dim_vo = head_dim_vo
    if wrapper._jit is not None:
        load_variant(wrapper)
        wrapper._cached_module = wrapper._jit_module
        return
    if wrapper._backend == "fa3" and fa3_multiplies_fp8(
        dtypes.q, dtypes.kv, dtypes.o, head_dim_qk, head_dim_vo, wrapper._pos_encoding
    ):
        dtypes = dataclasses.replace(dtypes, compute=dtypes.q)
    wrapper._dtypes = dtypes
    wrapper._cached_module = get_batch_prefill_module(
        wrapper._backend, dtypes.compute, dtypes.kv, dtypes.o, torch.int32, head_dim_qk, head_dim_vo,
        wrapper._pos_encoding, wrapper._window_left >= 0, bool(wrapper._logits_soft_cap), use_fp16_qk_reduction,
        device=wrapper._device_kind,
    )  # fmt: skip


def choose_backend(wrapper: Any, dtypes: Dtypes, head_dim_qk: int, head_dim_vo: int) -> str:
    """Return the backend of the planned batch. A CUDA graph keeps that of its first plan.

    With splits that are the same in every batch, so is the backend: results then do not depend on the batch.
    """
    if wrapper._requested_backend != "auto" or (wrapper._jit is not None and not wrapper._has_portable_variant):
        return resolve_backend(wrapper._op, wrapper._requested_backend, wrapper.device)
    if wrapper._max_total_num_rows is not None:
        return wrapper._backend
    planned = wrapper._planned
    if planned.fixed_split_size > 0 or planned.disable_split_kv:
        return "fa2"
    if not fa3_serves(wrapper.device, dtypes.q, dtypes.kv, dtypes.o, head_dim_qk, head_dim_vo, wrapper._pos_encoding):
        return "fa2"
    group, mode = wrapper._num_qo_heads // wrapper._num_kv_heads, wrapper._mask_mode()
    if fa3_is_faster(planned.num_rows * group, planned.batch_size, mode):
        return "fa3"
    rows = np.diff(planned.qo_indptr) * group
    rows = rows[rows > DECODE_TILE]  # the others decode, on a kernel that both backends have
    return "fa3" if len(rows) and fa3_is_faster(int(rows.sum()), len(rows), mode) else "fa2"


def freeze_rows(wrapper: Any) -> None:
    """Fix the maximal number of rows of a CUDA graph to the rows of the first successful plan."""
    if wrapper._use_cuda_graph and wrapper._max_total_num_rows is None:
        wrapper._max_total_num_rows = wrapper._qo_indptr_last


def plan_work(wrapper: Any) -> None:
    wrapper._plan_info = wrapper._planned_info = wrapper._native_plan(wrapper._cached_module.plan, *wrapper._work())


def native_arguments(wrapper: Any) -> tuple[Any, ...]:
    """Return the arguments of the native plan after the workspaces."""
    mask_mode = wrapper._mask_mode()
    # Below 0: decode and prefill items do not share a launch, so neither kind leaves SM resources for the other.
    num_colocated_ctas = 0 if wrapper._is_paged and mask_mode in (CAUSAL, NON_CAUSAL) else -1
    is_causal = mask_mode in (CAUSAL, MULTI_ITEM)
    return wrapper._planned.native_arguments(is_causal, wrapper._window_left, num_colocated_ctas)


def state_of(wrapper: Any) -> PrefillState:
    return PrefillState.of(wrapper)


def mask_mode(wrapper: Any) -> int:
    if wrapper._prefix_len_ptr is not None:
        return MULTI_ITEM
    if wrapper._custom_mask_buf is not None or wrapper._variant_owns_mask:
        return CUSTOM
    return CAUSAL if wrapper._causal else NON_CAUSAL


def replace_parameters(wrapper: Any, causal: bool, options: AttentionOptions) -> None:
    """Replace parameters of the plan by arguments of the legacy ``forward``, and plan again if necessary."""
    wrapper._require_plan()
    planned = (wrapper._causal, wrapper._pos_encoding, wrapper._window_left, bool(wrapper._logits_soft_cap))
    was_causal, window = wrapper._mask_mode() in (CAUSAL, MULTI_ITEM), wrapper._window_left
    wrapper._set_parameters(options)
    wrapper._causal = causal
    if planned != (wrapper._causal, wrapper._pos_encoding, wrapper._window_left, bool(wrapper._logits_soft_cap)):
        is_causal = wrapper._mask_mode() in (CAUSAL, MULTI_ITEM)
        covers = (is_causal or not was_causal) and (window < 0 or 0 <= options.window_left <= window)
        plan_again(wrapper, covers)


def plan_again(wrapper: Any, covers: bool) -> None:
    """Plan again after parameters changed. ``covers``: the old plan covers all keys that these make visible."""
    backend = choose_backend(wrapper, *wrapper._module_key[:3])
    if backend == wrapper._backend and keeps_plan(wrapper, covers):
        return wrapper._select_module(*wrapper._module_key)
    wrapper._backend = backend
    if wrapper._plan_info is not wrapper._planned_info:  # an engine replaced the plan: read the batch from its tables
        qo_host, kv_host, kv_lens = wrapper._batch_of_tables(f"{wrapper._op}.forward")
        rows = wrapper._max_total_num_rows or int(qo_host[-1])
        wrapper._planned = wrapper._planned.with_batch(qo_host, kv_host, kv_lens, rows)
    wrapper._plan_info = None  # if the rest fails, no valid plan remains
    wrapper._select_module(*wrapper._module_key)
    wrapper._plan_work()


def native_workspace_size(wrapper: Any) -> tuple[int, int]:
    float_bytes, int_bytes = wrapper._cached_module.workspace_size(*wrapper._work())
    return int(float_bytes), int(int_bytes)


def expected_rows(wrapper: Any) -> int:
    """Return the rows that q must have."""
    return wrapper._qo_indptr_last


def prefill_scalars(wrapper: Any, sm_scale: float, q_scale: Scale, k_scale: Scale, v_scale: Scale) -> dict[str, Any]:
    """Return default values of scalars that a variant may declare and the caller may omit."""
    derived = derived_scalars(wrapper, sm_scale, q_scale, k_scale, v_scale)
    return {**derived, "token_pos_in_items_len": wrapper._token_pos_in_items_len or 0}


def extras(wrapper: Any, launch: Launch) -> tuple[Any, ...]:
    """Return the additional parameters of the module, in the order of its declaration."""
    tensors, scalars = launch.tensors, launch.scalars
    slopes = alibi_slopes(wrapper._num_qo_heads, launch.q.device) if wrapper._pos_encoding == ALIBI else None
    state = (
        wrapper._custom_mask_buf,
        wrapper._mask_indptr_buf,
        slopes,
        wrapper._prefix_len_ptr,
        wrapper._token_pos_in_items_ptr,
        wrapper._max_item_len_ptr,
    )
    if wrapper._jit is None:
        return (*state, *tensors, *builtin_scalars(wrapper, scalars[0]), wrapper._token_pos_in_items_len or 0)
    factors = tensors[len(tensors) - 2 :] if wrapper._is_nvfp4 else (None, None)
    known = dict(zip(KNOWN_TENSORS, (*state, *factors), strict=True))
    return (*wrapper._jit.all_tensors(tensors, known), *wrapper._jit.typed(scalars))


def call_with(
    wrapper: Any, tables: Sequence[Optional[torch.Tensor]], launch: Launch, enable_pdl: bool
) -> tuple[Any, ...]:
    """Return the arguments of a native run."""
    return (
        wrapper._float_workspace_buffer,
        wrapper._int_workspace_buffer,
        wrapper._plan_info,
        launch.q,
        launch.k,
        launch.v,
        *tables,
        launch.out,
        launch.lse,
        wrapper._mask_mode(),
        wrapper._layout,
        wrapper._window_left,
        enable_pdl,
        *extras(wrapper, launch),
    )
