# SPDX-License-Identifier: Apache-2.0
"""shift: add a number to every element."""

from __future__ import annotations

from typing import Optional

import torch

from ._runtime.dispatch import backend_of
from ._runtime.torch_ops import register_custom_op
from .api_logging import flashinfer_api
from .jit.codegen import module_cache
from .jit.shift import gen_shift_module
from .trace.templates.shift import shift_trace

__all__ = ["shift"]

get_shift_module = module_cache(gen_shift_module)


@register_custom_op("flashinfer::shift", mutates_args=("out",))
def _shift(out: torch.Tensor, input: torch.Tensor, amount: float) -> None:
    get_shift_module(backend_of(input)).shift(out, input, amount)


@flashinfer_api(trace=shift_trace)
def shift(input: torch.Tensor, amount: float, out: Optional[torch.Tensor] = None) -> torch.Tensor:
    r"""Add ``amount`` to every element of ``input``, in float32, rounded once.

    Parameters
    ----------
    input : torch.Tensor
        ``(num_rows, hidden)``, contiguous; float16, bfloat16 or float32.
    amount : float
        The number.
    out : Optional[torch.Tensor]
        Written and returned when given: shape, dtype and device of ``input``. May be ``input`` itself.

    Returns
    -------
    torch.Tensor
        ``input + amount``, same shape and dtype.

    Examples
    --------
    >>> y = flashinfer.shift(torch.zeros(4, 64), 1.5)
    """
    if out is None:
        out = torch.empty_like(input)
    _shift(out, input, float(amount))
    return out
