# SPDX-License-Identifier: Apache-2.0
"""Block-sparse attention with blocks of equal size (BSR) and one pattern for all heads.

A row of blocks is a request over a paged cache: its queries are R rows of q, its pages are the blocks of C keys in its
list. The planner therefore balances rows of many and of few blocks, and every feature of paged attention is available.
"""

from __future__ import annotations

from typing import Any, Optional, Union

import numpy as np
import torch

from .._runtime.checks import check_tensors
from .._runtime.errors import ArgumentError
from .._runtime.explain_error import explain_type_errors
from ..api_logging import flashinfer_api
from ..attention.composite_wrapper import CompositeWrapper
from ..attention.index_arrays import segment_lens, to_host
from ..attention.plan_options import AttentionOptions
from ..attention.scales import Scale
from ..prefill import BatchPrefillWithPagedKVCacheWrapper
from ..prefill.planning import replace_parameters
from ..trace.templates.sparse import block_sparse_attention_run_trace

__all__ = ["BlockSparseAttentionWrapper", "convert_bsr_mask_layout"]

_OP = "BlockSparseAttentionWrapper"
Dtype = Union[str, torch.dtype]
Result = Union[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]


def convert_bsr_mask_layout(mask: torch.Tensor, indptr: torch.Tensor) -> torch.Tensor:
    r"""Convert masks of single blocks to masks of whole rows of blocks.

    Parameters
    ----------
    mask : torch.Tensor
        ``(nnz, R, C)``: a mask of each block.
    indptr : torch.Tensor
        ``(rows of blocks + 1,)``.

    Returns
    -------
    torch.Tensor
        ``(nnz * R * C,)``: for each row of blocks its ``R`` rows over the keys of all its blocks.
    """
    _, rows, columns = mask.shape
    op = "convert_bsr_mask_layout"
    (offsets,) = to_host(op, indptr=indptr)
    counts = torch.from_numpy(segment_lens(op, "indptr", offsets)).long().to(mask.device)
    # Element (block, r, c) of a row of blocks with n blocks goes to r * n * C + (block - first) * C + c.
    nnz = int(offsets[-1])
    if offsets[0] != 0 or nnz > mask.shape[0]:
        raise ArgumentError(
            f"{op}: indptr must go from 0 to at most {mask.shape[0]} (blocks of mask), got {offsets[0]} to {nnz}"
        )
    first = torch.from_numpy(offsets[:-1].astype(np.int64)).to(mask.device).repeat_interleave(counts, output_size=nnz)
    width = (counts * columns).repeat_interleave(counts, output_size=nnz)
    block = torch.arange(nnz, device=mask.device) - first
    at = (first * rows * columns + block * columns)[:, None] + torch.arange(rows, device=mask.device) * width[:, None]
    at = at[:, :, None] + torch.arange(columns, device=mask.device)
    flat = torch.empty(nnz * rows * columns, dtype=mask.dtype, device=mask.device)
    flat[at.reshape(-1)] = mask[:nnz].reshape(-1)
    return flat


def _listed_blocks(
    op: str, indices: Optional[torch.Tensor], counts: Optional[torch.Tensor], block_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``indptr`` and ``indices`` of lists of equal length, of which the first ``counts`` entries are used."""
    if indices is None or counts is None:
        raise ArgumentError(f"{op}: q2k_indices and q2k_num must be given together, got one of them")
    columns, used = to_host(op, q2k_indices=indices, q2k_num=counts)
    if columns.ndim != 2 or columns.shape[0] != block_rows:
        raise ArgumentError(
            f"{op}: q2k_indices must have shape ({block_rows}, most) (one pattern for all heads), got {columns.shape}"
        )
    if used.shape != (block_rows,) or (used.size and (used.min() < 0 or used.max() > columns.shape[1])):
        raise ArgumentError(
            f"{op}: q2k_num must be {block_rows} numbers from 0 to {columns.shape[1]} (columns of q2k_indices), got "
            f"{used.tolist()!r:.80}"
        )
    chosen = columns[np.arange(columns.shape[1]) < used[:, None]]
    offsets = np.concatenate([[0], np.cumsum(used)]).astype(np.int32)
    return torch.from_numpy(offsets), torch.from_numpy(np.ascontiguousarray(chosen, dtype=np.int32))


def _existing_keys(op: str, lens: torch.Tensor, used: np.ndarray, blocks: int, C: int) -> Optional[np.ndarray]:
    """Return ``(nnz, 1, C)``: which keys of the listed blocks exist. None if all of them do."""
    (host,) = to_host(op, kv_block_lens=lens)
    if host.shape != (blocks,) or (host.size and (host.min() < 0 or host.max() > C)):
        raise ArgumentError(
            f"{op}: kv_block_lens must be {blocks} numbers (N / C) from 0 to {C}, got {host.tolist()!r:.80}"
        )
    existing = np.arange(C) < host[used][:, None]
    return None if existing.all() else existing[:, None]


def _causal_blocks(offsets: np.ndarray, M: int, R: int, C: int) -> np.ndarray:
    """Return ``(nnz, R, C)``: what a row of blocks sees of the keys that it has, right ends aligned."""
    offsets = offsets.astype(np.int64)
    counts = np.diff(offsets)
    queries = np.minimum(R, M - R * np.arange(counts.size))
    last = np.repeat(counts * C - queries, counts)  # position of the last key that the first query of a row sees
    first = (np.arange(offsets[-1]) - np.repeat(offsets[:-1], counts)) * C
    keys = first[:, None, None] + np.arange(C)
    return keys <= last[:, None, None] + np.arange(R)[:, None]


class BlockSparseAttentionWrapper(CompositeWrapper):
    r"""Attention of ``M`` queries to ``N`` keys where only listed blocks of ``R`` queries and ``C`` keys are computed.

    Parameters
    ----------
    float_workspace_buffer : torch.Tensor
        Scratch; its device is that of the wrapper.
    backend : str
        ``"auto"`` or ``"fa2"``.

    Examples
    --------
    Two rows of blocks: the first sees block 0, the second blocks 0 and 2.

    >>> wrapper = flashinfer.BlockSparseAttentionWrapper(torch.empty(32 << 20, dtype=torch.uint8))
    >>> indptr, indices = torch.tensor([0, 1, 3], dtype=torch.int32), torch.tensor([0, 0, 2], dtype=torch.int32)
    >>> wrapper.plan(indptr, indices, 32, 48, 16, 16, 8, 8, 64)
    >>> q, k, v = torch.randn(32, 8, 64).half(), torch.randn(48, 8, 64).half(), torch.randn(48, 8, 64).half()
    >>> wrapper.run(q, k, v).shape
    torch.Size([32, 8, 64])
    """

    @flashinfer_api(trace=None)
    @explain_type_errors
    def __init__(self, float_workspace_buffer: torch.Tensor, backend: str = "auto") -> None:
        if backend.startswith("vsa"):
            raise ArgumentError(f"{_OP}: backend must be 'auto' or 'fa2', got {backend!r}, which needs a Blackwell GPU")
        self._wrapper = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, "NHD", backend=backend)
        self.device = float_workspace_buffer.device
        self._lock.follow_streams(self.device)

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        """Replace the workspaces. ``plan`` must be called again before ``run``."""
        self._wrapper.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

    @flashinfer_api(trace=None)
    @explain_type_errors
    def plan(
        self,
        indptr: Optional[torch.Tensor],
        indices: Optional[torch.Tensor],
        M: int,
        N: int,
        R: int,
        C: int,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        mask: Optional[torch.Tensor] = None,
        packed_mask: Optional[torch.Tensor] = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: Optional[float] = None,
        sm_scale: Optional[float] = None,
        rope_scale: Optional[float] = None,
        rope_theta: Optional[float] = None,
        q_data_type: Dtype = "float16",
        kv_data_type: Optional[Dtype] = None,
        o_data_type: Dtype = "float16",
        non_blocking: bool = True,
        block_mask: Optional[torch.Tensor] = None,
        kv_block_lens: Optional[torch.Tensor] = None,
        q2k_indices: Optional[torch.Tensor] = None,
        q2k_num: Optional[torch.Tensor] = None,
        kv_splits: Optional[int] = None,
        use_clc: Optional[bool] = None,
        q_scale: Optional[torch.Tensor] = None,
        k_scale: Optional[torch.Tensor] = None,
        v_scale: Optional[torch.Tensor] = None,
    ) -> None:
        """Plan a pattern. Arrays on the GPU are copied to the host, which waits for the GPU.

        Parameters
        ----------
        indptr : torch.Tensor
            ``(ceil(M / R) + 1,)``: where the blocks of each row begin in ``indices``.
        indices : torch.Tensor
            ``(nnz,)``: columns of the blocks.
        M, N : int
            Queries and keys; ``C`` divides ``N``, and the last row of blocks may have fewer than ``R`` queries.
        R, C : int
            Queries and keys of a block.
        mask : Optional[torch.Tensor]
            ``(nnz, R, C)`` bool: what is visible inside the blocks, instead of ``causal``.
        packed_mask : Optional[torch.Tensor]
            The same in bits, little end first: ``convert_bsr_mask_layout(mask, indptr)``, each row of blocks from a
            byte on.
        causal : bool
            Causal over the keys that a row of blocks has, right ends aligned.
        o_data_type : Union[str, torch.dtype]
            dtype of the output.
        kv_block_lens : Optional[torch.Tensor]
            ``(N / C,)``: keys of each block that exist; those after them are padding, which no query sees.
        q2k_indices, q2k_num : Optional[torch.Tensor]
            The pattern without ``indptr`` and ``indices``: row i of ``(ceil(M / R), most)`` has the columns of the
            blocks of row i, of which the first ``q2k_num[i]`` count.
        block_mask, kv_splits, use_clc, q_scale, k_scale, v_scale
            Arguments of backends for SM100; must be None.

        The other arguments are those of :class:`flashinfer.BatchPrefillWithPagedKVCacheWrapper`.
        """
        op = f"{_OP}.plan"
        if block_mask is not None:
            raise ArgumentError(f"{op}: block_mask must be None (indptr and indices are the pattern), got a value")
        for name, value in {
            "kv_splits": kv_splits,
            "use_clc": use_clc,
            "q_scale": q_scale,
            "k_scale": k_scale,
            "v_scale": v_scale,
        }.items():
            if value is not None:
                raise ArgumentError(f"{op}: {name} must be None (only backends for SM100 take it), got a value")
        if min(M, N) < 0 or min(R, C) < 1 or N % C:
            raise ArgumentError(f"{op}: blocks of R x C must divide the {N} keys, got M, N, R, C = {M}, {N}, {R}, {C}")
        block_rows = -(-M // R)
        if q2k_indices is not None or q2k_num is not None:
            if indptr is not None or indices is not None:
                raise ArgumentError(f"{op}: indptr and indices must be None with q2k_indices, got both")
            indptr, indices = _listed_blocks(op, q2k_indices, q2k_num, block_rows)
        if indptr is None or indices is None:
            raise ArgumentError(f"{op}: indptr or indices must be tensors, got None")
        offsets, columns = to_host(op, indptr=indptr, indices=indices)
        if offsets.size != block_rows + 1:
            raise ArgumentError(
                f"{op}: indptr must have {block_rows + 1} elements (ceil(M / R) + 1), got {offsets.size}"
            )
        segment_lens(op, "indptr", offsets)
        if columns.ndim != 1:
            raise ArgumentError(f"{op}: indices must have 1 dimension, got {columns.ndim}")
        used = columns[: offsets[-1]]
        if used.size and (used.max() >= N // C or used.min() < 0):
            raise ArgumentError(
                f"{op}: indices must be columns of blocks from 0 to {N // C - 1}, got indices out of bound"
            )
        if kv_block_lens is not None:
            if packed_mask is not None:
                raise ArgumentError(f"{op}: packed_mask must be None with kv_block_lens (give mask), got both")
            existing = _existing_keys(op, kv_block_lens, used, N // C, C)
            if existing is not None:
                if mask is not None and tuple(mask.shape[1:]) != (R, C):
                    raise ArgumentError(f"{op}: mask must have shape ({used.size}, {R}, {C}), got {tuple(mask.shape)}")
                visible = existing & _causal_blocks(offsets, M, R, C) if causal else existing.repeat(R, axis=1)
                own = torch.from_numpy(visible).to(self.device)
                mask = own if mask is None else own & mask[: used.size].to(own.device)
        rows = np.minimum(np.arange(block_rows + 1, dtype=np.int64) * R, M).astype(np.int32)
        if mask is not None:
            mask = self._row_masks(op, mask, indptr, offsets, M, R)
        self._wrapper.plan(
            torch.from_numpy(rows),
            torch.from_numpy(offsets),
            indices,
            torch.full((block_rows,), C, dtype=torch.int32, device="cpu"),
            num_qo_heads,
            num_kv_heads,
            head_dim,
            C,
            custom_mask=mask,
            packed_custom_mask=packed_mask,
            causal=causal,
            pos_encoding_mode=pos_encoding_mode,
            use_fp16_qk_reduction=use_fp16_qk_reduction,
            sm_scale=sm_scale,
            logits_soft_cap=logits_soft_cap,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
            o_data_type=o_data_type,
            non_blocking=non_blocking,
        )
        self._shape = (M, N, C)

    begin_forward = plan

    def _require_plan(self) -> None:
        if not hasattr(self, "_shape"):
            raise ArgumentError(f"{_OP}.run: plan() must be called before run(), got no plan")

    @staticmethod
    def _row_masks(
        op: str, mask: torch.Tensor, indptr: torch.Tensor, offsets: np.ndarray, M: int, R: int
    ) -> torch.Tensor:
        """Return the masks of the rows of blocks; the last mask omits queries beyond ``M``."""
        if mask.ndim != 3 or mask.shape[0] < offsets[-1] or mask.shape[1] != R:
            raise ArgumentError(f"{op}: mask must have shape ({offsets[-1]}, {R}, C), got {tuple(mask.shape)}")
        flat = convert_bsr_mask_layout(mask, indptr)
        missing = -M % R  # queries missing in the last row of blocks
        surplus = missing * int(offsets[-1] - offsets[-2]) * mask.shape[2] if missing else 0
        return flat[: flat.numel() - surplus]

    @flashinfer_api(trace=block_sparse_attention_run_trace)
    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale_q: Scale = None,
        scale_k: Scale = None,
        scale_v: Scale = None,
        out: Optional[torch.Tensor] = None,
        lse: Optional[torch.Tensor] = None,
        return_lse: bool = False,
        enable_pdl: Optional[bool] = None,
    ) -> Result:
        """Compute attention with the planned pattern.

        Parameters
        ----------
        q : torch.Tensor
            ``(M, num_qo_heads, head_dim)``.
        k, v : torch.Tensor
            ``(N, num_kv_heads, head_dim)``.
        scale_q, scale_k, scale_v : Optional[torch.Tensor]
            Scales of each head of 8-bit queries, keys and values.
        out, lse : Optional[torch.Tensor]
            Output buffers.
        return_lse : bool
            Whether to return the LSE too.
        enable_pdl : Optional[bool]
            Programmatic dependent launch; None enables it where the device supports it.

        Returns
        -------
        out : torch.Tensor
            ``(M, num_qo_heads, head_dim)``. Zeros where a row has no blocks.
        lse : torch.Tensor
            ``(M, num_qo_heads)`` float32, base 2, with ``return_lse``.
        """
        self._require_plan()
        _, N, C = self._shape
        check_tensors(f"{_OP}.run", q=q, k=k, v=v)
        for name, x in (("k", k), ("v", v)):
            if x.ndim != 3 or x.shape[0] != N:
                raise ArgumentError(
                    f"{_OP}.run: {name} must have shape ({N}, num_kv_heads, head_dim), got {tuple(x.shape)}"
                )
        pages = tuple(x.unflatten(0, (N // C, C)) for x in (k, v))
        scales: tuple[Any, ...] = (scale_q, scale_k, scale_v) if q.dtype.itemsize == 1 else ()
        return self._wrapper.run(q, pages, *scales, out=out, lse=lse, return_lse=return_lse, enable_pdl=enable_pdl)

    @flashinfer_api(trace=None)
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale_q: Scale = None,
        scale_k: Scale = None,
        scale_v: Scale = None,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: Optional[float] = None,
        sm_scale: Optional[float] = None,
        rope_scale: Optional[float] = None,
        rope_theta: Optional[float] = None,
    ) -> Result:
        """Replace parameters of ``plan``, then call ``run``; kept for published callers."""
        self._require_plan()
        wrapper = self._wrapper
        options = AttentionOptions(pos_encoding_mode, -1, logits_soft_cap, sm_scale, rope_scale, rope_theta)
        replace_parameters(wrapper, wrapper._causal, options)
        return self.run(q, k, v, scale_q, scale_k, scale_v)

    def end_forward(self) -> None:
        """Do nothing; published callers call it."""
