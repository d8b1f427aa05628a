# SPDX-License-Identifier: Apache-2.0
"""Latent attention (MLA): all heads share one compressed key, which is the value too."""

from typing import Any

from .._compat.unsupported_attention import MLA_NAMES as _BLACKWELL
from ._core import BatchMLAPagedAttentionWrapper
from ._core import get_batch_mla_module as get_batch_mla_module
from .dimensions import MLAHeadDimensions as MLAHeadDimensions
from .dimensions import MLALayerDimensions as MLALayerDimensions
from .dimensions import deepseek_mla_dimensions as deepseek_mla_dimensions
from .dimensions import nope_mla_dimensions as nope_mla_dimensions
from .dimensions import smaller_mla_dimensions as smaller_mla_dimensions
from .dimensions import supported_mla_head_dimensions as supported_mla_head_dimensions
from .dimensions import supported_mla_layer_dimensions as supported_mla_layer_dimensions
from .legacy import BatchDecodeMlaWithPagedKVCacheWrapper
from .metadata import MLAPlanMetadata as MLAPlanMetadata
from .sparse import get_sparse_mla_module as get_sparse_mla_module
from .sparse import sparse_mla

__all__ = ["BatchDecodeMlaWithPagedKVCacheWrapper", "BatchMLAPagedAttentionWrapper", "sparse_mla"]


def __getattr__(name: str) -> Any:
    if name in _BLACKWELL:
        return _BLACKWELL[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
