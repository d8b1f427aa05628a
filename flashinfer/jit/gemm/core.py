# SPDX-License-Identifier: Apache-2.0
"""The modules of the GEMM family: a general one per backend, and those for SM90, one per type of operands."""

from __future__ import annotations

import functools
from typing import Iterator, NamedTuple

from ...compilation_context import sm90a_nvcc_flags
from ..codegen import module_cache, stage
from ..core import JitSpec

__all__ = [
    "Tile",
    "W4_KINDS",
    "W4_TILES",
    "W4Tile",
    "gen_gemm_module",
    "gen_gemm_modules",
    "gen_dense_gemm_sm90_module",
    "gen_fp8_blockscale_gemm_sm90_module",
    "gen_gemm_sm90_module",
    "gen_gemm_w4_sm90_module",
    "gen_quantize_1x128_module",
    "gen_tinygemm2_module",
    "get_gemm_module",
    "get_gemm_sm90_module",
    "get_gemm_w4_sm90_module",
    "get_quantize_1x128_module",
    "tiles_of",
]

#: Element type and scaling of each kind of module.
_KINDS = {
    "bf16": ("bfloat16_t", "kTensor"),
    "fp16": ("float16_t", "kTensor"),
    "fp8": ("float8_e4m3_t", "kTensor"),
    "fp8_block": ("float8_e4m3_t", "kBlock"),
}

#: Tiles with tokens on the M side, (tokens, weights), and their times on an H200 in ns: per 128 bytes of K, and once.
#: The rule of gemm/sm90/choose.h evaluates them; only their ratios matter.
_16_BIT_TILES = {(128, 256): (692, 2000), (128, 192): (535, 1700), (128, 128): (379, 1400), (128, 64): (315, 700)}
_TILES = {
    "bf16": _16_BIT_TILES,
    "fp16": _16_BIT_TILES,
    "fp8": {(128, 256): (692, 2000), (128, 128): (379, 1400), (128, 64): (315, 700)},
    "fp8_block": {
        (256, 128): (860, 2400),
        (128, 256): (840, 2300),
        (128, 192): (690, 1900),
        (128, 176): (635, 1750),
        (128, 128): (490, 1500),
        (256, 64): (535, 1500),
        (128, 64): (330, 950),
    },
}

#: The kind and the tile that also have a kernel which gathers tokens: the one that products of many rows choose. With
#: 16-bit tokens it was slower than copies of them.
_GATHERED = ("fp8_block", 128, 256)

#: Kinds and tiles that also have a kernel whose blocks split K, for products of few tiles. As a part of the kernels
#: that do not split, it made these slower by 1.2 us.
_SPLITTING = {("fp8_block", 128, 128), ("fp8_block", 128, 192)}

#: Tokens of the tiles with 128 weights on the M side, and with 64, whose warpgroups share K; blocks at most that split
#: K of each.
_SWAPPED = {128: {8: 8, 16: 8, 32: 8, 64: 8, 128: 4}, 64: {8: 4, 16: 4, 32: 4, 64: 4}}
#: ns per 128 bytes of K of so many tokens with 128 weights, by scaling.
_SWAPPED_TIMES = {
    "kTensor": {8: 260, 16: 275, 32: 293, 64: 350, 128: 610},
    "kBlock": {8: 260, 16: 275, 32: 293, 64: 380, 128: 850},
}

#: Tokens and weights of the swapped tile of fp8_block that also has a kernel which quantises the tokens.
_QUANTIZING = (8, 64)


class Tile(NamedTuple):
    """A tile that a module has a kernel for: a ``TileShape`` of gemm/sm90/choose.h, and the C++ entries."""

    swapped: bool  #: tokens are on the N side
    block_m: int  #: tokens
    block_n: int  #: weights
    most_blocks: int  #: blocks at most that split K of a swapped tile, or share an operand of another one
    k_block: int  #: ns per 128 bytes of K
    once: int  #: ns beside them; 0 of swapped tiles, whose model is in choose.h
    entry: str
    gather_entry: str = ""  #: entry of the kernel that gathers tokens; empty: there is none
    split_entry: str = ""  #: entry of the kernel whose blocks split K; empty: there is none

    @property
    def unit(self) -> str:
        return f"{'swapped' if self.swapped else 'tile'}_{self.block_m}x{self.block_n}"


def tiles_of(kind: str) -> list[Tile]:
    """Return the tiles of a module, in the order of the numbers that ``gemm_sm90`` takes."""
    element, scaling = _KINDS[kind]
    common = f"{element}, Scaling::{scaling}"
    plain = [
        Tile(
            False,
            m,
            n,
            2,
            *times,
            f"GemmSm90<{common}, {m}, {n}>",
            f"GemmSm90<{common}, {m}, {n}, Form::kGather>" if (kind, m, n) == _GATHERED else "",
            f"GemmSm90<{common}, {m}, {n}, Form::kSplit>" if (kind, m, n) in _SPLITTING else "",
        )
        for (m, n), times in _TILES[kind].items()
    ]
    swapped = [
        Tile(True, m, n, most, _SWAPPED_TIMES[scaling][m], 0, f"GemmSwappedSm90<{common}, {m}, {n}>")
        for n, tokens in _SWAPPED.items()
        for m, most in tokens.items()
    ]
    return plain + swapped


def gen_dense_gemm_sm90_module(kind: str = "bf16") -> JitSpec:
    """Describe a GEMM module: bf16, fp16, e4m3 with per-tensor scales (fp8), or with block scales (fp8_block)."""
    element, scaling = _KINDS[kind]
    tiles = tiles_of(kind)
    units = {
        t.unit: {
            "entry": t.entry,
            "header": "gemm/sm90/swap_ab_kernel.cuh" if t.swapped else "gemm/sm90/kernel.cuh",
            "parameters": "const GemmProblem&, const GemmConfig&, Stream",
        }
        for t in tiles
    }
    gathered = [t for t in tiles if t.gather_entry]
    units |= {t.unit.replace("tile", "gather"): {**units[t.unit], "entry": t.gather_entry} for t in gathered}
    splitting = [t for t in tiles if t.split_entry]
    units |= {t.unit.replace("tile", "split"): {**units[t.unit], "entry": t.split_entry} for t in splitting}
    quantizing = next(t for t in tiles if t.swapped and (t.block_m, t.block_n) == _QUANTIZING)
    quantizing_entry = quantizing.entry.replace(">", ", true>") if scaling == "kBlock" else ""
    if quantizing_entry:
        units[quantizing.unit.replace("swapped", "quantizing")] = {**units[quantizing.unit], "entry": quantizing_entry}
        units["quantize"] = {
            "entry": "Quantize1x128<bfloat16_t>",
            "header": "quantize_1x128.cuh",
            "parameters": "const Quantize1x128Params&, Stream",
        }
    # The launcher is in no namespace.
    qualified = {"<": "<flashinfer::", "Scaling::": "flashinfer::gemm::Scaling::", "Form::": "flashinfer::gemm::Form::"}

    def qualify(entry: str) -> str:
        return functools.reduce(lambda s, x: s.replace(*x), qualified.items(), entry)

    entries = [
        t._replace(entry=qualify(t.entry), gather_entry=qualify(t.gather_entry), split_entry=qualify(t.split_entry))
        for t in tiles
    ]
    return stage(
        "gemm_sm90",
        backend="cuda",
        name=f"gemm_sm90_{kind}",
        kernels=units,
        config={
            "element": element,
            "scaling": scaling,
            "tiles": entries,
            "quantizing_tile": tiles.index(quantizing),
            "quantizing_entry": qualify(quantizing_entry),
        },
        extra_cuda_cflags=sm90a_nvcc_flags,
    )


get_gemm_sm90_module = module_cache(gen_dense_gemm_sm90_module)


class W4Tile(NamedTuple):
    """A tile for four-bit weights, a ``W4Tile`` of gemm/w4_sm90/choose.h. Times are those of an H200."""

    tokens: int  #: at most
    weights: int
    k_block: int  #: ns per 128 of K with bf16 tokens
    k_block_e4m3: int  #: the same with e4m3 tokens
    most_blocks: int = 1  #: blocks at most that split K


#: Type of the codes of each kind of module for four-bit weights, a ``WeightCode`` of gemm/w4_layout.h.
W4_KINDS = {"mxfp4": "kE2M1", "mxfp4_fp8": "kShiftedE2M1", "int4": "kInt4"}
W4_TILES = (
    W4Tile(8, 128, 275, 270, most_blocks=4),
    W4Tile(16, 128, 390, 294, most_blocks=4),
    W4Tile(32, 128, 450, 312, most_blocks=4),
    W4Tile(64, 128, 575, 371, most_blocks=8),
    W4Tile(160, 128, 1000, 469),
    W4Tile(192, 128, 1150, 577),
    W4Tile(8, 256, 690, 495),
    W4Tile(16, 256, 735, 514),
    W4Tile(32, 256, 790, 545),
    W4Tile(48, 256, 915, 670),
    W4Tile(64, 256, 1035, 698),
    W4Tile(80, 256, 1195, 764),
    W4Tile(96, 256, 1360, 778),
    W4Tile(128, 256, 1550, 782),
)


def gen_gemm_w4_sm90_module(kind: str = "mxfp4") -> JitSpec:
    """Describe the module of products of groups of tokens with four-bit weights: mxfp4, mxfp4_fp8 or int4."""
    code = W4_KINDS[kind]
    return stage(
        "gemm_w4_sm90",
        backend="cuda",
        name=f"gemm_w4_sm90_{kind}",
        kernels={
            f"tile_{t.tokens}x{t.weights}": {"code": code, "tokens": t.tokens, "weights": t.weights} for t in W4_TILES
        },
        config={"code": code, "tiles": W4_TILES},
        extra_cuda_cflags=sm90a_nvcc_flags,
    )


get_gemm_w4_sm90_module = module_cache(gen_gemm_w4_sm90_module)


def gen_quantize_1x128_module(backend: str = "cuda") -> JitSpec:
    """Describe the module that quantises activations to e4m3 by row and 128 columns, for any CUDA target or the CPU."""
    units = {"units": {"types": ("bfloat16_t", "float16_t")}}
    return stage("quantize_1x128", backend=backend, kernels=units)


get_quantize_1x128_module = module_cache(gen_quantize_1x128_module)


def _general_kernels() -> dict[str, list[str]]:
    """Return the kernels of each unit of the general module, those of ``HasKernel`` in gemm/general/choose.h."""

    def kernels(element: str, loads: str, scaled: str, *sizes: str) -> list[str]:
        return [f"{element}, Loads::k{loads}, {scaled}, TileSize::k{size}" for size in sizes]

    all_sizes = ("Large", "Medium", "Narrow", "Small")
    units = {
        "fp8_scaled": kernels("Fp8", "Chunks", "true", *all_sizes),
        "fp8": kernels("Fp8", "Chunks", "false", *all_sizes),
        "fp8_scaled_any": kernels("Fp8", "Any", "true", "Medium", "Small"),
        "fp8_any": kernels("Fp8", "Any", "false", "Medium", "Small"),
        "fp32": [*kernels("float", "Any", "false", "Medium"), *kernels("float", "Any", "true", "Medium")],
    }
    for name, element in (("fp16", "__half"), ("bf16", "__nv_bfloat16")):
        units[name] = kernels(element, "Chunks", "false", *all_sizes)
        units[f"{name}_columns"] = kernels(element, "Columns", "false", *all_sizes)
        units[f"{name}_any"] = kernels(element, "Any", "false", "Medium", "Small")
        units[f"{name}_any"] += kernels(element, "Any", "true", "Medium")
    return units


def gen_gemm_module(backend: str = "cuda") -> JitSpec:
    """Describe the module of the general product: any strides, all element types, scales, groupings and targets."""
    units = _general_kernels()
    kernels: dict[str, dict[str, list[str]]] = {name: {"kernels": entries} for name, entries in units.items()}
    kernels["entry"] = {"others": [kernel for entries in units.values() for kernel in entries]}
    return stage("gemm", backend=backend, kernels=kernels)


get_gemm_module = module_cache(gen_gemm_module)


# Published names of modules.


def gen_gemm_sm90_module() -> JitSpec:
    """Describe the bf16 module for SM90."""
    return gen_dense_gemm_sm90_module("bf16")


def gen_fp8_blockscale_gemm_sm90_module(use_fast_build: bool = False) -> JitSpec:
    """Describe the module of block-scaled e4m3 products for SM90. ``use_fast_build`` has no effect."""
    return gen_dense_gemm_sm90_module("fp8_block")


def gen_tinygemm2_module() -> JitSpec:
    """Describe the module that multiplies few rows with a bias: the general one."""
    return gen_gemm_module("cuda")


def gen_gemm_modules(backend: str = "cuda") -> Iterator[JitSpec]:
    """Yield the modules that AOT pre-builds and that a warm-up of the family loads."""
    yield gen_gemm_module(backend)
    yield gen_quantize_1x128_module(backend)
    if backend == "cuda":
        for kind in _KINDS:
            yield gen_dense_gemm_sm90_module(kind)
        for kind in W4_KINDS:
            yield gen_gemm_w4_sm90_module(kind)
