# SPDX-License-Identifier: Apache-2.0
"""Published path of a norm that only Blackwell GPUs can serve; the name raises an error when it is called."""

from flashinfer._compat.unsupported_norm import rmsnorm_fp4quant as rmsnorm_fp4quant
