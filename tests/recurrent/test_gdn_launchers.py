# SPDX-License-Identifier: Apache-2.0
"""Published launchers of the gated delta rule: the public functions by other arguments."""

from __future__ import annotations

import re

import pytest
import torch

from flashinfer import gdn_kernels
from flashinfer.gdn_decode import (
    gated_delta_rule_decode,
    gated_delta_rule_decode_pretranspose,
    gated_delta_rule_mtp,
)
from flashinfer.gdn_kernels.gdn_decode_mtp import get_mtp_config, get_tile_v_mtp, get_vec_size_mtp
from flashinfer.gdn_prefill import chunk_gated_delta_rule
from flashinfer.jit import env as jit_env

from ..bad_arguments import check_refused
from .gdn_inputs import BF16, ints, projections, states

SIZES = {"H": 2, "HV": 4, "K": 128, "V": 128, "scale": 0.1, "use_qk_l2norm": True}


@pytest.mark.parametrize("is_flat", [False, True])
def test_decode_step(device, is_flat):
    kw, state = projections(3, 1, device=device), states(3, device=device)
    mine, output = state.clone(), torch.empty(3, 1, 4, 128, dtype=BF16, device=device)
    expected, new = gated_delta_rule_decode_pretranspose(**kw, state=state, scale=0.1)
    source = mine.view(-1, 128, 128) if is_flat else mine
    assert gdn_kernels.run_pretranspose_decode(source, **kw, output=output, B=3, T=1, **SIZES) is None
    assert torch.equal(output, expected) and torch.equal(mine, new)


def test_decode_step_of_a_pool(device):
    kw, pool = projections(3, 1, device=device), states(5, device=device, pad=64)
    mine = torch.empty_strided(pool.shape, pool.stride(), device=device).copy_(pool)
    output = torch.empty(3, 1, 4, 128, dtype=BF16, device=device)
    slots = {"initial_state_indices": ints([4, -1, 0], device=device)}
    slots["output_state_indices"] = ints([1, 2, 0], device=device)
    expected, _ = gated_delta_rule_decode_pretranspose(**kw, state=None, initial_state=pool, scale=0.1, **slots)
    gdn_kernels.run_pretranspose_decode(mine, **kw, output=output, B=3, T=1, use_pool_indexing=True, **slots, **SIZES)
    assert torch.equal(output, expected) and torch.equal(mine, pool)


def test_keys_before_values(device):
    kw, state = projections(2, 1, device=device), states(2, device=device)
    mine, output = state.clone(), torch.empty(2, 1, 4, 128, dtype=BF16, device=device)
    expected, new = gated_delta_rule_decode(**kw, state=state, scale=0.1)
    gdn_kernels.run_nontranspose_decode(mine.view(-1, 128, 128), **kw, output=output, B=2, T=1, **SIZES)
    assert torch.equal(output, expected) and torch.equal(mine, new)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_several_tokens(device, is_frozen):
    kw, pool, slots = projections(2, 3, device=device), states(4, device=device), ints([3, 1], device=device)
    mine, output = pool.clone(), torch.empty(2, 3, 4, 128, dtype=BF16, device=device)
    buffers = torch.zeros(2, 2, 3, 4, 128, 128, device=device)
    expected, _ = gated_delta_rule_mtp(
        **kw, initial_state=pool, initial_state_indices=slots, scale=0.1, intermediate_states_buffer=buffers[0],
        disable_state_update=is_frozen,
    )  # fmt: skip
    tile_v, vec_size = get_mtp_config(2, 3, 4)
    gdn_kernels.run_mtp_decode(
        mine.view(-1, 128, 128), buffers[1].view(-1, 128, 128), **kw, output=output, initial_state_indices=slots, B=2,
        T=3, pool_size=4, cache_steps=3, tile_v=tile_v, vec_size=vec_size, disable_state_update=is_frozen,
        cache_intermediate_states=True, **SIZES,
    )  # fmt: skip
    assert torch.equal(output, expected) and torch.equal(mine, pool) and torch.equal(buffers[1], buffers[0])


def test_prefill(device):
    q, k, v = (torch.nn.functional.normalize(torch.randn(70, 2, 128, device=device), dim=-1).bfloat16() for _ in "qkv")
    alpha, beta, ends = (
        torch.rand(70, 2, device=device),
        torch.rand(70, 2, device=device),
        ints([0, 30, 70], device=device),
    )
    start, new = states(2, 2, device=device), torch.empty(2, 2, 128, 128, device=device)
    output = torch.empty_like(q)
    expected = chunk_gated_delta_rule(q, k, v, alpha, beta, 0.1, start, True, ends)
    gdn_kernels.chunk_gated_delta_rule_sm90(output, new, q, k, v, start, alpha, beta, ends, 0.1)
    assert torch.equal(output, expected[0]) and torch.equal(new, expected[1])


def test_sizes_of_the_kernel():
    """Check that Python's numbers are those of the kernel: rows of a block, and where it takes more of them."""
    folder = jit_env.FLASHINFER_INCLUDE_DIR / "flashinfer/recurrent"
    many = int(re.search(r"MANY_ROWS = (\d+);", (folder / "step.cuh").read_text())[1])
    assert get_tile_v_mtp(many // 512, num_v_heads=4) == 64 and get_tile_v_mtp(many // 512 - 1, num_v_heads=4) == 16
    assert "TILE = WARPS * GROUPS * ROWS" in (folder / "step/shape.h").read_text()
    assert get_mtp_config(1, 4) == (16, get_vec_size_mtp(1)) == (16, 4)


def test_wrong_sizes():
    kw, state, output = projections(2, 1, device="cpu"), states(2, device="cpu"), torch.empty(2, 1, 4, 128, dtype=BF16)
    good = {"h0_source": state, **kw, "output": output, "B": 2, "T": 1, **SIZES}
    for change, text in (
        ({"B": 3}, "q must have shape (3, 1, 2, 128)"),
        ({"HV": 8}, "v must have shape (2, 1, 8, 128)"),
        ({"h0_source": state[:, :, :64]}, "h0_source must have shape (slots, 4, 128, 128)"),
        ({"use_pool_indexing": True}, "initial_state_indices must be given with use_pool_indexing"),
    ):
        check_refused(gdn_kernels.run_pretranspose_decode, text, **(good | change))
