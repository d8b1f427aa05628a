# SPDX-License-Identifier: Apache-2.0
"""Compiled modules of the family, its ops, and helpers that its functions share."""

from __future__ import annotations

from typing import Any, Optional, Union

import torch

from .._runtime.allocation import allocate, cuda_index
from .._runtime.checks import check_tensors
from .._runtime.codegen_wrapper import compiler, is_traced
from .._runtime.dispatch import NativeFunction
from .._runtime.errors import ArgumentError
from .._runtime.explain_error import explain_arguments
from .._runtime.torch_ops import register_custom_op
from ..jit.codegen import module_cache
from ..jit.sampling import gen_sampling_module, gen_sampling_rows_module
from .random_stream import Number, stream_arguments, take_from_default

get_native_module = module_cache(gen_sampling_module)
get_rows_module = module_cache(gen_sampling_rows_module)
_native_sample = NativeFunction(get_native_module, "sample")

Samples = Union[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]

# Filters of a draw; csrc/sampling.cu has the same list.
FROM_ALL, FROM_MIN_P, FROM_TOP_P, FROM_TOP_K, FROM_JOINT, FROM_TOP_K_FIRST = range(6)

NO_LIMIT = 2**31 - 1
_MANY = 2**30  # number of columns: more than a row can have
_WIDE = (torch.uint32, torch.uint64)


def as_float(op: str, name: str, x: torch.Tensor) -> torch.Tensor:
    try:
        if x.dtype is torch.float32:
            return x
        if x.dtype.is_complex:  # torch would leave the imaginary part out
            raise ArgumentError(f"{op}: {name} must have dtype float32, float16 or bfloat16, got {x.dtype}")
        return x.float()
    except AttributeError:
        check_tensors(op, **{name: x})
        raise


def per_row(
    op: str, name: str, value: Union[torch.Tensor, float], dtype: torch.dtype, input: torch.Tensor
) -> tuple[Optional[torch.Tensor], Any]:
    """Convert a sampling parameter: ``(tensor, 0)`` for a tensor, ``(None, number)`` for a number."""
    if type(value) is float or type(value) is int or not isinstance(value, torch.Tensor):  # isinstance takes 0.2 us
        try:
            return None, float(value) if dtype is torch.float32 else int(value)
        except (TypeError, ValueError, OverflowError) as error:  # not a number, or not an integer
            raise ArgumentError(
                f"{op}: {name} must be a number, or a tensor of a number a row, got {value!r}"
            ) from error
    if value.ndim == 0:
        raise ArgumentError(
            f"{op}: {name}: Expected a 1D tensor of shape (batch_size,) or scalar for the sampling parameter, but got "
            "a 0-dimensional tensor"
        )
    if value.ndim > 1:
        raise ArgumentError(
            f"{op}: {name}: Expected a 1D tensor or scalar for the sampling parameter, but got a {value.ndim}D tensor"
        )
    if input.ndim == 0:
        raise ArgumentError(f"{op}: the input must have 2 dimensions, got 0")
    if value.shape[0] != input.shape[0]:
        raise ArgumentError(
            f"{op}: {name}: Sampling parameter tensor batch size mismatch: expected length {input.shape[0]}, the rows "
            f"of the input, got {value.shape[0]}"
        )
    try:
        if dtype is torch.int32 and value.dtype is torch.int64:
            value = value.clamp(0, _MANY)  # the largest int64 would become -1
        elif dtype is torch.int32 and (value.dtype.is_floating_point or value.dtype in _WIDE):
            value = value.double().clamp(0, _MANY)  # float16 cannot hold _MANY, and torch cannot compare _WIDE
        return value.to(device=input.device, dtype=dtype).contiguous(), 0
    except (RuntimeError, NotImplementedError) as error:  # without memory, or sparse
        explain_arguments(op, error, (name, torch.Tensor, value))
        raise


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
        seed, offset = take_from_default(increment, input, cuda_index(input))
    _native_sample[input.is_cuda](
        out, valid, input, indices, is_logits, method, top_ks, top_k, top_ps, top_p, seeds, seed, offsets, offset
    )


_FLOAT32, _INT32 = torch.float32, torch.int32
_ONE = (1,)  # strides of a row


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
) -> Samples:
    """Draw one token per output; with ``return_valid``, also return whether a token could be drawn.

    ``increment`` is the number of random numbers per output; 0: as many as there are columns. Calls the module directly
    unless torch compiles: one more function call with its arguments takes 0.5 us.
    """
    name = "logits" if is_logits else "probs"
    try:
        if input.dtype is not _FLOAT32:
            input = as_float(op, name, input)
    except AttributeError:
        check_tensors(op, **{name: input})
        raise
    if check_nan:
        check_no_nan(input, name)
    top_ks: Optional[torch.Tensor] = None
    top_ps: Optional[torch.Tensor] = None
    if type(top_k) is not int:
        top_ks, number = per_row(op, "top_k", top_k, _INT32, input)
        top_k = int(number)
    if type(top_p) is not float:
        top_ps, number = per_row(op, "min_p" if method == FROM_MIN_P else "top_p", top_p, _FLOAT32, input)
        top_p = float(number)
    shape = input.shape
    if len(shape) != 2:
        raise ArgumentError(f"{op}: {name} must have 2 dimensions, got {len(shape)}")
    batch = shape[0]
    if indices is not None:
        try:
            indices = indices.contiguous()
            batch = indices.shape[0]
        except (AttributeError, IndexError) as error:  # not a tensor, or 0-dimensional
            raise ArgumentError(f"{op}: indices must be a tensor of shape (batch,), got {indices!r}") from error
    increment = batch * (increment or shape[-1])
    if is_traced() or compiler._is_compiling_flag:
        stream = stream_arguments(op, seed, offset, generator, increment, input, batch)
        out = input.new_empty(batch, dtype=_INT32 if indices is None else indices.dtype)
        valid = input.new_empty(batch, dtype=torch.bool) if return_valid else None
        _draw(out, valid, input, indices, is_logits, method, top_ks, top_k, top_ps, top_p, *stream, increment)
        return out if valid is None else (out, valid)
    seeds: Optional[torch.Tensor] = None
    offsets: Optional[torch.Tensor] = None
    device = input.get_device() if input.is_cuda else -1
    if generator is None and (seed is None or offset is None):
        seed, offset = take_from_default(increment, input, device)
    else:
        seeds, seed, offsets, offset = stream_arguments(op, seed, offset, generator, increment, input, batch)
    out = allocate((batch,), _ONE, _INT32 if indices is None else indices.dtype, device)
    valid = allocate((batch,), _ONE, torch.bool, device) if return_valid else None
    try:
        _native_sample[device >= 0](
            out, valid, input, indices, is_logits, method, top_ks, top_k, top_ps, top_p, seeds, seed, offsets, offset
        )
    except (TypeError, RuntimeError) as error:
        tensors = (name, torch.Tensor, input), ("indices", Optional[torch.Tensor], indices)
        explain_arguments(op, error, *tensors, ("top_k", int, top_k), ("seed", int, seed), ("offset", int, offset))
        raise
    return out if valid is None else (out, valid)
