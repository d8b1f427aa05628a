# SPDX-License-Identifier: Apache-2.0
"""Older calls of the fused all-reduce: flat tensors, and a workspace that is a tensor of addresses."""

from __future__ import annotations

import pytest
import torch

from flashinfer import comm
from flashinfer.comm.local_ranks import call_on_ranks
from flashinfer.comm.reduce.addresses import check_trtllm_allreduce_fusion_workspace_metadata

from .calls import check, expected, inputs, moe_inputs


def doors(backend):
    rank, world, shape, dtype = backend.Get_rank(), backend.Get_size(), (6, 64), torch.bfloat16
    handles, table, metadata = comm.trtllm_create_ipc_workspace_for_all_reduce_fusion(
        rank, world, *shape, create_metadata=True, comm_backend=backend, device="cpu"
    )
    assert table.shape == (3 * world + 1,) and [len(one) for one in handles] == [world] * 3
    x, residual, gamma = inputs(rank, *shape, dtype, "cpu", 3)
    out, norm = torch.empty_like(x), torch.empty_like(x)
    flat = [x.flatten(), world, rank, *shape, table, True, True, False, 1, None, None, residual.flatten()]
    flat += [out.view(-1), norm.view(-1), None, None, gamma, 1e-6, None, None]
    comm.trtllm_allreduce_fusion(*flat, metadata=metadata)
    check({"residual_out": out, "norm_out": norm}, expected(world, 1, shape, dtype, 3), dtype)

    reference = comm.allreduce_fusion._trace_template.reference
    close = {"rtol": 2e-2, "atol": 2e-2}
    given = moe_inputs(rank, 6, *shape, dtype, "cpu")
    given.pop("input")
    scale, active, token = given.values()
    total = torch.empty_like(x)
    sizes = (world, rank, *shape, table, False)
    comm.trtllm_moe_allreduce_fusion(
        *sizes, residual, gamma, 1e-6, None, 3, scale, active, token, None, total, out, norm, None, None
    )
    parts = [reference(pattern=6, **moe_inputs(r, 6, *shape, dtype, "cpu"))[0] for r in range(world)]
    want = reference(torch.stack(parts), 1, residual, gamma)
    for found, wanted in zip((total, out, norm), want[:3], strict=True):
        torch.testing.assert_close(found, wanted, **close)

    given = [moe_inputs(2 * r, 7, *shape, dtype, "cpu") for r in range(world)]  # even numbers have weights
    own = given[rank]
    comm.trtllm_moe_finalize_allreduce_fusion(
        *(own["input"], residual, gamma, own["expanded_idx_to_permuted_idx"], norm, out, None, None, table, False),
        *(rank, world, 1e-6, own["shared_expert_output"], own["expert_scale_factor"], 2.0),
    )
    parts = []
    for one in given:
        one["expert_scale_factor"] = one["expert_scale_factor"] * 2.0
        parts.append(reference(pattern=7, **one)[0])
    want = reference(torch.stack(parts), 1, residual, gamma)
    torch.testing.assert_close(out, want[1], **close)
    torch.testing.assert_close(norm, want[2], **close)

    backend.barrier()
    comm.trtllm_destroy_ipc_workspace_for_all_reduce_fusion(handles)
    backend.barrier()
    with pytest.raises(RuntimeError, match="workspace_ptrs must be the tensor of trtllm_create_ipc_workspace"):
        comm.trtllm_allreduce_fusion(*flat)


@pytest.mark.parametrize("size", [1, 3])
def test_threads(size):
    with pytest.warns(DeprecationWarning, match="use create_allreduce_fusion_workspace"):
        call_on_ranks(size, doors)


def test_descriptions_of_workspaces():
    fits = check_trtllm_allreduce_fusion_workspace_metadata
    metadata = {"tp_rank": 0, "tp_size": 2, "max_token_num": 4, "hidden_dim": 64, "use_fp32_lamport": False}
    fits(8, 32, 2, torch.float16, metadata)
    with pytest.raises(ValueError, match=r"Workspace metadata validation failed.*tp_size"):
        fits(8, 32, 2, torch.float16, {"tp_rank": 0})
    for wrong in ((9, 32, 2, torch.float16), (8, 32, 3, torch.float16), (8, 32, 2, torch.float32)):
        with pytest.raises(ValueError, match="Workspace validation failed"):
            fits(*wrong, metadata)


def test_what_needs_another_gpu():
    with pytest.raises(ValueError, match="create_metadata must be True with use_symm_dev_mem"):
        comm.trtllm_create_ipc_workspace_for_all_reduce_fusion(0, 1, 4, 64, use_symm_dev_mem=True)
    with pytest.raises(ValueError, match="backend must be 'trtllm' on this GPU"):
        comm.trtllm_moe_finalize_allreduce_fusion(*[None] * 16, backend="cake")
