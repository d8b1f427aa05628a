# SPDX-License-Identifier: Apache-2.0
"""The published path of single norm kernels.

``gated_residual_next_rmsnorm`` is a function here, and a module in an import of its own. The import system sets the
attribute when it first imports the module, which happens here, before the name is bound to the function.
"""

import importlib

from .. import gated

importlib.import_module(f"{__name__}.gated_residual_next_rmsnorm")
gated_residual_next_rmsnorm = gated.gated_residual_next_rmsnorm

__all__ = ["gated_residual_next_rmsnorm"]
