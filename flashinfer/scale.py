# SPDX-License-Identifier: Apache-2.0
"""scale: multiply every element by a number."""

from __future__ import annotations

from typing import Any, Optional

import torch

from ._runtime.arch import TURING_ON
from ._runtime.errors import ArgumentError
from ._runtime.requirements import backend_requirement, supported_compute_capability
from ._runtime.torch_ops import register_custom_op
from .api_logging import flashinfer_api
from .jit.codegen import module_cache
from .jit.scale import gen_scale_module
from .trace.templates.scale import scale_trace

__all__ = ["scale"]

get_scale_module = module_cache(gen_scale_module)

_DTYPE_NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}


@supported_compute_capability(TURING_ON)
def _check_scale(input: torch.Tensor, factor: float, out: Optional[torch.Tensor] = None) -> bool:
    if input.dtype not in _DTYPE_NAMES:
        raise ArgumentError(f"scale: input must have dtype float16, bfloat16 or float32, got {input.dtype}")
    if out is not None:
        if out.shape != input.shape:
            raise ArgumentError(f"scale: out must have shape {tuple(input.shape)}, got {tuple(out.shape)}")
        if out.dtype != input.dtype:
            raise ArgumentError(f"scale: out must have dtype {input.dtype}, got {out.dtype}")
        if out.device != input.device:
            raise ArgumentError(f"scale: out must be on {input.device}, got {out.device}")
    return True


@register_custom_op("flashinfer::scale", mutates_args=("out",))
def _scale(out: torch.Tensor, input: torch.Tensor, factor: float) -> None:
    name = _DTYPE_NAMES[input.dtype]
    get_scale_module(name, name).run(input, out, factor)


@flashinfer_api(trace=scale_trace)
@backend_requirement(backend_checks={}, common_check=_check_scale)
def scale(input: torch.Tensor, factor: float, out: Optional[torch.Tensor] = None) -> torch.Tensor:
    r"""Multiply every element of ``input`` by ``factor``, in float32, rounded once.

    Parameters
    ----------
    input : torch.Tensor
        CUDA tensor, contiguous; float16, bfloat16 or float32, any shape.
    factor : float
        The number.
    out : Optional[torch.Tensor]
        Written and returned when given: shape, dtype and device of ``input``. May be ``input`` itself.

    Returns
    -------
    torch.Tensor
        ``input * factor``, same shape and dtype.

    Examples
    --------
    >>> x = torch.randn(4, 1024, dtype=torch.float16, device="cuda")  # doctest: +SKIP
    >>> y = flashinfer.scale(x, 3.14)  # doctest: +SKIP
    """
    if out is None:
        out = torch.empty_like(input)
    _scale(out, input, float(factor))
    return out


# The tutorial asks this function, which has no backends, for one, and prints the answer; others raise a ValueError.
def _has_no_backend(backend: str, cc: Optional[int] = None) -> bool:
    return False


_queries: Any = scale
_queries.is_backend_supported = _has_no_backend
