# SPDX-License-Identifier: Apache-2.0
"""Inputs that the norm tests share."""

from __future__ import annotations

import torch

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]

# rows x hidden: no elements, one element, sizes that no vector width divides, one past a tile, one warp, one block,
# more rows than threads, rows too long for one pass of a block and for the L1 cache.
SHAPES = [
    (0, 128),
    (1, 1),
    (99, 1),
    (7, 111),
    (99, 128),
    (7, 129),
    (99, 500),
    (1, 1024),
    (7, 3072),
    (99, 4096),
    (1, 8192),
    (7, 16384),
    (1, 65536 + 8),
]
