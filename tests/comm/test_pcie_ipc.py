# SPDX-License-Identifier: Apache-2.0
"""All-reduce over PCIe: the policy of launches, what a tuner would try, and sums of processes."""

from __future__ import annotations

import pytest
import torch

from flashinfer.comm import PcieIpcAllReduceWorkspace, get_pcie_ipc_launch_config
from flashinfer.comm import pcie_ipc_tuning as tuning
from flashinfer.comm.local_ranks import call_on_ranks
from flashinfer.comm.pcie_ipc_policy import IpcLaunchConfig, IpcVariant, _is_launchable
from flashinfer.comm.pcie_ipc_topology import PROFILE_ROOTCPLX, PROFILE_SWITCHPAIR, resolve_pcie_ipc_profile

V = IpcVariant


@pytest.mark.parametrize(
    "world, numel, most, wanted",
    [
        (2, 4096, 128, (16, 128, V.UNSTAGED)),
        (2, 1 << 24, 8, (8, 128, V.UNSTAGED)),
        (4, 4096, 128, (1, 256, V.STAGED)),
        (4, 16384, 128, (1, 256, V.STAGED_RING)),  # 32 KiB
        (4, 1 << 18, 128, (2, 256, V.STAGED_RING)),
        (8, 1 << 24, 128, (4, 256, V.STAGED_RING)),
        (8, 1 << 24, 3, (3, 256, V.STAGED_RING)),
        (8, 4096, 128, (16, 256, V.UNSTAGED)),
        (8, 64, 128, (16, 256, V.UNSTAGED)),
        (8, 56, 128, None),  # less than 16 bytes for each rank
        (4, 4097, 128, None),
        (6, 4096, 128, None),
    ],
)
def test_launches_of_the_policy(world, numel, most, wanted):
    found = get_pcie_ipc_launch_config(world, numel, 2, most)
    assert found == (None if wanted is None else IpcLaunchConfig(*wanted))
    assert found is None or _is_launchable(world, found, most, numel)


@pytest.mark.parametrize(
    "world, config, numel, possible",
    [
        (2, (4, 64, V.STAGED), None, True),
        (2, (4, 64, V.STAGED_RING), None, False),
        (4, (4, 64, V.FLAT_STAGED), None, False),
        (8, (6, 64, V.STAGED), None, False),
        (8, (4, 2048, V.UNSTAGED), None, False),
        (8, (129, 64, V.UNSTAGED), None, False),
        (4, (4, 256, V.COPY_ENGINE_RING), 4 * 8 * 4, True),
        (4, (4, 256, V.COPY_ENGINE_RING), 4 * 8 * 3, False),
        (4, (4, 128, V.COPY_ENGINE_RING), None, False),
        (4, (4, 256, V.COPY_ENGINE_ISLAND), None, False),
        (8, (2, 256, V.COPY_ENGINE_ISLAND), 4 * 8 * 2, True),
    ],
)
def test_launches_that_are_possible(world, config, numel, possible):
    assert _is_launchable(world, IpcLaunchConfig(*config), 128, numel) is possible


def test_trials_of_a_tuner():
    few = tuning.candidate_tactics(4, 8, blocks=(1, 8), threads=(64, 256))
    assert (
        (V.UNSTAGED, 1, 64) in few and (V.COPY_ENGINE_RING, 1, 256) in few and (V.COPY_ENGINE_RING, 8, 256) not in few
    )
    assert not [one for one in few if one[0] in (V.COPY_ENGINE_ISLAND, V.COPY_ENGINE_RING_MEMOP, V.FLAT_STAGED)]
    assert all(threads >= 256 for _, _, threads in tuning.candidate_tactics(8, numel=1 << 21))
    island = tuning.candidate_tactics(8, profile=PROFILE_ROOTCPLX, memop_supported=True)
    assert {V.COPY_ENGINE_ISLAND, V.COPY_ENGINE_RING_MEMOP} <= {one[0] for one in island}
    seed = get_pcie_ipc_launch_config(8, 4096, 2)
    assert tuning.resolve_tuned_config(seed, tuning.TABLE_TACTIC, 8, 128) is seed
    assert tuning.resolve_tuned_config(seed, (V.STAGED, 3, 64), 8, 128) is seed, "blocks are no multiple of 4"
    assert tuning.resolve_tuned_config(seed, (99, 3, 64), 8, 128) is seed
    chosen = IpcLaunchConfig(8, 512, V.STAGED)
    assert tuning.resolve_tuned_config(seed, tuning.config_to_tactic(chosen), 8, 128) == chosen
    assert tuning.pack_config(chosen) == 1 << 32 | 8 << 16 | 512
    assert tuning.cache_key_extras(4, "p", 8, 64, torch.bfloat16) == (3, 4, "p", 8, 64, "torch.bfloat16")
    assert tuning.cache_key_extras(4, "p", 8, 64, torch.float16, True) == (4, 4, "p", 8, 64, True, "torch.float16")
    assert tuning.tuned_batches_for(100, tuning.TUNE_BATCHES, 400) == (1, 2, 4)
    numbers = tuning.small_int_initializer((3, 5), torch.bfloat16, "cpu")
    assert numbers.shape == (3, 5) and numbers.max() < 16 and torch.equal(numbers, numbers.round())


def test_where_results_are_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHINFER_AUTOTUNE_DIR", str(tmp_path))
    assert tuning.default_cache_path(4) == tmp_path / "pcie_ipc_all_reduce_ws4.json"
    monkeypatch.delenv("FLASHINFER_AUTOTUNE_DIR")
    assert tuning.default_cache_path(2).parent.name == "autotune"


def sums(comm):
    rank, world = comm.Get_rank(), comm.Get_size()
    group = torch.distributed.group.WORLD
    space = PcieIpcAllReduceWorkspace(group, 4096, torch.float16, device="cpu")
    for shape in ((8, 512), (64,), (24,)):
        parts = [tuning.small_int_initializer(shape, torch.float16, "cpu") + r for r in range(world)]
        parts = comm.allgather(parts[rank])
        assert space.supports(parts[rank]) and space.tuned_launch_config(parts[rank]).threads == 128
        out = torch.empty_like(parts[rank])
        assert space.all_reduce(parts[rank], out=out) is out and torch.equal(out, sum(parts))
    for wrong in (torch.ones(8), torch.ones(12).half(), torch.ones(8192).half(), torch.ones(8, 8).half().T[:, :4]):
        assert not space.supports(wrong)
        with pytest.raises(
            ValueError, match=r"inp must be contiguous torch\.float16 of whole 16 bytes and at most 4096"
        ):
            space.all_reduce(wrong)
    with pytest.raises(ValueError, match="config must be possible for 2 ranks"):
        space.all_reduce(torch.ones(16).half(), config=IpcLaunchConfig(1, 64, V.STAGED_RING))
    with pytest.raises(ValueError, match="inp must be on cpu, got meta"):
        space.supports(torch.ones(8, device="meta").half())
    space.destroy()
    space.destroy()
    return tuning.reduce_verdict(rank == 1, group), tuning.reduce_timings(1.5 + rank, group)


def test_processes(ranks):
    assert ranks(2).run(sums) == [(True, 2.5)] * 2


def test_profiles_and_wrong_groups():
    assert call_on_ranks(2, resolve_pcie_ipc_profile) == [PROFILE_ROOTCPLX] * 2
    assert call_on_ranks(2, lambda comm: resolve_pcie_ipc_profile(comm, "pcieswitch")) == [PROFILE_SWITCHPAIR] * 2
    with pytest.raises(ValueError, match="got 'nvlink' on rank 1"):
        call_on_ranks(2, lambda comm: resolve_pcie_ipc_profile(comm, ("rootcplx", "nvlink")[comm.Get_rank()]))
    with pytest.raises(ValueError, match="must be equal on all ranks"):
        call_on_ranks(2, lambda comm: resolve_pcie_ipc_profile(comm, ("rootcplx", "pcieswitch")[comm.Get_rank()]))
    with pytest.raises(ValueError, match=r"rank 0 failed to check arguments .*group must have 2, 4 or 8 ranks, got 3"):
        call_on_ranks(3, lambda comm: PcieIpcAllReduceWorkspace(comm, 64, device="cpu"))
    with pytest.raises(ValueError, match=r"rank 1 failed to check arguments .*dtype must be float16 or bfloat16"):
        types = (torch.float16, torch.float32)
        call_on_ranks(2, lambda comm: PcieIpcAllReduceWorkspace(comm, 64, types[comm.Get_rank()], device="cpu"))
