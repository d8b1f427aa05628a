# SPDX-License-Identifier: Apache-2.0
"""Skip marker for machines without the GPU that the tests of this folder need."""

from __future__ import annotations

import pytest
import torch


def has_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


needs_hopper = pytest.mark.skipif(not has_hopper(), reason="needs a GPU of capability 9.0")
