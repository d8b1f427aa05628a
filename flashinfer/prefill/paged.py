# SPDX-License-Identifier: Apache-2.0
"""Prefill and append attention for a batch of requests over a paged cache."""

from __future__ import annotations

from typing import Any, ClassVar, Mapping, Optional, Sequence, Union

import numpy as np
import torch

from .._compat.backend_rules import check_trtllm_gen_sm107_only_feature
from .._runtime.checks import narrowed
from .._runtime.errors import ArgumentError
from .._runtime.explain_error import explain_type_errors
from ..api_logging import flashinfer_api
from ..attention.index_arrays import (
    check_indices,
    kv_lens_given,
    kv_lens_of_pages,
    last_page_lens,
    segment_lens,
    to_device,
    to_host,
)
from ..attention.kv_cache import PagedCache, scale_factors, unpack_paged_cache
from ..attention.options import Dtypes, resolve_backend, resolve_dtypes
from ..attention.plan_options import AttentionOptions
from ..attention.run import Result, attend, check_heads, check_in_graph, plan_and_table, refuse_query, repeat
from ..attention.scales import Scale
from ..attention.wrapper import Launch, PlannedWrapper
from ..trace.templates.prefill import paged_prefill_trace
from .plan import PrefillPlan
from .planning import (
    KNOWN_TENSORS,
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


class BatchPrefillWithPagedKVCacheWrapper(PlannedWrapper):
    r"""Attention of any number of query tokens of each request over its pages.

    The queries of a request are its last tokens, whose keys are in the cache already. ``plan`` once per batch, ``run``
    once per layer.

    Parameters
    ----------
    float_workspace_buffer : torch.Tensor
        Scratch for partial results, any dtype, 16-byte aligned; its device is where everything runs. Wrappers
        that run at the same time, in threads on the CPU or on several streams, need a workspace each.
    kv_layout : str
        ``"NHD"`` or ``"HND"``: order of tokens and heads inside a page.
    use_cuda_graph : bool
        Whether ``run`` will be captured. Batch size is then fixed by the buffers below, which ``plan`` writes to, and
        the first plan has the most query rows of all.
    qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf : Optional[torch.Tensor]
        int32 ``(batch_size + 1,)``, ``(batch_size + 1,)``, ``(most pages,)``, ``(batch_size,)``; with
        ``use_cuda_graph`` only.
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
    >>> qo_indptr, kv_indptr = torch.tensor([0, 3, 5]), torch.tensor([0, 2, 3])
    >>> indices, last_page_len = torch.tensor([4, 0, 2]), torch.tensor([5, 16])
    >>> wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    >>> wrapper.plan(qo_indptr, kv_indptr, indices, last_page_len, 8, 2, 64, 16, causal=True)
    >>> q, cache = torch.randn(5, 8, 64).half(), torch.randn(6, 2, 16, 2, 64).half()
    >>> o = wrapper.run(q, cache)
    """

    _locked_inside = ("run",)
    _has_replan = True
    _is_paged = True
    _known_tensors = KNOWN_TENSORS

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
    #: Keys of the ragged wrapper, which a recorded call compares too.
    _kv_indptr_buf: Optional[torch.Tensor] = None
    _kv_indptr_last: int = 0
    #: True if a variant of the class is known to suit all backends, so that "auto" may choose for each plan.
    _has_portable_variant: ClassVar[bool] = False
    _jit_backend: str  #: backend of ``_jit_module``
    _variant: tuple[Sequence[Any], Mapping[str, Any]]

    _check_in_graph = check_in_graph
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
        paged_kv_indptr_buf: Optional[torch.Tensor] = None,
        paged_kv_indices_buf: Optional[torch.Tensor] = None,
        paged_kv_last_page_len_buf: Optional[torch.Tensor] = None,
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
            self._require_graph_buffers(
                torch.int32,
                qo_indptr_buf=qo_indptr_buf,
                paged_kv_indptr_buf=paged_kv_indptr_buf,
                paged_kv_indices_buf=paged_kv_indices_buf,
                paged_kv_last_page_len_buf=paged_kv_last_page_len_buf,
            )
            assert qo_indptr_buf is not None and paged_kv_indptr_buf is not None
            assert paged_kv_last_page_len_buf is not None
            self._fixed_batch_size = len(qo_indptr_buf) - 1
            if len(paged_kv_indptr_buf) != self._fixed_batch_size + 1:
                raise ArgumentError(
                    f"{self._op}: paged_kv_indptr_buf must have {self._fixed_batch_size + 1} elements (length of "
                    f"qo_indptr_buf), got {len(paged_kv_indptr_buf)}"
                )
            if len(paged_kv_last_page_len_buf) != self._fixed_batch_size:
                raise ArgumentError(
                    f"{self._op}: paged_kv_last_page_len_buf must have {self._fixed_batch_size} elements (one less "
                    f"than qo_indptr_buf), got {len(paged_kv_last_page_len_buf)}"
                )
        self._qo_indptr_buf = qo_indptr_buf
        self._paged_kv_indptr_buf = paged_kv_indptr_buf
        self._paged_kv_indices_buf = paged_kv_indices_buf
        self._paged_kv_last_page_len_buf = paged_kv_last_page_len_buf

    @flashinfer_api(trace=None)
    @explain_type_errors
    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: Optional[int] = None,
        custom_mask: Optional[torch.Tensor] = None,
        packed_custom_mask: Optional[torch.Tensor] = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: Optional[float] = None,
        window_left: int = -1,
        logits_soft_cap: Optional[float] = None,
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
        seq_lens: Optional[torch.Tensor] = None,
        seq_lens_q: Optional[torch.Tensor] = None,
        block_tables: Optional[torch.Tensor] = None,
        max_token_per_sequence: Optional[int] = None,
        max_sequence_kv: Optional[int] = None,
        fixed_split_size: Optional[int] = None,
        disable_split_kv: bool = False,
        uniform_q_len: Optional[int] = None,
    ) -> None:
        r"""Prepare ``run`` for a batch: select the module, split the work, pack the mask, copy the page tables.

        Parameters
        ----------
        qo_indptr : torch.Tensor
            ``(batch_size + 1,)``; request ``i`` has the rows ``qo_indptr[i]`` to ``qo_indptr[i + 1]`` of q. Rows before
            those of the first are 0 in outputs that ``run`` makes. When these arrays are on the host, nothing waits for
            the GPU; on the device, one copy to the host is made.
        paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len : torch.Tensor
            Page table, as in :meth:`BatchDecodeWithPagedKVCacheWrapper.plan`.
        num_qo_heads, num_kv_heads, head_dim_qk, page_size, head_dim_vo : int
            ``head_dim_vo`` is ``head_dim_qk`` if None.
        custom_mask : Optional[torch.Tensor]
            bool, True where a query sees a key: of each request the rows ``(qo_len, kv_len)``, all in one flat tensor.
            Replaces ``causal``.
        packed_custom_mask : Optional[torch.Tensor]
            uint8 bits of the same, lowest bit first, each request starting on a byte; wins over ``custom_mask``.
        causal : bool
            A query sees keys up to its own position, the last query all of them.
        pos_encoding_mode : str
            ``"NONE"``, ``"ROPE_LLAMA"`` (rotate q and k here) or ``"ALIBI"``.
        use_fp16_qk_reduction : bool
            Ignored: products are always accumulated in float32.
        sm_scale : Optional[float]
            1 / sqrt(head_dim_qk) if None.
        window_left : int
            Keys left of the query's own that are visible, -1 for all.
        logits_soft_cap : Optional[float]
            ``cap * tanh(logit / cap)``; None or 0 for none.
        rope_scale, rope_theta : Optional[float]
            1 and 1e4 if None.
        q_data_type, kv_data_type, o_data_type : Union[str, torch.dtype, None]
            The last two follow the first.
        non_blocking : bool
            Whether copies to the device may overlap with what the host does next.
        prefix_len_ptr : Optional[torch.Tensor]
            uint32 ``(batch_size,)``: multi-item scoring. Keys before it are seen by all later queries, which see no
            other item. Replaces ``causal`` and the masks.
        token_pos_in_items_ptr : Optional[torch.Tensor]
            uint16; for each position from the prefix on, the place inside its item, 0 for delimiters; requests are
            padded to ``token_pos_in_items_len``.
        max_item_len_ptr : Optional[torch.Tensor]
            A hint that is not needed.
        seq_lens : Optional[torch.Tensor]
            ``(batch_size,)`` keys of each request, instead of what ``paged_kv_last_page_len`` says.
        seq_lens_q, max_token_per_sequence, max_sequence_kv
            Options of other backends; ignored.
        block_tables : Optional[torch.Tensor]
            Kept as ``_block_tables``.
        fixed_split_size : Optional[int]
            Pages that one piece of work covers. With it, or with ``disable_split_kv``, the result of a request does not
            depend on the others, to the last bit.
        disable_split_kv : bool
            Never divide the keys of a request.
        uniform_q_len : Optional[int]
            Query tokens of every request, where all have as many: a hint.
        """
        op = f"{self._op}.plan"
        dtypes = resolve_dtypes(op, q_data_type, kv_data_type, o_data_type)
        self._check_alignment()
        check_heads(op, num_qo_heads, num_kv_heads)
        qo_host, kv_host, qo_lens, kv_lens = self._lengths(
            op, qo_indptr, paged_kv_indptr, paged_kv_last_page_len, seq_lens, page_size
        )
        batch_size, rows = len(qo_lens), int(qo_host[-1])
        check_rows(self, op, batch_size, rows)
        check_indices(op, "paged_kv_indices", len(paged_kv_indices), kv_host)
        self._check_pages(op, len(paged_kv_indices))
        resolve_backend(op, self._requested_backend, self.device)
        if seq_lens is not None and self._device_kind == "cpu":  # the CPU validates the page ids of all seq_lens keys
            paged_kv_last_page_len = last_page_lens(kv_lens, kv_host, page_size)
        self._plan_info = None  # the state of the old plan is replaced below; if that fails, no valid plan remains
        self._set_parameters(
            AttentionOptions(pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta)
        )
        store_mask(self, op, custom_mask, packed_custom_mask, qo_lens, kv_lens, non_blocking)
        store_items(self, op, prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr, kv_lens)

        self._store_dtypes(dtypes)
        self._causal = causal
        self._block_tables = block_tables
        self._batch_size, self._num_qo_heads, self._num_kv_heads = batch_size, num_qo_heads, num_kv_heads
        self._page_size = page_size
        self._page_shape = (page_size, num_kv_heads) if self._layout == 0 else (num_kv_heads, page_size)
        self._first_row, self._qo_indptr_last = int(qo_host[0]), rows
        self._max_q_len = int(qo_lens.max(initial=0))
        self._max_kv_len = int(kv_lens.max(initial=0))
        self._store_tables(qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, non_blocking)
        self._plan_arrays(
            qo_host, kv_host, kv_lens, head_dim_qk, head_dim_vo, fixed_split_size, disable_split_kv, uniform_q_len
        )
        self._backend = choose_backend(self, dtypes, head_dim_qk, head_dim_vo or head_dim_qk)
        self._select_module(dtypes, head_dim_qk, head_dim_vo or head_dim_qk, use_fp16_qk_reduction)
        self._plan_work()
        freeze_rows(self)

    def _plan_arrays(
        self,
        qo_indptr: np.ndarray,
        kv_indptr: np.ndarray,
        kv_lens: np.ndarray,
        head_dim_qk: int,
        head_dim_vo: Optional[int],
        fixed_split_size: Optional[int],
        disable_split_kv: bool,
        uniform_q_len: Optional[int],
    ) -> None:
        self._planned = PrefillPlan(
            qo_indptr=qo_indptr,
            kv_indptr=kv_indptr,
            kv_lens=kv_lens,
            num_rows=self._max_total_num_rows or self._qo_indptr_last,
            batch_size=self._batch_size,
            num_qo_heads=self._num_qo_heads,
            num_kv_heads=self._num_kv_heads,
            page_size=self._page_size,
            use_cuda_graph=self._use_cuda_graph,
            head_dim_qk=head_dim_qk,
            head_dim_vo=head_dim_vo or head_dim_qk,
            fixed_split_size=fixed_split_size or -1,
            disable_split_kv=bool(disable_split_kv) or self._is_nvfp4,
            uniform_q_len=uniform_q_len or 0,
        )

    @staticmethod
    def _lengths(
        op: str,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        last_page_len: torch.Tensor,
        seq_lens: Optional[torch.Tensor],
        page_size: int,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return offsets and lengths on the host, in at most one copy from the device."""
        lengths = {"paged_kv_last_page_len": last_page_len} if seq_lens is None else {"seq_lens": seq_lens}
        qo_host, kv_host, lens = to_host(op, qo_indptr=qo_indptr, paged_kv_indptr=kv_indptr, **lengths)
        qo_lens, pages = segment_lens(op, "qo_indptr", qo_host), segment_lens(op, "paged_kv_indptr", kv_host)
        if pages.shape != qo_lens.shape:
            raise ArgumentError(
                f"{op}: paged_kv_indptr must have {len(qo_host)} elements (length of qo_indptr), got {len(kv_host)}"
            )
        if seq_lens is None:
            return qo_host, kv_host, qo_lens, kv_lens_of_pages(op, "paged_kv_indptr", kv_host, lens, page_size)
        return qo_host, kv_host, qo_lens, kv_lens_given(op, lens, pages)

    def _batch_of_tables(self, op: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rows, pages, last = self._qo_indptr_buf, self._paged_kv_indptr_buf, self._paged_kv_last_page_len_buf
        assert rows is not None and pages is not None and last is not None
        qo_host, kv_host, _, kv_lens = self._lengths(op, rows, pages, last, None, self._page_size)
        return qo_host, kv_host, kv_lens

    def _check_pages(self, op: str, num_indices: int) -> None:
        if not self._use_cuda_graph:
            return
        assert self._paged_kv_indices_buf is not None
        if num_indices > len(self._paged_kv_indices_buf):
            raise ArgumentError(
                f"{op}: paged_kv_indices must have at most {len(self._paged_kv_indices_buf)} elements (length of "
                f"paged_kv_indices_buf), got {num_indices}"
            )

    def _store_tables(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        last_page_len: torch.Tensor,
        non_blocking: bool,
    ) -> None:
        if self._use_cuda_graph:
            for name, buffer, given in (
                ("qo_indptr", self._qo_indptr_buf, qo_indptr),
                ("paged_kv_indptr", self._paged_kv_indptr_buf, kv_indptr),
                ("paged_kv_indices", self._paged_kv_indices_buf, kv_indices),
                ("paged_kv_last_page_len", self._paged_kv_last_page_len_buf, last_page_len),
            ):
                assert buffer is not None
                numbers = narrowed(given, f"{self._op}.plan: {name}")
                buffer[: len(given)].copy_(numbers, non_blocking=non_blocking)
        else:
            self._qo_indptr_buf = self._indptr_on_device(qo_indptr, 1, non_blocking)
            self._paged_kv_indptr_buf = self._indptr_on_device(kv_indptr, 0, non_blocking)
            where: tuple[Any, ...] = (self.device, non_blocking)
            self._paged_kv_indices_buf = to_device(self._op, "paged_kv_indices", kv_indices, *where)
            self._paged_kv_last_page_len_buf = to_device(self._op, "paged_kv_last_page_len", last_page_len, *where)

    def workspace_size(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: Optional[int] = None,
        custom_mask: Optional[torch.Tensor] = None,
        packed_custom_mask: Optional[torch.Tensor] = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: Optional[float] = None,
        window_left: int = -1,
        logits_soft_cap: Optional[float] = None,
        rope_scale: Optional[float] = None,
        rope_theta: Optional[float] = None,
        q_data_type: Union[str, torch.dtype] = "float16",
        kv_data_type: Dtype = None,
        o_data_type: Dtype = None,
        prefix_len_ptr: Optional[torch.Tensor] = None,
        token_pos_in_items_ptr: Optional[torch.Tensor] = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Optional[torch.Tensor] = None,
        seq_lens: Optional[torch.Tensor] = None,
        seq_lens_q: Optional[torch.Tensor] = None,
        block_tables: Optional[torch.Tensor] = None,
        max_token_per_sequence: Optional[int] = None,
        max_sequence_kv: Optional[int] = None,
        fixed_split_size: Optional[int] = None,
        disable_split_kv: bool = False,
        uniform_q_len: Optional[int] = None,
    ) -> tuple[int, int]:
        """Return the bytes of float and of int workspace that ``plan`` with the same arguments needs, without planning.

        Returns
        -------
        Tuple[int, int]
        """
        op = f"{self._op}.workspace_size"
        dtypes = resolve_dtypes(op, q_data_type, kv_data_type, o_data_type)
        self._check_alignment()
        check_heads(op, num_qo_heads, num_kv_heads)
        qo_host, kv_host, qo_lens, kv_lens = self._lengths(
            op, qo_indptr, paged_kv_indptr, paged_kv_last_page_len, seq_lens, page_size
        )
        check_rows(self, op, len(qo_lens), int(qo_host[-1]))
        check_indices(op, "paged_kv_indices", len(paged_kv_indices), kv_host)
        self._check_pages(op, len(paged_kv_indices))
        probe = object.__new__(type(self))
        probe.__dict__.update(self.__dict__)
        resolve_backend(op, self._requested_backend, self.device)
        probe._set_parameters(
            AttentionOptions(pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta)
        )
        probe._store_dtypes(dtypes)
        mask = packed_custom_mask if custom_mask is None else custom_mask
        if mask is not None or not self._use_cuda_graph:
            probe._custom_mask_buf = mask  # only tested for None; the contents do not matter here
        probe._causal, probe._prefix_len_ptr = causal, prefix_len_ptr
        probe._batch_size, probe._num_qo_heads, probe._num_kv_heads = len(qo_lens), num_qo_heads, num_kv_heads
        probe._page_size, probe._qo_indptr_last = page_size, int(qo_host[-1])
        probe._plan_arrays(
            qo_host, kv_host, kv_lens, head_dim_qk, head_dim_vo, fixed_split_size, disable_split_kv, uniform_q_len
        )
        probe._backend = choose_backend(probe, dtypes, head_dim_qk, head_dim_vo or head_dim_qk)
        probe._select_module(dtypes, head_dim_qk, head_dim_vo or head_dim_qk, use_fp16_qk_reduction)
        return probe._native_workspace_size()

    @flashinfer_api(trace=paged_prefill_trace)
    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: PagedCache,
        *args: Any,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        out: Optional[torch.Tensor] = None,
        lse: Optional[torch.Tensor] = None,
        return_lse: bool = False,
        enable_pdl: Optional[bool] = None,
        window_left: Optional[int] = None,
        sinks: Optional[torch.Tensor] = None,
        kv_cache_sf: Optional[PagedCache] = None,
        skip_softmax_threshold_scale_factor: Optional[float] = None,
        use_fp16_softmax: Optional[bool] = None,
        uses_spcompress: Optional[bool] = None,
        lse_base: str = "log2",
        lse_layout: str = "NH",
    ) -> Result:
        r"""Compute attention for the planned batch.

        Parameters
        ----------
        q : torch.Tensor
            ``(qo_indptr[-1], num_qo_heads, head_dim_qk)``.
        paged_kv_cache : Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]
            ``(num_pages, 2, page_size, num_kv_heads, head_dim)`` with keys before values, or a tuple of two without the
            second dimension; heads before entries with ``"HND"``. Without the page dimension, pages hold one token.
        *args
            Parameters of a variant given as ``jit_args``; with 8-bit queries, scales of q, k and v, per head or not.
        q_scale, k_scale, v_scale : Union[float, torch.Tensor, None]
            Calibration scales: value = stored * scale. Those of q and k on a GPU multiply q, in its dtype.
        out, lse : Optional[torch.Tensor]
            Output buffers.
        return_lse : bool
            Also return the logarithm to base 2 of the sum of ``exp(logit)``, float32 ``(tokens, num_qo_heads)``.
        enable_pdl : Optional[bool]
            Programmatic dependent launch; None enables it where the device supports it.
        window_left : Optional[int]
            Must equal the value given to ``plan``, if not None.
        sinks : Optional[torch.Tensor]
            ``(num_qo_heads,)`` logits, not scaled by ``sm_scale``, that add to the denominator of the softmax.
        skip_softmax_threshold_scale_factor
            Option of other backends; ignored: nothing is skipped.
        kv_cache_sf : Optional[Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]]
            Scale factors of a uint8 (NVFP4) cache, one e4m3 number for 16 elements, in the form of the cache.
        use_fp16_softmax, uses_spcompress : Optional[bool]
            Option for other GPUs; True raises a ``ValueError``.
        lse_base : str
            ``"log2"`` or ``"ln"``.
        lse_layout : str
            ``"NH"`` or ``"HN"``: heads first, contiguous.

        Returns
        -------
        Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]
            ``(tokens, num_qo_heads, head_dim_vo)``, and the LSE. A query that sees no key has output 0 and LSE -inf.
        """
        if not (
            args
            or window_left is not None
            or sinks is not None
            or kv_cache_sf is not None
            or use_fp16_softmax
            or uses_spcompress
            or lse_base != "log2"
            or lse_layout != "NH"
        ):
            is_pair = type(paged_kv_cache) is tuple and len(paged_kv_cache) == 2
            keys, values = paged_kv_cache if is_pair else (paged_kv_cache, None)  # type: Any, Any
            result = self._repeat(q, keys, values, q_scale, k_scale, v_scale, out, lse, return_lse, enable_pdl)
            if result is not None:
                return result
        return self._run_alone(
            q, paged_kv_cache, args, q_scale, k_scale, v_scale, out, lse, return_lse, enable_pdl, window_left, sinks,
            kv_cache_sf, use_fp16_softmax, uses_spcompress, lse_base, lse_layout,
        )  # fmt: skip

    def _run_alone(
        self,
        q: torch.Tensor,
        paged_kv_cache: PagedCache,
        args: tuple[Any, ...],
        q_scale: Scale,
        k_scale: Scale,
        v_scale: Scale,
        out: Optional[torch.Tensor],
        lse: Optional[torch.Tensor],
        return_lse: bool,
        enable_pdl: Optional[bool],
        window_left: Optional[int],
        sinks: Optional[torch.Tensor],
        kv_cache_sf: Optional[PagedCache],
        use_fp16_softmax: Optional[bool],
        uses_spcompress: Optional[bool],
        lse_base: str,
        lse_layout: str,
    ) -> Result:
        """Validate the arguments of ``run`` and launch, while no other call on this wrapper is under way."""
        self._require_plan()
        if use_fp16_softmax or uses_spcompress:
            check_trtllm_gen_sm107_only_feature(use_fp16_softmax, "use_fp16_softmax", self.device)
            check_trtllm_gen_sm107_only_feature(uses_spcompress, "uses_spcompress", self.device)
        k, v = unpack_paged_cache(self._op, paged_kv_cache, self._layout)
        self._check_dtypes(q, k)
        if k.shape[1:3] != self._page_shape:
            raise ArgumentError(
                f"{self._op}.run: keys must have {self._kv_layout} pages of {self._page_size} tokens by "
                f"{self._num_kv_heads} heads (as planned), got shape {tuple(k.shape)}"
            )
        if window_left is not None and window_left != self._window_left:
            raise ArgumentError(
                f"{self._op}.run: window_left must be {self._window_left} (as planned), got {window_left}"
            )
        factors = scale_factors(self._op, k, v, kv_cache_sf, self._layout, True) if self._is_nvfp4 else ()
        return attend(
            self, q, k, v, args, factors, q_scale, k_scale, v_scale, out, lse, return_lse, enable_pdl, lse_base,
            lse_layout, sinks,
        )  # fmt: skip

    def _native_call(self, launch: Launch, enable_pdl: bool) -> tuple[Any, str, tuple[Any, ...]]:
        tables = (
            self._qo_indptr_buf,
            self._paged_kv_indptr_buf,
            self._paged_kv_indices_buf,
            self._paged_kv_last_page_len_buf,
        )
        return self._cached_module, "paged_run", call_with(self, tables, launch, enable_pdl)

    def _new_plan(self) -> tuple[Any, ...]:
        return (*plan_and_table(self), self._qo_indptr_buf)

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
        paged_kv_cache: PagedCache,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        k_scale: Scale = None,
        v_scale: Scale = None,
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
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse)

    def forward_return_lse(
        self,
        q: torch.Tensor,
        paged_kv_cache: PagedCache,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        k_scale: Scale = None,
        v_scale: Scale = None,
        window_left: int = -1,
        logits_soft_cap: Optional[float] = None,
        sm_scale: Optional[float] = None,
        rope_scale: Optional[float] = None,
        rope_theta: Optional[float] = None,
    ) -> Result:
        """Call :meth:`forward` and return the LSE too."""
        return self.forward(
            q, paged_kv_cache, causal, pos_encoding_mode, use_fp16_qk_reduction, k_scale, v_scale, window_left,
            logits_soft_cap, sm_scale, rope_scale, rope_theta, return_lse=True,
        )  # fmt: skip
