# SPDX-License-Identifier: Apache-2.0
"""Exchanges of tokens on every rank, and the results to compare with."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple, Optional

import torch

from flashinfer.comm import (
    Mapping,
    MoeAlltoAll,
    decode_cp_a2a_allocate_mnnvl_workspace,
    decode_cp_a2a_alltoall,
    decode_cp_a2a_init_workspace,
    decode_cp_a2a_lse_reduce,
    decode_cp_a2a_lse_reduce_create_workspace,
)
from flashinfer.comm.mnnvl import MnnvlConfig

from .foreign import EngineBackend


class Tokens(NamedTuple):
    """Tokens of one rank: activations in bfloat16, scales of odd size, experts, weights."""

    x: torch.Tensor
    scale: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


def tokens_of(rank: int, tokens: int, experts: int, top_k: int, hidden: int, kind: str, device: str) -> Tokens:
    """Return tokens whose experts are random, all those of the last rank, or -1 for some."""
    g = torch.Generator().manual_seed(1000 + rank)
    x = torch.randn(tokens, hidden, generator=g).to(torch.bfloat16)
    scale = torch.randint(0, 256, (tokens, 3), generator=g, dtype=torch.uint8)
    ids = torch.stack([torch.randperm(experts, generator=g)[:top_k] for _ in range(tokens)] or [torch.empty(0, top_k)])
    ids = ids.reshape(-1, top_k)[:tokens].to(torch.int32)
    if kind == "one":
        ids = (experts - 1 - torch.arange(top_k).expand(tokens, top_k)).to(torch.int32)
    elif kind == "none":
        ids[::2] = -1
    weights = torch.rand(tokens, top_k, generator=g)
    return Tokens(*(one.to(device).contiguous() for one in (x, scale, ids, weights)))


def rank_of(ids: torch.Tensor, experts: int, world: int) -> torch.Tensor:
    """Return the rank of each expert; -1 for none."""
    each, extra = divmod(experts, world)
    owners = torch.cat([torch.full((each + (rank < extra),), rank) for rank in range(world)])
    return torch.where(ids >= 0, owners.to(ids.device)[ids.long().clamp(min=0)], -1)


def make_exchange(
    comm: Any, most: int, top_k: int, experts: int, hidden: int, device: str, **options: Any
) -> MoeAlltoAll:
    world = comm.Get_size()
    mapping = Mapping(world, comm.Get_rank(), world, tp_size=world, moe_ep_size=world)
    size = MoeAlltoAll.get_moe_workspace_size_per_rank(
        world, top_k, most, hidden, 3, options.get("eplb_stats_num_experts", 0)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return MoeAlltoAll(
            mapping, most, top_k, experts, size, mnnvl_config=MnnvlConfig(comm), device=device, **options
        )


def results_of(rank: int, x: torch.Tensor) -> torch.Tensor:
    """Return what the experts of a rank make of rows: another multiple on each rank, exact in bfloat16."""
    return (x.float() * (rank + 1)).to(x.dtype)


def check_received(own: int, sent: list[Tokens], views: list[torch.Tensor], experts: int, rows: int) -> None:
    """Compare what arrived, by source and in order of token; the ids of other rows are -1."""
    world = len(sent)
    for source, tokens in enumerate(sent):
        is_here = (rank_of(tokens.ids, experts, world) == own).any(-1)
        count = int(is_here.sum())
        for view, given in zip(views, tokens, strict=True):
            assert torch.equal(view[source, :count].cpu(), given[is_here].cpu())
        assert (views[2][source, count:] == -1).all()


def check_combined(own: Tokens, found: torch.Tensor, experts: int, world: int, rtol: float = 1e-2) -> None:
    """Compare with the sum over the ranks that a token went to."""
    ranks = rank_of(own.ids, experts, world)
    factor = torch.zeros(len(own.x), device=own.x.device)
    for rank in range(world):
        factor += (ranks == rank).any(-1) * (rank + 1)
    torch.testing.assert_close(found.float(), own.x.float() * factor.unsqueeze(-1), rtol=rtol, atol=rtol)


def exchange(
    alltoall: MoeAlltoAll,
    own: Tokens,
    rows: int,
    in_place: bool = False,
    mask: Optional[torch.Tensor] = None,
    **options: Any,
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Run one dispatch and one combine of a rank."""
    views = alltoall.dispatch(own.ids, list(own), rows, -1, 2, active_rank_mask=mask)
    kept = [view.clone() for view in views]
    results = results_of(alltoall.ep_rank, views[0])
    if in_place:
        place = alltoall.get_combine_payload_tensor_in_workspace(rows, own.x.shape[1], own.x.dtype)
        results = place.copy_(results)
    found = alltoall.combine(results, rows, in_place, active_rank_mask=mask, **options)
    return kept, found


#: Tokens of the ranks in turn, their experts, whether results are written in place. Some ranks have no tokens.
CASES = [((5, 16, 1, 0), "random", True), ((16,), "one", False), ((0, 3), "none", True), ((0,), "random", False)]
HIDDEN, EXPERTS, TOP_K, MOST = 40, 10, 3, 16  # 10 experts: the first ranks have one more


def run_cases(comm: Any, device: str) -> list[int]:
    """Run the cases on one table, twice, and return its offsets."""
    comm = EngineBackend(comm)
    rank, world = comm.Get_rank(), comm.Get_size()
    alltoall = make_exchange(comm, MOST, TOP_K, EXPERTS, HIDDEN, device)
    try:
        for repeat in range(2):
            for counts, kind, in_place in CASES:
                counts = [counts[r % len(counts)] for r in range(world)]
                sent = [tokens_of(r, n, EXPERTS, TOP_K, HIDDEN, kind, device) for r, n in enumerate(counts)]
                rows = max(max(counts), 1) if repeat else MOST
                views, found = exchange(alltoall, sent[rank], rows, in_place)
                check_received(rank, sent, views, EXPERTS, rows)
                check_combined(sent[rank], found, EXPERTS, world)
        found = exchange(alltoall, sent[rank], MOST, use_low_precision=True)[1]
        check_combined(sent[rank], found, EXPERTS, world, 0.1)
        return alltoall.metainfo.tolist()
    finally:
        comm.barrier()
        alltoall.destroy()


def partial_attention(comm: Any, device: str) -> None:
    """Exchange parts of attention in several shapes and rounds, as they are and merged."""
    rank, world = comm.Get_rank(), comm.Get_size()
    mapping = Mapping(world, rank, world, cp_size=world)
    table = decode_cp_a2a_allocate_mnnvl_workspace(mapping, mnnvl_config=MnnvlConfig(comm), device=device)
    decode_cp_a2a_init_workspace(table, rank, world)
    sizes = (64, 3, world, 64, torch.bfloat16)
    merging = decode_cp_a2a_lse_reduce_create_workspace(*sizes, comm, device=device)
    comm.barrier()
    reference = decode_cp_a2a_lse_reduce._trace_template.reference
    for repeat, (tokens, heads) in enumerate([(1, 3), (64, 3), (0, 3), (5, 1), (64, 2)]):
        for dtype in (torch.bfloat16, torch.float16):
            g = torch.Generator().manual_seed(repeat)
            o = torch.randn(world, tokens, heads, world, 64, generator=g).to(dtype)
            stats = torch.randn(world, tokens, heads, world, 2, generator=g)
            stats[..., 1] = float("nan")  # a slot that engines never write
            out = None
            if repeat == 1:
                out = torch.empty_like(o[0], device=device), torch.empty_like(stats[0], device=device)
            found = decode_cp_a2a_alltoall(o[rank].to(device), stats[rank].to(device), table, rank, world, out=out)
            assert torch.equal(found[0].cpu(), o[:, :, :, rank].movedim(0, 2))
            assert torch.equal(found[1].cpu()[..., 0], stats[:, :, :, rank, 0].movedim(0, 2))
            assert out is None or found[0] is out[0]
            lse = stats[..., 0].clone() * 8
            if tokens > 4:
                lse[:, 0, 0] = -float("inf")  # no rank has keys
                lse[0, 1], o[0, 1] = float("nan"), float("nan")
                lse[0, 2] = float("inf")
            mode = ("base2", "basee")[repeat % 2]
            merged = decode_cp_a2a_lse_reduce(o[rank].to(device), lse[rank].to(device), merging, rank, world, mode)
            want = reference(o[:, :, :, rank].movedim(0, 2), lse[:, :, :, rank].movedim(0, 2), mode)
            torch.testing.assert_close(merged.cpu(), want, rtol=1e-2, atol=1e-2)
    if device == "cuda":
        torch.cuda.synchronize()
    if comm.Get_size() > 1 and device == "cpu":  # several rounds: more rows than a slot has room for
        o = torch.full((9000, world, 128), float(rank)).half()
        found, _ = decode_cp_a2a_alltoall(o, torch.zeros(9000, world, 2), table, rank, world)
        assert torch.equal(found, torch.arange(world).half().view(1, -1, 1).expand_as(o))
    comm.barrier()
