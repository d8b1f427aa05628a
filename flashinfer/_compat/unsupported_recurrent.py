# SPDX-License-Identifier: Apache-2.0
"""Functions of recurrent layers that need other GPUs or libraries: a call raises an error that says so."""

from __future__ import annotations

from typing import Any

from .unsupported import needs

__all__ = ["chunk_gated_delta_rule2", "gdn_fused_decode_step", "gdn_fused_decode_step_supported", "ugpu_state_pool"]

_KERNEL = "and a kernel for it, which this package does not have"

gdn_fused_decode_step = needs("gdn_fused_decode_step", f"a Blackwell GPU (SM120) {_KERNEL}")
chunk_gated_delta_rule2 = needs(
    "chunk_gated_delta_rule2", "cuDNN's kernels of the delta rule, which this package does not have"
)
ugpu_state_pool = needs("ugpu_state_pool", f"a Rubin GPU {_KERNEL}")


def gdn_fused_decode_step_supported(*args: Any, **kwargs: Any) -> bool:
    """Answer that no call can use :func:`gdn_fused_decode_step`."""
    return False
