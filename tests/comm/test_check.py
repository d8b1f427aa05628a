# SPDX-License-Identifier: Apache-2.0
"""FLASHINFER_COMM_CHECK: what the ranks ask for is compared on CUDA (the kernel: test_emulated_exchanges.py)."""

from __future__ import annotations

import pytest
import torch

from flashinfer.comm import CommTimeoutError, allreduce_fusion
from flashinfer.comm.local_ranks import call_on_ranks
from flashinfer.comm.reduce import workspace

from .calls import make_workspace


def test_what_the_host_says(monkeypatch):
    """Stand in for the kernel, on CPU tensors: the words of both findings."""

    def work(comm):
        made = make_workspace(comm, 4, 64, torch.float32, "cpu")
        made._check_record = record = torch.zeros(4, dtype=torch.int32)
        made._checks = True
        digests, found = [], []

        class Module:
            @staticmethod
            def allreduce_check(ptrs, rank, digest, timeout_ns, address, x):
                digests.append(digest)
                record[:3] = torch.tensor(found)

        class Stream:
            def synchronize(self):
                pass

        monkeypatch.setattr(workspace, "get_allreduce_module", lambda kind: Module)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        x, residual = torch.ones(2, 64), torch.ones(2, 64)
        found[:] = [0, 0, 0]
        allreduce_fusion(x, made, 0)
        allreduce_fusion(x[:1].contiguous(), made, 0)
        fused = {"residual_in": residual, "residual_out": residual, "norm_out": x, "rms_gamma": torch.ones(64)}
        allreduce_fusion(x, made, 1, **fused)
        assert len(set(digests)) == 3, "shape and pattern count"
        found[:] = [2, 5, 9]
        before = torch.full((2, 64), 3.0)
        with pytest.raises(
            ValueError, match=r"rank 0 got \(2, 64\) torch.float32, pattern 0, rank 5 others, in check 9"
        ):
            allreduce_fusion(x, made, 0, output=before)
        assert (before == 3).all()
        found[:] = [1, 5, 10]
        for _ in range(2):
            with pytest.raises(CommTimeoutError, match=r"rank 5 must enter check 10 .*; destroy the workspace"):
                allreduce_fusion(x, made, 0)
        made.destroy()

    call_on_ranks(1, work)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: the CPU compares in every call")
def test_ranks_that_differ_on_a_gpu(monkeypatch):
    monkeypatch.setenv("FLASHINFER_COMM_CHECK", "1")
    streams = [torch.cuda.Stream() for _ in range(2)]

    def work(comm):
        made = make_workspace(comm, 4, 64, torch.bfloat16, "cuda")
        with torch.cuda.stream(streams[comm.Get_rank()]):
            x = torch.ones(2 + comm.Get_rank(), 64, dtype=torch.bfloat16, device="cuda")
            out = torch.full_like(x, 7)
            with pytest.raises(ValueError, match="must be equal on all ranks"):
                allreduce_fusion(x, made, 0, output=out)
            assert (out == 7).all()
            total = allreduce_fusion(x[:2], made, 0)
            torch.cuda.synchronize()
            assert (total == 2).all()
        made.destroy()

    call_on_ranks(2, work)
