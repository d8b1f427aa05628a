# SPDX-License-Identifier: Apache-2.0
"""flashinfer.moe_ep without other ranks: data classes, options, weights, checks, errors."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from flashinfer import moe_ep
from flashinfer.moe_ep import (
    BootstrapConfig,
    DispatchOutput,
    EpAlgorithm,
    EpLayout,
    FleetAlgoKnobAllocator,
    FleetAlgoKnobFaultTolerance,
    FleetParams,
    MoEEpArchError,
    MoEEpConfigError,
    MoEEpTensors,
    MoEEpTransportError,
    MoEWeightPack,
    PrequantizedMoEWeights,
    UnquantizedMoEWeights,
    dummy_moe_weights,
)
from flashinfer.moe_ep.algo_knobs import HandleAlgoKnobUserStream, _index_knobs

PARAMS = FleetParams(num_experts=8, max_tokens_per_rank=16, token_hidden_size=2048)


def test_group():
    group = object()
    assert BootstrapConfig(2, 1, process_group=group) == BootstrapConfig(2, 1)
    assert hash(BootstrapConfig(2, 1, process_group=group)) == hash(BootstrapConfig(2, 1))
    with pytest.raises(ValueError, match="world_size must be positive, got 0"):
        BootstrapConfig(0, 0)
    with pytest.raises(ValueError, match=r"rank 2 not in \[0, world_size\)"):
        BootstrapConfig(2, 2)
    with pytest.raises(ValueError, match="device must be at least 0, got -1"):
        BootstrapConfig(2, 1, device=-1)
    with pytest.raises(ValueError, match="device must be the index of a GPU or None, got 'cpu'"):
        BootstrapConfig(2, 1, device="cpu")
    with pytest.raises(dataclasses.FrozenInstanceError):
        BootstrapConfig(2, 1).rank = 0


def test_sizes():
    for name in ("num_experts", "max_tokens_per_rank", "token_hidden_size", "dtype_bytes"):
        with pytest.raises(ValueError, match=f"FleetParams: {name} must be positive, got 0"):
            dataclasses.replace(PARAMS, **{name: 0})
    with pytest.raises(ValueError, match="layout must not be RANK_MAJOR without LOW_LATENCY, got HIGH_THROUGHPUT"):
        FleetParams(8, 16, 64, algorithm=EpAlgorithm.HIGH_THROUGHPUT, layout=EpLayout.RANK_MAJOR)
    assert FleetParams(8, 16, 64, layout=EpLayout.RANK_MAJOR).layout == 2


def test_tensors():
    tokens = MoEEpTensors(torch.zeros(3, 8), torch.zeros(3, 2), torch.zeros(3, 2))
    assert tokens.num_tokens == 3 and tokens.scales is None
    assert DispatchOutput([tokens.hidden_states], 5).get_num_tokens() == 5
    assert DispatchOutput([tokens.hidden_states], lambda: 7).get_num_tokens() == 7


def test_options():
    first, second = HandleAlgoKnobUserStream(1), HandleAlgoKnobUserStream(2)
    assert _index_knobs([first, FleetAlgoKnobAllocator(), second])[HandleAlgoKnobUserStream] is second
    with pytest.raises(TypeError, match="expected AlgoKnob, got int"):
        _index_knobs([3])
    with pytest.raises(ValueError, match="timeout_ms must be at least 0, got -1"):
        FleetAlgoKnobFaultTolerance(timeout_ms=-1)
    with pytest.raises(ValueError, match="reconcile_timeout_s must be positive, got 0"):
        FleetAlgoKnobFaultTolerance(reconcile_timeout_s=0)
    with pytest.raises(ValueError, match="torch_caching must be False with addresses"):
        FleetAlgoKnobAllocator(True, 16, 16)
    with pytest.raises(ValueError, match="alloc_fn and free_fn must be given both or neither, got 0x10 and 0x0"):
        FleetAlgoKnobAllocator(alloc_fn=16)


def test_weights():
    w13, w2, scale = torch.zeros(4, 6, 8), torch.zeros(4, 8, 3), torch.ones(4)
    plain, quantised = MoEWeightPack(w13, w2), MoEWeightPack(w13, w2, scale, scale)
    assert type(plain) is UnquantizedMoEWeights and type(quantised) is PrequantizedMoEWeights
    assert isinstance(plain, MoEWeightPack) and plain.w13 is w13 and plain.w13_scale is None
    assert quantised.w2_scale is scale
    assert UnquantizedMoEWeights(w13, w2, None, None).w2 is w2
    for made in (plain, quantised):
        with pytest.raises(dataclasses.FrozenInstanceError):
            made.w13 = w2
    with pytest.raises(TypeError, match="w13 and w2 must be tensors"):
        MoEWeightPack(w13)
    with pytest.raises(ValueError, match="exactly one of w13_scale/w2_scale"):
        MoEWeightPack(w13, w2, scale)
    with pytest.raises(TypeError, match="w13_scale and w2_scale must be None"):
        UnquantizedMoEWeights(w13, w2, scale, None)
    with pytest.raises(TypeError):
        PrequantizedMoEWeights(w13, w2)
    made = dummy_moe_weights(num_local_experts=2, hidden=8)
    assert made.w13.shape == (2, 2, 8) and made.w2.shape == (2, 8, 1) and not made.w13.any()


def test_weights_of_a_fleet():
    def check(world_size: int = 2, local: int = 4, hidden: int = 2048) -> None:
        weights = dummy_moe_weights(num_local_experts=local, hidden=hidden)
        moe_ep.validate_fleet_weights(weights, PARAMS, world_size)

    check()
    check(hidden=1024)  # two codes in a byte
    with pytest.raises(MoEEpConfigError, match="num_experts must be divisible by world_size = 3, got 8"):
        check(3)
    with pytest.raises(MoEEpConfigError, match=r"w13 must have 3 dimensions, the first num_experts / world_size = 4"):
        check(local=8)
    with pytest.raises(
        MoEEpConfigError, match=r"w13\.shape\[-1\] must be token_hidden_size = 2048 or half of it, got 512"
    ):
        check(hidden=512)
    with pytest.raises(MoEEpConfigError, match="weights must be a MoEWeightPack, got dict"):
        moe_ep.validate_fleet_weights({}, PARAMS, 2)


def test_inputs_of_calls():
    def check(tokens: int = 4, hidden: int = 2048, rows: int = 4, columns: int = 2, slots: int = 2) -> None:
        x = (torch.zeros(tokens, hidden), torch.zeros(rows, columns), torch.zeros(rows, slots))
        moe_ep.validate_split_forward_inputs(*x, PARAMS)
        moe_ep.validate_mega_forward_inputs(*x, PARAMS, top_k=2, quantize_input=True)

    check()
    for changes, text in (
        ({"tokens": 17, "rows": 17}, "number of tokens 17 exceeds max_tokens_per_rank = 16"),
        ({"hidden": 96}, r"hidden_states must be \(num_tokens, 2048\), got \(4, 96\)"),
        ({"rows": 5}, r"topk_ids must be \(4, top_k\), got \(5, 2\)"),
        ({"slots": 3}, r"topk_weights must have the shape of topk_ids, \(4, 2\), got \(4, 3\)"),
        ({"columns": 3, "slots": 3}, "topk_ids must have top_k = 2 columns, got 3"),
    ):
        with pytest.raises(MoEEpConfigError, match=text):
            check(**changes)
    x = (torch.zeros(4, 2048), torch.zeros(4, 2), torch.zeros(4, 2))
    with pytest.raises(MoEEpConfigError, match="scales must be a tensor with quantize_input=False"):
        moe_ep.validate_mega_forward_inputs(*x, PARAMS, top_k=2, quantize_input=False)


def test_sizes_of_one_kernel():
    moe_ep.validate_mega_fleet_params(PARAMS, 2, intermediate_size=256, top_k=2)
    for world, inner, top_k, text in (
        (3, 256, 2, "divisible by world_size = 3"),
        (2, 192, 2, "intermediate_size must be a positive multiple of 128, got 192"),
        (2, 256, 0, "top_k must be positive, got 0"),
    ):
        with pytest.raises(MoEEpConfigError, match=text):
            moe_ep.validate_mega_fleet_params(PARAMS, world, intermediate_size=inner, top_k=top_k)
    moe_ep.validate_mega_fleet_params(PARAMS, 2, intermediate_size=192, top_k=2, alignment=64)


def test_what_transports_exchange():
    moe_ep.validate_fleet_params(PARAMS, "nccl_ep", 2)
    moe_ep.validate_fleet_params(PARAMS, "nixl_ep", 2, topology_capacity=4)
    many = dataclasses.replace(PARAMS, algorithm=EpAlgorithm.HIGH_THROUGHPUT)
    with pytest.raises(MoEEpConfigError, match="must be LOW_LATENCY with fault tolerance, got HIGH_THROUGHPUT"):
        moe_ep.validate_fleet_params(many, "nccl_ep", 2, fault_tolerance=FleetAlgoKnobFaultTolerance())
    for params, capacity, text in (
        (many, None, "must be LOW_LATENCY and EXPERT_MAJOR with nixl_ep"),
        (PARAMS, 1, "topology_capacity must be positive, at least world_size = 2 .* got 1"),
        (PARAMS, 3, "divide num_experts = 8, got 3"),
        (dataclasses.replace(PARAMS, max_tokens_per_rank=1025), None, "at most 1024 with nixl_ep, got 1025"),
        (dataclasses.replace(PARAMS, token_hidden_size=1024), None, "token_hidden_size must be one of"),
    ):
        with pytest.raises(MoEEpConfigError, match=text):
            moe_ep.validate_fleet_params(params, "nixl_ep", 2, topology_capacity=capacity)


def test_group_of_torch(tmp_path):
    """Check against torch.distributed with one rank, and without it."""
    one, two = BootstrapConfig(1, 0), BootstrapConfig(2, 1)
    assert moe_ep.bootstrap_ep_rank_world(two) == (1, 2)
    moe_ep.ensure_bootstrap_dist_validated(two)
    with pytest.raises(RuntimeError, match=r"torch\.distributed must be initialised"):
        moe_ep.bootstrap_comm_group(two)
    with pytest.raises(MoEEpConfigError, match="process_group must be None while"):
        moe_ep.validate_bootstrap_world_size(BootstrapConfig(1, 0, process_group=object()))
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", world_size=1, rank=0)
    try:
        for _ in range(2):
            moe_ep.ensure_bootstrap_dist_validated(one)
        assert moe_ep.bootstrap_ep_world_size(two) == 1  # the size of the group
        with pytest.raises(MoEEpConfigError, match=r"must match those of the process group, \(1, 0\), got \(2, 1\)"):
            moe_ep.validate_bootstrap_world_size(two)
    finally:
        torch.distributed.destroy_process_group()


def test_errors_and_probes():
    error = MoEEpTransportError("send", 3, ": no peer", "TIMEOUT")
    assert str(error) == "send failed: TIMEOUT (3): no peer" and (error.fn, error.code) == ("send", 3)
    assert str(MoEEpTransportError("send", 3)) == "send failed: 3"
    assert issubclass(MoEEpArchError, MoEEpConfigError) and issubclass(MoEEpConfigError, ValueError)
    here = [name for name in ("nccl_ep", "nixl_ep") if getattr(moe_ep, f"have_{name}")()]
    assert moe_ep.available_backends() == here
    assert moe_ep.supports_fault_tolerance("no such transport") is False
