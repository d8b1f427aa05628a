# SPDX-License-Identifier: Apache-2.0
"""A layer of experts over the ranks of a group: exchange, experts of each rank, exchange; compared with one rank."""

from __future__ import annotations

import torch

from flashinfer import moe_ep
from flashinfer.fused_moe import cutlass_fused_moe
from flashinfer.moe_ep import BootstrapConfig, MoEEpCommParams, NVLinkOneSidedConfig, create_communication

from ..comm.foreign import EngineBackend

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, MOST = 8, 3, 64, 32, 12


def weights(generator):
    w1 = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN, generator=generator) / 8
    w2 = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, generator=generator) / 8
    return w1.bfloat16(), w2.bfloat16()


def tokens(rank, count, kind):
    g = torch.Generator().manual_seed(100 + rank)
    x = torch.randn(count, HIDDEN, generator=g).bfloat16()
    ids = torch.stack([torch.randperm(EXPERTS, generator=g)[:TOP_K] for _ in range(count + 1)])[:count]
    if kind == "one":
        ids = torch.arange(TOP_K).expand(count, TOP_K)
    return x, ids.to(torch.int32).contiguous(), torch.rand(count, TOP_K, generator=g)


def layer(comm, backend, device="cpu"):
    """Run dispatch, the experts of this rank and combine; compare with all experts on one rank."""
    rank, world = comm.Get_rank(), comm.Get_size()
    params = MoEEpCommParams(EXPERTS, TOP_K, MOST, HIDDEN)
    config = {"nvlink_one_sided": NVLinkOneSidedConfig, "nvlink_two_sided": moe_ep.NVLinkTwoSidedConfig}[backend]
    made = create_communication(
        BootstrapConfig(world, rank), params, config(comm_backend=EngineBackend(comm)), device=device
    )
    w1, w2 = (w.to(device) for w in weights(torch.Generator().manual_seed(1)))
    local = made.num_local_experts
    own = slice(rank * local, (rank + 1) * local)
    for counts, kind, most in [((12, 5, 0, 1), "random", None), ((4, 4, 4, 4), "one", 4), ((0, 0, 7, 0), "random", 8)]:
        counts = counts[:world]
        x, ids, scales = (one.to(device) for one in tokens(rank, counts[rank], kind))
        got = made.dispatch(x, ids, scales, max_tokens_per_rank=most)
        place = made.get_combine_input_buffer(torch.bfloat16)
        assert place.shape == got.hidden_states.shape == (world * got.tokens_per_rank, HIDDEN)
        results = cutlass_fused_moe(
            *(got.hidden_states, got.topk_ids, got.topk_weights, w1[own], w2[own], torch.bfloat16),
            quant_scales=None,
            ep_size=world,
            ep_rank=rank,
            output=place,
        )
        results = results[0] if isinstance(results, (list, tuple)) else results
        found = made.combine(results)
        if counts[rank]:
            wanted = cutlass_fused_moe(x, ids, scales, w1, w2, torch.bfloat16, quant_scales=None)
            wanted = wanted[0] if isinstance(wanted, (list, tuple)) else wanted
            torch.testing.assert_close(found.float(), wanted.float(), rtol=2e-2, atol=2e-2)
        assert found.shape == x.shape
    comm.barrier()
    made.destroy()
    made.destroy()
    try:
        _ = made.alltoall
    except RuntimeError as error:
        return str(error)
