# SPDX-License-Identifier: Apache-2.0
"""Index scores over a paged fp8 cache."""

from __future__ import annotations

import functools
from typing import Optional, Sequence, Union

import torch

from .._compat.unsupported import needs
from .._runtime.allocation import new_empty
from .._runtime.dispatch import NativeFunction
from .._runtime.knobs import knobs
from .._runtime.probes import probes
from .._runtime.requirements import backend_requirement
from .._runtime.torch_ops import called, register_custom_op
from ..api_logging import flashinfer_api
from ..jit.codegen import module_cache
from ..jit.indexer import SLAB, gen_indexer_modules, gen_mqa_logits_module, gen_mqa_logits_sm90_module
from ..trace.templates.indexer import fp8_paged_mqa_logits_trace
from .checks import OP, check_scores, check_values
from .schedule import block_count, get_mqa_logits_module, padded_seq_len, schedule_into

__all__ = ["fp4_paged_mqa_logits", "fp8_paged_mqa_logits", "precompile_paged_mqa_logits"]

get_mqa_logits_sm90_module = module_cache(gen_mqa_logits_sm90_module)
_native_scores = NativeFunction(get_mqa_logits_module, "mqa_logits")

#: True if index values are checked on the host. Read once at import: a look-up per call takes 1 us.
VALIDATE = knobs.validate_inputs


@functools.cache
def _is_hopper(index: int) -> bool:
    """Return True if a device, -1 for the CPU, has the kernel of mqa_logits_sm90/."""
    return index >= 0 and probes.is_sm90a_supported(torch.device("cuda", index))


@register_custom_op("flashinfer::fp8_paged_mqa_logits", mutates_args=("out",))
@called(OP)
def _scores(
    out: torch.Tensor,
    q: torch.Tensor,
    kv_fused: torch.Tensor,
    weights: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    schedule_meta: Optional[torch.Tensor],
) -> None:
    tensors = (out, q, kv_fused, weights, block_tables, seq_lens, max_seq_len)
    next_n, heads, dim = q.shape[1:]
    if dim % SLAB == 0 and _is_hopper(q.get_device()):
        if schedule_meta is None:
            schedule_meta = new_empty(q, torch.int32, block_count(q.device) + 1, 2)
            schedule_into(schedule_meta, seq_lens)
        run = get_mqa_logits_sm90_module(heads, dim, next_n).mqa_logits_sm90
        if run(*tensors, schedule_meta):
            return
        # Its loads need rows at multiples of 16 bytes. Queries are copied, so that their layout changes no bit of the
        # scores. A cache is too large for that: the other kernel, which rounds less in its products, reads it as it is.
        copy = q.clone(memory_format=torch.contiguous_format)
        if run(out, copy, *tensors[2:], schedule_meta):
            return
    _native_scores[q.is_cuda](*tensors)


@flashinfer_api(trace=fp8_paged_mqa_logits_trace)
@backend_requirement(backend_checks={}, common_check=check_scores)
def fp8_paged_mqa_logits(
    q: torch.Tensor,
    kv_fused: torch.Tensor,
    weights: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    *,
    output_dtype: torch.dtype = torch.float32,
    epi_dtype: torch.dtype = torch.float32,
    acc_dtype: torch.dtype = torch.float32,
    schedule_meta: Optional[torch.Tensor] = None,
    out: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    r"""Score the cached keys of each request for its newest ``next_n`` tokens.

    ``logits[b * next_n + t, pos] = scale[pos] * sum_h weights[b * next_n + t, h] * relu(q[b, t, h] . k[pos])``.

    Slot ``t`` sees positions ``0 .. seq_lens[b] - next_n + t``. Columns behind them have any value, and rows of
    requests without keys are not written. Page ids out of range are an error on the CPU; on CUDA their keys are zeros.

    Parameters
    ----------
    q : torch.Tensor
        ``(batch, next_n, heads, head_dim)`` float8_e4m3fn; slot ``next_n - 1`` is the newest token. Any strides but the
        last. ``head_dim`` is a multiple of 32 up to 256, ``heads`` of 4, ``next_n * heads`` of 8 up to 256.
    kv_fused : torch.Tensor
        ``(pages, block_size, 1, head_dim + 4)`` uint8, with ``block_size`` 32, 64 or 128. The bytes of a page are
        ``block_size * head_dim`` e4m3 numbers, token after token, then ``block_size`` float32 scales.
    weights : torch.Tensor
        ``(batch * next_n, heads)`` float32, any strides.
    block_tables : torch.Tensor
        ``(batch, width)`` int32: pages of each request. Entries behind its last page are not read.
    seq_lens : torch.Tensor
        ``(batch,)`` int32, any stride: keys that the newest slot sees.
    max_seq_len : int
        At least the largest of ``seq_lens``.
    output_dtype : torch.dtype
        float32 or float16.
    epi_dtype, acc_dtype : torch.dtype
        float32 or float16; sums are float32 in any case.
    schedule_meta : Optional[torch.Tensor]
        Result of :func:`compute_paged_mqa_logits_schedule`; computed if it is not given. One of other lengths may leave
        out scores.
    out : Optional[torch.Tensor]
        At least ``(batch * next_n, padded_seq_len(max_seq_len))``; its first rows are written, and a view returned.

    Returns
    -------
    torch.Tensor
        ``(batch * next_n, max_seq_len)``, a view of rows of whole splits of 256 columns.

    Examples
    --------
    >>> q = torch.randn(2, 1, 64, 128).to(torch.float8_e4m3fn)
    >>> pages, tables = torch.zeros(8, 64, 1, 132, dtype=torch.uint8), torch.arange(8, dtype=torch.int32).view(2, 4)
    >>> lengths = torch.tensor([200, 7], dtype=torch.int32)
    >>> flashinfer.indexer.fp8_paged_mqa_logits(q, pages, torch.rand(2, 64), tables, lengths, 200).shape
    torch.Size([2, 200])
    """
    rows = q.shape[0] * q.shape[1]
    if out is None:
        out = new_empty(q, output_dtype, rows, padded_seq_len(max_seq_len))
    if rows and max_seq_len:
        if VALIDATE:
            check_values(kv_fused, block_tables, seq_lens, max_seq_len, schedule_meta)
        _scores(out, q, kv_fused, weights, block_tables, seq_lens, max_seq_len, schedule_meta)
    return out[:rows, :max_seq_len]


fp4_paged_mqa_logits = needs(
    "fp4_paged_mqa_logits",
    "a GPU with fp4 tensor cores (SM100); fp8_paged_mqa_logits runs on Hopper",
    "q, q_sf, kv_fused, weights, block_tables, seq_lens, max_seq_len, *, sf_vec_size=32, output_dtype=torch.bfloat16, "
    "epi_dtype=torch.float32, is_kv_sf_interleaved=False, schedule_meta=None, out=None",
)


def precompile_paged_mqa_logits(
    device: Union[torch.device, str, None] = None,
    variants: Sequence[str] = ("fp8", "fp4"),
    output_dtypes: Optional[Sequence[torch.dtype]] = None,
    batch_sizes: Optional[Sequence[int]] = None,
) -> None:
    """Build and load the modules of :func:`fp8_paged_mqa_logits`, so that no call compiles.

    Parameters
    ----------
    device : Union[torch.device, str, None]
        Device that the modules are for; default: CUDA if there is a GPU, else the CPU.
    variants : Sequence[str]
        Without ``"fp8"`` there is nothing to build.
    output_dtypes, batch_sizes : Optional[Sequence]
        Accepted for compatibility: modules serve all of them.

    Examples
    --------
    >>> flashinfer.indexer.precompile_paged_mqa_logits("cpu")
    """
    if "fp8" not in variants:
        return
    target = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    if target.type == "cpu":
        gen_mqa_logits_module("cpu").build_and_load()
        return
    index = torch.cuda.current_device() if target.index is None else target.index
    for spec in gen_indexer_modules("cuda") if _is_hopper(index) else [gen_mqa_logits_module("cuda")]:
        spec.build_and_load()
