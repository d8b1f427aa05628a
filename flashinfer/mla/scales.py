# SPDX-License-Identifier: Apache-2.0
"""Scales of an FP8 latent cache, folded into the queries, the logits and the output."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Optional

import torch

from .._runtime.errors import ArgumentError

__all__ = ["LatentScales"]

_FP8 = torch.float8_e4m3fn
_BLOCK = 128  # columns of ckv per scale; each token has one scale per block of columns


def _positive(op: str, name: str, scale: object) -> float:
    if not isinstance(scale, numbers.Real) or not math.isfinite(scale) or scale <= 0:
        raise ArgumentError(f"{op}: {name} must be a finite number above 0 (the cache is FP8), got {scale!r}")
    return float(scale)


@dataclass(frozen=True)
class LatentScales:
    """Scales of the caches: ``ckv`` and ``kpe`` multiply a whole cache; with ``per_token`` scales, ``ckv`` is 1."""

    ckv: float
    kpe: float
    per_token: Optional[torch.Tensor]

    @staticmethod
    def of(
        op: str,
        ckv_cache: torch.Tensor,
        ckv_scale: Optional[float],
        ckv_scale_arr: Optional[torch.Tensor],
        kpe_scale: Optional[float],
    ) -> Optional[LatentScales]:
        """Validate the scales of a call; return None for a cache that is not FP8."""
        if ckv_cache.dtype != _FP8:
            for name, scale in (("ckv_scale", ckv_scale), ("ckv_scale_arr", ckv_scale_arr), ("kpe_scale", kpe_scale)):
                if scale is not None:
                    raise ArgumentError(
                        f"{op}: scales are only valid when kv_data_type is FP8. {name} must be None (the cache is "
                        f"{ckv_cache.dtype}), got a value"
                    )
            return None
        if (ckv_scale is None) == (ckv_scale_arr is None):
            raise ArgumentError(
                f"{op}: Exactly one of ckv_scale or ckv_scale_arr must be given for an FP8 cache, got both or neither"
            )
        if kpe_scale is None:
            raise ArgumentError(f"{op}: kpe_scale is required when kv_data_type is FP8. It must be a number, got None")
        kpe = _positive(op, "kpe_scale", kpe_scale)
        if ckv_scale_arr is None:
            return LatentScales(_positive(op, "ckv_scale", ckv_scale), kpe, None)
        shape = (*ckv_cache.shape[:-1], ckv_cache.shape[-1] // _BLOCK)
        if tuple(ckv_scale_arr.shape) != shape:
            raise ArgumentError(
                f"{op}: Invalid shape of ckv_scale_arr: must be {shape}, got {tuple(ckv_scale_arr.shape)}"
            )
        if ckv_scale_arr.dtype != torch.float32 or not ckv_scale_arr.is_contiguous():
            raise ArgumentError(f"{op}: ckv_scale_arr must be contiguous float32, got {ckv_scale_arr.dtype}")
        if ckv_scale_arr.device != ckv_cache.device:
            raise ArgumentError(f"{op}: ckv_scale_arr must be on {ckv_cache.device}, got {ckv_scale_arr.device}")
        return LatentScales(1.0, kpe, ckv_scale_arr)

    def fold(self, q_pe: torch.Tensor, sm_scale: float, in_kernel: bool) -> tuple[torch.Tensor, float]:
        """Fold the scales into q_pe and ``sm_scale``, so that the stored FP8 values give the right logits.

        ``sm_scale`` is multiplied by the scale of ckv, without rounding. ``q_pe`` is multiplied by ``kpe / ckv``, and
        rounded, only if the two scales differ. With scales of tokens the kernel multiplies ckv by them
        (``in_kernel``), or :meth:`gather` multiplies both caches.
        """
        if self.per_token is not None and not in_kernel:
            return q_pe, sm_scale
        if self.kpe != self.ckv and q_pe.numel():
            q_pe = q_pe * (self.kpe / self.ckv)
        return q_pe, sm_scale * self.ckv

    def gather(
        self, ckv_cache: torch.Tensor, kpe_cache: torch.Tensor, indices: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the pages in ``indices`` as new contiguous caches, multiplied by their scales.

        Entries of ``indices`` after the last request may have any value: they are clamped to a valid page, and the
        result is not used.
        """
        assert self.per_token is not None
        pages = indices.long().clamp(0, max(ckv_cache.shape[0] - 1, 0))
        scale = self.per_token[pages].repeat_interleave(_BLOCK, dim=-1)
        return (ckv_cache[pages].float() * scale).to(dtype), (kpe_cache[pages].float() * self.kpe).to(dtype)
