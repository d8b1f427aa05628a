# SPDX-License-Identifier: Apache-2.0
"""Calls of quantisation for test_drawn_calls.py."""

from __future__ import annotations

from typing import Any

import torch

import flashinfer
from flashinfer import quantization

from ..traced_calls import traced

_BLOCKS = {"num_rows": (1, 5, 128), "num_bytes": (16, 64)}


def _bits(count: int) -> dict[str, Any]:
    return {"x": torch.rand(count) < 0.5}


def _bytes(rows: int, columns: int) -> dict[str, Any]:
    return {"unswizzled_sf": torch.randint(0, 256, (rows, columns), dtype=torch.uint8)}


def _matrix(rows: int, columns: int) -> dict[str, Any]:
    return {"input_tensor": torch.randint(0, 256, (rows, columns), dtype=torch.uint8), "epilogue_tile_m": 128}


CALLS = {
    "packbits": traced(flashinfer.packbits, init=_bits, count=(0, 1, 8, 45, 1000)),
    "segment_packbits": traced(flashinfer.segment_packbits, num_bits=(1, 45, 1000), num_edges=(2, 4)),
    "mxfp8_quantize": traced(flashinfer.mxfp8_quantize, M=(1, 5, 130), K=(32, 128, 160)),
    "mxfp8_dequantize_host": traced(quantization.mxfp8_dequantize_host, num_rows=(1, 5, 128), num_cols=(32, 128)),
    "mxfp4_dequantize": traced(quantization.mxfp4_dequantize, **_BLOCKS),
    "mxfp4_dequantize_host": traced(quantization.mxfp4_dequantize_host, **_BLOCKS),
    "e2m1_and_ufp8sf_scale_to_float": traced(quantization.e2m1_and_ufp8sf_scale_to_float, **_BLOCKS),
    "nvfp4_kv_dequantize": traced(quantization.nvfp4_kv_dequantize, num_rows=(1, 5), num_bytes=(32, 128)),
    "nvfp4_kv_dequantize_paged": traced(
        quantization.nvfp4_kv_dequantize_paged, any_number=("seq_lens", "block_tables"), batch_size=(1, 3)
    ),
    "block_scale_interleave": traced(
        flashinfer.block_scale_interleave, init=_bytes, rows=(1, 5, 128), columns=(1, 4, 7)
    ),
    "shuffle_matrix_a": traced(flashinfer.shuffle_matrix_a, init=_matrix, rows=(128, 256), columns=(1, 16)),
    "shuffle_matrix_sf_a": traced(flashinfer.shuffle_matrix_sf_a, init=_matrix, rows=(128, 256), columns=(4, 16)),
}
