# SPDX-License-Identifier: Apache-2.0
"""NVFP4 key-value caches back to 16 bits: e2m1 values, an e4m3 scale for 16 of them, one global scale."""

from __future__ import annotations

from typing import Union

import torch

from .._runtime.dispatch import backend_of
from .._runtime.errors import ArgumentError
from .._runtime.explain_error import explain_type_errors
from .._runtime.torch_ops import register_custom_op
from ..api_logging import flashinfer_api
from ..trace.templates.quantization import nvfp4_kv_dequantize_paged_trace, nvfp4_kv_dequantize_trace
from .modules import get_nvfp4_kv_module

KVPair = Union[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]


@register_custom_op("flashinfer::nvfp4_kv_dequantize", mutates_args=("out",))
def _nvfp4_kv_dequantize(
    out: torch.Tensor, fp4_data: torch.Tensor, block_scales: torch.Tensor, global_scale: torch.Tensor
) -> None:
    get_nvfp4_kv_module(backend_of(fp4_data)).nvfp4_kv_dequantize(out, fp4_data, block_scales, global_scale)


@register_custom_op("flashinfer::nvfp4_kv_dequantize_paged", mutates_args=("output_k", "output_v"))
def _nvfp4_kv_dequantize_paged(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_sf: torch.Tensor,
    v_sf: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    output_k: torch.Tensor,
    output_v: torch.Tensor,
    is_hnd: bool,
) -> None:
    get_nvfp4_kv_module(backend_of(k_cache)).nvfp4_kv_dequantize_paged(
        *(k_cache, v_cache, k_sf, v_sf, block_tables, seq_lens, k_scale, v_scale, output_k, output_v, is_hnd)
    )


@flashinfer_api(trace=nvfp4_kv_dequantize_trace)
@explain_type_errors
def nvfp4_kv_dequantize(
    fp4_data: torch.Tensor,
    block_scales: torch.Tensor,
    global_scale: torch.Tensor,
    output_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    r"""NVFP4 to 16 bits: ``e2m1 * scale * global_scale``, in float32 from left to right, rounded once.

    Parameters
    ----------
    fp4_data : torch.Tensor
        ``(m, k / 2)`` uint8 on a CPU or CUDA device, the even element in the low nibble; ``k`` a multiple of 16.
    block_scales : torch.Tensor
        ``(m, k / 16)`` float8_e4m3fn, or the same bytes as uint8.
    global_scale : torch.Tensor
        One float32 element on the same device.
    output_dtype : torch.dtype
        bfloat16 or float16.

    Returns
    -------
    torch.Tensor
        ``(m, k)`` of ``output_dtype``.

    Examples
    --------
    >>> codes = torch.full((1, 8), 0x22, dtype=torch.uint8)  # sixteen codes of 1.0
    >>> scales = torch.tensor([[2.0]]).to(torch.float8_e4m3fn)
    >>> flashinfer.nvfp4_kv_dequantize(codes, scales, torch.tensor([0.5]))[0, :3]
    tensor([1., 1., 1.], dtype=torch.bfloat16)
    """
    op = "nvfp4_kv_dequantize"
    if fp4_data.ndim != 2:
        raise ArgumentError(f"{op}: fp4_data must have 2 dimensions, got {fp4_data.ndim}")
    if output_dtype not in (torch.bfloat16, torch.float16):
        raise ArgumentError(f"{op}: output_dtype must be torch.bfloat16 or torch.float16, got {output_dtype}")
    rows, half = fp4_data.shape
    out = torch.empty((rows, half * 2), dtype=output_dtype, device=fp4_data.device)
    _nvfp4_kv_dequantize(out, fp4_data.contiguous(), block_scales.contiguous(), global_scale)
    return out


def _key_and_value(op: str, name: str, pair: KVPair) -> tuple[torch.Tensor, torch.Tensor]:
    """Split a cache into keys and values: a tuple, or a tensor whose second dimension has size 2."""
    if isinstance(pair, torch.Tensor):
        if pair.ndim != 5 or pair.shape[1] != 2:
            raise ArgumentError(
                f"{op}: {name} must have shape (pages, 2, ., ., .) or be a tuple, got {tuple(pair.shape)}"
            )
        return pair[:, 0], pair[:, 1]
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise ArgumentError(f"{op}: {name} must be a tensor or a tuple of two, got {type(pair).__name__}")
    return pair[0], pair[1]


@flashinfer_api(trace=nvfp4_kv_dequantize_paged_trace)
@explain_type_errors
def nvfp4_kv_dequantize_paged(
    paged_kv_cache: KVPair,
    kv_cache_sf: KVPair,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    output_k: torch.Tensor,
    output_v: torch.Tensor,
    kv_layout: str = "NHD",
) -> None:
    r"""Gather a paged NVFP4 cache into dense 16-bit keys and values.

    ``output[b, s] = cache[block_tables[b, s // page_size], s % page_size]`` for ``s < seq_lens[b]``; what lies beyond
    is left as it is.

    Parameters
    ----------
    paged_kv_cache : Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]
        Keys and values as a tuple, or stacked ``(pages, 2, ...)``. Each uint8 ``(pages, page_size, heads, d / 2)`` for
        NHD, ``(pages, heads, page_size, d / 2)`` for HND, with any strides but the last, which is 1. The head
        dimensions of keys and values may differ.
    kv_cache_sf : Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]
        Their scales in the same form, last dimension ``d / 16``: float8_e4m3fn, or the same bytes as uint8.
    block_tables : torch.Tensor
        ``(batch, columns)`` int32 or int64: pages of each request, enough columns for ``output_k.shape[1]`` tokens.
        Only entries of tokens below ``seq_lens`` are read. One that is no page of the cache is an error on the CPU; on
        CUDA its tokens are left out.
    seq_lens : torch.Tensor
        ``(batch,)`` int32.
    k_scale, v_scale : torch.Tensor
        Global scales, one float32 element each, on the device of the cache.
    output_k, output_v : torch.Tensor
        ``(batch, seq, heads, d)`` float16 or bfloat16, written; may be empty.
    kv_layout : str
        ``"NHD"`` or ``"HND"``.

    Examples
    --------
    >>> pages = tuple(torch.full((1, 16, 2, 32), 0x22, dtype=torch.uint8) for _ in "kv")
    >>> scales = tuple(torch.ones(1, 16, 2, 4).to(torch.float8_e4m3fn) for _ in "kv")
    >>> k, v = torch.zeros(2, 1, 16, 2, 64).bfloat16()
    >>> table, lengths, one = torch.tensor([[0]]).int(), torch.tensor([3]).int(), torch.ones(1)
    >>> flashinfer.quantization.nvfp4_kv_dequantize_paged(pages, scales, table, lengths, one, one, k, v)
    >>> k[0, :4, 0, 0]
    tensor([1., 1., 1., 0.], dtype=torch.bfloat16)
    """
    op = "nvfp4_kv_dequantize_paged"
    if kv_layout not in ("NHD", "HND"):
        raise ArgumentError(f"{op}: kv_layout must be 'NHD' or 'HND', got {kv_layout!r}")
    for scale in (k_scale, v_scale):
        if not isinstance(scale, torch.Tensor) or scale.numel() != 1:
            raise ArgumentError(f"{op}: k_scale and v_scale must be scalar tensors of float32, got others")
    k_cache, v_cache = _key_and_value(op, "paged_kv_cache", paged_kv_cache)
    k_sf, v_sf = _key_and_value(op, "kv_cache_sf", kv_cache_sf)
    _nvfp4_kv_dequantize_paged(
        *(k_cache, v_cache, k_sf, v_sf, block_tables, seq_lens, k_scale, v_scale, output_k, output_v),
        kv_layout == "HND",
    )
