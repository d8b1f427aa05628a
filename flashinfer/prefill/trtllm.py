# SPDX-License-Identifier: Apache-2.0
"""Prefill with the interface of TensorRT-LLM's fused attention, served by our own kernels."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, Optional, Sequence, Union

import numpy as np
import torch

from .._runtime.checks import canonicalize_torch_dtype
from .._runtime.dispatch import backend_of, use_pdl
from .._runtime.errors import ArgumentError
from .._runtime.explain_error import explain_type_errors
from .._runtime.knobs import knobs
from .._runtime.log import say
from ..api_logging import flashinfer_api
from ..attention.block_tables import to_output
from ..attention.index_arrays import to_host
from ..attention.modules import get_batch_prefill_module, get_customize_batch_prefill_module
from ..attention.options import CAUSAL, CUSTOM, FP8, NON_CAUSAL, alibi_slopes
from ..attention.scales import number_on_host, scale_logits
from ..jit.attention.front_doors import gen_fmha_v2_module, prompt_decl
from ..jit.utils import filename_safe_dtype_map as _short
from ..trace.templates.fmha_v2 import fmha_v2_trace

__all__ = ["trtllm_fmha_v2_prefill"]

_OP = "trtllm_fmha_v2_prefill"
_HEAD_DIMS = (64, 128, 256)
_INT_WORKSPACE_BYTES = 8 << 20
Factor = Union[float, torch.Tensor]
Inputs = Union[torch.Tensor, Sequence[Any]]


@dataclass(frozen=True)
class _Prompt:
    """Queries, keys and values of a call. ``tables`` holds page ids; if it is None, keys are ragged rows."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    layout: int = 0
    tables: Optional[torch.Tensor] = None

    @property
    def page_size(self) -> int:
        return 1 if self.tables is None else self.k.shape[1 if self.layout == 0 else 2]


@dataclass(frozen=True)
class _Options:
    """Options of the mask and of the logits."""

    mask_mode: str
    window_left: int
    chunk: int
    soft_cap: float
    alibi: bool
    sinks: Optional[torch.Tensor]
    stats: bool

    @property
    def needs_variant(self) -> bool:
        return self.sinks is not None or self.chunk > 0 or self.stats


def _pair(name: str, qkv: Any, count: int) -> Sequence[Any]:
    if not isinstance(qkv, (tuple, list)) or len(qkv) != count:
        raise ArgumentError(f"{_OP}: qkv must be a tuple of {count} (input_layout {name}), got a {type(qkv).__name__}")
    return qkv


def _expect_rank(name: str, x: torch.Tensor, rank: int) -> None:
    if x.ndim != rank:
        raise ArgumentError(f"{_OP}: {name} must have {rank} dimensions, got {x.ndim}")


def _unpack(qkv: Inputs, input_layout: str, block_tables: Optional[torch.Tensor], batch_size: int) -> _Prompt:
    name = input_layout.upper()
    if name == "PACKED_QKV":
        if not isinstance(qkv, torch.Tensor):
            raise ArgumentError(f"{_OP}: qkv must be a tensor (input_layout PACKED_QKV), got a {type(qkv).__name__}")
        _expect_rank("qkv", qkv, 4)
        q, k, v = qkv.unbind(1)
        return _Prompt(q, k, v)
    if name == "CONTIGUOUS_Q_KV":
        q, kv = _pair(name, qkv, 2)
        _expect_rank("q", q, 3)
        _expect_rank("kv", kv, 4)
        return _Prompt(q, *kv.unbind(1))
    if name == "SEPARATE_Q_K_V":
        q, k, v = _pair(name, qkv, 3)
        for what, x in (("q", q), ("k", k), ("v", v)):
            _expect_rank(what, x, 3)
        return _Prompt(q, k, v)
    if name in ("Q_PAGED_KV_NHD", "Q_PAGED_KV_HND"):
        q, cache = _pair(name, qkv, 2)
        _expect_rank("q", q, 3)
        return _unpack_pages(q, cache, int(name.endswith("HND")), block_tables, batch_size)
    raise ArgumentError(
        f"{_OP}: input_layout must be PACKED_QKV, CONTIGUOUS_Q_KV, SEPARATE_Q_K_V, Q_PAGED_KV_NHD or Q_PAGED_KV_HND, "
        f"got {input_layout!r}"
    )


def _unpack_pages(
    q: torch.Tensor, cache: Any, layout: int, block_tables: Optional[torch.Tensor], batch_size: int
) -> _Prompt:
    if block_tables is None:
        raise ArgumentError(f"{_OP}: block_tables must be a tensor (keys are in pages), got None")
    if block_tables.dtype != torch.int32:
        raise ArgumentError(f"{_OP}: block_tables must be torch.int32, got {block_tables.dtype}")
    if block_tables.shape[0] != batch_size:
        raise ArgumentError(
            f"{_OP}: block_tables must have {batch_size} rows (batch_size), got {block_tables.shape[0]}"
        )
    if isinstance(cache, torch.Tensor):
        _expect_rank("the cache", cache, 5)
        if block_tables.ndim != 2:
            raise ArgumentError(
                f"{_OP}: block_tables must have 2 dimensions for one cache of both, got {block_tables.ndim}"
            )
        return _Prompt(q, cache[:, 0], cache[:, 1], layout, block_tables)
    k, v = _pair("Q_PAGED_KV", cache, 2)
    _expect_rank("k", k, 4)
    _expect_rank("v", v, 4)
    if block_tables.ndim != 3 or block_tables.shape[1] != 2:
        raise ArgumentError(
            f"{_OP}: block_tables must have shape (batch_size, 2, pages) for separate caches, got "
            f"{tuple(block_tables.shape)}"
        )
    return _Prompt(q, *_blocks(k, v), layout, block_tables)


def _blocks(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of both caches whose pages are blocks, the unit of the page tables.

    A block has the size of one page of keys. Table entries count blocks from the start of ``k``, for values too. The
    distance between a page of values and its page of keys is the distance between ``v`` and ``k``, so the block index
    of a page of keys, applied to ``v``, gives the page of its values.
    """
    block = k[0].numel()
    if k.shape != v.shape or not (k[0].is_contiguous() and v[0].is_contiguous()):
        raise ArgumentError(
            f"{_OP}: k and v must be equal caches with contiguous pages, got strides {k.stride()} and {v.stride()}"
        )
    count = min((x.untyped_storage().nbytes() // x.itemsize - x.storage_offset()) // block for x in (k, v))
    first, second = (x.as_strided((count, *x.shape[1:]), (block, *x.stride()[1:])) for x in (k, v))
    return first, second


def _check(prompt: _Prompt, options: _Options, input_layout: str) -> None:
    q, head_dim = prompt.q, prompt.q.shape[-1]
    if head_dim not in _HEAD_DIMS:
        raise ArgumentError(f"{_OP}: head_dim must be one of {_HEAD_DIMS}, got {head_dim}")
    if prompt.k.dtype != q.dtype:
        raise ArgumentError(f"{_OP}: q and k must have one dtype, got {q.dtype} and {prompt.k.dtype}")
    if input_layout.upper() == "SEPARATE_Q_K_V" and (q.dtype in FP8 or options.soft_cap):
        raise ArgumentError(f"{_OP}: SEPARATE_Q_K_V must have no FP8 inputs and no soft cap, got one of them")
    if options.mask_mode not in ("causal", "sliding_window", "chunked", "padding"):
        raise ArgumentError(
            f"{_OP}: mask_mode must be causal, sliding_window, chunked or padding, got {options.mask_mode!r}"
        )
    if options.mask_mode == "padding" and (options.window_left >= 0 or options.chunk):
        raise ArgumentError(
            f"{_OP}: window_left and chunked_attention_size must not be given with mask_mode 'padding', got a value"
        )
    if options.mask_mode == "chunked" and (options.chunk < 1 or options.chunk & (options.chunk - 1)):
        raise ArgumentError(f"{_OP}: chunked_attention_size must be a power of two, got {options.chunk}")
    if options.sinks is not None and options.sinks.numel() != q.shape[1]:
        raise ArgumentError(f"{_OP}: sinks must have {q.shape[1]} elements (heads), got {options.sinks.numel()}")
    if options.stats and input_layout.upper() != "CONTIGUOUS_Q_KV":
        raise ArgumentError(f"{_OP}: input_layout must be CONTIGUOUS_Q_KV with save_softmax_stats, got {input_layout}")


def _check_rows(name: str, offsets: np.ndarray, what: str, tokens: int) -> None:
    """Check that offsets stay inside a tensor, because kernels access these rows. More rows than needed are allowed."""
    if offsets[-1] > tokens:
        raise ArgumentError(f"{_OP}: {name} must end at {tokens} at most (tokens of {what}), got {offsets[-1]}")


@flashinfer_api(trace=fmha_v2_trace)
@explain_type_errors
def trtllm_fmha_v2_prefill(
    qkv: Inputs,
    input_layout: str,
    workspace_buffer: torch.Tensor,
    seq_lens: torch.Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: Factor,
    bmm2_scale: Factor,
    batch_size: int,
    cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor,
    block_tables: Optional[torch.Tensor] = None,
    out: Optional[torch.Tensor] = None,
    out_dtype: Union[torch.dtype, str, None] = None,
    sinks: Optional[torch.Tensor] = None,
    pos_encoding_mode: Optional[str] = None,
    logits_soft_cap_scale: Optional[float] = None,
    mask_mode: str = "causal",
    window_left: int = -1,
    chunked_attention_size: int = 0,
    save_softmax_stats: bool = False,
    skip_softmax_threshold_scale_factor: float = 0,
) -> Union[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    r"""Attention of prompts: ``out = softmax(bmm1_scale * q . k) v * bmm2_scale``.

    The lengths decide what is launched, so they are copied to the host, once, which waits for the GPU. Queries may be
    the end of a longer sequence (chunked prefill): the right ends of queries and keys are aligned.

    Parameters
    ----------
    qkv : Union[torch.Tensor, Tuple]
        By ``input_layout``: ``PACKED_QKV`` ``(tokens, 3, heads, head_dim)``; ``CONTIGUOUS_Q_KV`` q ``(tokens, heads,
        head_dim)`` and ``(kv_tokens, 2, kv_heads, head_dim)``; ``SEPARATE_Q_K_V`` q, k, v; ``Q_PAGED_KV_NHD`` and
        ``_HND`` q and a paged cache ``(pages, 2, ...)``, or q and two caches of one allocation. float16, bfloat16 or
        float8_e4m3fn.
    workspace_buffer : torch.Tensor
        Scratch.
    seq_lens : torch.Tensor
        ``(batch_size,)``: keys of each request.
    max_q_len, max_kv_len : int
        Ignored: the lengths say it.
    bmm1_scale, bmm2_scale : Union[float, torch.Tensor]
        Scale of the logits, scale of the output.
    cum_seq_lens_q, cum_seq_lens_kv : torch.Tensor
        ``(batch_size + 1,)``: rows of q, and of k and v where these are not in pages.
    block_tables : Optional[torch.Tensor]
        ``(batch_size, pages)`` int32; ``(batch_size, 2, pages)`` for two caches.
    out : Optional[torch.Tensor]
        Output buffer.
    out_dtype : Union[torch.dtype, str, None]
        Its dtype: that of q if None.
    sinks : Optional[torch.Tensor]
        ``(heads,)`` float32 logits that add to the denominator of the softmax.
    pos_encoding_mode : Optional[str]
        ``"alibi"`` or none.
    logits_soft_cap_scale : Optional[float]
        ``cap * tanh(logit / cap)``.
    mask_mode : str
        ``causal``, ``sliding_window`` (causal, with ``window_left``), ``chunked`` (causal inside chunks of
        ``chunked_attention_size`` keys) or ``padding`` (everything).
    save_softmax_stats : bool
        Whether to return the largest logit and the sum of exponentials of each row too.
    skip_softmax_threshold_scale_factor : float
        Ignored.

    Returns
    -------
    out : torch.Tensor
        ``(tokens, heads, head_dim)``.
    stats : torch.Tensor
        With ``save_softmax_stats``: ``(tokens, heads, 2)`` float32. The first number is the largest ``q . k /
        sqrt(head_dim)`` (with a soft cap, the largest capped logit divided by ``sqrt(head_dim)``), the second the sum
        of the exponentials.
    """
    bmm1_scale = number_on_host(bmm1_scale)
    encoding = (pos_encoding_mode or "none").lower()
    if encoding not in ("none", "alibi"):
        raise ArgumentError(f"{_OP}: pos_encoding_mode must be 'alibi' or None, got {pos_encoding_mode!r}")
    prompt = _unpack(qkv, input_layout, block_tables, batch_size)
    mode = mask_mode.lower()
    options = _Options(
        mask_mode=mode,
        window_left=window_left if mode in ("sliding_window", "padding") else -1,
        chunk=chunked_attention_size if mode in ("chunked", "padding") else 0,
        soft_cap=logits_soft_cap_scale or 0.0,
        alibi=encoding == "alibi",
        sinks=None if sinks is None else sinks.reshape(-1).float(),
        stats=save_softmax_stats,
    )
    _check(prompt, options, input_layout)
    q = prompt.q
    if out is None:
        dtype = q.dtype if out_dtype is None else canonicalize_torch_dtype(out_dtype)
        out = q.new_empty((*q.shape[:2], prompt.v.shape[-1]), dtype=dtype)
    stats = q.new_zeros((*q.shape[:2], 2), dtype=torch.float32) if save_softmax_stats else None
    tables = {"cum_seq_lens_q": cum_seq_lens_q, "cum_seq_lens_kv": cum_seq_lens_kv, "seq_lens": seq_lens}
    rows, begins, lengths = to_host(_OP, **tables)
    if not (rows.size == begins.size == lengths.size + 1 == batch_size + 1):
        raise ArgumentError(
            f"{_OP}: cum_seq_lens_q, cum_seq_lens_kv, seq_lens must have {batch_size + 1}, {batch_size + 1}, "
            f"{batch_size} elements (batch_size), got {rows.size}, {begins.size}, {lengths.size}"
        )
    _check_rows("cum_seq_lens_q", rows, "q", q.shape[0])
    if prompt.tables is None:
        _check_rows("cum_seq_lens_kv", begins, "k", prompt.k.shape[0])
    result = _attend(prompt, options, rows, begins, lengths, workspace_buffer, bmm1_scale, stats, out)
    to_output(_OP, result, out, bmm2_scale, "bmm2_scale")
    if stats is None:
        return out
    if isinstance(bmm1_scale, torch.Tensor) and not options.soft_cap:
        stats[..., 0] /= bmm1_scale.reshape(())  # bmm1_scale multiplied q, so the maximum logit includes it
    return out, stats


def _attend(
    prompt: _Prompt,
    options: _Options,
    rows: np.ndarray,
    begins: np.ndarray,
    lengths: np.ndarray,
    workspace: torch.Tensor,
    bmm1_scale: Factor,
    stats: Optional[torch.Tensor],
    target: torch.Tensor,
) -> torch.Tensor:
    """Compute the result before ``bmm2_scale``, in ``target`` if kernels can write its dtype."""
    q, device = prompt.q, prompt.q.device
    dtype = torch.bfloat16 if q.dtype in FP8 else q.dtype
    q = q.to(dtype)  # every 8-bit float is exact in 16 bits
    q, sm_scale = scale_logits(_OP, q, 1.0, bmm1_scale=bmm1_scale)
    module, extras = _module_of(prompt, options, dtype, sm_scale, stats)
    if knobs.fmha_v2_verbose:
        _report(prompt, options, lengths)
    if prompt.tables is not None:
        pages = prompt.tables.shape[-1]
        begins = (np.arange(lengths.size + 1) * pages).astype(np.int32)
    layout_heads = prompt.k.shape[-2] if prompt.layout == 0 else prompt.k.shape[-3]
    int_workspace = torch.empty(_INT_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    no_mirror = torch.empty(0, dtype=torch.uint8, device="cpu")  # unused: modules have their own pinned memory
    causal = options.mask_mode != "padding"
    shares_launch = prompt.tables is not None and not options.chunk
    info = module.plan(
        workspace, int_workspace, no_mirror,
        *(torch.from_numpy(x) for x in (rows, begins, lengths)),
        int(rows[-1]), lengths.size, q.shape[1], layout_heads, prompt.page_size, False, q.shape[-1], prompt.v.shape[-1],
        causal, options.window_left, -1, options.stats, 0 if shares_launch else -1, 0,
    )  # fmt: skip
    shape = (*q.shape[:2], prompt.v.shape[-1])
    if tuple(target.shape) != shape:
        raise ArgumentError(f"{_OP}: out must have shape {shape}, got {tuple(target.shape)}")
    out = target if target.dtype == dtype else q.new_empty(shape)
    qo_indptr, kv_indptr = (torch.from_numpy(x).to(device, non_blocking=True) for x in (rows, begins))
    mask = CUSTOM if options.chunk else CAUSAL if causal else NON_CAUSAL
    tail = (out, None, mask, prompt.layout, options.window_left, use_pdl(q, None), *extras)
    head = (workspace, int_workspace, info, q, prompt.k, prompt.v, qo_indptr, kv_indptr)
    if prompt.tables is None:
        module.ragged_run(*head, *tail)
    else:
        tables = prompt.tables if prompt.tables.ndim == 2 else prompt.tables[:, 0].contiguous()
        last = torch.from_numpy(lengths - (pages - 1) * prompt.page_size).to(device, non_blocking=True)
        module.paged_run(*head, tables.reshape(-1), last, *tail)
    return out


def _report(prompt: _Prompt, options: _Options, lengths: np.ndarray) -> None:
    """Print the shapes of a call and the kernels that serve it to stderr (FLASHINFER_FMHA_V2_VERBOSE)."""
    q, k, v = prompt.q, prompt.k, prompt.v
    keys = "rows" if prompt.tables is None else f"pages of {prompt.page_size}"
    kernels = "a variant of batch prefill" if options.needs_variant else "batch prefill"
    say(
        f"{_OP}: {lengths.size} requests, {q.shape[0]} queries of {q.shape[1]} heads, {q.dtype}; keys {k.dtype} in "
        f"{keys}; head dims {k.shape[-1]} and {v.shape[-1]}; mask {options.mask_mode}; served by {kernels}, "
        f"{backend_of(q)}"
    )


def _module_of(
    prompt: _Prompt, options: _Options, dtype: torch.dtype, sm_scale: float, stats: Optional[torch.Tensor]
) -> tuple[Any, tuple[Any, ...]]:
    """Return the module that serves a call, and the last arguments of its run functions."""
    k, v = prompt.k, prompt.v
    device, slopes = backend_of(k), None
    dtypes, dims = (dtype, k.dtype, dtype, torch.int32), (k.shape[-1], v.shape[-1])
    if options.alibi:
        slopes = alibi_slopes(prompt.q.shape[1], prompt.q.device)
    if not options.needs_variant:
        flags = (2 if options.alibi else 0, False, options.soft_cap > 0, False)
        module = get_batch_prefill_module("fa2", *dtypes, *dims, *flags, device=device)
        return module, (None, None, slopes, None, None, None, options.soft_cap, sm_scale, 1.0, 1.0, 0)
    flags = (options.soft_cap > 0, options.alibi, options.chunk > 0, options.stats)
    words = ", ".join(str(flag).lower() for flag in flags)
    uri = (
        f"batch_prefill_prompt_q_{_short[dtype]}_kv_{_short[k.dtype]}_head_dim_{dims[0]}_{dims[1]}"
        f"_cap_{flags[0]}_alibi_{flags[1]}_chunks_{flags[2]}_stats_{flags[3]}"
    )
    tensors = ("maybe_sink", "maybe_alibi_slopes", "maybe_stats")
    scalars = ("sm_scale", "logits_soft_cap", "chunk_mask", "stats_scale")
    types = (("float",) * 3, scalars, ("double", "double", "int64_t", "double"))
    module = get_customize_batch_prefill_module(
        "fa2", uri, *dtypes, *dims, tensors, *types, f"PromptAttention<{words}>", prompt_decl, device=device
    )
    root = math.sqrt(prompt.q.shape[-1])
    stats_scale = 1.0 / root if options.soft_cap else 1.0 / (sm_scale * root)
    return module, (options.sinks, slopes, stats, sm_scale, options.soft_cap, -options.chunk, stats_scale)


@functools.cache
def get_trtllm_fmha_v2_module(
    input_layout: str, input_dtype: torch.dtype, output_dtype: Optional[torch.dtype] = None
) -> Any:
    """Return the module behind ``trtllm_fmha_v2_prefill`` for a head_dim of 128, built and loaded on first use."""
    return gen_fmha_v2_module(input_layout, input_dtype, output_dtype).build_and_load()
