# SPDX-License-Identifier: Apache-2.0
"""Runners of the dense products for ``backend="auto"``: torch (cuBLASLt, oneDNN) and our kernels with their tiles.

Where nothing was tuned, the rule of ``decide.py`` says which runner comes first; on the CPU that is ours. On SM90 the
tactics of our runners are tiles (``tiles.py``).
"""

from __future__ import annotations

import functools
from functools import cache
from types import SimpleNamespace
from typing import Any, Callable, Optional, Sequence

import torch

from .._runtime.allocation import allocate
from .._runtime.arch import AMPERE_ON, capability_of
from .._runtime.probes import probes
from .._runtime.requirements import SuitableBackends
from ..autotuner import (
    AutoTuner,
    ConstraintSpec,
    DynamicTensorSpec,
    OptimizationProfile,
    TunableRunner,
    TuningConfig,
    make_bucket_mapper,
)
from .decide import has_scaled_mm, prefers_torch_bf16, prefers_torch_fp8
from .launch import BATCHED, gemm_sm90, is_sm90, ordinary_product
from .tiles import BY_RULE, product_with_tile, tile_of, tile_tactics
from .torch_product import torch_bf16, torch_bmm_fp8, torch_product, torch_scaled_mm

__all__ = [
    "CublasLtBf16Runner",
    "CublasLtFp8Runner",
    "OwnBf16Runner",
    "OwnFp8Runner",
    "bf16_facts",
    "choose_bf16",
    "choose_fp8",
    "fp8_facts",
    "get_mm_bf16_cublaslt_module",
    "layout_facts",
    "tuned_bmm_fp8",
    "tuned_mm_bf16",
]

_HOPPER, _SERVED = 90, frozenset(AMPERE_ON)
OptionalTensor = Optional[torch.Tensor]

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


def bf16_facts(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: OptionalTensor,
    pdl: bool,
    out: OptionalTensor,
    out_dtype: torch.dtype,
) -> tuple[Any, ...]:
    """Return all that the choice for a bf16 product, and the names of backends that serve it, depend on."""
    # fmt: off
    return (
        "bf16_gemm", a.shape, b.shape, b.stride(), out_dtype, a.get_device(), bias is None, not pdl, a.is_contiguous(),
        out is None or out.is_contiguous(), probes.get_compute_capability,
    )
    # fmt: on


def layout_facts(
    a_shape: Sequence[int],
    b_shape: Sequence[int],
    A: torch.Tensor,
    B: torch.Tensor,
    A_scale: torch.Tensor,
    B_scale: torch.Tensor,
    out: OptionalTensor,
) -> tuple[Any, ...]:
    """Return what the choice for an fp8 product depends on besides sizes of weights, device and dtype of the result.

    A scale has one element in any number of dimensions.
    """
    strides: tuple[int, ...] = ((a_shape[1] or 1) * (b_shape[2] or 1), b_shape[2] or 1, 1)
    address = 0
    if out is not None:  # what torch allocates is aligned
        strides, address = out.stride(), out.data_ptr()
    # fmt: off
    return (
        a_shape, A.stride(), B.stride(), strides, (A.data_ptr() | B.data_ptr() | address) % 16 == 0, A.dtype, B.dtype,
        A_scale.ndim, B_scale.ndim,
    )
    # fmt: on


def fp8_facts(
    A: torch.Tensor, B: torch.Tensor, A_scale: torch.Tensor, B_scale: torch.Tensor, out: torch.Tensor
) -> tuple[Any, ...]:
    """Return all that the choice for an fp8 product depends on."""
    layout = layout_facts(A.shape, B.shape, A, B, A_scale, B_scale, out)
    return ("fp8_gemm", B.shape, out.dtype, A.get_device(), probes.get_compute_capability, *layout)


def _own_product(
    kind: str,
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: OptionalTensor,
    b_scale: OptionalTensor,
    bias: OptionalTensor,
    tile: Optional[tuple[int, int, bool]],
) -> OptionalTensor:
    """Multiply with the tile of a tactic, or by the rule where it has none or the tile does not take the operands."""
    if tile is not None and gemm_sm90[kind](
        out, a, b.mT, a_scale, b_scale, bias, None, None, BATCHED, 1, 0, *tile, 0, 0, True, False
    ):
        return out
    return out if ordinary_product[kind](out, a, b, a_scale, b_scale, bias, None, 0, 0) else None


def _kept_launch(
    tuner: AutoTuner,
    facts: tuple[Any, ...],
    suitable: SuitableBackends,
    index: int,
    with_torch: Callable[..., OptionalTensor],
    own: Callable[..., OptionalTensor],
) -> Optional[Callable[..., OptionalTensor]]:
    """Return a launch of the choice that the tuner keeps for ``facts``; None if it keeps none, or none is fast.

    The launch is taken until results may have changed: the tuner then has another dictionary. A choice by the rule
    counts as a miss each time, as a look-up would.
    """
    kept = tuner.kept
    choice, capability = kept.get(facts), capability_of[index]
    if choice is None or (capability not in _SERVED if choice.runner.with_torch else capability != _HOPPER):
        return None
    names, is_miss, tile = suitable.current(), not choice.is_known, tile_of(choice.tactic)
    product = with_torch if choice.runner.with_torch else functools.partial(own, tile)

    def launch_tuned(*arguments: Any) -> OptionalTensor:
        now = AutoTuner.get()
        if now.kept is not kept:
            return None
        out = product(*arguments)
        if out is not None:
            suitable.note(names)
            now.stats.cache_misses += is_miss
        return out

    return launch_tuned


def _torch_mm_bf16(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: OptionalTensor,
    out: OptionalTensor,
    out_dtype: torch.dtype,
    a_shape: Sequence[int],
    b_shape: Sequence[int],
    index: int,
) -> OptionalTensor:
    return torch_product(torch.mm, a, b, out, out_dtype, (a_shape[0], b_shape[1])) if bias is None else None


def _own_mm_bf16(
    tile: Any,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: OptionalTensor,
    out: OptionalTensor,
    out_dtype: torch.dtype,
    a_shape: Sequence[int],
    b_shape: Sequence[int],
    index: int,
) -> OptionalTensor:
    if out is None:
        m, n = a_shape[0], b_shape[1]
        out = allocate((m, n), (n or 1, 1), out_dtype, index)
    elif out.dtype is not out_dtype:
        return None
    return _own_product("bf16", out, a, b, None, None, bias, tile)


def tuned_mm_bf16(
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: OptionalTensor,
    pdl: bool,
    suitable: SuitableBackends,
) -> Optional[Callable[..., OptionalTensor]]:
    """Write ``a @ b + bias`` to ``out`` with the runner that was measured fastest, or else by the rule.

    Returns what later calls of the same facts may launch, which also notes the backends that suit now.
    """

    def runners() -> list[TunableRunner]:
        is_plain = bias is None and out.dtype is a.dtype
        if a.is_cuda:
            is_first = prefers_torch_bf16(a, b, is_plain=is_plain)
            return [_cublaslt_bf16, _own_bf16] if is_first else [_own_bf16, _cublaslt_bf16]
        return [_own_bf16, _cublaslt_bf16] if is_plain else [_own_bf16]  # torch has no other product on the CPU

    tuner, facts = AutoTuner.get(), bf16_facts(a, b, bias, pdl, out, out.dtype)
    inputs = [a, b, bias, pdl, out, None]
    runner, tactic = tuner.choose_and_keep(facts, "bf16_gemm", runners, _BF16_CONFIG, inputs)
    runner(inputs, tactic=tactic)
    return _kept_launch(tuner, facts, suitable, a.get_device(), _torch_mm_bf16, _own_mm_bf16)


def _torch_bmm_fp8(
    A: torch.Tensor,
    B: torch.Tensor,
    A_scale: torch.Tensor,
    B_scale: torch.Tensor,
    dtype: torch.dtype,
    out: OptionalTensor,
    a_shape: Sequence[int],
    b_shape: Sequence[int],
    index: int,
) -> OptionalTensor:
    return torch_scaled_mm(A, B, A_scale, B_scale, dtype, out, a_shape, b_shape)


def _own_bmm_fp8(
    tile: Any,
    A: torch.Tensor,
    B: torch.Tensor,
    A_scale: torch.Tensor,
    B_scale: torch.Tensor,
    dtype: torch.dtype,
    out: OptionalTensor,
    a_shape: Sequence[int],
    b_shape: Sequence[int],
    index: int,
) -> OptionalTensor:
    if out is None:
        (batch, m, _), n = a_shape, b_shape[2]
        out = allocate((batch, m, n), ((m or 1) * (n or 1), n or 1, 1), dtype, index)
    elif out.dtype is not dtype:
        return None
    return _own_product("fp8", out, A, B, A_scale, B_scale, None, tile)


def tuned_bmm_fp8(
    out: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    A_scale: torch.Tensor,
    B_scale: torch.Tensor,
    suitable: SuitableBackends,
) -> Optional[Callable[..., OptionalTensor]]:
    """Write ``(A @ B) * A_scale * B_scale`` to ``out``, as :func:`tuned_mm_bf16` does."""

    def runners() -> list[TunableRunner]:
        if not (A.is_cuda and has_scaled_mm(out, A, B)):
            return [_own_fp8]
        return [_cublaslt_fp8, _own_fp8] if prefers_torch_fp8(out, A, B) else [_own_fp8, _cublaslt_fp8]

    tuner, facts = AutoTuner.get(), fp8_facts(A, B, A_scale, B_scale, out)
    inputs = [A, B, A_scale, B_scale, out, None]
    runner, tactic = tuner.choose_and_keep(facts, "fp8_gemm", runners, _FP8_CONFIG, inputs)
    runner(inputs, tactic=tactic)
    return _kept_launch(tuner, facts, suitable, A.get_device(), _torch_bmm_fp8, _own_bmm_fp8)


@cache
def get_mm_bf16_cublaslt_module() -> SimpleNamespace:
    """Return an object whose ``cublaslt_bf16_gemm_runner()`` makes the runner of torch's product."""
    return SimpleNamespace(cublaslt_bf16_gemm_runner=CublasLtBf16Runner)
