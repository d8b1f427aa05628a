# SPDX-License-Identifier: Apache-2.0
"""Decode attention for a batch of requests over a paged cache."""

from __future__ import annotations

import warnings
from typing import Any, Optional, Sequence, Union

import torch

from .._runtime.errors import ArgumentError
from .._runtime.explain_error import explain_type_errors
from ..api_logging import flashinfer_api
from ..attention.index_arrays import check_indices, last_page_lens
from ..attention.kv_cache import PagedCache, scale_factors, unpack_paged_cache
from ..attention.modules import get_customize_batch_decode_module, get_customize_batch_prefill_module
from ..attention.options import ALIBI, CAUSAL, NON_CAUSAL, alibi_slopes, resolve_backend, resolve_dtypes
from ..attention.plan_options import AttentionOptions
from ..attention.run import (
    Result,
    attend,
    builtin_scalars,
    check_in_graph,
    derived_scalars,
    plan_and_table,
    repeat,
)
from ..attention.scales import Scale
from ..attention.wrapper import Launch, PlannedWrapper
from ..trace.templates.decode import batch_decode_trace
from .plan import DecodePlan, DecodeState
from .planning import (
    check_buffers,
    check_options,
    host_lengths,
    module_of,
    native_arguments,
    plan_again,
    plan_work,
    store_options,
    store_tables,
)

#: Options that plan() of older releases took by position, in their order.
_LEGACY_OPTIONS = (
    "pos_encoding_mode",
    "window_left",
    "logits_soft_cap",
    "q_data_type",
    "kv_data_type",
    "o_data_type",
    "data_type",
    "sm_scale",
    "rope_scale",
    "rope_theta",
    "non_blocking",
    "block_tables",
    "seq_lens",
    "fixed_split_size",
    "disable_split_kv",
    "q_len_per_req",
)


class BatchDecodeWithPagedKVCacheWrapper(PlannedWrapper):
    r"""Attention of one query token (or a few, see ``q_len_per_req``) of each request over its pages.

    ``plan`` once per batch, ``run`` once per layer.

    Parameters
    ----------
    float_workspace_buffer : torch.Tensor
        Scratch for partial results, any dtype, 16-byte aligned; its device is where everything runs. 128 MiB is ample;
        :meth:`workspace_size` tells what a batch needs. Wrappers that run at the same time, in threads
        on the CPU or on several streams, need a workspace each.
    kv_layout : str
        ``"NHD"`` or ``"HND"``: order of tokens and heads inside a page.
    use_cuda_graph : bool
        Whether ``run`` will be captured. Batch size is then fixed by the buffers below, which ``plan`` writes to.
    use_tensor_cores : bool
        Use the kernels of the prefill family: needed for ``q_len_per_req > 1`` and ``fixed_split_size``.
    paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer : Optional[torch.Tensor]
        int32 ``(batch_size + 1,)``, ``(most pages of any batch,)``, ``(batch_size,)``; with ``use_cuda_graph`` only.
    backend : str
        ``"auto"`` or ``"fa2"``.
    jit_args : Optional[List[Any]]
        Arguments of ``gen_customize_batch_decode_module`` (with tensor cores: of ``gen_customize_batch_prefill_module``
        without the backend) that describe a variant of one's own.

    Examples
    --------
    >>> indptr, indices = torch.tensor([0, 2, 3]), torch.tensor([4, 0, 2])  # two requests, on pages 4 and 0, and on 2
    >>> last_page_len = torch.tensor([5, 16])
    >>> wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    >>> wrapper.plan(indptr, indices, last_page_len, 8, 2, 64, 16)
    >>> q, cache = torch.randn(2, 8, 64).half(), torch.randn(6, 2, 16, 2, 64).half()
    >>> o = wrapper.run(q, cache)
    """

    _locked_inside = ("run",)
    _has_replan = True
    _is_paged = True

    _module_key: Any = None  #: key of ``_module_found``, a cache of one module: a lookup takes 1 us
    _module_found: Any = None
    _use_tensor_cores: bool
    _head_dim: int
    _page_size: int
    _page_shape: tuple[int, int]
    _planned: DecodePlan
    _planned_q_len: Optional[int]
    _frozen_q_len: Optional[int] = None  #: q_len_per_req of the first successful plan with use_cuda_graph
    _paged_kv_indptr_buf: Optional[torch.Tensor]
    _paged_kv_indices_buf: Optional[torch.Tensor]
    _paged_kv_last_page_len_buf: Optional[torch.Tensor]
    _qo_indptr_buf: Optional[torch.Tensor]
    _known_tensors = ("maybe_custom_mask", "maybe_mask_indptr", "maybe_alibi_slopes")

    _check_in_graph = check_in_graph
    _derived_scalars = derived_scalars
    _repeat = repeat

    @flashinfer_api(trace=None)
    @explain_type_errors
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Optional[torch.Tensor] = None,
        paged_kv_indices_buffer: Optional[torch.Tensor] = None,
        paged_kv_last_page_len_buffer: Optional[torch.Tensor] = None,
        backend: str = "auto",
        jit_args: Optional[Sequence[Any]] = None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend, jit_args)
        self._use_tensor_cores = use_tensor_cores
        if jit_args is not None:
            self._jit_module = (
                get_customize_batch_prefill_module("fa2", *jit_args, device=self._device_kind)
                if use_tensor_cores
                else get_customize_batch_decode_module(*jit_args, device=self._device_kind)
            )
        self._fixed_batch_size = 0
        if use_cuda_graph:
            self._require_graph_buffers(
                torch.int32,
                paged_kv_indptr_buffer=paged_kv_indptr_buffer,
                paged_kv_indices_buffer=paged_kv_indices_buffer,
                paged_kv_last_page_len_buffer=paged_kv_last_page_len_buffer,
            )
            assert paged_kv_indptr_buffer is not None and paged_kv_last_page_len_buffer is not None
            self._fixed_batch_size = len(paged_kv_last_page_len_buffer)
            if len(paged_kv_indptr_buffer) != self._fixed_batch_size + 1:
                raise ArgumentError(
                    f"{self._op}: paged_kv_indptr_buffer must have {self._fixed_batch_size + 1} elements (one more "
                    f"than paged_kv_last_page_len_buffer), got {len(paged_kv_indptr_buffer)}"
                )
        self._paged_kv_indptr_buf = paged_kv_indptr_buffer
        self._paged_kv_indices_buf = paged_kv_indices_buffer
        self._paged_kv_last_page_len_buf = paged_kv_last_page_len_buffer
        self._qo_indptr_buf: Optional[torch.Tensor] = None
        self._custom_mask_buf: Optional[torch.Tensor] = None
        self._mask_indptr_buf: Optional[torch.Tensor] = None
        self._planned_q_len: Optional[int] = None

    def _module_backend(self) -> str:
        """Return the backend of the module. Requests that decode run on the kernel that all backends have."""
        return "fa2"

    @property
    def use_tensor_cores(self) -> bool:
        return self._use_tensor_cores

    @property
    def resolved_backend(self) -> str:
        """The backend that ``plan`` chose for "auto": "fa2" for every decode, whose kernel all backends have."""
        return self._module_backend() if self._backend in ("auto", "fa2", "fa3") else self._backend

    @flashinfer_api(trace=None)
    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *deprecated_positional_args: Any,
        **kwargs: Any,
    ) -> None:
        r"""Prepare ``run`` for a batch: select the module, split the work, copy the page tables.

        Parameters
        ----------
        indptr : torch.Tensor
            ``(batch_size + 1,)``; request ``i`` owns the pages ``indices[indptr[i]:indptr[i + 1]]``. On the host,
            nothing waits for the GPU; on the device, one copy to the host is made.
        indices : torch.Tensor
            ``(>= indptr[-1],)`` pages. What is int32 on a GPU already is read there by ``run``: write to none of these
            arrays then until the next plan. Others are copied here.
        last_page_len : torch.Tensor
            ``(batch_size,)`` entries in use of each request's last page, from 1 to ``page_size``.
        num_qo_heads, num_kv_heads, head_dim, page_size : int
            ``num_qo_heads`` is a multiple of ``num_kv_heads``.
        pos_encoding_mode : str
            ``"NONE"``, ``"ROPE_LLAMA"`` (rotate q and k here) or ``"ALIBI"``.
        window_left : int
            Keys left of the query's own that are visible, -1 for all.
        window_right : int
            0; anything else is a ``NotImplementedError``.
        logits_soft_cap : Optional[float]
            ``cap * tanh(logit / cap)``; None or 0 for none.
        q_data_type, kv_data_type, o_data_type, data_type : Union[str, torch.dtype, None]
            ``q_data_type`` is ``"float16"`` unless given; the other two follow it. ``data_type`` is that of keys and
            values where ``kv_data_type`` is None.
        sm_scale : Optional[float]
            1 / sqrt(head_dim) if None.
        rope_scale, rope_theta : Optional[float]
            1 and 1e4 if None.
        non_blocking : bool
            Whether copies to the device may overlap with what the host does next.
        block_tables : Optional[torch.Tensor]
            Kept as ``_block_tables``.
        seq_lens : Optional[torch.Tensor]
            ``(batch_size,)`` keys of each request, instead of what ``last_page_len`` says.
        fixed_split_size : Optional[int]
            Pages that one piece of work covers. With it, or with ``disable_split_kv``, the result of a request does not
            depend on the others, to the last bit.
        disable_split_kv : bool
            Never divide the keys of a request.
        q_len_per_req : int
            Query tokens of each request, its last ones; they see each other causally. More than 1 needs tensor cores.
        """
        extra = len(deprecated_positional_args)
        if extra:
            if extra > len(_LEGACY_OPTIONS):
                raise TypeError(
                    f"{self._op}.plan: options by position must be at most {len(_LEGACY_OPTIONS)}, got {extra}"
                )
            warnings.warn(
                f"{self._op}.plan: {', '.join(_LEGACY_OPTIONS[:extra])} must be given by keyword, got positionally",
                DeprecationWarning,
                stacklevel=2,
            )
            for name, value in zip(_LEGACY_OPTIONS, deprecated_positional_args, strict=False):
                if name in kwargs:
                    raise TypeError(f"{self._op}.plan: got multiple values for argument {name!r}")
                kwargs[name] = value
        self._plan_impl(indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, **kwargs)

    @explain_type_errors(name="plan")
    def _plan_impl(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        window_right: int = 0,
        logits_soft_cap: Optional[float] = None,
        q_data_type: Optional[Union[str, torch.dtype]] = "float16",
        kv_data_type: Optional[Union[str, torch.dtype]] = None,
        o_data_type: Optional[Union[str, torch.dtype]] = None,
        data_type: Optional[Union[str, torch.dtype]] = None,
        sm_scale: Optional[float] = None,
        rope_scale: Optional[float] = None,
        rope_theta: Optional[float] = None,
        non_blocking: bool = True,
        block_tables: Optional[torch.Tensor] = None,
        seq_lens: Optional[torch.Tensor] = None,
        fixed_split_size: Optional[int] = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
    ) -> None:
        op = f"{self._op}.plan"
        if window_right != 0:
            raise NotImplementedError(f"{op}: window_right must be 0 (fa2 has no right window), got {window_right}")
        dtypes = resolve_dtypes(op, q_data_type, kv_data_type, o_data_type, data_type)
        self._check_alignment()
        check_options(self, op, q_len_per_req, fixed_split_size)
        batch_size, num_indices = last_page_len.shape[0], indices.shape[0]
        check_buffers(self, op, batch_size, num_indices)
        is_exact = fixed_split_size is not None or disable_split_kv or dtypes.kv is torch.uint8
        indptr_host, kv_lens = host_lengths(op, indptr, last_page_len, seq_lens, page_size, q_len_per_req, is_exact)
        check_indices(op, "indices", num_indices, indptr_host)
        self._backend = resolve_backend(op, self._backend)
        if seq_lens is not None and self._device_kind == "cpu":  # the CPU validates the page ids of all seq_lens keys
            last_page_len = last_page_lens(kv_lens, indptr_host, page_size)  # type: ignore[arg-type]  # both are arrays

        self._plan_info = None  # the state of the old plan is replaced below; if that fails, no valid plan remains
        store_tables(self, indptr, indices, last_page_len, non_blocking)
        store_options(
            self,
            batch_size=batch_size,
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            q_len_per_req=q_len_per_req,
            dtypes=dtypes,
            options=AttentionOptions(pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta),
        )
        self._block_tables = block_tables
        self._planned = DecodePlan(indptr_host, kv_lens, fixed_split_size or -1, disable_split_kv or self._is_nvfp4)
        self._cached_module = module_of(self)
        plan_work(self)

    def workspace_size(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: Optional[float] = None,
        q_data_type: Optional[Union[str, torch.dtype]] = "float16",
        kv_data_type: Optional[Union[str, torch.dtype]] = None,
        o_data_type: Optional[Union[str, torch.dtype]] = None,
        data_type: Optional[Union[str, torch.dtype]] = None,
        sm_scale: Optional[float] = None,
        rope_scale: Optional[float] = None,
        rope_theta: Optional[float] = None,
        block_tables: Optional[torch.Tensor] = None,
        seq_lens: Optional[torch.Tensor] = None,
        fixed_split_size: Optional[int] = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
    ) -> tuple[int, int]:
        """Return the bytes of float and of int workspace that ``plan`` with the same arguments needs, without planning.

        Returns
        -------
        Tuple[int, int]
        """
        op = f"{self._op}.workspace_size"
        dtypes = resolve_dtypes(op, q_data_type, kv_data_type, o_data_type, data_type)
        self._check_alignment()
        check_options(self, op, q_len_per_req, fixed_split_size)
        check_buffers(self, op, len(last_page_len), len(indices))
        is_exact = fixed_split_size is not None or disable_split_kv or dtypes.kv is torch.uint8
        indptr_host, kv_lens = host_lengths(op, indptr, last_page_len, seq_lens, page_size, q_len_per_req, is_exact)
        check_indices(op, "indices", indices.shape[0], indptr_host)
        resolve_backend(op, self._backend)
        probe = object.__new__(type(self))
        probe.__dict__.update(self.__dict__)
        store_options(
            probe,
            batch_size=len(last_page_len),
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            q_len_per_req=q_len_per_req,
            dtypes=dtypes,
            options=AttentionOptions(pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta),
        )
        probe._planned = DecodePlan(indptr_host, kv_lens, fixed_split_size or -1, disable_split_kv or probe._is_nvfp4)
        float_bytes, int_bytes = module_of(probe).workspace_size(*native_arguments(probe))
        return int(float_bytes), int(int_bytes)

    @flashinfer_api(trace=batch_decode_trace)
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
        q_len_per_req: Optional[int] = None,
        skip_softmax_threshold_scale_factor: Optional[float] = None,
        kv_cache_sf: Optional[PagedCache] = None,
    ) -> Result:
        r"""Compute attention for the planned batch.

        Parameters
        ----------
        q : torch.Tensor
            ``(batch_size * q_len_per_req, num_qo_heads, head_dim)``, request after request.
        paged_kv_cache : Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]
            ``(num_pages, 2, page_size, num_kv_heads, head_dim)`` with keys before values, or a tuple of two without the
            second dimension; heads before entries with ``"HND"``. Without the page dimension, pages hold one token.
        *args
            Parameters of a variant given as ``jit_args``; with 8-bit queries, scales of q, k and v, per head or not.
        q_scale, k_scale, v_scale : Union[float, torch.Tensor, None]
            Calibration scales: value = stored * scale.
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
        q_len_per_req : Optional[int]
            Deprecated: ``plan`` takes it.
        kv_cache_sf : Optional[Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]]
            Scale factors of a uint8 (NVFP4) cache, one e4m3 number for 16 elements, in the form of the cache.

        Returns
        -------
        Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]
            ``(tokens, num_qo_heads, head_dim)``, and the LSE. A request without keys has output 0 and LSE -inf.
        """
        if not (
            args or window_left is not None or sinks is not None or q_len_per_req is not None or kv_cache_sf is not None
        ):
            is_pair = type(paged_kv_cache) is tuple and len(paged_kv_cache) == 2
            keys, values = paged_kv_cache if is_pair else (paged_kv_cache, None)  # type: Any, Any
            result = self._repeat(q, keys, values, q_scale, k_scale, v_scale, out, lse, return_lse, enable_pdl)
            if result is not None:
                return result
        return self._run_alone(
            q, paged_kv_cache, args, q_scale, k_scale, v_scale, out, lse, return_lse, enable_pdl, window_left, sinks,
            q_len_per_req, kv_cache_sf,
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
        q_len_per_req: Optional[int],
        kv_cache_sf: Optional[PagedCache],
    ) -> Result:
        """Validate the arguments of ``run`` and launch, while no other call on this wrapper is under way."""
        op = self._op
        self._require_plan()
        k, v = unpack_paged_cache(op, paged_kv_cache, self._layout)
        self._check_dtypes(q, k)
        if q_len_per_req is not None:
            self._check_q_len(q, q_len_per_req)
        if k.shape[1:3] != self._page_shape:
            raise ArgumentError(
                f"{op}: keys must have {self._kv_layout} pages of {self._page_size} tokens by {self._num_kv_heads} "
                f"heads (as planned), got shape {tuple(k.shape)}"
            )
        if window_left is not None and window_left != self._window_left:
            raise ArgumentError(f"{op}: window_left must be {self._window_left} (as planned), got {window_left}")
        if not self._use_tensor_cores and isinstance(paged_kv_cache, tuple) and k.stride() != v.stride():
            raise ArgumentError(
                f"{op}: keys and values must have identical strides without use_tensor_cores=True, got {k.stride()} "
                f"and {v.stride()}"
            )
        factors = scale_factors(op, k, v, kv_cache_sf, self._layout, True) if self._is_nvfp4 else ()
        return attend(
            self, q, k, v, args, factors, q_scale, k_scale, v_scale, out, lse, return_lse, enable_pdl, sinks=sinks
        )

    def _state(self) -> DecodeState:
        return DecodeState.of(self)

    def _new_plan(self) -> tuple[Any, ...]:
        plan = plan_and_table(self)
        return (*plan, self._qo_indptr_buf) if self._use_tensor_cores else plan

    def _expected_rows(self) -> int:
        """Return the rows of q from the current page table, which serving engines may replace without a ``plan``."""
        return self._paged_kv_last_page_len_buf.shape[0] * self._planned_q_len  # type: ignore[union-attr, operator]

    def _refuse_query(self, q: torch.Tensor) -> None:
        requests = self._paged_kv_last_page_len_buf.shape[0]  # type: ignore[union-attr]
        raise ArgumentError(
            f"{self._op}.run: q must have {requests} * {self._planned_q_len} rows (batch size * q_len_per_req) and "
            f"{self._num_qo_heads} query heads (as planned), got {q.shape[0]} rows and {q.shape[1]} heads"
        )

    def _check_q_len(self, q: torch.Tensor, q_len_per_req: int) -> None:
        warnings.warn(f"{self._op}.run: q_len_per_req is deprecated, plan() knows it", DeprecationWarning, stacklevel=3)
        if q.shape[0] != self._paged_kv_last_page_len_buf.shape[0] * q_len_per_req:  # type: ignore[union-attr]
            raise ArgumentError(
                f"{self._op}.run: q_len_per_req must be {self._planned_q_len} (as planned), got {q_len_per_req}"
            )

    def _native_call(self, launch: Launch, enable_pdl: bool) -> tuple[Any, str, tuple[Any, ...]]:
        q, k, v, out, lse, tensors, scalars = launch
        slopes = alibi_slopes(self._num_qo_heads, q.device) if self._pos_encoding == ALIBI else None
        if self._jit is not None:
            known = {
                "maybe_custom_mask": self._custom_mask_buf,
                "maybe_mask_indptr": self._mask_indptr_buf,
                "maybe_alibi_slopes": slopes,
            }
            extras: tuple[Any, ...] = (*self._jit.all_tensors(tensors, known), *self._jit.typed(scalars))
        else:
            numbers = builtin_scalars(self, scalars[0])
            if self._use_tensor_cores:
                extras = (None, None, slopes, None, None, None, *tensors, *numbers, 0)
            else:
                extras = (slopes, *tensors, *numbers)
        where = (self._float_workspace_buffer, self._int_workspace_buffer, self._plan_info, q, k, v)
        table = (self._paged_kv_indptr_buf, self._paged_kv_indices_buf, self._paged_kv_last_page_len_buf, out, lse)
        tail = (self._layout, self._window_left, enable_pdl, *extras)
        if not self._use_tensor_cores:
            return self._cached_module, "run", (*where, *table, *tail)
        mask_mode = CAUSAL if self._planned_q_len > 1 else NON_CAUSAL  # type: ignore[operator]
        return self._cached_module, "paged_run", (*where, self._qo_indptr_buf, *table, mask_mode, *tail)

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
        pos_encoding_mode: str = "NONE",
        q_scale: Scale = None,
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
        self._require_plan()
        planned = self._pos_encoding, self._window_left, self._logits_soft_cap > 0
        self._set_parameters(
            AttentionOptions(pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta)
        )
        if planned != (self._pos_encoding, self._window_left, self._logits_soft_cap > 0):
            window = planned[1]
            plan_again(self, window < 0 or 0 <= window_left <= window)
        return self.run(q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse)

    def forward_return_lse(
        self,
        q: torch.Tensor,
        paged_kv_cache: PagedCache,
        pos_encoding_mode: str = "NONE",
        q_scale: Scale = None,
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
            q, paged_kv_cache, pos_encoding_mode, q_scale, k_scale, v_scale, window_left, logits_soft_cap, sm_scale,
            rope_scale, rope_theta, return_lse=True,
        )  # fmt: skip


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """Variant of :class:`BatchDecodeWithPagedKVCacheWrapper` for capture in a CUDA graph.

    Parameters
    ----------
    workspace_buffer : torch.Tensor
        ``float_workspace_buffer`` of :class:`BatchDecodeWithPagedKVCacheWrapper`.
    indptr_buffer, indices_buffer, last_page_len_buffer : torch.Tensor
        int32; the batch size is fixed by the last of them.
    kv_layout : str
    use_tensor_cores : bool
    """

    def __init__(
        self,
        workspace_buffer: torch.Tensor,
        indptr_buffer: torch.Tensor,
        indices_buffer: torch.Tensor,
        last_page_len_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        super().__init__(
            workspace_buffer,
            kv_layout,
            use_cuda_graph=True,
            use_tensor_cores=use_tensor_cores,
            paged_kv_indptr_buffer=indptr_buffer,
            paged_kv_indices_buffer=indices_buffer,
            paged_kv_last_page_len_buffer=last_page_len_buffer,
        )
