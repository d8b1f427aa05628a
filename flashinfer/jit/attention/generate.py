# SPDX-License-Identifier: Apache-2.0
"""Source generation for attention modules.

Built-in and user-defined modules are generated the same way. Two files are rendered: ``attention_params.inc`` (the
parameter struct of the kernels, and the host code with which run() fills it) and ``attention_variant.inc`` (the
variant). The launcher ``csrc/<kind>.cu`` includes the first. Kernels are in separate translation units that include the
second (``csrc/attention_kernels.jinja``): one unit for the CPU, one unit per kernel for CUDA, compiled in parallel.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Iterable, NoReturn, Optional

import torch

from ..._runtime.errors import ArgumentError, BackendSupportedError
from ...compilation_context import sm90a_nvcc_flags
from .. import env as jit_env
from ..codegen import NO_SPECIAL_FUNCTIONS, render
from ..context import current_compilation_context
from ..core import JitSpec, describe_module
from ..utils import dtype_map
from .shared_memory import Heads, decode_bytes, prefill_bytes, shared_limit
from .variants import NVFP4_TENSORS, VariantParams, has_sm90_form

__all__ = ["AttentionModule", "resolve_device"]

_FLOATS = {"cpu": (torch.float16, torch.bfloat16, torch.float32), "cuda": (torch.float16, torch.bfloat16)}
_HALVES = (torch.float16, torch.bfloat16)
_E4M3 = torch.float8_e4m3fn
_FP8 = (_E4M3, torch.float8_e5m2)
_STORED = (*_FP8, torch.uint8)  # storage dtypes, for keys and values only
_ROPE = 1  # PosEncodingMode
_FRAGMENT = 16  # columns of an mma.sync operand
_FP8_FRAGMENT = 32  # columns of a wgmma operand of 8 bits
HOPPER_WIDTHS = (64, 96, 128, 192, 256)  # head_dim_vo of the Hopper kernel (HasPrefillSm90 of prefill_sm90/tiles.h)
_DECODE_TILE, _PREFILL_TILE, _LARGE_PREFILL_TILE = 16, 64, 128  # rows per tile (common/backend_interface.h)


def _hopper_tile(head_dim_qk: int, head_dim_vo: int) -> int:
    """Return the rows of a tile of the Hopper kernel, as PrefillTileSm90 of prefill_sm90/tiles.h does."""
    return 192 if head_dim_qk <= 64 and head_dim_vo <= 64 else 128


def resolve_device(device: Optional[str]) -> str:
    """Return ``device``; None selects "cuda" if there is a CUDA target architecture, otherwise "cpu"."""
    if device is None:
        return "cuda" if current_compilation_context.TARGET_CUDA_ARCHS else "cpu"
    return device


def has_hopper_target() -> bool:
    """Tell whether modules are compiled for SM90 with its own instructions (9.0a)."""
    return (9, "0a") in current_compilation_context.TARGET_CUDA_ARCHS


def hopper_serves(dtypes: Iterable[torch.dtype], head_dim_qk: int, head_dim_vo: int, pos_encoding_mode: int) -> bool:
    """Tell whether ``backend="auto"`` may choose the Hopper prefill kernels for keys used as stored.

    ``dtypes`` are those of q, k and the output: one 16-bit type, with keys of 8 bits or not, or e4m3 queries and keys.
    """
    q, kv, o = dtypes
    is_16_bit = q == o and kv in (q, *_FP8)
    return (
        o in _HALVES
        and (is_16_bit or (q == kv == _E4M3 and head_dim_qk % _FP8_FRAGMENT == 0))
        and head_dim_qk % _FRAGMENT == 0
        and head_dim_qk <= 256
        and head_dim_vo in HOPPER_WIDTHS
        and pos_encoding_mode != _ROPE
    )


@dataclass(frozen=True)
class AttentionModule:
    """Identity of one module."""

    kind: str  #: stem in csrc: single_decode, single_prefill, batch_decode, batch_prefill, batch_fused or batch_mla
    uri: str
    dtype_q: torch.dtype
    dtype_kv: torch.dtype
    dtype_o: torch.dtype
    head_dim_qk: int
    head_dim_vo: int
    params: VariantParams
    variant_name: str
    variant_decl: str = ""
    idtype: torch.dtype = torch.int32
    pos_encoding_mode: int = 0
    head_dim_pe: int = 0  #: columns of q and k that are in separate tensors (MLA)
    device: str = "cuda"
    is_sm90: bool = False  #: kernels with wgmma and TMA, which need a target 9.0a (batch_mla)
    backend: str = "fa2"  #: "fa3": tiles of the prefill list run on the Hopper kernel (prefill_sm90/launch.cuh)

    def __post_init__(self) -> None:
        floats = _FLOATS[self.device]
        for name, dtype, allowed in (
            ("dtype_q", self.dtype_q, (*floats, _E4M3) if self._takes_fp8_queries else floats),
            ("dtype_kv", self.dtype_kv, floats + _STORED),
            ("dtype_o", self.dtype_o, floats),
            ("idtype", self.idtype, (torch.int32,)),
        ):
            if dtype not in allowed:
                names = ", ".join(str(d).removeprefix("torch.") for d in allowed)
                raise ArgumentError(f"{self.kind}: {name} must be one of {names} on {self.device}, got {dtype}")
        dims = (self.head_dim_qk, self.head_dim_vo, self.head_dim_pe)
        if self.device == "cuda" and any(dim % _FRAGMENT for dim in dims):
            raise ArgumentError(
                f"{self.kind}: head dimensions must be multiples of {_FRAGMENT} on cuda (kernels multiply "
                f"fragments of as many columns), got {dims[0]} and {dims[1]}"
            )
        if self.device == "cuda" and self.pos_encoding_mode == _ROPE and self.head_dim_qk % 32:
            raise ArgumentError(
                f"{self.kind}: head_dim_qk must be a multiple of 32 with ROPE_LLAMA on cuda (kernels "
                f"rotate halves of whole fragments), got {self.head_dim_qk}"
            )
        if self.pos_encoding_mode == _ROPE and self.head_dim_qk % 2:
            raise ArgumentError(
                f"{self.kind}: head_dim_qk must be an even number with ROPE_LLAMA (halves are rotated), "
                f"got {self.head_dim_qk}"
            )
        if self.backend == "fa3":
            self._check_hopper()
        elif self.device == "cuda" and not self.is_sm90:
            self._check_shared_memory()
        tensors = dict(self.params.tensors)
        if self.is_nvfp4 and not all(name in tensors for name, _ in NVFP4_TENSORS):
            raise ArgumentError(
                f"{self.kind}: the tensors of {self.variant_name} must have maybe_k_cache_sf and "
                f"maybe_v_cache_sf among them (a uint8 cache has scale factors), got {list(tensors)}"
            )

    @property
    def _takes_fp8_queries(self) -> bool:
        """Tell whether queries may be e4m3: in built-in modules of the Hopper kernel."""
        return self.backend == "fa3" and not self.variant_decl

    @property
    def has_decode_kernel(self) -> bool:
        return self.dtype_q not in _FP8

    def _check_hopper(self) -> None:
        """Check that the Hopper kernel serves the module, and that there is a target that can run it."""

        def refuse(rule: str, got: object) -> NoReturn:
            raise BackendSupportedError(f"{self.kind}: {rule} with backend 'fa3', got {got}; usable here: fa2")

        targets = current_compilation_context.TARGET_CUDA_ARCHS if self.device == "cuda" else set()
        if (9, "0a") not in targets:
            names = " ".join(f"{major}.{minor}" for major, minor in sorted(targets)) or "none"
            refuse("targets must have 9.0a among them", names)
        if self.dtype_q == _E4M3 and (self.dtype_kv != _E4M3 or self.head_dim_qk % _FP8_FRAGMENT):
            rule = f"dtype_kv must be dtype_q and head_dim_qk a multiple of {_FP8_FRAGMENT} (8-bit queries)"
            refuse(rule, f"{self.dtype_kv}, {self.dtype_q} and {self.head_dim_qk}")
        if self.dtype_kv not in (self.dtype_q, *_FP8):
            refuse("dtype_kv must be dtype_q or have 8 bits", f"{self.dtype_kv} and {self.dtype_q}")
        if self.dtype_o not in _HALVES:
            refuse("dtype_o must be float16 or bfloat16", self.dtype_o)
        dims = (self.head_dim_qk, self.head_dim_vo)
        if dims[0] % _FRAGMENT or not _FRAGMENT <= dims[0] <= 256 or dims[1] not in HOPPER_WIDTHS:
            widths = ", ".join(map(str, HOPPER_WIDTHS))
            refuse(f"head dimensions must be at most 256 and one of {widths}", f"{dims[0]} and {dims[1]}")
        if self.pos_encoding_mode == _ROPE or "REGISTER_KEY_TRANSFORM" in self.variant_decl:
            refuse("keys must be multiplied as stored", "a transform of keys in the kernel")

    def _check_shared_memory(self) -> None:
        """Refuse a module that no target can hold. Without a target, that is reported when something is compiled."""
        targets = current_compilation_context.TARGET_CUDA_ARCHS
        if targets and len(self.left_out) == len(targets):
            tile = max(self.tiles, key=self.shared_bytes)
            limit = max(shared_limit(target) for target in targets)
            names = " ".join(f"{major}.{minor}" for major, minor in sorted(targets))
            raise ArgumentError(
                f"{self.kind}: head_dim_qk and head_dim_vo must fit into {limit} bytes of shared memory (of a block on "
                f"{names}), got {self.head_dim_qk} and {self.head_dim_vo}, which need {self.shared_bytes(tile)} "
                f"(tiles of {tile} rows)"
            )

    @property
    def left_out(self) -> dict[tuple[int, str], str]:
        """Return the targets whose blocks have too little shared memory for a kernel of the module, and the bytes."""
        if self.device == "cpu" or self.is_sm90 or self.backend == "fa3":
            return {}
        needed = max(map(self.shared_bytes, self.tiles))
        return {
            target: f"needs {needed} bytes of shared memory of a block, and {shared_limit(target)} are there"
            for target in current_compilation_context.TARGET_CUDA_ARCHS
            if needed > shared_limit(target)
        }

    def shared_bytes(self, tile: int) -> int:
        """Return the bytes of shared memory that the CUDA kernel for tiles of ``tile`` rows needs at least."""
        is_latent = self.kind == "batch_mla"
        heads = Heads(
            self.head_dim_qk,
            self.head_dim_vo,
            self.dtype_q.itemsize,
            self.dtype_q.itemsize if self.is_nvfp4 else self.dtype_kv.itemsize,
            8 if self.is_nvfp4 else 4,
            is_latent,
        )
        if tile == _DECODE_TILE and self.head_dim_vo <= 256 and not is_latent:
            return decode_bytes(heads)
        return prefill_bytes(heads, tile)

    @property
    def is_nvfp4(self) -> bool:
        return self.dtype_kv == torch.uint8

    @property
    def name(self) -> str:
        return f"{self.uri}_cpu" if self.device == "cpu" else self.uri

    # kernels of the module --------------------------------------------------------------------

    @property
    def tiles(self) -> tuple[int, ...]:
        if self.kind.endswith("decode"):
            return (_DECODE_TILE,)
        if self.is_sm90:
            return (_PREFILL_TILE,)
        if self.backend == "fa3":
            tile = _hopper_tile(self.head_dim_qk, self.head_dim_vo)
            tiles = (_PREFILL_TILE, tile) if self.has_short_tiles else (tile,)
            return (_DECODE_TILE, *tiles) if self.has_decode_kernel else tiles
        return (_DECODE_TILE, _PREFILL_TILE, _LARGE_PREFILL_TILE)[: 3 if self.head_dim_vo <= 256 else 2]

    @property
    def has_short_tiles(self) -> bool:
        """Tell whether the Hopper kernel has a form for short requests (HasShortPrefillSm90, prefill_sm90/tiles.h)."""
        is_served = self.dtype_kv == self.dtype_q and max(self.head_dim_qk, self.head_dim_vo) <= 128
        return self.backend == "fa3" and self.kind == "batch_prefill" and self.has_decode_kernel and is_served

    @property
    def paged(self) -> tuple[bool, ...]:
        if self.kind == "batch_prefill":
            return (True, False)
        return (self.kind.startswith("batch"),)

    @property
    def masks(self) -> tuple[bool, ...]:
        """Return the values of ALL_MASKED. Decode calls a user mask for each key; MLA has no user masks."""
        if self.kind.endswith("decode"):
            return (bool(self.variant_decl),)
        needs_mask = "use_custom_mask" in self.variant_name
        has_mask = any(name == "maybe_custom_mask" for name, _ in self.params.tensors)
        has_none = self.kind in ("batch_mla", "batch_fused") or (needs_mask and not has_mask)
        return (False,) if has_none else (False, True)

    @property
    def has_fused(self) -> bool:
        """Tell whether the module has a fused kernel for prefill and decode lists (attention/fused/plan.h)."""
        is_served = _LARGE_PREFILL_TILE in self.tiles and (self.backend == "fa2" or self.dtype_kv not in _STORED)
        return self.kind == "batch_prefill" and self.device == "cuda" and is_served

    def resident_kernel(self, tile: int, paged: bool, mask: bool) -> str:
        """Name of the C++ function that returns how many blocks of a CUDA kernel are resident at once."""
        flags = f"{str(paged).lower()}, {str(mask).lower()}"
        if tile == _DECODE_TILE and self.head_dim_vo <= 256 and self.kind != "batch_mla":
            return f"MaxActiveDecodeBlocks<Params, {flags}>"
        if self.backend == "fa3":
            return f"MaxActivePrefillSm90Blocks<Params, {tile}, {flags}>"
        return f"MaxActivePrefillBlocks<Params, {tile}, {flags}>"

    # sources ----------------------------------------------------------------------------------

    def _config(self) -> str:
        return render(
            "attention_config.jinja",
            base="AttentionParams" if self.kind != "batch_mla" else "MlaParams",
            dtype_q=dtype_map[self.dtype_q],
            dtype_kv=dtype_map[self.dtype_kv],
            dtype_o=dtype_map[self.dtype_o],
            idtype=dtype_map[self.idtype],
            head_dim_qk=self.head_dim_qk,
            head_dim_vo=self.head_dim_vo,
            head_dim_pe=self.head_dim_pe,
            pos_encoding_mode=self.pos_encoding_mode,
            tensors=self.params.tensors,
            scalars=self.params.scalars,
            edge_masked=str(False in self.masks),
            all_masked=str(True in self.masks),
            fused=str(self.has_fused),
            mla_sm90=str(self.is_sm90),
            prefill_sm90=str(self.backend == "fa3"),
            short_tiles=str(self.has_short_tiles),
            decode=str(self.has_decode_kernel),
            nvfp4=self.is_nvfp4,
        )

    def _unit(
        self,
        header: str,
        launches: Iterable[tuple[int, bool, bool]] = (),
        resident: Iterable[tuple[int, str]] = (),
        merges: Iterable[int] = (),
        cascades: Iterable[int] = (),
        fused: Iterable[int] = (),
        mla_pages: Iterable[str] = (),
    ) -> str:
        """Render a unit that instantiates kernels of ``header`` for (tile, paged, masked), and functions by tile."""
        named = [(tile, str(paged), str(mask)) for tile, paged, mask in launches]
        return render(
            "attention_kernels.jinja",
            header=header,
            launches=named,
            resident=resident,
            merges=merges,
            cascades=cascades,
            fused=fused,
            mla_pages=mla_pages,
        )

    def _units(self) -> dict[str, str]:
        """Return the file name and the source of each kernel unit."""
        kernels = list(itertools.product(self.tiles, self.paged, self.masks))
        if self.device == "cpu":
            return {
                f"{self.kind}_cpu.cpp": self._unit("cpu/launch.h", kernels, [(t, "") for t in self.tiles], self.tiles)
            }
        if self.kind == "batch_fused":
            return {
                f"{self.kind}_{tile}.cu": self._unit("fused/kernel.cuh", cascades=[tile]) for tile in self.tiles[1:]
            }
        if self.is_sm90:
            resident = [(_PREFILL_TILE, "MaxActiveMlaSm90Blocks<Params>")]
            launch = {f"{self.kind}_launch.cu": self._unit("mla_sm90/launch.cuh", kernels)}
            if self.dtype_kv != self.dtype_q:  # converted row by row, whatever the page size
                rows = self._unit("mla_sm90/kernel.cuh", resident=resident, mla_pages=["true"])
                return {f"{self.kind}_rows.cu": rows, **launch}
            return {
                f"{self.kind}_boxes.cu": self._unit("mla_sm90/kernel.cuh", resident=resident, mla_pages=["false"]),
                f"{self.kind}_rows.cu": self._unit("mla_sm90/kernel.cuh", mla_pages=["true"]),
                **launch,
            }
        units = {f"{self.kind}_merge.cu": self._unit("common/merge.cuh", merges=self.tiles)}
        if self.has_fused:
            header = "fused/kernel_sm90.cuh" if self.backend == "fa3" else "fused/kernel.cuh"
            units[f"{self.kind}_fused.cu"] = self._unit(header, fused=[max(self.tiles)])
        for tile, paged, mask in kernels:
            is_first = (paged, mask) == (self.paged[0], self.masks[0])
            resident = [(tile, self.resident_kernel(tile, paged, mask))] if is_first else []
            name = f"{self.kind}_{tile}_{'paged' if paged else 'ragged'}{'_masked' if mask else ''}.cu"
            is_hopper = self.backend == "fa3" and tile != _DECODE_TILE
            header = "prefill_sm90/launch.cuh" if is_hopper else "dispatch.cuh"
            units[name] = self._unit(header, [(tile, paged, mask)], resident)
        return units

    def spec(self) -> JitSpec:
        """Return the build specification. Sources are written when the module is built, not here."""
        csrc, directory = jit_env.FLASHINFER_CSRC_DIR, jit_env.gen_src_dir(self.device) / self.name
        launchers = [csrc / f"{self.kind}.cu", csrc / f"{self.kind}_jit_binding.cu"]
        units = {directory / name: text for name, text in self._units().items()}
        variant = render(
            "attention_variant.jinja",
            variant_decl=self.variant_decl,
            variant_name=self.variant_name,
            sm90_form=has_sm90_form(self.variant_decl),
        )
        return describe_module(
            self.name,
            [*launchers, *units],
            extra_include_paths=[directory],
            extra_cuda_cflags=[
                *([] if self.variant_decl else [NO_SPECIAL_FUNCTIONS]),
                *(sm90a_nvcc_flags if self.is_sm90 else []),
            ],
            backend=self.device,
            host_sources=frozenset(launchers),
            supported_major_versions=[9] if self.backend == "fa3" or self.is_sm90 else None,
            left_out=self.left_out,
            generated={
                **units,
                directory / "attention_params.inc": self._config(),
                directory / "attention_variant.inc": variant,
            },
        )
