# SPDX-License-Identifier: Apache-2.0
"""Host helpers that published code imports from here; this package has no kernel in the CuTe DSL.

Modules that share their name with a function are imported relatively: a second import of the module would replace the
function in this namespace.
"""

from flashinfer._compat.published.cute_dsl.utils import convert_sf_from_mma_layout as convert_sf_from_mma_layout
from flashinfer._compat.published.cute_dsl.utils import convert_sf_to_mma_layout as convert_sf_to_mma_layout
from flashinfer._compat.published.cute_dsl.utils import get_mma_sf_shape as get_mma_sf_shape
from flashinfer._compat.published.cute_dsl.utils import get_num_sm as get_num_sm
from flashinfer._compat.published.cute_dsl.utils import is_cute_dsl_available as is_cute_dsl_available

from .add_rmsnorm_fp4quant import add_rmsnorm_fp4quant as add_rmsnorm_fp4quant
from .rmsnorm_fp4quant import rmsnorm_fp4quant as rmsnorm_fp4quant
