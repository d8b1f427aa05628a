# SPDX-License-Identifier: Apache-2.0
"""Head dimensions that differ for keys and values, with few and many rows, on a GPU: both kernels serve each pair."""

from __future__ import annotations

import pytest
import torch

from .inputs import Batch
from .reference import Attention
from .test_batch_decode import close, workspace
from .test_batch_prefill import BatchPrefillWithPagedKVCacheWrapper

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
#: More chunks of keys than of values and the reverse; powers of two, multiples of 16, beyond 256.
PAIRS = [(448, 256), (320, 256), (512, 128), (288, 64), (256, 192), (256, 448), (192, 128), (64, 256), (80, 48)]


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_pairs(pair, dtype):
    qk, vo = pair
    for heads in ((2, 2), (8, 2), (10, 1)):
        for rows in (1, 3, 8, 40):
            batch = Batch([rows] * 2, [65] * 2, *heads, qk, vo, dtype=dtype, device="cuda")
            pages = batch.pages(16)
            wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace("cuda"))
            wrapper.plan(batch.qo_indptr, *pages.table, *heads, qk, 16, head_dim_vo=vo, causal=True, q_data_type=dtype)
            result = wrapper.run(batch.q, batch.cache(pages), return_lse=True)
            close(result, batch.expected(Attention(causal=True)), 2e-3 if dtype == torch.float16 else 2e-2)
