# SPDX-License-Identifier: Apache-2.0
"""Append compressed keys to a paged cache in NVFP4, and their rotary parts in e4m3."""

from __future__ import annotations

from typing import Union

import torch

from .._runtime.errors import ArgumentError
from .._runtime.explain_error import explain_type_errors
from ..api_logging import flashinfer_api
from ..trace.templates.page_nvfp4_mla import nvfp4_quantize_append_paged_mla_kv_cache_trace
from .append import _append_paged_mla_kv_cache

__all__ = ["nvfp4_quantize_append_paged_mla_kv_cache"]

_OP = "nvfp4_quantize_append_paged_mla_kv_cache"
_BLOCK, _E4M3_MAX, _E2M1_MAX = 16, 448.0, 6.0
_CKV, _KPE = 512, 64

Scale = Union[float, torch.Tensor]


def _factor(name: str, scale: Scale, like: torch.Tensor) -> torch.Tensor:
    made = torch.as_tensor(scale, dtype=torch.float32, device=like.device)
    if made.numel() != 1:
        raise ArgumentError(f"{_OP}: {name} must be a number or a tensor of one element, got {tuple(made.shape)}")
    return made.reshape(())


def _e2m1_codes(magnitude: torch.Tensor) -> torch.Tensor:
    """Return the codes of magnitudes; ties go to the even code. Steps are 1/2 up to 2, 1 up to 4, 2 up to 6."""
    small, middle, large = (magnitude * 2).round(), magnitude.round() + 2, (magnitude / 2).round() + 4
    return torch.where(magnitude < 2, small, torch.where(magnitude < 4, middle, large)).clamp(max=7).to(torch.uint8)


def _quantize(rows: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return packed codes, the even column in the low nibble, and e4m3 scales of 16 columns."""
    blocks = rows.float().unflatten(1, (-1, _BLOCK))
    sf = (blocks.abs().amax(dim=2) / (_E2M1_MAX * scale)).clamp(max=_E4M3_MAX).to(torch.float8_e4m3fn)
    step = sf.float().unsqueeze(2)
    codes = _e2m1_codes(blocks.abs() / (step * scale)) | (torch.signbit(blocks).to(torch.uint8) << 3)
    codes = torch.where(step == 0, torch.zeros_like(codes), codes).flatten(1)
    return codes[:, ::2] | (codes[:, 1::2] << 4), sf


def _check(name: str, x: torch.Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> torch.Tensor:
    """Return a cache as bytes."""
    if x.dtype not in dtypes:
        raise ArgumentError(f"{_OP}: {name} must be {' or '.join(map(str, dtypes))}, got {x.dtype}")
    if tuple(x.shape) != shape:
        raise ArgumentError(f"{_OP}: {name} must have shape {shape}, got {tuple(x.shape)}")
    return x.view(torch.uint8)


@flashinfer_api(trace=nvfp4_quantize_append_paged_mla_kv_cache_trace)
@explain_type_errors
def nvfp4_quantize_append_paged_mla_kv_cache(
    append_ckv: torch.Tensor,
    append_kpe: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    ckv_cache: torch.Tensor,
    ckv_sf_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    ckv_scale: Scale,
    kpe_scale: Scale,
) -> None:
    r"""Quantise compressed keys to NVFP4 and rotary parts to e4m3, and write them into their pages.

    Each 16 columns of ``append_ckv`` share ``sf = e4m3(max|x| / (6 * ckv_scale))`` and become
    ``e2m1(x / (sf * ckv_scale))``, both rounded to nearest even; all zero where ``sf`` is. ``append_kpe`` becomes
    ``e4m3(x / kpe_scale)``, saturated. Rounding is done by torch, writing by the kernel of
    :func:`append_paged_mla_kv_cache`.

    Parameters
    ----------
    append_ckv, append_kpe : torch.Tensor
        ``(nnz, 512)`` and ``(nnz, 64)``, one 16-bit dtype or float32.
    batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len
        As in :func:`append_paged_mla_kv_cache`, rows without a slot included.
    ckv_cache : torch.Tensor
        ``(num_pages, page_size, 256)`` uint8, two codes in a byte.
    ckv_sf_cache : torch.Tensor
        ``(num_pages, page_size, 32)`` float8_e4m3fn or its bytes.
    kpe_cache : torch.Tensor
        ``(num_pages, page_size, 64)`` float8_e4m3fn or its bytes.
    ckv_scale, kpe_scale : Union[float, torch.Tensor]
        Numbers, or tensors of one element, by which cached values are multiplied when they are read.

    Examples
    --------
    >>> ckv, kpe = torch.randn(3, 512).bfloat16(), torch.randn(3, 64).bfloat16()
    >>> codes, sf, rope = (torch.zeros(1, 16, n, dtype=torch.uint8) for n in (256, 32, 64))
    >>> request, slot = torch.zeros(3).int(), torch.arange(3).int()
    >>> indices, indptr, last = torch.tensor([0]).int(), torch.tensor([0, 1]).int(), torch.tensor([3]).int()
    >>> flashinfer.page.nvfp4_quantize_append_paged_mla_kv_cache(
    ...     ckv, kpe, request, slot, codes, sf, rope, indices, indptr, last, 1.0, 1.0)
    >>> bool(sf[0, :3].all()), bool(sf[0, 3:].any())
    (True, False)
    """
    for name, x, columns in (("append_ckv", append_ckv, _CKV), ("append_kpe", append_kpe, _KPE)):
        if x.ndim != 2 or x.shape[1] != columns or not x.is_floating_point() or x.itemsize < 2:
            raise ArgumentError(
                f"{_OP}: {name} must be (nnz, {columns}) of a 16-bit or 32-bit float, got {tuple(x.shape)} {x.dtype}"
            )
    if ckv_cache.ndim != 3:
        raise ArgumentError(f"{_OP}: ckv_cache must have 3 dimensions, got shape {tuple(ckv_cache.shape)}")
    pages, bytes_of_e4m3 = tuple(ckv_cache.shape[:2]), (torch.float8_e4m3fn, torch.uint8)
    code_pages = _check("ckv_cache", ckv_cache, (*pages, _CKV // 2), (torch.uint8,))
    sf_pages = _check("ckv_sf_cache", ckv_sf_cache, (*pages, _CKV // _BLOCK), bytes_of_e4m3)
    kpe_pages = _check("kpe_cache", kpe_cache, (*pages, _KPE), bytes_of_e4m3)
    codes, sf = _quantize(append_ckv, _factor("ckv_scale", ckv_scale, append_ckv))
    kpe = append_kpe.float() / _factor("kpe_scale", kpe_scale, append_kpe)
    kpe = kpe.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    where, table = (batch_indices, positions), (kv_indices, kv_indptr)
    _append_paged_mla_kv_cache(codes, sf.view(torch.uint8), *where, code_pages, sf_pages, *table)
    half = _KPE // 2  # the kernel writes two tensors: here the halves of one
    _append_paged_mla_kv_cache(
        kpe[:, :half], kpe[:, half:], *where, kpe_pages[..., :half], kpe_pages[..., half:], *table
    )
