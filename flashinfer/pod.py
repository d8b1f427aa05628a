# SPDX-License-Identifier: Apache-2.0
"""POD attention: prefill together with decoding.

Both parts share one launch where that is faster: tensor cores work for prefill while the keys of the decoding part are
loaded. A shared launch needs 16-bit types, a head_dim of at most 128, no RoPE, no custom mask, and enough prefill
queries to fill the GPU. Otherwise the two parts are launched one after the other. On an SM90 GPU, prefill runs on the
Hopper kernels (backend ``fa3``) where these serve it, in either case; decoding has one kernel. A batch with
requests of both kinds in one cache is a single launch too: :class:`flashinfer.BatchPrefillWithPagedKVCacheWrapper`.
"""

from __future__ import annotations

import functools
from typing import Any, Optional, Sequence, Union

import numpy as np
import torch

from ._runtime.arch import get_device_sm_count
from ._runtime.checks import check_tensors
from ._runtime.dispatch import use_pdl
from ._runtime.errors import ArgumentError
from ._runtime.explain_error import explain_type_errors
from .api_logging import flashinfer_api
from .attention.call_records import aligned, is_launch_error
from .attention.composite_wrapper import CompositeWrapper
from .attention.kv_cache import PagedCache
from .attention.options import (
    ALIBI,
    CAUSAL,
    DECODE_TILE,
    NON_CAUSAL,
    alibi_slopes,
    default_scale,
    fa3_serves,
    layout_code,
    pos_encoding_code,
)
from .attention.scales import Scale, scale_output
from .attention.wrapper import Launch, PlannedWrapper
from .decode import BatchDecodeWithPagedKVCacheWrapper
from .jit.attention import gen_batch_pod_module, gen_pod_module
from .prefill import BatchPrefillWithPagedKVCacheWrapper, single_prefill_with_kv_cache
from .prefill.planning import choose_backend, store_mask
from .trace.templates.pod import batch_pod_trace, pod_trace

__all__ = ["BatchPODWithPagedKVCacheWrapper", "PODWithPagedKVCacheWrapper"]

Dtype = Union[str, torch.dtype]

_TILE = 128  # rows per prefill tile
_LEAST_TILES = 8  # prefill tiles per KV head from which Hopper kernels share a launch (Planner::LEAST_FUSED_TILES)
_is_compiling = torch.compiler.is_compiling


@functools.cache
def get_pod_module(*args: Any) -> Any:
    """Return the module that serves both parts, built and loaded on first use."""
    return gen_pod_module(*args).build_and_load()


@functools.cache
def get_batch_pod_module(*args: Any) -> Any:
    """Return the module of the batch wrapper, built and loaded on first use."""
    return gen_batch_pod_module(*args).build_and_load()


def _is_much(q: torch.Tensor, num_kv_heads: int, backend: str) -> bool:
    """Return True if there are enough prefill queries for a shared launch (``FusesLists`` of attention/plan/planner.h).

    Native code makes the exact decision. This estimate saves host time: if native code would decline to share a launch,
    two separate calls take less time on the host.
    """
    if not q.is_cuda or q.ndim != 3:
        return False
    least = _LEAST_TILES * num_kv_heads if backend == "fa3" else 3 * get_device_sm_count(q.device)
    return q.shape[0] * q.shape[1] >= least * _TILE


def _prepare(wrapper: PlannedWrapper, *args: Any, **kwargs: Any) -> tuple[Any, Launch]:
    """Return the result of ``run`` and the launch that fills it. The caller launches, and applies ``v_scale``."""
    wrapper._deferred = []
    wrapper._record = None  # with a record, run() would launch at once
    try:
        result = wrapper.run(*args, **kwargs)  # type: ignore[attr-defined]  # subclasses define run()
        return result, wrapper._deferred[0]
    finally:
        wrapper._deferred = None


def _launch_arguments(wrapper: PlannedWrapper, launch: Launch, enable_pdl: Optional[bool]) -> tuple[Any, ...]:
    """Return the arguments of the module's ``paged_run``."""
    _, name, args = wrapper._native_call(launch, use_pdl(launch.q, enable_pdl))
    assert name == "paged_run"
    return args


class _PrefillPart(BatchPrefillWithPagedKVCacheWrapper):
    """Paged prefill whose mask may change after ``plan``."""

    _op = BatchPrefillWithPagedKVCacheWrapper._op

    @flashinfer_api(trace=None)  # logged like plan() and run(): a replay of the log calls it between them
    def plan_mask(
        self, causal: bool, custom_mask: Optional[torch.Tensor], packed_custom_mask: Optional[torch.Tensor]
    ) -> None:
        """Plan the same batch with another mask."""
        self._plan_info = None  # if planning fails, no valid plan remains
        planned = self._planned
        qo_lens = np.diff(planned.qo_indptr)
        store_mask(self, f"{self._op}.plan", custom_mask, packed_custom_mask, qo_lens, planned.kv_lens, True)
        self._causal = causal
        self._backend = choose_backend(self, *self._module_key[:3])
        self._select_module(*self._module_key)
        self._plan_work()


class _DecodePart(BatchDecodeWithPagedKVCacheWrapper):
    _op = BatchDecodeWithPagedKVCacheWrapper._op

    def _module_backend(self) -> str:
        """Return the backend whose prefill kernels are in the module too: the prompt may share a launch."""
        dtypes, dim = self._dtypes, self._head_dim
        is_plain = dtypes.q is dtypes.kv and self._num_qo_heads <= DECODE_TILE * self._num_kv_heads
        serves = is_plain and fa3_serves(self.device, dtypes.q, dtypes.kv, dtypes.o, dim, dim, self._pos_encoding)
        return "fa3" if serves else "fa2"


class PODWithPagedKVCacheWrapper(CompositeWrapper):
    r"""POD attention: prefill of one request and decode of a batch, in one call.

    Parameters
    ----------
    float_workspace_buffer : torch.Tensor
        Scratch of both parts; its device is that of the wrapper.
    kv_layout : str
        Layout of the paged cache: ``"NHD"`` or ``"HND"``.
    use_cuda_graph, paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer
        As for :class:`flashinfer.BatchDecodeWithPagedKVCacheWrapper`.
    jit_args : Optional[List]
        Ignored.

    Examples
    --------
    >>> wrapper = flashinfer.PODWithPagedKVCacheWrapper(torch.empty(32 << 20, dtype=torch.uint8))
    >>> pages = torch.arange(8, dtype=torch.int32)
    >>> wrapper.plan(pages, pages[:7], torch.full((7,), 10, dtype=torch.int32), 32, 8, 64, 16)
    >>> q_p, kv_p = torch.randn(20, 32, 64).half(), torch.randn(20, 8, 64).half()
    >>> q_d, cache = torch.randn(7, 32, 64).half(), torch.randn(7, 2, 16, 8, 64).half()
    >>> out_p, out_d = wrapper.run(q_p, kv_p, kv_p, q_d, cache, causal_p=True)
    """

    @flashinfer_api(trace=None)
    @explain_type_errors
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        paged_kv_indptr_buffer: Optional[torch.Tensor] = None,
        paged_kv_indices_buffer: Optional[torch.Tensor] = None,
        paged_kv_last_page_len_buffer: Optional[torch.Tensor] = None,
        jit_args: Optional[Sequence[Any]] = None,
    ) -> None:
        self._backend, self._num_kv_heads = "fa2", 1  #: set by each plan
        self._decode = _DecodePart(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph=use_cuda_graph,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=paged_kv_indptr_buffer,
            paged_kv_indices_buffer=paged_kv_indices_buffer,
            paged_kv_last_page_len_buffer=paged_kv_last_page_len_buffer,
        )
        self.device = float_workspace_buffer.device
        self._lock.follow_streams(self.device)

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._decode.is_cuda_graph_enabled

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        """Replace the workspaces. ``plan`` must be called again before ``run``."""
        self._decode.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

    @flashinfer_api(trace=None)
    @explain_type_errors
    def plan(
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
        q_data_type: Dtype = "float16",
        kv_data_type: Optional[Dtype] = None,
        data_type: Optional[Dtype] = None,
        sm_scale: Optional[float] = None,
        rope_scale: Optional[float] = None,
        rope_theta: Optional[float] = None,
        non_blocking: bool = True,
    ) -> None:
        """Plan the decoding part; arguments as for :class:`flashinfer.BatchDecodeWithPagedKVCacheWrapper`."""
        self._decode.plan(
            indptr,
            indices,
            last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
            pos_encoding_mode=pos_encoding_mode,
            window_left=window_left,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
            data_type=data_type,
            sm_scale=sm_scale,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
            non_blocking=non_blocking,
        )
        self._backend, self._num_kv_heads = self._decode._module_backend(), num_kv_heads

    begin_forward = plan

    @flashinfer_api(trace=pod_trace)
    def run(
        self,
        q_p: torch.Tensor,
        k_p: torch.Tensor,
        v_p: torch.Tensor,
        q_d: torch.Tensor,
        paged_kv_cache_d: PagedCache,
        custom_mask_p: Optional[torch.Tensor] = None,
        packed_custom_mask_p: Optional[torch.Tensor] = None,
        causal_p: bool = False,
        kv_layout_p: str = "NHD",
        pos_encoding_mode_p: str = "NONE",
        sm_scale_p: Optional[float] = None,
        window_left_p: int = -1,
        rope_scale_p: Optional[float] = None,
        rope_theta_p: Optional[float] = None,
        return_lse_p: bool = False,
        custom_mask_d: Optional[torch.Tensor] = None,
        packed_custom_mask_d: Optional[torch.Tensor] = None,
        causal_d: bool = False,
        kv_layout_d: str = "NHD",
        pos_encoding_mode_d: str = "NONE",
        sm_scale_d: Optional[float] = None,
        window_left_d: int = -1,
        rope_scale_d: Optional[float] = None,
        rope_theta_d: Optional[float] = None,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        return_lse_d: bool = False,
        use_fp16_qk_reduction: bool = False,
        enable_pdl: Optional[bool] = None,
        *args: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute attention of both parts.

        Parameters
        ----------
        q_p, k_p, v_p : torch.Tensor
            The request that prefills, dense: arguments of :func:`flashinfer.single_prefill_with_kv_cache`, as are all
            that end in ``_p``.
        q_d : torch.Tensor
            ``(batch_size, num_qo_heads, head_dim)``.
        paged_kv_cache_d : Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]
            Cache of the requests that decode.
        q_scale, k_scale, v_scale : Optional[Union[float, torch.Tensor]]
            Scales of the decoding part.
        use_fp16_qk_reduction : bool
            Ignored: products are always accumulated in float32.
        enable_pdl : Optional[bool]
            Programmatic dependent launch; None enables it where the device supports it.
        *args
            Not read.

        All that end in ``_d`` are ignored: the plan says how to decode. No LSE is returned.

        Returns
        -------
        Tuple[torch.Tensor, torch.Tensor]
            Outputs of the two parts.
        """
        check_tensors("PODWithPagedKVCacheWrapper.run", q_p=q_p)
        scales: dict[str, Any] = {"q_scale": q_scale, "k_scale": k_scale, "enable_pdl": enable_pdl}
        if (
            not _is_compiling()
            and _is_much(q_p, self._num_kv_heads, self._backend)
            and custom_mask_p is packed_custom_mask_p is None
            and self._shares_module(q_p, k_p, v_p, pos_encoding_mode_p)
        ):
            out_p = torch.empty_like(q_p, memory_format=torch.contiguous_format)
            out_d, launch = _prepare(self._decode, q_d, paged_kv_cache_d, **scales)
            slopes = alibi_slopes(q_p.shape[1], q_p.device) if self._decode._pos_encoding == ALIBI else None
            tensors = (None, None, slopes, None, None, None)
            scale = default_scale("PODWithPagedKVCacheWrapper.run", sm_scale_p, q_p.shape[2])
            numbers = (0.0, scale, 1.0 / (rope_scale_p or 1.0), 1.0 / (rope_theta_p or 1e4), 0)
            layout = layout_code("PODWithPagedKVCacheWrapper", kv_layout_p)
            mask_mode = CAUSAL if causal_p else NON_CAUSAL
            try:
                self._decode._cached_module.single_pair_run(
                    *(q_p, k_p, v_p, None, out_p, None, mask_mode, layout, window_left_p, *tensors, *numbers),
                    *_launch_arguments(self._decode, launch, enable_pdl),
                )
                if v_scale is not None:
                    scale_output("PODWithPagedKVCacheWrapper.run", launch.out, v_scale)
                return out_p, out_d
            except RuntimeError as error:
                is_aligned = launch.aligned() is launch and all(aligned(x) is x for x in (q_p, k_p, v_p))
                if is_aligned or not is_launch_error(error):
                    raise
        out_p = single_prefill_with_kv_cache(
            q_p,
            k_p,
            v_p,
            custom_mask=custom_mask_p,
            packed_custom_mask=packed_custom_mask_p,
            causal=causal_p,
            kv_layout=kv_layout_p,
            pos_encoding_mode=pos_encoding_mode_p,
            use_fp16_qk_reduction=use_fp16_qk_reduction,
            sm_scale=sm_scale_p,
            window_left=window_left_p,
            rope_scale=rope_scale_p,
            rope_theta=rope_theta_p,
        )
        out_d = self._decode.run(q_d, paged_kv_cache_d, v_scale=v_scale, **scales)
        return out_p, out_d

    def _shares_module(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pos_encoding_mode: str) -> bool:
        """Return True if the module of the decoding part can serve the prefill part too."""
        decode = self._decode
        decode._require_plan()
        return (
            q.dtype is k.dtype is v.dtype is decode._cached_q_data_type is decode._cached_kv_data_type
            and q.ndim == k.ndim == v.ndim == 3
            and q.shape[2] == k.shape[2] == v.shape[2] == decode._head_dim
            and pos_encoding_code("PODWithPagedKVCacheWrapper", pos_encoding_mode) == decode._pos_encoding
        )

    def end_forward(self) -> None:
        """Do nothing; published callers call it."""


class BatchPODWithPagedKVCacheWrapper(CompositeWrapper):
    r"""POD attention: prefill of a batch and decode of a batch, in one call; both over paged caches.

    Parameters
    ----------
    float_workspace_buffer : torch.Tensor
        Scratch; each part gets half of it. Its device is that of the wrapper.
    kv_layout : str
        ``"NHD"`` or ``"HND"``.
    """

    @flashinfer_api(trace=None)
    @explain_type_errors
    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        flat = float_workspace_buffer.view(-1).view(torch.uint8)
        half = flat.numel() // 32 * 16
        self._prefill = _PrefillPart(flat[:half], kv_layout)
        self._decode = _PrefillPart(flat[half:], kv_layout)
        self._is_planned: Optional[bool] = None  #: None: never planned; False: the last plan failed
        self._planned_causal: Optional[bool] = None  #: causal flag of the prefill plan; None: custom mask
        self.device = float_workspace_buffer.device
        self._lock.follow_streams(self.device)

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return False

    @flashinfer_api(trace=None)
    @explain_type_errors
    def plan(
        self,
        qo_indptr_p: torch.Tensor,
        kv_indptr_p: torch.Tensor,
        kv_indices_p: torch.Tensor,
        last_page_len_p: torch.Tensor,
        qo_indptr_d: torch.Tensor,
        kv_indptr_d: torch.Tensor,
        kv_indices_d: torch.Tensor,
        last_page_len_d: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        q_data_type: Dtype = "float16",
        kv_data_type: Optional[Dtype] = None,
        data_type: Optional[Dtype] = None,
        sm_scale: Optional[float] = None,
        rope_scale: Optional[float] = None,
        rope_theta: Optional[float] = None,
        non_blocking: bool = True,
    ) -> None:
        """Plan both parts: page tables as for :class:`flashinfer.BatchPrefillWithPagedKVCacheWrapper`, one for each."""
        kv_data_type = kv_data_type if kv_data_type is not None else data_type
        sizes = (num_qo_heads, num_kv_heads, head_dim, page_size)
        options: dict[str, Any] = {
            "pos_encoding_mode": pos_encoding_mode,
            "window_left": window_left,
            "q_data_type": q_data_type,
            "kv_data_type": kv_data_type,
            "sm_scale": sm_scale,
            "rope_scale": rope_scale,
            "rope_theta": rope_theta,
            "non_blocking": non_blocking,
        }
        self._is_planned = False  # both parts must be planned
        self._prefill.plan(qo_indptr_p, kv_indptr_p, kv_indices_p, last_page_len_p, *sizes, **options)
        if num_qo_heads <= DECODE_TILE * num_kv_heads:  # requests that decode are in the list of the decode kernel
            self._decode._requested_backend = self._prefill._backend  # a shared launch is one of one module
        else:
            self._decode._requested_backend = "auto"
        self._decode.plan(qo_indptr_d, kv_indptr_d, kv_indices_d, last_page_len_d, *sizes, **options)
        self._planned_causal = False
        self._is_planned = True

    begin_forward = plan

    def _plan_mask(
        self, causal: bool, custom_mask: Optional[torch.Tensor], packed_custom_mask: Optional[torch.Tensor]
    ) -> None:
        """Plan the prefill part again if it was planned with another mask."""
        is_custom = custom_mask is not None or packed_custom_mask is not None
        if is_custom or self._planned_causal is not causal:
            self._planned_causal = None
            self._prefill.plan_mask(causal, custom_mask, packed_custom_mask)
            self._planned_causal = None if is_custom else causal

    @flashinfer_api(trace=batch_pod_trace)
    def run(
        self,
        q_p: torch.Tensor,
        paged_kv_cache_p: PagedCache,
        q_d: torch.Tensor,
        paged_kv_cache_d: PagedCache,
        custom_mask_p: Optional[torch.Tensor] = None,
        packed_custom_mask_p: Optional[torch.Tensor] = None,
        causal_p: bool = False,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        return_lse: bool = False,
        use_fp16_qk_reduction: bool = False,
        enable_pdl: Optional[bool] = None,
    ) -> Union[
        tuple[torch.Tensor, torch.Tensor],
        tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    ]:
        """Compute attention of both parts.

        Parameters
        ----------
        q_p, q_d : torch.Tensor
            Queries of the parts, ``(rows, num_qo_heads, head_dim)``.
        paged_kv_cache_p, paged_kv_cache_d : Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]
            Their caches.
        custom_mask_p, packed_custom_mask_p, causal_p
            What the part that prefills sees. The first call with another value of ``causal_p``, and every call with a
            mask, plans that part anew.
        q_scale, k_scale, v_scale : Optional[Union[float, torch.Tensor]]
            Scales of both parts.
        return_lse : bool
            Whether to return the LSE too.
        use_fp16_qk_reduction : bool
            Ignored: products are always accumulated in float32.
        enable_pdl : Optional[bool]
            Programmatic dependent launch; None enables it where the device supports it.

        Returns
        -------
        outputs : Tuple[torch.Tensor, torch.Tensor]
            Those of the two parts.
        lses : Tuple[torch.Tensor, torch.Tensor]
            With ``return_lse``.
        """
        if not self._is_planned:
            lost = "" if self._is_planned is None else " (the last one failed)"
            raise ArgumentError(
                f"BatchPODWithPagedKVCacheWrapper.run: plan() must be called before run(), got no plan{lost}"
            )
        self._plan_mask(bool(causal_p), custom_mask_p, packed_custom_mask_p)
        options: dict[str, Any] = {
            "q_scale": q_scale,
            "k_scale": k_scale,
            "return_lse": return_lse,
            "enable_pdl": enable_pdl,
        }
        shares_module = self._prefill._cached_module is self._decode._cached_module
        if (
            _is_compiling()
            or not shares_module
            or not _is_much(q_p, self._prefill._num_kv_heads, self._prefill._backend)
        ):
            result_p = self._prefill.run(q_p, paged_kv_cache_p, v_scale=v_scale, **options)
            result_d = self._decode.run(q_d, paged_kv_cache_d, v_scale=v_scale, **options)
        else:
            result_p, launch_p = _prepare(self._prefill, q_p, paged_kv_cache_p, **options)
            result_d, launch_d = _prepare(self._decode, q_d, paged_kv_cache_d, **options)
            self._launch(launch_p, launch_d, enable_pdl)
            if v_scale is not None:
                scale_output("BatchPODWithPagedKVCacheWrapper.run", launch_p.out, v_scale)
                scale_output("BatchPODWithPagedKVCacheWrapper.run", launch_d.out, v_scale)
        if not return_lse:
            return result_p, result_d
        (out_p, lse_p), (out_d, lse_d) = result_p, result_d
        return (out_p, out_d), (lse_p, lse_d)

    def _launch(self, launch_p: Launch, launch_d: Launch, enable_pdl: Optional[bool]) -> None:
        try:
            self._decode._cached_module.paged_pair_run(
                *_launch_arguments(self._prefill, launch_p, enable_pdl),
                *_launch_arguments(self._decode, launch_d, enable_pdl),
            )
        except RuntimeError as error:
            is_aligned = launch_p.aligned() is launch_p and launch_d.aligned() is launch_d
            if is_aligned or not is_launch_error(error):
                raise
            self._prefill._launch(launch_p, enable_pdl)
            self._decode._launch(launch_d, enable_pdl)

    def end_forward(self) -> None:
        """Do nothing; published callers call it."""
