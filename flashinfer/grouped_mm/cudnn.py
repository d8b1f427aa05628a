# SPDX-License-Identifier: Apache-2.0
"""The published facts of the backend name "cudnn", behind which our own kernels run: cuDNN need not be installed."""

from __future__ import annotations

from .._runtime.arch import CPU
from .._runtime.requirements import supported_compute_capability

__all__ = ["accept_bf16", "accept_fp8"]

#: Oldest cuDNN that has grouped products; callers print it where they find an older one.
_CUDNN_MOE_MIN_VERSION = 92100

#: Capabilities of the published functions. The CPU, which they do not have, is added for ours.
BF16_CCS = (80, 86, 87, 89, 90, 100, 103, 110, 120, 121)
FP8_CCS = (89, 90, 100, 103, 110, 120, 121)
BLACKWELL_CCS = (100, 103, 110, 120, 121)


@supported_compute_capability([CPU, *BF16_CCS])
def accept_bf16(*_: object, **__: object) -> bool:
    """Accept what the common check has accepted."""
    return True


@supported_compute_capability([CPU, *FP8_CCS])
def accept_fp8(*_: object, **__: object) -> bool:
    """Accept what the common check has accepted."""
    return True
