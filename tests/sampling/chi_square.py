# SPDX-License-Identifier: Apache-2.0
"""A test of frequencies."""

from __future__ import annotations

import math

import torch


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the chi-square statistic as standard deviations of a normal variable (Wilson and Hilferty, 1931); cells
    below 5 are merged.
    """
    small = expected < 5
    counts = torch.cat([counts[~small], counts[small].sum().view(1)])
    expected = torch.cat([expected[~small], expected[small].sum().view(1)])
    cells = expected > 0
    degrees = int(cells.sum()) - 1
    if degrees < 1:
        return 0.0
    statistic = float(((counts - expected)[cells].square() / expected[cells]).sum())
    variance = 2 / (9 * degrees)
    return ((statistic / degrees) ** (1 / 3) - 1 + variance) / math.sqrt(variance)
