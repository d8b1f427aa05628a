# SPDX-License-Identifier: Apache-2.0
"""Older wrapper of MLA decoding, which published releases have for SM80 only."""

from __future__ import annotations

from typing import Optional, Union

import torch

from .._runtime.arch import get_compute_capability
from .._runtime.checks import canonicalize_torch_dtype
from .._runtime.errors import ArgumentError, GPUArchitectureError
from .._runtime.explain_error import explain_type_errors
from ..api_logging import flashinfer_api
from ..attention.composite_wrapper import CompositeWrapper
from ..attention.index_arrays import kv_lens_of_pages, to_host
from ..attention.scales import Scale, scale_logits, scale_output
from ..trace.templates.mla import mla_decode_trace
from ._core import BatchMLAPagedAttentionWrapper

__all__ = ["BatchDecodeMlaWithPagedKVCacheWrapper"]

_OP = "BatchDecodeMlaWithPagedKVCacheWrapper"


class BatchDecodeMlaWithPagedKVCacheWrapper(CompositeWrapper):
    r"""MLA decoding of one token per request; :class:`flashinfer.BatchMLAPagedAttentionWrapper` replaces it.

    Runs on SM80 GPUs, as published, and on the CPU; elsewhere ``run`` raises ``GPUArchitectureError``. Keys and queries
    have their positions encoded: nothing is rotated here.

    Parameters
    ----------
    float_workspace_buffer : torch.Tensor
        Scratch; its device is that of the wrapper.
    use_cuda_graph : bool
        Whether ``run`` will be captured; then the three buffers are needed.
    use_tensor_cores : bool
        Ignored.
    paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer : Optional[torch.Tensor]
        Buffers of CUDA graph mode: ``(batch_size + 1,)``, page ids, ``(batch_size,)``, int32.
    """

    @flashinfer_api(trace=None)
    @explain_type_errors
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Optional[torch.Tensor] = None,
        paged_kv_indices_buffer: Optional[torch.Tensor] = None,
        paged_kv_last_page_len_buffer: Optional[torch.Tensor] = None,
    ) -> None:
        self.device = float_workspace_buffer.device
        self._lock.follow_streams(self.device)
        self._use_cuda_graph = use_cuda_graph
        self._batch_size: Optional[int] = None
        rows = None if paged_kv_indptr_buffer is None else torch.empty_like(paged_kv_indptr_buffer)
        last = paged_kv_last_page_len_buffer
        self._last_page_len_buf = last
        self._wrapper = BatchMLAPagedAttentionWrapper(
            float_workspace_buffer,
            use_cuda_graph,
            rows,
            paged_kv_indptr_buffer,
            paged_kv_indices_buffer,
            None if last is None else torch.empty_like(last),  # buffer for the number of keys of each request
            backend="fa2",
        )

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._use_cuda_graph

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        """Replace the workspaces. ``plan`` must be called again before ``run``."""
        self._wrapper.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

    @flashinfer_api(trace=None)
    @explain_type_errors
    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        head_dim_compressed_kv: int,
        page_size: int,
        sm_scale: float,
        window_left: int = -1,
        logits_soft_cap: Optional[float] = None,
        data_type: Union[str, torch.dtype] = "float16",
        q_data_type: Union[str, torch.dtype, None] = None,
        rope_scale: Optional[float] = None,
        rope_theta: Optional[float] = None,
    ) -> None:
        """Plan a batch of one token per request.

        Parameters
        ----------
        indptr, indices, last_page_len : torch.Tensor
            Page table.
        num_qo_heads, head_dim_compressed_kv, page_size : int
            Sizes; the encoded part of a head has an eighth of the compressed columns.
        sm_scale : float
            Softmax scale of the heads before absorption.
        window_left, logits_soft_cap
            -1 and None: latent attention has neither windows nor caps.
        data_type, q_data_type : Union[str, torch.dtype]
            Dtype of the cache, and dtype of the queries if it differs.
        rope_scale, rope_theta : Optional[float]
            Ignored.
        """
        if window_left >= 0 or logits_soft_cap:
            raise ArgumentError(
                f"{_OP}.plan: window_left and logits_soft_cap must be -1 and None, got {window_left} and "
                f"{logits_soft_cap}"
            )
        pages, last = to_host(f"{_OP}.plan", indptr=indptr, last_page_len=last_page_len)
        lengths = kv_lens_of_pages(f"{_OP}.plan", "indptr", pages, last, page_size)
        kv_dtype = canonicalize_torch_dtype(data_type)
        self._batch_size = lengths.size
        self._wrapper.plan(
            torch.arange(lengths.size + 1, dtype=torch.int32, device="cpu"),
            torch.from_numpy(pages),
            indices,
            torch.from_numpy(lengths),
            num_qo_heads,
            head_dim_compressed_kv,
            head_dim_compressed_kv // 8,
            page_size,
            False,
            sm_scale,
            kv_dtype if q_data_type is None else q_data_type,
            kv_dtype,
        )
        if self._use_cuda_graph:
            assert self._last_page_len_buf is not None
            self._last_page_len_buf.copy_(last_page_len, non_blocking=True)
        self._sm_scale = sm_scale

    @flashinfer_api(trace=mla_decode_trace)
    def run(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        paged_ckv_cache: torch.Tensor,
        paged_kpe_cache: torch.Tensor,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        out: Optional[torch.Tensor] = None,
        lse: Optional[torch.Tensor] = None,
        return_lse: bool = False,
        enable_pdl: bool = False,
    ) -> Union[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Compute attention for the planned batch.

        Parameters
        ----------
        q_nope, q_pe : torch.Tensor
            ``(batch_size, num_qo_heads, head_dim_compressed_kv)`` and the encoded part.
        paged_ckv_cache, paged_kpe_cache : torch.Tensor
            ``(num_pages, page_size, ...)``.
        q_scale, k_scale, v_scale : Optional[Union[float, torch.Tensor]]
            Scales of the stored values.
        out, lse : Optional[torch.Tensor]
            Output buffers.
        return_lse : bool
            Whether to return the LSE too, ``(batch_size, num_qo_heads)``, base 2.
        enable_pdl : Optional[bool]
            Programmatic dependent launch; None enables it where the device supports it.

        Returns
        -------
        torch.Tensor
            Shape of ``q_nope``.
        """
        if self._batch_size is None:
            raise ArgumentError(f"{_OP}.run: plan() must be called before run(), got no plan")
        if q_nope.is_cuda and get_compute_capability(q_nope.device) != (8, 0):
            raise GPUArchitectureError(
                f"{_OP}.run: the GPU must be an SM80, got another (BatchMLAPagedAttentionWrapper runs on every GPU)"
            )
        if q_nope.shape[0] != self._batch_size:
            raise ArgumentError(
                f"{_OP}.run: q_nope must have {self._batch_size} rows (batch size), got {q_nope.shape[0]}"
            )
        op, wrapper = f"{_OP}.run", self._wrapper
        scaled_nope, sm_scale = scale_logits(op, q_nope, self._sm_scale, q_scale=q_scale, k_scale=k_scale)
        if scaled_nope is not q_nope:  # a GPU scale multiplied q_nope, so it must multiply q_pe too
            q_pe = scale_logits(op, q_pe, 1.0, q_scale=q_scale, k_scale=k_scale)[0]
        wrapper._sm_scale = sm_scale
        result = wrapper.run(scaled_nope, q_pe, paged_ckv_cache, paged_kpe_cache, out, lse, return_lse)
        scale_output(op, result[0] if return_lse else result, v_scale)
        return result

    def run_return_lse(self, *args: object, **kwargs: object) -> tuple[torch.Tensor, torch.Tensor]:
        """Call ``run`` with ``return_lse=True``."""
        return self.run(*args, **kwargs, return_lse=True)
