# SPDX-License-Identifier: Apache-2.0
"""The path under which published code imports :mod:`flashinfer.moe_ep.fleet`."""

from flashinfer.moe_ep.fleet import _BACKEND_REGISTRY as _BACKEND_REGISTRY
from flashinfer.moe_ep.fleet import Fleet as Fleet
from flashinfer.moe_ep.fleet import Handle as Handle
from flashinfer.moe_ep.fleet import create_fleet as create_fleet
