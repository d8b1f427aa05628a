# SPDX-License-Identifier: Apache-2.0
"""The k largest logits of rows of various lengths."""

from .topk_varlen import top_k_varlen

__all__ = ["top_k_varlen"]
