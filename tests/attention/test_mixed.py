# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode requests in one batch, fused into one launch on a GPU whose SMs can hold blocks of both kinds."""

from __future__ import annotations

import pytest
import torch

import flashinfer

from ..tensors import randn
from .inputs import Pages, int32, offsets

HEADS, PAGE = (32, 8), 16
#: Rows and keys of each request. Long ones have 100 tiles of 128 rows for each of 8 heads.
LONG = [(1500, 1500), (1700, 2000)]
SHORT = [(1, 700), (1, 3000), (2, 64), (1, 0), (3, 129)] * 8


class Mixed:
    def __init__(self, device, dim, dtype, backend="auto"):
        self.device, self.dim, self.dtype, self.backend = device, dim, dtype, backend
        self.requests = [*SHORT[:20], *LONG, *SHORT[20:]]
        self.pages = Pages([keys for _, keys in self.requests], PAGE, device)
        shape = (self.pages.num_pages, 2, PAGE, HEADS[1], dim)
        self.cache = randn(*shape, dtype=dtype, device=device)
        self.at = offsets([rows for rows, _ in self.requests])
        self.q = randn(self.at[-1], HEADS[0], dim, dtype=dtype, device=device)

    def run(self, wanted, **plan):
        """Return the results of the requests with these indices, concatenated, and the wrapper."""
        indptr = [int(x) for x in self.pages.indptr]
        pages = [self.pages.indices[indptr[i] : indptr[i + 1]] for i in wanted]
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            torch.empty(128 << 20, dtype=torch.uint8, device=self.device), backend=self.backend
        )
        wrapper.plan(
            int32(offsets([self.requests[i][0] for i in wanted]), self.device),
            int32(offsets([len(x) for x in pages]), self.device),
            torch.cat(pages),
            self.pages.last_page_len[torch.tensor(wanted, device=self.device)],
            *HEADS,
            self.dim,
            PAGE,
            causal=True,
            q_data_type=self.dtype,
            **plan,
        )
        q = torch.cat([self.q[self.at[i] : self.at[i + 1]] for i in wanted])
        return wrapper.run(q, self.cache, return_lse=True), wrapper, q


@pytest.mark.parametrize("backend", ["fa2", "fa3"])
@pytest.mark.parametrize("dim, dtype", [(128, torch.bfloat16), (64, torch.float16)])
def test_both_kinds_in_one_batch(device, dim, dtype, backend):
    if device == "cpu":
        pytest.skip("needs a CUDA device")
    is_hopper = torch.cuda.get_device_capability() == (9, 0)
    if backend == "fa3" and not is_hopper:
        pytest.skip("needs a GPU of capability 9.0")
    mixed = Mixed(device, dim, dtype, backend)
    every = range(len(mixed.requests))
    (o, lse), wrapper, q = mixed.run(every)
    if is_hopper and (backend == "fa2" or dim == 128):
        # A fused launch is planned for one decode block beside a prefill block, or for two on some SMs.
        decode_blocks, sms = wrapper._plan_info[8], torch.cuda.get_device_properties(0).multi_processor_count
        assert decode_blocks <= (sms if backend == "fa2" else 2 * (sms - 1))
    again = wrapper.run(q, mixed.cache, return_lse=True)
    assert torch.equal(o, again[0]) and torch.equal(lse, again[1])
    is_long = [rows > 16 for rows, _ in mixed.requests]
    for kind in (True, False):
        wanted = [i for i in every if is_long[i] is kind]
        (expected, expected_lse), _, _ = mixed.run(wanted)
        rows = torch.cat([torch.arange(mixed.at[i], mixed.at[i + 1]) for i in wanted]).to(device)
        torch.testing.assert_close(o[rows], expected, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(lse[rows], expected_lse, rtol=1e-3, atol=1e-3)


def test_splits_of_a_request_ignore_the_others(device):
    """Check that with fixed splits the result of a request is bit-identical, whatever else is launched."""
    if device == "cpu":
        pytest.skip("needs a CUDA device")
    mixed = Mixed(device, 128, torch.bfloat16)
    (o, lse), _, _ = mixed.run(range(len(mixed.requests)), fixed_split_size=32)
    for request in (1, 20, 30):
        (alone, alone_lse), _, _ = mixed.run([request], fixed_split_size=32)
        rows = slice(mixed.at[request], mixed.at[request + 1])
        assert torch.equal(o[rows], alone) and torch.equal(lse[rows], alone_lse)
