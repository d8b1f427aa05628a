# SPDX-License-Identifier: Apache-2.0
"""Block-sparse attention with blocks of any size and a separate pattern for each KV head.

A KV head and a row of blocks are a request: its queries are the rows of the head's group, its keys are pages of one
token each. Keys and values are read in place; queries are copied into the order of the requests.
"""

from __future__ import annotations

from typing import Any, Optional, Union

import torch

from .._runtime.checks import check_tensors
from .._runtime.errors import ArgumentError
from .._runtime.explain_error import explain_type_errors
from ..api_logging import flashinfer_api
from ..attention.composite_wrapper import CompositeWrapper
from ..attention.outputs import lse_buffer, output_buffer
from ..attention.plan_options import AttentionOptions
from ..prefill import BatchPrefillWithPagedKVCacheWrapper
from ..prefill.planning import replace_parameters
from ..trace.templates.sparse import variable_block_sparse_attention_run_trace

__all__ = ["VariableBlockSparseAttentionWrapper"]

_OP = "VariableBlockSparseAttentionWrapper"
Dtype = Union[str, torch.dtype]
Result = Union[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]


class VariableBlockSparseAttentionWrapper(CompositeWrapper):
    r"""Attention where every KV head has its own blocks of queries and keys, and its own list of pairs that count.

    Parameters
    ----------
    float_workspace_buffer : torch.Tensor
        Scratch; its device is that of the wrapper.
    backend : str
        ``"auto"`` or ``"fa2"``.

    Examples
    --------
    >>> wrapper = flashinfer.VariableBlockSparseAttentionWrapper(torch.empty(32 << 20, dtype=torch.uint8))
    >>> pattern = torch.rand(2, 3, 4) < 0.5
    >>> rows, columns = torch.tensor([[3, 5, 2], [1, 1, 8]]), torch.tensor([[4, 4, 4, 4], [10, 3, 2, 1]])
    >>> wrapper.plan(pattern, rows, columns, 4, 2, 64)
    >>> q, k, v = torch.randn(4, 10, 64).half(), torch.randn(2, 16, 64).half(), torch.randn(2, 16, 64).half()
    >>> wrapper.run(q, k, v).shape
    torch.Size([4, 10, 64])
    """

    @flashinfer_api(trace=None)
    @explain_type_errors
    def __init__(self, float_workspace_buffer: torch.Tensor, backend: str = "auto") -> None:
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
        block_mask_map: torch.Tensor,
        block_row_sz: torch.Tensor,
        block_col_sz: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: Optional[float] = None,
        sm_scale: Optional[float] = None,
        rope_scale: Optional[float] = None,
        rope_theta: Optional[float] = None,
        non_blocking: bool = True,
        q_data_type: Dtype = "float16",
        kv_data_type: Optional[Dtype] = None,
    ) -> None:
        """Plan a pattern. Waits for the GPU if arguments are on the GPU.

        Parameters
        ----------
        block_mask_map : torch.Tensor
            ``(num_kv_heads, MB, NB)`` bool: which block of keys each block of queries sees.
        block_row_sz : torch.Tensor
            ``(num_kv_heads, MB)``: queries of each block; each row sums to ``qo_len``.
        block_col_sz : torch.Tensor
            ``(num_kv_heads, NB)``: keys of each block; each row sums to ``kv_len``.
        causal : bool
            Causal over the keys that a block of queries has, right ends aligned.

        The other arguments are those of :class:`flashinfer.BatchPrefillWithPagedKVCacheWrapper`.
        """
        op = f"{_OP}.plan"
        if num_kv_heads < 1 or num_qo_heads % num_kv_heads:
            raise ArgumentError(f"{op}: num_qo_heads must be a multiple of {num_kv_heads}, got {num_qo_heads}")
        _check_pattern(op, block_mask_map, block_row_sz, block_col_sz, num_kv_heads)
        pattern = block_mask_map.to(self.device, torch.bool)
        rows, columns = (sizes.to(self.device, torch.int64) for sizes in (block_row_sz, block_col_sz))
        qo_len, kv_len = _common_sum(op, "block_row_sz", rows), _common_sum(op, "block_col_sz", columns)
        indices = _key_indices(pattern, columns, kv_len)
        keys = (pattern * columns[:, None, :]).sum(-1).reshape(-1)
        self._wrapper.plan(
            _offsets(rows.reshape(-1)),
            _offsets(keys),
            indices,
            torch.ones(keys.numel(), dtype=torch.int32, device=self.device),
            num_qo_heads // num_kv_heads,
            1,
            head_dim,
            1,
            causal=causal,
            pos_encoding_mode=pos_encoding_mode,
            use_fp16_qk_reduction=use_fp16_qk_reduction,
            sm_scale=sm_scale,
            logits_soft_cap=logits_soft_cap,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
            non_blocking=non_blocking,
        )
        self._sizes = (num_kv_heads, num_qo_heads // num_kv_heads, qo_len, kv_len)

    begin_forward = plan

    def _require_plan(self) -> None:
        if not hasattr(self, "_sizes"):
            raise ArgumentError(f"{_OP}.run: plan() must be called before run(), got no plan")

    @flashinfer_api(trace=variable_block_sparse_attention_run_trace)
    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: Optional[torch.Tensor] = None,
        lse: Optional[torch.Tensor] = None,
        return_lse: bool = False,
        enable_pdl: Optional[bool] = None,
    ) -> Result:
        """Compute attention with the planned pattern; heads come first.

        Parameters
        ----------
        q : torch.Tensor
            ``(num_qo_heads, qo_len, head_dim)``.
        k, v : torch.Tensor
            ``(num_kv_heads, kv_len, head_dim)``.
        out : Optional[torch.Tensor]
            ``(num_qo_heads, qo_len, head_dim)``, or ``(num_kv_heads * qo_len, group, head_dim)``, the order in which it
            is computed. If both shapes are equal, the first order is used.
        lse : Optional[torch.Tensor]
            Shape of ``out`` without the last dimension, float32.
        return_lse : bool
            Whether to return the LSE too.
        enable_pdl : Optional[bool]
            Programmatic dependent launch; None enables it where the device supports it.

        Returns
        -------
        out : torch.Tensor
            ``(num_qo_heads, qo_len, head_dim)``. Zeros where a block of queries sees nothing.
        lse : torch.Tensor
            ``(num_qo_heads, qo_len)`` float32, base 2, with ``return_lse``.
        """
        self._require_plan()
        heads, group, qo_len, kv_len = self._sizes
        check_tensors(f"{_OP}.run", q=q, k=k, v=v)
        if tuple(q.shape[:2]) != (heads * group, qo_len):
            raise ArgumentError(
                f"{_OP}.run: q must have shape ({heads * group}, {qo_len}, head_dim), got {tuple(q.shape)}"
            )
        for name, x in (("k", k), ("v", v)):
            if tuple(x.shape[:2]) != (heads, kv_len):
                raise ArgumentError(
                    f"{_OP}.run: {name} must have shape ({heads}, {kv_len}, head_dim), got {tuple(x.shape)}"
                )
        rows = q.unflatten(0, (heads, group)).transpose(1, 2).reshape(heads * qo_len, group, q.shape[-1])
        pages = tuple(x.reshape(heads * kv_len, 1, 1, x.shape[-1]) for x in (k, v))
        has_inner_shape = qo_len != group  # if equal, the shapes are ambiguous and heads come first
        inner = out if has_inner_shape and out is not None and out.shape == rows.shape else None
        inner_lse = lse if has_inner_shape and lse is not None and lse.shape == rows.shape[:2] else None
        if out is not None and inner is None:
            output_buffer(f"{_OP}.run", out, (heads * group, qo_len, q.shape[-1]), self._wrapper._cached_o_data_type, q)
        if lse is not None and inner_lse is None:
            lse_buffer(f"{_OP}.run", lse, (heads * group, qo_len), q)
        wants_lse = return_lse or lse is not None
        result: Any = self._wrapper.run(
            rows, pages, out=inner, lse=inner_lse, return_lse=wants_lse, enable_pdl=enable_pdl
        )
        values, scores = result if wants_lse else (result, None)
        values = self._heads_first(values, out if inner is None else None)
        if scores is not None:
            scores = self._heads_first(scores, lse if inner_lse is None else None)
        return (values, scores) if return_lse else values  # type: ignore[return-value]

    def _heads_first(self, x: torch.Tensor, target: Optional[torch.Tensor]) -> torch.Tensor:
        heads, group, qo_len, _ = self._sizes
        ordered = x.unflatten(0, (heads, qo_len)).transpose(1, 2).reshape(heads * group, qo_len, *x.shape[2:])
        return ordered if target is None else target.copy_(ordered)

    @flashinfer_api(trace=None)
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
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
        return self.run(q, k, v)

    def end_forward(self) -> None:
        """Do nothing; published callers call it."""


def _check_pattern(op: str, pattern: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, heads: int) -> None:
    if pattern.ndim != 3 or pattern.shape[0] != heads:
        raise ArgumentError(f"{op}: block_mask_map must have shape ({heads}, MB, NB), got {tuple(pattern.shape)}")
    for name, sizes, expected in (
        ("block_row_sz", rows, (heads, pattern.shape[1])),
        ("block_col_sz", columns, (heads, pattern.shape[2])),
    ):
        if tuple(sizes.shape) != expected:
            raise ArgumentError(f"{op}: {name} must have shape {expected}, got {tuple(sizes.shape)}")


def _common_sum(op: str, name: str, sizes: torch.Tensor) -> int:
    if sizes.numel() and sizes.min() < 0:
        raise ArgumentError(f"{op}: {name} must be 0 or more, got {int(sizes.min())}")
    sums = sizes.sum(-1).tolist()
    if len(set(sums)) > 1:
        raise ArgumentError(f"{op}: the rows of {name} must sum to one length for all heads, got {sums}")
    return sums[0] if sums else 0


def _offsets(lengths: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()


def _key_indices(pattern: torch.Tensor, columns: torch.Tensor, kv_len: int) -> torch.Tensor:
    """Return the key indices of each request, ordered by head, then by row of blocks, numbered over all heads."""
    parts = [
        mask.repeat_interleave(sizes, dim=-1, output_size=kv_len).nonzero()[:, 1] + head * kv_len
        for head, (mask, sizes) in enumerate(zip(pattern, columns, strict=True))
    ]
    return torch.cat(parts).int() if parts else torch.empty(0, dtype=torch.int32, device=pattern.device)
