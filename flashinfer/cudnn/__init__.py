# SPDX-License-Identifier: Apache-2.0
"""Attention by cuDNN where its frontend, nvidia-cudnn-frontend, is installed, and by our own kernels elsewhere."""

from .decode import cudnn_batch_decode_with_kv_cache
from .prefill import cudnn_batch_prefill_with_kv_cache as cudnn_batch_prefill_with_kv_cache

__all__ = ["cudnn_batch_decode_with_kv_cache"]
