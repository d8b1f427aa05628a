# SPDX-License-Identifier: Apache-2.0
"""Work of an attention call, to turn a time into TFLOP/s and TB/s. Times are in milliseconds."""

from __future__ import annotations

from typing import Optional

import torch

from .._runtime.errors import ArgumentError

__all__ = [
    "attention_flops",
    "attention_flops_with_actual_seq_lens",
    "attention_tb_per_sec",
    "attention_tb_per_sec_with_actual_seq_lens",
    "attention_tflops_per_sec",
    "attention_tflops_per_sec_with_actual_seq_lens",
]


def _pairs_times_two(qo_len: int, kv_len: int, causal: bool) -> int:
    """Return twice the number of scored (query, key) pairs; causal queries are the last ones of the sequence."""
    if not causal:
        return 2 * qo_len * kv_len
    if qo_len > kv_len:
        raise ArgumentError(f"attention_flops: qo_seqlen must be at most kv_seqlen = {kv_len} (causal), got {qo_len}")
    return (2 * kv_len - qo_len) * qo_len


def attention_flops(
    batch_size: int,
    qo_seqlen: int,
    kv_seqlen: int,
    head_dim_qk: int,
    head_dim_vo: int,
    num_qo_heads: int,
    causal: bool,
) -> int:
    """Floating-point operations of ``batch_size`` equal requests: ``2 * pairs * heads * (head_dim_qk + head_dim_vo)``.

    Causal: ``2 * pairs`` is taken as ``(2 * kv_seqlen - qo_seqlen) * qo_seqlen``; ``qo > kv``: ``ValueError``.

    Examples
    --------
    >>> flashinfer.testing.attention_flops(1, 8, 8, 64, 64, 2, causal=False)  # 64 pairs of 2 heads
    32768
    """
    return batch_size * _pairs_times_two(qo_seqlen, kv_seqlen, causal) * num_qo_heads * (head_dim_qk + head_dim_vo)


def attention_flops_with_actual_seq_lens(
    actual_seq_lens_q: torch.Tensor,
    actual_seq_lens_kv: torch.Tensor,
    head_dim_qk: int,
    head_dim_vo: int,
    num_qo_heads: int,
    causal: bool,
) -> int:
    """Like :func:`attention_flops`, summed over requests of the given lengths.

    Examples
    --------
    >>> lengths = torch.tensor([8, 8])
    >>> flashinfer.testing.attention_flops_with_actual_seq_lens(lengths, lengths, 64, 64, 2, causal=False)
    65536
    """
    lengths = zip(_ints(actual_seq_lens_q), _ints(actual_seq_lens_kv), strict=True)
    return sum(attention_flops(1, q, kv, head_dim_qk, head_dim_vo, num_qo_heads, causal) for q, kv in lengths)


def attention_tflops_per_sec(
    batch_size: int,
    qo_seqlen: int,
    kv_seqlen: int,
    head_dim_qk: int,
    head_dim_vo: int,
    num_qo_heads: int,
    causal: bool,
    time: float,
) -> float:
    """TFLOP/s of a call that took ``time`` milliseconds; 0 where no time is known.

    Examples
    --------
    >>> flashinfer.testing.attention_tflops_per_sec(1, 8, 8, 64, 64, 2, False, time=1e-6)  # in 1 ns
    32.768
    """
    flops = attention_flops(batch_size, qo_seqlen, kv_seqlen, head_dim_qk, head_dim_vo, num_qo_heads, causal)
    return _per_second(flops, time)


def attention_tflops_per_sec_with_actual_seq_lens(
    actual_seq_lens_q: torch.Tensor,
    actual_seq_lens_kv: torch.Tensor,
    head_dim_qk: int,
    head_dim_vo: int,
    num_qo_heads: int,
    causal: bool,
    ms: float,
) -> float:
    """TFLOP/s of a ragged call that took ``ms`` milliseconds.

    Examples
    --------
    >>> lengths, count = torch.tensor([8, 8]), flashinfer.testing.attention_tflops_per_sec_with_actual_seq_lens
    >>> count(lengths, lengths, 64, 64, 2, False, ms=1e-6)
    65.536
    """
    return _per_second(
        attention_flops_with_actual_seq_lens(
            actual_seq_lens_q, actual_seq_lens_kv, head_dim_qk, head_dim_vo, num_qo_heads, causal
        ),
        ms,
    )


def attention_tb_per_sec(
    batch_size: int,
    qo_seqlen: int,
    kv_seqlen: int,
    head_dim_qk: int,
    head_dim_vo: int,
    num_qo_heads: int,
    num_kv_heads: int,
    time: float,
    q_dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype = torch.bfloat16,
    o_dtype: torch.dtype = torch.bfloat16,
    k_dtype: Optional[torch.dtype] = None,
    v_dtype: Optional[torch.dtype] = None,
) -> float:
    """Decimal TB/s of a call that took ``time`` milliseconds, q, k, v and the output counted once each.

    Examples
    --------
    >>> rate = flashinfer.testing.attention_tb_per_sec(1, 1, 1024, 64, 64, 8, 8, time=0.01)
    """
    return attention_tb_per_sec_with_actual_seq_lens(
        torch.tensor([qo_seqlen * batch_size]),
        torch.tensor([kv_seqlen * batch_size]),
        head_dim_qk,
        head_dim_vo,
        num_qo_heads,
        num_kv_heads,
        time,
        q_dtype,
        kv_dtype,
        o_dtype,
        k_dtype,
        v_dtype,
    )


def attention_tb_per_sec_with_actual_seq_lens(
    actual_seq_lens_q: torch.Tensor,
    actual_seq_lens_kv: torch.Tensor,
    head_dim_qk: int,
    head_dim_vo: int,
    num_qo_heads: int,
    num_kv_heads: int,
    time: float,
    q_dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype = torch.bfloat16,
    o_dtype: torch.dtype = torch.bfloat16,
    k_dtype: Optional[torch.dtype] = None,
    v_dtype: Optional[torch.dtype] = None,
) -> float:
    """Like :func:`attention_tb_per_sec` for requests of the given lengths.

    Examples
    --------
    >>> lengths = torch.tensor([1, 1]), torch.tensor([100, 200])
    >>> rate = flashinfer.testing.attention_tb_per_sec_with_actual_seq_lens(*lengths, 64, 64, 8, 8, 0.01)
    """
    q_tokens, kv_tokens = sum(_ints(actual_seq_lens_q)), sum(_ints(actual_seq_lens_kv))
    q_bytes = q_tokens * num_qo_heads * (head_dim_qk * q_dtype.itemsize + head_dim_vo * o_dtype.itemsize)
    k_size, v_size = ((dtype or kv_dtype).itemsize for dtype in (k_dtype, v_dtype))  # keys and values may differ
    kv_bytes = kv_tokens * num_kv_heads * (head_dim_qk * k_size + head_dim_vo * v_size)
    return _per_second(q_bytes + kv_bytes, time)


def _ints(lengths: torch.Tensor) -> list[int]:
    return torch.as_tensor(lengths).flatten().tolist()


def _per_second(amount: int, ms: float) -> float:
    """Return tera-units per second."""
    return amount / ms / 1e9 if ms > 0 else 0.0
