# SPDX-License-Identifier: Apache-2.0
"""The path under which published code imports :mod:`flashinfer.fused_moe.ep.weights`."""

from flashinfer.fused_moe.ep.weights import MoEWeightPack as MoEWeightPack
from flashinfer.fused_moe.ep.weights import PrequantizedMoEWeights as PrequantizedMoEWeights
from flashinfer.fused_moe.ep.weights import UnquantizedMoEWeights as UnquantizedMoEWeights
from flashinfer.fused_moe.ep.weights import dummy_moe_weights as dummy_moe_weights
