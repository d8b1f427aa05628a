# SPDX-License-Identifier: Apache-2.0
"""Published path of the all-reduce in 8 bits."""

from flashinfer.comm.reduce.gathered import quantized_all_reduce as quantized_all_reduce
