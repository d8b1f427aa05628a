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
from .core import convert_to_block_layout as convert_to_block_layout
from .core import reorder_rows_for_gated_act_gemm as reorder_rows_for_gated_act_gemm
from .cutlass import cutlass_fused_moe
from .cutlass_workspace import cutlass_fused_moe_workspace_size as cutlass_fused_moe_workspace_size
from .mixed_weights import interleave_moe_scales_for_sm90_mixed_gemm as interleave_moe_scales_for_sm90_mixed_gemm
from .mixed_weights import interleave_moe_weights_for_sm90_mixed_gemm as interleave_moe_weights_for_sm90_mixed_gemm
from .mixed_weights import (
    preprocess_moe_weights_for_sm90_mixed_gemm_humming as preprocess_moe_weights_for_sm90_mixed_gemm_humming,
)
from .permute import moe_permute, moe_unpermute
from .routing import fused_topk_deepseek, hash_topk, route_tokens
from .sort import moe_sort

__all__ = [
    "cutlass_fused_moe",
    "fused_topk_deepseek",
    "hash_topk",
    "moe_permute",
    "moe_sort",
    "moe_unpermute",
    "route_tokens",
]
