# SPDX-License-Identifier: Apache-2.0
"""vLLM's custom all-reduce: ranks as processes over shared memory, and as threads of one process."""

from __future__ import annotations

import ctypes
import time

import pytest
import torch

from flashinfer import comm as api
from flashinfer.comm import vllm_ar
from flashinfer.comm.local_ranks import call_on_ranks

from .ranks import time_limit

SIZES = ((torch.bfloat16, 8), (torch.float16, 1000), (torch.float32, 4), (torch.bfloat16, 40000))
CAPACITY = 1 << 18


def buffers(comm):
    """Return handle, shared memory of heads and of inputs, and what gives all of it back."""
    meta, data = (api.create_shared_buffer(size, comm, device="cpu") for size in (api.vllm_meta_size(), CAPACITY))
    fa = api.vllm_init_custom_ar(meta, torch.zeros(1024, dtype=torch.uint8), comm.Get_rank(), True)
    api.vllm_register_buffer(fa, data)

    def end():
        comm.barrier()
        api.vllm_dispose(fa)
        for one in (meta, data):
            api.free_shared_buffer(one)

    return fa, data[comm.Get_rank()], meta, end


def sums(comm):
    rank, world = comm.Get_rank(), comm.Get_size()
    fa, own, meta, end = buffers(comm)
    reference = api.vllm_all_reduce._trace_template.reference
    if rank == 0:
        for head in meta:  # the number of the call, which wraps: all ranks have done 2^32 - 2 calls
            ctypes.c_uint32.from_address(head).value = 2**32 - 2
            for peer in range(2 * world):
                ctypes.c_uint32.from_address(head + 16 + 64 * (peer // world) + 4 * (peer % world)).value = 2**32 - 2
    comm.barrier()
    found = []
    for repeat in range(3):
        for dtype, size in SIZES:
            parts = [
                torch.randn(size, generator=torch.Generator().manual_seed(size + r)).to(dtype) for r in range(world)
            ]
            out = torch.full((size,), 7.0, dtype=dtype)
            api.vllm_all_reduce(fa, parts[rank], out, own, CAPACITY, 36)
            assert torch.equal(out, reference(torch.stack(parts))), (repeat, dtype, size)
            found.append(out.double().sum().item())
    # An input that lies in registered memory is summed where it is.
    inside = torch.frombuffer((ctypes.c_float * 64).from_address(own), dtype=torch.float32).fill_(rank + 1.0)
    out = torch.empty(64)
    api.vllm_all_reduce(fa, inside, out, 0, 0, 36)
    assert (out == world * (world + 1) / 2).all()
    assert api.vllm_get_graph_buffer_ipc_meta(fa) == ([], [])
    api.vllm_register_graph_buffers(fa, [[]] * world, [[]] * world)
    end()
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_processes(ranks, size):
    outcomes = ranks(size).run(sums)
    assert all(one == outcomes[0] for one in outcomes)


def test_threads():
    call_on_ranks(2, sums)


def absent(comm):
    with time_limit(0.3):
        fa, own, _, end = buffers(comm)
    texts, start = [], time.monotonic()
    if comm.Get_rank() == 0:
        for _ in range(2):
            try:
                api.vllm_all_reduce(fa, torch.ones(8), torch.empty(8), own, CAPACITY, 36)
            except api.CommTimeoutError as error:
                texts.append(str(error))
    took = time.monotonic() - start
    end()
    return took, texts


def test_a_rank_that_does_not_come(ranks):
    (took, texts), _ = ranks(2).run(absent)
    assert took < 3 and len(texts) == 2 and texts[0] == texts[1]
    assert "rank 1 must enter call 1 within 0.3 s" in texts[0]


def different(comm):
    """Let rank 1 sum another number of elements, then another type; nothing is written, and the next call is right."""
    fa, own, _, end = buffers(comm)
    texts = []
    for x in (
        torch.ones(8 + 8 * comm.Get_rank()),
        torch.ones(8, dtype=(torch.float16, torch.bfloat16)[comm.Get_rank()]),
    ):
        out = torch.full_like(x, 7)
        with pytest.raises(ValueError, match="as many elements of one dtype on all ranks") as found:
            api.vllm_all_reduce(fa, x, out, own, CAPACITY, 36)
        assert (out == 7).all()
        texts.append(str(found.value))
    out = torch.empty(8)
    api.vllm_all_reduce(fa, torch.ones(8), out, own, CAPACITY, 36)
    end()
    return texts, out[0].item()


def test_ranks_that_differ(ranks):
    for rank, (texts, total) in enumerate(ranks(2).run(different)):
        assert total == 2
        assert all(f"rank {1 - rank} others, in call {i + 1}" in text for i, text in enumerate(texts))


def test_wrong_calls():
    def work(comm):
        fa, own, _, end = buffers(comm)
        x, out = torch.ones(8), torch.empty(8)
        for change, text in (
            ({"num_ctas": 37}, "num_ctas must be from 1 to 36, got 37"),
            ({"fa": 0}, "fa must be a handle of vllm_init_custom_ar"),
            ({"reg_buffer_sz_bytes": 16}, r"inp must fit in reg_buffer \(16 bytes, reg_buffer_sz_bytes\), got 32"),
            ({"reg_buffer": 0, "reg_buffer_sz_bytes": 0}, "buffer address 0x[0-9a-f]+ is not registered"),
            ({"inp": x[:7], "out": out[:7]}, "inp must have a multiple of 16 bytes, got 28"),
            ({"inp": x.double(), "out": out.double()}, "inp must be float16 or bfloat16 or float32"),
            ({"out": out[:4]}, "out must have 8 elements"),
            ({"out": x}, "out must not share memory with inp"),
        ):
            given = {"fa": fa, "inp": x, "out": out, "reg_buffer": own, "reg_buffer_sz_bytes": 64, "num_ctas": 8}
            with pytest.raises(ValueError, match=text):
                api.vllm_all_reduce(**{**given, **change})
        with pytest.raises(ValueError, match="fake_ipc_ptrs must be 2 addresses, got 1"):
            api.vllm_register_buffer(fa, [own])
        for _ in range(15):
            api.vllm_register_buffer(fa, [1 << 20, 1 << 20])
        with pytest.raises(RuntimeError, match="rank_data must have 64 bytes for each registered buffer"):
            api.vllm_register_buffer(fa, [1 << 20, 1 << 20])
        end()
        api.vllm_dispose(fa)

    call_on_ranks(2, work)


@pytest.mark.parametrize(
    "ptrs, rank, full, text",
    [
        ([0] * 10, 0, True, "world size > 8 is not supported"),
        ([0] * 3, 0, True, "Odd num gpus is not supported"),
        ([0] * 4, 0, False, "full_nvlink must be True for more than 2 ranks"),
        ([0] * 2, 2, True, r"rank must be in \[0, 2\), got 2"),
    ],
)
def test_wrong_groups(ptrs, rank, full, text):
    with pytest.raises(ValueError, match=text):
        vllm_ar.init_custom_ar(ptrs, torch.zeros(64, dtype=torch.uint8), rank, full)
    with pytest.raises(ValueError, match="rank_data must be contiguous uint8 of 64 bytes or more"):
        vllm_ar.init_custom_ar([0, 0], torch.zeros(64), 0, True)
