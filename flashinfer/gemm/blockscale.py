# SPDX-License-Identifier: Apache-2.0
"""Products of e4m3 matrices with one scale per 128 columns of an activation row and per 128 x 128 block of weights."""

from __future__ import annotations

from typing import Optional

import torch

from .._runtime.allocation import allocate
from .._runtime.arch import capability_of
from .._runtime.codegen_wrapper import compiler, is_traced
from .._runtime.dispatch import NativeFunction, use_pdl
from .._runtime.errors import ArgumentError
from .._runtime.explain_error import explain_type_errors
from .._runtime.kept import KeptLaunches
from .._runtime.probes import probes
from .._runtime.torch_ops import register_custom_op
from ..api_logging import flashinfer_api
from ..jit.gemm import get_quantize_1x128_module
from ..trace.templates.gemm import fp8_blockscale_gemm_sm90_trace
from .checks import refuse_output
from .launch import Sm90Functions, is_sm90, product

__all__ = ["fp8_blockscale_gemm_sm90", "quantize_rows", "quantize_weight_blocks"]

_BLOCK = 128
_BF16, _E4M3 = torch.bfloat16, torch.float8_e4m3fn
_OUTPUTS = (torch.bfloat16, torch.float16)
_BY_ROW, _BY_BLOCK = (1, 1, _BLOCK), (1, _BLOCK, _BLOCK)

_native_quantize = NativeFunction(get_quantize_1x128_module, "quantize_1x128")
_blockscale = Sm90Functions("gemm_sm90_blockscale")
_HOPPER = 90


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise ``(m, k)`` by row and 128 columns: e4m3 codes and the ``(k / 128, m)`` scales that restore them.

    Rows of scales are padded to a multiple of 16 bytes, which the copy engine of Hopper asks for.
    """
    m, k = x.shape
    if x.stride(1) != 1 or (x.stride(0) % 8 != 0 and m > 1) or x.data_ptr() % 16 != 0:
        x = x.contiguous()
    codes = torch.empty((m, k), dtype=_E4M3, device=x.device)
    scales = torch.empty_strided((k // _BLOCK, m), (-(-m // 4) * 4, 1), dtype=torch.float32, device=x.device)
    _native_quantize[x.is_cuda](codes, scales, x, use_pdl(x, None))
    return codes, scales


def _quantize_and_multiply(
    out: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor
) -> bool:
    """Launch both kernels with one call. Returns False if the SM90 module does not take the layouts."""
    m, k = input.shape
    size = m * k + (m + 3) // 4 * 4 * (k // _BLOCK) * 4  # codes, and scales with rows padded as in quantize_rows
    workspace = torch.empty(size, dtype=torch.uint8, device=input.device)
    multiply = _blockscale["fp8_block"]
    return bool(multiply(out, input, weight, None, weight_scale, workspace, use_pdl(input, None)))


def quantize_weight_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise ``(n, k)`` by blocks of 128 x 128: e4m3 codes and the ``(ceil(n / 128), k / 128)`` scales."""
    n, k = weight.shape
    rows = -(-n // _BLOCK)
    padded = torch.nn.functional.pad(weight.float(), (0, 0, 0, rows * _BLOCK - n))
    blocks = padded.view(rows, _BLOCK, k // _BLOCK, _BLOCK)
    amax = blocks.abs().amax(dim=(1, 3), keepdim=True)
    q = torch.where(amax == 0, 1.0, torch.full_like(amax, 448.0) / amax)  # 448.0 / amax would round twice
    codes = (blocks * q).clamp_(-448.0, 448.0).to(_E4M3).view(rows * _BLOCK, k)[:n]
    return codes, q.reciprocal().view(rows, k // _BLOCK)


@register_custom_op("flashinfer::fp8_blockscale_gemm_sm90", mutates_args=("out",))
def _fp8_blockscale_gemm(
    out: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    input_scale: Optional[torch.Tensor],
    weight_scale: Optional[torch.Tensor],
) -> None:
    if weight_scale is None:
        weight, weight_scale = quantize_weight_blocks(weight)
    by = _BY_ROW if weight_scale.shape[0] == weight.shape[0] else _BY_BLOCK
    quantizes = input_scale is None
    if input_scale is None:  # the last kernel before the product, which reads weights meanwhile
        if is_sm90(input) and _quantize_and_multiply(out, input, weight, weight_scale):
            return
        input, input_scale = quantize_rows(input)
    product(out, input, weight, a_scale=input_scale.mT, b_scale=weight_scale, granularity=by, weights_first=quantizes)


def _refuse(
    input: torch.Tensor,
    weight: torch.Tensor,
    input_scale: Optional[torch.Tensor],
    weight_scale: Optional[torch.Tensor],
) -> None:
    """Raise the error of the first wrong operand: shapes, the pair of dtypes, the input, the weight."""
    op = "fp8_blockscale_gemm_sm90"
    for name, x in (("input", input), ("weight", weight)):
        if x.ndim != 2:
            raise ArgumentError(f"{op}: {name} must be 2D, got shape {tuple(x.shape)}")
    (m, k), n = input.shape, weight.shape[0]
    if weight.shape[1] != k:
        raise ArgumentError(
            f"{op}: K dimension mismatch: weight.shape[1] must be input.shape[1] = {k}, got {weight.shape[1]}"
        )
    if k % _BLOCK != 0:
        raise ArgumentError(f"{op}: K must be divisible by block size {_BLOCK}, got {k}")
    if n % 64 != 0:
        raise ArgumentError(f"{op}: N must be divisible by 64, got {n}")
    if input.dtype is _E4M3 and weight.dtype is _BF16:
        raise ArgumentError(
            f"{op}: FP8 input + BF16 weight is not supported: weight must be {_E4M3} with an input of {_E4M3}, "
            f"got {weight.dtype}"
        )
    if input.device != weight.device:
        raise ArgumentError(f"{op}: weight must be on {input.device}, the device of input, got {weight.device}")
    expected = {"input_scale": ((k // _BLOCK, m),), "weight_scale": ((n, k // _BLOCK), (-(-n // _BLOCK), k // _BLOCK))}
    for name, x, scale in (("input", input, input_scale), ("weight", weight, weight_scale)):
        _refuse_scale(op, name, x, scale, expected[f"{name}_scale"])


def _refuse_scale(
    op: str, name: str, x: torch.Tensor, scale: Optional[torch.Tensor], shapes: tuple[tuple[int, int], ...]
) -> None:
    if x.dtype is _BF16:
        if scale is not None:
            raise ArgumentError(f"{op}: {name}_scale should not be provided for BF16 {name}: it must be None")
        return
    if x.dtype is not _E4M3:
        raise ArgumentError(f"{op}: {name} must be either FP8 ({_E4M3}) or BF16, got {x.dtype}")
    if scale is None:
        raise ArgumentError(f"{op}: {name}_scale is required when {name} is FP8, got None")
    if tuple(scale.shape) not in shapes:
        listed = " or ".join(str(shape) for shape in shapes)
        raise ArgumentError(f"{op}: {name}_scale shape mismatch: it must be {listed}, got {tuple(scale.shape)}")
    if scale.dtype is not torch.float32:
        raise ArgumentError(f"{op}: {name}_scale must be float32, got {scale.dtype}")
    if scale.device != x.device:
        raise ArgumentError(f"{op}: {name}_scale must be on {x.device}, the device of {name}, got {scale.device}")


def _is_good(
    input: torch.Tensor,
    weight: torch.Tensor,
    input_scale: Optional[torch.Tensor],
    weight_scale: Optional[torch.Tensor],
) -> bool:
    """Test what :func:`_refuse` words, devices apart, which native code compares."""
    x, w = input.shape, weight.shape
    if len(x) != 2 or len(w) != 2:
        return False
    (m, k), n = x, w[0]
    blocks = k // _BLOCK
    if w[1] != k or k % _BLOCK != 0 or n % 64 != 0:
        return False
    if input.dtype is _BF16:
        is_good = input_scale is None
    else:
        is_good = (
            input.dtype is _E4M3
            and input_scale is not None
            and input_scale.shape == (blocks, m)
            and input_scale.dtype is torch.float32
        )
    if weight.dtype is _BF16:
        return is_good and weight_scale is None and input.dtype is _BF16
    return (
        is_good
        and weight.dtype is _E4M3
        and weight_scale is not None
        and weight_scale.dtype is torch.float32
        and (weight_scale.shape == (-(-n // _BLOCK), blocks) or weight_scale.shape == (n, blocks))
    )


def _launch(
    input: torch.Tensor,
    weight: torch.Tensor,
    input_scale: Optional[torch.Tensor],
    weight_scale: Optional[torch.Tensor],
    out: Optional[torch.Tensor],
    out_dtype: Optional[torch.dtype],
    index: int,
) -> Optional[torch.Tensor]:
    if out is None:
        m, n = input.shape[0], weight.shape[0]
        out = allocate((m, n), (n or 1, 1), _BF16 if out_dtype is None else out_dtype, index)
    elif out_dtype is not None and out.dtype is not out_dtype:
        return None
    return out if _blockscale["fp8_block"](out, input, weight, input_scale, weight_scale, None, True) else None


_launches = KeptLaunches(
    "weight_scale is None, out_dtype, (index := input.get_device())",
    passed="input, weight, input_scale, weight_scale, out, out_dtype, index",
)


@flashinfer_api(trace=fp8_blockscale_gemm_sm90_trace)
@_launches
@explain_type_errors
def fp8_blockscale_gemm_sm90(
    input: torch.Tensor,
    weight: torch.Tensor,
    input_scale: Optional[torch.Tensor] = None,
    weight_scale: Optional[torch.Tensor] = None,
    out: Optional[torch.Tensor] = None,
    out_dtype: Optional[torch.dtype] = None,
) -> torch.Tensor:
    r"""Product ``input @ weight.T`` of block-scaled e4m3 matrices, as DeepSeek models use them. SM90 and CPU.

    bfloat16 operands are quantised inside: ``code = e4m3(x * q)`` with ``q = 448 / amax`` (1 where amax is 0), per row
    and 128 columns of the input, per 128 x 128 block of the weight. The products of each 128 columns are summed in
    float32, multiplied by both scales, and added in float32; the result is rounded once.

    Parameters
    ----------
    input : torch.Tensor
        ``(m, k)`` bfloat16 or float8_e4m3fn; ``k`` is a multiple of 128.
    weight : torch.Tensor
        ``(n, k)`` bfloat16 or float8_e4m3fn; ``n`` is a multiple of 64. float8_e4m3fn if ``input`` is.
    input_scale : Optional[torch.Tensor]
        float32 ``(k / 128, m)`` for an 8-bit input, such as a ``[:, :m]`` view of a buffer with rows padded to a
        multiple of 4; None for bfloat16.
    weight_scale : Optional[torch.Tensor]
        float32 ``(n, k / 128)``, one scale per row, or ``(ceil(n / 128), k / 128)``, one per block, for 8-bit weights;
        None for bfloat16.
    out : Optional[torch.Tensor]
        ``(m, n)``; written and returned when given.
    out_dtype : Optional[torch.dtype]
        torch.bfloat16 or torch.float16; default: that of ``out``, else torch.bfloat16.

    Returns
    -------
    torch.Tensor
        ``(m, n)``.

    Examples
    --------
    >>> x, w = torch.randn(4, 256).bfloat16(), torch.randn(64, 256).to(torch.float8_e4m3fn)
    >>> y = flashinfer.gemm.fp8_blockscale_gemm_sm90(x, w, None, torch.ones(1, 2))
    """
    if input.is_cuda and probes.get_compute_capability(input.device)[0] != 9:
        major, minor = probes.get_compute_capability(input.device)
        raise ArgumentError(
            f"fp8_blockscale_gemm_sm90: only supported on SM90: input must be there or on the CPU, got SM{major}{minor}"
        )
    if not _is_good(input, weight, input_scale, weight_scale):
        _refuse(input, weight, input_scale, weight_scale)
    m, n = input.shape[0], weight.shape[0]
    if out is None:
        dtype = _BF16 if out_dtype is None else out_dtype
        if dtype not in _OUTPUTS:
            refuse_output("fp8_blockscale_gemm_sm90", out, (m, n), input.device, dtype, _OUTPUTS)
        made = torch.empty((m, n), dtype=dtype, device=input.device)
    elif out.shape != (m, n) or out.dtype not in _OUTPUTS or out_dtype not in (None, out.dtype):
        refuse_output(
            "fp8_blockscale_gemm_sm90", out, (m, n), input.device, _BF16 if out_dtype is None else out_dtype, _OUTPUTS
        )
    elif out.device != input.device:
        refuse_output("fp8_blockscale_gemm_sm90", out, (m, n), input.device, out.dtype, _OUTPUTS)
    else:
        made = out
    _fp8_blockscale_gemm(made, input, weight, input_scale, weight_scale)
    if not (is_traced() or compiler._is_compiling_flag):
        is_kept = capability_of[input.get_device()] == _HOPPER and weight_scale is not None
        _launches.keep(_launch if is_kept else None, "SM90", input, weight, input_scale, weight_scale, out, out_dtype)
    return made
