# SPDX-License-Identifier: Apache-2.0
"""The function users call: checks with messages they can act on, allocates, calls the module."""

import functools
from typing import Any, Optional

import torch
from jit_scale import gen_scale_module

from flashinfer.api_logging import flashinfer_api
from flashinfer.utils import backend_requirement, supported_compute_capability


@functools.cache
def get_scale_module(dtype_in: str, dtype_out: str) -> Any:
    """Compiles on the first call, then costs a dictionary look-up."""
    return gen_scale_module(dtype_in, dtype_out).build_and_load()


@supported_compute_capability([75, 80, 86, 89, 90, 100, 103, 110, 120, 121])
def _check_scale(input: torch.Tensor, factor: float, out: Optional[torch.Tensor] = None) -> bool:
    """Same parameters as the function itself. Returns True, or raises ValueError with the reason."""
    if input.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"scale: input has dtype {input.dtype}, expected float16, bfloat16 or float32")
    if out is not None and out.shape != input.shape:
        raise ValueError(f"scale: out has shape {tuple(out.shape)}, expected {tuple(input.shape)}")
    if out is not None and out.dtype != input.dtype:
        raise ValueError(f"scale: out has dtype {out.dtype}, expected {input.dtype}")
    if out is not None and out.device != input.device:
        raise ValueError(f"scale: out is on {out.device}, expected {input.device}")
    return True


@flashinfer_api
@backend_requirement(backend_checks={}, common_check=_check_scale)
def scale(input: torch.Tensor, factor: float, out: Optional[torch.Tensor] = None) -> torch.Tensor:
    """Multiply every element of ``input`` by ``factor``.

    Parameters
    ----------
    input : torch.Tensor
        CUDA tensor, contiguous; float16, bfloat16 or float32, any shape.
    factor : float
        The number.
    out : Optional[torch.Tensor]
        Where the result goes; allocated when missing. Same shape, dtype and device as ``input``.

    Returns
    -------
    torch.Tensor
        ``out``.
    """
    if out is None:
        out = torch.empty_like(input)
    dtype = str(input.dtype).removeprefix("torch.")
    get_scale_module(dtype, dtype).run(input, out, float(factor))
    return out
