# SPDX-License-Identifier: Apache-2.0
"""The path under which published code imports the generator of MXFP8 quantisation."""

from flashinfer.quantization import gen_mx_quantization_module as gen_mx_quantization_module
