# SPDX-License-Identifier: Apache-2.0
"""A linear layer for few rows, such as the router of a mixture of experts. (The published name of the module.)"""

from __future__ import annotations

from typing import Any, Optional

import torch

from .._runtime.arch import AMPERE_ON, CPU
from .._runtime.errors import ArgumentError
from .._runtime.requirements import backend_requirement, supported_compute_capability
from ..api_logging import flashinfer_api
from ..jit.gemm import get_gemm_module
from ..trace.templates.gemm import tinygemm_bf16_trace
from .bf16 import mm_bf16_op
from .bf16_checks import tiny_is_served

__all__ = ["get_tinygemm2_module", "tinygemm_bf16"]

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
