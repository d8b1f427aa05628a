# SPDX-License-Identifier: Apache-2.0
"""Attention beyond one kind of batch, and the pieces that the families of attention share."""

from ..jit.attention import gen_batch_attention_module as gen_batch_attention_module
from .batch_attention import BatchAttention
from .sink import BatchAttentionWithAttentionSinkWrapper

__all__ = ["BatchAttention", "BatchAttentionWithAttentionSinkWrapper"]
