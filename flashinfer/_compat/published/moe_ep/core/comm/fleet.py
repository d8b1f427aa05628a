# SPDX-License-Identifier: Apache-2.0
"""The path under which published code imports :mod:`flashinfer.fused_moe.ep.fleet`."""

from flashinfer.fused_moe.ep.fleet import _BACKEND_REGISTRY as _BACKEND_REGISTRY
from flashinfer.fused_moe.ep.fleet import Fleet as Fleet
from flashinfer.fused_moe.ep.fleet import Handle as Handle
from flashinfer.fused_moe.ep.fleet import create_fleet as create_fleet
