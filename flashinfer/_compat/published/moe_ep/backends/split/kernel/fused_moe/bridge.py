# SPDX-License-Identifier: Apache-2.0
"""The path under which published code imports :mod:`flashinfer.moe_ep.fused`."""

from flashinfer.moe_ep.fused import build_activation_pack as build_activation_pack
from flashinfer.moe_ep.fused import build_activation_pack_rank_major as build_activation_pack_rank_major
from flashinfer.moe_ep.fused import reshape_for_combine as reshape_for_combine
