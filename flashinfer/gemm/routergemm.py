# SPDX-License-Identifier: Apache-2.0
"""A linear layer for few rows, such as the router of a mixture of experts. (The published name of the module.)"""

from __future__ import annotations

from typing import Any, Callable, Optional

import torch

from .._runtime.arch import AMPERE_ON, CPU
from .._runtime.errors import ArgumentError
from .._runtime.requirements import backend_requirement, supported_compute_capability
from ..api_logging import flashinfer_api
from ..jit.gemm import get_gemm_module
from ..trace.templates.gemm import router_gemm_trace, tinygemm_bf16_trace
from .bf16 import mm_bf16_op
from .bf16_checks import tiny_is_served

__all__ = [
    "get_tinygemm2_module",
    "mm_M1_16_K6144_N256",
    "mm_M1_16_K7168_N128",
    "mm_M1_16_K7168_N256",
    "mm_M1_16_K7168_N256_bf16",
    "mm_M1_16_K7168_N384",
    "mm_M1_16_K7168_N384_bf16",
    "mm_M1_16_K7168_N896",
    "mm_M1_16_K7168_N896_bf16",
    "tinygemm_bf16",
]

_OP = "tinygemm_bf16"
_BF16 = torch.bfloat16


def get_tinygemm2_module() -> Any:
    """Return the loaded CUDA module that multiplies few rows with a bias."""
    return get_gemm_module("cuda")


@supported_compute_capability([CPU, *AMPERE_ON])
def _check_tinygemm_bf16(
    input: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    bias: Optional[torch.Tensor] = None,
    use_pdl: bool = False,
) -> bool:
    x, w = input.shape, weight.shape
    if (
        input.dtype is weight.dtype is out.dtype is _BF16
        and len(x) == 2 == len(w)
        and x[1] == w[1]
        and w[0] % 16 == 0
        and out.shape == (x[0], w[0])
        and out.device == input.device
        and input.is_contiguous()
        and weight.is_contiguous()
        and out.is_contiguous()
        and (bias is None or (bias.dtype is _BF16 and bias.shape == w[:1] and bias.is_contiguous()))
    ):
        return True
    given = {"input": input, "weight": weight, "out": out} | ({} if bias is None else {"bias": bias})
    for name, tensor in given.items():
        rank = 1 if name == "bias" else 2
        if tensor.dtype is not _BF16:
            raise ArgumentError(f"{_OP}: unsupported dtype: {name} must be bfloat16, got {tensor.dtype}")
        if tensor.ndim != rank:
            raise ArgumentError(f"{_OP}: {name} must be {rank}D, got shape {tuple(tensor.shape)}")
    (m, k), (n, columns) = input.shape, weight.shape
    if columns != k:
        raise ArgumentError(f"{_OP}: weight.shape[1] must be input.shape[1] = {k}, got {columns}")
    if out.shape != (m, n) or out.device != input.device:
        raise ArgumentError(f"{_OP}: out must be ({m}, {n}) on {input.device}, got {tuple(out.shape)} on {out.device}")
    if bias is not None and bias.shape[0] != n:
        raise ArgumentError(f"{_OP}: bias must be ({n},), got {tuple(bias.shape)}")
    return tiny_is_served(_OP, ("input", "weight", "bias", "out"), input, weight, bias, out)


@flashinfer_api(trace=tinygemm_bf16_trace)
@backend_requirement({}, common_check=_check_tinygemm_bf16)
def tinygemm_bf16(
    input: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    bias: Optional[torch.Tensor] = None,
    use_pdl: bool = False,
) -> None:
    r"""Linear layer ``out = input @ weight.T + bias``, made for 1 to 8 rows and right for any number.

    Sums and bias are float32, rounded once.

    Parameters
    ----------
    input : torch.Tensor
        ``(m, in_features)`` bfloat16, contiguous.
    weight : torch.Tensor
        ``(out_features, in_features)`` bfloat16, contiguous; ``out_features`` is a multiple of 16.
    out : torch.Tensor
        ``(m, out_features)`` bfloat16, contiguous; written.
    bias : Optional[torch.Tensor]
        ``(out_features,)`` bfloat16, contiguous.
    use_pdl : bool
        Programmatic dependent launch: a hint without effect on the result.

    Examples
    --------
    >>> x, w, out = torch.randn(2, 64).bfloat16(), torch.randn(32, 64).bfloat16(), torch.empty(2, 32).bfloat16()
    >>> flashinfer.gemm.tinygemm_bf16(x, w, out, bias=torch.randn(32).bfloat16())
    """
    mm_bf16_op(out, input, weight.mT, bias, use_pdl, None, True)


# ------------------------------------------------------------------------------- routers of published models


def _router_product(k: int, n: int, out_dtype: torch.dtype, suffix: str = "") -> Callable[..., None]:
    """Return the product of 1 to 16 tokens with the router of a model of these sizes."""
    op = f"mm_M1_16_K{k}_N{n}{suffix}"

    @supported_compute_capability([CPU, 90, 100, 103, 107])
    def check(mat_a: torch.Tensor, mat_b: torch.Tensor, out: torch.Tensor, launch_with_pdl: bool = True) -> bool:
        for name, tensor, dtype in (("mat_a", mat_a, _BF16), ("mat_b", mat_b, _BF16), ("out", out, out_dtype)):
            if tensor.ndim != 2:
                raise ArgumentError(f"{op}: {name} must be 2D, got shape {tuple(tensor.shape)}")
            if tensor.dtype is not dtype:
                wanted = str(dtype).removeprefix("torch.")
                raise ArgumentError(f"{op}: {name} must have dtype {wanted}, got {tensor.dtype}")
            if tensor.device != mat_a.device:
                raise ArgumentError(f"{op}: {name} must be on {mat_a.device} as mat_a is, got {tensor.device}")
        rows = mat_a.shape[0]
        if not 1 <= rows <= 16:
            raise ArgumentError(f"{op}: mat_a.shape[0] (num_tokens) must be from 1 to 16, got {rows}")
        for name, size in (("mat_a.shape[1]", mat_a.shape[1]), ("mat_b.shape[0]", mat_b.shape[0])):
            if size != k:
                raise ArgumentError(f"{op}: {name} (hidden_dim) must be {k}, got {size}")
        for name, size in (("mat_b.shape[1]", mat_b.shape[1]), ("out.shape[1]", out.shape[1])):
            if size != n:
                raise ArgumentError(f"{op}: {name} (num_experts) must be {n}, got {size}")
        if out.shape[0] != rows:
            raise ArgumentError(f"{op}: out.shape[0] (num_tokens) must be {rows} as of mat_a, got {out.shape[0]}")
        if not mat_b.mT.is_contiguous():
            raise ArgumentError(f"{op}: mat_b must be column-major, got strides {mat_b.stride()}")
        for name, tensor in (("mat_a", mat_a), ("out", out)):
            if not tensor.is_contiguous():
                raise ArgumentError(f"{op}: {name} must be contiguous (row-major), got strides {tensor.stride()}")
        return True

    def multiply(mat_a: torch.Tensor, mat_b: torch.Tensor, out: torch.Tensor, launch_with_pdl: bool = True) -> None:
        mm_bf16_op(out, mat_a, mat_b, None, launch_with_pdl, None, True)

    written = str(out_dtype).removeprefix("torch.")
    multiply.__doc__ = f"""Router product ``out = mat_a @ mat_b`` of 1 to 16 tokens; sums in float32, rounded once.

    Parameters
    ----------
    mat_a : torch.Tensor
        ``(m, {k})`` bfloat16, contiguous, ``1 <= m <= 16``.
    mat_b : torch.Tensor
        ``({k}, {n})`` bfloat16, column-major: the transposed view of ``({n}, {k})`` weights.
    out : torch.Tensor
        ``(m, {n})`` {written}, contiguous; written.
    launch_with_pdl : bool
        Programmatic dependent launch: a hint without effect on the result.

    Examples
    --------
    >>> x, w = torch.randn(2, {k}).bfloat16(), torch.randn({n}, {k}).bfloat16()
    >>> flashinfer.gemm.{op}(x, w.T, torch.empty(2, {n}, dtype=torch.{written}))
    """
    multiply.__name__ = multiply.__qualname__ = op
    checked: Callable[..., None] = backend_requirement({}, common_check=check)(multiply)
    return flashinfer_api(checked, trace=router_gemm_trace(op, out_dtype))


mm_M1_16_K7168_N128 = _router_product(7168, 128, _BF16)
mm_M1_16_K7168_N256 = _router_product(7168, 256, torch.float32)
mm_M1_16_K6144_N256 = _router_product(6144, 256, torch.float32)
mm_M1_16_K7168_N256_bf16 = _router_product(7168, 256, _BF16, "_bf16")
mm_M1_16_K7168_N384 = _router_product(7168, 384, torch.float32)
mm_M1_16_K7168_N384_bf16 = _router_product(7168, 384, _BF16, "_bf16")
mm_M1_16_K7168_N896 = _router_product(7168, 896, torch.float32)
mm_M1_16_K7168_N896_bf16 = _router_product(7168, 896, _BF16, "_bf16")
