# SPDX-License-Identifier: Apache-2.0
"""The unified calls on every backend name.

    mpirun -np 4 pytest tests/comm/test_allreduce_unified_api.py

runs ``test_on_gpus_of_ranks`` with one GPU per rank (also under torchrun). With one rank, without mpi4py or with fewer
GPUs than ranks that test skips on every rank, before any collective; the same cases run on CPU tensors everywhere.
"""

from __future__ import annotations

import os

import pytest
import torch

from flashinfer.comm import allreduce_fusion, create_allreduce_fusion_workspace
from flashinfer.comm.comm_backend import MPIBackend, TorchDistBackend
from flashinfer.norm import rmsnorm

TOKENS = [[1], [4], [15], [27, 11, 24, 256], [127], [998, 2048]]
COMMAND = "mpirun -np 4 pytest tests/comm/test_allreduce_unified_api.py"


def check_calls(comm, backend, pattern, dtype, hidden, tokens_list, device, **options):
    """Run calls of growing and shrinking size on one workspace; compare with the summed input and ``rmsnorm``."""
    rank, world = comm.Get_rank(), comm.Get_size()
    workspace = create_allreduce_fusion_workspace(
        backend=backend,
        world_size=world,
        rank=rank,
        max_token_num=max(tokens_list),
        hidden_dim=hidden,
        dtype=dtype,
        comm_backend=comm,
        device=device,
        **options,
    )
    try:
        for tokens in tokens_list:
            g = torch.Generator().manual_seed(tokens)
            parts = [torch.randn(tokens, hidden, generator=g).to(dtype) for _ in range(world)]
            residual, gamma = (
                torch.randn(tokens, hidden, generator=g).to(dtype),
                torch.randn(hidden, generator=g).to(dtype),
            )
            total = torch.stack(parts).float().sum(0).to(dtype).to(device)
            x, residual, gamma = parts[rank].to(device), residual.to(device), gamma.to(device)
            if pattern == 0:
                found = allreduce_fusion(x, workspace, pattern, launch_with_pdl=True)
                torch.testing.assert_close(found, total, rtol=0.05, atol=0.15)
                continue
            norm, out = torch.empty_like(x), torch.empty_like(x)
            fused = {
                "residual_in": residual,
                "residual_out": out,
                "norm_out": norm,
                "rms_gamma": gamma,
                "rms_eps": 1e-5,
            }
            assert allreduce_fusion(x, workspace, pattern, launch_with_pdl=True, **fused) is norm
            torch.testing.assert_close(out, total + residual, rtol=0.05, atol=0.15)
            wanted = rmsnorm(total + residual, gamma, torch.finfo(dtype).eps)
            torch.testing.assert_close(norm, wanted, rtol=0.05, atol=0.15)
    finally:
        workspace.destroy()


def cpu_cases(comm, backend, dtype):
    torch.set_num_threads(1)
    for tokens_list in TOKENS[:-1]:
        for pattern in (0, 1):
            check_calls(comm, backend, pattern, dtype, 2880, tokens_list, "cpu")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ["auto", "trtllm"])
def test_on_cpu_tensors(ranks, backend, dtype):
    ranks(2).run(cpu_cases, backend, dtype)


def large(comm):
    check_calls(comm, "auto", 1, torch.bfloat16, 7168, [998, 33], "cpu", force_oneshot_support=True)


def test_wide_rows(ranks):
    ranks(4).run(large)


def mnnvl(comm):
    create_allreduce_fusion_workspace("mnnvl", comm.Get_size(), comm.Get_rank(), 4, 64, torch.float16, device="cpu")


def confidential(comm, backend):
    os.environ["FLASHINFER_CONFIDENTIAL_COMPUTE"] = "1"
    try:
        check_calls(comm, backend, 1, torch.float16, 2880, [64, 25], "cpu")
    finally:
        del os.environ["FLASHINFER_CONFIDENTIAL_COMPUTE"]


def test_mnnvl_names_what_it_lacks(ranks):
    for failure in ranks(2).fail(mnnvl):
        assert "RuntimeError" in failure.classes and "multicast" in failure.text


def test_confidential_computing(ranks):
    ranks(2).run(confidential, "trtllm")
    for failure in ranks(2).fail(confidential, "mnnvl"):
        assert "ValueError" in failure.classes and "multicast" in failure.text


def test_unknown_names_and_foreign_arguments():
    with pytest.raises(RuntimeError, match="Unknown backend"):
        create_allreduce_fusion_workspace("nccl", 2, 0, 4, 64)
    with pytest.raises(ValueError, match="Only backend='mnnvl-cutedsl' accepts: top_k, config"):
        create_allreduce_fusion_workspace("trtllm", 2, 0, 4, 64, top_k=8, config={})
    with pytest.raises(RuntimeError, match="compute capability 10"):
        create_allreduce_fusion_workspace("mnnvl-cutedsl", 2, 0, 4, 64)
    with pytest.raises(ValueError, match="No suitable backend"):
        create_allreduce_fusion_workspace("auto", 32, 0, 4, 64)
    with pytest.raises(ValueError, match="hidden_dim must be given"):
        create_allreduce_fusion_workspace("auto", 2, 0, 4)


def wrong_rank(comm):
    create_allreduce_fusion_workspace("trtllm", comm.Get_size(), 0, 4, 64, comm_backend=comm, device="cpu")


def test_a_wrong_argument_on_one_rank_fails_on_all(ranks):
    for failure in ranks(2).fail(wrong_rank):
        assert "ValueError" in failure.classes and "rank 1 failed to check arguments" in failure.text
        assert "got 2 and 0" in failure.text


def started_by() -> tuple[int, int]:
    """Return rank and number of the processes that mpirun, srun or torchrun started."""
    for rank, size in (
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("PMI_RANK", "PMI_SIZE"),
        ("SLURM_PROCID", "SLURM_NTASKS"),
        ("RANK", "WORLD_SIZE"),
    ):
        if rank in os.environ and size in os.environ:
            return int(os.environ[rank]), int(os.environ[size])
    return 0, 1


@pytest.mark.parametrize("tokens_list", TOKENS, ids=str)
@pytest.mark.parametrize("hidden", [2880, 7168])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pattern", [0, 1])
@pytest.mark.parametrize("backend", ["auto", "trtllm"])
def test_on_gpus_of_ranks(backend, pattern, dtype, hidden, tokens_list):
    rank, size = started_by()
    gpus = torch.cuda.device_count()
    if size < 2 or gpus < size:
        pytest.skip(f"needs several ranks with a GPU each, has {size} ranks and {gpus} GPUs: {COMMAND}")
    torch.cuda.set_device(rank % gpus)
    if "RANK" in os.environ:
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo")
        comm = TorchDistBackend()
    else:
        pytest.importorskip("mpi4py", reason=f"needs mpi4py: {COMMAND}")
        comm = MPIBackend()
    check_calls(comm, backend, pattern, dtype, hidden, tokens_list, f"cuda:{rank % gpus}")
