# SPDX-License-Identifier: Apache-2.0
"""Layers in one kernel: the arithmetic of the Hopper kernel for one rank, and refusals of kernels that are not here."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from ..fused_moe.cutlass.api import cutlass_fused_moe
from ..gemm.blockscale import quantize_weight_blocks
from .config import BootstrapConfig, FleetParams, MoEEpTensors
from .errors import MoEEpArchError, MoEEpConfigError, MoEEpNotBuiltError
from .kernels import MegaKernelBackend, SplitKernelBackend, register_mega_kernel, register_split_kernel
from .validation import bootstrap_ep_rank_world, validate_mega_arch, validate_mega_arch_sm90, validate_mega_fleet_params
from .weights import MoEWeightPack, PrequantizedMoEWeights

__all__ = ["Sm90PushFp8MegaKernelBackend", "preprocess_sm90_push_fp8_mega_weights"]


def _quantize_experts(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e4m3 codes of ``(E, n, k)`` and the float32 scale of each block of 128 x 128: amax / 448, 1 for zeros."""
    codes, scales = zip(*map(quantize_weight_blocks, w), strict=True)
    return torch.stack(codes), torch.stack(scales)


def preprocess_sm90_push_fp8_mega_weights(
    weights: MoEWeightPack,
    *,
    intermediate_size: int,
    hidden_size: int,
    num_local_experts: int,
    fuse_fc1_epilogue: bool = False,
) -> PrequantizedMoEWeights:
    """Return weights as e4m3 blocks of 128 x 128, rows [gate ; up]; those that have scales are returned as they are.

    ``fuse_fc1_epilogue`` changes the order of work in the published kernel, and nothing here.
    """
    shapes = ((2 * intermediate_size, hidden_size), (hidden_size, intermediate_size))
    for name, w, shape in zip(("w13", "w2"), (weights.w13, weights.w2), shapes, strict=True):
        if tuple(w.shape) != (num_local_experts, *shape):
            raise MoEEpConfigError(
                f"preprocess_sm90_push_fp8_mega_weights: {name} must be {(num_local_experts, *shape)}, got "
                f"{tuple(w.shape)}"
            )
    if isinstance(weights, PrequantizedMoEWeights):
        return weights
    (w13, scale13), (w2, scale2) = _quantize_experts(weights.w13), _quantize_experts(weights.w2)
    return PrequantizedMoEWeights(w13, w2, scale13, scale2)


@register_mega_kernel("sm90_fp8_fp8_bf16_push_cuda", deprecated_aliases=("sm90_push_fp8",))
class Sm90PushFp8MegaKernelBackend(MegaKernelBackend):
    """FP8 by block, for one rank: ``cutlass_fused_moe``, which quantises activations by 1 x 128 before each product."""

    def validate_init(self, bootstrap: BootstrapConfig, fleet_params: FleetParams) -> None:
        config, world = self.config, bootstrap_ep_rank_world(bootstrap)[1]
        validate_mega_arch_sm90()
        inner, top_k = config.intermediate_size, config.top_k
        validate_mega_fleet_params(fleet_params, world, intermediate_size=inner, top_k=top_k)
        rules = (
            (top_k in (1, 2, 4, 6, 8), "top_k must be one of 1, 2, 4, 6, 8", top_k),
            (inner <= 16384 or config.fuse_fc1_epilogue, "intermediate_size must be at most 16384", inner),
            (0 < config.capacity_factor <= 1, "capacity_factor must be in (0, 1]", config.capacity_factor),
            (config.combine_dtype in ("fp8", "bf16"), "combine_dtype must be fp8 or bf16", config.combine_dtype),
            (
                not config.grouped_combine or config.combine_dtype == "fp8",
                "grouped_combine must be False unless combine_dtype is fp8",
                config.grouped_combine,
            ),
            (bootstrap.stream == 0, "bootstrap.stream must be 0", bootstrap.stream),
        )
        for holds, text, actual in rules:
            if not holds:
                raise MoEEpConfigError(f"{config.kernel_name}: {text}, got {actual}")
        if world != 1:
            raise MoEEpNotBuiltError(f"{config.kernel_name}: world_size must be 1 without a transport, got {world}")

    def transform_weights(self, weights: Any, fleet_params: FleetParams) -> list[torch.Tensor]:
        """Return both weights and their scales with rows [up ; gate], as ``cutlass_fused_moe`` takes them."""
        made = preprocess_sm90_push_fp8_mega_weights(
            weights,
            intermediate_size=self.config.intermediate_size,
            hidden_size=fleet_params.token_hidden_size,
            num_local_experts=fleet_params.num_experts,
            fuse_fc1_epilogue=self.config.fuse_fc1_epilogue,
        )
        return [_swap_halves(made.w13), made.w2, _swap_halves(made.w13_scale), made.w2_scale]

    def run(self, t: MoEEpTensors, transformed_weights: Any, output: torch.Tensor, *, quantize_input: bool) -> None:
        if not quantize_input:
            raise MoEEpConfigError(f"{self.config.kernel_name}: quantize_input must be True, got False")
        for name, tensor, dtype in (
            ("hidden_states", t.hidden_states, torch.bfloat16),
            ("topk_ids", t.topk_ids, torch.int32),
            ("topk_weights", t.topk_weights, torch.float32),
        ):
            if tensor.dtype != dtype or not tensor.is_contiguous():
                raise MoEEpConfigError(
                    f"{self.config.kernel_name}: {name} must be contiguous {dtype}, got {tensor.dtype} with strides "
                    f"{tensor.stride()}"
                )
        w1, w2, scale1, scale2 = transformed_weights
        cutlass_fused_moe(
            t.hidden_states,
            t.topk_ids,
            t.topk_weights,
            w1,
            w2,
            torch.bfloat16,
            [scale1, scale2],
            output=output,
            use_deepseek_fp8_block_scale=True,
        )


def _swap_halves(x: torch.Tensor) -> torch.Tensor:
    """Exchange the halves of the rows of each expert, byte by byte: FP8 tensors cannot be concatenated everywhere."""
    half = x.shape[1] // 2
    raw = x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x
    return raw.roll(half, 1).view(x.dtype)


def _refuse(config: Any) -> NoReturn:
    validate_mega_arch()
    raise MoEEpArchError(f"{config.kernel_name}: requires sm_100+ and its kernel, which this package lacks")


class _AbsentKernel(MegaKernelBackend):
    """A mega kernel that this package lacks: layers of it are refused."""

    def validate_init(self, bootstrap: BootstrapConfig, fleet_params: FleetParams) -> None:
        _refuse(self.config)

    def transform_weights(self, weights: Any, fleet_params: FleetParams) -> Any:
        _refuse(self.config)

    def run(self, t: MoEEpTensors, transformed_weights: Any, output: torch.Tensor, *, quantize_input: bool) -> None:
        _refuse(self.config)


register_mega_kernel("sm100_fp8_fp4_bf16_deepgemm", deprecated_aliases=("deep_gemm_mega",))(_AbsentKernel)
register_mega_kernel("sm100_bf16_bf16_bf16_cutedsl", deprecated_aliases=("bf16_cutedsl",))(_AbsentKernel)
register_mega_kernel("sm100_mxfp8_mxfp8_bf16_cutedsl", deprecated_aliases=("mxfp8_cutedsl",))(_AbsentKernel)
register_mega_kernel("sm100_nvfp4_nvfp4_bf16_cutedsl", deprecated_aliases=("nvfp4_cutedsl",))(_AbsentKernel)


@register_mega_kernel("sm90_fp8_fp8_bf16_pull_cutedsl", deprecated_aliases=("sm90_pull_fp8",))
class Sm90PullFp8MegaKernelBackend(_AbsentKernel):
    """A kernel of Hopper that is written in the CuTe DSL and exchanges through NVSHMEM."""

    def validate_init(self, bootstrap: BootstrapConfig, fleet_params: FleetParams) -> None:
        validate_mega_arch_sm90()
        raise MoEEpNotBuiltError(f"{self.config.kernel_name}: needs the CuTe DSL and NVSHMEM, which are not used here")


@register_split_kernel("sm100_mxfp8_mxfp4_bf16_cutedsl")
class _AbsentSplitKernel(SplitKernelBackend):
    """A split kernel that this package lacks: layers of it are refused."""

    def prepare(self, weights: Any, bootstrap: BootstrapConfig, params: FleetParams) -> None:
        _refuse(self.config)

    def run(self, ctx: Any) -> Any:
        _refuse(self.config)
