# SPDX-License-Identifier: Apache-2.0
"""Calls of experts, adapters, routing, order and copies of rows that ``tests/guard_pages.py`` runs beside guard pages.

Numbers of tokens, experts, adapters, rows and groups are now and then negative or too large; sizes now and then do not
agree. Each function draws one call.
"""

from __future__ import annotations

from typing import Any

import torch

from flashinfer.fused_moe import (
    ActivationType,
    MoEActivationPack,
    MoELayer,
    MoEWeightPack,
    RoutingInputMode,
    RoutingMethodType,
    bgmv_moe,
    bgmv_moe_expand,
    bgmv_moe_gemm1_lora_delta,
    bgmv_moe_gemm2_lora_delta,
    bgmv_moe_shrink,
    core,
    cutlass_fused_moe,
    cutlass_fused_moe_workspace_size,
    fill_w_ptr,
    fused_topk_deepseek,
    hash_topk,
    interleave_for_tma_wgmma_up,
    mixed_weights,
    moe_permute,
    moe_sort,
    moe_unpermute,
    mono_moe,
    route_tokens,
    utils,
)

from ..guard_pages import Call, Draw
from .test_moe_layer import config

F16, BF16, F32, E4M3 = torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn
FLOATS = (F32, F16, BF16)


def finite(*tensors: torch.Tensor) -> None:
    assert all(bool(tensor.isfinite().all()) for tensor in tensors), "a result is not finite: memory beside was read"


# Adapters -----------------------------------------------------------------------------------------------------------


def table_of(draw: Draw, rows: int, columns: int, dtype: torch.dtype, slices: int, experts: int) -> tuple[Any, int]:
    """Return a table of banks that are as the call needs them, or now and then not, and the stride of its adapters."""
    w_ptr = draw.guard(torch.zeros(slices, experts, dtype=torch.int64))
    loras, stride = draw.size(1, 2, 3), 0
    for i in range(slices):
        shape = (loras, experts, draw.number(rows, 0.02), draw.number(columns, 0.02))
        if min(shape) < 0 or max(shape) > 4096:
            shape = (loras, experts, rows + 1, columns)
        stride = fill_w_ptr(
            w_ptr, draw.tensor(shape, draw.choice((F16, BF16)) if draw.chance(0.03) else dtype), experts, i
        )
    if draw.chance(0.1):
        w_ptr[0, draw.randrange(experts)] = 0  # an expert without matrices
    return w_ptr, stride + (8 if draw.chance(0.02) else 0)


def draw_shrink(draw: Draw) -> Call:
    dtype, tokens, pairs, rank, features = (
        draw.choice((F16, BF16)),
        *(draw.size(*sizes) for sizes in ((1, 3), (0, 1, 7), (1, 5, 8, 24), (1, 13, 16, 72))),
    )
    slices, experts, per_pair = draw.size(1, 2), draw.size(1, 4), draw.chance(0.3)
    w_ptr, stride = table_of(draw, rank, features, dtype, slices, experts)
    y = draw.guard(torch.zeros(slices, pairs, rank, dtype=draw.choice((F32, dtype))))
    return Call(
        bgmv_moe_shrink,
        *(y, draw.tensor((pairs if per_pair else tokens, features), dtype), w_ptr),
        *(
            draw.indices(pairs, tokens),
            draw.indices(pairs, experts),
            draw.indices(tokens + draw.chance(0.1), 2),
            stride,
        ),
        per_pair_input=per_pair,
        check=lambda _: finite(y),
    )


def draw_expand(draw: Draw) -> Call:
    dtype, tokens, pairs = draw.choice((F16, BF16)), draw.size(1, 3), draw.size(0, 1, 7)
    rank, columns, slices, experts = draw.size(1, 5, 8, 24), draw.size(1, 7, 40), draw.size(1, 2), draw.size(1, 4)
    w_ptr, stride = table_of(draw, columns, rank, dtype, slices, experts)
    finalize, width = draw.chance(0.7), slices * columns + draw.size(0, 3)
    y = draw.guard(torch.zeros(tokens if finalize else pairs, width))
    starts = (
        draw.guard(torch.tensor([i * columns for i in range(slices)]))
        if draw.chance(0.9)
        else draw.indices(slices, width)
    )
    return Call(
        bgmv_moe_expand,
        *(y, draw.tensor((slices, pairs, rank), draw.choice((F32, dtype))), w_ptr),
        *(draw.indices(pairs, tokens), draw.indices(pairs, experts), draw.tensor(pairs), draw.indices(tokens, 2)),
        *(starts, [draw.number(columns, 0.02)] * slices, stride),
        finalize=finalize,
        check=lambda _: finite(y),
    )


def draw_bgmv_moe(draw: Draw) -> Call:
    dtype, tokens, pairs = draw.choice((F16, BF16)), draw.size(0, 1, 3), draw.size(0, 1, 7)
    rank, features, experts, loras = draw.size(1, 8, 20), draw.size(1, 16, 45), draw.size(1, 4), draw.size(0, 1, 3)
    outs = [draw.size(1, 8, 33) for _ in range(draw.size(1, 2))]
    a = [draw.tensor((loras, experts, rank, features), dtype) for _ in outs]
    b = [draw.tensor((loras + draw.chance(0.05), experts, out, rank), dtype) for out in outs]
    index = draw.choice((torch.int32, torch.int64))
    by = (draw.indices(n, end, index) for n, end in ((pairs, tokens), (pairs, experts), (tokens, loras)))
    x = draw.tensor((tokens, features), dtype)
    output_dim = draw.choice((None, sum(outs), sum(outs) + 5))
    return Call(bgmv_moe, x, a, b, *by, draw.tensor(pairs), experts, output_dim, check=finite)


def draw_gemm1(draw: Draw) -> Call:
    dtype, tokens, top_k, experts = draw.choice((F16, BF16)), draw.size(0, 1, 3), draw.size(1, 2), draw.size(1, 4)
    rank, hidden, inner = draw.size(1, 8, 20), draw.size(1, 16, 45), draw.size(1, 8, 12)
    of_a, of_b = draw.choice(((1, 1), (1, 2), (2, 2)))
    w_a, stride_a = table_of(draw, rank, hidden, dtype, of_a, experts)
    other = experts + draw.chance(0.05)
    w_b, stride_b = table_of(draw, 2 * inner // of_b, rank, dtype, of_b, other)
    index = draw.choice((torch.int32, torch.int64))
    return Call(
        bgmv_moe_gemm1_lora_delta,
        *(
            draw.tensor((tokens, hidden), dtype),
            w_a,
            stride_a,
            w_b,
            stride_b,
            draw.indices((tokens, top_k), experts, index),
        ),
        *(draw.indices(tokens, 2, index), -1 if draw.chance(0.03) else rank, inner),
        lora_dtype=dtype,
        check=finite,
    )


def draw_gemm2(draw: Draw) -> Call:
    dtype, tokens, top_k, experts = draw.choice((F16, BF16)), draw.size(0, 1, 3), draw.size(1, 2), draw.size(1, 4)
    rank, hidden, inner, rows = draw.size(1, 8, 20), draw.size(1, 16, 45), draw.size(1, 8, 12), draw.size(1, 4)
    w_a, stride_a = table_of(draw, rank, inner, dtype, 1, experts)
    w_b, stride_b = table_of(draw, hidden, rank, dtype, 1, experts + draw.chance(0.05))
    index = draw.choice((torch.int32, torch.int64))
    return Call(
        bgmv_moe_gemm2_lora_delta,
        *(draw.tensor((rows, inner), dtype), draw.indices(tokens * top_k, rows, index), w_a, stride_a, w_b, stride_b),
        *(draw.indices((tokens, top_k), experts, index), draw.tensor((tokens, top_k)), draw.indices(tokens, 2, index)),
        *(rank, hidden),
        lora_dtype=dtype,
        check=finite,
    )


# Routing and order --------------------------------------------------------------------------------------------------


def within(end: int) -> Any:
    """Return a check that weights are finite and that experts are different and exist."""

    def check(result: tuple[torch.Tensor, torch.Tensor]) -> None:
        weights, experts = result
        finite(weights)
        for row in experts.tolist():
            assert len(set(row)) == len(row) and all(0 <= expert < end for expert in row), row

    return check


def draw_route(draw: Draw) -> Call:
    tokens, experts, groups = draw.size(0, 1, 5), draw.size(1, 8, 16, 160), draw.size(1, 2, 8)
    method = draw.choice([method for method in RoutingMethodType if method.name != "Unspecified"])
    is_grouped = method is RoutingMethodType.DeepSeekV3
    bias = draw.tensor(experts, draw.choice(FLOATS)) if is_grouped and draw.chance(0.8) else None
    top_k = 1 if method is RoutingMethodType.Llama4 else draw.number(draw.size(1, 2, 8), 0.05)
    options = {"n_group": groups, "topk_group": draw.number(draw.size(1, 2), 0.05)} if is_grouped else {}
    logits = draw.tensor((tokens, experts), draw.choice(FLOATS))
    return Call(route_tokens, logits, min(top_k, 1 << 20), method, bias, **options, check=within(experts))


def draw_deepseek(draw: Draw) -> Call:
    tokens, experts, groups, topk = draw.size(0, 1, 5), draw.size(8, 64, 160), draw.size(1, 2, 8), draw.size(1, 4, 8)
    scores, dtype = draw.tensor((tokens, experts), draw.choice(FLOATS)), draw.choice((F32, BF16))
    weights = draw.guard(torch.zeros(tokens, topk).to(scores.dtype if dtype is not F32 else F32))
    ids, replay = draw.guard(torch.zeros(tokens, topk).int()), draw.guard(torch.zeros(tokens + 1, topk).short())
    return Call(
        fused_topk_deepseek,
        *(
            scores,
            draw.tensor(experts + draw.chance(0.03), draw.choice(FLOATS)),
            groups,
            draw.number(draw.size(1, 2, 4), 0.05),
        ),
        *(topk, 2.5, weights, ids),
        routing_replay_out=replay if draw.chance(0.3) else None,
        check=lambda _: within(experts)((weights, ids)),
    )


def draw_hash_topk(draw: Draw) -> Call:
    tokens, experts, words, topk = draw.size(0, 1, 5), draw.size(1, 8, 64), draw.size(1, 9), draw.size(1, 2, 4)
    return Call(
        hash_topk,
        *(
            draw.tensor((tokens, experts)),
            draw.indices(tokens, words),
            draw.indices((words, topk), experts, torch.int32, 0.1),
        ),
        draw.size(0, 1),
        1.5,
    )


def draw_sort(draw: Draw) -> Call:
    tokens, top_k, experts, tile = draw.size(0, 1, 7, 70), draw.size(1, 2, 8), draw.size(1, 4, 60), draw.size(1, 4, 128)
    first = draw.number(draw.randrange(experts), 0.05)
    local = draw.number(draw.randint(1, experts), 0.05)
    tiles = utils.get_hybrid_num_tokens_buckets(4)[-1] if draw.chance(0.05) else tokens * top_k
    given = {"out_tile_idx_to_expert_idx": draw.guard(torch.zeros(tiles).int())} if draw.chance(0.2) else {}
    ids = draw.indices((tokens, top_k), experts, torch.int32)
    return Call(moe_sort, ids, None, experts, top_k, first, local, draw.number(tile, 0.05) % (1 << 20), **given)


def draw_permute(draw: Draw) -> Call:
    tokens, top_k, rows, hidden = draw.size(1, 3), draw.size(1, 2), draw.size(0, 1, 9), draw.size(1, 7, 64)
    x = draw.tensor((tokens, hidden), draw.choice((*FLOATS, E4M3)))
    out = draw.guard(torch.zeros(rows, hidden, dtype=x.dtype))
    pairs = draw.indices(rows, tokens * top_k, torch.int32)
    return Call(moe_permute, x, out, None, pairs, None, draw.number(rows, 0.1), draw.number(top_k, 0.05), 8)


def draw_unpermute(draw: Draw) -> Call:
    tokens, top_k, rows, hidden = draw.size(0, 1, 3), draw.size(1, 2), draw.size(1, 9), draw.size(1, 7, 64)
    x, where = draw.tensor((rows, hidden), draw.choice(FLOATS)), draw.indices((tokens, top_k), rows, torch.int32)
    out = draw.guard(torch.zeros(tokens, hidden, dtype=x.dtype))
    scales = draw.tensor((tokens, top_k)) if draw.chance(0.7) else None
    return Call(moe_unpermute, x, out, where, scales, draw.number(tokens, 0.05), top_k, check=lambda _: finite(out))


# Layers -------------------------------------------------------------------------------------------------------------


def draw_layer(draw: Draw) -> Call:
    dtype, tokens, top_k = draw.choice((BF16, F16)), draw.size(0, 1, 5, 40), draw.size(1, 2)
    experts, hidden, inner = draw.size(1, 4), draw.size(8, 64, 72), draw.size(8, 64, 72)
    activation = draw.choice([x for x in ActivationType if x is not ActivationType.InvalidType])
    rows, bad = (2 if activation.is_gated else 1) * inner, draw.chance(0.05)
    w1, w2 = (draw.guard((torch.randn(experts, *s) / 16).to(dtype)) for s in ((rows, hidden), (hidden, inner + bad)))
    options: dict[str, Any] = {"activation_type": activation}
    if draw.chance(0.3):
        options["fc1_expert_biases"] = draw.tensor((experts, rows), dtype)
        options["fc2_expert_biases"] = draw.tensor((experts, hidden + draw.chance(0.05)), dtype)
    if draw.chance(0.3):
        options["output"] = draw.guard(torch.zeros(tokens, hidden, dtype=dtype))
    if draw.chance(0.3) and tokens:
        sizes = (tokens, hidden, inner, experts, top_k)
        size = cutlass_fused_moe_workspace_size(
            *sizes, x_dtype=dtype, weight_dtype=dtype, activation_type=activation, device="cpu"
        )
        aligned = -(-size // 64) * 64
        options["workspace_buffer"] = draw.guard(torch.zeros(aligned - 64 * draw.chance(0.2), dtype=torch.uint8))
    if draw.chance(0.2):
        options |= {"ep_size": 2, "ep_rank": draw.size(0, 1)}
    scales = draw.tensor((tokens, top_k)) if draw.chance(0.8) else None
    ids = draw.indices((tokens, top_k), experts * options.get("ep_size", 1), torch.int32)
    x = draw.tensor((tokens, hidden), dtype)
    return Call(cutlass_fused_moe, x, ids, scales, w1, w2, dtype, [], **options, check=lambda out: finite(out[0]))


def draw_mxfp4(draw: Draw) -> Call:
    tokens, top_k, experts, hidden, inner = draw.size(0, 1, 5), 2, draw.size(1, 3), 128, 128
    w1, w2 = (draw.tensor((experts, n, k // 2), torch.uint8) for n, k in ((2 * inner, hidden), (hidden, inner)))
    scales = [
        draw.guard(torch.full((experts, n // 64, k // 128, 16, 16), 120, dtype=torch.uint8))
        for n, k in ((2 * inner, hidden + 128 * draw.chance(0.05)), (hidden, inner))
    ]
    ids, x = draw.indices((tokens, top_k), experts, torch.int32), draw.tensor((tokens, hidden), BF16)
    return Call(
        *(cutlass_fused_moe, x, ids, draw.tensor((tokens, top_k)), w1, w2, BF16, scales),
        use_w4_group_scaling=True,
        check=lambda out: finite(out[0]),
    )


def draw_moe_layer(draw: Draw) -> Call:
    tokens, (experts, top_k, hidden, inner) = draw.size(0, 1, 5), (4, 2, 128, 128)
    layer, weights = MoELayer(config(), "cpu"), MoEWeightPack()
    w1, w2 = (torch.randn(experts, *s).to(BF16) / 16 for s in ((2 * inner, hidden), (hidden, inner)))
    view = {"fc1_expert_weights": draw.guard(w1), "fc2_expert_weights": draw.guard(w2)}
    weights.prepare_for("cutlass_bf16", view)
    mode = RoutingInputMode.UnpackedPrecomputed
    ids = draw.indices((tokens, draw.number(top_k, 0.05) % 64), experts, torch.int32)
    pack = MoEActivationPack(
        *(draw.tensor((tokens, hidden), BF16), None, ids, draw.tensor(tuple(ids.shape))), routing_input_mode=mode
    )
    return Call(layer.__call__, pack, weights, check=finite)


def draw_mono_moe(draw: Draw) -> Call:
    tokens, experts, hidden, inner = draw.size(0, 1, 3), draw.size(1, 4), 128, 128
    x, logits = draw.tensor((tokens, hidden), BF16), draw.tensor((tokens, experts + draw.chance(0.05)), BF16)
    up, down = (draw.guard((torch.randn(experts, *s) / 8).to(E4M3)) for s in ((2 * inner, hidden), (hidden, inner)))
    if draw.chance(0.2):
        return Call(interleave_for_tma_wgmma_up, up)
    scales = [draw.guard(torch.ones(experts, n, 1)) for n in (2 + draw.chance(0.03), 1)]
    top_k = draw.number(min(2, experts), 0.1)
    return Call(mono_moe, x, logits, up, scales[0], down, scales[1], top_k, check=finite)


def draw_layout(draw: Draw) -> Call:
    rows, cols = draw.number(draw.size(1, 64, 130), 0.1) % 4096, draw.size(16, 64, 128)
    codes = draw.tensor((1, draw.size(16, 64), draw.size(32, 64)), torch.uint8)
    scales = draw.tensor((1, draw.size(64, 65), draw.size(4, 8)), torch.uint8)
    weight = draw.tensor((draw.size(2, 64, 33), cols), BF16)
    return draw.choice(
        [
            Call(core.reorder_rows_for_gated_act_gemm, weight),
            Call(core.convert_to_block_layout, weight, draw.number(16, 0.2)),
            Call(utils.swizzle_sf, draw.tensor((max(rows, 1), cols // 16), torch.uint8), rows, cols),
            Call(utils.unswizzle_sf, draw.tensor(draw.size(512, 1024), torch.uint8), rows, cols, draw.number(16, 0.2)),
            Call(mixed_weights.interleave_moe_weights_for_sm90_mixed_gemm, codes),
            Call(mixed_weights.interleave_moe_scales_for_sm90_mixed_gemm, scales, draw.number(32, 0.2)),
        ]
    )


CALLS = {
    "shrink": draw_shrink,
    "expand": draw_expand,
    "bgmv_moe": draw_bgmv_moe,
    "gemm1": draw_gemm1,
    "gemm2": draw_gemm2,
    "route": draw_route,
    "deepseek": draw_deepseek,
    "hash_topk": draw_hash_topk,
    "sort": draw_sort,
    "permute": draw_permute,
    "unpermute": draw_unpermute,
    "layer": draw_layer,
    "mxfp4": draw_mxfp4,
    "MoELayer": draw_moe_layer,
    "mono_moe": draw_mono_moe,
    "layout": draw_layout,
}
