# SPDX-License-Identifier: Apache-2.0
"""The path under which published code imports :mod:`flashinfer.fused_moe.ep.config`."""

from flashinfer.fused_moe.ep.config import BootstrapConfig as BootstrapConfig
from flashinfer.fused_moe.ep.config import CombineInputParams as CombineInputParams
from flashinfer.fused_moe.ep.config import CombineOutput as CombineOutput
from flashinfer.fused_moe.ep.config import DispatchInputParams as DispatchInputParams
from flashinfer.fused_moe.ep.config import DispatchOutput as DispatchOutput
from flashinfer.fused_moe.ep.config import EpAlgorithm as EpAlgorithm
from flashinfer.fused_moe.ep.config import EpLayout as EpLayout
from flashinfer.fused_moe.ep.config import FleetParams as FleetParams
from flashinfer.fused_moe.ep.config import HandleParams as HandleParams
from flashinfer.fused_moe.ep.config import MoEEpTensors as MoEEpTensors
