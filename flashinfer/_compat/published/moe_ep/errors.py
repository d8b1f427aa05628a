# SPDX-License-Identifier: Apache-2.0
"""The path under which published code imports :mod:`flashinfer.fused_moe.ep.errors`."""

from flashinfer.fused_moe.ep.errors import MoEEpArchError as MoEEpArchError
from flashinfer.fused_moe.ep.errors import MoEEpConfigError as MoEEpConfigError
from flashinfer.fused_moe.ep.errors import MoEEpFaultToleranceUnsupportedError as MoEEpFaultToleranceUnsupportedError
from flashinfer.fused_moe.ep.errors import MoEEpNotBuiltError as MoEEpNotBuiltError
from flashinfer.fused_moe.ep.errors import MoEEpRankEvictedError as MoEEpRankEvictedError
from flashinfer.fused_moe.ep.errors import MoEEpTransportError as MoEEpTransportError
