# SPDX-License-Identifier: Apache-2.0
"""Prompts in contiguous tensors, as fmha_v2 takes them."""

from __future__ import annotations

import torch

from flashinfer import trtllm_fmha_v2_prefill

from .inputs import Batch, int32

F16, FP8 = torch.float16, torch.float8_e4m3fn
QO_LENS, KV_LENS = [17, 1, 40, 3], [33, 9, 97, 3]
SCALE = 64**-0.5
PAGE = 16


def workspace(device: str) -> torch.Tensor:
    return torch.empty(32 << 20, dtype=torch.uint8, device=device)


def prefill(batch: Batch, qkv, layout: str, scale: float = SCALE, out_scale: float = 1.0, **options):
    lens = int32(batch.kv_lens, batch.device)
    sizes = (max(batch.qo_lens), max(batch.kv_lens), scale, out_scale, len(batch.qo_lens))
    return trtllm_fmha_v2_prefill(
        qkv, layout, workspace(batch.device), lens, *sizes, batch.qo_indptr, batch.kv_indptr, **options
    )


def contiguous(batch: Batch):
    return batch.q, torch.stack([batch.k, batch.v], dim=1)
