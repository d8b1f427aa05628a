# SPDX-License-Identifier: Apache-2.0
"""Attention with sinks: one extra logit per head that takes part in the softmax and has no value."""

from __future__ import annotations

from typing import Any, Optional, Union

import torch

from .._runtime.checks import canonicalize_torch_dtype
from .._runtime.enums import PosEncodingMode
from .._runtime.errors import ArgumentError
from .._runtime.explain_error import explain_type_errors
from ..api_logging import flashinfer_api
from ..jit.attention.variants import attention_sink_decl
from ..jit.utils import filename_safe_dtype_map
from ..prefill import BatchPrefillWithPagedKVCacheWrapper
from .options import CAUSAL, NON_CAUSAL, pos_encoding_code
from .plan_options import AttentionOptions
from .wrapper import Launch

__all__ = ["BatchAttentionWithAttentionSinkWrapper"]

_OP = "BatchAttentionWithAttentionSinkWrapper"
_BACKENDS = ("auto", "fa2", "fa3")


class BatchAttentionWithAttentionSinkWrapper(BatchPrefillWithPagedKVCacheWrapper):
    r"""Paged prefill and decoding with attention sinks, as in gpt-oss.

    ``out = sum_j exp(x_j) v_j / (exp(sink) + sum_j exp(x_j))`` with the logits ``x_j`` and ``sink`` in natural
    logarithms; ``sm_scale`` does not scale the sink. The LSE contains it.

    Plan it as :class:`flashinfer.BatchPrefillWithPagedKVCacheWrapper` without a custom mask, and run it as
    ``run(q, paged_kv_cache, sink, sm_scale)``: ``sink`` is ``(num_qo_heads,)`` float32.

    Parameters
    ----------
    float_workspace_buffer, kv_layout, use_cuda_graph, qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, \
    paged_kv_last_page_len_buf, custom_mask_buf, mask_indptr_buf
        As for :class:`flashinfer.BatchPrefillWithPagedKVCacheWrapper`.
    backend : str
        ``"auto"`` (the faster one, for each plan), ``"fa2"`` or, on an SM90 GPU, ``"fa3"``.
    pos_encoding_mode : str
        ``"NONE"`` or ``"ROPE_LLAMA"``.
    use_fp16_qk_reduction : bool
        Accepted; products are accumulated in float32.
    q_data_type, kv_data_type : Union[str, torch.dtype]
        Dtype of the queries and the output, and dtype of the cache.
    head_dim_qk, head_dim_vo : int
        Head dimensions.
    window_left : int
        0 or more if a sliding window will be used; ``plan`` takes its size.

    Examples
    --------
    >>> workspace = torch.empty(32 << 20, dtype=torch.uint8)
    >>> types = {"q_data_type": torch.float16, "kv_data_type": torch.float16}
    >>> wrapper = flashinfer.BatchAttentionWithAttentionSinkWrapper(workspace, **types, head_dim_qk=64, head_dim_vo=64)
    >>> rows = torch.tensor([0, 5, 6], dtype=torch.int32)
    >>> pages, last = torch.tensor([0, 2, 3], dtype=torch.int32), torch.tensor([4, 7], dtype=torch.int32)
    >>> wrapper.plan(rows, pages, torch.arange(3).int(), last, 32, 8, 64, 16, causal=True, **types)
    >>> q, cache = torch.randn(6, 32, 64).half(), torch.randn(3, 2, 16, 8, 64).half()
    >>> out = wrapper.run(q, cache, torch.zeros(32), 64**-0.5)
    """

    _has_portable_variant = True

    @flashinfer_api(trace=None)
    @explain_type_errors
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Optional[torch.Tensor] = None,
        paged_kv_indptr_buf: Optional[torch.Tensor] = None,
        paged_kv_indices_buf: Optional[torch.Tensor] = None,
        paged_kv_last_page_len_buf: Optional[torch.Tensor] = None,
        custom_mask_buf: Optional[torch.Tensor] = None,
        mask_indptr_buf: Optional[torch.Tensor] = None,
        backend: str = "auto",
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        q_data_type: Union[str, torch.dtype] = torch.bfloat16,
        kv_data_type: Union[str, torch.dtype] = torch.bfloat16,
        head_dim_qk: int = 128,
        head_dim_vo: int = 128,
        window_left: int = -1,
    ) -> None:
        if backend not in _BACKENDS:
            raise ArgumentError(f"{_OP}: backend must be one of {', '.join(_BACKENDS)}, got {backend!r}")
        mode = pos_encoding_code(_OP, pos_encoding_mode)
        if mode == PosEncodingMode.ALIBI.value:
            raise ArgumentError(f"{_OP}: pos_encoding_mode must be 'NONE' or 'ROPE_LLAMA', got 'ALIBI'")
        scalars = ["sm_scale"] if mode == 0 else ["sm_scale", "rope_rcp_scale", "rope_rcp_theta"]
        q, kv = canonicalize_torch_dtype(q_data_type), canonicalize_torch_dtype(kv_data_type)
        uri = (
            f"batch_prefill_attention_sink_q_{filename_safe_dtype_map[q]}_kv_{filename_safe_dtype_map[kv]}"
            f"_head_dim_qk_{head_dim_qk}_head_dim_vo_{head_dim_vo}_posenc_{mode}"
        )
        jit_args: list[Any] = [
            uri, q, kv, q, torch.int32, head_dim_qk, head_dim_vo,
            ["sink"], ["float"], scalars, ["double"] * len(scalars),
            "AttentionSink", attention_sink_decl["fa2"],  # this variant compiles for fa3 too
        ]  # fmt: skip
        super().__init__(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph=use_cuda_graph,
            qo_indptr_buf=qo_indptr_buf,
            paged_kv_indptr_buf=paged_kv_indptr_buf,
            paged_kv_indices_buf=paged_kv_indices_buf,
            paged_kv_last_page_len_buf=paged_kv_last_page_len_buf,
            custom_mask_buf=custom_mask_buf,
            mask_indptr_buf=mask_indptr_buf,
            backend=backend,
            jit_args=jit_args,
            jit_kwargs={"pos_encoding_mode": mode, "use_sliding_window": window_left >= 0},
        )

    def _set_parameters(self, options: AttentionOptions) -> None:
        if options.logits_soft_cap is not None and options.logits_soft_cap > 0:
            raise ArgumentError(f"{_OP}.plan: logits_soft_cap must be None, got {options.logits_soft_cap}")
        super()._set_parameters(options)

    def _mask_mode(self) -> int:
        mode = super()._mask_mode()
        if mode not in (CAUSAL, NON_CAUSAL):
            raise ArgumentError(f"{_OP}.plan: a custom mask and prefix_len_ptr must not be given, got one of them")
        return mode

    def _native_call(self, launch: Launch, enable_pdl: bool) -> tuple[Any, str, tuple[Any, ...]]:
        sink, *rest = launch.tensors
        if sink is not None:  # without a sink, the module raises the error
            if sink.shape != (self._num_qo_heads,):
                raise ArgumentError(
                    f"{_OP}.run: sink must have shape ({self._num_qo_heads},) (num_qo_heads), got {tuple(sink.shape)}"
                )
            launch = launch._replace(tensors=[sink.float().contiguous(), *rest])
        return super()._native_call(launch, enable_pdl)
