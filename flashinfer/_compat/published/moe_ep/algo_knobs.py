# SPDX-License-Identifier: Apache-2.0
"""The path under which published code imports :mod:`flashinfer.fused_moe.ep.algo_knobs`."""

from flashinfer.fused_moe.ep.algo_knobs import AlgoKnob as AlgoKnob
from flashinfer.fused_moe.ep.algo_knobs import FleetAlgoKnobAllocator as FleetAlgoKnobAllocator
from flashinfer.fused_moe.ep.algo_knobs import FleetAlgoKnobFaultTolerance as FleetAlgoKnobFaultTolerance
from flashinfer.fused_moe.ep.algo_knobs import FleetAlgoKnobNumChannelsPerRank as FleetAlgoKnobNumChannelsPerRank
from flashinfer.fused_moe.ep.algo_knobs import FleetAlgoKnobQuantization as FleetAlgoKnobQuantization
from flashinfer.fused_moe.ep.algo_knobs import FleetAlgoKnobTopologyCapacity as FleetAlgoKnobTopologyCapacity
from flashinfer.fused_moe.ep.algo_knobs import HandleAlgoKnobNumReceivedTokens as HandleAlgoKnobNumReceivedTokens
from flashinfer.fused_moe.ep.algo_knobs import HandleAlgoKnobSplitOperation as HandleAlgoKnobSplitOperation
from flashinfer.fused_moe.ep.algo_knobs import HandleAlgoKnobTopKWeights as HandleAlgoKnobTopKWeights
from flashinfer.fused_moe.ep.algo_knobs import HandleAlgoKnobUserStream as HandleAlgoKnobUserStream
from flashinfer.fused_moe.ep.algo_knobs import QuantType as QuantType
from flashinfer.fused_moe.ep.algo_knobs import _index_knobs as _index_knobs
