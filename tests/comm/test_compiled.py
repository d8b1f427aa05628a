# SPDX-License-Identifier: Apache-2.0
"""The fused all-reduce in compiled programs: no break of the graph, and programs without their workspace."""

from __future__ import annotations

import pytest
import torch

from flashinfer.comm import allreduce_fusion
from flashinfer.comm.local_ranks import local_comms

from .calls import check, expected, inputs, make_workspace


def compiled(comm):
    rank, world, shape = comm.Get_rank(), comm.Get_size(), (5, 64)
    workspace = make_workspace(comm, *shape, torch.bfloat16, "cpu")
    scale = torch.tensor([0.5])

    def layer(x, residual, gamma):
        """End two layers: in place as vLLM does, then with quantised rows; and the plain sum."""
        total = allreduce_fusion(x, workspace, 0)
        quant, out = torch.empty_like(x, dtype=torch.float8_e4m3fn), torch.empty_like(x)
        allreduce_fusion(
            *(x, workspace, 2),
            quant_out=quant,
            residual_out=out,
            residual_in=residual,
            rms_gamma=gamma,
            scale_factor=scale,
        )
        norm = allreduce_fusion(
            *(x, workspace, 1), norm_out=x, residual_out=residual, residual_in=residual, rms_gamma=gamma
        )
        return total, quant, out, norm + 1

    run = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for seed in range(2):
        x, residual, gamma = inputs(rank, *shape, torch.bfloat16, "cpu", seed)
        total, quant, out, shifted = run(x, residual, gamma)
        want = expected(world, 1, shape, torch.bfloat16, seed)
        check({"output": total, "residual_out": residual, "norm_out": x}, want, torch.bfloat16)
        assert torch.equal(out, residual) and torch.equal(shifted, x + 1)
        check({"quant_out": quant}, expected(world, 2, shape, torch.bfloat16, seed, scale_factor=0.5), torch.bfloat16)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    workspace.destroy()
    try:
        run(*inputs(rank, *shape, torch.bfloat16, "cpu"))
    except RuntimeError as error:
        return graphs, str(error)


def test_compiled_layers(ranks):
    for rank, (graphs, text) in enumerate(ranks(2).run(compiled)):
        assert graphs == 1
        assert f"needs the workspace 'rank {rank} of 2, 5 x 64 torch.bfloat16, number" in text
        assert "got a process where it is not created, or is destroyed" in text


def test_a_program_of_another_process(tmp_path):
    """Run an exported program where nobody has created its workspace, then where one like it is created."""

    class Sum(torch.nn.Module):
        def forward(self, x):
            return allreduce_fusion(x, workspace, 0)

    workspace = make_workspace(local_comms(1)[0], 3, 32, torch.float32, "cpu")
    x = torch.randn(3, 32)
    torch.export.save(torch.export.export(Sum(), (x,)), tmp_path / "sum.pt2")
    name = workspace.name
    workspace.destroy()
    program = torch.export.load(tmp_path / "sum.pt2").module()
    with pytest.raises(RuntimeError, match="call create_allreduce_fusion_workspace as the process that"):
        program(x)
    again = make_workspace(local_comms(1)[0], 3, 32, torch.float32, "cpu")
    assert again.name != name, "the number of a workspace is not used twice in a process"
    again.destroy()
