# SPDX-License-Identifier: Apache-2.0
"""Identity of a built-in attention module: its name and its build specification follow from one dataclass.

Sliding windows and the precision of the accumulator do not change the compiled kernels, so modules that differ only in
these options share one name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import torch

from ..._runtime.enums import PosEncodingMode
from ..._runtime.errors import ArgumentError, BackendSupportedError
from ..core import JitSpec
from ..utils import filename_safe_dtype_map as _short
from .generate import AttentionModule, resolve_device
from .variants import DECODE, HEAD_SCALES, NVFP4_TENSORS, PREFILL, VariantParams, default_variant_name

__all__ = ["AttentionKey", "check_backend"]

_STEMS = {
    "single_decode": "single_decode_with_kv_cache",
    "single_prefill": "single_prefill_with_kv_cache",
    "batch_decode": "batch_decode_with_kv_cache",
    "batch_prefill": "batch_prefill_with_kv_cache",
    "batch_fused": "batch_fused",
    "batch_mla": "batch_mla_attention",
}


#: Kinds that have kernels for SM90, with wgmma and TMA.
_HAS_FA3 = ("single_prefill", "batch_prefill", "batch_mla")


def check_backend(op: str, backend: str, has_fa3: bool = False) -> None:
    """Check that ``backend`` is ``"fa2"``, or ``"fa3"`` where it exists; generators do not accept ``"auto"``."""
    if backend == "fa3" and has_fa3:
        return
    if backend == "fa3":
        raise BackendSupportedError(f"{op}: backend 'fa3' is not available; usable here: fa2")
    if backend != "fa2":
        raise ArgumentError(f"{op}: backend must be 'fa2', got {backend!r}")


@dataclass(frozen=True)
class AttentionKey:
    """Identity of one built-in module. Any backend has a name; "fa2" has sources, and "fa3" for some kinds."""

    kind: str  #: stem in csrc: single_decode, single_prefill, batch_decode, batch_prefill, batch_fused or batch_mla
    dtype_q: torch.dtype
    dtype_kv: torch.dtype
    dtype_o: torch.dtype
    dtype_idx: torch.dtype  #: element type of page tables; not part of the name of a module for one request
    head_dim_qk: int  #: columns of q and k; for MLA the compressed ones only
    head_dim_vo: int
    pos_encoding_mode: int = 0
    use_logits_soft_cap: bool = False
    head_dim_kpe: int = 0  #: columns of q and k that are in separate tensors (MLA)
    backend: str = "fa2"

    @property
    def uri(self) -> str:
        """Return the name of the CUDA module; the CPU module adds a suffix."""
        dtypes = f"dtype_q_{_short[self.dtype_q]}_dtype_kv_{_short[self.dtype_kv]}_dtype_o_{_short[self.dtype_o]}"
        if self.kind.startswith("batch"):
            dtypes += f"_dtype_idx_{_short[self.dtype_idx]}"
        suffix = "" if self.backend == "fa2" else f"_{self.backend}"
        return f"{_STEMS[self.kind]}_{dtypes}_{self._shape}{suffix}"

    @property
    def _shape(self) -> str:
        if self.kind == "batch_mla":
            return f"head_dim_ckv_{self.head_dim_vo}_head_dim_kpe_{self.head_dim_kpe}"
        return (
            f"head_dim_qk_{self.head_dim_qk}_head_dim_vo_{self.head_dim_vo}_posenc_{int(self.pos_encoding_mode)}"
            f"_use_logits_cap_{bool(self.use_logits_soft_cap)}"
        )

    def spec(self, device: Optional[str] = None) -> JitSpec:
        """Return the build specification. ``device`` is "cuda" or "cpu"; None takes CUDA if there is a target."""
        check_backend(f"gen_{self.kind}_module", self.backend, self.kind in _HAS_FA3)
        is_sm90_mla = self.kind == "batch_mla" and self.backend == "fa3"
        if is_sm90_mla:
            self._check_sm90_mla(resolve_device(device))
        return AttentionModule(
            self.kind,
            self.uri,
            self.dtype_q,
            self.dtype_kv,
            self.dtype_o,
            self.head_dim_qk + self.head_dim_kpe,
            self.head_dim_vo,
            params=self._params,
            variant_name=self._variant_name,
            idtype=self.dtype_idx,
            pos_encoding_mode=int(self.pos_encoding_mode),
            head_dim_pe=self.head_dim_kpe,
            device=resolve_device(device),
            backend="fa2" if is_sm90_mla else self.backend,
            is_sm90=is_sm90_mla,
        ).spec()

    def _check_sm90_mla(self, device: str) -> None:
        op, dtypes = "gen_batch_mla_module", (self.dtype_q, self.dtype_kv, self.dtype_o)
        is_fp8 = dtypes == (torch.bfloat16, torch.float8_e4m3fn, torch.bfloat16)
        if device != "cuda":
            raise BackendSupportedError(f"{op}: backend 'fa3' is not available on {device}; usable here: fa2")
        if not is_fp8 and (len(set(dtypes)) > 1 or self.dtype_q not in (torch.float16, torch.bfloat16)):
            raise ArgumentError(
                f"{op}: the dtypes must be all float16 or all bfloat16 for backend 'fa3', or dtype_kv float8_e4m3fn "
                f"with bfloat16, got {dtypes}"
            )
        if self.head_dim_vo != 512 or self.head_dim_kpe not in (0, 64):
            raise ArgumentError(
                f"{op}: head_dim_ckv and head_dim_kpe must be 512 and 0 or 64 for backend 'fa3', got "
                f"{self.head_dim_vo} and {self.head_dim_kpe}"
            )

    @property
    def _params(self) -> VariantParams:
        if self.kind == "batch_mla":
            return VariantParams(scalars=(("sm_scale", "double"),))
        params = DECODE if self.kind.endswith("decode") else PREFILL
        scales: tuple[tuple[str, str], ...] = ()
        if self.dtype_q == torch.float8_e4m3fn:
            scales = HEAD_SCALES
        elif self.dtype_kv == torch.uint8 and self.kind != "batch_fused":
            scales = NVFP4_TENSORS
        return VariantParams((*params.tensors, *scales), params.scalars)

    @property
    def _variant_name(self) -> str:
        has_mask = "use_custom_mask" if self.kind.endswith(("prefill", "fused")) else "false"
        has_alibi = self.pos_encoding_mode == PosEncodingMode.ALIBI.value
        return default_variant_name(has_mask, self.use_logits_soft_cap, has_alibi)
