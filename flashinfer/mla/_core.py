# SPDX-License-Identifier: Apache-2.0
"""MLA (latent attention, with the projections absorbed into the queries) over a paged cache."""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from numbers import Real
from typing import Any, Optional, Union

import numpy as np
import torch

from .._compat.unsupported_attention import MLA_NAMES
from .._runtime.allocation import allocate
from .._runtime.arch import get_compute_capability
from .._runtime.checks import canonicalize_torch_dtype, check_tensors, narrowed
from .._runtime.codegen_wrapper import compiler, is_traced
from .._runtime.errors import ArgumentError, GPUArchitectureError
from .._runtime.explain_error import explain_type_errors
from .._runtime.knobs import knobs
from .._runtime.probes import probes
from ..api_logging import flashinfer_api
from ..attention import streams
from ..attention.index_arrays import as_tensors, range_buffer, to_device, to_host
from ..attention.locks import CLOSED
from ..attention.options import CAUSAL, NON_CAUSAL, fa3_serves_mla
from ..attention.outputs import lse_buffer, output_buffer
from ..attention.wrapper import Launch, PlannedWrapper, run_planned
from ..jit.attention import gen_batch_mla_module
from ..trace.templates.mla import mla_run_trace
from . import page_ids
from .call_state import MLAState
from .dimensions import MLAHeadDimensions as MLAHeadDimensions
from .dimensions import MLALayerDimensions as MLALayerDimensions
from .metadata import MLAPlanMetadata
from .plan_forms import Declared, plan_tables, split_query, with_sinks
from .scales import LatentScales

__all__ = ["BatchMLAPagedAttentionWrapper", "get_batch_mla_module"]

_KV_DTYPES = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float32)
_FP8 = torch.float8_e4m3fn
_HOPPER = 9
_SM90 = (9, 0)
_FA3_ROWS = 64  #: rows (query heads of all tokens) of a request from which on the Hopper kernels are faster
_PUBLISHED_NUMBERS = 18  #: numbers of _plan_info
_is_compiling = torch.compiler.is_compiling


@functools.cache
def get_batch_mla_module(backend: str, *args: Any, device: str = "cuda") -> Any:
    """Return the MLA module, built and loaded on first use. Arguments are those of ``gen_batch_mla_module``."""
    return gen_batch_mla_module(backend, *args, device=device).build_and_load()


class BatchMLAPagedAttentionWrapper(PlannedWrapper):
    r"""MLA of DeepSeek's models over their compressed (latent) cache.

    All heads share one key for each token, the concatenation of ``ckv`` and ``kpe``, and ``ckv`` is its value too:
    ``out[h] = sum_j softmax_j(sm_scale * (q_nope[h] . ckv_j + q_pe[h] . kpe_j)) ckv_j``.

    Parameters
    ----------
    float_workspace_buffer : torch.Tensor
        Scratch, any dtype, aligned to 16 bytes; 128 MiB are plenty. Its device is that of the wrapper.
    use_cuda_graph : bool
        Whether ``run`` will be captured; then the next four arguments are needed and fix the batch size.
    qo_indptr, kv_indptr, kv_indices, kv_len_arr : Optional[torch.Tensor]
        int32 buffers that ``plan`` writes to in CUDA graph mode: ``(batch_size + 1,)`` twice, as many page ids as there
        may ever be, ``(batch_size,)``.
    backend : str
        ``"auto"`` (the faster one), ``"fa2"``, or ``"fa3"``: kernels for SM90 only, for head dimensions 512 and 64 or
        0, and caches of the queries' dtype or, with bfloat16 queries, float8_e4m3fn.

    Examples
    --------
    One new token of two requests with 20 and 7 keys.

    >>> wrapper = flashinfer.BatchMLAPagedAttentionWrapper(torch.empty(32 << 20, dtype=torch.uint8))
    >>> rows, pages = torch.tensor([0, 1, 2]), torch.tensor([0, 2, 3])
    >>> types = (torch.bfloat16, torch.bfloat16)
    >>> wrapper.plan(rows, pages, torch.arange(3), torch.tensor([20, 7]), 16, 512, 64, 16, True, 192**-0.5, *types)
    >>> q_nope, q_pe = torch.randn(2, 16, 512).bfloat16(), torch.randn(2, 16, 64).bfloat16()
    >>> ckv, kpe = torch.randn(3, 16, 512).bfloat16(), torch.randn(3, 16, 64).bfloat16()
    >>> wrapper.run(q_nope, q_pe, ckv, kpe).shape
    torch.Size([2, 16, 512])
    """

    _locked_inside = ("run",)

    _blackwell_auto_fallback_warned = False
    _declared: Optional[Declared] = None  # what plan declared of the calls of run; None: the older form of both
    _enable_pdl: Optional[bool] = None
    #: Row offsets, page offsets and key counts of the requests.
    _page_ranges: Optional[tuple[np.ndarray, np.ndarray, np.ndarray]] = None
    #: Numbers of the native plan. `_plan_info` has the published ones, through which engines find arrays of the plan.
    _native_plan_info: Any = None

    _launched = ("q_nope", "ckv_cache", "kpe_cache", "out", "lse", "q_pe")
    _is_paged = True
    _is_capturable = True  # even without use_cuda_graph: kernels read the tables through the plan

    @flashinfer_api(trace=None)
    @explain_type_errors
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: Optional[torch.Tensor] = None,
        kv_indptr: Optional[torch.Tensor] = None,
        kv_indices: Optional[torch.Tensor] = None,
        kv_len_arr: Optional[torch.Tensor] = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(
            float_workspace_buffer, "NHD", use_cuda_graph, self._resolve(float_workspace_buffer, backend), None
        )
        self._requested_backend = backend
        self._qo_indptr_buf = qo_indptr
        self._kv_indptr_buf = kv_indptr
        self._kv_indices_buf = kv_indices
        self._kv_len_arr_buf = kv_len_arr
        self._fixed_batch_size = 0
        self._max_total_num_rows: Optional[int] = None
        self._published = torch.empty(_PUBLISHED_NUMBERS, dtype=torch.int64, device="cpu")
        if use_cuda_graph:
            self._fixed_batch_size = self._check_graph_buffers()

    @classmethod
    def _resolve(cls, workspace: torch.Tensor, backend: str) -> str:
        op = cls.__name__
        is_blackwell = workspace.is_cuda and get_compute_capability(workspace.device)[0] >= 10
        if backend == "auto" and is_blackwell and not cls._blackwell_auto_fallback_warned:
            cls._blackwell_auto_fallback_warned = True
            warnings.warn(f"{op}: the kernels behind 'auto' are not Blackwell-native", UserWarning, stacklevel=4)
        if backend in ("auto", "fa2"):  # plan() replaces "auto" (_choose_backend)
            return "fa2"
        if backend == "cutlass":  # plan() and run() raise the error: it needs another GPU
            return backend
        if backend == "fa3":
            if workspace.is_cuda and get_compute_capability(workspace.device) == _SM90:
                return backend
            if not workspace.is_cuda and knobs.cpu_backends == "any":
                return "fa2"
            raise NotImplementedError(
                f"{op}: backend must be fa2 here, got 'fa3', which needs an SM90 device; usable: fa2"
            )
        raise ArgumentError(f"{op}: backend must be 'auto', 'fa2' or 'fa3', got {backend!r}")

    def _check_graph_buffers(self) -> int:
        names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
        self._require_graph_buffers(torch.int32, **{name: getattr(self, f"_{name}_buf") for name in names})
        batch_size = len(self._kv_len_arr_buf)  # type: ignore[arg-type]
        for name in names[:2]:
            length = len(getattr(self, f"_{name}_buf"))
            if length != batch_size + 1:
                raise ArgumentError(
                    f"{self._op}: {name} must have {batch_size + 1} elements (batch_size + 1), got {length}"
                )
        spans = sorted((b.data_ptr(), b.nbytes, n) for n in names if (b := getattr(self, f"_{n}_buf")).nbytes)
        for (begin, size, name), (after, _, other) in itertools.pairwise(spans):
            if begin + size > after:  # plan writes all of them
                raise ArgumentError(
                    f"{self._op}: {name} and {other} must not share memory (CUDA graph buffers), got {begin} to "
                    f"{begin + size} and {after} on"
                )
        return batch_size

    @flashinfer_api(trace=None)
    @explain_type_errors
    def plan(
        self,
        qo_indptr: Optional[torch.Tensor] = None,
        kv_indptr: Optional[torch.Tensor] = None,
        kv_indices: Optional[torch.Tensor] = None,
        kv_len_arr: Optional[torch.Tensor] = None,
        num_heads: Optional[int] = None,
        head_dim_ckv: Optional[int] = None,
        head_dim_kpe: Optional[int] = None,
        page_size: Optional[int] = None,
        causal: Optional[bool] = None,
        sm_scale: Optional[float] = None,
        q_data_type: Union[str, torch.dtype, None] = None,
        kv_data_type: Union[str, torch.dtype, None] = None,
        use_profiler: bool = False,
        *,
        metadata: Optional[MLAPlanMetadata] = None,
        cum_seq_lens_q: Optional[torch.Tensor] = None,
        block_tables: Optional[torch.Tensor] = None,
        seq_lens: Optional[torch.Tensor] = None,
        max_q_len: Optional[int] = None,
        query_layout: Optional[str] = None,
        kv_cache_layout: Optional[str] = None,
        lse_mode: str = "none",
        output_dtype: Optional[torch.dtype] = None,
        output_scale: str = "none",
        scale_mode: str = "default",
        skip_softmax: bool = False,
        enable_pdl: Optional[bool] = None,
        use_sinks: bool = False,
    ) -> None:
        """Plan a batch. Index arrays on the GPU are copied to the host in one transfer, which waits for the GPU.

        ``_plan_info`` then has 18 numbers, of which engines read: 1 and 15, the number of works; 2 and 13, the first
        row and the first key of each work; 14, the ends of their keys. In CUDA graph mode they may make ends smaller
        between ``plan`` and ``run``, also between replays: keys behind them are left out.

        Parameters
        ----------
        qo_indptr : torch.Tensor
            ``(batch_size + 1,)``: rows of the queries of each request.
        kv_indptr : torch.Tensor
            ``(batch_size + 1,)`` or longer: where the pages of each request begin in ``kv_indices``. One that is not
            longer has as many pages for each request as its keys need.
        kv_indices : torch.Tensor
            Page ids; may be longer than needed.
        kv_len_arr : torch.Tensor
            ``(batch_size,)``: keys of each request, 0 allowed.
        num_heads : int
            Query heads.
        head_dim_ckv, head_dim_kpe : int
            512 and 64, or 0 where positions are not encoded.
        page_size : int
            Tokens of a page.
        causal : bool
            Whether row ``i`` sees keys up to ``i + kv_len - qo_len`` only.
        sm_scale : float
            Softmax scale of the heads before absorption: ``1 / sqrt(128 + 64)``.
        q_data_type, kv_data_type : Union[str, torch.dtype]
            float16 or bfloat16; a float8_e4m3fn cache goes with bfloat16 queries.
        use_profiler : bool
            Whether ``run`` will be given a profiler buffer. Kernels here write no events into it.
        metadata : Optional[MLAPlanMetadata]
            All tables, instead of the first four arguments.
        cum_seq_lens_q, block_tables, seq_lens : Optional[torch.Tensor]
            Instead of the first four arguments: the fields of ``MLAPlanMetadata`` of these names.
        max_q_len : Optional[int]
            Most rows of a request; None: taken from ``cum_seq_lens_q``.
        query_layout, kv_cache_layout : Optional[str]
            What ``run`` will be given: "packed", one tensor of ``head_dim_ckv + head_dim_kpe`` columns, or "split", a
            pair. None: "packed" with ``metadata``; without it, whatever ``run`` is given.
        lse_mode : str
            "none", "base2" or "basee": the LSE that ``run`` may return. Binding with ``metadata`` or dense tables, or
            if it is not "none".
        output_dtype : Optional[torch.dtype]
            None or the dtype of the queries.
        output_scale : str
            "none"; "per-tensor" needs SM100.
        scale_mode : str
            "default" (implies "kv-per-tensor" for an FP8 cache); "bmm-scalar": ``run`` is given ``bmm1_scale``, the
            scale of the logits instead of ``sm_scale``, and ``bmm2_scale``, that of the output, and the stored values
            have no other scales. "bmm-tensor" needs SM100.
        skip_softmax : bool
            False; True needs SM100.
        enable_pdl : Optional[bool]
            Programmatic dependent launch; None enables it where the device supports it.
        use_sinks : bool
            Whether ``run`` will be given ``sinks``.
        """
        if self._backend == "cutlass":
            raise GPUArchitectureError(
                f"{self._op}.plan: backend must be fa2 here, got 'cutlass', which needs SM100; usable: fa2"
            )
        op = f"{self._op}.plan"
        self._require_sizes(
            op, num_heads=num_heads, head_dim_ckv=head_dim_ckv, head_dim_kpe=head_dim_kpe, page_size=page_size,
            causal=causal, sm_scale=sm_scale, q_data_type=q_data_type, kv_data_type=kv_data_type,
        )  # fmt: skip
        assert num_heads is not None and head_dim_ckv is not None and head_dim_kpe is not None
        assert page_size is not None and causal is not None and sm_scale is not None
        assert q_data_type is not None and kv_data_type is not None
        q_dtype, kv_dtype = canonicalize_torch_dtype(q_data_type), canonicalize_torch_dtype(kv_data_type)
        self._check_types(q_dtype, kv_dtype, head_dim_ckv, head_dim_kpe)
        is_dense = metadata is not None or block_tables is not None
        default_layout = None if metadata is None else "packed"
        declared = Declared(
            query_layout or default_layout,
            kv_cache_layout or default_layout,
            lse_mode,
            is_dense or lse_mode != "none",
            output_dtype,
            scale_mode,
            use_sinks,
        ).check(op, q_dtype, output_scale, skip_softmax)
        if qo_indptr is None or kv_indptr is None or kv_indices is None or kv_len_arr is None or is_dense:
            csr = {"qo_indptr": qo_indptr, "kv_indptr": kv_indptr, "kv_indices": kv_indices, "kv_len_arr": kv_len_arr}
            dense = {"cum_seq_lens_q": cum_seq_lens_q, "block_tables": block_tables, "seq_lens": seq_lens}
            tables = plan_tables(op, csr, {**dense, "max_q_len": max_q_len}, metadata, page_size)
            qo_indptr, kv_indptr, kv_indices, kv_len_arr = tables
        rows, pages, lengths = self._host_tables(qo_indptr, kv_indptr, kv_len_arr, page_size)
        fills_tiles = int(rows[-1]) * num_heads >= _FA3_ROWS * max(lengths.size, 1)
        self._backend = self._choose_backend(fills_tiles, q_dtype, kv_dtype, (head_dim_ckv, head_dim_kpe))
        used = int(pages[-1]) if pages.size else 0
        if kv_indices.numel() < used:
            raise ArgumentError(f"{self._op}.plan: kv_indices must have {used} elements, got {kv_indices.numel()}")
        self._plan_info = None  # if the rest fails, no valid plan remains
        self._declared = None if declared == Declared() else declared
        self._enable_pdl = enable_pdl
        self._page_ranges = (rows, pages, lengths)
        if self._use_cuda_graph:
            self._fill_graph_buffers(rows, pages, kv_indices, lengths)
        else:
            self._kv_indices_buf = to_device(self._op, "kv_indices", kv_indices, self.device, True)
            self._kv_len_arr_buf = to_device(self._op, "kv_len_arr", kv_len_arr, self.device, True)
        self._cached_q_data_type, self._cached_kv_data_type = q_dtype, kv_dtype
        self._dims = (head_dim_ckv, head_dim_kpe)
        self._cached_module = self._module(kv_dtype)
        self._causal, self._page_size, self._sm_scale = causal, page_size, sm_scale
        self._num_heads, self._num_rows = num_heads, int(rows[-1])
        self._use_profiler = use_profiler
        self._native_plan_info = self._native_plan(
            self._cached_module.plan_ext,
            *as_tensors((rows, pages, lengths)),
            num_heads,
            head_dim_ckv,
            causal,
            page_size,
            self._use_cuda_graph,
            self._max_total_num_rows or self._num_rows,
        )
        self._cached_module.published_plan(self._published, self._native_plan_info)
        self._plan_info = tuple(self._published.tolist())
        if self._use_cuda_graph and self._max_total_num_rows is None:
            self._max_total_num_rows = max(self._num_rows, lengths.size)  # as the planner in csrc/batch_mla.cu counts

    @staticmethod
    def _require_sizes(op: str, **sizes: Any) -> None:
        for name, value in sizes.items():
            if value is None:
                raise TypeError(f"{op}: {name} must be given, got None")

    @property
    def _planned_backend(self) -> BatchMLAPagedAttentionWrapper:
        """Holder of the plan's int workspace, which engines read here; published releases have one per backend."""
        return self

    def _module(self, kv_dtype: torch.dtype) -> Any:
        q_dtype = self._cached_q_data_type
        types = (q_dtype, kv_dtype, q_dtype, torch.int32)
        return get_batch_mla_module(self._backend, *types, *self._dims, False, device=self._device_kind)

    def _check_types(self, q: torch.dtype, kv: torch.dtype, head_dim_ckv: int, head_dim_kpe: int) -> None:
        op = f"{self._op}.plan"
        if kv not in _KV_DTYPES:
            raise ArgumentError(f"{op}: kv_data_type must be float16, bfloat16 or float8_e4m3fn, got {kv}")
        if head_dim_kpe < 0:
            raise ArgumentError(f"{op}: head_dim_kpe must be 0 or more, got {head_dim_kpe}")
        if kv == _FP8:
            self._check_fp8(q, kv, head_dim_ckv, head_dim_kpe)
        if self._requested_backend == "fa3":  # on the CPU too: a program that is tested there runs on a GPU
            self._check_fa3(q, kv, head_dim_ckv, head_dim_kpe)

    def _check_fp8(self, q: torch.dtype, kv: torch.dtype, head_dim_ckv: int, head_dim_kpe: int) -> None:
        op = f"{self._op}.plan"
        if self._device_kind == "cuda" and get_compute_capability(self.device)[0] != _HOPPER:
            raise ArgumentError(f"{op}: kv_data_type must have 16 bits (8 bits need an SM90 device), got {kv}")
        if q != torch.bfloat16:
            raise ArgumentError(f"{op}: an FP8 cache must have q_data_type=torch.bfloat16, got {q}")
        if head_dim_ckv != 512 or head_dim_kpe not in (0, 64):
            raise ArgumentError(
                f"{op}: head_dim_ckv and head_dim_kpe must be 512 and 0 or 64 for an FP8 cache, got {head_dim_ckv} and "
                f"{head_dim_kpe}"
            )

    def _choose_backend(self, fills_tiles: bool, q: torch.dtype, kv: torch.dtype, dims: tuple[int, int]) -> str:
        """Return the backend of a plan: with ``"auto"`` the Hopper kernels where they serve it and have full tiles.

        A CUDA graph keeps the backend of its first plan. With 16 rows a request, both read memory at the same speed.
        An FP8 cache of 64 requests of 4096 keys takes 267 us with ``"fa3"`` and 383 with ``"fa2"`` at 128 heads, 149
        and 84 at 16 heads (H200).
        """
        if self._requested_backend != "auto" or self._device_kind != "cuda" or self._max_total_num_rows is not None:
            return self._backend
        return "fa3" if fills_tiles and fa3_serves_mla(self.device, q, kv, *dims) else "fa2"

    def _check_fa3(self, q: torch.dtype, kv: torch.dtype, head_dim_ckv: int, head_dim_kpe: int) -> None:
        op = f"{self._op}.plan"
        if kv != _FP8 and (kv != q or q not in (torch.float16, torch.bfloat16)):
            raise ArgumentError(
                f"{op}: kv_data_type must be q_data_type, float16 or bfloat16, or float8_e4m3fn with backend 'fa3', "
                f"got {kv} and {q}; usable: fa2"
            )
        if head_dim_ckv != 512 or head_dim_kpe not in (0, 64):
            raise ArgumentError(
                f"{op}: head_dim_ckv and head_dim_kpe must be 512 and 0 or 64 with backend 'fa3', got {head_dim_ckv} "
                f"and {head_dim_kpe}; usable: fa2"
            )

    def _host_tables(
        self, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, kv_len_arr: torch.Tensor, page_size: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return row offsets, page offsets and key counts on the host. Pages beyond the keys are ignored."""
        op = f"{self._op}.plan"
        rows, begins, lengths = to_host(op, qo_indptr=qo_indptr, kv_indptr=kv_indptr, kv_len_arr=kv_len_arr)
        batch_size = lengths.size
        if rows.size != batch_size + 1:
            raise ArgumentError(
                f"{op}: qo_indptr must have {batch_size + 1} elements (batch_size + 1), got {rows.size}"
            )
        if begins.ndim != 1:
            raise ArgumentError(f"{op}: kv_indptr must have 1 dimension, got {begins.ndim}")
        if begins.size < batch_size + 1:
            raise ArgumentError(f"{op}: kv_indptr must have at least {batch_size + 1} elements, got {begins.size}")
        if page_size < 1:
            raise ArgumentError(f"{op}: page_size must be at least 1, got {page_size}")
        if lengths.size and lengths.min() < 0:
            raise ArgumentError(f"{op}: kv_len_arr must be 0 or more, got {lengths.min()}")
        if begins.size == batch_size + 1 and begins[0] >= 0:  # negative offsets are refused by the native plan
            # Divisions and numpy's functions in Python take most of the time of a plan of thousands of requests.
            counts, needed = begins[1:] - begins[:-1], lengths if page_size == 1 else -(-lengths // page_size)
            differ = counts != needed
            if differ.any():
                at = int(differ.argmax())
                raise ArgumentError(
                    f"{op}: CSR metadata page counts in kv_indptr must equal ceil(kv_len_arr / page_size). Request "
                    f"{at} must have {needed[at]} pages, got {counts[at]}"
                )
        begins = begins[: batch_size + 1]
        return rows, begins, lengths

    def _fill_graph_buffers(
        self, rows: np.ndarray, pages: np.ndarray, kv_indices: torch.Tensor, lengths: np.ndarray
    ) -> None:
        """Copy the index arrays into the CUDA graph buffers, whose addresses captured kernels read."""
        op = f"{self._op}.plan"
        if lengths.size != self._fixed_batch_size:
            raise ArgumentError(
                f"{op}: the batch must have {self._fixed_batch_size} requests (CUDA graph buffers), got {lengths.size}"
            )
        if self._max_total_num_rows is not None and rows[-1] > self._max_total_num_rows:
            raise ArgumentError(
                f"{op}: rows must be at most {self._max_total_num_rows} (the first plan's or the requests), got "
                f"{rows[-1]}"
            )
        assert self._kv_indices_buf is not None
        count = kv_indices.numel()
        if count > self._kv_indices_buf.numel():
            raise ArgumentError(
                f"{op}: kv_indices must have at most {self._kv_indices_buf.numel()} elements (its buffer), got {count}"
            )
        for buffer, values in (
            (self._qo_indptr_buf, torch.from_numpy(rows)),
            (self._kv_indptr_buf, torch.from_numpy(pages)),
            (self._kv_len_arr_buf, torch.from_numpy(lengths)),
        ):
            assert buffer is not None
            buffer.copy_(values, non_blocking=True)
        kv_indices, buffer = narrowed(kv_indices, f"{op}: kv_indices"), self._kv_indices_buf
        # Engines pass the begin of the buffer itself, which takes no copy.
        is_in_place = kv_indices.data_ptr() == buffer.data_ptr() and kv_indices.is_contiguous()
        if not is_in_place or kv_indices.ndim != 1:
            buffer[:count].copy_(kv_indices, non_blocking=True)

    @flashinfer_api(trace=mla_run_trace)
    def run(
        self,
        q_nope: torch.Tensor = None,  # type: ignore[assignment]
        q_pe: torch.Tensor = None,  # type: ignore[assignment]
        ckv_cache: torch.Tensor = None,  # type: ignore[assignment]
        kpe_cache: torch.Tensor = None,  # type: ignore[assignment]
        out: Optional[torch.Tensor] = None,
        lse: Optional[torch.Tensor] = None,
        return_lse: bool = False,
        profiler_buffer: Optional[torch.Tensor] = None,
        kv_len: Optional[torch.Tensor] = None,
        page_table: Optional[torch.Tensor] = None,
        return_lse_base_on_e: bool = False,
        o_scale: Optional[float] = None,
        # vLLM takes a keyword-only ckv_scale_arr as the sign that its sparse backend for SM90 works, which rewrites
        # ends of works in the plan (tests/mla/test_engine_plan.py).
        *,
        query: Union[torch.Tensor, tuple[torch.Tensor, torch.Tensor], None] = None,
        kv_cache: Union[torch.Tensor, tuple[torch.Tensor, torch.Tensor], None] = None,
        ckv_scale: Optional[float] = None,
        ckv_scale_arr: Optional[torch.Tensor] = None,
        kpe_scale: Optional[float] = None,
        sinks: Optional[torch.Tensor] = None,
        skip_softmax_threshold_scale_factor: Optional[float] = None,
        bmm1_scale: Optional[float] = None,
        bmm2_scale: Optional[float] = None,
    ) -> Union[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Compute attention for the planned batch.

        Parameters
        ----------
        q_nope : torch.Tensor
            ``(rows, num_heads, head_dim_ckv)``.
        q_pe : torch.Tensor
            ``(rows, num_heads, head_dim_kpe)``.
        ckv_cache : torch.Tensor
            ``(num_pages, page_size, head_dim_ckv)``.
        kpe_cache : torch.Tensor
            ``(num_pages, page_size, head_dim_kpe)``.
        out, lse : Optional[torch.Tensor]
            Output buffers.
        return_lse : bool
            Whether to return the LSE too.
        profiler_buffer : Optional[torch.Tensor]
            Needed after ``plan(use_profiler=True)``; left as it is.
        kv_len, page_table : Optional[torch.Tensor]
            Arguments of another backend; ignored.
        return_lse_base_on_e : bool
            Natural logarithms instead of base 2 in the LSE.
        o_scale : Optional[float]
            Argument of another backend; must be None.
        ckv_scale, kpe_scale : Optional[float]
            Scales of an FP8 cache: value = stored * scale.
        ckv_scale_arr : Optional[torch.Tensor]
            Instead of ``ckv_scale``: ``(num_pages, page_size, head_dim_ckv // 128)`` float32, a scale of each token and
            128 columns. The kernels of ``"fa3"`` scale keys while they convert them; for others the pages of the batch
            are converted to bfloat16 first.
        query, kv_cache : Union[torch.Tensor, tuple[torch.Tensor, torch.Tensor], None]
            Instead of the first four arguments: ``(q_nope, q_pe)`` and ``(ckv_cache, kpe_cache)``, or packed: one
            tensor with the columns of both.
        sinks : Optional[torch.Tensor]
            ``(num_heads,)``, planned with ``use_sinks``: a logit without a value for each head.
        skip_softmax_threshold_scale_factor : Optional[float]
            Argument of another backend; must be None.
        bmm1_scale, bmm2_scale : Optional[float]
            Scale of the logits and of the output, planned with ``scale_mode="bmm-scalar"``.

        Returns
        -------
        out : torch.Tensor
            ``(rows, num_heads, head_dim_ckv)``, dtype of the queries. Zeros where a request has no keys.
        lse : torch.Tensor
            ``(rows, num_heads)`` float32, with ``return_lse``.
        """
        if (
            query is not None
            or kv_cache is not None
            or self._declared is not None
            or sinks is not None
            or bmm1_scale is not None
            or bmm2_scale is not None
            or skip_softmax_threshold_scale_factor is not None
        ):
            return self._run_declared(
                q_nope, q_pe, ckv_cache, kpe_cache, out, lse, return_lse, profiler_buffer, return_lse_base_on_e,
                o_scale, ckv_scale, ckv_scale_arr, kpe_scale, query, kv_cache, sinks, bmm1_scale, bmm2_scale,
                skip_softmax_threshold_scale_factor,
            )  # fmt: skip
        if o_scale is None and ckv_scale is None and ckv_scale_arr is None and kpe_scale is None:
            result = self._repeat(q_nope, q_pe, ckv_cache, kpe_cache, out, lse, return_lse, return_lse_base_on_e)
            if result is not None:
                return result
        return self._run_alone(
            q_nope, q_pe, ckv_cache, kpe_cache, out, lse, return_lse, profiler_buffer, return_lse_base_on_e, o_scale,
            ckv_scale, ckv_scale_arr, kpe_scale,
        )  # fmt: skip

    def _run_declared(
        self,
        q_nope: Optional[torch.Tensor],
        q_pe: Optional[torch.Tensor],
        ckv_cache: Optional[torch.Tensor],
        kpe_cache: Optional[torch.Tensor],
        out: Optional[torch.Tensor],
        lse: Optional[torch.Tensor],
        return_lse: bool,
        profiler_buffer: Optional[torch.Tensor],
        return_lse_base_on_e: bool,
        o_scale: Optional[float],
        ckv_scale: Optional[float],
        ckv_scale_arr: Optional[torch.Tensor],
        kpe_scale: Optional[float],
        query: Any,
        kv_cache: Any,
        sinks: Optional[torch.Tensor],
        bmm1_scale: Optional[float],
        bmm2_scale: Optional[float],
        skip_softmax_threshold: Optional[float],
    ) -> Union[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Hold the arguments of ``run`` to what ``plan`` declared, and call it in the older form."""
        op = f"{self._op}.run"
        self._require_plan()
        declared = self._declared or Declared()
        halves = {"q_nope": q_nope, "q_pe": q_pe, "ckv_cache": ckv_cache, "kpe_cache": kpe_cache}
        tensors, packed = split_query(op, halves, query, kv_cache, self._dims[0])
        is_natural = declared.check_call(op, packed, return_lse or lse is not None, return_lse_base_on_e)
        if (sinks is not None) != declared.use_sinks:
            raise ArgumentError(f"{op}: sinks must be {self._sinks_wanted(declared)}, got {self._kind_of(sinks)}")
        if skip_softmax_threshold is not None:
            raise ArgumentError(
                f"{op}: skip_softmax_threshold_scale_factor must be None (plan had skip_softmax=False), got "
                f"{skip_softmax_threshold}"
            )
        scales: dict[str, Any] = {"ckv_scale": ckv_scale, "kpe_scale": kpe_scale, "ckv_scale_arr": ckv_scale_arr}
        if declared.scale_mode == "bmm-scalar":
            scales = self._bmm_scales(op, scales, bmm1_scale, bmm2_scale)
        elif bmm1_scale is not None or bmm2_scale is not None:
            raise ArgumentError(
                f"{op}: bmm1_scale and bmm2_scale must be None (plan had scale_mode={declared.scale_mode!r}), got one"
            )

        def call(scores: Optional[torch.Tensor], with_lse: bool, natural: bool) -> Any:
            return self._run_alone(
                tensors[0], tensors[1], tensors[2], tensors[3],
                out, scores, with_lse, profiler_buffer, natural, o_scale, scales["ckv_scale"],
                scales["ckv_scale_arr"], scales["kpe_scale"], bmm1_scale,
            )  # fmt: skip

        if sinks is None:
            result = call(lse, return_lse, is_natural)
        else:
            self._check_sinks(op, sinks)
            pair = with_sinks(lambda scores: call(scores, True, False), sinks, lse, is_natural)
            result = pair if return_lse else pair[0]
        if bmm2_scale is not None:
            (result[0] if return_lse else result).mul_(bmm2_scale)
        return result

    @staticmethod
    def _sinks_wanted(declared: Declared) -> str:
        return "a tensor (plan had use_sinks=True)" if declared.use_sinks else "None (plan had use_sinks=False)"

    @staticmethod
    def _kind_of(value: Any) -> str:
        return "None" if value is None else f"a {type(value).__name__}"

    def _check_sinks(self, op: str, sinks: torch.Tensor) -> None:
        check_tensors(op, sinks=sinks)
        if sinks.shape != (self._num_heads,) or sinks.device != self.device:
            raise ArgumentError(
                f"{op}: sinks must have shape ({self._num_heads},) on {self.device}, got {tuple(sinks.shape)} on "
                f"{sinks.device}"
            )

    def _bmm_scales(
        self, op: str, scales: dict[str, Any], bmm1: Optional[float], bmm2: Optional[float]
    ) -> dict[str, Any]:
        for name, value in (("bmm1_scale", bmm1), ("bmm2_scale", bmm2)):
            if not isinstance(value, (float, Real)) or not math.isfinite(value):
                raise ArgumentError(f"{op}: {name} must be a number (plan had scale_mode='bmm-scalar'), got {value!r}")
        for name, value in scales.items():
            if value is not None:
                raise ArgumentError(f"{op}: {name} must be None (plan had scale_mode='bmm-scalar'), got a value")
        unit = (
            1.0 if self._cached_kv_data_type == _FP8 else None
        )  # bmm1_scale and bmm2_scale contain those of the cache
        return {"ckv_scale": unit, "kpe_scale": unit, "ckv_scale_arr": None}

    def _require_plan(self) -> None:
        if self._plan_info is None:
            raise ArgumentError(
                f"{self._op}.run: run() was called before plan(): plan() must be called before run(), got no plan"
                + (
                    ""
                    if self._cached_module is None
                    else " (the last one failed, or workspaces were replaced after it)"
                )
            )

    def _repeat(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv_cache: torch.Tensor,
        kpe_cache: torch.Tensor,
        out: Optional[torch.Tensor],
        lse: Optional[torch.Tensor],
        return_lse: bool,
        is_natural: bool,
    ) -> Union[torch.Tensor, tuple[torch.Tensor, torch.Tensor], None]:
        """Repeat the previous launch with new tensors. Return None if anything else changed.

        The lock is written out here because a function for it would cost as much as the lock (attention/locks.py).
        """
        if is_traced() or compiler._is_compiling_flag:
            return None
        lock = self._lock
        calls = lock.free
        is_nested = not calls
        if is_nested:
            if not lock._is_owned():
                return self._repeat_alone(q_nope, q_pe, ckv_cache, kpe_cache, out, lse, return_lse, is_natural)
            calls = [None]
        try:
            calls.pop()
        except IndexError:  # another thread was faster
            return self._repeat_alone(q_nope, q_pe, ckv_cache, kpe_cache, out, lse, return_lse, is_natural)
        except BaseException:  # a signal handler raised it after pop() returned
            calls.append(None)
            raise
        try:
            device = lock.cuda_index
            if is_nested or (lock.free is not CLOSED and (device is None or streams.raw_stream(device) == lock.stream)):
                record = self._record
                if (
                    record is None
                    or page_ids.VALIDATE
                    or not (record.state.has_plan_of(self) and record.state.has_options_of(self))
                    or (record.least_pages and record.is_too_small(ckv_cache))
                    or record.pdl_probe is not probes.device_support_pdl
                ):
                    return None
                # TVM-FFI follows lists in lists without end (_runtime/torch_ops.py).
                if q_nope.__class__ is list or q_pe.__class__ is list or ckv_cache.__class__ is list:
                    return None
                if kpe_cache.__class__ is list or lse.__class__ is list or out.__class__ is list:
                    return None
                if out is None:
                    out = allocate(record.shape, record.strides, record.dtype, record.device_index)
                if lse is None and return_lse:
                    lse = record.scores()
                try:
                    record.rerun(
                        record.memory, q_nope, q_pe, ckv_cache, kpe_cache, out, lse, self._sm_scale, is_natural,
                        record.pdl,
                    )  # fmt: skip
                except Exception:
                    self._record = None  # the slow path raises an error with the reason
                    return None
                return (out, lse) if return_lse else out  # type: ignore[return-value]
        finally:
            calls.append(None)
        return self._repeat_alone(q_nope, q_pe, ckv_cache, kpe_cache, out, lse, return_lse, is_natural)

    def _run_alone(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv_cache: torch.Tensor,
        kpe_cache: torch.Tensor,
        out: Optional[torch.Tensor],
        lse: Optional[torch.Tensor],
        return_lse: bool,
        profiler_buffer: Optional[torch.Tensor],
        return_lse_base_on_e: bool,
        o_scale: Optional[float],
        ckv_scale: Optional[float],
        ckv_scale_arr: Optional[torch.Tensor],
        kpe_scale: Optional[float],
        logits_scale: Optional[float] = None,
    ) -> Union[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Validate the arguments of ``run`` and launch, while no other call on this wrapper is under way."""
        op = f"{self._op}.run"
        if self._backend == "cutlass":
            raise GPUArchitectureError(f"{op}: backend must be fa2 here, got 'cutlass', which needs SM100; usable: fa2")
        if o_scale is not None:
            raise ArgumentError(
                f"{op}: o_scale is only supported with the cutlass backend: it must be None, got a value"
            )
        self._require_plan()
        if q_nope is None or q_pe is None or ckv_cache is None or kpe_cache is None:  # words what is missing
            halves = {"q_nope": q_nope, "q_pe": q_pe, "ckv_cache": ckv_cache, "kpe_cache": kpe_cache}
            split_query(op, halves, None, None, self._dims[0])
        self._check_run(op, q_nope, q_pe, ckv_cache, kpe_cache)
        if self._use_profiler and profiler_buffer is None:
            raise ArgumentError(f"{op}: profiler_buffer must be a tensor (use_profiler was planned), got None")
        if not _is_compiling():
            self._check_page_ids(self._kv_indices_buf, ckv_cache)
        scales = LatentScales.of(op, ckv_cache, ckv_scale, ckv_scale_arr, kpe_scale)
        out = output_buffer(op, out, q_nope.shape, q_nope.dtype, q_nope)
        if return_lse or lse is not None:
            lse = lse_buffer(op, lse, q_nope.shape[:2], q_nope)
        indices: Optional[torch.Tensor] = None  # None: page ids of the plan; an exported program would freeze them
        pages, sm_scale = self._kv_indices_buf, self._sm_scale if logits_scale is None else logits_scale
        assert pages is not None and sm_scale is not None
        per_token: Optional[torch.Tensor] = None
        out_scale, in_kernel = 1.0, self._backend == "fa3"
        if scales is not None:
            q_pe, sm_scale = scales.fold(q_pe, sm_scale, in_kernel)
            if scales.per_token is not None and in_kernel:
                per_token = scales.per_token
            elif scales.per_token is not None:
                ckv_cache, kpe_cache = scales.gather(ckv_cache, kpe_cache, pages, q_nope.dtype)
                indices = range_buffer(pages.numel(), self.device)
            out_scale = scales.ckv
        tensors: list[Optional[torch.Tensor]] = [q_pe, indices, per_token]
        numbers = [sm_scale, float(return_lse_base_on_e), out_scale if in_kernel else 1.0]
        launch = Launch(q_nope, ckv_cache, kpe_cache, out, lse, tensors, numbers)
        if scales is None and not self._use_profiler and not _is_compiling():
            self._launch_kept(launch, self._enable_pdl, 1.0)
        else:
            run_planned(self._handle, *launch, self._enable_pdl)
        if out_scale != 1.0 and not in_kernel:
            out.mul_(out_scale)
        return (out, lse) if return_lse else out  # type: ignore[return-value]

    def _check_page_ids(self, kv_indices: Optional[torch.Tensor], ckv_cache: torch.Tensor) -> None:
        if (page_ids.VALIDATE or self._device_kind == "cpu") and self._page_ranges:
            assert kv_indices is not None
            num_pages, op = ckv_cache.shape[0], f"{self._op}.run"
            rows, begins, lengths = self._page_ranges
            lengths = page_ids.lengths_of_works(rows, lengths, self._plan_info, self._int_workspace_buffer)
            page_ids.check_page_ids(op, kv_indices, begins, lengths, self._page_size, num_pages)

    def _check_in_graph(self, launch: Launch) -> None:
        self._check_rows(f"{self._op}.run", launch.q.shape[0])
        indices = launch.tensors[1]
        self._check_page_ids(self._kv_indices_buf if indices is None else indices, launch.k)

    def _check_run(self, op: str, q_nope: Any, q_pe: Any, ckv_cache: Any, kpe_cache: Any) -> None:
        named = {"q_nope": q_nope, "q_pe": q_pe, "ckv_cache": ckv_cache, "kpe_cache": kpe_cache}
        check_tensors(op, **named)
        for name, tensor in named.items():
            expected = self._cached_q_data_type if name.startswith("q") else self._cached_kv_data_type
            if tensor.dtype != expected:
                raise ArgumentError(f"{op}: {name}.dtype must be {expected} (as planned), got {tensor.dtype}")
        if not _is_compiling():  # compiled: run_planned checks the rows
            self._check_rows(op, q_nope.shape[0])
        if q_nope.shape[1] != self._num_heads:
            raise ArgumentError(f"{op}: q_nope must have {self._num_heads} heads (as planned), got {q_nope.shape[1]}")

    def _check_rows(self, op: str, rows: int) -> None:
        if self._use_cuda_graph:
            assert self._max_total_num_rows is not None
            if not self._num_rows <= rows <= self._max_total_num_rows:
                raise ArgumentError(
                    f"{op}: q_nope must have at least {self._num_rows} rows (qo_indptr[-1]) and at most "
                    f"{self._max_total_num_rows} (the first plan's), got {rows}"
                )
        elif rows != self._num_rows:
            raise ArgumentError(f"{op}: q_nope must have {self._num_rows} rows (qo_indptr[-1]), got {rows}")

    def _state(self) -> MLAState:
        return MLAState.of(self)

    def _native_call(self, launch: Launch, enable_pdl: bool) -> tuple[Any, str, tuple[Any, ...]]:
        q, k, v, out, lse, (q_pe, indices, per_token), (sm_scale, natural, out_scale) = launch
        indices = self._kv_indices_buf if indices is None else indices
        module = self._cached_module
        if k.dtype != self._cached_kv_data_type:  # gather() converted the cache; the plan is valid for any cache dtype
            module = self._module(k.dtype)
        where = (self._float_workspace_buffer, self._int_workspace_buffer, self._native_plan_info)
        mask_mode = CAUSAL if self._causal else NON_CAUSAL
        numbers = (mask_mode, self._num_heads, self._page_size, sm_scale, bool(natural), enable_pdl)
        args = (*where, q, q_pe, k, v, indices, out, lse, *numbers)
        if per_token is None and out_scale == 1.0:
            return module, "run", args
        return module, "run_scaled", (*args, out_scale, per_token)


def __getattr__(name: str) -> Any:
    """Return a published name of this module that needs a Blackwell GPU."""
    if name in MLA_NAMES:
        return MLA_NAMES[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
