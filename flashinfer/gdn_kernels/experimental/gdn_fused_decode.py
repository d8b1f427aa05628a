# SPDX-License-Identifier: Apache-2.0
"""A decode step with the projections and the convolution before it, which needs a Blackwell GPU."""

from flashinfer._compat.unsupported_recurrent import gdn_fused_decode_step as gdn_fused_decode_step
from flashinfer._compat.unsupported_recurrent import gdn_fused_decode_step_supported as gdn_fused_decode_step_supported
