# SPDX-License-Identifier: Apache-2.0
"""Shares of the blocks that compute index scores, and sizes of the tensors that index scores take."""

from __future__ import annotations

from typing import Optional, Union

import torch

from .._runtime.allocation import new_empty
from .._runtime.arch import get_device_sm_count
from .._runtime.dispatch import NativeFunction
from .._runtime.errors import ArgumentError
from .._runtime.integer_math import round_up
from .._runtime.torch_ops import called, register_custom_op
from ..api_logging import flashinfer_api
from ..jit.codegen import module_cache
from ..jit.indexer import gen_mqa_logits_module
from ..trace.templates.indexer import compute_paged_mqa_logits_schedule_trace

__all__ = ["compute_paged_mqa_logits_schedule", "get_mqa_logits_module", "min_block_table_width", "padded_seq_len"]

SPLIT = 256  #: keys of a split, the unit of the schedule
_OP = "compute_paged_mqa_logits_schedule"

get_mqa_logits_module = module_cache(gen_mqa_logits_module)
_native_schedule = NativeFunction(get_mqa_logits_module, "mqa_schedule")


def padded_seq_len(n: int) -> int:
    """Return the columns that scores of ``n`` keys need: whole splits of 256.

    Examples
    --------
    >>> flashinfer.indexer.padded_seq_len(300)
    512
    """
    return round_up(n, SPLIT)


def min_block_table_width(seq_len: int, block_size: int) -> int:
    """Return the pages of ``block_size`` keys that ``seq_len`` keys fill.

    Examples
    --------
    >>> flashinfer.indexer.min_block_table_width(300, 64)
    5
    """
    return -(-seq_len // block_size)


def block_count(device: torch.device) -> int:
    """Return the blocks of a launch: one for each SM; 1 on the CPU."""
    return get_device_sm_count(device) if device.type == "cuda" else 1


@register_custom_op("flashinfer::paged_mqa_logits_schedule", mutates_args=("out",))
@called(_OP)
def schedule_into(out: torch.Tensor, seq_lens: torch.Tensor) -> None:
    """Write the schedule of ``seq_lens``, both on one device."""
    _native_schedule[out.is_cuda](out, seq_lens)


def _check(seq_lens: torch.Tensor, next_n: int, variant: str) -> None:
    if variant not in ("fp8", "fp4"):
        raise ArgumentError(f"{_OP}: variant must be 'fp8' or 'fp4', got {variant!r}")
    if next_n < 1:
        raise ArgumentError(f"{_OP}: next_n must be >= 1, got {next_n}")
    if seq_lens.dtype is not torch.int32:
        raise ArgumentError(f"{_OP}: seq_lens must be int32, got {seq_lens.dtype}")
    if seq_lens.ndim != 1:
        raise ArgumentError(f"{_OP}: seq_lens must be 1-D, got {seq_lens.ndim}-D")


def _check_out(out: torch.Tensor, device: torch.device) -> None:
    if out.device != device:
        raise ArgumentError(f"{_OP}: out must be on {device}, got {out.device}")
    if out.dtype is not torch.int32 or not out.is_contiguous():
        raise ArgumentError(f"{_OP}: out must be contiguous int32, got {out.dtype} with strides {out.stride()}")
    blocks = f"{block_count(device)}" if out.is_cuda else "at least 1"
    rows_fit = out.ndim == 2 and (out.shape[0] == block_count(device) + 1 if out.is_cuda else out.shape[0] >= 2)
    if not rows_fit or out.shape[1] != 2:
        raise ArgumentError(f"{_OP}: out must have shape [blocks + 1, 2] ({blocks} blocks), got {list(out.shape)}")


@flashinfer_api(trace=compute_paged_mqa_logits_schedule_trace)
def compute_paged_mqa_logits_schedule(
    seq_lens: torch.Tensor,
    device: Union[torch.device, str, None] = None,
    *,
    next_n: int = 1,
    variant: str = "fp8",
    use_gpu_kernel: bool = True,
    out: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    r"""Share the keys of a batch over the blocks of :func:`fp8_paged_mqa_logits`, in splits of 256 keys.

    With ``total`` splits in all requests and one block for each of ``SMs``, block ``i`` begins with split
    ``i * (total // SMs) + min(i, total % SMs)`` and ends where block ``i + 1`` begins. Row ``i`` names that split: the
    request, and its number within the request; ``(len(seq_lens), 0)`` past the end.

    Parameters
    ----------
    seq_lens : torch.Tensor
        ``(batch_size,)`` int32, any stride; may be on the CPU. Negative lengths count as 0.
    device : Union[torch.device, str, None]
        Device of the result; default: that of ``out``, else of ``seq_lens``.
    next_n : int
        Query tokens of a request; changes nothing.
    variant : str
        ``"fp8"`` or ``"fp4"``: type of the keys; changes nothing.
    use_gpu_kernel : bool
        False: compute on the CPU, which waits for the GPU, and copy.
    out : Optional[torch.Tensor]
        As the result; written and returned. On the CPU its rows say how many blocks there are.

    Returns
    -------
    torch.Tensor
        ``(SMs + 1, 2)`` int32. On the CPU SMs is 1. Can be captured in a CUDA graph.

    Examples
    --------
    >>> lengths = torch.tensor([300, 0, 1000], dtype=torch.int32)
    >>> flashinfer.indexer.compute_paged_mqa_logits_schedule(lengths).tolist()
    [[0, 0], [3, 0]]
    """
    _check(seq_lens, next_n, variant)
    target = torch.device(device) if device is not None else (seq_lens if out is None else out).device
    if target.type == "cuda" and target.index is None:
        target = torch.device("cuda", torch.cuda.current_device())
    if out is not None:
        _check_out(out, target)
    if target.type not in ("cpu", "cuda"):
        raise ArgumentError(f"{_OP}: device must be the CPU or a CUDA device, got {target}")
    if use_gpu_kernel or target.type == "cpu":
        lengths = seq_lens if seq_lens.device == target else seq_lens.to(target)
        if out is None:
            out = new_empty(lengths, torch.int32, block_count(target) + 1, 2)
        schedule_into(out, lengths)
        return out
    host = torch.empty(block_count(target) + 1, 2, dtype=torch.int32)
    schedule_into(host, seq_lens.cpu())
    return host.to(target) if out is None else out.copy_(host)
