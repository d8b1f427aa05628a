# SPDX-License-Identifier: Apache-2.0
"""The results of ``cutlass_fused_moe`` that have a shape but no meaning."""

from __future__ import annotations

import torch

from ..._runtime.allocation import cuda_index, new_empty
from ..._runtime.codegen_wrapper import compiler, is_traced

__all__ = ["kept", "unspecified"]

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

_KEPT_SIZES = 64
_KEPT_ELEMENTS = 1 << 16  # elements of the largest tensor that is kept: 256 KB
#: By CUDA device index (-1: the CPU), experts and tokens.
kept: dict[tuple[int, int, int], Three] = {}


def _allocate(like: torch.Tensor, experts: int, tokens: int) -> Three:
    return (
        new_empty(like, torch.int32, 1),
        new_empty(like, torch.float32, experts, tokens),
        new_empty(like, torch.int32, experts),
    )


def unspecified(like: torch.Tensor, experts: int, tokens: int) -> Three:
    """Return tensors that nobody reads: int32 ``(1,)``, float32 ``(experts, tokens)``, int32 ``(experts,)``.

    Those of small calls are kept: three allocations take 4 us. Memory of a CUDA graph that is being captured is not
    kept, because it belongs to the graph.
    """
    if is_traced() or compiler._is_compiling_flag:
        return _allocate(like, experts, tokens)
    key = (cuda_index(like), experts, tokens)
    found = kept.get(key)
    if found is None:
        with torch.inference_mode(False):  # what is kept may be returned in other modes
            found = _allocate(like, experts, tokens)
        is_small = experts * tokens <= _KEPT_ELEMENTS and len(kept) < _KEPT_SIZES
        if is_small and not (like.is_cuda and torch.cuda.is_current_stream_capturing()):
            kept[key] = found
    return found
