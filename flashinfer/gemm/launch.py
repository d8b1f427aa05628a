# SPDX-License-Identifier: Apache-2.0
"""The product that every function of the family calls, its choice of a module, and its op for torch.compile."""

from __future__ import annotations

from functools import cache
from typing import Any, Callable, Optional

import torch

from .._runtime.dispatch import NativeFunction, use_pdl
from .._runtime.requirements import SuitableBackends
from .._runtime.torch_ops import called, register_custom_op
from ..jit.gemm import W4_KINDS, get_gemm_module, get_gemm_sm90_module, get_gemm_w4_sm90_module
from .speak import speaking

__all__ = [
    "BATCHED",
    "BY_RULE",
    "CONTIGUOUS",
    "MASKED",
    "PACKED",
    "Sm90Devices",
    "Sm90Functions",
    "experts_product",
    "gemm_sm90",
    "grouped_product",
    "is_sm90",
    "noting",
    "ordinary_product",
    "product",
    "sm90_kind",
]


class Sm90Devices(dict[int, bool]):
    """CUDA devices by index: True for capability 9.0. Each device is probed once."""

    def __missing__(self, index: int) -> bool:
        self[index] = torch.cuda.get_device_capability(index) == (9, 0)
        return self[index]


class Sm90Functions(dict[str, Callable[..., Any]]):
    """One function of the module of each kind, loaded on first use."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __missing__(self, kind: str) -> Callable[..., Any]:
        self[kind] = speaking(get_gemm_sm90_module(kind), self._name)
        return self[kind]


#: The product of matrices, or of groups of rows. Weights are as callers pass them: a view such as ``b.mT`` takes 1 us.
ordinary_product = Sm90Functions("gemm_sm90_ordinary")


@cache
def experts_product(kind: str, tiles: tuple[int, int, int, int] = (-1, 1, -1, 1)) -> Callable[..., Any]:
    """Return the native product of experts for csrc/fused_moe.cu: tile and cluster of GEMM 1 and 2; -1: by the rule."""
    if kind in W4_KINDS:
        return get_gemm_w4_sm90_module(kind).gemm_w4_sm90_experts(*tiles)
    return get_gemm_sm90_module(kind).gemm_sm90_experts(*tiles)


def noting(launch: Optional[Callable[..., Any]], suitable: SuitableBackends) -> Optional[Callable[..., Any]]:
    """Return a launch for ``backend="auto"``, which also notes the backends that suit now for each later call."""
    if launch is None:
        return None
    names, launch_named = suitable.current(), launch

    def launch_auto(*arguments: Any) -> Any:
        result = launch_named(*arguments)
        if result is not None:
            suitable.note(names)
        return result

    return launch_auto


_devices = Sm90Devices()


def is_sm90(tensor: torch.Tensor) -> bool:
    """Return True if a tensor is on a CUDA device of capability 9.0."""
    return tensor.is_cuda and _devices[tensor.get_device()]


#: Groupings, in the order of ``Grouping`` in include/flashinfer/gemm.h, which defines them.
BATCHED, CONTIGUOUS, MASKED, PACKED = range(4)
#: Tile, cluster, sharing, raster and blocks of a product whose tile the rule chooses.
BY_RULE = (-1, 1, 0, 0, 0)

_native_gemm = NativeFunction(get_gemm_module, "gemm")
#: All arguments of a product, its tile among them.
gemm_sm90 = Sm90Functions("gemm_sm90")
_E4M3 = torch.float8_e4m3fn
_16_BIT_KINDS = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_BLOCKS = frozenset({(1, 128, 128), (1, 1, 128)})

Granularity = tuple[int, int, int]


def sm90_kind(dtype: torch.dtype, granularity: Optional[Granularity], alpha: float, beta: float) -> Optional[str]:
    """Return the kind of SM90 module for operands of ``dtype``, or None. The module itself looks at layouts."""
    if alpha != 1.0 or beta != 0.0:
        return None
    if dtype is _E4M3:
        if granularity is None:
            return "fp8"
        return "fp8_block" if granularity in _BLOCKS else None
    return _16_BIT_KINDS.get(dtype) if granularity is None else None


def product(
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    a_scale: Optional[torch.Tensor] = None,
    b_scale: Optional[torch.Tensor] = None,
    bias: Optional[torch.Tensor] = None,
    groups: Optional[torch.Tensor] = None,
    weight_indices: Optional[torch.Tensor] = None,
    grouping: int = BATCHED,
    granularity: Optional[Granularity] = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    expected_m: int = 0,
    enable_pdl: Optional[bool] = None,
    weights_first: bool = False,
) -> None:
    """Write ``alpha * a @ b.mT + bias + beta * out`` to ``out``; sums are float32, rounded once.

    Parameters
    ----------
    out : torch.Tensor
        ``(m, n)`` or ``(batch, m, n)``, float32, float16 or bfloat16. Any strides; so have ``a`` and ``b``, so that a
        caller's column-major ``(k, n)`` matrix is passed as its ``.mT``. Not read where ``beta`` is 0.
    a : torch.Tensor
        ``(m, k)``, or ``(batch, m, k)`` for batched and masked products: tokens.
    b : torch.Tensor
        ``(n, k)``, ``(batch, n, k)`` or ``(groups, n, k)``: weights. The dtype of ``a``, or both are float8.
    a_scale, b_scale : Optional[torch.Tensor]
        float32: one element for the whole tensor, or one per block of ``granularity``, in the shape of the operand
        with rows and ``k`` divided (rounded up).
    bias : Optional[torch.Tensor]
        ``(n,)``, added in float32.
    groups : Optional[torch.Tensor]
        int32. CONTIGUOUS: ``(m,)``, the group of each row or -1. MASKED: ``(batch,)``, rows of each batch entry that
        count. PACKED: ``(groups + 1,)``, where the rows of each group begin. Rows of no group are not written.
    weight_indices : Optional[torch.Tensor]
        int32 ``(groups,)``, PACKED only: the matrix of ``b`` of each group. Without it, group g has matrix g.
    grouping : int
        BATCHED, CONTIGUOUS, MASKED or PACKED.
    granularity : Optional[tuple[int, int, int]]
        Rows of ``a``, rows of ``b`` and elements along ``k`` that share a block scale; None if scales are those of
        whole tensors.
    alpha, beta : float
        Factors of the product and of the former ``out``.
    expected_m : int
        MASKED: number of rows that most batch entries have, from which a tile is chosen. No effect on results.
    enable_pdl : Optional[bool]
        Programmatic dependent launch; None turns it on where the GPU has it.
    weights_first : bool
        With programmatic dependent launch: the kernel before this one wrote nothing but ``a`` and ``a_scale``, and
        waited for the kernels before it, so that weights may be read before it has finished.
    """
    pdl = use_pdl(a, enable_pdl)
    if is_sm90(a):
        kind = sm90_kind(a.dtype, granularity, alpha, beta)
        # The module returns False for layouts that it does not take.
        if kind is not None and gemm_sm90[kind](
            *(out, a, b, a_scale, b_scale, bias, groups, weight_indices, grouping),
            *(1 if granularity is None else granularity[1], expected_m, *BY_RULE, pdl, weights_first),
        ):
            return
    blocks = (1, 128, 128) if granularity is None else granularity
    _native_gemm[a.is_cuda](
        out, a, b, a_scale, b_scale, bias, groups, weight_indices, grouping, *blocks, alpha, beta, pdl
    )


@register_custom_op("flashinfer::gemm_grouped", mutates_args=("out",))
@called("gemm")
def grouped_product(
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: Optional[torch.Tensor],
    b_scale: Optional[torch.Tensor],
    groups: Optional[torch.Tensor],
    grouping: int,
    scale_m: int = 0,
    scale_n: int = 0,
    scale_k: int = 0,
    expected_m: int = 0,
    weight_indices: Optional[torch.Tensor] = None,
    alpha: float = 1.0,
    beta: float = 0.0,
) -> None:
    """Call :func:`product` with the granularity as three integers, 0 for whole tensors."""
    product(
        out,
        a,
        b,
        a_scale=a_scale,
        b_scale=b_scale,
        groups=groups,
        weight_indices=weight_indices,
        grouping=grouping,
        granularity=(scale_m, scale_n, scale_k) if scale_m else None,
        alpha=alpha,
        beta=beta,
        expected_m=expected_m,
    )
