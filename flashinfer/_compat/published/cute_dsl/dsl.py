# SPDX-License-Identifier: Apache-2.0
"""Names that work on objects of the CuTe DSL: classes of kernels, pointers and types. A call of one raises."""

from __future__ import annotations

import functools
from typing import Any, Optional, Union

import torch

from flashinfer._compat.unsupported import needs
from flashinfer._runtime.arch import get_compute_capability

__all__ = [
    "FusedAddRMSNormKernel",
    "FusedAddRMSNormQuantKernel",
    "LayerNormKernel",
    "QKRMSNormKernel",
    "RMSNormFP4QuantKernel",
    "RMSNormKernel",
    "RMSNormQuantKernel",
    "get_cutlass_dtype",
    "get_sm_version",
    "make_ptr",
    "torch_to_cutlass_dtype",
]

_DSL = "kernels in the CuTe DSL; the norms of this package are native (flashinfer.norm)"


def _name(name: str, parameters: str) -> Any:
    return needs(name, _DSL, parameters)


make_ptr = _name("make_ptr", "dtype, value, mem_space=None, assumed_align=None")
get_cutlass_dtype = _name("get_cutlass_dtype", "dtype")
torch_to_cutlass_dtype = _name("torch_to_cutlass_dtype", "dtype")
RMSNormKernel = _name("RMSNormKernel", "dtype, H, weight_bias=0.0, sm_version=None")
QKRMSNormKernel = _name("QKRMSNormKernel", "dtype, head_dim, weight_bias=0.0")
RMSNormQuantKernel = _name("RMSNormQuantKernel", "dtype, H, weight_bias=0.0, use_hw_fp8=True, sm_version=None")
FusedAddRMSNormKernel = _name("FusedAddRMSNormKernel", "dtype, H, weight_bias=0.0, sm_version=None")
FusedAddRMSNormQuantKernel = _name(
    "FusedAddRMSNormQuantKernel", "dtype, H, weight_bias=0.0, use_hw_fp8=True, sm_version=None"
)
LayerNormKernel = _name("LayerNormKernel", "dtype, H")
RMSNormFP4QuantKernel = _name(
    "RMSNormFP4QuantKernel", "dtype, H, block_size, output_swizzled, is_fp16, sm_version=None, scale_format=None"
)


@functools.cache
def get_sm_version(device: Optional[Union[int, torch.device, str]] = None) -> int:
    """Return the compute capability of a CUDA device as one number, such as 90; 80 without a GPU."""
    if not torch.cuda.is_available():
        return 80
    index = torch.cuda.current_device() if device is None else device
    major, minor = get_compute_capability(
        torch.device("cuda", index) if isinstance(index, int) else torch.device(index)
    )
    return 10 * major + minor
