# SPDX-License-Identifier: Apache-2.0
"""References of templates whose kernels no machine here has, against the same sums written in another way."""

from __future__ import annotations

import torch

from flashinfer.trace.templates import gemm, moe
from flashinfer.trace.templates.quantization_blocks import e2m1_values, scale_values


def layer(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    up, gate = (x @ w1.T).chunk(2, -1)
    return (up * torch.nn.functional.silu(gate)) @ w2.T


def test_experts_in_blocks():
    """Check token by token: DeepSeek's groups, its weights, block scales, an offset of local experts."""
    made = moe.trtllm_fp8_block_scale_moe_ds_routing_trace.init(seq_len=5, num_local_experts=8, device="cpu")
    made["local_expert_offset"] = 4
    out = moe.trtllm_fp8_block_scale_moe_ds_routing_trace.reference(**made)
    scores = made["routing_logits"].sigmoid()
    biased = scores + made["routing_bias"].float()
    for t in range(5):
        groups = biased[t].view(4, 4)
        best = groups.sort(descending=True).values[:, :2].sum(1).topk(2).indices
        allowed = torch.full_like(groups, -torch.inf)
        allowed[best] = groups[best]
        chosen = allowed.flatten().topk(4).indices
        x = made["hidden_states"][t].float().view(-1, 128) * made["hidden_states_scale"][:, t, None]
        expected = torch.zeros(256)
        for e in chosen.tolist():
            if not 4 <= e < 12:
                continue
            w1, w2 = (
                (made[f"gemm{n}_weights"][e - 4].float().unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
                 * made[f"gemm{n}_weights_scale"][e - 4][:, None, :, None]).flatten(2).flatten(0, 1)
                for n in (1, 2)
            )  # fmt: skip
            expected += layer(x.flatten(), w1, w2) * scores[t, e] / scores[t, chosen].sum() * 2.5
        torch.testing.assert_close(out[t].float(), expected, rtol=2e-2, atol=2e-2 * expected.abs().max().item())


def test_routed_tokens_agree_with_routing():
    made = moe.trtllm_fp8_block_scale_moe_ds_routing_trace.init(seq_len=3, device="cpu")
    made |= {"routing_method_type": 1, "routing_bias": None}
    whole = moe.trtllm_fp8_block_scale_moe_default_routing_trace.reference(**made)
    values, experts = made["routing_logits"].topk(made["top_k"])
    bits = values.softmax(-1).bfloat16().view(torch.int16).int() & 0xFFFF
    made["topk_ids"] = experts.int() << 16 | bits
    routed = moe.trtllm_fp8_block_scale_routed_moe_trace.reference(**made)
    torch.testing.assert_close(routed, whole, rtol=2e-2, atol=2e-2 * whole.abs().max().item())
    weights = {f"gemm{n}_weights": made[f"gemm{n}_weights"].float() * 0.05 for n in (1, 2)}
    plain = {**made, "hidden_states": made["hidden_states"].bfloat16(), **weights}
    bf16 = moe.trtllm_bf16_moe_trace.reference(**plain)
    torch.testing.assert_close(
        moe.trtllm_bf16_routed_moe_trace.reference(**plain), bf16, rtol=2e-2, atol=2e-2 * bf16.abs().max().item()
    )


def test_experts_in_four_bits():
    """Check both four-bit layers: with the same weights, scales and tokens they agree."""
    made = moe.b12x_fused_moe_trace.init(num_tokens=4, device="cpu")
    codes, scales = torch.randint(256, (4, 64)).to(torch.uint8), torch.randint(40, 72, (4, 8)).to(torch.uint8)
    x = e2m1_values(codes) * scale_values(scales, True).repeat_interleave(16, -1)
    logits = torch.randn(4, 8)
    values, experts = logits.topk(2)
    made |= {"x": x, "token_selected_experts": experts.int(), "token_final_scales": values.softmax(-1)}
    out = moe.b12x_fused_moe_trace.reference(**made)
    e = int(experts[0, 0])
    sixteens = {n: scale_values(made[f"w{n}_weight_sf"][e], True).repeat_interleave(16, -1) * 0.1 for n in (1, 2)}
    w1, w2 = (e2m1_values(made[f"w{n}_weight"][e]) * sixteens[n] for n in (1, 2))
    one = moe.b12x_fused_moe_trace.reference(
        **{**made, "token_selected_experts": experts[:, :1], "token_final_scales": torch.ones(4, 1)}
    )
    torch.testing.assert_close(one[0], layer(x[0], w1, w2).bfloat16(), rtol=1e-2, atol=1e-2)
    tenth = torch.full((8,), 0.1)
    whole = moe.trtllm_fp4_block_scale_moe_ds_routing_trace.reference(
        logits, None, codes, scales, made["w1_weight"], made["w1_weight_sf"], made["w2_weight"], made["w2_weight_sf"],
        tenth, tenth, tenth, routing_method_type=1, top_k=2,
    )  # fmt: skip
    torch.testing.assert_close(whole, out, rtol=2e-2, atol=2e-2 * out.abs().max().item())


def test_products():
    """Check a batch of mxfp8 products against single ones, and bfloat16 times four bits against four bits twice."""
    made = gemm.bmm_mxfp8_trace.init(batch_size=2, M=4, N=8, K=128, device="cpu")
    out = gemm.bmm_mxfp8_trace.reference(**made)
    for i in range(2):
        scales = (made[f"{name}_scale"].view(2, -1)[i] for name in "AB")
        torch.testing.assert_close(out[i], gemm.mm_mxfp8_trace.reference(made["A"][i], made["B"][i], *scales))
    four = gemm.mm_fp4_trace.init(M=4, N=8, K=64, device="cpu")
    ones = torch.full_like(four["a_descale"], 0x38)  # 1 in e4m3
    expected = gemm.mm_fp4_trace.reference(**{**four, "a_descale": ones})
    four["a"] = e2m1_values(four["a"]).bfloat16()
    torch.testing.assert_close(gemm.mm_bf16_fp4_cudnn_trace.reference(**four), expected)


def test_definitions_of_layers():
    made = moe.trtllm_fp8_block_scale_moe_ds_routing_trace.init(seq_len=2, device="cpu")
    define = moe.trtllm_fp8_block_scale_moe_trace_dispatch.choose
    assert define(**made) is moe.trtllm_fp8_block_scale_moe_ds_routing_trace
    assert define(**{**made, "routing_method_type": 1}) is moe.trtllm_fp8_block_scale_moe_default_routing_trace
    name = moe.trtllm_fp8_block_scale_moe_ds_routing_trace.build_fi_trace_fn("moe")(**made)["name"]
    assert name == "moe_fp8_block_scale_ds_routing_topk4_ng4_kg2_e16_h256_i128"
    small = moe.b12x_fused_moe_trace.init(num_tokens=2, device="cpu")
    assert moe.b12x_fused_moe_trace.build_fi_trace_fn("moe")(**small)["name"] == "b12x_fused_moe_topk2_e8_h128_i64"
