# SPDX-License-Identifier: Apache-2.0
"""Caches of four-bit values."""

from __future__ import annotations

import torch

from .inputs import make_cache

BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn


def make_caches(layout, form, num_pages, page_size, heads, dim, device, pad=0):
    codes = make_cache(layout, form, num_pages, page_size, heads, dim // 2, dtype=torch.uint8, device=device, pad=pad)
    scales = make_cache(layout, form, num_pages, page_size, heads, dim // 16, dtype=E4M3, device=device, pad=pad)
    return codes, scales
