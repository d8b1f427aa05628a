# SPDX-License-Identifier: Apache-2.0
"""Repeatable random inputs, and how many bytes they hold."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from .cold_cache import tensors_in

__all__ = ["count_bytes", "set_seed"]


def set_seed(random_seed: int) -> None:
    """Seed Python, numpy and torch (all devices).

    Examples
    --------
    >>> flashinfer.testing.set_seed(0)
    """
    random.seed(random_seed)
    np.random.seed(random_seed % 2**32)
    torch.manual_seed(random_seed)


def count_bytes(*tensors: Any) -> int:
    """Bytes of all elements of the tensors, also inside lists, tuples and dicts; ``None`` counts nothing.

    Examples
    --------
    >>> flashinfer.testing.count_bytes(torch.ones(3), [torch.ones(2).half(), None])
    16
    """
    return sum(t.nbytes for t in tensors_in(tensors))
