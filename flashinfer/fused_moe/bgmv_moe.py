# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters of experts (multi-LoRA): one adapter per token, one pair of matrices per (adapter, expert).

Banks are ``A (max_loras, num_experts, rank, features)`` and ``B (max_loras, num_experts, features_out, rank)``, float16
or bfloat16. Kernels find the matrices by address, so that the banks of several slices (gate and up, say) need not be
one tensor: :func:`fill_w_ptr` writes the table. A pair is a token and one of its experts.
"""

from __future__ import annotations

import functools
from typing import Any, Optional, Sequence

import torch

from .._runtime.allocation import new_empty
from .._runtime.dispatch import NativeFunction, use_pdl
from .._runtime.errors import ArgumentError
from .._runtime.not_copied import NotCopied
from .._runtime.torch_ops import called, register_custom_op
from ..api_logging import flashinfer_api
from ..jit.fused_moe.bgmv_moe import get_bgmv_moe_module
from ..trace.templates.bgmv_moe import (
    bgmv_moe_expand_trace,
    bgmv_moe_gemm1_lora_delta_trace,
    bgmv_moe_gemm2_lora_delta_trace,
    bgmv_moe_shrink_trace,
    bgmv_moe_trace,
)

__all__ = [
    "bgmv_moe",
    "bgmv_moe_expand",
    "bgmv_moe_gemm1_lora_delta",
    "bgmv_moe_gemm2_lora_delta",
    "bgmv_moe_shrink",
    "fill_w_ptr",
    "has_bgmv_moe",
]

_native_shrink = NativeFunction(get_bgmv_moe_module, "bgmv_moe_shrink")
_native_expand = NativeFunction(get_bgmv_moe_module, "bgmv_moe_expand")
_native_apply = NativeFunction(get_bgmv_moe_module, "bgmv_moe_apply")
_HALVES = (torch.float16, torch.bfloat16)
_INDICES = (torch.int32, torch.int64)
_MIXED = -2  # sizes of the banks of a table that differ, as bgmv_moe.cu knows them
_NOT_NOTED = -1  # those of a table whose banks nobody noted, or whose place has a bank

#: Up to so many pairs each block of the kernel looks for the pairs of its token; more are sorted before. All blocks
#: together read tokens times pairs numbers: 4 MB for 256 tokens with eight experts, for each 128 columns.
_SEARCHED_PAIRS = 2048


@register_custom_op("flashinfer::bgmv_moe_shrink", mutates_args=("y",))
@called("bgmv_moe_shrink")
def _shrink(
    y: torch.Tensor,
    x: torch.Tensor,
    w_ptr: torch.Tensor,
    token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    lora_ids: torch.Tensor,
    lora_stride: int,
    noted: int,
    per_pair_input: bool,
) -> None:
    is_cuda = x.is_cuda
    pdl = is_cuda and use_pdl(x, None)
    _native_shrink[is_cuda](y, x, w_ptr, token_ids, expert_ids, lora_ids, lora_stride, noted, per_pair_input, pdl)


@register_custom_op("flashinfer::bgmv_moe_expand", mutates_args=("y",))
@called("bgmv_moe_expand")
def _expand(
    y: torch.Tensor,
    x: torch.Tensor,
    w_ptr: torch.Tensor,
    token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    lora_ids: torch.Tensor,
    weights: Optional[torch.Tensor],
    slice_starts: torch.Tensor,
    order: Optional[torch.Tensor],
    offsets: Optional[torch.Tensor],
    columns: int,
    lora_stride: int,
    noted: int,
    is_bf16: bool,
    finalize: bool,
) -> None:
    _native_expand[x.is_cuda](
        *(y, x, w_ptr, token_ids, expert_ids, lora_ids, weights, slice_starts, order, offsets),
        *(columns, lora_stride, noted, is_bf16, finalize, use_pdl(x, None)),
    )


@register_custom_op("flashinfer::bgmv_moe_apply", mutates_args=("out", "low"))
@called("bgmv_moe")
def _apply(
    out: torch.Tensor,
    low: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    token_ids: Optional[torch.Tensor],
    expert_ids: torch.Tensor,
    lora_ids: torch.Tensor,
    rows: Optional[torch.Tensor],
    weights: Optional[torch.Tensor],
    order: Optional[torch.Tensor],
    offsets: Optional[torch.Tensor],
    lora_stride_a: int,
    lora_stride_b: int,
    noted_a: int,
    noted_b: int,
    start: int,
    zero_columns: int,
    scale: float,
) -> None:
    """Launch both kernels, which write all of ``low`` that is read and these columns of ``out``."""
    _native_apply[x.is_cuda](
        *(out, low, x, a, b, token_ids, expert_ids, lora_ids, rows, weights, order, offsets),
        *(lora_stride_a, lora_stride_b, noted_a, noted_b, start, zero_columns, scale, use_pdl(x, None)),
    )


@register_custom_op("flashinfer::bgmv_moe_addresses", mutates_args=("row",))
def _write_addresses(row: torch.Tensor, weights: torch.Tensor) -> None:
    """Write the addresses of the matrices of adapter 0; on the device of the table, so that a CUDA graph can do it."""
    experts = torch.arange(weights.shape[1], device=row.device)
    row.copy_(experts * (weights.stride(1) * weights.element_size()) + weights.data_ptr())


class Banks(NotCopied, dict[int, torch.Tensor]):
    """The banks of a table, by row, and what calls that use the table compare with their arguments."""

    #: Adapters that all banks have, rows, columns and dtype: what the launcher looks at (``Noted`` of bgmv_moe.cu).
    noted: int
    #: Elements between adapters; None where there is one adapter, so that nothing is multiplied by it.
    stride: Optional[int]

    def __init__(self, banks: dict[int, torch.Tensor]) -> None:
        super().__init__(banks)
        facts = {(*bank.shape[2:], bank.dtype) for bank in banks.values()}
        strides = {bank.stride(0) for bank in banks.values() if bank.shape[0] > 1}
        self.stride = next(iter(strides), None)
        self.noted = _MIXED
        if len(facts) == 1 and len(strides) <= 1:
            [(rows, columns, dtype)] = facts
            loras = min(bank.shape[0] for bank in banks.values())
            self.noted = loras << 41 | rows << 21 | columns << 1 | (dtype is torch.bfloat16)


def _noted_of(op: str, banks: Banks, lora_stride: int, name: str = "lora_stride") -> int:
    """Return ``banks.noted`` in a call with a stride that is not theirs, if they have no stride or differ in it."""
    if banks.stride is not None and banks.noted != _MIXED:
        raise ArgumentError(f"{op}: {name} must be {banks.stride}, which fill_w_ptr returned, got {lora_stride}")
    return banks.noted


def _pairs_by_token(token_ids: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pairs ordered by token, and where those of each token begin: sums then have one order."""
    ids, order = torch.sort(token_ids, stable=True)
    return order, torch.searchsorted(ids, torch.arange(tokens + 1, dtype=ids.dtype, device=ids.device))


def _order_of_many(token_ids: torch.Tensor, tokens: int) -> tuple[Optional[torch.Tensor], Optional[torch.Tensor]]:
    """Return the order of more pairs than the kernel searches."""
    return _pairs_by_token(token_ids, tokens) if token_ids.shape[0] > _SEARCHED_PAIRS else (None, None)


def _dense(x: torch.Tensor, dtypes: Sequence[torch.dtype]) -> torch.Tensor:
    """Return x as kernels read it, which it mostly is: contiguous, with one of these dtypes or the last of them."""
    if x.dtype not in dtypes:
        x = x.to(dtypes[-1])
    return x if x.is_contiguous() else x.contiguous()


@functools.cache
def has_bgmv_moe() -> bool:
    """Tell whether the kernels exist: they do, for the CPU and for every GPU."""
    return True


def fill_w_ptr(w_ptr: torch.Tensor, weights: torch.Tensor, num_experts: int, slice_id: int) -> int:
    """Write the addresses of one bank's matrices into a table, and return the elements between adapters.

    Parameters
    ----------
    w_ptr : torch.Tensor
        ``(slices, num_experts)`` int64; row ``slice_id`` receives the addresses of adapter 0. The tensor object also
        keeps ``weights`` alive, as ``w_ptr.banks[slice_id]``, and calls that use it compare their sizes, dtype, stride
        and number of adapters with those of the banks. Copies and views of it, and files that it was saved to, have
        the addresses only: with these nothing is compared, and it is the caller who must know that the banks are still
        there, as large as the call assumes, and that they have every adapter that a token asks for.
    weights : torch.Tensor
        ``(max_loras, num_experts, rows, columns)`` float16 or bfloat16, the last two dimensions contiguous; on the
        device of the table. Banks of one table have one shape, stride and dtype: a call takes them together.
    num_experts : int
        Experts of the bank.
    slice_id : int
        Row of the table.

    Returns
    -------
    int
        ``weights.stride(0)``: the ``lora_stride`` of calls that use the table.
    """
    _check_bank("fill_w_ptr", weights, num_experts)
    if slice_id < 0:
        raise ArgumentError(f"fill_w_ptr: slice_id must be at least 0, got {slice_id}")
    if w_ptr.dtype != torch.int64 or w_ptr.dim() != 2 or w_ptr.shape[1] != num_experts or slice_id >= w_ptr.shape[0]:
        raise ArgumentError(
            f"fill_w_ptr: w_ptr must be (more than {slice_id}, {num_experts}) int64, got {tuple(w_ptr.shape)} "
            f"{w_ptr.dtype}"
        )
    if w_ptr.device != weights.device or weights.device.type == "meta":
        raise ArgumentError(
            f"fill_w_ptr: weights must have memory on the device of w_ptr, {w_ptr.device}, got {weights.device}"
        )
    if weights.shape[0] >= 1 << 22 or max(weights.shape[2:]) >= 1 << 20:
        raise ArgumentError(
            f"fill_w_ptr: weights must have fewer than 2^22 adapters of less than 2^20 rows and columns, got "
            f"{tuple(weights.shape)}"
        )
    _write_addresses(w_ptr[slice_id], weights)
    table: Any = w_ptr
    table.lora_dtype = weights.dtype  # what an address does not tell
    table.banks = Banks({**(getattr(table, "banks", None) or {}), slice_id: weights})
    return weights.stride(0)


def _check_bank(op: str, weights: torch.Tensor, num_experts: int) -> None:
    shape, strides = weights.shape, weights.stride()
    if len(shape) != 4 or shape[1] != num_experts or weights.dtype not in _HALVES:
        raise ArgumentError(
            f"{op}: weights must be (max_loras, {num_experts}, rows, columns) in float16 or bfloat16, got "
            f"{tuple(shape)} in {weights.dtype}"
        )
    if strides[3] == 1 and strides[2] == shape[3]:
        return
    is_contiguous = (shape[2] == 1 or strides[2] == shape[3]) and (shape[3] == 1 or strides[3] == 1)
    if weights.numel() and not is_contiguous:
        raise ArgumentError(
            f"{op}: weights must be contiguous in the last two dimensions, got strides {weights.stride()}"
        )


@flashinfer_api(trace=bgmv_moe_shrink_trace)
def bgmv_moe_shrink(
    y: torch.Tensor,
    x: torch.Tensor,
    w_ptr: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    lora_indices: torch.Tensor,
    lora_stride: int,
    *,
    per_pair_input: bool = False,
) -> None:
    r"""Multiply by the first matrix of the adapter: ``y[s, p] += A[s] x[token of p]``, with float32 sums.

    Parameters
    ----------
    y : torch.Tensor
        ``(slices, pairs, rank)`` float32, float16 or bfloat16: is added to. Pairs without adapter are left alone.
    x : torch.Tensor
        ``(num_tokens, features)``, or ``(pairs, features)`` with ``per_pair_input``; the dtype of the bank.
    w_ptr : torch.Tensor
        ``(slices, num_experts)`` int64, of :func:`fill_w_ptr`.
    sorted_token_ids, expert_ids : torch.Tensor
        ``(pairs,)`` int64: token and expert of each pair, in any order. Numbers out of range: the pair is skipped.
    lora_indices : torch.Tensor
        ``(num_tokens,)`` int64: adapter of each token; negative: none. One that the banks do not have is an error on
        the CPU, and none on CUDA, where an error would have to wait for the number.
    lora_stride : int
        Elements between adapters of the bank.
    per_pair_input : bool
        Whether ``x`` has a row for each pair.

    Examples
    --------
    >>> bank = torch.ones(2, 4, 8, 64, dtype=torch.bfloat16)  # two adapters of four experts, rank 8
    >>> w_ptr = torch.zeros(1, 4, dtype=torch.int64)
    >>> stride = flashinfer.fused_moe.fill_w_ptr(w_ptr, bank, 4, 0)
    >>> tokens, experts, adapters = torch.tensor([0, 1, 1]), torch.tensor([2, 0, 3]), torch.tensor([1, -1])
    >>> y = torch.zeros(1, 3, 8)
    >>> flashinfer.fused_moe.bgmv_moe_shrink(
    ...     y, torch.ones(2, 64, dtype=torch.bfloat16), w_ptr, tokens, experts, adapters, stride
    ... )
    >>> y[0, :, 0]
    tensor([64.,  0.,  0.])
    """
    noted = _NOT_NOTED
    if banks := getattr(w_ptr, "banks", None):
        noted = banks.noted if banks.stride == lora_stride else _noted_of("bgmv_moe_shrink", banks, lora_stride)
    _shrink(y, x, w_ptr, sorted_token_ids, expert_ids, lora_indices, lora_stride, noted, per_pair_input)


@flashinfer_api(trace=bgmv_moe_expand_trace)
def bgmv_moe_expand(
    y: torch.Tensor,
    x: torch.Tensor,
    w_ptr: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    lora_indices: torch.Tensor,
    slice_start_loc: torch.Tensor,
    output_slices: Sequence[int],
    lora_stride: int,
    *,
    finalize: bool = True,
) -> None:
    r"""Multiply by the second matrix of the adapter, and add up the experts of each token.

    With ``o = slice_start_loc[s]`` and ``f = output_slices[0]``, which all slices share: ``y[t, o : o + f] += sum over
    the pairs p of t of topk_weights[p] * B[s] x[s, p]``, in the order of pairs; without ``finalize``,
    ``y[p, o : o + f] = B[s] x[s, p]``. Sums are float32; results are the same bits at each call.

    Parameters
    ----------
    y : torch.Tensor
        ``(num_tokens, columns)``, or ``(pairs, columns)`` without ``finalize``: float32, float16 or bfloat16. Rows of
        skipped pairs are left alone.
    x : torch.Tensor
        ``(slices, pairs, rank)``: float32, float16 or bfloat16. The bank has the dtype that :func:`fill_w_ptr` noted on
        ``w_ptr``, else that of ``x``.
    w_ptr : torch.Tensor
        ``(slices, num_experts)`` int64, of :func:`fill_w_ptr`.
    sorted_token_ids, expert_ids, lora_indices : torch.Tensor
        As for :func:`bgmv_moe_shrink`.
    topk_weights : torch.Tensor
        ``(pairs,)`` float32; not read without ``finalize``.
    slice_start_loc : torch.Tensor
        ``(slices,)`` int64: first column of each slice.
    output_slices : Sequence[int]
        Columns of each slice, all the same.
    lora_stride : int
        Elements between adapters of the bank.
    finalize : bool
        Whether to weight and add up the pairs of a token.

    Examples
    --------
    >>> bank = torch.ones(2, 4, 64, 8, dtype=torch.bfloat16)  # two adapters of four experts, rank 8
    >>> w_ptr = torch.zeros(1, 4, dtype=torch.int64)
    >>> stride = flashinfer.fused_moe.fill_w_ptr(w_ptr, bank, 4, 0)
    >>> tokens, experts, adapters = torch.tensor([0, 0, 1]), torch.tensor([2, 0, 3]), torch.tensor([1, -1])
    >>> x, y, weights = torch.ones(1, 3, 8), torch.zeros(2, 64), torch.tensor([0.25, 0.5, 1.0])
    >>> starts = torch.zeros(1, dtype=torch.int64)
    >>> flashinfer.fused_moe.bgmv_moe_expand(y, x, w_ptr, tokens, experts, weights, adapters, starts, [64], stride)
    >>> y[:, 0]
    tensor([6., 0.])
    """
    dtype = getattr(w_ptr, "lora_dtype", x.dtype)
    if dtype not in _HALVES:
        raise ArgumentError(
            f"bgmv_moe_expand: x must be float16 or bfloat16, which is then the dtype of the bank, unless fill_w_ptr "
            f"filled w_ptr, got {x.dtype}"
        )
    slices = len(output_slices)
    if slices != w_ptr.shape[0] or (slices > 1 and any(size != output_slices[0] for size in output_slices)):
        raise ArgumentError(
            f"bgmv_moe_expand: output_slices must be {w_ptr.shape[0]} equal numbers, got {list(output_slices)}"
        )
    order, offsets = _order_of_many(sorted_token_ids, lora_indices.shape[0]) if finalize else (None, None)
    weights = topk_weights if finalize else None
    noted = _NOT_NOTED
    if banks := getattr(w_ptr, "banks", None):
        noted = banks.noted if banks.stride == lora_stride else _noted_of("bgmv_moe_expand", banks, lora_stride)
    _expand(
        *(y, x, w_ptr, sorted_token_ids, expert_ids, lora_indices, weights, slice_start_loc, order, offsets),
        *(int(output_slices[0]) if slices else 0, lora_stride, noted, dtype is torch.bfloat16, finalize),
    )


@flashinfer_api(trace=bgmv_moe_trace)
def bgmv_moe(
    x: torch.Tensor,
    lora_a_weights: Sequence[torch.Tensor],
    lora_b_weights: Sequence[torch.Tensor],
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    lora_indices: torch.Tensor,
    topk_weights: torch.Tensor,
    num_experts: int,
    output_dim: Optional[int] = None,
) -> torch.Tensor:
    r"""Apply both matrices of the adapters: ``out[t, slice s] = sum over pairs p of t of weight_p * B[s] A[s] x[t]``.

    Parameters
    ----------
    x : torch.Tensor
        ``(num_tokens, features)`` float16 or bfloat16, the dtype of the banks.
    lora_a_weights : Sequence[torch.Tensor]
        One bank ``(max_loras, num_experts, rank, features)`` for each slice.
    lora_b_weights : Sequence[torch.Tensor]
        One bank ``(max_loras, num_experts, features_out, rank)`` for each slice; the sizes of slices may differ.
    sorted_token_ids, expert_ids, lora_indices : torch.Tensor
        As for :func:`bgmv_moe_shrink`.
    topk_weights : torch.Tensor
        ``(pairs,)`` float32.
    num_experts : int
        Experts of the banks.
    output_dim : Optional[int]
        Columns of the result, at least those of all slices; None: those of all slices. Further columns are zero.

    Returns
    -------
    torch.Tensor
        ``(num_tokens, output_dim)``, dtype of ``x``; tokens without adapter get zeros. What is between the matrices is
        float32.

    Examples
    --------
    >>> a = torch.ones(2, 4, 8, 64, dtype=torch.bfloat16)  # two adapters of four experts, rank 8
    >>> b = torch.ones(2, 4, 32, 8, dtype=torch.bfloat16)
    >>> tokens, experts, adapters = torch.tensor([0, 1]), torch.tensor([2, 0]), torch.tensor([1, -1])
    >>> x, weights = torch.ones(2, 64, dtype=torch.bfloat16), torch.ones(2)
    >>> flashinfer.fused_moe.bgmv_moe(x, [a], [b], tokens, experts, adapters, weights, 4)[:, 0]
    tensor([512.,   0.], dtype=torch.bfloat16)
    """
    if len(lora_a_weights) != len(lora_b_weights) or not lora_a_weights:
        raise ArgumentError(
            f"bgmv_moe: lora_a_weights and lora_b_weights must have one bank per slice, got {len(lora_a_weights)} and "
            f"{len(lora_b_weights)}"
        )
    columns = sum(bank.shape[2] for bank in lora_b_weights)
    width = columns if output_dim is None else output_dim
    if width < columns:
        raise ArgumentError(f"bgmv_moe: output_dim must be at least {columns}, the columns of all slices, got {width}")
    order, offsets = _order_of_many(sorted_token_ids, lora_indices.shape[0])
    of_pairs = (sorted_token_ids, expert_ids, lora_indices, None, topk_weights, order, offsets)
    out = new_empty(x, x.dtype, x.shape[0], width)
    pairs, features, start = sorted_token_ids.shape[0], x.shape[1], 0
    for a, b in zip(lora_a_weights, lora_b_weights, strict=True):
        shape_a, shape_b = a.shape, b.shape
        if a.dtype != x.dtype or b.dtype != x.dtype or shape_a[-1] != features or shape_a[2] != shape_b[3]:
            raise ArgumentError(
                f"bgmv_moe: banks must be (..., rank, {features}) and (..., rank) in {x.dtype}, got "
                f"{tuple(shape_a)} in {a.dtype} and {tuple(shape_b)} in {b.dtype}"
            )
        _check_bank("bgmv_moe", a, num_experts)
        _check_bank("bgmv_moe", b, num_experts)
        low, size = new_empty(x, torch.float32, 1, pairs, shape_a[2]), shape_b[2]
        zeros = width - columns if start + size == columns else 0  # the last slice, or one before slices of no columns
        _apply(out, low, x, a, b, *of_pairs, a.stride(0), b.stride(0), _NOT_NOTED, _NOT_NOTED, start, zeros, 1.0)
        start += size
    return out


def _slices(op: str, name: str, w_ptr: torch.Tensor, most: int) -> int:
    """Return the slices of a table, which may have one dimension if there is one."""
    shape = w_ptr.shape
    slices = 1 if len(shape) == 1 else shape[0] if len(shape) == 2 else 0
    if not 0 < slices <= most:
        raise ArgumentError(
            f"{op}: {name} must be (num_experts,) or (slices, num_experts) with {'1 or 2' if most > 1 else 1} slices, "
            f"got {tuple(shape)}"
        )
    return slices


def _check_sizes(op: str, **sizes: int) -> None:
    for name, size in sizes.items():
        if size < 0:
            raise ArgumentError(f"{op}: {name} must be at least 0, got {size}")


def _check_lora_dtype(op: str, lora_dtype: torch.dtype) -> None:
    if lora_dtype not in _HALVES:
        raise ArgumentError(f"{op}: lora_dtype must be torch.float16 or torch.bfloat16, got {lora_dtype}")


@flashinfer_api(trace=bgmv_moe_gemm1_lora_delta_trace)
def bgmv_moe_gemm1_lora_delta(
    hidden_states: torch.Tensor,
    w_ptr_a: torch.Tensor,
    lora_stride_a: int,
    w_ptr_b: torch.Tensor,
    lora_stride_b: int,
    topk_ids: torch.Tensor,
    lora_ids: torch.Tensor,
    rank: int,
    intermediate_size: int,
    *,
    lora_dtype: torch.dtype = torch.bfloat16,
    scale: float = 1.0,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    r"""Return what adapters add to the first product of a gated layer: ``scale * [B_gate A_gate x ; B_up A_up x]``.

    Parameters
    ----------
    hidden_states : torch.Tensor
        ``(num_tokens, hidden_size)``; rounded to ``lora_dtype`` where it has another dtype.
    w_ptr_a : torch.Tensor
        ``(2, num_experts)`` int64, gate and up; or ``(num_experts,)``: one A for both.
    w_ptr_b : torch.Tensor
        ``(2, num_experts)`` int64, each of ``intermediate_size`` rows; or ``(num_experts,)``: one B of
        ``2 * intermediate_size`` rows, which goes with one A.
    lora_stride_a, lora_stride_b : int
        Elements between adapters of the banks.
    topk_ids : torch.Tensor
        ``(num_tokens, top_k)`` int32 or int64.
    lora_ids : torch.Tensor
        ``(num_tokens,)`` int32 or int64: adapter of each token; negative: none. One that the banks do not have is an
        error on the CPU, and none on CUDA, where an error would have to wait for the number.
    rank, intermediate_size : int
        Sizes of the matrices.
    lora_dtype, out_dtype : torch.dtype
        dtype of the banks, and of the result.
    scale : float
        Factor of the result.

    Returns
    -------
    torch.Tensor
        ``(num_tokens, top_k, 2 * intermediate_size)``; zeros for tokens without adapter.

    Examples
    --------
    >>> a = [torch.ones(2, 4, 8, 64, dtype=torch.bfloat16) for _ in range(2)]  # gate and up: two adapters, four experts
    >>> b = [torch.ones(2, 4, 32, 8, dtype=torch.bfloat16) for _ in range(2)]
    >>> to_a, to_b = torch.zeros(2, 4, dtype=torch.int64), torch.zeros(2, 4, dtype=torch.int64)
    >>> fill = flashinfer.fused_moe.fill_w_ptr
    >>> stride_a, _ = [fill(to_a, bank, 4, i) for i, bank in enumerate(a)]
    >>> stride_b, _ = [fill(to_b, bank, 4, i) for i, bank in enumerate(b)]
    >>> x, ids, adapters = torch.ones(3, 64, dtype=torch.bfloat16), torch.tensor([[0, 1]] * 3), torch.tensor([0, 1, -1])
    >>> delta = flashinfer.fused_moe.bgmv_moe_gemm1_lora_delta(
    ...     x, to_a, stride_a, to_b, stride_b, ids, adapters, rank=8, intermediate_size=32
    ... )
    >>> delta.shape, delta[:, 0, 0].tolist()
    (torch.Size([3, 2, 64]), [512.0, 512.0, 0.0])
    """
    op = "bgmv_moe_gemm1_lora_delta"
    _check_lora_dtype(op, lora_dtype)
    slices_a, slices_b = _slices(op, "w_ptr_a", w_ptr_a, 2), _slices(op, "w_ptr_b", w_ptr_b, 2)
    if slices_b < slices_a:
        raise ArgumentError(f"{op}: w_ptr_b must have the two slices of w_ptr_a, got {tuple(w_ptr_b.shape)}")
    if rank < 0 or intermediate_size < 0:
        _check_sizes(op, rank=rank, intermediate_size=intermediate_size)
    noted_a = noted_b = _NOT_NOTED
    if a := getattr(w_ptr_a, "banks", None):
        noted_a = a.noted if a.stride == lora_stride_a else _noted_of(op, a, lora_stride_a, "lora_stride_a")
    if b := getattr(w_ptr_b, "banks", None):
        noted_b = b.noted if b.stride == lora_stride_b else _noted_of(op, b, lora_stride_b, "lora_stride_b")
    tokens, top_k = topk_ids.shape
    x = hidden_states if hidden_states.dtype is lora_dtype else hidden_states.to(lora_dtype)
    low = new_empty(x, torch.float32, slices_a, tokens * top_k, rank)
    out = new_empty(x, out_dtype, tokens, top_k, 2 * intermediate_size)
    _apply(
        *(out, low, x, w_ptr_a, w_ptr_b, None, _dense(topk_ids, _INDICES), _dense(lora_ids, _INDICES), None, None),
        *(None, None, lora_stride_a, lora_stride_b, noted_a, noted_b, 0, 0, float(scale)),
    )
    return out


@flashinfer_api(trace=bgmv_moe_gemm2_lora_delta_trace)
def bgmv_moe_gemm2_lora_delta(
    gemm1_activation_output: torch.Tensor,
    expanded_idx_to_permuted_idx: torch.Tensor,
    w_ptr_a: torch.Tensor,
    lora_stride_a: int,
    w_ptr_b: torch.Tensor,
    lora_stride_b: int,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    lora_ids: torch.Tensor,
    rank: int,
    hidden_size: int,
    *,
    lora_dtype: torch.dtype = torch.bfloat16,
    scale: float = 1.0,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    r"""Return what adapters add to a layer's output: ``scale * sum over slots j of w[t, j] * B A a[row of (t, j)]``.

    Parameters
    ----------
    gemm1_activation_output : torch.Tensor
        ``(rows, intermediate_size)``, the hidden values in expert order; rounded to ``lora_dtype``.
    expanded_idx_to_permuted_idx : torch.Tensor
        ``(num_tokens * top_k,)`` int32 or int64: row of each slot; negative: the slot adds nothing.
    w_ptr_a, w_ptr_b : torch.Tensor
        ``(num_experts,)`` or ``(1, num_experts)`` int64: A of ``(rank, intermediate_size)``, B of
        ``(hidden_size, rank)``.
    lora_stride_a, lora_stride_b : int
        Elements between adapters of the banks.
    topk_ids, topk_weights : torch.Tensor
        ``(num_tokens, top_k)``: int32 or int64 experts, and their weights.
    lora_ids : torch.Tensor
        ``(num_tokens,)`` int32 or int64: adapter of each token; negative: none. One that the banks do not have is an
        error on the CPU, and none on CUDA, where an error would have to wait for the number.
    rank, hidden_size : int
        Sizes of the matrices.
    lora_dtype, out_dtype : torch.dtype
        dtype of the banks, and of the result.
    scale : float
        Factor of the result.

    Returns
    -------
    torch.Tensor
        ``(num_tokens, hidden_size)``; zeros for tokens without adapter.

    Examples
    --------
    >>> a, b = torch.ones(2, 4, 8, 32, dtype=torch.bfloat16), torch.ones(2, 4, 64, 8, dtype=torch.bfloat16)
    >>> to_a, to_b = torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, 4, dtype=torch.int64)
    >>> stride_a, stride_b = (flashinfer.fused_moe.fill_w_ptr(t, w, 4, 0) for t, w in ((to_a, a), (to_b, b)))
    >>> hidden, rows = torch.ones(4, 32, dtype=torch.bfloat16), torch.arange(4)
    >>> ids, weights, adapters = torch.tensor([[0, 1]] * 2), torch.full((2, 2), 0.5), torch.tensor([0, -1])
    >>> delta = flashinfer.fused_moe.bgmv_moe_gemm2_lora_delta(
    ...     hidden, rows, to_a, stride_a, to_b, stride_b, ids, weights, adapters, rank=8, hidden_size=64
    ... )
    >>> delta.shape, delta[:, 0].tolist()
    (torch.Size([2, 64]), [256.0, 0.0])
    """
    op = "bgmv_moe_gemm2_lora_delta"
    _check_lora_dtype(op, lora_dtype)
    _slices(op, "w_ptr_a", w_ptr_a, 1)
    _slices(op, "w_ptr_b", w_ptr_b, 1)
    if rank < 0 or hidden_size < 0:
        _check_sizes(op, rank=rank, hidden_size=hidden_size)
    noted_a = noted_b = _NOT_NOTED
    if a := getattr(w_ptr_a, "banks", None):
        noted_a = a.noted if a.stride == lora_stride_a else _noted_of(op, a, lora_stride_a, "lora_stride_a")
    if b := getattr(w_ptr_b, "banks", None):
        noted_b = b.noted if b.stride == lora_stride_b else _noted_of(op, b, lora_stride_b, "lora_stride_b")
    tokens, top_k = topk_ids.shape
    if expanded_idx_to_permuted_idx.numel() != tokens * top_k:
        raise ArgumentError(
            f"{op}: expanded_idx_to_permuted_idx must have {tokens * top_k} elements (topk_ids), got "
            f"{expanded_idx_to_permuted_idx.numel()}"
        )
    x = gemm1_activation_output
    x = x if x.dtype is lora_dtype else x.to(lora_dtype)
    rows, weights = _dense(expanded_idx_to_permuted_idx, _INDICES), _dense(topk_weights, (torch.float32,))
    low = new_empty(x, torch.float32, 1, tokens * top_k, rank)
    out = new_empty(x, out_dtype, tokens, hidden_size)
    _apply(
        *(out, low, x, w_ptr_a, w_ptr_b, None, _dense(topk_ids, _INDICES), _dense(lora_ids, _INDICES), rows, weights),
        *(None, None, lora_stride_a, lora_stride_b, noted_a, noted_b, 0, 0, float(scale)),
    )
    return out
