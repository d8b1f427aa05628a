# SPDX-License-Identifier: Apache-2.0
"""The published path of the kernel behind ``gated_residual_next_rmsnorm``, which an engine calls itself."""

from ..gated import run_next as run

__all__ = ["run"]
