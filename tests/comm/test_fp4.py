# SPDX-License-Identifier: Apache-2.0
"""FP4 outputs of the fused all-reduce: of patterns 3 and 5, and after sums over experts."""

from __future__ import annotations

import warnings

import pytest
import torch

from flashinfer import comm as api
from flashinfer import e2m1_and_ufp8sf_scale_to_float
from flashinfer.comm import allreduce_fusion
from flashinfer.comm.local_ranks import call_on_ranks

from .calls import check_fp4, digest, fp4_scales, inputs, make_workspace, moe_inputs, outputs


def fp4(tokens, hidden, layout):
    """Allocate codes and scales, with other bits in them."""
    codes = torch.full((tokens, hidden // 2), 7, dtype=torch.uint8)
    return {"quant_out": codes, "scale_out": torch.full_like(fp4_scales(tokens, hidden, layout), 7)}


def cases(comm):
    rank, found = comm.Get_rank(), []
    for dtype in (torch.bfloat16, torch.float16):
        workspace = make_workspace(comm, 130, 208, dtype, "cpu")
        for tokens, hidden, layout, factor in (
            *[(3, 208, 0, 2.0), (130, 64, 0, None), (9, 80, 1, 0.3)],
            *[(5, 208, 2, torch.tensor([40.0])), (1, 16, None, 1e-30), (0, 32, 0, None)],
        ):
            x, residual, gamma = inputs(rank, tokens, hidden, dtype, "cpu", tokens)
            given = {"residual_in": residual, "rms_gamma": gamma, "scale_factor": factor, "layout_code": layout}
            made = fp4(tokens, hidden, layout or 0)
            norm, total = torch.empty_like(x), torch.empty_like(x)
            assert allreduce_fusion(x, workspace, 5, residual_out=total, norm_out=norm, **made, **given) is norm
            check_fp4(norm, *made.values(), 1.0 if factor is None else factor, layout or 0)
            again = fp4(tokens, hidden, layout or 0)
            result = allreduce_fusion(x, workspace, 3, residual_out=total, **again, **given)
            assert result is again["quant_out"] and digest(again) == digest(made)
            found.append(digest(made))
        for pattern in (6, 7):
            made = fp4(8, 64, 0)
            _, residual, gamma = inputs(rank, 8, 64, dtype, "cpu")
            sums = moe_inputs(rank, pattern, 8, 64, dtype, "cpu")
            written = outputs(pattern, residual)
            given = {"residual_in": residual, "rms_gamma": gamma, "scale_factor": 3.0}
            allreduce_fusion(sums.pop("input"), workspace, pattern, **sums, **written, **made, **given)
            check_fp4(written["norm_out"], *made.values(), 3.0, 0)
            found.append(digest(made))
        workspace.destroy()
    return found


def test_processes(ranks):
    first, second = ranks(2).run(cases)
    assert first == second


def test_values_come_back():
    """Read the codes with the dequantiser of this package: within half a step of FP4 of the norm."""

    def work(comm):
        workspace = make_workspace(comm, 16, 256, torch.bfloat16, "cpu")
        x, residual, gamma = inputs(0, 16, 256, torch.bfloat16, "cpu")
        made, norm = fp4(16, 256, 0), torch.empty_like(x)
        factor = 448 * 6 / 20.0  # no element of the norm is larger than 20
        given = {"residual_in": residual, "rms_gamma": gamma, "scale_factor": factor}
        allreduce_fusion(x, workspace, 5, residual_out=torch.empty_like(x), norm_out=norm, **made, **given)
        workspace.destroy()
        values = e2m1_and_ufp8sf_scale_to_float(*made.values(), torch.tensor([1 / factor]), 16, 1, True)
        most = norm.float().view(16, 16, 16).abs().amax(-1, keepdim=True).expand(16, 16, 16).reshape(16, 256)
        assert ((values - norm.float()).abs() <= most / 5.5).all()

    call_on_ranks(1, work)


def older_calls(comm):
    rank, world, shape = comm.Get_rank(), comm.Get_size(), (6, 64)
    handles, table = api.trtllm_create_ipc_workspace_for_all_reduce_fusion(
        rank, world, *shape, comm_backend=comm, device="cpu"
    )
    x, residual, gamma = inputs(rank, *shape, torch.float16, "cpu", 3)
    made, norm, total = fp4(*shape, 0), torch.empty_like(x), torch.empty_like(x)
    flat = [one.flatten() for one in made.values()]
    api.trtllm_allreduce_fusion(
        *(x.flatten(), world, rank, *shape, table, False, True, False, 5, None, None, residual.flatten()),
        *(total.view(-1), norm.view(-1), flat[0].view(torch.float16), flat[1], gamma, 1e-6, 2.0, 0),
    )
    check_fp4(norm, *flat, 2.0, 0)
    sums = moe_inputs(2 * rank, 7, *shape, torch.float16, "cpu")
    api.trtllm_moe_finalize_allreduce_fusion(
        *(sums["input"], residual, gamma, sums["expanded_idx_to_permuted_idx"], norm, total, *made.values(), table),
        *(False, rank, world, 1e-6, sums["shared_expert_output"], sums["expert_scale_factor"], None),
    )
    check_fp4(norm, *made.values(), 1.0, 0)
    comm.barrier()
    api.trtllm_destroy_ipc_workspace_for_all_reduce_fusion(handles)


def test_older_calls():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        call_on_ranks(2, older_calls)


def test_wrong_calls():
    def work(comm):
        x, residual, gamma = inputs(0, 4, 64, torch.bfloat16, "cpu")
        for dtype, change, text in (
            (torch.bfloat16, {"scale_out": None}, "scale_out is required for FP4 outputs"),
            (torch.bfloat16, {"quant_out": None}, "quant_out is required for pattern 5"),
            (torch.bfloat16, {"layout_code": 3}, r"layout_code must be 0 \(128x4\), 1 \(8x4\) or 2 \(linear\), got 3"),
            (torch.bfloat16, {"quant_out": torch.empty(4, 64).byte()}, "quant_out must have 128 bytes, got 256"),
            (torch.bfloat16, {"scale_out": torch.empty(511).byte()}, "scale_out must have 512 bytes, got 511"),
            (torch.bfloat16, {"quant_out": torch.empty(32, 4).byte().T}, "quant_out must be contiguous"),
            (torch.float32, {}, "input must be float16 or bfloat16 for FP4 outputs, got torch.float32"),
        ):
            workspace = make_workspace(comm, 4, 64, dtype, "cpu")
            given = {"residual_in": residual, "residual_out": torch.empty_like(x), "rms_gamma": gamma}
            given |= {"norm_out": torch.empty_like(x)}
            given = {name: one.to(dtype) for name, one in given.items()} | fp4(4, 64, 0)
            with pytest.raises(ValueError, match=text):
                allreduce_fusion(x.to(dtype), workspace, 5, **{**given, **change})
            workspace.destroy()
        workspace = make_workspace(comm, 4, 24, torch.bfloat16, "cpu")
        x = torch.ones(4, 24).bfloat16()
        with pytest.raises(ValueError, match="must be divisible by 16 for FP4 outputs, got 24"):
            given = {"residual_in": x.clone(), "residual_out": x.clone(), "rms_gamma": x[0].clone()}
            allreduce_fusion(x, workspace, 3, **given, **fp4(4, 32, 0))
        workspace.destroy()

    call_on_ranks(1, work)
