# SPDX-License-Identifier: Apache-2.0
"""Runners of the dense products for ``backend="auto"``: torch (cuBLASLt, oneDNN) and our kernels with their tiles.

Where nothing was tuned, the rule of ``decide.py`` says which runner comes first; on the CPU that is ours. On SM90 the
tactics of our runners are tiles (``tiles.py``).
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any, Optional, Sequence

import torch

from ..autotuner import (
    AutoTuner,
    ConstraintSpec,
    DynamicTensorSpec,
    OptimizationProfile,
    TunableRunner,
    TuningConfig,
    make_bucket_mapper,
)
from .auto_shortcuts import bf16_facts, fp8_facts
from .decide import has_scaled_mm, prefers_torch_bf16, prefers_torch_fp8
from .launch import is_sm90
from .tiles import BY_RULE, product_with_tile, tile_tactics
from .torch_product import torch_bf16, torch_bmm_fp8

__all__ = [
    "CublasLtBf16Runner",
    "CublasLtFp8Runner",
    "OwnBf16Runner",
    "OwnFp8Runner",
    "choose_bf16",
    "choose_fp8",
    "get_mm_bf16_cublaslt_module",
    "tuned_bmm_fp8",
    "tuned_mm_bf16",
]

_ROWS = tuple(2**i for i in range(15))  # 1 .. 16384 rows of tokens


def _config(row_dim: int, out: int) -> TuningConfig:
    """Describe lists whose first input and whose output (at ``out``) have a varying number of rows."""
    return TuningConfig(
        dynamic_tensor_specs=(DynamicTensorSpec(0, row_dim, _ROWS, make_bucket_mapper(_ROWS)),),
        constraint_specs=(ConstraintSpec(out, row_dim, lambda shapes: shapes[0][row_dim]),),
        use_cold_l2_cache=True,
    )


_BF16_CONFIG = _config(0, out=4)  # a, b, bias, pdl, out, workspace
_FP8_CONFIG = _config(1, out=4)  # A, B, A_scale, B_scale, out, workspace


class _Runner(TunableRunner):
    """Runner with one tactic; results depend on the dtypes and on the layout of the weights."""

    #: Whether torch multiplies.
    with_torch = True

    def get_valid_tactics(self, inputs: list[Any], profile: OptimizationProfile) -> Sequence[Any]:
        return [0]

    def get_cache_key_extras(self, inputs: list[Any]) -> tuple[Any, ...]:
        a, b, bias, out = inputs[0], inputs[1], inputs[2], inputs[4]
        return str(a.dtype), str(b.dtype), str(out.dtype), b.stride(-2) == 1, bias is None


class CublasLtBf16Runner(_Runner):
    """torch's product. torch asks cuBLASLt for an algorithm and keeps it, so there is one to choose from."""

    def _get_algos(self, inputs: list[Any]) -> tuple[torch.Tensor, int]:
        """Return a CPU buffer of algorithms and their number."""
        return torch.zeros(1, dtype=torch.uint8), 1

    def get_valid_tactics(self, inputs: list[Any], profile: OptimizationProfile) -> Sequence[Any]:
        return list(range(self._get_algos(inputs)[1]))

    def forward(self, inputs: list[Any], tactic: Any = -1, do_preparation: bool = False, **kwargs: Any) -> Any:
        a, b, bias, _, out, _ = inputs
        if self._get_algos(inputs)[1] == 0:
            raise RuntimeError(
                f"mm_bf16: cuBLASLt has zero algorithms for {tuple(a.shape)} and {tuple(b.shape)}, at least 1 is needed"
            )
        torch_bf16(out, a, b, bias)
        return out


class _OwnRunner(_Runner):
    """Our product; a tactic is :data:`BY_RULE`, or a tile of the SM90 kernels."""

    with_torch = False
    kind: str
    dtype: torch.dtype

    def get_valid_tactics(self, inputs: list[Any], profile: OptimizationProfile) -> Sequence[Any]:
        a, b = inputs[0], inputs[1]
        has_tiles = a.dtype is b.dtype is self.dtype and is_sm90(a)
        return [BY_RULE, *(tile_tactics(self.kind, a.shape[-2], a.shape[-1]) if has_tiles else ())]


class OwnBf16Runner(_OwnRunner):
    """Our product of bf16 matrices."""

    kind, dtype = "bf16", torch.bfloat16

    def forward(self, inputs: list[Any], tactic: Any = -1, do_preparation: bool = False, **kwargs: Any) -> Any:
        a, b, bias, pdl, out, _ = inputs
        product_with_tile(tactic, self.kind, out, a, b.mT, bias=bias, enable_pdl=pdl or None)
        return out


class CublasLtFp8Runner(_Runner):
    """torch's scaled product of one batch entry."""

    def forward(self, inputs: list[Any], tactic: Any = -1, do_preparation: bool = False, **kwargs: Any) -> Any:
        a, b, a_scale, b_scale, out, _ = inputs
        torch_bmm_fp8(out, a, b, a_scale, b_scale)
        return out


class OwnFp8Runner(_OwnRunner):
    """Our product of fp8 matrices with one scale per tensor."""

    kind, dtype = "fp8", torch.float8_e4m3fn

    def forward(self, inputs: list[Any], tactic: Any = -1, do_preparation: bool = False, **kwargs: Any) -> Any:
        a, b, a_scale, b_scale, out, _ = inputs
        product_with_tile(tactic, self.kind, out, a, b.mT, a_scale, b_scale)
        return out


_cublaslt_bf16, _own_bf16, _cublaslt_fp8, _own_fp8 = (
    kind() for kind in (CublasLtBf16Runner, OwnBf16Runner, CublasLtFp8Runner, OwnFp8Runner)
)


def choose_bf16(inputs: list[Any], runners: Sequence[TunableRunner]) -> None:
    """Run the tuner's choice for ``[a, b, bias, pdl, out, workspace]``."""
    runner, tactic = AutoTuner.get().choose_one("bf16_gemm", runners, _BF16_CONFIG, inputs)
    runner(inputs, tactic=tactic)


def choose_fp8(inputs: list[Any], runners: Sequence[TunableRunner]) -> None:
    """Run the tuner's choice for ``[A, B, A_scale, B_scale, out, workspace]``."""
    runner, tactic = AutoTuner.get().choose_one("fp8_gemm", runners, _FP8_CONFIG, inputs)
    runner(inputs, tactic=tactic)


def tuned_mm_bf16(
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: Optional[torch.Tensor],
    pdl: bool,
    names: Sequence[str] = (),
) -> None:
    """Write ``a @ b + bias`` to ``out`` with the runner that was measured fastest, or else by the rule.

    ``names`` are the suitable backends, which are kept with the choice.
    """

    def runners() -> list[TunableRunner]:
        is_plain = bias is None and out.dtype is a.dtype
        if a.is_cuda:
            is_first = prefers_torch_bf16(a, b, is_plain=is_plain)
            return [_cublaslt_bf16, _own_bf16] if is_first else [_own_bf16, _cublaslt_bf16]
        return [_own_bf16, _cublaslt_bf16] if is_plain else [_own_bf16]  # torch has no other product on the CPU

    (m, k), n = a.shape, b.shape[1]
    facts = bf16_facts(a, b, bias, pdl, out, out.dtype, (m, n, k), a.get_device())
    inputs = [a, b, bias, pdl, out, None]
    runner, tactic = AutoTuner.get().choose_and_keep(facts, "bf16_gemm", runners, _BF16_CONFIG, inputs, names)
    runner(inputs, tactic=tactic)


def tuned_bmm_fp8(
    out: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    A_scale: torch.Tensor,
    B_scale: torch.Tensor,
    names: Sequence[str] = (),
) -> None:
    """Write ``(A @ B) * A_scale * B_scale`` to ``out``, as :func:`tuned_mm_bf16` does."""

    def runners() -> list[TunableRunner]:
        if not (A.is_cuda and has_scaled_mm(out, A, B)):
            return [_own_fp8]
        return [_cublaslt_fp8, _own_fp8] if prefers_torch_fp8(out, A, B) else [_own_fp8, _cublaslt_fp8]

    facts = fp8_facts(A, B, A_scale, B_scale, A.shape, B.shape, out.dtype, out.stride(), out.data_ptr())
    inputs = [A, B, A_scale, B_scale, out, None]
    runner, tactic = AutoTuner.get().choose_and_keep(facts, "fp8_gemm", runners, _FP8_CONFIG, inputs, names)
    runner(inputs, tactic=tactic)


@cache
def get_mm_bf16_cublaslt_module() -> SimpleNamespace:
    """Return an object whose ``cublaslt_bf16_gemm_runner()`` makes the runner of torch's product."""
    return SimpleNamespace(cublaslt_bf16_gemm_runner=CublasLtBf16Runner)
