# SPDX-License-Identifier: Apache-2.0
"""Templates and references of ``flashinfer.fused_moe.bgmv_moe`` and its parts: low-rank adapters of experts.

A table ``w_ptr`` holds addresses, so references read memory: a table is only good where its banks are.
"""

from __future__ import annotations

from typing import Any, Optional, Sequence

import torch

from ..notation import template_of_text
from .shared import normal, randint, seeded

__all__ = [
    "bgmv_moe_expand_trace",
    "bgmv_moe_gemm1_lora_delta_trace",
    "bgmv_moe_gemm2_lora_delta_trace",
    "bgmv_moe_shrink_trace",
    "bgmv_moe_trace",
]


def matrix_at(address: int, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Copy of the 16-bit numbers at an address, as float32."""
    count = rows * columns
    if torch.device(device).type == "cpu":
        import ctypes

        memory: Any = (ctypes.c_int16 * count).from_address(address)
        bits = torch.frombuffer(memory, dtype=torch.int16)
    else:
        array = {"data": (address, False), "shape": (count,), "typestr": "<i2", "version": 3}
        bits = torch.as_tensor(type("Memory", (), {"__cuda_array_interface__": array})(), device=device)
    return bits.view(dtype).view(rows, columns).float()


def matrix_of_pair(
    w_ptr: torch.Tensor,
    lora_stride: int,
    token: int,
    expert: int,
    lora_indices: torch.Tensor,
    rows: int,
    columns: int,
    dtype: torch.dtype,
) -> Optional[torch.Tensor]:
    """Matrix of a pair in one slice's row of a table, which must have it; None if the pair is skipped."""
    if not (0 <= token < lora_indices.shape[0] and 0 <= expert < w_ptr.shape[0]) or lora_indices[token] < 0:
        return None
    if w_ptr[expert] == 0:
        return None
    address = int(w_ptr[expert]) + int(lora_indices[token]) * lora_stride * 2
    return matrix_at(address, rows, columns, dtype, w_ptr.device)


def _bgmv_moe_shrink_reference(
    y: torch.Tensor,
    x: torch.Tensor,
    w_ptr: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    lora_indices: torch.Tensor,
    lora_stride: int,
    per_pair_input: bool = False,
    **_: Any,
) -> torch.Tensor:
    out = y.float().clone()
    for pair, (token, expert) in enumerate(zip(sorted_token_ids.tolist(), expert_ids.tolist(), strict=True)):
        for s in range(w_ptr.shape[0]):
            a = matrix_of_pair(w_ptr[s], lora_stride, token, expert, lora_indices, y.shape[2], x.shape[1], x.dtype)
            if a is not None:
                out[s, pair] += a @ x[pair if per_pair_input else token].float()
    return out.to(y.dtype)


def _bgmv_moe_expand_reference(
    y: torch.Tensor,
    x: torch.Tensor,
    w_ptr: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    lora_indices: torch.Tensor,
    slice_start_loc: torch.Tensor,
    output_slices: Sequence[int],
    lora_stride: int,
    finalize: bool = True,
    **_: Any,
) -> torch.Tensor:
    """The bank has the dtype that fill_w_ptr noted on the table, else that of x."""
    out, size = y.float().clone(), int(output_slices[0])
    dtype = getattr(w_ptr, "lora_dtype", x.dtype)
    for pair, (token, expert) in enumerate(zip(sorted_token_ids.tolist(), expert_ids.tolist(), strict=True)):
        for s in range(w_ptr.shape[0]):
            b = matrix_of_pair(w_ptr[s], lora_stride, token, expert, lora_indices, size, x.shape[2], dtype)
            if b is None:
                continue
            start = int(slice_start_loc[s])
            product = b @ x[s, pair].float()
            if finalize:
                out[token, start : start + size] += topk_weights[pair] * product
            else:
                out[pair, start : start + size] = product
    return out.to(y.dtype)


def _bgmv_moe_reference(
    x: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    lora_indices: torch.Tensor,
    topk_weights: torch.Tensor,
    lora_a_second: Optional[torch.Tensor] = None,
    lora_b_second: Optional[torch.Tensor] = None,
    output_dim: Optional[int] = None,
    **_: Any,
) -> torch.Tensor:
    slices = [(lora_a, lora_b)]
    if lora_a_second is not None and lora_b_second is not None:
        slices.append((lora_a_second, lora_b_second))
    columns = sum(b.shape[2] for _, b in slices)
    out = torch.zeros(x.shape[0], columns if output_dim is None else output_dim, device=x.device)
    for pair, (token, expert) in enumerate(zip(sorted_token_ids.tolist(), expert_ids.tolist(), strict=True)):
        if not (0 <= token < x.shape[0] and 0 <= expert < lora_a.shape[1]):
            continue
        if not 0 <= lora_indices[token] < lora_a.shape[0]:
            continue
        start, lora = 0, int(lora_indices[token])
        for a, b in slices:
            product = b[lora, expert].float() @ (a[lora, expert].float() @ x[token].float())
            out[token, start : start + b.shape[2]] += topk_weights[pair] * product
            start += b.shape[2]
    return out.to(x.dtype)


def _bgmv_moe_gemm1_lora_delta_reference(
    hidden_states: torch.Tensor,
    w_ptr_a: torch.Tensor,
    lora_stride_a: int,
    w_ptr_b: torch.Tensor,
    lora_stride_b: int,
    topk_ids: torch.Tensor,
    lora_ids: torch.Tensor,
    rank: int,
    intermediate_size: int,
    lora_dtype: torch.dtype = torch.bfloat16,
    scale: float = 1.0,
    out_dtype: torch.dtype = torch.bfloat16,
    **_: Any,
) -> torch.Tensor:
    tokens, top_k = topk_ids.shape
    hidden_size = hidden_states.shape[1]
    tables_a, tables_b = w_ptr_a.view(-1, w_ptr_a.shape[-1]), w_ptr_b.view(-1, w_ptr_b.shape[-1])
    size = 2 * intermediate_size // tables_b.shape[0]
    out = torch.zeros(tokens, top_k, 2 * intermediate_size, device=hidden_states.device)
    x = hidden_states.to(lora_dtype).float()
    for token in range(tokens):
        for slot, expert in enumerate(topk_ids[token].tolist()):
            for s in range(tables_b.shape[0]):
                table_a = tables_a[min(s, tables_a.shape[0] - 1)]
                a = matrix_of_pair(table_a, lora_stride_a, token, expert, lora_ids, rank, hidden_size, lora_dtype)
                b = matrix_of_pair(tables_b[s], lora_stride_b, token, expert, lora_ids, size, rank, lora_dtype)
                if a is not None and b is not None:
                    out[token, slot, s * size : (s + 1) * size] = scale * (b @ (a @ x[token]))
    return out.to(out_dtype)


def _bgmv_moe_gemm2_lora_delta_reference(
    gemm1_activation_output: torch.Tensor,
    expanded_idx_to_permuted_idx: torch.Tensor,
    w_ptr_a: torch.Tensor,
    lora_stride_a: int,
    w_ptr_b: torch.Tensor,
    lora_stride_b: int,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    lora_ids: torch.Tensor,
    rank: int,
    hidden_size: int,
    lora_dtype: torch.dtype = torch.bfloat16,
    scale: float = 1.0,
    out_dtype: torch.dtype = torch.bfloat16,
    **_: Any,
) -> torch.Tensor:
    tokens, top_k = topk_ids.shape
    x, rows = gemm1_activation_output.to(lora_dtype).float(), expanded_idx_to_permuted_idx.view(-1).tolist()
    out = torch.zeros(tokens, hidden_size, device=x.device)
    for token in range(tokens):
        for slot, expert in enumerate(topk_ids[token].tolist()):
            row, where = rows[token * top_k + slot], (token, expert, lora_ids)
            a = matrix_of_pair(w_ptr_a.view(-1), lora_stride_a, *where, rank, x.shape[1], lora_dtype)
            b = matrix_of_pair(w_ptr_b.view(-1), lora_stride_b, *where, hidden_size, rank, lora_dtype)
            if row >= 0 and a is not None and b is not None:
                out[token] += topk_weights[token, slot] * (b @ (a @ x[row]))
    return (scale * out).to(out_dtype)


def table_of_banks(banks: list[torch.Tensor]) -> torch.Tensor:
    """Addresses of the matrices of adapter 0; the table keeps its banks alive."""
    experts = banks[0].shape[1]
    rows = [[bank.data_ptr() + e * bank.stride(1) * bank.element_size() for e in range(experts)] for bank in banks]
    table: Any = torch.tensor(rows, dtype=torch.int64, device=banks[0].device)
    table.kept_alive, table.lora_dtype = banks, banks[0].dtype
    return table


def _bgmv_moe_shrink_init(
    *,
    pairs: int = 16,
    num_tokens: int = 8,
    rank: int = 16,
    hidden_size: int = 256,
    num_rows: int = 0,
    slices: int = 0,
    num_experts: int = 0,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    g = seeded(seed, device)
    bank = normal(g, 3, 4, rank, hidden_size) / 16
    return {
        "y": torch.zeros(1, pairs, rank, device=device),
        "x": normal(g, num_tokens, hidden_size),
        "w_ptr": table_of_banks([bank]),
        "sorted_token_ids": randint(g, num_tokens, pairs).long(),
        "expert_ids": randint(g, 4, pairs).long(),
        "lora_indices": randint(g, 3, num_tokens, low=-1).long(),
        "lora_stride": bank.stride(0),
    }


def _bgmv_moe_expand_init(
    *,
    pairs: int = 16,
    num_tokens: int = 8,
    rank: int = 16,
    columns: int = 256,
    num_rows: int = 0,
    slices: int = 0,
    num_experts: int = 0,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    g = seeded(seed, device)
    bank = normal(g, 3, 4, columns, rank) / 4
    return {
        "y": torch.zeros(num_tokens, columns, device=device),
        "x": normal(g, 1, pairs, rank),
        "w_ptr": table_of_banks([bank]),
        "sorted_token_ids": randint(g, num_tokens, pairs).long(),
        "expert_ids": randint(g, 4, pairs).long(),
        "topk_weights": normal(g, pairs, dtype=torch.float32),
        "lora_indices": randint(g, 3, num_tokens, low=-1).long(),
        "slice_start_loc": torch.zeros(1, dtype=torch.int64, device=device),
        "output_slices": [columns],
        "lora_stride": bank.stride(0),
    }


def _bgmv_moe_init(
    *,
    num_tokens: int,
    rank: int = 16,
    hidden_size: int = 256,
    features: int = 128,
    num_experts: int = 4,
    pairs: int = 0,
    max_loras: int = 0,
    output_dim: int = 0,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    g, pairs = seeded(seed, device), 2 * num_tokens
    return {
        "x": normal(g, num_tokens, hidden_size),
        "lora_a_weights": [normal(g, 3, num_experts, rank, hidden_size) / 16],
        "lora_b_weights": [normal(g, 3, num_experts, features, rank) / 4],
        "sorted_token_ids": torch.arange(pairs, device=device) // 2,
        "expert_ids": randint(g, num_experts, pairs).long(),
        "lora_indices": randint(g, 3, num_tokens, low=-1).long(),
        "topk_weights": normal(g, pairs, dtype=torch.float32),
        "num_experts": num_experts,
    }


def _bgmv_moe_gemm1_lora_delta_init(
    *,
    num_tokens: int,
    top_k: int = 2,
    hidden_size: int = 256,
    num_experts: int = 4,
    intermediate_size: int = 128,
    slices: int = 0,
    columns: int = 0,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    g = seeded(seed, device)
    a = [normal(g, 3, num_experts, 16, hidden_size) / 16 for _ in range(2)]
    b = [normal(g, 3, num_experts, intermediate_size, 16) / 4 for _ in range(2)]
    return {
        "hidden_states": normal(g, num_tokens, hidden_size),
        "w_ptr_a": table_of_banks(a),
        "lora_stride_a": a[0].stride(0),
        "w_ptr_b": table_of_banks(b),
        "lora_stride_b": b[0].stride(0),
        "topk_ids": randint(g, num_experts, num_tokens, top_k),
        "lora_ids": randint(g, 3, num_tokens, low=-1),
        "rank": 16,
        "intermediate_size": intermediate_size,
    }


def _bgmv_moe_gemm2_lora_delta_init(
    *,
    num_tokens: int,
    top_k: int = 2,
    num_experts: int = 4,
    intermediate_size: int = 128,
    hidden_size: int = 256,
    slices: int = 0,
    num_rows: int = 0,
    pairs: int = 0,
    columns: int = 0,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    g, pairs = seeded(seed, device), num_tokens * top_k
    a, b = normal(g, 3, num_experts, 16, intermediate_size) / 16, normal(g, 3, num_experts, hidden_size, 16) / 4
    return {
        "gemm1_activation_output": normal(g, pairs, intermediate_size),
        "expanded_idx_to_permuted_idx": torch.randperm(pairs, generator=g, device=device).int(),
        "w_ptr_a": table_of_banks([a]),
        "lora_stride_a": a.stride(0),
        "w_ptr_b": table_of_banks([b]),
        "lora_stride_b": b.stride(0),
        "topk_ids": randint(g, num_experts, num_tokens, top_k),
        "topk_weights": normal(g, num_tokens, top_k, dtype=torch.float32),
        "lora_ids": randint(g, 3, num_tokens, low=-1),
        "rank": 16,
        "hidden_size": hidden_size,
    }


_NOTES = {
    "w_ptr": "addresses of the matrices of adapter 0",
    "w_ptr_a": "addresses of the first matrices of adapter 0",
    "w_ptr_b": "addresses of the second matrices of adapter 0",
    "lora_indices": "adapter of each token; negative: none",
    "lora_ids": "adapter of each token; negative: none",
    "lora_stride": "elements between adapters",
    "expanded_idx_to_permuted_idx": "row of (token, slot); negative: skipped",
    "output_slices": "columns of each slice, all the same",
}
_PAIRS = "sorted_token_ids[pairs]; expert_ids[pairs];"

bgmv_moe_shrink_trace = template_of_text(
    "bgmv_moe_shrink_h{hidden_size}_r{rank}",
    "bgmv_moe",
    var="pairs num_rows num_tokens slices num_experts",
    inputs="y[slices, pairs, rank]; x[num_rows, hidden_size]; w_ptr[slices, num_experts];"
    f"{_PAIRS} lora_indices[num_tokens]; lora_stride:int64; per_pair_input:bool?",
    outputs="sum[slices, pairs, rank]<-y",
    notes=_NOTES,
    reference=_bgmv_moe_shrink_reference,
    init=_bgmv_moe_shrink_init,
    description="Add the product of each pair's row and the first matrix of its adapter.",
)

bgmv_moe_expand_trace = template_of_text(
    "bgmv_moe_expand_h{columns}_r{rank}",
    "bgmv_moe",
    var="pairs num_rows num_tokens slices num_experts",
    inputs="y[num_rows, columns]; x[slices, pairs, rank]; w_ptr[slices, num_experts];"
    f"{_PAIRS} topk_weights[pairs]; lora_indices[num_tokens]; slice_start_loc[slices]; output_slices:int32;"
    "lora_stride:int64; finalize:bool?",
    outputs="sum[num_rows, columns]<-y",
    notes=_NOTES,
    reference=_bgmv_moe_expand_reference,
    init=_bgmv_moe_expand_init,
    description="Multiply by the second matrix of each pair's adapter and add up the pairs of a token.",
)

bgmv_moe_trace = template_of_text(
    "bgmv_moe_h{hidden_size}_r{rank}_f{features}_e{num_experts}",
    "bgmv_moe",
    var="num_tokens pairs max_loras output_dim",
    inputs="x[num_tokens, hidden_size]; lora_a[max_loras, num_experts, rank, hidden_size]<-lora_a_weights[0];"
    "lora_b[max_loras, num_experts, features, rank]<-lora_b_weights[0];"
    f"{_PAIRS} lora_indices[num_tokens]; topk_weights[pairs];"
    "lora_a_second[max_loras, num_experts, rank, hidden_size]<-lora_a_weights[1]?;"
    "lora_b_second[max_loras, num_experts, features, rank]<-lora_b_weights[1]?; output_dim:int32?",
    outputs="out[num_tokens, output_dim]=x",
    notes=_NOTES,
    reference=_bgmv_moe_reference,
    init=_bgmv_moe_init,
    description="Apply both matrices of the adapters of one or two slices and add up the pairs of a token.",
)

_DELTA = "lora_stride_a:int64; w_ptr_b[(slices), num_experts]; lora_stride_b:int64; topk_ids[num_tokens, top_k];"

bgmv_moe_gemm1_lora_delta_trace = template_of_text(
    "bgmv_moe_gemm1_lora_delta_h{hidden_size}_k{top_k}_e{num_experts}",
    "bgmv_moe",
    var="num_tokens slices columns",
    inputs=f"hidden_states[num_tokens, hidden_size]; w_ptr_a[(slices), num_experts]; {_DELTA} lora_ids[num_tokens];"
    "rank:int32; intermediate_size:int32; scale:float32?",
    outputs="delta[num_tokens, top_k, columns]=out_dtype",
    notes=_NOTES,
    reference=_bgmv_moe_gemm1_lora_delta_reference,
    init=_bgmv_moe_gemm1_lora_delta_init,
    description="What adapters add to the first product of a gated layer, for each slot.",
)

bgmv_moe_gemm2_lora_delta_trace = template_of_text(
    "bgmv_moe_gemm2_lora_delta_i{intermediate_size}_k{top_k}_e{num_experts}",
    "bgmv_moe",
    var="num_tokens slices num_rows pairs columns",
    inputs="gemm1_activation_output[num_rows, intermediate_size]; expanded_idx_to_permuted_idx[pairs];"
    f"w_ptr_a[(slices), num_experts]; {_DELTA} topk_weights[num_tokens, top_k]; lora_ids[num_tokens];"
    "rank:int32; hidden_size:int32; scale:float32?",
    outputs="delta[num_tokens, columns]=out_dtype",
    notes=_NOTES,
    reference=_bgmv_moe_gemm2_lora_delta_reference,
    init=_bgmv_moe_gemm2_lora_delta_init,
    description="What adapters add to the output of a layer.",
)
