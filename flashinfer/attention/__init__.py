# SPDX-License-Identifier: Apache-2.0
"""Attention over mixed batches and with sinks, and code shared by the decode, prefill, MLA and cascade packages."""

from ..jit.attention import gen_batch_attention_module as gen_batch_attention_module
from .batch_attention import BatchAttention
from .sink import BatchAttentionWithAttentionSinkWrapper

__all__ = ["BatchAttention", "BatchAttentionWithAttentionSinkWrapper"]
