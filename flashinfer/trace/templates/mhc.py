# SPDX-License-Identifier: Apache-2.0
"""Templates and references of ``flashinfer.mhc``: fp32 arithmetic (fp64 for fp64 inputs), each result rounded once."""

from __future__ import annotations

from typing import Any

import torch

from ..template import Axis, Const, Scalar, Tensor, TraceTemplate, Var
from .shared import normal, seeded

__all__ = ["mhc_post_trace", "mhc_pre_big_fuse_trace", "mhc_pre_big_fuse_with_prenorm_trace"]


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _mhc_post_reference(
    x: torch.Tensor, residual: torch.Tensor, post_layer_mix: torch.Tensor, comb_res_mix: torch.Tensor, **_: Any
) -> torch.Tensor:
    post = _wide(post_layer_mix).reshape(*x.shape[:-1], 4, 1)
    mixed = torch.einsum("...ij,...ih->...jh", _wide(comb_res_mix), _wide(residual))
    return (_wide(x).unsqueeze(-2) * post + mixed).to(residual.dtype)


def _mhc_pre_big_fuse_reference(
    dot_mix: torch.Tensor,
    sqrsum: torch.Tensor,
    residual: torch.Tensor,
    mhc_scale: torch.Tensor,
    mhc_base: torch.Tensor,
    k: int,
    rms_eps: float = 1e-6,
    mhc_pre_eps: float = 1e-6,
    mhc_sinkhorn_eps: float = 1e-6,
    mhc_post_mult_value: float = 1.0,
    sinkhorn_repeat: int = 20,
    num_splits: int = 1,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if num_splits > 1:
        dot_mix, sqrsum = dot_mix.sum(0), sqrsum.sum(0)
    m = dot_mix * torch.rsqrt(sqrsum / k + rms_eps).unsqueeze(-1)
    pre = torch.sigmoid(m[..., :4] * mhc_scale[0] + mhc_base[:4]) + mhc_pre_eps
    post = torch.sigmoid(m[..., 4:8] * mhc_scale[1] + mhc_base[4:8]) * mhc_post_mult_value
    comb = (m[..., 8:] * mhc_scale[2] + mhc_base[8:]).unflatten(-1, (4, 4))
    comb = torch.softmax(comb, dim=-1) + mhc_sinkhorn_eps
    comb = comb / (comb.sum(-2, keepdim=True) + mhc_sinkhorn_eps)
    for _round in range(sinkhorn_repeat - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + mhc_sinkhorn_eps)
        comb = comb / (comb.sum(-2, keepdim=True) + mhc_sinkhorn_eps)
    layer_input = (pre.unsqueeze(-1) * _wide(residual)).sum(-2).to(residual.dtype)
    return post.unsqueeze(-1), comb, layer_input


def _mhc_pre_big_fuse_with_prenorm_reference(
    dot_mix: torch.Tensor,
    residual: torch.Tensor,
    mhc_scale: torch.Tensor,
    mhc_base: torch.Tensor,
    rms_eps: float = 1e-6,
    mhc_pre_eps: float = 1e-6,
    mhc_sinkhorn_eps: float = 1e-6,
    mhc_post_mult_value: float = 1.0,
    sinkhorn_repeat: int = 20,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _mhc_pre_big_fuse_reference(
        dot_mix.reshape(*residual.shape[:-2], 24),
        _wide(residual).square().sum((-2, -1)),
        residual,
        mhc_scale,
        mhc_base,
        4 * residual.shape[-1],
        rms_eps,
        mhc_pre_eps,
        mhc_sinkhorn_eps,
        mhc_post_mult_value,
        sinkhorn_repeat,
    )


def _mhc_post_init(*, num_tokens: int, hidden_size: int = 7168, device: Any = "cuda", seed: int = 0) -> dict[str, Any]:
    g = seeded(seed, device)
    return {
        "x": normal(g, num_tokens, hidden_size),
        "residual": normal(g, num_tokens, 4, hidden_size),
        "post_layer_mix": normal(g, num_tokens, 4, dtype=torch.float32),
        "comb_res_mix": normal(g, num_tokens, 4, 4, dtype=torch.float32),
    }


def _mhc_pre_big_fuse_init(
    *, num_tokens: int, hidden_size: int = 7168, device: Any = "cuda", seed: int = 0
) -> dict[str, Any]:
    g = seeded(seed, device)
    residual = normal(g, num_tokens, 4, hidden_size)
    return {
        "dot_mix": normal(g, num_tokens, 24, dtype=torch.float32),
        "sqrsum": residual.float().square().sum((-2, -1)),
        "residual": residual,
        "mhc_scale": normal(g, 3, dtype=torch.float32),
        "mhc_base": normal(g, 24, dtype=torch.float32),
        "k": 4 * hidden_size,
    }


def _mhc_pre_big_fuse_with_prenorm_init(
    *, num_tokens: int, hidden_size: int = 7168, device: Any = "cuda", seed: int = 0
) -> dict[str, Any]:
    made = _mhc_pre_big_fuse_init(num_tokens=num_tokens, hidden_size=hidden_size, device=device, seed=seed)
    return {name: value for name, value in made.items() if name not in ("sqrsum", "k")}


_AXES: dict[str, Axis] = {
    "num_tokens": Var(),
    "hidden_size": Const(abbrev="h"),
    "hc": Const("residual streams", abbrev="", value=4),
}
_PRE_AXES: dict[str, Axis] = {**_AXES, "mix": Const(abbrev="", value=24), "scales": Const(abbrev="", value=3)}
_STREAMS = ("num_tokens", "hc", "hidden_size")
_MIX = Tensor(("num_tokens", "mix"), dtype="float32", description="products of the streams with the mixing matrix")
_PRE = {
    "residual": Tensor(_STREAMS),
    "mhc_scale": Tensor(("scales",), dtype="float32"),
    "mhc_base": Tensor(("mix",), dtype="float32"),
}
_OPTIONS = {
    "rms_eps": Scalar(optional=True),
    "mhc_pre_eps": Scalar(optional=True),
    "mhc_sinkhorn_eps": Scalar(optional=True),
    "mhc_post_mult_value": Scalar(optional=True),
    "sinkhorn_repeat": Scalar("int32", optional=True),
}
_PRE_OUTPUTS = {
    "post_mix": Tensor(("num_tokens", "hc", "one"), dtype="float32"),
    "comb_mix": Tensor(("num_tokens", "hc", "hc"), dtype="float32"),
    "layer_input": Tensor(("num_tokens", "hidden_size"), dtype_from="residual"),
}
_PRE_AXES["one"] = Const(abbrev="", value=1)

mhc_post_trace = TraceTemplate(
    "mhc",
    axes=_AXES,
    inputs={
        "x": Tensor(("num_tokens", "hidden_size")),
        "residual": Tensor(_STREAMS),
        "post_layer_mix": Tensor(("num_tokens", "hc"), dtype="float32"),
        "comb_res_mix": Tensor(("num_tokens", "hc", "hc"), dtype="float32"),
    },
    outputs={"out": Tensor(_STREAMS, dtype_from="residual")},
    name_prefix="mhc_post",
    reference=_mhc_post_reference,
    init=_mhc_post_init,
    description="The output of a layer mixed into four residual streams.",
)

mhc_pre_big_fuse_trace = TraceTemplate(
    "mhc",
    axes=_PRE_AXES,
    inputs={
        "dot_mix": _MIX,
        "sqrsum": Tensor(("num_tokens",), dtype="float32"),
        **_PRE,
        "k": Scalar("int32"),
        **_OPTIONS,
        "num_splits": Scalar("int32", optional=True),
    },
    outputs=_PRE_OUTPUTS,
    name_prefix="mhc_pre_big_fuse",
    reference=_mhc_pre_big_fuse_reference,
    init=_mhc_pre_big_fuse_init,
    description="Mixing weights of a layer and its input, a mixture of four residual streams.",
)

mhc_pre_big_fuse_with_prenorm_trace = TraceTemplate(
    "mhc",
    axes=_PRE_AXES,
    inputs={"dot_mix": _MIX, **_PRE, **_OPTIONS},
    outputs=_PRE_OUTPUTS,
    name_prefix="mhc_pre_big_fuse_with_prenorm",
    reference=_mhc_pre_big_fuse_with_prenorm_reference,
    init=_mhc_pre_big_fuse_with_prenorm_init,
    description="As mhc_pre_big_fuse, with the sum of squares taken from the streams.",
)
