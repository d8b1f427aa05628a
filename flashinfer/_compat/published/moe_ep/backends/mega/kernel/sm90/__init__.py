# SPDX-License-Identifier: Apache-2.0
"""A path of published code; see :mod:`flashinfer.moe_ep`."""
