# SPDX-License-Identifier: Apache-2.0
"""Statistics of tensors while a CUDA graph is captured (level 5 of the API log).

Values cannot be read during a capture, and have not been computed yet. So a kernel is captured behind each logged
tensor: every replay of the graph prints one line to standard output, with the id that the log has given to the tensor.
"""

from __future__ import annotations

import itertools
from typing import Any, Callable, Optional

import torch

from ..jit.api_log_stats import gen_api_log_stats_module
from ..jit.codegen import module_cache
from .describe import skipped_statistics

__all__: list[str] = []  # only the API log uses this module

Kernel = Callable[[torch.Tensor, int], None]

_DTYPES = {torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8}
_ids = itertools.count()
_get_module = module_cache(gen_api_log_stats_module)


def load_stats_kernel() -> Optional[Kernel]:
    """Build and open the module, which creates no CUDA context; ``None`` without a GPU.

    The GPUs are counted because ``is_available()`` calls the driver: CUDA would be of no use in children forked later.
    """
    return _get_module().api_log_stats if torch.cuda.device_count() > 0 else None


def deferred_statistics(tensor: torch.Tensor, kernel: Optional[Kernel]) -> str:
    """Capture the kernel for ``tensor`` and say under which id each replay prints its line; never raises.

    Parameters
    ----------
    tensor : torch.Tensor
        An argument or a result of a captured call.
    kernel : Optional[Callable]
        What :func:`load_stats_kernel` returned.
    """
    try:
        if kernel is None or not _is_served(tensor):
            return skipped_statistics(tensor)
        number = next(_ids)
        kernel(tensor.detach(), number)
        return f"[stats deferred to GPU kernel: id={number}]"
    except Exception as error:
        return f"[statistics unavailable: {type(error).__name__}: {error}]"


def _is_served(tensor: Any) -> bool:
    is_dense = tensor.is_cuda and tensor.layout is torch.strided and tensor.is_contiguous()
    return is_dense and tensor.dtype in _DTYPES and tensor.numel() > 0
