# SPDX-License-Identifier: Apache-2.0
"""Hyper-connections: values against the references in float64, layouts, edges, graphs."""

from __future__ import annotations

import pytest
import torch

from flashinfer.mhc import mhc_post, mhc_pre_big_fuse, mhc_pre_big_fuse_with_prenorm
from flashinfer.trace.templates.mhc import (
    mhc_post_trace,
    mhc_pre_big_fuse_trace,
    mhc_pre_big_fuse_with_prenorm_trace,
)

from ..graphs import capture

EPS = {"rms_eps": 1e-5, "mhc_pre_eps": 1e-4, "mhc_sinkhorn_eps": 1e-5, "mhc_post_mult_value": 2.0}


def post_arguments(lead, hidden, device):
    return {
        "x": torch.randn(*lead, hidden, device=device).bfloat16(),
        "residual": torch.randn(*lead, 4, hidden, device=device).bfloat16(),
        "post_layer_mix": torch.randn(*lead, 4, device=device),
        "comb_res_mix": torch.randn(*lead, 4, 4, device=device),
    }


def pre_arguments(lead, hidden, device, splits=1):
    residual = torch.randn(*lead, 4, hidden, device=device).bfloat16()
    squares = residual.float().square().sum((-2, -1))
    parts = (splits,) if splits > 1 else ()
    share = torch.softmax(torch.randn(*parts, *lead, device=device), 0) if parts else torch.ones_like(squares)
    return {
        "dot_mix": 8 * torch.randn(*parts, *lead, 24, device=device),
        "sqrsum": squares * share,
        "residual": residual,
        "mhc_scale": torch.tensor([0.7, 1.3, 2.1], device=device),
        "mhc_base": torch.randn(24, device=device),
        "k": 4 * hidden,
    }


def exact(template, arguments, **options):
    wide = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    return template.reference(**wide, **options)


def check_pre(actual, expected):
    post, comb, layer_input = actual
    torch.testing.assert_close(post.double(), expected[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(comb.double(), expected[1], rtol=1e-4, atol=1e-6)
    assert relative_norm(layer_input, expected[2]) < 5e-3


def relative_norm(actual, expected):
    return float((actual.double() - expected).norm() / expected.norm().clamp_min(1e-30))


# Shape of the tokens, width: one, no vector divides a row, one past a block's columns, two leading dimensions.
@pytest.mark.parametrize("lead, hidden", [((1,), 8), ((3,), 127), ((5,), 1032), ((2, 3), 512), ((1,), 16392), ((), 64)])
def test_post(device, lead, hidden):
    arguments = post_arguments(lead, hidden, device)
    out = mhc_post(**arguments)
    assert out.shape == arguments["residual"].shape and out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), exact(mhc_post_trace, arguments), rtol=2**-8, atol=1e-5)
    column = arguments | {"post_layer_mix": arguments["post_layer_mix"].unsqueeze(-1)}
    assert torch.equal(mhc_post(**column), out)


def test_post_sums_over_the_first_index(device):
    comb = torch.zeros(1, 4, 4, device=device)
    comb[0, 1, 3] = 1.0  # stream 1 into stream 3
    arguments = post_arguments((1,), 64, device) | {
        "comb_res_mix": comb,
        "post_layer_mix": torch.zeros(1, 4, device=device),
    }
    out = mhc_post(**arguments)
    assert torch.equal(out[0, 3], arguments["residual"][0, 1]) and not out[0, :3].any()


def test_strided_inputs_are_taken(device):
    arguments = post_arguments((6,), 64, device)
    strided = {name: torch.stack([x, x], dim=1)[:, 0] for name, x in arguments.items()}
    assert not strided["x"].is_contiguous()
    assert torch.equal(mhc_post(**strided), mhc_post(**arguments))


@pytest.mark.parametrize("splits", [1, 4, 16])
@pytest.mark.parametrize("lead, hidden", [((1,), 8), ((130,), 64), ((2, 3), 1032)])
def test_pre(device, lead, hidden, splits):
    arguments = pre_arguments(lead, hidden, device, splits)
    actual = mhc_pre_big_fuse(**arguments, num_splits=splits, **EPS)
    assert [x.shape for x in actual] == [(*lead, 4, 1), (*lead, 4, 4), (*lead, hidden)]
    check_pre(actual, exact(mhc_pre_big_fuse_trace, arguments, num_splits=splits, **EPS))


@pytest.mark.parametrize("repeat", [1, 3])
def test_sinkhorn_repeat(device, repeat):
    arguments = pre_arguments((9,), 64, device)
    actual = mhc_pre_big_fuse(**arguments, sinkhorn_repeat=repeat)
    check_pre(actual, exact(mhc_pre_big_fuse_trace, arguments, sinkhorn_repeat=repeat))


def test_comb_is_doubly_stochastic_and_large_logits_stay_finite(device):
    arguments = pre_arguments((33,), 64, device)
    arguments["dot_mix"] *= 20
    comb = mhc_pre_big_fuse(**arguments, sinkhorn_repeat=50)[1]
    assert comb.isfinite().all()
    torch.testing.assert_close(comb.sum(-2), torch.ones_like(comb.sum(-2)), rtol=0, atol=1e-4)


@pytest.mark.parametrize("lead, hidden", [((1,), 8), ((7,), 1032), ((2,), 16392)])
def test_pre_with_prenorm(device, lead, hidden):
    arguments = pre_arguments(lead, hidden, device)
    del arguments["sqrsum"], arguments["k"]
    actual = mhc_pre_big_fuse_with_prenorm(**arguments, **EPS)
    check_pre(actual, exact(mhc_pre_big_fuse_with_prenorm_trace, arguments, **EPS))
    with_axis = arguments | {"dot_mix": arguments["dot_mix"].unsqueeze(0)}
    for x, y in zip(mhc_pre_big_fuse_with_prenorm(**with_axis, **EPS), actual, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("block_size", [32, 256])
def test_block_size_changes_nothing(device, block_size):
    arguments = pre_arguments((40,), 1032, device)
    for x, y in zip(mhc_pre_big_fuse(**arguments, block_size=block_size), mhc_pre_big_fuse(**arguments), strict=True):
        assert torch.equal(x, y)


def test_no_tokens(device):
    assert mhc_post(**post_arguments((0,), 64, device)).shape == (0, 4, 64)
    assert mhc_pre_big_fuse(**pre_arguments((0,), 64, device))[2].shape == (0, 64)


BAD = [
    ({"residual": (3, 3, 64)}, "residual"),
    ({"sqrsum": (4,)}, "sqrsum.shape[0] must be 3"),
    ({"dot_mix": (3, 23)}, "dot_mix.shape[1] must be 24"),
    ({"mhc_scale": (4,)}, "mhc_scale must have 3 elements"),
    ({"mhc_base": (23,)}, "mhc_base must have 24 elements"),
    ({"num_splits": 3}, "num_splits must be 1, 2, 4, 8 or 16"),
    ({"num_splits": 2}, "dot_mix must have 3 dimensions"),
    ({"rms_eps": 0.0}, "rms_eps must be positive"),
    ({"mhc_pre_eps": -1.0}, "mhc_pre_eps must be positive"),
    ({"mhc_sinkhorn_eps": 0.0}, "mhc_sinkhorn_eps must be positive"),
    ({"sinkhorn_repeat": 0}, "sinkhorn_repeat must be at least 1"),
    ({"block_size": 48}, "block_size must be 0 or a multiple of 32"),
]


@pytest.mark.parametrize("change, text", BAD, ids=[text for _, text in BAD])
def test_bad_arguments(device, change, text):
    made = {name: torch.ones(x, device=device) if isinstance(x, tuple) else x for name, x in change.items()}
    if "residual" in made:
        made["residual"] = made["residual"].bfloat16()
    with pytest.raises(ValueError, match="mhc_pre_big_fuse: ") as caught:
        mhc_pre_big_fuse(**(pre_arguments((3,), 64, device) | made))
    assert text in str(caught.value)


@pytest.mark.parametrize(
    "name, bad, text",
    [
        ("x", torch.zeros(3, 64), "x must be bfloat16"),
        ("x", torch.zeros(3, 32).bfloat16(), "x.shape[1] must be 64"),
        ("residual", torch.zeros(3, 5, 64).bfloat16(), "residual.shape[1] must be 4"),
        ("comb_res_mix", torch.zeros(3, 4, 4).half(), "comb_res_mix must be float32"),
        ("post_layer_mix", torch.zeros(3, 5), "post_layer_mix.shape[1] must be 4"),
        ("x", torch.zeros(3, 64, device="meta").bfloat16(), "x must be on"),
    ],
)
def test_bad_arguments_of_post(device, name, bad, text):
    bad = bad if bad.device.type == "meta" else bad.to(device)
    with pytest.raises(RuntimeError) as caught:
        mhc_post(**(post_arguments((3,), 64, device) | {name: bad}))
    assert text in str(caught.value)


def test_pre_refuses_a_width_no_vector_divides(device):
    with pytest.raises(ValueError, match="multiple of 8, got 12"):
        mhc_pre_big_fuse(**pre_arguments((3,), 12, device))


def test_torch_compile(device):
    pre, post = pre_arguments((5,), 64, device), post_arguments((5,), 64, device)

    def layer():
        mixed = mhc_pre_big_fuse(**pre)
        return mhc_post(mixed[2], post["residual"], mixed[0], mixed[1])

    assert torch.equal(torch.compile(layer, backend="aot_eager", fullgraph=True)(), layer())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_graph():
    arguments = post_arguments((99,), 4096, "cuda")
    graph, out = capture(lambda: mhc_post(**arguments))
    arguments["x"].normal_()
    graph.replay()
    torch.testing.assert_close(out.double(), exact(mhc_post_trace, arguments), rtol=2**-8, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_more_tokens_than_a_grid_axis():
    arguments = post_arguments((70000,), 8, "cuda")
    torch.testing.assert_close(mhc_post(**arguments).double(), exact(mhc_post_trace, arguments), rtol=2**-8, atol=1e-5)
