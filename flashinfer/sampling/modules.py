# SPDX-License-Identifier: Apache-2.0
"""The compiled module of the family, its ops, and what the functions share on the Python side."""

from __future__ import annotations

from typing import Optional, Union

import torch

from ..dispatch import backend_of
from ..errors import ArgumentError
from ..jit.codegen import module_cache
from ..jit.sampling import gen_sampling_module
from ..ops import register_custom_op
from .random_stream import Number, as_int64, get_seed_and_offset, stream_arguments

get_native_module = module_cache(gen_sampling_module)

# Which columns a draw may take; csrc/sampling.cu has the same list.
FROM_ALL, FROM_MIN_P, FROM_TOP_P, FROM_TOP_K, FROM_JOINT, FROM_TOP_K_FIRST = range(6)

NO_LIMIT = 2**31 - 1


def as_float(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype is torch.float32 else x.float()


def per_row(
    value: Union[torch.Tensor, float], dtype: torch.dtype, input: torch.Tensor
) -> tuple[Optional[torch.Tensor], Union[float, int]]:
    """A sampling parameter as tensor, or as number: ``(tensor, 0)`` or ``(None, number)``."""
    if type(value) is float or type(value) is int or not isinstance(value, torch.Tensor):  # isinstance takes 0.2 us
        return None, value
    if value.ndim == 0:
        raise ArgumentError(
            "Expected a 1D tensor of shape (batch_size,) or scalar for the sampling parameter, but got a 0-dimensional "
            "tensor"
        )
    if value.ndim > 1:
        raise ArgumentError(
            f"Expected a 1D tensor or scalar for the sampling parameter, but got a {value.ndim}D tensor"
        )
    if value.shape[0] != input.shape[0]:
        raise ArgumentError(
            f"Sampling parameter tensor batch size mismatch: expected length {input.shape[0]}, the rows of the input, "
            f"got {value.shape[0]}"
        )
    return value.to(device=input.device, dtype=dtype).contiguous(), 0


def check_no_nan(x: torch.Tensor, name: str) -> None:
    if torch.any(torch.isnan(x)):
        raise ArgumentError(f"Input {name} contains NaN.")


@register_custom_op("flashinfer::sampling_draw", mutates_args=("out", "valid"))
def _draw(
    out: torch.Tensor,
    valid: Optional[torch.Tensor],
    input: torch.Tensor,
    indices: Optional[torch.Tensor],
    is_logits: bool,
    method: int,
    top_ks: Optional[torch.Tensor],
    top_k: int,
    top_ps: Optional[torch.Tensor],
    top_p: float,
    seeds: Optional[torch.Tensor],
    seed: Optional[int],
    offsets: Optional[torch.Tensor],
    offset: Optional[int],
    increment: int,
) -> None:
    if seed is None:
        seed, offset = get_seed_and_offset(increment, None, input.device)
        seed = as_int64(seed)
    get_native_module(backend_of(input)).sample(
        out, valid, input, indices, is_logits, method, top_ks, top_k, top_ps, top_p, seeds, seed, offsets, offset
    )


_is_compiling = torch.compiler.is_compiling
_run_draw = _draw.__wrapped__  # type: ignore[attr-defined]
_FLOAT32, _INT32 = torch.float32, torch.int32


def draw(
    op: str,
    method: int,
    input: torch.Tensor,
    is_logits: bool,
    indices: Optional[torch.Tensor],
    top_k: Union[torch.Tensor, int],
    top_p: Union[torch.Tensor, float],
    generator: Optional[torch.Generator],
    check_nan: bool,
    seed: Optional[Number],
    offset: Optional[Number],
    increment: int,
    return_valid: bool,
) -> tuple[torch.Tensor, Optional[torch.Tensor]]:
    """One token per output, and whether there was one to draw. ``increment`` is per output."""
    if check_nan:
        check_no_nan(input, "logits" if is_logits else "probs")
    if input.dtype is not _FLOAT32:
        input = input.float()
    top_ks: Optional[torch.Tensor] = None
    top_ps: Optional[torch.Tensor] = None
    if type(top_k) is not int:
        top_ks, top_k = per_row(top_k, _INT32, input)  # type: ignore[assignment]
    if type(top_p) is not float:
        top_ps, top_p = per_row(top_p, _FLOAT32, input)
    batch, dtype = input.shape[0], _INT32
    if indices is not None:
        indices = indices.contiguous()
        batch, dtype = indices.shape[0], indices.dtype
    stream = stream_arguments(op, seed, offset, generator, batch * increment, input, batch)
    out = input.new_empty(batch, dtype=dtype)
    valid = input.new_empty(batch, dtype=torch.bool) if return_valid else None
    run = _draw if _is_compiling() else _run_draw
    run(
        out, valid, input, indices, is_logits, method, top_ks, int(top_k), top_ps, float(top_p), *stream,
        batch * increment,
    )  # fmt: skip
    return out, valid
