# SPDX-License-Identifier: Apache-2.0
"""The path under which published code imports the MXFP8 functions of :mod:`flashinfer.quantization`."""

from flashinfer._compat.unsupported_quantization import *  # noqa: F403
from flashinfer.quantization import *  # noqa: F403
from flashinfer.quantization import get_mxfp8_grouped_quantization_module as get_mxfp8_grouped_quantization_module
from flashinfer.quantization import get_mxfp8_quantization_sm100_module as get_mxfp8_quantization_sm100_module
