# SPDX-License-Identifier: Apache-2.0
"""The modules of the GEMM family: a general one per backend, and those for SM90, one per type of operands."""

from __future__ import annotations

import functools
from typing import Iterator, NamedTuple

from ..compilation_context import sm90a_nvcc_flags
from .codegen import module_cache, stage
from .core import JitSpec

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

#: Tokens and weights of the tiles with tokens on the M side.
_16_BIT_TILES = ((128, 256), (128, 192), (128, 128), (128, 64))
_TILES = {
    "bf16": _16_BIT_TILES,
    "fp16": _16_BIT_TILES,
    "fp8": ((128, 256), (128, 128), (128, 64)),
    "fp8_block": ((256, 128), (128, 256), (128, 192), (128, 176), (128, 128), (256, 64), (128, 64)),
}


#: The kind and the tile that also have a kernel which gathers tokens: the one that products of many rows choose. With
#: 16-bit tokens it was slower than copies of them.
_GATHERED = ("fp8_block", 128, 256)

#: Kinds and tiles that also have a kernel whose blocks split K, for products of few tiles. As a part of the kernels
#: that do not split, it made these slower by 1.2 us.
_SPLITTING = {("fp8_block", 128, 128), ("fp8_block", 128, 192)}

#: Tokens of the tiles with 128 weights on the M side, and with 64, whose warpgroups share K.
_SWAPPED = {128: (8, 16, 32, 64, 128), 64: (8, 16, 32, 64)}


#: The kernel of fp8_block that quantises few tokens, a tile of ``QUANTIZING_TOKENS`` by ``TURN_WEIGHTS``.
_QUANTIZING_UNIT = "quantizing_8x64"
_QUANTIZING_ENTRY = "GemmSwappedSm90<float8_e4m3_t, Scaling::kBlock, 8, 64, true>"


class Tile(NamedTuple):
    """A tile that a module has a kernel for: its sizes, the side of the tokens, and the C++ entries."""

    swapped: bool
    block_m: int
    block_n: int
    entry: str
    gather_entry: str = ""  # entry of the kernel that gathers tokens; empty: there is none
    split_entry: str = ""  # entry of the kernel whose blocks split K; empty: there is none

    @property
    def most_blocks(self) -> int:
        """Blocks at most that split K of a swapped tile, or share an operand of another one."""
        if not self.swapped:
            return 2
        return 8 if self.block_m <= 64 and self.block_n == 128 else 4

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
            f"GemmSm90<{common}, {m}, {n}>",
            f"GemmSm90<{common}, {m}, {n}, Form::kGather>" if (kind, m, n) == _GATHERED else "",
            f"GemmSm90<{common}, {m}, {n}, Form::kSplit>" if (kind, m, n) in _SPLITTING else "",
        )
        for m, n in _TILES[kind]
    ]
    swapped = [(m, n) for n, tokens in _SWAPPED.items() for m in tokens]
    return plain + [Tile(True, m, n, f"GemmSwappedSm90<{common}, {m}, {n}>") for m, n in swapped]


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
    quantizing_entry = _QUANTIZING_ENTRY if scaling == "kBlock" else ""
    if quantizing_entry:
        units[_QUANTIZING_UNIT] = {**units["swapped_8x64"], "entry": quantizing_entry}
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
            "quantizing_entry": qualify(quantizing_entry),
        },
        extra_cuda_cflags=sm90a_nvcc_flags,
    )


get_gemm_sm90_module = module_cache(gen_dense_gemm_sm90_module)


class W4Tile(NamedTuple):
    """A tile for four-bit weights: its most tokens, and its weights."""

    tokens: int
    weights: int

    @property
    def most_blocks(self) -> int:
        """Blocks at most that split K, ``MostW4Blocks`` of gemm/w4_sm90/choose.h."""
        if self.weights > 128 or self.tokens > 64:
            return 1
        return 4 if self.tokens <= 32 else 8


#: Type of the codes of each kind of module for four-bit weights, a ``WeightCode`` of gemm/w4_layout.h.
W4_KINDS = {"mxfp4": "kE2M1", "mxfp4_fp8": "kShiftedE2M1", "int4": "kInt4"}
#: Their tiles, those of ``W4_TILES`` in gemm/w4_sm90/choose.h.
W4_TILES = tuple(W4Tile(tokens, 128) for tokens in (8, 16, 32, 64, 160, 192))
W4_TILES += tuple(W4Tile(tokens, 256) for tokens in (8, 16, 32, 48, 64, 80, 96, 128))


def gen_gemm_w4_sm90_module(kind: str = "mxfp4") -> JitSpec:
    """Describe the module of products of groups of tokens with four-bit weights: mxfp4, mxfp4_fp8 or int4."""
    code = W4_KINDS[kind]
    return stage(
        "gemm_w4_sm90",
        backend="cuda",
        name=f"gemm_w4_sm90_{kind}",
        kernels={f"tile_{t.tokens}x{t.weights}": {"code": code, **t._asdict()} for t in W4_TILES},
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
