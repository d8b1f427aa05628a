# SPDX-License-Identifier: Apache-2.0
"""Template and reference of ``flashinfer.comm.allreduce_fusion``.

The definition of one rank's call cannot hold the inputs of its peers: it describes the group of one rank. The reference
takes the inputs of several ranks, stacked in rank order, as well.
"""

from __future__ import annotations

import math
from typing import Any, Optional, Union

import torch

from ..template import Const, Scalar, Tensor, TraceTemplate, Var
from .shared import normal, seeded

__all__ = [
    "allreduce_fusion_trace",
    "decode_cp_a2a_alltoall_trace",
    "decode_cp_a2a_lse_reduce_trace",
    "moe_a2a_combine_trace",
    "moe_a2a_dispatch_trace",
    "moe_comm_trace",
    "vllm_all_reduce_trace",
]


def _allreduce_fusion_reference(
    input: torch.Tensor,
    pattern: int,
    residual_in: Optional[torch.Tensor] = None,
    rms_gamma: Optional[torch.Tensor] = None,
    rms_eps: float = 1e-6,
    scale_factor: Union[torch.Tensor, float, None] = None,
    weight_bias: float = 0.0,
    block_quant_group_size: Optional[int] = None,
    layout_code: Optional[int] = None,
    quant_out: Optional[torch.Tensor] = None,
    moe_reduction_scale_input: Optional[torch.Tensor] = None,
    moe_reduction_active_experts_token_input: Optional[torch.Tensor] = None,
    moe_reduction_token_input: Optional[torch.Tensor] = None,
    expanded_idx_to_permuted_idx: Optional[torch.Tensor] = None,
    expert_scale_factor: Optional[torch.Tensor] = None,
    shared_expert_output: Optional[torch.Tensor] = None,
    **_: Any,
) -> tuple[Optional[torch.Tensor], ...]:
    dtype = input.dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if pattern == 6 and moe_reduction_active_experts_token_input is not None:
        assert moe_reduction_scale_input is not None and moe_reduction_token_input is not None
        experts = moe_reduction_active_experts_token_input.to(wide) * moe_reduction_scale_input.unsqueeze(-1)
        input = (experts.sum(0) + moe_reduction_token_input.to(wide)).to(dtype)
    if pattern == 7 and expanded_idx_to_permuted_idx is not None:
        index = expanded_idx_to_permuted_idx.long()
        rows = torch.where(index.unsqueeze(-1) >= 0, input[index.clamp(min=0)].to(wide), 0)
        if expert_scale_factor is not None:
            rows = rows * expert_scale_factor.to(wide).unsqueeze(-1)
        total = rows.sum(1)
        input = (total if shared_expert_output is None else total + shared_expert_output.to(wide)).to(dtype)
    parts = input if input.ndim == 3 else input.unsqueeze(0)
    total = torch.zeros(parts.shape[1:], dtype=wide, device=input.device)
    for part in parts:  # in rank order
        total = total + part.to(wide)
    output = total.to(dtype)
    if pattern == 0 or residual_in is None or rms_gamma is None:
        return output, None, None, None, None
    residual_out = (output.to(wide) + residual_in.to(wide)).to(dtype)
    x = residual_out.to(wide)
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + rms_eps)
    norm_out = (x * rstd * (weight_bias + rms_gamma.to(wide))).to(dtype)
    if pattern in (3, 5) or (pattern in (6, 7) and quant_out is not None):
        return output, residual_out, norm_out, *_fp4_blocks(norm_out.to(wide), scale_factor, layout_code or 0)
    if pattern in (1, 6, 7):
        return output, residual_out, norm_out, None, None
    scale_out = None
    if pattern in (8, 9) and block_quant_group_size is not None:
        return output, residual_out, norm_out, *_packed_groups(norm_out.to(wide), block_quant_group_size)
    if pattern in (10, 11):
        scale_out = norm_out.to(wide).abs().amax(-1, keepdim=True).clamp(min=1 / 512) / 448
        scaled = norm_out.to(wide) / scale_out
    else:
        scaled = norm_out.to(wide) * (1 / (1.0 if scale_factor is None else scale_factor))
    quant_out = scaled.clamp(-448, 448).to(torch.float8_e4m3fn)
    return output, residual_out, norm_out, quant_out, scale_out


def _packed_groups(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e4m3 codes, and the exponents of the groups' scales, four bytes to a word, column by column."""
    tokens, hidden = x.shape
    grouped = x.view(tokens, -1, group)
    wanted = (grouped.abs().amax(-1) / 448).clamp(min=1e-10)
    mantissa, exponent = torch.frexp(wanted)  # wanted = mantissa * 2^exponent, mantissa in [0.5, 1)
    exponent = exponent - (mantissa == 0.5).int()
    codes = (grouped * torch.exp2(-exponent.to(x.dtype)).unsqueeze(-1)).clamp(-448, 448).to(torch.float8_e4m3fn)
    packs, padded = -(-exponent.shape[1] // 4), -(-tokens // 4) * 4
    words = torch.zeros(packs, padded, 4, dtype=torch.uint8, device=x.device)
    for g in range(exponent.shape[1]):
        words[g // 4, :tokens, g % 4] = (exponent[:, g] + 127).to(torch.uint8)
    return codes.view(tokens, hidden), words.view(torch.int32).view(packs, padded).T[:tokens]


def _fp4_blocks(
    x: torch.Tensor, scale_factor: Union[torch.Tensor, float, None], layout: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e2m1 codes, two to a byte, and the e4m3 bytes of scales of 16 columns in a layout; padding is 0."""
    tokens, columns = x.shape[0], x.shape[1] // 16
    factor = torch.as_tensor(1.0 if scale_factor is None else scale_factor, dtype=x.dtype, device=x.device).reshape(())
    blocks = x.view(tokens, columns, 16)
    scale = (factor * blocks.abs().amax(-1) / 6).clamp(max=448).to(torch.float8_e4m3fn)
    wide = scale.to(x.dtype)
    magnitude = blocks.abs() * torch.where(wide == 0, 0.0, factor / wide).unsqueeze(-1)
    codes = torch.zeros(magnitude.shape, dtype=torch.uint8, device=x.device)
    for i, limit in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)):  # ties go to the even code
        codes += magnitude > limit if i % 2 == 0 else magnitude >= limit
    codes = torch.where(wide.unsqueeze(-1) == 0, 0, codes + torch.signbit(blocks) * 8).to(torch.uint8).flatten(1)
    in_tile = {0: 128, 1: 8, 2: 1}[layout]
    rows, padded = -(-tokens // in_tile) * in_tile, columns if layout == 2 else -(-columns // 4) * 4
    r, c = torch.arange(tokens).unsqueeze(1), torch.arange(columns).unsqueeze(0)
    if layout == 0:
        place = r // 128 * 128 * padded + c // 4 * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
    elif layout == 1:
        place = r // 8 * 8 * padded + c // 4 * 32 + r % 8 * 4 + c % 4
    else:
        place = r * columns + c
    found = torch.zeros(rows * padded, dtype=torch.uint8, device=x.device)
    found[place.flatten().to(x.device)] = scale.view(torch.uint8).flatten()
    return codes[:, 0::2] | (codes[:, 1::2] << 4), found


def _allreduce_fusion_init(
    *, num_tokens: int, hidden_size: int = 4096, device: Any = "cuda", seed: int = 0
) -> dict[str, Any]:
    g = seeded(seed, device)
    return {
        "input": normal(g, num_tokens, hidden_size),
        "pattern": 1,
        "residual_in": normal(g, num_tokens, hidden_size),
        "rms_gamma": normal(g, hidden_size),
    }


_ROWS = ("num_tokens", "hidden_size")

allreduce_fusion_trace = TraceTemplate(
    "comm",
    axes={"num_tokens": Var(), "hidden_size": Const(abbrev="h"), "one": Const(abbrev="", value=1)},
    inputs={
        "input": Tensor(_ROWS, description="what this rank adds to the sum"),
        "pattern": Scalar("int32"),
        "residual_in": Tensor(_ROWS, optional=True),
        "rms_gamma": Tensor(("hidden_size",), optional=True),
        "rms_eps": Scalar(optional=True),
        "weight_bias": Scalar(optional=True),
    },
    outputs={
        "output": Tensor(_ROWS, dtype_from="input", optional=True),
        "residual_out": Tensor(_ROWS, dtype_from="input", optional=True),
        "norm_out": Tensor(_ROWS, dtype_from="input", optional=True),
        "quant_out": Tensor(_ROWS, dtype="float8_e4m3fn", optional=True),
        "scale_out": Tensor(("num_tokens", "one"), dtype="float32", optional=True),
    },
    name_prefix="allreduce_fusion",
    reference=_allreduce_fusion_reference,
    init=_allreduce_fusion_init,
    description="The sum over ranks, with residual, RMS norm and quantisation after it.",
)


def _moe_a2a_dispatch_reference(
    token_selected_experts: torch.Tensor, input_payloads: Any, runtime_max_tokens_per_rank: int, **_: Any
) -> Any:
    """One rank receives its own tokens, those with an expert, in order."""
    payloads = input_payloads if isinstance(input_payloads, (list, tuple)) else [input_payloads]
    kept = (token_selected_experts >= 0).any(-1)
    found = []
    for x in payloads:
        rows = x.new_zeros(1, runtime_max_tokens_per_rank, *x.shape[1:])
        rows[0, : int(kept.sum())] = x[kept]
        found.append(rows)
    return found[0]


def _moe_a2a_combine_reference(payload: torch.Tensor, local_num_tokens: int, **_: Any) -> torch.Tensor:
    return payload[0, :local_num_tokens].clone()


_A2A_AXES: dict[str, Union[Var, Const]] = {
    "num_tokens": Var(),
    "hidden_size": Const(abbrev="h"),
    "topk": Const(),
    "ep_size": Const(abbrev="ep"),
}

moe_a2a_dispatch_trace = TraceTemplate(
    "comm",
    axes={**_A2A_AXES, "rows_per_rank": Var()},
    inputs={
        "token_selected_experts": Tensor(("num_tokens", "topk")),
        "input_payloads": Tensor(("num_tokens", "hidden_size"), tuple_idx=0),
        "runtime_max_tokens_per_rank": Scalar("int32"),
        **{name: Scalar("int32") for name in ("ep_rank", "ep_size", "top_k", "num_experts")},
    },
    outputs={"received": Tensor(("ep_size", "rows_per_rank", "hidden_size"), dtype_from="input_payloads")},
    name_prefix="moe_a2a_dispatch",
    reference=_moe_a2a_dispatch_reference,
    description="Tokens at the ranks of their experts.",
)

moe_a2a_combine_trace = TraceTemplate(
    "comm",
    axes={"rows_per_rank": Var(), "num_tokens": Var(), "hidden_size": Const(abbrev="h"), "ep_size": Const(abbrev="ep")},
    inputs={
        "payload": Tensor(("ep_size", "rows_per_rank", "hidden_size")),
        "local_num_tokens": Scalar("int32"),
        **{name: Scalar("int32") for name in ("runtime_max_tokens_per_rank", "ep_rank", "top_k")},
        "combine_payload_offset": Scalar("int64"),
    },
    outputs={"output": Tensor(("num_tokens", "hidden_size"), dtype_from="payload")},
    name_prefix="moe_a2a_combine",
    reference=_moe_a2a_combine_reference,
    description="Sums of the results of each token over the ranks it went to.",
)


def _decode_cp_a2a_alltoall_reference(partial_o: torch.Tensor, softmax_stats: torch.Tensor, **_: Any) -> Any:
    """One rank keeps its own parts."""
    return partial_o.clone(), softmax_stats.clone()


def _decode_cp_a2a_lse_reduce_reference(
    partial_o: torch.Tensor, partial_lse: torch.Tensor, lse_mode: str = "base2", **_: Any
) -> torch.Tensor:
    """Merge parts ``(..., cp, D)`` of the same rows by their LSE."""
    lse = partial_lse.double() * (1.0 if lse_mode == "base2" else math.log2(math.e))
    lse = torch.where(lse < math.inf, lse, -math.inf)  # NaN as well
    most = lse.amax(-1, keepdim=True)
    weights = torch.where(most > -math.inf, torch.exp2(lse - most.clamp(min=-1e300)), 0.0)
    total = weights.sum(-1, keepdim=True)
    weights = torch.where(total > 0, weights / total, 0.0)
    parts = torch.where(weights.unsqueeze(-1) > 0, partial_o.double(), 0.0)
    return (parts * weights.unsqueeze(-1)).sum(-2).to(partial_o.dtype)


_CP_AXES: dict[str, Union[Var, Const]] = {
    "num_tokens": Var(),
    "num_heads": Const(abbrev="h"),
    "cp_size": Const(abbrev="cp"),
    "head_dim": Const(abbrev="d"),
}
_PARTS = ("num_tokens", "num_heads", "cp_size", "head_dim")

decode_cp_a2a_alltoall_trace = TraceTemplate(
    "comm",
    axes={**_CP_AXES, "stats_per_part": Const(abbrev="s")},
    inputs={
        "partial_o": Tensor(_PARTS),
        "softmax_stats": Tensor(("num_tokens", "num_heads", "cp_size", "stats_per_part")),
        "cp_rank": Scalar("int32"),
    },
    outputs={
        "o": Tensor(_PARTS, dtype_from="partial_o"),
        "stats": Tensor(("num_tokens", "num_heads", "cp_size", "stats_per_part"), dtype="float32"),
    },
    name_prefix="decode_cp_a2a_alltoall",
    reference=_decode_cp_a2a_alltoall_reference,
    description="Partial attention of all ranks for the rows of this one.",
)

decode_cp_a2a_lse_reduce_trace = TraceTemplate(
    "comm",
    axes=_CP_AXES,
    inputs={"partial_o": Tensor(_PARTS), "partial_lse": Tensor(_PARTS[:3]), "cp_rank": Scalar("int32")},
    outputs={"o": Tensor(("num_tokens", "num_heads", "head_dim"), dtype_from="partial_o")},
    name_prefix="decode_cp_a2a_lse_reduce",
    reference=_decode_cp_a2a_lse_reduce_reference,
    description="Partial attention of all ranks for the rows of this one, merged by LSE.",
)


def _vllm_all_reduce_reference(inp: torch.Tensor, **_: Any) -> torch.Tensor:
    """Return the sum of the inputs of several ranks, stacked in rank order; that of one rank is its sum."""
    parts = inp if inp.ndim == 2 else inp.unsqueeze(0)
    total = torch.zeros(parts.shape[1:], dtype=torch.promote_types(inp.dtype, torch.float32), device=inp.device)
    for part in parts:
        total = total + part.to(total.dtype)
    return total.to(inp.dtype)


vllm_all_reduce_trace = TraceTemplate(
    "comm",
    axes={"size": Var()},
    inputs={
        "fa": Scalar("int64", description="handle of the group"),
        "inp": Tensor(("size",), description="what this rank adds to the sum"),
        "reg_buffer": Scalar("int64"),
        "reg_buffer_sz_bytes": Scalar("int64"),
        "num_ctas": Scalar("int32"),
    },
    outputs={"out": Tensor(("size",), param="out", dtype_from="inp")},
    name_prefix="vllm_all_reduce",
    reference=_vllm_all_reduce_reference,
    description="The sum over ranks that read each other's inputs.",
)


def _moe_comm_reference(
    input: torch.Tensor,
    send_rank_cum_sum: torch.Tensor,
    send_indices: torch.Tensor,
    output: torch.Tensor,
    recv_rank_cum_sum: torch.Tensor,
    recv_indices: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """One rank sends to itself."""
    found = output.clone()
    found[recv_indices[: int(recv_rank_cum_sum[-1])].long()] = input[send_indices[: int(send_rank_cum_sum[-1])].long()]
    return found


moe_comm_trace = TraceTemplate(
    "comm",
    axes={
        **{name: Var() for name in ("input_rows", "output_rows", "sends", "receives")},
        "row_size": Const(abbrev="h"),
        "ep_size": Const(abbrev="ep"),
    },
    inputs={
        "input": Tensor(("input_rows", "row_size")),
        "send_rank_cum_sum": Tensor(("ep_size",)),
        "send_indices": Tensor(("sends",)),
        "output": Tensor(("output_rows", "row_size")),
        "recv_rank_cum_sum": Tensor(("ep_size",)),
        "recv_indices": Tensor(("receives",)),
        "ep_rank": Scalar("int32"),
    },
    outputs={"output": Tensor(("output_rows", "row_size"), dtype_from="input")},
    name_prefix="moe_comm",
    reference=_moe_comm_reference,
    description="Rows sent to the ranks that expect them, in the order of the sender.",
)
