# SPDX-License-Identifier: Apache-2.0
"""``cutlass_fused_moe`` as its callers use it: arguments by position, several ranks, several threads, exports."""

from __future__ import annotations

import threading
from typing import Any, Callable

import pytest
import torch

from flashinfer import ActivationType
from flashinfer.fused_moe import cutlass_fused_moe

from .layers import BF16, dense, fp8, fp8_block, int4_fp8, mxfp4, mxfp4_fp8

EXPERTS = 6

FORMATS: dict[str, Callable[..., Any]] = {
    "dense": lambda *sizes, device: dense(*sizes, device),
    "fp8": lambda *sizes, device: fp8(*sizes, device=device, per_expert=True),
    "fp8_block": fp8_block,
    "mxfp4": mxfp4,
    "int4_fp8": int4_fp8,
    "mxfp4_fp8": mxfp4_fp8,
}


@pytest.fixture(params=FORMATS)
def call(request, device) -> dict[str, Any]:
    if device == "cuda" and request.param not in ("dense", "fp8") and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("other GPUs refuse the format")
    made = FORMATS[request.param](30, 128, 128, EXPERTS, 2, device=device)
    return made[0] if isinstance(made, tuple) else made


def poisoned(call: dict[str, Any]) -> torch.Tensor:
    return torch.full((call["input"].shape[0], 128), torch.nan, dtype=BF16, device=call["input"].device)


def of_rank(call: dict[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    """Return the call of one rank: what has an entry for each expert is cut."""
    local = EXPERTS // ranks

    def cut(x: Any) -> Any:
        is_vector = isinstance(x, torch.Tensor) and x.dim() > 0 and x.shape[0] == EXPERTS
        return x[rank * local : (rank + 1) * local] if is_vector else x

    names = [name for name in call if name.startswith(("fc", "swiglu"))]
    cuts = {name: cut(call[name]) for name in names}
    return {
        **call,
        **cuts,
        "quant_scales": [cut(x) for x in call["quant_scales"]],
        "ep_size": ranks,
        "ep_rank": rank,
    }


def test_arguments_by_position(device):
    """The published order, which callers in C++ style rely on; only the two of Situ are by keyword."""
    call = dense(5, 64, 32, 3, 2, device)
    biases = [torch.randn(3, 64, device=device).to(BF16) for _ in range(2)]
    alpha, beta, limit = (torch.full((3,), x, device=device) for x in (1.702, 1.0, 0.5))
    out = torch.full((5, 64), torch.nan, dtype=BF16, device=device)
    ranks, flags = (2, 1, 1, 0, 1, 0), (False,) * 7
    last = (8192, None, ActivationType.Swiglu, True, True, [-1, -1], None)
    arguments = (*call.values(), *biases, None, alpha, beta, limit, *ranks, out, *flags, *last)
    result = cutlass_fused_moe(*arguments)
    assert isinstance(result, list) and len(result) == 4 and result[0] is out
    named = {"swiglu_alpha": alpha, "swiglu_beta": beta, "swiglu_limit": limit, "tp_size": 2, "tp_rank": 1}
    pair = dict(zip(("fc1_expert_biases", "fc2_expert_biases"), biases, strict=True))
    assert torch.equal(out, cutlass_fused_moe(**call, **named, **pair)[0])
    with pytest.raises(TypeError):
        cutlass_fused_moe(*arguments, alpha)


@pytest.mark.parametrize("ranks", [2, 3])
def test_expert_parallel_ranks_add_up(call, ranks):
    """Each rank writes all of its output, and biases and constants are those of its experts."""
    device = call["input"].device
    call |= {
        "fc1_expert_biases": torch.randn(EXPERTS, 256, device=device).to(BF16),
        "fc2_expert_biases": torch.randn(EXPERTS, 128, device=device).to(BF16),
        "swiglu_limit": torch.linspace(0.5, 2.0, EXPERTS, device=device),
    }
    whole, total = cutlass_fused_moe(**call)[0].float(), 0.0
    for rank in range(ranks):
        out = poisoned(call)
        total = total + cutlass_fused_moe(**of_rank(call, rank, ranks), output=out)[0].float()
    # The output of each rank is rounded to bf16 once; all are at most the size of the whole's largest.
    torch.testing.assert_close(total, whole, rtol=2e-2, atol=1e-2 * float(whole.abs().max()))


def test_tensor_parallel_ranks_add_up(device):
    """Slices of both halves of fc1, and of the columns of fc2; rank 0 adds the bias of fc2."""
    call = dense(9, 64, 96, 3, 2, device)
    biases = {
        "fc1_expert_biases": torch.randn(3, 192, device=device).to(BF16),
        "fc2_expert_biases": torch.randn(3, 64, device=device).to(BF16),
    }
    whole, total = cutlass_fused_moe(**call, **biases)[0].float(), 0.0
    for rank in range(3):
        columns = torch.arange(rank * 32, rank * 32 + 32, device=device)
        rows = torch.cat((columns, columns + 96))
        mine = {
            **call,
            "fc1_expert_weights": call["fc1_expert_weights"][:, rows],
            "fc2_expert_weights": call["fc2_expert_weights"][:, :, columns].contiguous(),
            "fc1_expert_biases": biases["fc1_expert_biases"][:, rows],
            "fc2_expert_biases": biases["fc2_expert_biases"],
        }
        total = total + cutlass_fused_moe(**mine, tp_size=3, tp_rank=rank)[0].float()
    torch.testing.assert_close(total, whole, rtol=2e-2, atol=1e-2 * float(whole.abs().max()))


def test_experts_that_nobody_has(call):
    """All pairs belong to other ranks or to nobody: zeros, and no NaN of the buffer is left."""
    for nobody in (-1, EXPERTS):
        ids = torch.full_like(call["token_selected_experts"], nobody)
        out = cutlass_fused_moe(**{**call, "token_selected_experts": ids}, output=poisoned(call))[0]
        assert not out.any() and out.isfinite().all()


def test_one_expert_in_all_slots(call):
    """Each slot counts: half the weight in two slots is the weight in one, exactly, since halves are exact."""
    call["token_selected_experts"].fill_(4)
    call["token_final_scales"].fill_(0.5)
    twice = cutlass_fused_moe(**call, output=poisoned(call))[0]
    call["token_selected_experts"][:, 1] = -1
    call["token_final_scales"].fill_(1.0)
    assert torch.equal(twice, cutlass_fused_moe(**call)[0])


def test_no_tokens_in_any_format(call):
    none = {name: call[name][:0] for name in ("input", "token_selected_experts", "token_final_scales")}
    assert cutlass_fused_moe(**{**call, **none})[0].shape == (0, 128)


def test_hints_change_no_bit(call):
    expected = cutlass_fused_moe(**call)[0]
    for hint in (
        {"use_fused_finalize": False},
        {"enable_alltoall": True},
        {"enable_pdl": False},
        {"enable_pdl": True},
        {"swizzled_input_sf": False},
        {"profile_ids": (-1, -1)},
        {"tune_max_num_tokens": 16},
    ):
        assert torch.equal(cutlass_fused_moe(**call, **hint)[0], expected), hint


def test_more_slots_than_a_warp_has_groups(device):
    """Qwen3-Next: 10 of 512 experts. Most experts have no token."""
    call = dense(7, 64, 16, 512, 10, device)
    call["token_selected_experts"] = torch.rand(7, 512, device=device).topk(10).indices.int()
    x, scales = call["input"].float(), call["token_final_scales"]
    fc1, fc2 = (call[f"fc{i}_expert_weights"].float()[call["token_selected_experts"].long()] for i in (1, 2))
    up, gate = torch.einsum("tskh,th->tsk", fc1, x).chunk(2, dim=-1)
    hidden = (torch.nn.functional.silu(gate) * up).to(BF16).float()
    expected = torch.einsum("tshk,tsk,ts->th", fc2, hidden, scales).to(BF16)
    torch.testing.assert_close(cutlass_fused_moe(**call)[0], expected, rtol=2e-2, atol=2e-2)


def test_calls_from_several_threads(call):
    """Threads share weights; memory of a call is its own."""
    expected, wrong = cutlass_fused_moe(**call)[0], []

    def run() -> None:
        for _ in range(10):
            if not torch.equal(cutlass_fused_moe(**call)[0], expected):
                wrong.append(1)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_one_graph(call):
    """Compiled whole, with fake tensors; and exported."""
    dtype = call.pop("output_dtype")
    expected = cutlass_fused_moe(**call, output_dtype=dtype)[0]
    rest = {name: value for name, value in call.items() if name not in ("input", "token_selected_experts")}

    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            return cutlass_fused_moe(x, ids, output_dtype=dtype, **rest)[0]

    inputs = (call["input"], call["token_selected_experts"])
    compiled = torch.compile(Layer(), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*inputs), expected)
    assert torch.equal(torch.export.export(Layer(), inputs).module()(*inputs), expected)
