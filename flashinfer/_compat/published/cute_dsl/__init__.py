# SPDX-License-Identifier: Apache-2.0
"""Host helpers that published code imports from here; this package has no kernel in the CuTe DSL.

Modules that share their name with a function are imported relatively: a second import of the module would replace the
function in this namespace.
"""

from flashinfer._compat.published.cute_dsl.utils import convert_sf_from_mma_layout as convert_sf_from_mma_layout
from flashinfer._compat.published.cute_dsl.utils import convert_sf_to_mma_layout as convert_sf_to_mma_layout
from flashinfer._compat.published.cute_dsl.utils import get_mma_sf_shape as get_mma_sf_shape
from flashinfer._compat.published.cute_dsl.utils import get_num_sm as get_num_sm
from flashinfer._compat.published.cute_dsl.utils import is_cute_dsl_arch_supported as is_cute_dsl_arch_supported
from flashinfer._compat.published.cute_dsl.utils import is_cute_dsl_available as is_cute_dsl_available
from flashinfer._compat.published.cute_dsl.utils import (
    is_cute_dsl_experimental_available as is_cute_dsl_experimental_available,
)
from flashinfer._compat.published.cute_dsl.utils import is_rubin_cute_dsl_available as is_rubin_cute_dsl_available
from flashinfer._compat.published.cute_dsl.utils import require_cute_dsl_arch as require_cute_dsl_arch

from .add_rmsnorm_fp4quant import add_rmsnorm_fp4quant as add_rmsnorm_fp4quant
from .dsl import FusedAddRMSNormKernel as FusedAddRMSNormKernel
from .dsl import FusedAddRMSNormQuantKernel as FusedAddRMSNormQuantKernel
from .dsl import LayerNormKernel as LayerNormKernel
from .dsl import QKRMSNormKernel as QKRMSNormKernel
from .dsl import RMSNormFP4QuantKernel as RMSNormFP4QuantKernel
from .dsl import RMSNormKernel as RMSNormKernel
from .dsl import RMSNormQuantKernel as RMSNormQuantKernel
from .dsl import get_cutlass_dtype as get_cutlass_dtype
from .dsl import get_sm_version as get_sm_version
from .dsl import make_ptr as make_ptr
from .dsl import torch_to_cutlass_dtype as torch_to_cutlass_dtype
from .norms import fused_add_rmsnorm_cute as fused_add_rmsnorm_cute
from .norms import fused_add_rmsnorm_quant_cute as fused_add_rmsnorm_quant_cute
from .norms import layernorm_cute as layernorm_cute
from .norms import qk_rmsnorm_cute as qk_rmsnorm_cute
from .norms import rmsnorm_cute as rmsnorm_cute
from .norms import rmsnorm_quant_cute as rmsnorm_quant_cute
from .rmsnorm_fp4quant import rmsnorm_fp4quant as rmsnorm_fp4quant
