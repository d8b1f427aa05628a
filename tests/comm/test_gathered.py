# SPDX-License-Identifier: Apache-2.0
"""Collectives of torch.distributed with arithmetic around them."""

from __future__ import annotations

import hashlib

import pytest
import torch

from flashinfer.comm import all_gather_matmul, prepare_all_gather_matmul, quantized_all_reduce


def products_and_sums(comm):
    rank, world, group = comm.Get_rank(), comm.Get_size(), torch.distributed.group.WORLD
    g = torch.Generator().manual_seed(2)
    x, w = torch.randn(world, 3, 32, generator=g), torch.randn(32, 5, generator=g)
    found = all_gather_matmul(x[rank], w, group)
    torch.testing.assert_close(found, x.flatten(0, 1) @ w)
    assert torch.equal(prepare_all_gather_matmul(x[rank], w, group, max_rows=3)(x[rank], w), found)
    with pytest.raises(ValueError, match="at most max_rows = 2 rows, got 3"):
        prepare_all_gather_matmul(x[rank], w, group, max_rows=2)
    with pytest.raises(ValueError, match=r"inp must be \(rows, K\) and w \(K, N\)"):
        all_gather_matmul(x[rank], w.T, group)
    parts = torch.randn(world, 7, 130, generator=g).bfloat16()
    out = torch.empty_like(parts[0])
    total = quantized_all_reduce(parts[rank], group, scale_group=64, output=out)
    assert total is out
    wanted = parts.double().sum(0)
    assert (total.double() - wanted).abs().max() < 0.08 * wanted.abs().max()
    assert (total.double() - wanted).norm() < 0.05 * wanted.norm()
    zero = quantized_all_reduce(torch.zeros(3, dtype=torch.bfloat16), group)
    assert torch.equal(zero, torch.zeros(3, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="inp must be bfloat16 and contiguous"):
        quantized_all_reduce(parts[rank].float(), group)
    return hashlib.sha256(total.view(torch.uint8).numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("size", [2, 4])
def test_processes(ranks, size):
    digests = ranks(size).run(products_and_sums)
    assert all(one == digests[0] for one in digests)
