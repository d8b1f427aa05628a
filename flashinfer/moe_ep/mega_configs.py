# SPDX-License-Identifier: Apache-2.0
"""Configurations of layers in one kernel. Those of Blackwell can be made; layers of them are refused elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

__all__ = [
    "Bf16CutedslMegaMoeConfig",
    "DeepGemmMegaMoeConfig",
    "Mxfp8CutedslMegaMoeConfig",
    "Nvfp4CutedslMegaMoeConfig",
    "Sm90PullFp8MegaMoeConfig",
    "Sm90PushFp8MegaMoeConfig",
    "Sm90_Fp8_Fp8_Bf16_PullCutedsl_MegaMoeConfig",
    "Sm90_Fp8_Fp8_Bf16_PushCuda_MegaMoeConfig",
    "Sm100_Bf16_Bf16_Bf16_Cutedsl_MegaMoeConfig",
    "Sm100_Fp8_Fp4_Bf16_Deepgemm_MegaMoeConfig",
    "Sm100_Mxfp8_Mxfp4_Bf16_Cutedsl_SplitConfig",
    "Sm100_Mxfp8_Mxfp8_Bf16_Cutedsl_MegaMoeConfig",
    "Sm100_Nvfp4_Nvfp4_Bf16_Cutedsl_MegaMoeConfig",
]


@dataclass(frozen=True)
class Sm90_Fp8_Fp8_Bf16_PushCuda_MegaMoeConfig:
    """e4m3 blocks of 128 x 128 for weights and of 1 x 128 for activations, on Hopper or the CPU."""

    intermediate_size: int
    top_k: int
    kernel_name: str = "sm90_fp8_fp8_bf16_push_cuda"
    capacity_factor: float = 1.0
    dedup_dispatch: bool = True
    grouped_combine: bool = True
    fuse_fc1_epilogue: bool = False
    payload_dtype: str = "fp8"
    combine_dtype: str = "fp8"
    allow_unverified_p2p: bool = False
    init_timeout_s: float = 600.0


@dataclass(frozen=True)
class Sm90_Fp8_Fp8_Bf16_PullCutedsl_MegaMoeConfig:
    """FP8 by tensor or by block, with a kernel that needs the CuTe DSL and NVSHMEM."""

    intermediate_size: int
    top_k: int
    kernel_name: str = "sm90_fp8_fp8_bf16_pull_cutedsl"
    kind: str = "fp8_e4m3"
    fp8_scale_mode: str = "per_tensor"
    fp8_accum_mode: str = "1xacc"
    swap_ab: bool = False
    mma_tiler_mnk: Optional[tuple[int, int, int]] = None
    load_balance_mode: str = "static"
    gate_up_clamp: Optional[float] = None
    activation_clamp: Optional[float] = None
    fast_math: bool = True
    in_kernel_fc2_reduce: bool = False
    token_back_by_dispatch: bool = False
    fc1_activation_dequant_scale: float = 1.0
    fc2_activation_dequant_scale: float = 1.0


@dataclass(frozen=True)
class Sm100_Fp8_Fp4_Bf16_Deepgemm_MegaMoeConfig:
    """FP8 activations and FP4 weights on Blackwell."""

    intermediate_size: int
    top_k: int
    kernel_name: str = "sm100_fp8_fp4_bf16_deepgemm"
    activation_clamp: Optional[float] = None
    fast_math: bool = True


@dataclass(frozen=True)
class Sm100_Bf16_Bf16_Bf16_Cutedsl_MegaMoeConfig:
    """bfloat16 on Blackwell."""

    intermediate_size: int
    top_k: int
    kernel_name: str = "sm100_bf16_bf16_bf16_cutedsl"
    gate_up_clamp: Optional[float] = None
    activation_clamp: Optional[float] = None
    fast_math: bool = True
    in_kernel_fc2_reduce: bool = False
    token_back_mode: str = "epi_warps"
    load_balance_mode: str = "static"
    knobs: Any = None


@dataclass(frozen=True)
class Sm100_Mxfp8_Mxfp8_Bf16_Cutedsl_MegaMoeConfig:
    """MXFP8 on Blackwell."""

    intermediate_size: int
    top_k: int
    kernel_name: str = "sm100_mxfp8_mxfp8_bf16_cutedsl"
    kind: str = "mxfp8_e4m3"
    gate_up_clamp: Optional[float] = None
    activation_clamp: Optional[float] = None
    fast_math: bool = True
    in_kernel_fc2_reduce: bool = False
    token_back_by_dispatch: bool = False
    knobs: Any = None


@dataclass(frozen=True)
class Sm100_Nvfp4_Nvfp4_Bf16_Cutedsl_MegaMoeConfig:
    """NVFP4 on Blackwell."""

    intermediate_size: int
    top_k: int
    kernel_name: str = "sm100_nvfp4_nvfp4_bf16_cutedsl"
    gate_up_clamp: Optional[float] = None
    activation_clamp: Optional[float] = None
    fast_math: bool = True
    apply_topk_in_fc1: bool = True
    in_kernel_fc2_reduce: bool = False
    combine_dtype: str = "bf16"
    input_norm_const: float = 1.0
    fc1_alpha: Any = None
    fc2_alpha: Any = None
    fc1_norm_const: Any = None
    knobs: Any = None


@dataclass(frozen=True)
class Sm100_Mxfp8_Mxfp4_Bf16_Cutedsl_SplitConfig:
    """MXFP8 activations and MXFP4 weights between the exchanges, on Blackwell."""

    kernel_name: str = "sm100_mxfp8_mxfp4_bf16_cutedsl"
    enable_pdl: bool = True
    tactic: Any = None
    mxfp8_dispatch: bool = False


# Older names.
Bf16CutedslMegaMoeConfig = Sm100_Bf16_Bf16_Bf16_Cutedsl_MegaMoeConfig
DeepGemmMegaMoeConfig = Sm100_Fp8_Fp4_Bf16_Deepgemm_MegaMoeConfig
Mxfp8CutedslMegaMoeConfig = Sm100_Mxfp8_Mxfp8_Bf16_Cutedsl_MegaMoeConfig
Nvfp4CutedslMegaMoeConfig = Sm100_Nvfp4_Nvfp4_Bf16_Cutedsl_MegaMoeConfig
Sm90PullFp8MegaMoeConfig = Sm90_Fp8_Fp8_Bf16_PullCutedsl_MegaMoeConfig
Sm90PushFp8MegaMoeConfig = Sm90_Fp8_Fp8_Bf16_PushCuda_MegaMoeConfig
