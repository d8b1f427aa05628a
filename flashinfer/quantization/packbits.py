# SPDX-License-Identifier: Apache-2.0
"""Truth values packed into bits: the form in which attention reads custom masks."""

from __future__ import annotations

import torch

from .._runtime.dispatch import backend_of
from .._runtime.errors import ArgumentError
from .._runtime.explain_error import explain_type_errors
from .._runtime.torch_ops import register_custom_op, register_fake_op
from ..api_logging import flashinfer_api
from ..trace.templates.quantization import packbits_trace, segment_packbits_trace
from .modules import get_packbits_module

_IS_LITTLE = {"big": False, "little": True}

# Zero is all bits clear, the sign of a float aside. Dtypes for which that is not so are made bool first.
_BITS_TELL = {
    *(torch.bool, torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int16, torch.uint16, torch.float16, torch.bfloat16),
    *(torch.int32, torch.uint32, torch.float32),
    *(torch.int64, torch.uint64, torch.float64, torch.complex64),
}


def _is_little(op: str, bitorder: str) -> bool:
    if bitorder not in _IS_LITTLE:
        raise ArgumentError(f"{op}: bitorder must be 'big' or 'little', got {bitorder!r}")
    return _IS_LITTLE[bitorder]


@register_custom_op("flashinfer::packbits", mutates_args=())
def _packbits(x: torch.Tensor, is_little: bool) -> torch.Tensor:
    out = torch.empty((x.numel() + 7) // 8, dtype=torch.uint8, device=x.device)
    get_packbits_module(backend_of(x)).packbits(out, x, is_little)
    return out


@register_fake_op("flashinfer::packbits")
def _packbits_fake(x: torch.Tensor, is_little: bool) -> torch.Tensor:
    return x.new_empty((x.numel() + 7) // 8, dtype=torch.uint8)


@register_custom_op("flashinfer::segment_packbits", mutates_args=())
def _segment_packbits(x: torch.Tensor, indptr: torch.Tensor, is_little: bool) -> tuple[torch.Tensor, torch.Tensor]:
    module = get_packbits_module(backend_of(x))
    new_indptr = torch.empty_like(indptr, dtype=torch.int32)
    count = torch.empty((), dtype=torch.int64, device=x.device)
    module.packed_indptr(new_indptr, count, x, indptr)
    num_bytes = int(count)  # the one synchronisation: the size of the result depends on values
    if num_bytes < 0:
        raise ArgumentError(
            f"segment_packbits: indptr must rise from 0 to at most {x.numel()} (elements of x) with a result of at "
            "most 2^31 - 1 bytes, got other offsets"
        )
    packed = torch.empty(num_bytes, dtype=torch.uint8, device=x.device)
    module.segment_packbits(packed, x, indptr, new_indptr, is_little)
    return packed, new_indptr


@register_fake_op("flashinfer::segment_packbits")
def _segment_packbits_fake(x: torch.Tensor, indptr: torch.Tensor, is_little: bool) -> tuple[torch.Tensor, torch.Tensor]:
    size = torch.library.get_ctx().new_dynamic_size()
    return x.new_empty(size, dtype=torch.uint8), torch.empty_like(indptr, dtype=torch.int32)


@flashinfer_api(trace=packbits_trace)
@explain_type_errors
def packbits(x: torch.Tensor, bitorder: str = "big") -> torch.Tensor:
    r"""Pack the truth values of ``x`` into bytes, as ``numpy.packbits`` does of a flattened array.

    Parameters
    ----------
    x : torch.Tensor
        Any shape and dtype, on a CPU or CUDA device; an element that is not zero is a 1 (NaN included, -0.0 not).
    bitorder : str
        ``"big"`` puts element 0 in bit 7 of byte 0, ``"little"`` in bit 0.

    Returns
    -------
    torch.Tensor
        ``(ceil(x.numel() / 8),)`` uint8; the last byte is filled up with zeros.

    Examples
    --------
    >>> flashinfer.packbits(torch.tensor([1, 0, 1, 1, 0, 0, 0, 0, 1], dtype=torch.bool))
    tensor([176, 128], dtype=torch.uint8)
    """
    is_little = _is_little("packbits", bitorder)
    if x.dtype not in _BITS_TELL:
        x = x.to(torch.bool)
    return _packbits(x.contiguous(), is_little)


@flashinfer_api(trace=segment_packbits_trace)
@explain_type_errors
def segment_packbits(x: torch.Tensor, indptr: torch.Tensor, bitorder: str = "big") -> tuple[torch.Tensor, torch.Tensor]:
    r"""Pack each segment of ``x`` on its own: every segment starts on a byte and is padded with zeros to a whole one.

    On CUDA the call waits for the device once, because the size of the result depends on ``indptr``; so it cannot be
    captured in a CUDA graph.

    Parameters
    ----------
    x : torch.Tensor
        ``(n,)`` bool or uint8; an element that is not zero is a 1.
    indptr : torch.Tensor
        ``(num_segments + 1,)`` int32 or int64 on the device of ``x``: segment ``i`` is ``x[indptr[i]:indptr[i + 1]]``.
        What lies before the first offset and after the last one is left out.
    bitorder : str
        ``"big"`` puts the first element of a byte in bit 7, ``"little"`` in bit 0.

    Returns
    -------
    Tuple[torch.Tensor, torch.Tensor]
        The packed bytes, uint8, and the byte offset of each segment, ``(num_segments + 1,)`` int32.

    Examples
    --------
    >>> x = torch.ones(11, dtype=torch.bool)
    >>> flashinfer.segment_packbits(x, torch.tensor([0, 9, 11]))
    (tensor([255, 128, 192], dtype=torch.uint8), tensor([0, 2, 3], dtype=torch.int32))
    """
    return _segment_packbits(x.contiguous(), indptr.contiguous(), _is_little("segment_packbits", bitorder))
