# SPDX-License-Identifier: Apache-2.0
"""Exchanges of expert-parallel layers by name, and a whole layer over several ranks against the layer of one rank."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from flashinfer import moe_ep
from flashinfer.comm.local_ranks import call_on_ranks
from flashinfer.fused_moe import QuantFormat
from flashinfer.moe_ep import BootstrapConfig, MoEEpCommParams, NVLinkOneSidedConfig, create_communication

from ..comm.ranks import started_ranks
from .exchanged_layer import layer


@pytest.mark.parametrize("backend, size", [("nvlink_one_sided", 2), ("nvlink_one_sided", 4), ("nvlink_two_sided", 2)])
def test_layer_of_ranks_equals_the_layer_of_one(backend, size):
    cls = {"nvlink_one_sided": "NVLinkOneSidedAlltoAll", "nvlink_two_sided": "NVLinkTwoSidedAlltoAll"}[backend]
    assert started_ranks(size).run(layer, backend) == [f"{cls} has been destroyed"] * size


def alone(**changes):
    params = MoEEpCommParams(**{"num_experts": 4, "top_k": 2, "max_tokens_per_rank": 8, "hidden_size": 32, **changes})
    return create_communication(BootstrapConfig(1, 0), params, "nvlink_one_sided", device="cpu")


def test_calls_out_of_order():
    made = alone()
    x, ids = torch.randn(3, 32).bfloat16(), torch.zeros(3, 2, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="combine called before dispatch"):
        made.combine(x)
    got = made.dispatch(x, ids, hidden_states_scale=torch.ones(3, 1, dtype=torch.uint8))
    assert got.hidden_states_scale.shape == (8, 1) and got.topk_weights is None and got.tokens_per_rank == 8
    assert got.topk_ids[:3].tolist() == [[0, 0]] * 3 and (got.topk_ids[3:] == -1).all()
    with pytest.raises(RuntimeError, match="dispatch called twice without an intervening combine"):
        made.dispatch(x, ids)
    with pytest.raises(ValueError, match="must be 2D or 3D, got 1D"):
        made.combine(x[0])
    with pytest.raises(ValueError, match="must have 8 rows, got 3"):
        made.combine(x)
    assert torch.equal(made.combine(got.hidden_states), x)
    for most in (0, 9):
        with pytest.raises(ValueError, match=rf"must be in \(0, 8\], got {most}"):
            made.dispatch(x, ids, max_tokens_per_rank=most)
    assert made.is_workload_feasible(8) and not made.is_workload_feasible(9) and made.supports_cuda_graph
    made.destroy()


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"top_k": 0}, "top_k must be a positive int, got 0"),
        ({"hidden_size": 32.0}, "hidden_size must be a positive int, got 32.0"),
        ({"top_k": 5}, "top_k must be at most num_experts = 4, got 5"),
        ({"invalid_expert_id": 3}, r"invalid_expert_id must be outside of \[0, 4\), got 3"),
        ({"dispatch_format": QuantFormat.INT4}, "dispatch_format must be None or one of BF16"),
    ],
)
def test_wrong_sizes(changes, text):
    with pytest.raises(ValueError, match=text):
        alone(**changes)


def test_bytes_of_a_token():
    params = MoEEpCommParams(8, 2, 16, 7168)
    assert params.dispatch_bytes_per_token == 14336 and params.token_dtype == torch.bfloat16
    found = {
        one.name: dataclasses.replace(params, dispatch_format=one).dispatch_bytes_per_token
        for one in list(QuantFormat)[:7]
    }
    assert found == {
        "BF16": 14336,
        "FP16": 14336,
        "FP8PerTensor": 7168,
        "DeepSeekFp8": 7168 + 224,
        "MXFP8": 7168 + 224,
        "NVFP4": 3584 + 448,
        "MXFP4": 3584 + 224,
    }


def test_names():
    params = MoEEpCommParams(8, 2, 16, 64)
    assert moe_ep.available_communication_backends() == ["nvlink_one_sided", "nvlink_two_sided"]
    with pytest.raises(
        KeyError, match=r"unknown communication backend 'nccl'; available: \['cake', 'nvlink_one_sided'"
    ):
        create_communication(BootstrapConfig(1, 0), params, "nccl")
    with pytest.raises(TypeError, match="backend must be a name or an object with a str backend_name, got int"):
        create_communication(BootstrapConfig(1, 0), params, 3)
    with pytest.raises(RuntimeError, match="CakeAlltoAll is not supported on this platform"):
        create_communication(BootstrapConfig(1, 0), params, moe_ep.CakeAlltoAllConfig())
    with pytest.raises(ValueError, match="extra_payload_bytes_per_token must not be negative, got -1"):
        create_communication(BootstrapConfig(1, 0), params, NVLinkOneSidedConfig(extra_payload_bytes_per_token=-1))
    with pytest.raises(ValueError, match="num_experts must be a multiple of 4, got 6"):
        create_communication(BootstrapConfig(1, 0), MoEEpCommParams(6, 2, 16, 64), "nvlink_two_sided")
    with pytest.raises(ValueError, match=r"requires num_experts \(E\) divisible by the EP size"):
        create_communication(BootstrapConfig(3, 0), params, "nvlink_one_sided")


def test_a_group_of_another_size():
    def work(comm):
        create_communication(
            BootstrapConfig(1, 0), MoEEpCommParams(8, 2, 16, 64), NVLinkOneSidedConfig(comm_backend=comm)
        )

    with pytest.raises(ValueError, match="comm_backend must be rank 0 of 1 as the bootstrap says, got rank 0 of 2"):
        call_on_ranks(2, work)
