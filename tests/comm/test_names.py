# SPDX-License-Identifier: Apache-2.0
"""Names that programs import: those that answer, and those that say what is missing."""

from __future__ import annotations

import importlib

import pytest
import torch

from flashinfer import comm
from flashinfer.comm import Mapping, MNNVLAllReduceFusionWorkspace, trtllm_ar, trtllm_mnnvl_ar
from flashinfer.comm.local_ranks import call_on_ranks
from flashinfer.comm.mnnvl import MnnvlConfig, MnnvlMemory
from flashinfer.comm.trtllm_mnnvl_ar import MNNVLAllreduceFusionStrategy as Strategy
from flashinfer.comm.trtllm_mnnvl_ar import MNNVLQuantType

from .calls import FP4, check, check_fp4, expected, inputs, make_workspace


@pytest.mark.parametrize(
    "path, what",
    [
        ("comm.ulysses_a2a", "a kernel over NVLink"),
        ("comm.init_ulysses_a2a", "a kernel over NVLink"),
        ("comm.PcieIpcAllGatherWorkspace", "a kernel over PCIe"),
        ("comm.cake_fused_norm_combine", "compute capability 10.0"),
        ("comm.tp_moe_finalize_rmsnorm", "compute capability 10.0"),
        ("comm.mnnvl_cutedsl_ag.all_gather_gated_residual_next_rmsnorm", "compute capability 10.0"),
        ("comm.mixed_comm.run_mixed_comm", "NVSHMEM"),
        ("comm.nvshmem_allreduce.NVSHMEMAllReduce", "NVSHMEM"),
    ],
)
def test_names_that_refuse(path, what):
    module, _, name = path.rpartition(".")
    with pytest.raises(RuntimeError, match=f"{name}: needs {what}"):
        getattr(importlib.import_module(f"flashinfer.{module}"), name)()


def test_nvshmem_names_the_package():
    module = importlib.import_module("flashinfer.comm.nvshmem")
    for name, given in (("get_unique_id", ()), ("init", (b"", 0, 1)), ("malloc", ((1,), torch.float32, "cuda"))):
        with pytest.raises(ImportError, match=rf"flashinfer\.comm\.nvshmem\.{name}: needs NVSHMEM .*nvshmem4py"):
            getattr(module, name)(*given)


def test_names_that_answer():
    assert not comm.is_mnnvl_cutedsl_supported(8, 7168, torch.bfloat16, max_token_num=8)
    assert not comm.supports_tp_moe_finalize_rmsnorm()
    mixed = importlib.import_module("flashinfer.comm.mixed_comm")
    assert mixed.MixedCommOp(2).name == "REDUCESCATTER" and mixed.MixedCommMode.AUTOTUNE.value == 8
    assert trtllm_ar.trtllm_allreduce_fusion is comm.trtllm_allreduce_fusion
    mapping = Mapping(16, 9, 8, tp_size=4, pp_size=4)
    assert (mapping.get_node_rank(9), mapping.get_local_rank(9), mapping.is_multi_node()) == (1, 1, True)
    assert mapping.is_second_last_pp_rank() and not mapping.is_last_pp_rank()
    quantized = importlib.import_module("flashinfer.comm.quantized_allreduce")
    assert quantized.quantized_all_reduce is comm.quantized_all_reduce


def test_sizes_of_multicast_workspaces():
    size = MNNVLAllReduceFusionWorkspace.get_required_buffer_size_bytes
    assert size(4, 3, 64, torch.bfloat16, Strategy.ONESHOT) == 3 * 4 * 64 * 2
    assert size(4, 3, 64, torch.bfloat16, Strategy.TWOSHOT) == 2 * 1 * 4 * 64 * 2
    assert size(4, 3, 64, torch.bfloat16) == 3 * 4 * 64 * 2, "a small message is pushed once"
    assert size(4, 4096, 64, torch.bfloat16, Strategy.AUTO) == 2 * 4096 * 64 * 2
    assert Strategy.select_strategy(4, 3, 64, torch.bfloat16) is Strategy.ONESHOT
    assert Strategy.select_strategy(4, 4096, 64, torch.bfloat16) is Strategy.TWOSHOT


def multicast_names(backend):
    """Call by the names of the multicast form on a workspace of this package."""
    rank, world, shape, dtype = backend.Get_rank(), backend.Get_size(), (6, 64), torch.bfloat16
    workspace = make_workspace(backend, *shape, dtype, "cpu")
    x, residual, gamma = inputs(rank, *shape, dtype, "cpu", 4)
    options = {"rms_eps": torch.finfo(dtype).eps}
    for strategy in Strategy:
        total = trtllm_mnnvl_ar.trtllm_mnnvl_allreduce(x, workspace, False, strategy=strategy)
        check({"output": total}, expected(world, 0, shape, dtype, 4), dtype)
        norm, out = trtllm_mnnvl_ar.trtllm_mnnvl_fused_allreduce_add_rmsnorm(
            x, residual, gamma, workspace, strategy=strategy
        )
        check({"norm_out": norm, "residual_out": out}, expected(world, 1, shape, dtype, 4, **options), dtype)
    quantise = trtllm_mnnvl_ar.trtllm_mnnvl_fused_allreduce_add_rmsnorm_quant
    quant, scale, out, none = quantise(
        x, residual, gamma, workspace, quant_type=MNNVLQuantType.FP8, output_scale=torch.tensor([0.5])
    )
    want = expected(world, 2, shape, dtype, 4, scale_factor=0.5, **options)
    check({"quant_out": quant, "residual_out": out}, want, dtype)
    assert scale is None and none is None
    quant, scale, out, _ = quantise(x, residual, gamma, workspace, quant_type=MNNVLQuantType.DYNAMIC_FP8)
    check({"quant_out": quant, "scale_out": scale}, expected(world, 10, shape, dtype, 4, **options), dtype)
    for layout in (0, 2):
        given = {"output": torch.empty_like(x), "output_scale": 3.0, "layout_code": layout}
        quant, scale, _, norm = quantise(x, residual, gamma, workspace, quant_type=MNNVLQuantType.NVFP4, **given)
        assert norm is given["output"] and FP4
        check_fp4(norm, quant, scale, 3.0, layout)
    with pytest.raises(ValueError, match="not SWIZZLED_8x4"):
        quantise(x, residual, gamma, workspace, quant_type=MNNVLQuantType.NVFP4, layout_code=1)
    with pytest.raises(ValueError, match="quant_type must be FP8, NVFP4 or DYNAMIC_FP8"):
        quantise(x, residual, gamma, workspace)
    workspace.destroy()


def test_calls_by_names_of_multicast():
    call_on_ranks(2, multicast_names)


def test_tables_of_other_sizes():
    def work(backend):
        size = 4096 * (1 + backend.Get_rank())
        MnnvlMemory(
            Mapping(2, backend.Get_rank(), 2, tp_size=2), size, comm=MnnvlConfig(backend).comm_backend, device="cpu"
        )

    with pytest.raises(AssertionError, match=r"^Not all rank allocating same size\."):
        call_on_ranks(2, work)
