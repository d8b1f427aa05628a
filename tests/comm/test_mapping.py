# SPDX-License-Identifier: Apache-2.0
"""Ranks and groups, constants, and probes."""

from __future__ import annotations

import pytest
import torch

import flashinfer
from flashinfer.comm import Mapping
from flashinfer.comm.memory import probes
from flashinfer.comm.mnnvl import (
    McastGPUBuffer,
    MnnvlConfig,
    is_mnnvl_fabric_supported,
    is_multicast_supported,
)


def test_ranks_and_groups():
    """Check two pipeline stages of two context ranks of four tensor ranks on nodes of eight."""
    m = Mapping(16, 13, 8, tp_size=4, cp_size=2, pp_size=2)
    assert (m.tp_rank, m.cp_rank, m.pp_rank, m.node_rank, m.local_rank) == (1, 1, 1, 1, 5)
    assert (m.tp_group, m.cp_group, m.pp_group) == ([12, 13, 14, 15], [9, 13], [5, 13])
    assert (m.moe_tp_size, m.moe_ep_size, m.attn_tp_size, m.attn_cp_size) == (4, 1, 8, 1)
    assert m.has_tp() and m.has_cp() and m.has_pp() and not m.has_moe_ep()
    assert not m.is_first_pp_rank() and m.is_last_pp_rank() and (m.prev_pp_rank(), m.next_pp_rank()) == (5, 5)


def test_experts():
    m = Mapping(8, 5, tp_size=8, moe_ep_size=4)
    assert (m.moe_tp_size, m.moe_tp_rank, m.moe_ep_rank) == (2, 1, 1)
    assert (m.moe_tp_group, m.moe_ep_group, m.ep_experts(8)) == ([1, 5], [4, 5, 6, 7], [2, 3])
    assert Mapping(8, 0, tp_size=8, moe_tp_size=2).moe_ep_size == 4
    assert Mapping(rank=0, world_size=1).moe_ep_size == 1


def test_layers_of_stages():
    assert [Mapping(3, rank, pp_size=3).pp_layers(7) for rank in range(3)] == [[0, 1, 2], [3, 4], [5, 6]]


def test_auto_parallel_has_one_rank():
    m = Mapping(4, 3, tp_size=4, auto_parallel=True)
    assert (m.tp_rank, m.cp_rank, m.pp_rank) == (0, 0, 0)


@pytest.mark.parametrize(
    "sizes, text",
    [
        ({"tp_size": 4}, "world_size must be .* got 8"),
        ({"tp_size": 8, "moe_tp_size": 2, "moe_ep_size": 2}, "tp_size must be .* got 8"),
        ({"tp_size": 8, "attn_tp_size": 4}, r"attn_tp_size \* attn_cp_size must be"),
        ({"tp_size": 8, "attn_cp_size": 2}, "attn_cp_size must be 1, got 2"),
    ],
)
def test_sizes_that_do_not_fit(sizes, text):
    with pytest.raises(ValueError, match=text):
        Mapping(8, 0, **sizes)


def test_experts_with_context_parallelism():
    with pytest.raises(NotImplementedError, match="moe_ep_size must be 1 with cp_size = 2, got 2"):
        Mapping(4, 0, tp_size=2, cp_size=2, moe_ep_size=2)


def test_mappings_are_data():
    m = Mapping(8, 5, tp_size=8, moe_ep_size=4)
    assert Mapping.from_dict(m.to_dict()) == m and hash(Mapping.from_dict(m.to_dict())) == hash(m)
    assert m != Mapping(8, 4, tp_size=8, moe_ep_size=4) and m != 5


def test_constants():
    pattern, layout = flashinfer.comm.AllReduceFusionPattern, flashinfer.comm.QuantizationSFLayout
    numbers = [value for name, value in vars(pattern).items() if name.startswith("k")]
    assert numbers == list(range(13)) and pattern.kARResidualRMSNormOutDynamicFP8Quant == 11
    assert (layout.SWIZZLED_128x4, layout.SWIZZLED_8x4, layout.LINEAR) == (0, 1, 2)
    strategy, op = flashinfer.comm.AllReduceStrategyType, flashinfer.comm.AllReduceFusionOp
    assert (strategy.AUTO, strategy.TWOSHOT, op.NONE, op.MOE_FINALIZE_ALLREDUCE_RESIDUAL_RMS_NORM) == (3, 5, 0, 9)
    sizes = [flashinfer.comm.compute_fp4_swizzled_layout_sf_size(*size) for size in ((1, 1), (128, 4), (129, 5))]
    assert sizes == [512, 512, 2048]
    # Engines probe for both and then use them.
    assert hasattr(flashinfer.comm, "allreduce_fusion") and hasattr(
        flashinfer.comm, "create_allreduce_fusion_workspace"
    )


def test_probes_without_hardware():
    if not torch.cuda.is_available():
        assert not is_mnnvl_fabric_supported(0) and not is_multicast_supported(0)
    assert not is_multicast_supported(4096)


def test_no_multicast_whatever_the_device_can(monkeypatch):
    """Engines create a McastGPUBuffer where the answer is True, and this package has none."""
    monkeypatch.setattr(probes, "_has_attribute", lambda device, name: True)
    assert is_mnnvl_fabric_supported(0) and not is_multicast_supported(0)
    with pytest.raises(RuntimeError, match="needs multicast memory"):
        McastGPUBuffer(64, 1, 0, torch.device("cuda", 0), None)
    assert MnnvlConfig() == MnnvlConfig(None, 0, 1 << 29)
