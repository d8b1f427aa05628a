# SPDX-License-Identifier: Apache-2.0
"""Patterns of the all-reduce that sum over experts first, or write scales of groups of columns."""

from __future__ import annotations

from typing import Any

import torch

from flashinfer.comm import allreduce_fusion

from .calls import PACKED, check, digest, inputs, make_workspace, moe_inputs, outputs, packed_rows, packed_scales


def more_patterns(comm: Any, device: str) -> list[Any]:
    """Run sums over experts and scales of groups of columns, with one step and two; return digests."""
    rank, world, digests = comm.Get_rank(), comm.Get_size(), []
    reference = allreduce_fusion._trace_template.reference
    for dtype in (torch.bfloat16, torch.float32):
        workspace = make_workspace(comm, 9, 384, dtype, device)
        for pattern, tokens, hidden, group, one_shot in (
            *[(6, 9, 384, 0, None), (7, 9, 64, 0, False), (7, 2, 384, 0, None), (6, 7, 64, 0, False)],
            *[(8, 5, 384, 64, None), (9, 9, 384, 128, False), (9, 1, 64, 32, None), (8, 4, 256, 16, None)],
        ):
            x, residual, gamma = inputs(rank, tokens, hidden, dtype, device, pattern)
            made = outputs(pattern, x)
            options = {"use_oneshot": one_shot}
            given = [inputs(r, tokens, hidden, dtype, "cpu", pattern)[0] for r in range(world)]
            if pattern in PACKED:
                options["block_quant_group_size"] = group
                made["scale_out"] = packed_scales(tokens, hidden, group, device)
            else:
                sums = [moe_inputs(r, pattern, tokens, hidden, dtype, "cpu") for r in range(world)]
                given = [reference(pattern=pattern, **one)[0] for one in sums]
                options |= moe_inputs(rank, pattern, tokens, hidden, dtype, device)
                x = options.pop("input")
            allreduce_fusion(x, workspace, pattern, residual_in=residual, rms_gamma=gamma, **made, **options)
            if device == "cuda":
                torch.cuda.synchronize()
            digests.append(digest(made))
            stacked = torch.stack(given)
            kept = {"block_quant_group_size": group} if group else {}
            found = reference(stacked, pattern if group else 1, residual.cpu(), gamma.cpu(), **kept)
            names = ("output", "residual_out", "norm_out", "quant_out", "scale_out")
            wanted = {name: one for name, one in zip(names, found, strict=True) if one is not None}
            if pattern in PACKED:
                scales, want = made.pop("scale_out").cpu(), wanted["scale_out"]
                same = packed_rows(scales).view(torch.uint8) == packed_rows(want).view(torch.uint8)
                assert same.float().mean() > 0.97, "a norm that is rounded otherwise moves an exponent"
                padded = scales.as_strided((scales.shape[1], -(-tokens // 4) * 4), (-(-tokens // 4) * 4, 1))
                assert (padded[:-1, tokens:] == 0).all()
                check(made, wanted, dtype)
            else:
                close = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
                for name, value in made.items():
                    torch.testing.assert_close(value.cpu(), wanted[name], **close)
        workspace.destroy()
    return digests
