# SPDX-License-Identifier: Apache-2.0
"""Ulysses: sequence parts for heads and back, bit for bit, and the choice of a backend from what ranks probed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashinfer.comm import (
    UlyssesBackendError,
    UlyssesCommunicator,
    UlyssesRankTopology,
    decide_ulysses_backend,
)


def exchange(comm):
    """Swap, attend to nothing, swap back; in chunks of heads too."""
    rank, world, g = comm.Get_rank(), comm.Get_size(), torch.Generator().manual_seed(3)
    for dtype in (torch.bfloat16, torch.float32):
        whole = torch.randn(2, 3 * world, 2 * world, 8, generator=g).to(dtype)
        part = whole[:, 3 * rank : 3 * rank + 3].contiguous()
        with UlyssesCommunicator(max_elems=part.numel(), dtype=dtype, device="cpu") as ulysses:
            heads = ulysses.scatter_heads(part)
            assert torch.equal(heads, whole[:, :, 2 * rank : 2 * rank + 2])
            out = torch.empty_like(part)
            assert ulysses.gather_heads(heads, out=out) is out and torch.equal(out, part)
            chunk = ulysses.scatter_qkv_head_chunk(part, part * 2, part * 3, head_offset=1, head_count=1)
            one = whole[:, :, 2 * rank + 1 : 2 * rank + 2]
            assert torch.equal(chunk, torch.cat([one, one * 2, one * 3], -1))
            band = torch.zeros_like(part)
            for offset in (0, 1):
                some = heads[:, :, offset : offset + 1].contiguous()
                ulysses.gather_output_head_chunk(some, local_heads=2, head_offset=offset, out=band)
            assert torch.equal(band, part)
            assert ulysses.create_workspace(max_elems=8).send_buffer.shape == (8,)
            for text, wrong in (
                ("4-D", part[0]),
                ("dtype", part.half()),
                ("contiguous", part.transpose(1, 2)),
                ("capacity max_elems", part.repeat(2, 1, 1, 1)),
                ("divisible", part[:, :, : 2 * world - 1].contiguous()),
            ):
                with pytest.raises(ValueError, match=text):
                    ulysses.scatter_heads(wrong)
            with pytest.raises(TypeError, match=r"torch\.Tensor"):
                ulysses.scatter_heads([1])
        with pytest.raises(RuntimeError, match="use-after-close"):
            ulysses.scatter_heads(part)


@pytest.mark.parametrize("size", [2, 4])
def test_processes(ranks, size):
    ranks(size).run(exchange)


def wrong(comm, options):
    odd = comm.Get_rank() == 1
    UlyssesCommunicator(**{"max_elems": 8, "dtype": torch.float16, "device": "cpu", **(options if odd else {})})


@pytest.mark.parametrize(
    "options, text",
    [
        ({"max_elems": 0}, "max_elems must be a positive int"),
        ({"max_elems": True}, "max_elems must be a positive int"),
        ({"max_elems": 2**31}, "int32"),
        ({"max_elems": 16}, "inconsistent across ranks"),
        ({"dtype": torch.int32}, "dtype must be"),
        ({"device": "cuda:256"}, "device count"),
        ({"device": 256}, "device count"),
    ],
)
def test_a_wrong_argument_on_one_rank_fails_on_all(ranks, options, text):
    for failure in ranks(2).fail(wrong, options):
        assert "ValueError" in failure.classes and text in failure.text


def gpus(count):
    buses = [f"0000:{i:02x}:00.0" for i in range(count)]
    return [
        UlyssesRankTopology(i, "host", i, f"GPU-{i}", bus, dict.fromkeys(buses, True), dict.fromkeys(buses, True))
        for i, bus in enumerate(buses)
    ]


def test_backends():
    four = gpus(4)
    assert decide_ulysses_backend("auto", four).backend == "nvlink"
    assert decide_ulysses_backend("nccl", []).reason is None
    with pytest.raises(ValueError, match="backend must be one of"):
        decide_ulysses_backend("ipc", four)
    bus = four[2].pci_bus_id
    no_access, no_link = {**four[0].peer_p2p, bus: False}, {**four[0].peer_nvlink, bus: False}
    for text, changed in (
        ("ranks must be 0 to 3", [*four[:3], replace(four[3], rank=2)]),
        ("could not probe its GPU: lost", [*four[:3], replace(four[3], probe_error="lost")]),
        ("world size 3", four[:3]),
        ("several hosts", [*four[:3], replace(four[3], hostname="other")]),
        ("unknown identity", [*four[:3], replace(four[3], device_uuid="")]),
        ("distinct physical GPUs", [*four[:3], replace(four[3], device_uuid="GPU-0")]),
        ("rank 0 and rank 2: broken", [replace(four[0], pair_errors={bus: "broken"}), *four[1:]]),
        ("rank 0 and rank 2 have no peer-to-peer", [replace(four[0], peer_p2p=no_access), *four[1:]]),
        ("rank 0 and rank 2 have no NVLink", [replace(four[0], peer_nvlink=no_link), *four[1:]]),
    ):
        decision = decide_ulysses_backend("auto", changed)
        assert decision.backend == "nccl" and text in decision.reason
        with pytest.raises(UlyssesBackendError, match="backend='nvlink' requested but"):
            decide_ulysses_backend("nvlink", changed)
