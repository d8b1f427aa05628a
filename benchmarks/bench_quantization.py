# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of ``flashinfer.quantization``: all of it is bound by memory; the figure to read is the fraction of peak.

python benchmarks/bench_quantization.py [-k packbits] [--device cpu] [--json FILE]
"""

from __future__ import annotations

from typing import Any

import torch
from harness import Bench, bf16, case, empty, fp32, grid, main, nbytes, rand

import flashinfer.quantization as quantization
from flashinfer.quantization.layout import SfLayout, scale_count
from flashinfer.trace.templates import quantization as templates
from flashinfer.trace.templates.quantization_blocks import padded_scales, random_bytes
from flashinfer.trace.templates.quantization_groups import per_token_group_quant_8bit_trace

BOOL, U8 = torch.bool, torch.uint8


def _bits(size: int) -> torch.Tensor:
    return torch.rand(size) < 0.5


def _torch_packbits(x: torch.Tensor) -> torch.Tensor:
    """Pack bits with the shortest torch expression. The size is a multiple of 8."""
    places = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], dtype=U8, device=x.device)
    return (x.view(-1, 8).to(U8) * places).sum(dim=1, dtype=U8)


@case(
    "packbits",  # a mask of 256 x 256, of 4096 x 4096; more elements than int32 counts
    cpu=grid(size=[2**16, 2**24], dtype=[BOOL]) + grid(size=[2**22], dtype=[fp32]),
    cuda=grid(size=[2**16, 2**24, 2**28, 2**31 + 8], dtype=[BOOL]) + grid(size=[2**26], dtype=[bf16, fp32]),
)
def packbits(size: int, dtype: torch.dtype) -> Bench:
    x = _bits(size).to(dtype)
    return Bench(
        run=quantization.packbits,
        args=(x,),
        baseline=lambda x: _torch_packbits(x != 0 if x.dtype != BOOL else x),
        reference=templates.packbits_trace.reference,
        bytes=nbytes(x) + size // 8,
    )


@case(
    "segment_packbits",  # the size of a segment; a few elements more, so that no segment is aligned
    cpu=grid(batch_size=[16], size=[2**16]),
    cuda=grid(batch_size=[16], size=[2**12, 2**20]) + grid(batch_size=[64], size=[2**22]),
)
def segment_packbits(batch_size: int, size: int) -> Bench:
    """Pack segments. On CUDA the size of the result is copied to the host; the time includes that synchronisation."""
    size = size // 8 * 8 + 3
    x, indptr = _bits(batch_size * size), torch.arange(batch_size + 1, dtype=torch.int32) * size
    packed = (size + 7) // 8

    def baseline(x: torch.Tensor, indptr: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        lengths = (indptr[1:] - indptr[:-1] + 7) // 8
        parts = [torch.nn.functional.pad(x[a : a + size], (0, 5)) for a in indptr[:-1].tolist()]
        return _torch_packbits(torch.cat(parts)), torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))

    return Bench(
        run=quantization.segment_packbits,
        args=(x, indptr),
        baseline=baseline,
        reference=templates.segment_packbits_trace.reference,
        bytes=nbytes(x) + batch_size * packed,
    )


@case(
    "mxfp8_quantize",
    cpu=grid(rows=[1, 1024], cols=[4096], dtype=[bf16]) + grid(rows=[256], cols=[4096], dtype=[fp32]),
    cuda=grid(rows=[1, 128, 16384], cols=[4096], dtype=[bf16]),
)
def mxfp8_quantize(rows: int, cols: int, dtype: torch.dtype) -> Bench:
    x = rand(rows, cols, dtype)
    reference = templates.mxfp8_quantize_layout_trace.reference
    return Bench(
        run=quantization.mxfp8_quantize,
        args=(x,),
        baseline=reference,
        reference=reference,
        bytes=nbytes(x) + rows * cols + scale_count(rows, cols // 32, SfLayout.layout_128x4),
    )


def _torch_interleave(sf: torch.Tensor) -> torch.Tensor:
    rows, cols = sf.shape
    padded = torch.nn.functional.pad(sf, (0, -cols % 4, 0, -rows % 128))
    tiles = padded.view(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


@case("block_scale_interleave", cpu=grid(rows=[4096], cols=[256]), cuda=grid(rows=[4096, 65536], cols=[256, 1024]))
def block_scale_interleave(rows: int, cols: int) -> Bench:
    sf = random_bytes(rows, cols, device=torch.get_default_device())
    return Bench(
        run=quantization.block_scale_interleave,
        args=(sf,),
        baseline=_torch_interleave,
        reference=templates.block_scale_interleave_trace.reference,
        bytes=nbytes(sf) + scale_count(rows, cols, SfLayout.layout_128x4),
    )


@case("nvfp4_kv_dequantize", cpu=grid(rows=[4096], cols=[128]), cuda=grid(rows=[4096, 1048576], cols=[128]))
def nvfp4_kv_dequantize(rows: int, cols: int) -> Bench:
    template = templates.nvfp4_kv_dequantize_trace
    inputs = template.init(num_rows=rows, num_bytes=cols // 2, device=torch.get_default_device())
    return Bench(
        run=quantization.nvfp4_kv_dequantize,
        args=tuple(inputs.values()),
        baseline=template.reference,
        reference=template.reference,
        bytes=nbytes(tuple(inputs.values())) + 2 * rows * cols,
    )


@case(
    "nvfp4_kv_dequantize_paged",
    cpu=grid(batch_size=[2], seq_len=[1024], num_heads=[8], head_dim=[128], page_size=[16]),
    cuda=grid(batch_size=[16], seq_len=[4096], num_heads=[8], head_dim=[128], page_size=[16]),
)
def nvfp4_kv_dequantize_paged(batch_size: int, seq_len: int, num_heads: int, head_dim: int, page_size: int) -> Bench:
    """Every request has seq_len tokens; pages in random order."""
    columns, device = -(-seq_len // page_size), torch.get_default_device()
    shape = (batch_size * columns, 2, page_size, num_heads)
    cache = random_bytes(*shape, head_dim // 2, device=device)
    scales = random_bytes(*shape, head_dim // 16, device=device, high=127).view(torch.float8_e4m3fn)
    tables = torch.randperm(batch_size * columns).int().view(batch_size, columns)
    lengths = torch.full((batch_size,), seq_len, dtype=torch.int32)
    outputs = [empty(batch_size, seq_len, num_heads, head_dim, bf16) for _ in range(2)]
    reference = templates.nvfp4_kv_dequantize_paged_trace.reference
    args: tuple[Any, ...] = (cache, scales, tables, lengths, torch.rand(1), torch.rand(1), *outputs)
    return Bench(
        run=quantization.nvfp4_kv_dequantize_paged,
        args=args,
        results=(6, 7),
        baseline=reference,
        reference=reference,
        bytes=nbytes(args),
    )


@case("mxfp8_dequantize_host", cpu=grid(rows=[1024], cols=[4096]), cuda=[])
def mxfp8_dequantize_host(rows: int, cols: int) -> Bench:
    inputs = templates.mxfp8_dequantize_host_trace.init(num_rows=rows, num_cols=cols)
    reference = templates.mxfp8_dequantize_host_trace.reference
    return Bench(
        run=quantization.mxfp8_dequantize_host,
        args=tuple(inputs.values()),
        baseline=reference,
        reference=reference,
        bytes=nbytes(tuple(inputs.values())) + 4 * rows * cols,
    )


@case("per_token_group_quant_8bit", cpu=grid(rows=[64]), cuda=grid(rows=[64, 4096], cols=[7168]))
def per_token_group_quant_8bit(rows: int, cols: int = 7168) -> Bench:
    reference = per_token_group_quant_8bit_trace.reference
    x = rand(rows, cols, bf16)
    return Bench(
        run=lambda x: quantization.per_token_group_quant_8bit(x, 128),
        args=(x,),
        reference=lambda x: reference(x, 128),
        bytes=nbytes(x) + rows * cols + rows * cols // 32,
    )


def _fp4_host(name: str, inputs: dict[str, torch.Tensor], rows: int, cols: int) -> Bench:
    reference = getattr(templates, f"{name}_trace").reference
    return Bench(
        run=getattr(quantization, name),
        args=tuple(inputs.values()),
        baseline=reference,
        reference=reference,
        bytes=nbytes(tuple(inputs.values())) + 4 * rows * cols,
    )


@case("e2m1_and_ufp8sf_scale_to_float", cpu=grid(rows=[1024], cols=[4096]), cuda=[])
def e2m1_and_ufp8sf_scale_to_float(rows: int, cols: int) -> Bench:
    inputs = templates.e2m1_and_ufp8sf_scale_to_float_trace.init(num_rows=rows, num_bytes=cols // 2)
    return _fp4_host("e2m1_and_ufp8sf_scale_to_float", inputs, rows, cols)


@case("mxfp4_dequantize", cpu=grid(rows=[1024], cols=[4096]), cuda=[])
def mxfp4_dequantize(rows: int, cols: int) -> Bench:
    scales = random_bytes(rows, cols // 32, device="cpu", low=100, high=140)
    inputs = {"a_fp4": random_bytes(rows, cols // 2, device="cpu"), "a_sf": padded_scales(scales, 0)}
    return _fp4_host("mxfp4_dequantize", inputs, rows, cols)


@case("mxfp4_dequantize_host", cpu=grid(rows=[1024], cols=[4096]), cuda=[])
def mxfp4_dequantize_host(rows: int, cols: int) -> Bench:
    inputs = templates.mxfp4_dequantize_host_trace.init(num_rows=rows, num_bytes=cols // 2)
    return _fp4_host("mxfp4_dequantize_host", inputs, rows, cols)


@case("shuffle_matrix_a", cpu=grid(rows=[2048], cols=[4096]), cuda=grid(rows=[8192], cols=[4096]))
def shuffle_matrix_a(rows: int, cols: int) -> Bench:
    x = random_bytes(rows, cols, device=torch.get_default_device())
    order = templates.shuffle_matrix_a_trace.reference(torch.arange(rows).unsqueeze(1), 128).squeeze(1)
    return Bench(
        run=lambda x, order: quantization.shuffle_matrix_a(x, 128),
        args=(x, order),
        baseline=lambda x, order: x[order],
        reference=lambda x, order: templates.shuffle_matrix_a_trace.reference(x, 128),
        bytes=2 * nbytes(x),
    )


@case("shuffle_matrix_sf_a", cpu=grid(rows=[2048], cols=[256]), cuda=grid(rows=[8192], cols=[256]))
def shuffle_matrix_sf_a(rows: int, cols: int) -> Bench:
    x = random_bytes(rows, cols, device=torch.get_default_device())
    order = templates.shuffle_matrix_a_trace.reference(torch.arange(rows).unsqueeze(1), 128).squeeze(1)
    return Bench(
        run=lambda x, order: quantization.shuffle_matrix_sf_a(x, 128),
        args=(x, order),
        baseline=lambda x, order: _torch_interleave(x[order]),
        reference=lambda x, order: templates.shuffle_matrix_sf_a_trace.reference(x, 128),
        bytes=4 * nbytes(x),
    )


if __name__ == "__main__":
    main()
