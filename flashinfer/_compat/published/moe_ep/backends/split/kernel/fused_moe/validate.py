# SPDX-License-Identifier: Apache-2.0
"""The path under which published code imports :mod:`flashinfer.moe_ep.fused`."""

from flashinfer.moe_ep.fused import validate_compute_consistency as validate_compute_consistency
