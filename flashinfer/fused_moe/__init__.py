# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: enumerations, configurations, and layouts of weights for kernels. The kernels are not here yet.

A function whose presence tells an engine that the kernel exists (``cutlass_fused_moe``, ``fused_topk_deepseek``) is
absent until it does. Functions that only Blackwell GPUs serve can be imported and raise when they are called.
"""

from ..tllm_enums import ActivationType as ActivationType
from ..tllm_enums import Fp8QuantizationType as Fp8QuantizationType
from ..tllm_enums import GatedActType as GatedActType
from ..tllm_enums import RoutingInputMode as RoutingInputMode
from ..tllm_enums import RoutingMethodType as RoutingMethodType
from ..tllm_enums import WeightLayout as WeightLayout
from ..tllm_enums import is_gated_activation as is_gated_activation
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
from .blackwell import *
from .core import convert_to_block_layout as convert_to_block_layout
from .core import reorder_rows_for_gated_act_gemm

__all__ = ["reorder_rows_for_gated_act_gemm"]
