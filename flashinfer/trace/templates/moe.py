# SPDX-License-Identifier: Apache-2.0
"""The published templates of mixture-of-experts layers under one name; each is defined with its family."""

from __future__ import annotations

from .fused_moe import cutlass_fused_moe_trace

__all__ = ["cutlass_fused_moe_trace"]
