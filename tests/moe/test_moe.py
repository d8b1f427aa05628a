# SPDX-License-Identifier: Apache-2.0
"""The folder that the guide names for mixture of experts. The tests of the family are in tests/fused_moe."""

from __future__ import annotations

import torch
from torch.nn.functional import silu

import flashinfer


def test_one_layer():
    """Check one small layer against torch: what the other folder does for every format."""
    torch.manual_seed(0)
    tokens, experts, hidden, inner = 4, 3, 64, 64
    up, gate = (torch.randn(experts, inner, hidden) / 8 for _ in range(2))
    down = torch.randn(experts, hidden, inner) / 8
    x = torch.randn(tokens, hidden).bfloat16()
    weights, ids = torch.randn(tokens, experts).softmax(-1).topk(2)
    w1, w2 = torch.cat((up, gate), dim=1).bfloat16(), down.bfloat16()
    out = flashinfer.cutlass_fused_moe(x, ids.int(), weights, w1, w2, torch.bfloat16, [])[0]
    expected = torch.zeros(tokens, hidden)
    for t in range(tokens):
        for w, e in zip(weights[t], ids[t], strict=True):
            u, g = (x[t].float() @ w1[e].float().T).chunk(2)
            expected[t] += w * ((silu(g) * u) @ w2[e].float().T)
    torch.testing.assert_close(out.float(), expected, rtol=3e-2, atol=3e-2)
