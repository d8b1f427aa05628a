# SPDX-License-Identifier: Apache-2.0
"""Communication between GPUs: which rank does what, constants, and how ranks talk. The kernels are not here yet.

Functions whose presence tells an engine that a kernel exists (``allreduce_fusion``) are absent until it does.
"""

from .mapping import Mapping
from .trtllm_ar import AllReduceFusionPattern, QuantizationSFLayout

__all__ = ["AllReduceFusionPattern", "Mapping", "QuantizationSFLayout"]
