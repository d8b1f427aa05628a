# SPDX-License-Identifier: Apache-2.0
"""Manifold hyper-connections (mHC): four residual streams, mixed before and after each layer by matrices of the token.

``mhc_pre_big_fuse`` makes the layer's input and the mixing weights, ``mhc_post`` the streams after the layer.
"""

from __future__ import annotations

from typing import Optional

import torch

from ._runtime.allocation import new_empty
from ._runtime.dispatch import NativeFunction
from ._runtime.errors import ArgumentError
from ._runtime.torch_ops import register_custom_op, register_fake_op
from .api_logging import flashinfer_api
from .jit.codegen import module_cache
from .jit.mhc import gen_mhc_module as gen_mhc_module
from .trace.templates.mhc import (
    mhc_post_trace,
    mhc_pre_big_fuse_trace,
    mhc_pre_big_fuse_with_prenorm_trace,
)

__all__ = ["mhc_post", "mhc_pre_big_fuse", "mhc_pre_big_fuse_with_prenorm"]

get_mhc_module = module_cache(gen_mhc_module)
_native_post = NativeFunction(get_mhc_module, "mhc_post")
_native_pre = NativeFunction(get_mhc_module, "mhc_pre")

_STREAMS = 4
_SPLITS = (1, 2, 4, 8, 16)
Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@register_custom_op("flashinfer::mhc_post", mutates_args=())
def _mhc_post(x: torch.Tensor, residual: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    out = new_empty(residual, torch.bfloat16, *residual.shape)
    _native_post[residual.is_cuda](out, x.contiguous(), residual.contiguous(), post.contiguous(), comb.contiguous())
    return out


@register_fake_op("mhc_post")
def _mhc_post_fake(x: torch.Tensor, residual: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    return residual.new_empty(residual.shape)


def _check_pre(op: str, residual: torch.Tensor, repeat: int, block_size: int, **positive: float) -> None:
    if residual.ndim < 2 or residual.shape[-2] != _STREAMS:
        raise ArgumentError(f"{op}: residual must have shape (..., 4, hidden) (HC is 4), got {tuple(residual.shape)}")
    for name, value in positive.items():
        if not value > 0:
            raise ArgumentError(f"{op}: {name} must be positive, got {value}")
    if repeat < 1:
        raise ArgumentError(f"{op}: sinkhorn_repeat must be at least 1, got {repeat}")
    if block_size < 0 or block_size > 1024 or block_size % 32:
        raise ArgumentError(f"{op}: block_size must be 0 or a multiple of 32 up to 1024, got {block_size}")


@register_custom_op("flashinfer::mhc_pre_big_fuse", mutates_args=())
def _mhc_pre(
    dot_mix: torch.Tensor,
    sqrsum: Optional[torch.Tensor],
    residual: torch.Tensor,
    mhc_scale: torch.Tensor,
    mhc_base: torch.Tensor,
    k: float,
    rms_eps: float,
    mhc_pre_eps: float,
    mhc_sinkhorn_eps: float,
    mhc_post_mult_value: float,
    sinkhorn_repeat: int,
    num_splits: int,
    block_size: int,
) -> Triple:
    op = "mhc_pre_big_fuse_with_prenorm" if sqrsum is None else "mhc_pre_big_fuse"
    _check_pre(
        op,
        residual,
        sinkhorn_repeat,
        block_size,
        k=k,
        rms_eps=rms_eps,
        mhc_pre_eps=mhc_pre_eps,
        mhc_sinkhorn_eps=mhc_sinkhorn_eps,
    )
    *lead, hidden = residual.shape
    del lead[-1]
    post = new_empty(residual, torch.float32, *lead, _STREAMS, 1)
    comb = new_empty(residual, torch.float32, *lead, _STREAMS, _STREAMS)
    layer_input = new_empty(residual, torch.bfloat16, *lead, hidden)
    _native_pre[residual.is_cuda](
        *(post, comb, layer_input, dot_mix.contiguous(), None if sqrsum is None else sqrsum.contiguous()),
        *(residual.contiguous(), mhc_scale, mhc_base, k, rms_eps, mhc_pre_eps, mhc_sinkhorn_eps, mhc_post_mult_value),
        *(sinkhorn_repeat, num_splits, block_size),
    )
    return post, comb, layer_input


@register_fake_op("mhc_pre_big_fuse")
def _mhc_pre_fake(dot_mix: torch.Tensor, sqrsum: Optional[torch.Tensor], residual: torch.Tensor, *_: object) -> Triple:
    *lead, hidden = residual.shape
    del lead[-1]
    weights = residual.new_empty((*lead, _STREAMS, 1), dtype=torch.float32)
    return weights, weights.new_empty((*lead, _STREAMS, _STREAMS)), residual.new_empty((*lead, hidden))


@flashinfer_api(trace=mhc_post_trace)
def mhc_post(
    x: torch.Tensor, residual: torch.Tensor, post_layer_mix: torch.Tensor, comb_res_mix: torch.Tensor
) -> torch.Tensor:
    r"""Mix the output of a layer into the four residual streams.

    ``out[j] = x * post_layer_mix[j] + sum_i comb_res_mix[i, j] * residual[i]``, in float32, rounded once. The sum runs
    over the first index of the matrix.

    Parameters
    ----------
    x : torch.Tensor
        ``(..., hidden)`` bfloat16, the layer's output; any ``hidden``.
    residual : torch.Tensor
        ``(..., 4, hidden)`` bfloat16.
    post_layer_mix : torch.Tensor
        ``(..., 4)`` or ``(..., 4, 1)`` float32.
    comb_res_mix : torch.Tensor
        ``(..., 4, 4)`` float32.

    Returns
    -------
    torch.Tensor
        ``(..., 4, hidden)`` bfloat16. A tensor that is not contiguous is copied first.

    Examples
    --------
    >>> x, residual = torch.randn(2, 64).bfloat16(), torch.randn(2, 4, 64).bfloat16()
    >>> flashinfer.mhc.mhc_post(x, residual, torch.rand(2, 4), torch.rand(2, 4, 4)).shape
    torch.Size([2, 4, 64])
    """
    return _mhc_post(x, residual, post_layer_mix, comb_res_mix)


@flashinfer_api(trace=mhc_pre_big_fuse_trace)
def mhc_pre_big_fuse(
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
    block_size: int = 0,
) -> Triple:
    r"""Compute a layer's input and the mixing weights of its output, from products with the mixing matrix.

    With ``m = dot_mix * rsqrt(sqrsum / k + rms_eps)``: ``pre = sigmoid(m[0:4] * scale[0] + base[0:4]) + mhc_pre_eps``,
    ``post = sigmoid(m[4:8] * scale[1] + base[4:8]) * mhc_post_mult_value``, and ``comb`` from the softmax over rows of
    the 4 x 4 matrix ``m[8:24] * scale[2] + base[8:24]``, whose columns and rows are normalised in turn,
    ``sinkhorn_repeat`` times. ``layer_input = sum_j pre[j] * residual[j]``.

    Parameters
    ----------
    dot_mix : torch.Tensor
        ``(..., 24)`` float32; with ``num_splits`` above 1 ``(num_splits, ..., 24)``, summed over the first axis.
    sqrsum : torch.Tensor
        ``(...)`` float32, or ``(num_splits, ...)``: sums of squares of the streams of a token.
    residual : torch.Tensor
        ``(..., 4, hidden)`` bfloat16, ``hidden`` a multiple of 8.
    mhc_scale, mhc_base : torch.Tensor
        ``(3,)`` and ``(24,)`` float32.
    k : int
        Number of elements that ``sqrsum`` sums.
    rms_eps, mhc_pre_eps, mhc_sinkhorn_eps : float
        Positive.
    mhc_post_mult_value : float
        Factor of ``post``.
    sinkhorn_repeat : int
        Normalisations of the columns, at least 1.
    num_splits : int
        1, 2, 4, 8 or 16.
    block_size : int
        Threads of a CUDA block; 0 for the default.

    Returns
    -------
    tuple of torch.Tensor
        ``post_mix (..., 4, 1)`` and ``comb_mix (..., 4, 4)``, float32, and ``layer_input (..., hidden)``, bfloat16.

    Examples
    --------
    >>> residual = torch.randn(2, 4, 64).bfloat16()
    >>> products = torch.randn(2, 24), residual.float().square().sum((1, 2))
    >>> post, comb, y = flashinfer.mhc.mhc_pre_big_fuse(*products, residual, torch.ones(3), torch.zeros(24), 256)
    >>> y.shape
    torch.Size([2, 64])
    """
    if num_splits not in _SPLITS:
        raise ArgumentError(f"mhc_pre_big_fuse: num_splits must be 1, 2, 4, 8 or 16, got {num_splits}")
    return _mhc_pre(
        *(dot_mix, sqrsum, residual, mhc_scale, mhc_base, k, rms_eps, mhc_pre_eps, mhc_sinkhorn_eps),
        *(mhc_post_mult_value, sinkhorn_repeat, num_splits, block_size),
    )


@flashinfer_api(trace=mhc_pre_big_fuse_with_prenorm_trace)
def mhc_pre_big_fuse_with_prenorm(
    dot_mix: torch.Tensor,
    residual: torch.Tensor,
    mhc_scale: torch.Tensor,
    mhc_base: torch.Tensor,
    rms_eps: float = 1e-6,
    mhc_pre_eps: float = 1e-6,
    mhc_sinkhorn_eps: float = 1e-6,
    mhc_post_mult_value: float = 1.0,
    sinkhorn_repeat: int = 20,
    block_size: int = 0,
) -> Triple:
    """Compute as :func:`mhc_pre_big_fuse`, with the sum of squares taken from ``residual`` and ``k = 4 * hidden``.

    ``dot_mix`` is ``(..., 24)`` or ``(1, ..., 24)``; everything else as there.

    Examples
    --------
    >>> residual = torch.randn(2, 4, 64).bfloat16()
    >>> pre = flashinfer.mhc.mhc_pre_big_fuse_with_prenorm
    >>> post, comb, y = pre(torch.randn(2, 24), residual, torch.ones(3), torch.zeros(24))
    >>> post.shape, comb.shape
    (torch.Size([2, 4, 1]), torch.Size([2, 4, 4]))
    """
    if dot_mix.ndim == residual.ndim and dot_mix.shape[:1] == (1,):
        dot_mix = dot_mix[0]
    return _mhc_pre(
        *(dot_mix, None, residual, mhc_scale, mhc_base, _STREAMS * residual.shape[-1], rms_eps, mhc_pre_eps),
        *(mhc_sinkhorn_eps, mhc_post_mult_value, sinkhorn_repeat, 1, block_size),
    )
