# SPDX-License-Identifier: Apache-2.0
"""Segment GEMM: segments of rows, each times a weight matrix of its own, as adapters of many requests need it."""

from __future__ import annotations

from typing import Optional

import torch

from .._runtime.checks import as_int32, is_float8
from .._runtime.errors import ArgumentError
from .._runtime.probes import probes
from ..api_logging import flashinfer_api
from ..trace.templates.gemm_grouped import segment_gemm_run_trace
from .launch import PACKED, grouped_product

__all__ = ["SegmentGEMMWrapper"]

_BACKENDS = ("auto", "sm80", "sm90")
_OP = "SegmentGEMMWrapper.run"


def determine_gemm_backend(device: torch.device) -> str:
    """Return the published name of the segment GEMM for a device: "sm90" on Hopper with CUDA 12.3 on, else "sm80"."""
    is_cuda = torch.device(device).type == "cuda"
    is_hopper = is_cuda and probes.get_compute_capability(device)[0] == 9 and probes.is_sm90a_supported(device)
    return "sm90" if is_hopper else "sm80"


def _indptr_of_lengths(seg_lens: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return where segments begin, as int32 on ``device``. Sums are exact; lengths on the device stay there."""
    indptr = torch.zeros(seg_lens.shape[0] + 1, dtype=torch.int32, device=seg_lens.device)
    torch.cumsum(seg_lens, 0, dtype=torch.int32, out=indptr[1:])
    return indptr.to(device, non_blocking=True)


class SegmentGEMMWrapper:
    r"""Products of segments of rows with the weights of the segments. Nothing is planned: :meth:`run` does it all.

    Parameters
    ----------
    float_workspace_buffer : torch.Tensor
        Kept for callers that ask for it; the kernels need no workspace of the caller.
    backend : str
        "auto", "sm80" or "sm90": published names, behind which the kernel for the device runs.

    Examples
    --------
    >>> wrapper = flashinfer.SegmentGEMMWrapper(torch.empty(1 << 20, dtype=torch.int8))
    >>> x, weights = torch.randn(10, 128).half(), torch.randn(4, 256, 128).half()
    >>> wrapper.run(x, weights, 4, True, seg_lens=torch.tensor([1, 2, 3, 4])).shape
    torch.Size([10, 256])
    """

    def __init__(self, float_workspace_buffer: torch.Tensor, backend: str = "auto") -> None:
        self._float_workspace_buffer = float_workspace_buffer
        self._int_workspace_buffer: Optional[torch.Tensor] = None
        self.backend = backend

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: Optional[torch.Tensor] = None
    ) -> None:
        """Keep other buffers.

        Parameters
        ----------
        float_workspace_buffer : torch.Tensor
            Replaces the buffer given to the constructor.
        int_workspace_buffer : Optional[torch.Tensor]
            Kept beside it.
        """
        self._float_workspace_buffer = float_workspace_buffer
        self._int_workspace_buffer = int_workspace_buffer

    @flashinfer_api(trace=segment_gemm_run_trace)
    def run(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        batch_size: int,
        weight_column_major: bool,
        out: Optional[torch.Tensor] = None,
        seg_lens: Optional[torch.Tensor] = None,
        seg_indptr: Optional[torch.Tensor] = None,
        weight_indices: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        r"""Multiply segment ``i`` of the rows of ``x`` by weight ``i``, or by weight ``weight_indices[i]``.

        Parameters
        ----------
        x : torch.Tensor
            ``(rows, d_in)`` float16, bfloat16, float32 or float8, the rows of all segments.
        weights : torch.Tensor
            ``(num_weights, d_out, d_in)`` if ``weight_column_major``, else ``(num_weights, d_in, d_out)``.
        batch_size : int
            Number of segments.
        weight_column_major : bool
            Layout of ``weights``.
        out : Optional[torch.Tensor]
            ``(rows, d_out)``, written and returned when given; rows of no segment are left as they are.
        seg_lens : Optional[torch.Tensor]
            ``(batch_size,)`` integers, rows of each segment; on any device. Segments may be empty.
        seg_indptr : Optional[torch.Tensor]
            ``(batch_size + 1,)`` integers, where segments begin; wins over ``seg_lens``.
        weight_indices : Optional[torch.Tensor]
            ``(batch_size,)`` integers, the weight of each segment.

        Returns
        -------
        torch.Tensor
            ``(rows, d_out)`` in the dtype of ``x``, or bfloat16 for float8. Without ``out``, rows of no segment are
            zero.
        """
        if self.backend not in _BACKENDS:
            raise ArgumentError(f"{_OP}: Unsupported gemm backend: must be one of {_BACKENDS}, got {self.backend!r}")
        if not weight_column_major:
            weights = weights.mT
        _check_operands(x, weights, batch_size, weight_indices)
        if seg_indptr is not None:
            _check_length("seg_indptr", seg_indptr, batch_size + 1)
            (indptr,) = as_int32(_OP, seg_indptr=seg_indptr)
            indptr = _placed(indptr, x)
        elif seg_lens is not None:
            _check_length("seg_lens", seg_lens, batch_size)
            indptr = _indptr_of_lengths(seg_lens, x.device)
        else:
            raise ArgumentError(f"{_OP}: seg_lens or seg_indptr must be given, got neither")
        if weight_indices is not None:
            (weight_indices,) = as_int32(_OP, weight_indices=weight_indices)
            weight_indices = _placed(weight_indices, x)
        if out is None:
            dtype = torch.bfloat16 if is_float8(x) else x.dtype
            out = x.new_zeros((x.shape[0], weights.shape[1]), dtype=dtype)
        elif out.shape != (x.shape[0], weights.shape[1]):
            raise ArgumentError(f"{_OP}: out must have shape {(x.shape[0], weights.shape[1])}, got {tuple(out.shape)}")
        grouped_product(out, x, weights, None, None, indptr, PACKED, weight_indices=weight_indices)
        return out

    forward = run


def _placed(indices: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return indices contiguous on the device of ``x``."""
    if indices.device != x.device:
        indices = indices.to(x.device, non_blocking=True)
    return indices if indices.is_contiguous() else indices.contiguous()


def _check_length(name: str, x: torch.Tensor, length: int) -> None:
    if x.shape != (length,):
        raise ArgumentError(f"{_OP}: {name} must have shape {(length,)}, got {tuple(x.shape)}")


def _check_operands(
    x: torch.Tensor, weights: torch.Tensor, batch_size: int, weight_indices: Optional[torch.Tensor]
) -> None:
    """Check the shapes; ``weights`` is ``(num_weights, d_out, d_in)``."""
    if x.ndim != 2 or weights.ndim != 3 or weights.shape[2] != x.shape[1]:
        raise ArgumentError(
            f"{_OP}: x must have shape (rows, d_in) and weights as many d_in, got {tuple(x.shape)} and, with d_in "
            f"last, {tuple(weights.shape)}"
        )
    if weight_indices is not None:
        _check_length("weight_indices", weight_indices, batch_size)
    elif weights.shape[0] != batch_size:
        raise ArgumentError(
            f"{_OP}: weights must have one matrix for each of the {batch_size} segments without weight_indices, got "
            f"{weights.shape[0]}"
        )
