# SPDX-License-Identifier: Apache-2.0
"""Calls of the all-reduce on every rank, and the results to compare with."""

from __future__ import annotations

from typing import Any, Optional

import torch

from flashinfer.comm import AllReduceFusionPattern as P
from flashinfer.comm import allreduce_fusion, create_allreduce_fusion_workspace

Results = dict[str, torch.Tensor]
TOLERANCES = {torch.float16: (2e-3, 2e-3), torch.bfloat16: (1.6e-2, 1.6e-2), torch.float32: (2e-6, 2e-6)}
FP8 = (P.kARResidualRMSNormFP8Quant, P.kARResidualRMSNormOutFP8Quant)
FP4 = (P.kARResidualRMSNormFP4Quant, P.kARResidualRMSNormOutFP4Quant)
PACKED = (P.kARResidualRMSNormPerTokenGroupFP8PackedQuant, P.kARResidualRMSNormOutPerTokenGroupFP8PackedQuant)
DYNAMIC = (P.kARResidualRMSNormDynamicFP8Quant, P.kARResidualRMSNormOutDynamicFP8Quant)


def inputs(
    rank: int, tokens: int, hidden: int, dtype: torch.dtype, device: str, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the input of a rank, and residual and weight, which all ranks share."""
    g = torch.Generator().manual_seed(1000 * seed + rank)
    shared = torch.Generator().manual_seed(1000 * seed + 999)
    x = torch.randn(tokens, hidden, generator=g).to(dtype)
    residual = torch.randn(tokens, hidden, generator=shared).to(dtype)
    gamma = torch.randn(hidden, generator=shared).to(dtype)
    return x.to(device), residual.to(device), gamma.to(device)


def outputs(pattern: int, x: torch.Tensor) -> Results:
    """Allocate what a pattern writes."""
    if pattern == P.kAllReduce:
        return {"output": torch.empty_like(x)}
    made = {"residual_out": torch.empty_like(x)}
    if pattern not in (P.kARResidualRMSNormFP8Quant, P.kARResidualRMSNormDynamicFP8Quant, PACKED[0], FP4[0]):
        made["norm_out"] = torch.empty_like(x)
    if pattern in FP8 + DYNAMIC + PACKED:
        made["quant_out"] = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    if pattern in DYNAMIC:
        made["scale_out"] = torch.empty(x.shape[0], 1, dtype=torch.float32, device=x.device)
    return made


def packed_scales(tokens: int, hidden: int, group: int, device: str) -> torch.Tensor:
    """Allocate the scales of a packed pattern, column by column, with other bits in them."""
    packs, padded = -(-hidden // group // 4), -(-tokens // 4) * 4
    return torch.full((packs, padded), -1, dtype=torch.int32, device=device).T[:tokens]


def fp4_scales(tokens: int, hidden: int, layout: int) -> torch.Tensor:
    """Allocate the scales of FP4 in a layout."""
    rows, columns = {0: 128, 1: 8, 2: 1}[layout], hidden // 16
    padded = columns if layout == 2 else -(-columns // 4) * 4
    return torch.zeros(-(-tokens // rows) * rows * padded, dtype=torch.uint8)


def check_fp4(norm: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, factor: float, layout: int) -> None:
    """Compare codes and scales with those of a norm, bit for bit; rows of padding have other bytes."""
    from flashinfer.trace.templates.comm import _fp4_blocks

    want, want_scales = _fp4_blocks(norm.cpu().float(), factor, layout)
    assert torch.equal(codes.cpu().view(torch.uint8).view(want.shape), want)
    is_real = _fp4_blocks(torch.ones_like(norm.cpu().float()), 1.0, layout)[1] != 0
    found = scales.cpu().view(torch.uint8).flatten()[: len(want_scales)]
    assert torch.equal(found[is_real], want_scales[is_real])


def moe_inputs(rank: int, pattern: int, tokens: int, hidden: int, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Return what patterns 6 and 7 sum on a rank: weighted rows of three experts, and rows that are added."""
    g, count = torch.Generator().manual_seed(50 + rank), 3
    rows = torch.randn(count, tokens, hidden, generator=g).to(dtype)
    more = torch.randn(tokens, hidden, generator=g).to(dtype)
    weights = torch.rand(count, tokens, generator=g)
    if pattern == 6:
        names = ("scale_input", "active_experts_token_input", "token_input")
        given = {f"moe_reduction_{name}": one for name, one in zip(names, (weights, rows, more), strict=True)}
        given["input"] = rows[0]
    else:
        index = torch.randperm(count * tokens, generator=g).view(tokens, count).to(torch.int32)
        index[0, 1] = -1
        given = {"input": rows.view(-1, hidden), "expanded_idx_to_permuted_idx": index}
        if rank % 2 == 0:
            given |= {"expert_scale_factor": weights.T.contiguous(), "shared_expert_output": more}
    return {name: one.to(device) for name, one in given.items()}


def call(workspace: Any, pattern: int, given: tuple[torch.Tensor, ...], **options: Any) -> Results:
    """Run one call and return what it wrote."""
    x, residual, gamma = given
    made = outputs(pattern, x)
    if pattern != P.kAllReduce:
        options |= {"residual_in": residual, "rms_gamma": gamma}
    result = allreduce_fusion(x, workspace, pattern, **made, **options)
    expected = made.get("norm_out", made.get("quant_out", made.get("output")))
    assert result is expected
    return made


def expected(
    world: int, pattern: int, shape: tuple[int, int], dtype: torch.dtype, seed: int, **options: Any
) -> Results:
    """Return what the reference of the template says, by the same names."""
    given = [inputs(rank, *shape, dtype, "cpu", seed) for rank in range(world)]
    _, residual, gamma = given[0]
    stacked = torch.stack([x for x, _, _ in given])
    found = allreduce_fusion._trace_template.reference(stacked, pattern, residual, gamma, **options)
    names = ("output", "residual_out", "norm_out", "quant_out", "scale_out")
    return {name: value for name, value in zip(names, found, strict=True) if value is not None}


def check(found: Results, wanted: Results, dtype: torch.dtype) -> None:
    """Compare: sums and residuals bit for bit, norms by the tolerance of the dtype, codes of fp8 to one step."""
    for name, value in found.items():
        value, want = value.cpu(), wanted[name]
        if name in ("output", "residual_out"):
            assert torch.equal(value, want + 0.0), name
        elif name == "quant_out":
            steps = value.view(torch.int8).int() - want.view(torch.int8).int()
            assert (steps.abs() <= 1).all() and (steps != 0).sum() <= 1 + 0.02 * steps.numel(), name
        else:
            rtol, atol = TOLERANCES[dtype] if name == "norm_out" else (1e-2, 1e-6)
            torch.testing.assert_close(value, want, rtol=rtol, atol=atol, msg=name)


def make_workspace(
    comm: Any, tokens: int, hidden: int, dtype: torch.dtype, device: str, backend: str = "trtllm"
) -> Any:
    return create_allreduce_fusion_workspace(
        backend,
        comm.Get_size(),
        comm.Get_rank(),
        tokens,
        hidden,
        dtype,
        comm_backend=comm,
        device=device,
    )


def packed_rows(x: torch.Tensor) -> torch.Tensor:
    """Return a copy on the CPU without gaps, also of one row or column, whose strides torch does not look at."""
    return x.cpu().clone(memory_format=torch.contiguous_format)


def digest(found: Results) -> Optional[str]:
    """Return a text that is equal for equal bits."""
    import hashlib

    total = hashlib.sha256()
    for name in sorted(found):
        total.update(packed_rows(found[name]).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()
