# SPDX-License-Identifier: Apache-2.0
"""The path under which published code imports :mod:`flashinfer.moe_ep.fused`."""

from flashinfer.moe_ep.fused import materialize_fused_moe_weights as materialize_fused_moe_weights
