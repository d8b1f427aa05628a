# SPDX-License-Identifier: Apache-2.0
"""Append keys and values to a paged cache in NVFP4: 4-bit codes, a scale per 16 codes, a global scale."""

from __future__ import annotations

from typing import Optional

import torch

from .._runtime.arch import AMPERE_ON, CPU
from .._runtime.dispatch import backend_of
from .._runtime.requirements import backend_requirement, supported_compute_capability
from .._runtime.torch_ops import register_custom_op
from ..api_logging import flashinfer_api
from ..trace.templates.page import (
    nvfp4_quantize_append_paged_kv_cache_trace,
    nvfp4_quantize_append_paged_kv_cache_with_slot_mapping_trace,
)
from . import modules
from .global_scale import Scale, check_number, check_tensor, resolve_scales
from .modules import PagedCache, get_page_nvfp4_module, halves, is_hnd, table_as_int32

_TABLE, _MAPPING = "nvfp4_quantize_append_paged_kv_cache", "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping"
_CACHES = ("cache", "value_cache", "sf", "value_sf")


@register_custom_op(f"flashinfer::{_TABLE}", mutates_args=_CACHES)
def _append(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    cache: torch.Tensor,
    value_cache: Optional[torch.Tensor],
    sf: torch.Tensor,
    value_sf: Optional[torch.Tensor],
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    k_scale: float,
    v_scale: float,
    is_hnd: bool,
) -> None:
    b, p, indices, indptr = table_as_int32(_TABLE, batch_indices, positions, kv_indices, kv_indptr)
    get_page_nvfp4_module(backend_of(append_key)).nvfp4_quantize_append_paged_kv_cache(
        append_key, append_value, b, p, cache, value_cache, sf, value_sf, indices, indptr,
        k_scale, v_scale, is_hnd, modules.VALIDATE,
    )  # fmt: skip


@register_custom_op(f"flashinfer::{_MAPPING}", mutates_args=_CACHES)
def _append_mapped(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    slot_mapping: torch.Tensor,
    cache: torch.Tensor,
    value_cache: Optional[torch.Tensor],
    sf: torch.Tensor,
    value_sf: Optional[torch.Tensor],
    k_scale: float,
    v_scale: float,
    k_scale_tensor: Optional[torch.Tensor],
    v_scale_tensor: Optional[torch.Tensor],
    is_hnd: bool,
) -> None:
    scales: dict[str, Scale] = {
        "k_scale": k_scale if k_scale_tensor is None else k_scale_tensor,
        "v_scale": v_scale if v_scale_tensor is None else v_scale_tensor,
    }
    (k_scale, k_scale_tensor), (v_scale, v_scale_tensor) = resolve_scales(_MAPPING, scales, append_key.device)
    get_page_nvfp4_module(backend_of(append_key)).nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
        append_key,
        append_value,
        slot_mapping,
        cache,
        value_cache,
        sf,
        value_sf,
        k_scale,
        v_scale,
        k_scale_tensor,
        v_scale_tensor,
        is_hnd,
    )


def _number_or_tensor(name: str, scale: Scale) -> tuple[float, Optional[torch.Tensor]]:
    """Return a scale as (number, tensor). The op validates the values, which a compiled graph does not know here."""
    if isinstance(scale, torch.Tensor):
        return 1.0, check_tensor(_MAPPING, name, scale)
    return check_number(_MAPPING, name, float(scale)), None


@supported_compute_capability([CPU, *AMPERE_ON])
def _check_device(append_key: torch.Tensor, *args: object, **kwargs: object) -> bool:
    return True  # the launcher checks the rest


@flashinfer_api(trace=nvfp4_quantize_append_paged_kv_cache_trace)
@backend_requirement(backend_checks={}, common_check=_check_device)
def nvfp4_quantize_append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: PagedCache,
    kv_cache_sf: PagedCache,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    k_scale: float,
    v_scale: float,
    kv_layout: str = "NHD",
) -> None:
    r"""Quantise keys and values to NVFP4 and write them into their pages.

    Each 16 elements of a head share ``sf = e4m3(max|x| / (6 * scale))`` and become ``e2m1(x / (sf * scale))``, both
    rounded to nearest even; all zero where ``sf`` is. Compute capability 8.0 on, or CPU.

    Parameters
    ----------
    append_key, append_value : torch.Tensor
        ``(nnz, num_kv_heads, head_dim)`` float16 or bfloat16; ``head_dim`` is a multiple of 16.
    paged_kv_cache : Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]
        uint8, in the forms of :func:`append_paged_kv_cache`, with ``head_dim / 2`` bytes per head: two codes a byte,
        the low nibble first.
    kv_cache_sf : Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]
        float8_e4m3fn, in the same forms, with ``head_dim / 16`` scales per head.
    k_scale, v_scale : float
        Global scales of keys and values, positive and finite: ``x`` is about ``code * sf * scale``.
    batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len, kv_layout
        As in :func:`append_paged_kv_cache`, rows without a slot included.

    Examples
    --------
    >>> key, value = torch.randn(2, 3, 2, 64).bfloat16()
    >>> pages = tuple(torch.zeros(1, 16, 2, 32, dtype=torch.uint8) for _ in "kv")
    >>> scales = tuple(torch.zeros(1, 16, 2, 4, dtype=torch.float8_e4m3fn) for _ in "kv")
    >>> request, slot = torch.zeros(3).int(), torch.arange(3).int()
    >>> indices, indptr, last = torch.tensor([0]).int(), torch.tensor([0, 1]).int(), torch.tensor([3]).int()
    >>> flashinfer.nvfp4_quantize_append_paged_kv_cache(
    ...     key, value, request, slot, pages, scales, indices, indptr, last, 1.0, 1.0
    ... )
    """
    cache, value_cache = halves(_TABLE, "paged_kv_cache", paged_kv_cache)
    sf, value_sf = halves(_TABLE, "kv_cache_sf", kv_cache_sf)
    _append(
        append_key,
        append_value,
        batch_indices,
        positions,
        cache,
        value_cache,
        sf,
        value_sf,
        kv_indices,
        kv_indptr,
        check_number(_TABLE, "k_scale", float(k_scale)),
        check_number(_TABLE, "v_scale", float(v_scale)),
        is_hnd(_TABLE, kv_layout),
    )


@flashinfer_api(trace=nvfp4_quantize_append_paged_kv_cache_with_slot_mapping_trace)
@backend_requirement(backend_checks={}, common_check=_check_device)
def nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    slot_mapping: torch.Tensor,
    paged_kv_cache: PagedCache,
    kv_cache_sf: PagedCache,
    k_scale: Scale,
    v_scale: Scale,
    kv_layout: str = "NHD",
) -> None:
    r"""Quantise keys and values to NVFP4 and write each row to the slot that is given for it.

    The format is that of :func:`nvfp4_quantize_append_paged_kv_cache`, as are the parameters not named here.

    Parameters
    ----------
    append_key, append_value : torch.Tensor
        At least as many rows as ``slot_mapping`` has entries; further ones are ignored.
    slot_mapping : torch.Tensor
        ``(nnz,)`` int32 or int64: ``page * page_size + entry``. Rows with a slot outside of the cache, such as -1, are
        skipped.
    k_scale, v_scale : Union[float, torch.Tensor]
        Positive and finite numbers, or float32 tensors of one element. A tensor on the GPU of the rows is read by the
        host the first time and after each write to it, which waits for the GPU; a bad value is refused. The kernel
        reads it too, so that a captured graph follows it, and ends the launch with a CUDA error where the value is bad.
        While the current stream is captured, scales must be such tensors: a number would be frozen in the graph.

    Examples
    --------
    >>> key, value = torch.randn(2, 3, 2, 64).bfloat16()
    >>> pages = tuple(torch.zeros(1, 16, 2, 32, dtype=torch.uint8) for _ in "kv")
    >>> scales = tuple(torch.zeros(1, 16, 2, 4, dtype=torch.float8_e4m3fn) for _ in "kv")
    >>> flashinfer.page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
    ...     key, value, torch.tensor([5, 6, 7]), pages, scales, 1.0, 1.0
    ... )
    >>> pages[0][0, :5].count_nonzero().item()  # slots before the first are as they were
    0
    """
    cache, value_cache = halves(_MAPPING, "paged_kv_cache", paged_kv_cache)
    sf, value_sf = halves(_MAPPING, "kv_cache_sf", kv_cache_sf)
    k_number, k_tensor = _number_or_tensor("k_scale", k_scale)
    v_number, v_tensor = _number_or_tensor("v_scale", v_scale)
    _append_mapped(
        append_key,
        append_value,
        slot_mapping,
        cache,
        value_cache,
        sf,
        value_sf,
        k_number,
        v_number,
        k_tensor,
        v_tensor,
        is_hnd(_MAPPING, kv_layout),
    )
