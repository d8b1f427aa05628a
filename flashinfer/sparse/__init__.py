# SPDX-License-Identifier: Apache-2.0
"""Attention over blocks of keys: a pattern of equal blocks, or blocks of any size with a pattern for each head."""

from .block import BlockSparseAttentionWrapper
from .block import convert_bsr_mask_layout as convert_bsr_mask_layout
from .variable import VariableBlockSparseAttentionWrapper

__all__ = ["BlockSparseAttentionWrapper", "VariableBlockSparseAttentionWrapper"]
