# SPDX-License-Identifier: Apache-2.0
"""The path under which published code imports expert-parallel layers; see :mod:`flashinfer.fused_moe.ep`."""

from flashinfer.fused_moe.ep import *
from flashinfer.fused_moe.ep import __all__ as __all__
