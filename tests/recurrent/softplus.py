# SPDX-License-Identifier: Apache-2.0
"""Numbers at which a softplus is read off a state to which nothing is added, and the comparison."""

from __future__ import annotations

import torch

#: Numbers that bfloat16 has, on both sides of thresholds that a kernel might have by mistake.
NUMBERS = (-20.0, -1.0, 0.0, 2.0, 3.5, 4.5, 5.25, 6.0, 7.0, 8.0, 9.0, 10.5, 15.0, 20.0, 20.125, 30.0)
HEADS = len(NUMBERS)


def check(before: torch.Tensor, after: torch.Tensor, rate: float, dim: int) -> None:
    """Compare for each number, the index of ``dim``; ``rate`` is minus the log decay for a softplus of 1."""
    ratio = (after.double() / before.double()).movedim(dim, 0).flatten(1)
    numbers = torch.tensor(NUMBERS, dtype=torch.float64, device=ratio.device)
    expected = torch.nn.functional.softplus(numbers, threshold=1000.0)
    torch.testing.assert_close(ratio.amin(1).log() / -rate, expected, rtol=0, atol=3e-5)
    torch.testing.assert_close(ratio.amax(1).log() / -rate, expected, rtol=0, atol=3e-5)
