# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: the layer, routing, order of tokens by expert, configurations, layouts of weights.

Functions that only Blackwell GPUs serve can be imported and raise when they are called.
"""

from .._compat.tllm_enums import ActivationType as ActivationType
from .._compat.tllm_enums import Fp8QuantizationType as Fp8QuantizationType
from .._compat.tllm_enums import GatedActType as GatedActType
from .._compat.tllm_enums import RoutingInputMode as RoutingInputMode
from .._compat.tllm_enums import RoutingMethodType as RoutingMethodType
from .._compat.tllm_enums import WeightLayout as WeightLayout
from .._compat.tllm_enums import is_gated_activation as is_gated_activation
from .._compat.unsupported_fused_moe import *
from .api import ActivationConfig as ActivationConfig
from .api import BackendOptions as BackendOptions
from .api import ExecutionConfig as ExecutionConfig
from .api import ExpertConfig as ExpertConfig
from .api import MoEActivationPack as MoEActivationPack
from .api import MoEConfig as MoEConfig
from .api import MoEFinalizeConfig as MoEFinalizeConfig
from .api import MoEWeightPack as MoEWeightPack
from .api import QuantConfig as QuantConfig
from .api import QuantVariant as QuantVariant
from .api import RoutingConfig as RoutingConfig
from .backends import ALL_BACKEND_CONFIGS as ALL_BACKEND_CONFIGS
from .backends import MAX_SUPPORTED_TOP_EXPERTS as MAX_SUPPORTED_TOP_EXPERTS
from .backends import MAX_SUPPORTED_TOTAL_EXPERTS as MAX_SUPPORTED_TOTAL_EXPERTS
from .backends import B12xNvfp4Config as B12xNvfp4Config
from .backends import B12xW4A16Config as B12xW4A16Config
from .backends import CakeWarpDecodeConfig as CakeWarpDecodeConfig
from .backends import CudnnFrostBf16Config as CudnnFrostBf16Config
from .backends import CudnnFrostMxfp8Config as CudnnFrostMxfp8Config
from .backends import CudnnFrostMxfp8Mxfp4Config as CudnnFrostMxfp8Mxfp4Config
from .backends import CudnnFrostNvfp4Config as CudnnFrostNvfp4Config
from .backends import CuteDslConfig as CuteDslConfig
from .backends import CuTileBf16Config as CuTileBf16Config
from .backends import CuTileFp8PerTensorBf16Config as CuTileFp8PerTensorBf16Config
from .backends import CuTileFp8PerTensorConfig as CuTileFp8PerTensorConfig
from .backends import CuTileMxfp4Bf16Config as CuTileMxfp4Bf16Config
from .backends import CuTileMxfp4Config as CuTileMxfp4Config
from .backends import CuTileMxfp4Mxfp8Config as CuTileMxfp4Mxfp8Config
from .backends import CuTileMxfp8Bf16Config as CuTileMxfp8Bf16Config
from .backends import CuTileMxfp8Config as CuTileMxfp8Config
from .backends import CuTileNvfp4Bf16Config as CuTileNvfp4Bf16Config
from .backends import CuTileNvfp4Config as CuTileNvfp4Config
from .backends import CutlassBf16Config as CutlassBf16Config
from .backends import CutlassConfig as CutlassConfig
from .backends import CutlassFp8BlockConfig as CutlassFp8BlockConfig
from .backends import CutlassFp8PerTensorConfig as CutlassFp8PerTensorConfig
from .backends import CutlassHummingConfig as CutlassHummingConfig
from .backends import CutlassMxfp8Config as CutlassMxfp8Config
from .backends import CutlassMxfp8Mxfp4Config as CutlassMxfp8Mxfp4Config
from .backends import CutlassNvfp4Config as CutlassNvfp4Config
from .backends import CutlassW4A8Config as CutlassW4A8Config
from .backends import CutlassW4A16Config as CutlassW4A16Config
from .backends import PrimsTsConfig as PrimsTsConfig
from .backends import SM12xFp8Config as SM12xFp8Config
from .backends import SM12xMxfp8Mxfp4Config as SM12xMxfp8Mxfp4Config
from .backends import SM12xNvfp4Bf16Config as SM12xNvfp4Bf16Config
from .backends import SM12xNvfp4Config as SM12xNvfp4Config
from .backends import TrtllmBf16Config as TrtllmBf16Config
from .backends import TrtllmFp4Config as TrtllmFp4Config
from .backends import TrtllmFp8BlockConfig as TrtllmFp8BlockConfig
from .backends import TrtllmFp8PerTensorConfig as TrtllmFp8PerTensorConfig
from .backends import TrtllmMxInt4Config as TrtllmMxInt4Config
from .bgmv_moe import (
    bgmv_moe,
    bgmv_moe_expand,
    bgmv_moe_gemm1_lora_delta,
    bgmv_moe_gemm2_lora_delta,
    bgmv_moe_shrink,
)
from .bgmv_moe import fill_w_ptr as fill_w_ptr
from .bgmv_moe import has_bgmv_moe as has_bgmv_moe
from .core import convert_to_block_layout as convert_to_block_layout
from .core import reorder_rows_for_gated_act_gemm as reorder_rows_for_gated_act_gemm
from .cutlass.api import cutlass_fused_moe
from .cutlass.workspace import cutlass_fused_moe_workspace_size as cutlass_fused_moe_workspace_size
from .formats import GELU as GELU
from .formats import GeGLU as GeGLU
from .formats import GeGLUTanh as GeGLUTanh
from .formats import Identity as Identity
from .formats import QuantFormat as QuantFormat
from .formats import ReLU as ReLU
from .formats import ReLU2 as ReLU2
from .formats import SiLU as SiLU
from .formats import SiTU as SiTU
from .formats import SwiGLU as SwiGLU
from .formats import SwiGLUStep as SwiGLUStep
from .layer import MoELayer as MoELayer
from .mixed_weights import interleave_moe_scales_for_sm90_mixed_gemm as interleave_moe_scales_for_sm90_mixed_gemm
from .mixed_weights import interleave_moe_weights_for_sm90_mixed_gemm as interleave_moe_weights_for_sm90_mixed_gemm
from .mixed_weights import (
    preprocess_moe_weights_for_sm90_mixed_gemm_humming as preprocess_moe_weights_for_sm90_mixed_gemm_humming,
)
from .monomoe import alloc_scratchpad as alloc_scratchpad
from .monomoe import get_scratchpad_size_bytes as get_scratchpad_size_bytes
from .monomoe import has_monomoe as has_monomoe
from .monomoe import interleave_for_tma_wgmma_up as interleave_for_tma_wgmma_up
from .monomoe import mono_moe
from .permute import moe_permute, moe_unpermute
from .routing import fused_topk_deepseek, hash_topk, route_tokens
from .runners import B12xNvfp4Runner as B12xNvfp4Runner
from .runners import B12xW4A16Runner as B12xW4A16Runner
from .runners import CakeWarpDecodeRunner as CakeWarpDecodeRunner
from .runners import CudnnFrostBf16Runner as CudnnFrostBf16Runner
from .runners import CudnnFrostMxfp8Mxfp4Runner as CudnnFrostMxfp8Mxfp4Runner
from .runners import CudnnFrostMxfp8Runner as CudnnFrostMxfp8Runner
from .runners import CudnnFrostNvfp4Runner as CudnnFrostNvfp4Runner
from .runners import CuteDslNvfp4Runner as CuteDslNvfp4Runner
from .runners import CuTileBf16Runner as CuTileBf16Runner
from .runners import CuTileFp8PerTensorBf16Runner as CuTileFp8PerTensorBf16Runner
from .runners import CuTileFp8PerTensorRunner as CuTileFp8PerTensorRunner
from .runners import CuTileMxfp4Bf16Runner as CuTileMxfp4Bf16Runner
from .runners import CuTileMxfp4Mxfp8Runner as CuTileMxfp4Mxfp8Runner
from .runners import CuTileMxfp4Runner as CuTileMxfp4Runner
from .runners import CuTileMxfp8Bf16Runner as CuTileMxfp8Bf16Runner
from .runners import CuTileMxfp8Runner as CuTileMxfp8Runner
from .runners import CuTileNvfp4Bf16Runner as CuTileNvfp4Bf16Runner
from .runners import CuTileNvfp4Runner as CuTileNvfp4Runner
from .runners import CutlassBf16Runner as CutlassBf16Runner
from .runners import CutlassFp8BlockRunner as CutlassFp8BlockRunner
from .runners import CutlassFp8PerTensorRunner as CutlassFp8PerTensorRunner
from .runners import CutlassHummingRunner as CutlassHummingRunner
from .runners import CutlassMxfp8Mxfp4Runner as CutlassMxfp8Mxfp4Runner
from .runners import CutlassMxfp8Runner as CutlassMxfp8Runner
from .runners import CutlassNvfp4Runner as CutlassNvfp4Runner
from .runners import CutlassW4A8Runner as CutlassW4A8Runner
from .runners import CutlassW4A16Runner as CutlassW4A16Runner
from .runners import MoERunner as MoERunner
from .runners import PrimsTsRunner as PrimsTsRunner
from .runners import SM12xFp8Runner as SM12xFp8Runner
from .runners import SM12xMxfp8Mxfp4Runner as SM12xMxfp8Mxfp4Runner
from .runners import SM12xNvfp4Bf16Runner as SM12xNvfp4Bf16Runner
from .runners import SM12xNvfp4Runner as SM12xNvfp4Runner
from .runners import TrtllmBf16RoutedRunner as TrtllmBf16RoutedRunner
from .runners import TrtllmFp4RoutedRunner as TrtllmFp4RoutedRunner
from .runners import TrtllmFp8BlockRunner as TrtllmFp8BlockRunner
from .runners import TrtllmFp8PerTensorRunner as TrtllmFp8PerTensorRunner
from .runners import TrtllmMxInt4RoutedRunner as TrtllmMxInt4RoutedRunner
from .sort import moe_sort

__all__ = [
    "bgmv_moe",
    "bgmv_moe_expand",
    "bgmv_moe_gemm1_lora_delta",
    "bgmv_moe_gemm2_lora_delta",
    "bgmv_moe_shrink",
    "cutlass_fused_moe",
    "fused_topk_deepseek",
    "hash_topk",
    "moe_permute",
    "moe_sort",
    "moe_unpermute",
    "mono_moe",
    "route_tokens",
]
