# SPDX-License-Identifier: Apache-2.0
"""Facts that the published tests and their users rely on: pools of any strides, the same bits in every run, names.

What a single function computes is in its own file; here the same is asked of all of them.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, Callable

import pytest
import torch

import flashinfer
from flashinfer import gdn_decode, gdn_kernels, gdn_prefill
from flashinfer.gdn_kernels import gdn_decode_bf16_state, gdn_decode_bf16_wy_output_only
from flashinfer.gdn_kernels.experimental import gdn_fused_decode

from .delta import Case
from .gdn_inputs import BF16, FP32, ints, projections, states
from .mamba_inputs import tokens as mamba_tokens
from .mamba_inputs import weights

SLOTS = [4, 1, 0]
Call = Callable[[dict, torch.Tensor, torch.Tensor], Any]


def decode(kw: dict, pool: torch.Tensor, slots: torch.Tensor) -> Any:
    step = gdn_decode.gated_delta_rule_decode_pretranspose
    return step(**kw, state=None, initial_state=pool, initial_state_indices=slots)[0]


def verify(kw: dict, pool: torch.Tensor, slots: torch.Tensor) -> Any:
    options = {"initial_state": pool, "initial_state_indices": slots, "disable_state_update": False}
    return gdn_decode.gated_delta_rule_mtp(**kw, **options)[0]


def of_bf16_states(function: Callable[..., Any]) -> Call:
    return lambda kw, pool, slots: function(**kw, initial_state_source=pool, initial_state_indices=slots)


def of_ring(kw: dict, pool: torch.Tensor, slots: torch.Tensor) -> Any:
    count, heads, value_heads = pool.shape[0], kw["q"].shape[2], kw["v"].shape[2]
    generator = torch.Generator(pool.device).manual_seed(1)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=pool.device)

    ring = {
        "k_cache": randn(count, heads, 32, 128).to(BF16) / 11,
        "u_cache": randn(count, value_heads, 32, 128).to(BF16),
    }
    ring |= {"g_cache": -randn(count, value_heads, 32).abs().cumsum(-1)}
    lengths = {"hist_len": ints([15, 0, 5], device=pool.device), "cache_base": ints([28, 7, 1], device=pool.device)}
    options = {"initial_state_source": pool, "initial_state_indices": slots}
    return gdn_kernels.gated_delta_rule_mtp_ucache_flush(**kw, **options, **ring, **lengths)


def kda(kw: dict, pool: torch.Tensor, slots: torch.Tensor) -> Any:
    g = -kw["v"][..., :1].float().abs().expand_as(kw["v"]).to(BF16)
    beta = torch.sigmoid(kw["b"].float()).to(BF16)
    q, k, v = kw["q"], kw["k"], kw["v"]
    return flashinfer.recurrent_kda(q, k, v, g.contiguous(), beta, initial_state=pool, ssm_state_indices=slots)[0]


def prefill(**options: Any) -> Call:
    def call(kw: dict, pool: torch.Tensor, slots: torch.Tensor) -> Any:
        q, k, v = (kw[name].flatten(0, 1) for name in ("q", "k", "v"))
        count, each = kw["q"].shape[:2]
        g, beta = (torch.sigmoid(kw[name].flatten(0, 1).float()) for name in ("a", "b"))
        return gdn_prefill.chunk_gated_delta_rule(
            q, k, v, g, beta, initial_state=pool, output_final_state=True, use_qk_l2norm_in_kernel=True,
            cu_seqlens=ints(range(0, (count + 1) * each, each), torch.int64, device=q.device), output_state=pool,
            state_indices=slots, **options,
        )[0]  # fmt: skip

    return call


#: Tokens of each request, dtype of the states, the call.
CALLS: dict[str, tuple[int, torch.dtype, Call]] = {
    "decode, float32": (1, FP32, decode),
    "decode, bf16": (1, BF16, decode),
    "verify, float32": (4, FP32, verify),
    "verify, bf16": (3, BF16, verify),
    "bf16 module, one token": (1, BF16, of_bf16_states(gdn_decode_bf16_state.gated_delta_rule)),
    "bf16 module": (4, BF16, of_bf16_states(gdn_decode_bf16_state.gated_delta_rule_mtp)),
    "outputs only": (4, BF16, of_bf16_states(gdn_decode_bf16_wy_output_only.gated_delta_rule_mtp)),
    "ring": (4, BF16, of_ring),
    "kda decode": (1, BF16, kda),
    "kda prefill": (70, FP32, kda),
    "prefill": (70, FP32, prefill()),
    "prefill, whole requests": (70, FP32, prefill(use_cp=False)),
    "prefill, parts": (140, FP32, prefill(use_cp=True, _cp_chunk_len=64)),
}


def run(name: str, pool: torch.Tensor, slots: list[int], index: torch.dtype = torch.int32) -> torch.Tensor:
    torch.manual_seed(0)
    count, _, call = CALLS[name]
    kw = projections(3, count, 1 if "kda" not in name else 2, 2, device=pool.device)
    return call(kw, pool, ints(slots, index, device=pool.device))


@pytest.mark.parametrize("name", CALLS)
def test_pools_of_any_strides(device, name):
    """Slots that are parts of larger pages, every second head, rows apart: the same bits, nothing else is written."""
    dtype = CALLS[name][1]
    dense = states(5, 2, dtype=dtype, device=device)
    start = dense.clone()
    expected = run(name, dense, SLOTS)
    assert torch.equal(dense[[2, 3]], start[[2, 3]]), "slots of nobody"
    wide = torch.full((5, 4, 130, 136), 7.0, dtype=dtype, device=device)
    for pool in (states(5, 2, dtype=dtype, device=device, pad=64), wide[:, ::2, :128, :128]):
        pool.copy_(start)
        assert torch.equal(run(name, pool, SLOTS), expected)
        assert torch.equal(pool, dense)
    wide[:, ::2, :128, :128] = 7.0
    assert (wide == 7.0).all(), "memory between rows, heads and slots"


@pytest.mark.parametrize("name", CALLS)
def test_every_run_gives_the_same_bits(device, name):
    """Three runs on equal states, with slots of both types where the function takes both."""
    start = states(5, 2, dtype=CALLS[name][1], device=device)
    results = []
    for _ in range(3):
        pool = start.clone()
        results.append((run(name, pool, SLOTS), pool))
    assert results[0][0].isfinite().all()
    for out, pool in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(pool, results[0][1])


def test_every_run_of_a_state_update_gives_the_same_bits(device):
    torch.manual_seed(0)
    given = mamba_tokens((3,), 4, 64, 1, 128, device) | weights(4, 64, 128, device)
    start = torch.randn(5, 4, 64, 128, device=device)
    results = []
    for _ in range(3):
        state = start.clone()
        slots = ints(SLOTS, device=device)
        out = flashinfer.mamba.selective_state_update(state, **given, dt_softplus=True, state_batch_indices=slots)
        results.append((out, state))
    assert all(torch.equal(a, b) for result in results[1:] for a, b in zip(result, results[0], strict=True))


def test_decays_are_linear_in_prefill_and_logarithms_elsewhere(device):
    """One decay given as each function wants it: the prefill's ``g``, KDA's ``g``, the decode step's projection."""
    case = Case([3], (1, 1, 1), BF16, device, g="uniform", initial=True)
    log = case.g.log().to(BF16).float()  # what KDA can be given
    tokens = {name: getattr(case, name) for name in ("q", "k", "v")}
    beta = case.beta.to(BF16)
    common = {"initial_state": case.initial, "cu_seqlens": case.offsets, "output_final_state": True}
    out, state = gdn_prefill.chunk_gated_delta_rule(
        **tokens, g=log.exp(), beta=beta.float(), **common, use_qk_l2norm_in_kernel=True
    )
    rows = {name: x.unsqueeze(0) for name, x in tokens.items()}
    gate = log.to(BF16)[None, :, :, None].expand(1, 3, 1, 128).contiguous()
    of_kda = flashinfer.recurrent_kda(
        **rows,
        g=gate,
        beta=beta[None],
        **{**common, "initial_state": case.initial.clone()},
        use_qk_l2norm_in_kernel=True,
    )
    step, decoded = case.initial.clone(), []
    inverse = (-log.double()).expm1().log().float()  # exp(-softplus(inverse)) is the decay
    logit = torch.logit(beta.double()).float()
    for t in range(3):
        row = [x[:, t : t + 1] for x in rows.values()]
        got, _ = gdn_decode.gated_delta_rule_decode_pretranspose(
            *row, step, torch.zeros(1, device=device), inverse[None, t : t + 1], torch.zeros(1, device=device),
            logit[None, t : t + 1],
        )  # fmt: skip
        decoded.append(got[0])
    for got, final in ((of_kda[0][0], of_kda[1]), (torch.cat(decoded), step)):
        torch.testing.assert_close(got.float(), out.float(), atol=1e-2, rtol=1e-2)
        torch.testing.assert_close(final.float(), state, atol=5e-3, rtol=1e-3)


def test_pool_as_input_only(device):
    """Without a final state the pool is read and not written, in parts too."""
    case = Case([130, 20], (1, 1, 2), BF16, device)
    slots, pool = ints([3, 1], device=device), torch.randn(4, 2, 128, 128, device=device)
    pool[slots.long()] = case.initial
    before = pool.clone()
    expected = gdn_prefill.chunk_gated_delta_rule(**case.arguments)
    given = {**case.arguments, "initial_state": pool, "state_indices": slots}
    for options in ({}, {"use_cp": False}):
        assert torch.equal(gdn_prefill.chunk_gated_delta_rule(**given, **options), expected)
    assert torch.equal(pool, before)


@pytest.mark.parametrize("name", ["gdn_decode_bf16_wy_ucache", "gdn_decode_bf16_wy_ucache_flush"])
def test_files_that_programs_load_by_their_path(name):
    path = Path(gdn_kernels.__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"loaded_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = name.replace("gdn_decode_bf16_wy", "gated_delta_rule_mtp")
    assert getattr(module, function) is getattr(gdn_kernels, function)


def test_the_fused_step_says_what_it_needs():
    """Its probe answers for every configuration, so that engines take other functions."""
    assert gdn_fused_decode.gdn_fused_decode_step is flashinfer.gdn_fused_decode_step
    for batch in (1, 64):
        assert flashinfer.gdn_fused_decode_step_supported(batch) is False
        assert flashinfer.gdn_fused_decode_step_supported(batch, num_v_heads=32, conv_state_layout="DS") is False
    with pytest.raises(RuntimeError, match=r"gdn_fused_decode_step: .*SM120"):
        flashinfer.gdn_fused_decode_step(*[None] * 11)
