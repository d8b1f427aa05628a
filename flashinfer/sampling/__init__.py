# SPDX-License-Identifier: Apache-2.0
"""Sampling tokens: draws from probabilities and logits, their filters, and speculative verification.

No draw depends on scheduling, on the size of the batch or on the device: random numbers are a function of seed, offset
and output row, and sums are of integers.
"""

from ..jit.sampling import gen_sampling_module as gen_sampling_module
from .draw import (
    min_p_sampling_from_probs,
    sampling_from_logits,
    sampling_from_probs,
    top_k_sampling_from_probs,
    top_p_sampling_from_probs,
)
from .joint import top_k_top_p_sampling_from_logits, top_k_top_p_sampling_from_probs
from .namespace import get_sampling_module as get_sampling_module
from .random_stream import get_seed_and_offset as get_seed_and_offset
from .rows import softmax, top_k_mask_logits, top_k_renorm_probs, top_p_renorm_probs
from .rows import top_k_renorm_prob as top_k_renorm_prob
from .rows import top_p_renorm_prob as top_p_renorm_prob
from .speculative import chain_speculative_sampling

__all__ = [
    "chain_speculative_sampling",
    "min_p_sampling_from_probs",
    "sampling_from_logits",
    "sampling_from_probs",
    "softmax",
    "top_k_mask_logits",
    "top_k_renorm_probs",
    "top_k_sampling_from_probs",
    "top_k_top_p_sampling_from_logits",
    "top_k_top_p_sampling_from_probs",
    "top_p_renorm_probs",
    "top_p_sampling_from_probs",
]
