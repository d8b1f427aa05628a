# SPDX-License-Identifier: Apache-2.0
"""Shared memory that the CUDA attention kernels need, to refuse head dimensions before a build that would fail.

The formulas are those of ``include/flashinfer/attention/prefill/shape.cuh`` and ``attention/decode/producer.cuh``, for
the least keys per step; ``tests/cuda_compile/test_shared_memory.py`` compares.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Heads", "decode_bytes", "prefill_bytes", "shared_limit"]

_KIB = 1024
_LEAST_KEYS = 16  # per step
_DECODE_TILE = 16  # rows
_DECODE_WARPS = 4
_MASK_CLASS_BYTES = 1024
_FOLLOWED_ROWS = 128  # row offsets that a block keeps

#: Bytes that a block may use, by compute capability (``SharedLimitOf`` of device/occupancy.cuh); elsewhere 99 KiB.
_LIMITS = {
    **dict.fromkeys([(9, 0), (10, 0), (10, 3), (11, 0)], 227 * _KIB),
    **dict.fromkeys([(8, 0), (8, 7)], 163 * _KIB),
    (7, 5): 64 * _KIB,
}


class Heads(NamedTuple):
    """Sizes of a module that its shared memory depends on."""

    head_dim_qk: int
    head_dim_vo: int
    q_bytes: int  #: bytes of a number of q
    kv_bytes: int  #: bytes of a number of k in shared memory, where NVFP4 is expanded to the type of q
    offset_bytes: int  #: bytes of the offset of a row: 4, with NVFP4 8
    is_latent: bool  #: MLA: values are columns of the keys


def shared_limit(target: tuple[int, str]) -> int:
    """Return the bytes of shared memory that a block may use on a target such as ``(9, "0a")``."""
    return _LIMITS.get((target[0], int(target[1].rstrip("af"))), 99 * _KIB)


def _pitch(columns: int, bytes_each: int) -> int:
    """Return the bytes of a row: padded to an odd number of 16-byte chunks, unless it has a multiple of 8 of them."""
    row = columns * bytes_each
    chunks = row // 16
    return row if chunks % 8 == 0 or chunks % 2 == 1 else row + 16


def prefill_bytes(heads: Heads, tile: int) -> int:
    """Return the bytes that the prefill kernel needs for tiles of ``tile`` rows."""
    qk, vo = heads.head_dim_qk, heads.head_dim_vo
    column_warps = 4 if tile == _DECODE_TILE else 1 if vo <= 256 else 2
    row_tiles = tile // 16
    row_warps = row_tiles // (2 if tile == 128 and vo <= 128 else 1)
    fixed = tile * max(_pitch(qk, heads.q_bytes), _pitch(vo, heads.q_bytes))
    if column_warps > 1:  # these warps exchange weights and maxima
        fixed += row_tiles * 4 * 512 + row_warps * column_warps * (row_tiles // row_warps) * 16 * 4
    fixed += _MASK_CLASS_BYTES + _FOLLOWED_ROWS * 2 * heads.offset_bytes
    row = _pitch(qk, heads.kv_bytes) + (0 if heads.is_latent else _pitch(vo, heads.kv_bytes))
    return fixed + (2 if heads.is_latent else 1) * _LEAST_KEYS * row


def decode_bytes(heads: Heads) -> int:
    """Return the bytes that the decode kernel needs with one stage."""
    rows = _pitch(heads.head_dim_qk, heads.kv_bytes), _pitch(heads.head_dim_vo, heads.kv_bytes)
    is_short = all(columns * heads.kv_bytes // 16 <= 8 for columns in (heads.head_dim_qk, heads.head_dim_vo))
    ring = _DECODE_WARPS * (32 if is_short else 16) * sum(rows)
    stats = (2 * _DECODE_TILE + 2) * _DECODE_WARPS * 4
    return ring + _DECODE_TILE * _pitch(heads.head_dim_qk, heads.q_bytes) + stats + 16
