# SPDX-License-Identifier: Apache-2.0
"""A path of published code; see :mod:`flashinfer.fused_moe.ep`."""
