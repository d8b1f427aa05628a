# SPDX-License-Identifier: Apache-2.0
"""Checks of a call of ``fp8_paged_mqa_logits``, in the published words, and of index values on request."""

from __future__ import annotations

from typing import NoReturn, Optional

import torch

from .._runtime.arch import AMPERE_ON, CPU
from .._runtime.errors import ArgumentError
from .._runtime.requirements import supported_compute_capability
from .schedule import block_count, padded_seq_len, schedule_into

__all__ = ["check_scores", "check_values"]

OP = "fp8_paged_mqa_logits"
_FP8, _FLOATS = torch.float8_e4m3fn, (torch.float32, torch.float16)


def _refuse(text: str) -> NoReturn:
    raise ArgumentError(f"{OP}: {text}")


@supported_compute_capability([CPU, *AMPERE_ON])
def check_scores(
    q: torch.Tensor,
    kv_fused: torch.Tensor,
    weights: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    *,
    output_dtype: torch.dtype = torch.float32,
    epi_dtype: torch.dtype = torch.float32,
    acc_dtype: torch.dtype = torch.float32,
    schedule_meta: Optional[torch.Tensor] = None,
    out: Optional[torch.Tensor] = None,
) -> bool:
    """Check shapes, dtypes, strides and devices."""
    if q.ndim != 4:
        _refuse(f"q must be 4-D [batch, next_n, heads, head_dim], got {q.ndim}-D")
    batch, next_n, heads, dim = q.shape
    device = q.device
    if q.dtype is not _FP8:
        _refuse(f"requires q.dtype == float8_e4m3fn, got {q.dtype}")
    if kv_fused.dtype is not torch.uint8:
        _refuse(f"kv_fused must be uint8, got {kv_fused.dtype}")
    if kv_fused.device != device:
        _refuse(f"kv_fused is on {kv_fused.device} but q is on {device}")
    if weights.device != device:
        _refuse(f"weights is on {weights.device} but q is on {device}")
    if block_tables.device != device:
        _refuse(f"block_tables is on {block_tables.device} but q is on {device}")
    if weights.dtype is not torch.float32:
        _refuse(f"weights must be float32, got {weights.dtype}")
    if dim % 32 or not 32 <= dim <= 256:
        _refuse(f"head_dim must be a multiple of 32 up to 256, got {dim}")
    if heads % 4 or heads < 4:
        _refuse(f"num_heads must be a multiple of 4, got {heads}")
    if next_n * heads % 8 or not 8 <= next_n * heads <= 256:
        _refuse(f"next_n * num_heads must be a multiple of 8 in [8, 256], got {next_n} * {heads}")
    _check_cache(kv_fused, dim)
    if tuple(weights.shape) != (batch * next_n, heads):
        _refuse(f"weights must have shape {[batch * next_n, heads]}, got {list(weights.shape)}")
    if block_tables.dtype is not torch.int32 or block_tables.ndim != 2 or block_tables.shape[0] != batch:
        _refuse(
            f"block_tables must be int32 with shape [{batch}, pages], got {block_tables.dtype}, "
            f"{list(block_tables.shape)}"
        )
    if seq_lens.dtype is not torch.int32 or seq_lens.device != device:
        _refuse(
            "seq_lens must be an int32 CUDA tensor (or, with q, a CPU tensor) on the device of q, got "
            f"{seq_lens.dtype} on {seq_lens.device}"
        )
    if tuple(seq_lens.shape) != (batch,):
        _refuse(f"seq_lens must have shape [{batch}], got {list(seq_lens.shape)}")
    if q.stride(3) != 1 or (block_tables.shape[1] > 1 and block_tables.stride(1) != 1):
        name, stride = ("q", q.stride(3)) if q.stride(3) != 1 else ("block_tables", block_tables.stride(1))
        _refuse(f"{name}'s innermost stride must be 1, got {stride}")
    if output_dtype not in _FLOATS or epi_dtype not in _FLOATS or acc_dtype not in _FLOATS:
        kinds = f"{output_dtype}, {epi_dtype} and {acc_dtype}"
        _refuse(f"output_dtype, epi_dtype and acc_dtype must be float32 or float16, got {kinds}")
    if max_seq_len < 0:
        _refuse(f"max_seq_len must be 0 or more, got {max_seq_len}")
    _check_out(q, max_seq_len, output_dtype, out)
    if schedule_meta is not None:
        _check_schedule(q, schedule_meta)
    return True


def _check_cache(kv_fused: torch.Tensor, dim: int) -> None:
    if kv_fused.ndim != 4 or kv_fused.shape[2] != 1:
        _refuse(f"kv_fused must have shape [pages, block_size, 1, head_dim + 4], got {list(kv_fused.shape)}")
    block_size, row = kv_fused.shape[1], kv_fused.shape[3]
    if block_size not in (32, 64, 128):
        _refuse(f"block_size (kv_fused.shape[1]) must divide 128 and be at least 32, got {block_size}")
    if row != dim + 4:
        _refuse(f"kv_fused.shape[3] must be head_dim+4={dim + 4}, got {row}")
    if kv_fused.stride(3) != 1 or kv_fused.stride(1) != row or kv_fused.stride(0) < 0:
        _refuse(f"kv_fused's pages must be contiguous (innermost stride must be 1), got strides {kv_fused.stride()}")


def _check_out(q: torch.Tensor, max_seq_len: int, dtype: torch.dtype, out: Optional[torch.Tensor]) -> None:
    rows, width = q.shape[0] * q.shape[1], padded_seq_len(max_seq_len)
    step = width
    if out is not None:
        if out.device != q.device:
            _refuse(f"out is on {out.device} but q is on {q.device}")
        if out.dtype is not dtype:
            _refuse(f"out must be {dtype} (output_dtype), got {out.dtype}")
        if out.ndim != 2 or out.shape[0] < rows or out.shape[1] < width:
            _refuse(f"out must be at least {[rows, width]}, got {list(out.shape)}")
        if out.shape[1] > 1 and out.stride(1) != 1:
            _refuse(f"out's innermost stride must be 1, got {out.stride(1)}")
        if rows > 1 and out.stride(0) < width:
            _refuse(f"out's rows overlap: its row stride must be at least {width}, got {out.stride(0)}")
        step = max(width, out.stride(0))
    if rows * step >= 2**31:
        _refuse(f"rows * row stride of the result must be below 2**31, got {rows} * {step}")


def _check_schedule(q: torch.Tensor, schedule: torch.Tensor) -> None:
    if schedule.device != q.device:
        _refuse(f"schedule_meta is on {schedule.device} but q is on {q.device}")
    is_fit = schedule.ndim == 2 and schedule.shape[1] == 2
    is_fit = is_fit and (schedule.shape[0] == block_count(q.device) + 1 if q.is_cuda else schedule.shape[0] >= 2)
    if not is_fit:
        rows = block_count(q.device) + 1 if q.is_cuda else "blocks + 1"
        _refuse(f"schedule_meta must have shape [{rows}, 2], got {list(schedule.shape)}")
    if schedule.dtype is not torch.int32 or not schedule.is_contiguous():
        _refuse(f"schedule_meta must be contiguous int32, got {schedule.dtype} with strides {schedule.stride()}")


def check_values(
    kv_fused: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    schedule_meta: Optional[torch.Tensor],
) -> None:
    """Check index values on the host: lengths, page ids, and that the schedule is that of these lengths."""
    if seq_lens.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    lengths, tables, block_size = seq_lens.cpu(), block_tables.cpu(), kv_fused.shape[1]
    most = int(lengths.max()) if lengths.numel() else 0
    if most > max_seq_len:
        _refuse(f"max_seq_len must be at least max(seq_lens) = {most}, got {max_seq_len}")
    if most > tables.shape[1] * block_size:
        _refuse(f"block_tables must have {-(-most // block_size)} columns for {most} keys, got {tables.shape[1]}")
    for b, length in enumerate(lengths.tolist()):
        used = tables[b, : max(-(-length // block_size), 0)]
        bad = ((used < 0) | (used >= kv_fused.shape[0])).nonzero()
        if len(bad):
            _refuse(f"block_tables[{b}, {int(bad[0])}] must be 0 to {kv_fused.shape[0] - 1}, got {int(used[bad[0]])}")
    if schedule_meta is not None:
        expected = torch.empty(schedule_meta.shape, dtype=torch.int32)
        schedule_into(expected, lengths)
        if not torch.equal(expected, schedule_meta.cpu()):
            _refuse("schedule_meta must be the schedule of seq_lens, got one of other lengths")
