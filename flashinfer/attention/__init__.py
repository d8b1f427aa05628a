# SPDX-License-Identifier: Apache-2.0
"""Attention beyond one kind of batch, and the pieces that the families of attention share."""

from .batch_attention import BatchAttention
from .sink import BatchAttentionWithAttentionSinkWrapper

__all__ = ["BatchAttention", "BatchAttentionWithAttentionSinkWrapper"]
