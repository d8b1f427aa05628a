# SPDX-License-Identifier: Apache-2.0
"""The path under which published code imports enumerations of MoE and GEMM calls."""

from flashinfer._compat.tllm_enums import DEFAULT_SITU_BETA as DEFAULT_SITU_BETA
from flashinfer._compat.tllm_enums import DEFAULT_SITU_LINEAR_BETA as DEFAULT_SITU_LINEAR_BETA
from flashinfer._compat.tllm_enums import DEFAULT_SWIGLU_ALPHA as DEFAULT_SWIGLU_ALPHA
from flashinfer._compat.tllm_enums import DEFAULT_SWIGLU_BETA as DEFAULT_SWIGLU_BETA
from flashinfer._compat.tllm_enums import DEFAULT_SWIGLU_LIMIT as DEFAULT_SWIGLU_LIMIT
from flashinfer._compat.tllm_enums import ActivationType as ActivationType
from flashinfer._compat.tllm_enums import DtypeTrtllmGen as DtypeTrtllmGen
from flashinfer._compat.tllm_enums import Fp8QuantizationType as Fp8QuantizationType
from flashinfer._compat.tllm_enums import GatedActType as GatedActType
from flashinfer._compat.tllm_enums import RoutingInputMode as RoutingInputMode
from flashinfer._compat.tllm_enums import RoutingMethodType as RoutingMethodType
from flashinfer._compat.tllm_enums import SfLayout as SfLayout
from flashinfer._compat.tllm_enums import WeightLayout as WeightLayout
from flashinfer._compat.tllm_enums import deduce_trtllm_gen_tensor_dtype as deduce_trtllm_gen_tensor_dtype
from flashinfer._compat.tllm_enums import is_gated_activation as is_gated_activation
from flashinfer._compat.tllm_enums import normalize_activation_type as normalize_activation_type
from flashinfer._compat.tllm_enums import trtllm_gen_dtype_has_scale as trtllm_gen_dtype_has_scale
