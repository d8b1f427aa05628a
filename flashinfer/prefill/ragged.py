# SPDX-License-Identifier: Apache-2.0
"""Prefill attention for a batch of requests with ragged keys: the keys of all requests in one tensor, no pages."""

from __future__ import annotations

from typing import Any, ClassVar, Mapping, Optional, Sequence, Union

import numpy as np
import torch

from .._runtime.checks import check_tensors
from .._runtime.errors import ArgumentError
from .._runtime.explain_error import explain_type_errors
from ..api_logging import flashinfer_api
from ..attention.index_arrays import segment_lens, to_host
from ..attention.kv_cache import PagedCache, scale_factors
from ..attention.options import Dtypes, resolve_backend, resolve_dtypes
from ..attention.plan_options import AttentionOptions
from ..attention.run import Result, attend, check_heads, check_in_graph, refuse_query, repeat
from ..attention.scales import Scale
from ..attention.wrapper import Launch, PlannedWrapper
from ..trace.templates.prefill import ragged_prefill_trace
from .plan import PrefillPlan
from .planning import (
    begin_prefill,
    call_with,
    check_rows,
    choose_backend,
    expected_rows,
    freeze_rows,
    mask_mode,
    native_arguments,
    native_workspace_size,
    plan_work,
    prefill_scalars,
    replace_parameters,
    select_module,
    state_of,
    store_items,
    store_mask,
)

Dtype = Optional[Union[str, torch.dtype]]


class BatchPrefillWithRaggedKVCacheWrapper(PlannedWrapper):
    r"""Attention of the query tokens of each request over its own keys, without pages.

    ``plan`` once per batch, ``run`` once per layer.

    Parameters
    ----------
    float_workspace_buffer : torch.Tensor
        Scratch for partial results, any dtype, 16-byte aligned; its device is where everything runs. Wrappers
        that run at the same time, in threads on the CPU or on several streams, need a workspace each.
    kv_layout : str
        ``"NHD"`` or ``"HND"``: order of tokens and heads in keys and values.
    use_cuda_graph : bool
        Whether ``run`` will be captured. Batch size is then fixed by the buffers below, which ``plan`` writes to, and
        the first plan has the most query rows of all.
    qo_indptr_buf, kv_indptr_buf : Optional[torch.Tensor]
        int32 ``(batch_size + 1,)``; with ``use_cuda_graph`` only.
    custom_mask_buf, mask_indptr_buf : Optional[torch.Tensor]
        uint8 bytes of the largest packed mask and int32 ``(batch_size + 1,)``; with ``use_cuda_graph`` and masks. Every
        ``run`` then reads them: a plan without a mask leaves what is in them.
    backend : str
        ``"auto"`` (the faster one), ``"fa2"`` or, on an SM90 GPU with 16-bit or FP8 keys, ``"fa3"``.
    jit_args, jit_kwargs
        Arguments of ``gen_customize_batch_prefill_module`` after the backend: a variant of one's own.
    variant_owns_mask : bool
        Call the variant's mask for every pair of query and key; besides it, only the window masks keys.

    Examples
    --------
    >>> qo_indptr, kv_indptr = torch.tensor([0, 3, 5]), torch.tensor([0, 7, 16])
    >>> wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    >>> wrapper.plan(qo_indptr, kv_indptr, 8, 2, 64, causal=True)
    >>> o = wrapper.run(torch.randn(5, 8, 64).half(), *torch.randn(2, 16, 2, 64).half())
    """

    _locked_inside = ("run",)
    _known_tensors = ("maybe_custom_mask", "maybe_mask_indptr", "maybe_alibi_slopes")

    # Attributes that prefill/planning.py sets; serving engines read some of them.
    _block_tables: Optional[torch.Tensor]
    _causal: bool
    _custom_mask_buf: Optional[torch.Tensor]
    _mask_indptr_buf: Optional[torch.Tensor]
    _max_item_len_ptr: Optional[torch.Tensor]
    _max_kv_len: Optional[int]
    _max_q_len: Optional[int]
    _max_total_num_rows: Optional[int]
    _planned: PrefillPlan
    _prefix_len_ptr: Optional[torch.Tensor]
    _qo_indptr_last: Any
    _requested_backend: str
    _token_pos_in_items_len: Optional[int]
    _token_pos_in_items_ptr: Optional[torch.Tensor]
    _module_key: tuple[Dtypes, int, int, bool]
    _has_portable_variant: ClassVar[bool] = False  # see BatchPrefillWithPagedKVCacheWrapper
    _jit_backend: str
    _variant: tuple[Sequence[Any], Mapping[str, Any]]
    #: Tables of the paged wrapper, which a recorded call compares too.
    _paged_kv_indptr_buf: Optional[torch.Tensor] = None
    _paged_kv_indices_buf: Optional[torch.Tensor] = None
    _paged_kv_last_page_len_buf: Optional[torch.Tensor] = None
    _page_shape: Optional[tuple[int, int]] = None

    _derived_scalars = prefill_scalars
    _expected_rows = expected_rows
    _mask_mode = mask_mode
    _native_workspace_size = native_workspace_size
    _plan_work = plan_work
    _refuse_query = refuse_query
    _repeat = repeat
    _select_module = select_module
    _state = state_of
    _work = native_arguments

    @flashinfer_api(trace=None)
    @explain_type_errors
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Optional[torch.Tensor] = None,
        kv_indptr_buf: Optional[torch.Tensor] = None,
        custom_mask_buf: Optional[torch.Tensor] = None,
        mask_indptr_buf: Optional[torch.Tensor] = None,
        backend: str = "auto",
        jit_args: Optional[Sequence[Any]] = None,
        jit_kwargs: Optional[Mapping[str, Any]] = None,
        variant_owns_mask: bool = False,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend, jit_args)
        begin_prefill(self, custom_mask_buf, mask_indptr_buf, backend, jit_args, jit_kwargs, variant_owns_mask)
        self._fixed_batch_size = 0
        if use_cuda_graph:
            self._require_graph_buffers(torch.int32, qo_indptr_buf=qo_indptr_buf, kv_indptr_buf=kv_indptr_buf)
            assert qo_indptr_buf is not None and kv_indptr_buf is not None
            self._fixed_batch_size = len(qo_indptr_buf) - 1
            if len(kv_indptr_buf) != len(qo_indptr_buf):
                raise ArgumentError(
                    f"{self._op}: kv_indptr_buf must have {len(qo_indptr_buf)} elements (length of qo_indptr_buf), got "
                    f"{len(kv_indptr_buf)}"
                )
        self._qo_indptr_buf = qo_indptr_buf
        self._kv_indptr_buf = kv_indptr_buf

    @flashinfer_api(trace=None)
    @explain_type_errors
    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: Optional[int] = None,
        custom_mask: Optional[torch.Tensor] = None,
        packed_custom_mask: Optional[torch.Tensor] = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: Optional[float] = None,
        sm_scale: Optional[float] = None,
        rope_scale: Optional[float] = None,
        rope_theta: Optional[float] = None,
        q_data_type: Union[str, torch.dtype] = "float16",
        kv_data_type: Dtype = None,
        o_data_type: Dtype = None,
        non_blocking: bool = True,
        prefix_len_ptr: Optional[torch.Tensor] = None,
        token_pos_in_items_ptr: Optional[torch.Tensor] = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Optional[torch.Tensor] = None,
        fixed_split_size: Optional[int] = None,
        disable_split_kv: bool = False,
        seq_lens: Optional[torch.Tensor] = None,
        seq_lens_q: Optional[torch.Tensor] = None,
        max_token_per_sequence: Optional[int] = None,
        max_sequence_kv: Optional[int] = None,
        v_indptr: Optional[torch.Tensor] = None,
        o_indptr: Optional[torch.Tensor] = None,
        uniform_q_len: Optional[int] = None,
    ) -> None:
        r"""Prepare ``run`` for a batch: select the module, split the work, pack the mask.

        Parameters
        ----------
        qo_indptr, kv_indptr : torch.Tensor
            ``(batch_size + 1,)``; request ``i`` has the rows ``qo_indptr[i]`` to ``qo_indptr[i + 1]`` of q and
            ``kv_indptr[i]`` to ``kv_indptr[i + 1]`` of k and v. When they are on the host, nothing waits for the GPU;
            on the device, one copy to the host is made.
        num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo : int
            ``head_dim_vo`` is ``head_dim_qk`` if None.
        fixed_split_size : Optional[int]
            Keys that one piece of work covers. With it, or with ``disable_split_kv``, the result of a request does not
            depend on the others, to the last bit.
        seq_lens, seq_lens_q, max_token_per_sequence, max_sequence_kv, v_indptr, o_indptr
            Options of other backends; ignored.
        custom_mask, packed_custom_mask, causal, pos_encoding_mode, use_fp16_qk_reduction, window_left, \
logits_soft_cap, sm_scale, rope_scale, rope_theta, q_data_type, kv_data_type, o_data_type, non_blocking, \
prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr, disable_split_kv, uniform_q_len
            As in :meth:`BatchPrefillWithPagedKVCacheWrapper.plan`.
        """
        op = f"{self._op}.plan"
        dtypes = resolve_dtypes(op, q_data_type, kv_data_type, None if _is_byte(o_data_type) else o_data_type)
        self._check_alignment()
        check_heads(op, num_qo_heads, num_kv_heads)
        if len(kv_indptr) != len(qo_indptr):
            raise ArgumentError(
                f"{op}: kv_indptr must have {len(qo_indptr)} elements (length of qo_indptr), got {len(kv_indptr)}"
            )
        qo_host, kv_host = to_host(op, qo_indptr=qo_indptr, kv_indptr=kv_indptr)
        qo_lens, kv_lens = segment_lens(op, "qo_indptr", qo_host), segment_lens(op, "kv_indptr", kv_host)
        batch_size, rows = len(qo_lens), int(qo_host[-1])
        check_rows(self, op, batch_size, rows)
        resolve_backend(op, self._requested_backend, self.device)
        self._plan_info = None  # the state of the old plan is replaced below; if that fails, no valid plan remains
        self._set_parameters(
            AttentionOptions(pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta)
        )
        store_mask(self, op, custom_mask, packed_custom_mask, qo_lens, kv_lens, non_blocking)
        store_items(self, op, prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr, kv_lens)

        self._store_dtypes(dtypes)
        self._causal = causal
        self._batch_size, self._num_qo_heads, self._num_kv_heads = batch_size, num_qo_heads, num_kv_heads
        self._first_row, self._qo_indptr_last = int(qo_host[0]), rows
        self._kv_indptr_last = int(kv_host[-1])
        self._max_q_len = int(qo_lens.max(initial=0))
        self._max_kv_len = int(kv_lens.max(initial=0))
        if self._use_cuda_graph:
            assert self._qo_indptr_buf is not None and self._kv_indptr_buf is not None
            self._qo_indptr_buf.copy_(qo_indptr, non_blocking=non_blocking)
            self._kv_indptr_buf.copy_(kv_indptr, non_blocking=non_blocking)
        else:
            self._qo_indptr_buf = self._indptr_on_device(qo_indptr, 1, non_blocking)
            self._kv_indptr_buf = self._indptr_on_device(kv_indptr, 0, non_blocking)
        head_dim_vo = head_dim_vo or head_dim_qk
        self._planned = PrefillPlan(
            qo_indptr=qo_host,
            kv_indptr=kv_host,
            kv_lens=kv_lens,
            num_rows=self._max_total_num_rows or rows,
            batch_size=batch_size,
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            page_size=1,
            use_cuda_graph=self._use_cuda_graph,
            head_dim_qk=head_dim_qk,
            head_dim_vo=head_dim_vo,
            fixed_split_size=fixed_split_size or -1,
            disable_split_kv=bool(disable_split_kv) or self._is_nvfp4,
            uniform_q_len=uniform_q_len or 0,
        )
        self._backend = choose_backend(self, dtypes, head_dim_qk, head_dim_vo)
        self._select_module(dtypes, head_dim_qk, head_dim_vo, use_fp16_qk_reduction)
        self._plan_work()
        freeze_rows(self)

    def _batch_of_tables(self, op: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        assert self._qo_indptr_buf is not None and self._kv_indptr_buf is not None
        qo_host, kv_host = to_host(op, qo_indptr=self._qo_indptr_buf, kv_indptr=self._kv_indptr_buf)
        return qo_host, kv_host, segment_lens(op, "kv_indptr", kv_host)

    @flashinfer_api(trace=ragged_prefill_trace)
    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *args: Any,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        o_scale: Scale = None,
        out: Optional[torch.Tensor] = None,
        lse: Optional[torch.Tensor] = None,
        return_lse: bool = False,
        enable_pdl: Optional[bool] = None,
        kv_cache_sf: Optional[PagedCache] = None,
        lse_base: str = "log2",
        lse_layout: str = "NH",
    ) -> Result:
        r"""Compute attention for the planned batch.

        Parameters
        ----------
        q : torch.Tensor
            ``(qo_indptr[-1], num_qo_heads, head_dim_qk)``.
        k, v : torch.Tensor
            ``(kv_indptr[-1], num_kv_heads, head_dim)``, or with heads first (``"HND"``). Any strides but the last.
        *args
            Parameters of a variant given as ``jit_args``; with 8-bit queries, scales of q, k and v, per head or not.
        q_scale, k_scale, v_scale : Union[float, torch.Tensor, None]
            Calibration scales: value = stored * scale.
        o_scale
            Options of other backends; ignored.
        out, lse, return_lse, enable_pdl, lse_base, lse_layout
            As in :meth:`BatchPrefillWithPagedKVCacheWrapper.run`.
        kv_cache_sf : Optional[Tuple[torch.Tensor, torch.Tensor]]
            Scale factors of uint8 (NVFP4) keys and values, one e4m3 number for 16 elements.

        Returns
        -------
        Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]
            ``(tokens, num_qo_heads, head_dim_vo)``, and the LSE. A query that sees no key has output 0 and LSE -inf.
        """
        if not (args or kv_cache_sf is not None or lse_base != "log2" or lse_layout != "NH"):
            result = self._repeat(q, k, v, q_scale, k_scale, v_scale, out, lse, return_lse, enable_pdl)
            if result is not None:
                return result
        return self._run_alone(
            q, k, v, args, q_scale, k_scale, v_scale, out, lse, return_lse, enable_pdl, kv_cache_sf, lse_base,
            lse_layout,
        )  # fmt: skip

    def _run_alone(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        args: tuple[Any, ...],
        q_scale: Scale,
        k_scale: Scale,
        v_scale: Scale,
        out: Optional[torch.Tensor],
        lse: Optional[torch.Tensor],
        return_lse: bool,
        enable_pdl: Optional[bool],
        kv_cache_sf: Optional[PagedCache],
        lse_base: str,
        lse_layout: str,
    ) -> Result:
        """Validate the arguments of ``run`` and launch, while no other call on this wrapper is under way."""
        self._require_plan()
        self._check_dtypes(q, k)
        check_tensors(f"{self._op}.run", v=v)
        if not torch.compiler.is_compiling():  # a compiled graph accepts any number of keys; run_planned checks it
            self._check_keys(k)
        factors = scale_factors(self._op, k, v, kv_cache_sf, self._layout, False) if self._is_nvfp4 else ()
        return attend(
            self,
            q,
            k,
            v,
            args,
            factors,
            q_scale,
            k_scale,
            v_scale,
            out,
            lse,
            return_lse,
            enable_pdl,
            lse_base,
            lse_layout,
        )

    def _check_keys(self, k: torch.Tensor) -> None:
        if k.ndim != 3:
            raise ArgumentError(
                f"{self._op}.run: k must have 3 dimensions (tokens, num_kv_heads, head_dim), got {k.ndim}"
            )
        tokens, heads = (k.shape[0], k.shape[1]) if self._layout == 0 else (k.shape[1], k.shape[0])
        if heads != self._num_kv_heads or tokens < self._kv_indptr_last:
            raise ArgumentError(
                f"{self._op}.run: k must have {self._kv_indptr_last} tokens (kv_indptr[-1]) of {self._num_kv_heads} "
                f"heads (as planned), got {tokens} tokens of {heads} heads"
            )

    def _check_in_graph(self, launch: Launch) -> None:
        check_in_graph(self, launch)
        self._check_keys(launch.k)

    def _native_call(self, launch: Launch, enable_pdl: bool) -> tuple[Any, str, tuple[Any, ...]]:
        tables = (self._qo_indptr_buf, self._kv_indptr_buf)
        return self._cached_module, "ragged_run", call_with(self, tables, launch, enable_pdl)

    # Method names of older releases.

    begin_forward = plan

    def end_forward(self) -> None:
        """Do nothing; programs written for older releases call it."""

    def run_return_lse(self, *args: Any, **kwargs: Any) -> Result:
        """Call :meth:`run` with ``return_lse=True``."""
        return self.run(*args, return_lse=True, **kwargs)

    @flashinfer_api(trace=None)
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: Optional[float] = None,
        sm_scale: Optional[float] = None,
        rope_scale: Optional[float] = None,
        rope_theta: Optional[float] = None,
        *,
        return_lse: bool = False,
    ) -> Result:
        """Call :meth:`run` with parameters that replace those of ``plan``; omitted ones are reset to their defaults."""
        replace_parameters(
            self,
            causal,
            AttentionOptions(pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta),
        )
        return self.run(q, k, v, return_lse=return_lse)

    def forward_return_lse(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: Optional[float] = None,
        sm_scale: Optional[float] = None,
        rope_scale: Optional[float] = None,
        rope_theta: Optional[float] = None,
    ) -> Result:
        """Call :meth:`forward` and return the LSE too."""
        return self.forward(
            q, k, v, causal, pos_encoding_mode, use_fp16_qk_reduction, window_left, logits_soft_cap, sm_scale,
            rope_scale, rope_theta, return_lse=True,
        )  # fmt: skip


def _is_byte(dtype: Dtype) -> bool:
    """Return True for an 8-bit output dtype, which published callers plan with 8-bit queries to get bfloat16."""
    return "float8" in str(dtype)
