# SPDX-License-Identifier: Apache-2.0
"""Reference attention in float64 with whole matrices of logits. Every attention test compares with it.

One request at a time; queries and keys are ``[tokens, heads, head_dim]``. ``ragged`` cuts a batch into requests; keys
in pages are those that inputs.py put there.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Optional, Sequence

import torch

Result = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, eq=False)
class Attention:
    """Parameters of the computation, without the tensors.

    Parameters
    ----------
    window_left : int
        Keys left of the diagonal that are visible; negative: all of them.
    logits_soft_cap : float
        0 for none.
    sm_scale : float, optional
        1 / sqrt(head_dim_qk) if None. ``q_scale`` and ``k_scale`` multiply it, ``v_scale`` multiplies the output.
    alibi : bool
        Bias of :func:`alibi_slopes`; the row counts from 0 whatever kv_len is, which the LSE shows.
    rope : bool
        Rotate queries and keys by their positions, halves of the head as pairs.
    sinks : torch.Tensor, optional
        ``[num_qo_heads]`` logits without a value, added to the denominator.
    mask : torch.Tensor, optional
        ``[qo_len, kv_len]`` bool, or one for each query head, True: visible. Replaces ``causal``; the window holds too.
    prefix_len, token_pos : int and torch.Tensor, optional
        Multi-item scoring: keys that every item sees, and for each later position the place inside its item, 0 for
        the delimiters. Replaces ``causal`` and ``mask``.
    """

    causal: bool = False
    window_left: int = -1
    logits_soft_cap: float = 0.0
    sm_scale: Optional[float] = None
    q_scale: float = 1.0
    k_scale: float = 1.0
    v_scale: float = 1.0
    alibi: bool = False
    rope: bool = False
    rope_scale: float = 1.0
    rope_theta: float = 1e4
    sinks: Optional[torch.Tensor] = None
    mask: Optional[torch.Tensor] = None
    prefix_len: Optional[int] = None
    token_pos: Optional[torch.Tensor] = None

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Result:
        """Return output ``[qo_len, num_qo_heads, head_dim_vo]`` and base-2 LSE ``[qo_len, num_qo_heads]``,
        as float32.
        """
        qo_len, kv_len = q.shape[0], k.shape[0]
        q, k, v = q.double(), k.double(), v.double()
        if self.rope:
            q = self.rotate(q, torch.arange(qo_len, device=q.device) + kv_len - qo_len)
            k = self.rotate(k, torch.arange(kv_len, device=q.device))
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        logits = self.transform(torch.einsum("qhd,khd->hqk", q, k), q.shape[-1])
        logits = logits.masked_fill(~self.visible(qo_len, kv_len, q.device), -math.inf)
        if self.sinks is not None:
            column = self.sinks.to(logits)[:, None, None].expand(-1, qo_len, 1)
            logits = torch.cat([logits, column], dim=-1)
        lse = torch.logsumexp(logits, dim=-1)
        weights = torch.exp(logits - lse.masked_fill(lse == -math.inf, 0)[..., None])[..., :kv_len]
        o = torch.einsum("hqk,khd->qhd", weights, v) * self.v_scale
        return o.float(), (lse / math.log(2)).T.contiguous().float()

    def transform(self, x: torch.Tensor, head_dim: int) -> torch.Tensor:
        """Return logits ``[heads, qo_len, kv_len]`` from products of q and k: scale, ALiBi, soft cap, in this order."""
        sm_scale = 1 / math.sqrt(head_dim) if self.sm_scale is None else self.sm_scale
        x = x * (sm_scale * self.q_scale * self.k_scale)
        if self.alibi:
            heads, qo_len, kv_len = x.shape
            row, column = (torch.arange(n, device=x.device) for n in (qo_len, kv_len))
            x = x + alibi_slopes(heads).to(x)[:, None, None] * (column - row[:, None])
        if self.logits_soft_cap > 0:
            x = self.logits_soft_cap * torch.tanh(x / self.logits_soft_cap)
        return x

    def visible(self, qo_len: int, kv_len: int, device: torch.device) -> torch.Tensor:
        """Return the mask ``[qo_len, kv_len]``, True where the key is visible."""
        position = torch.arange(qo_len, device=device)[:, None] + kv_len - qo_len
        key = torch.arange(kv_len, device=device)
        seen = torch.ones(qo_len, kv_len, dtype=torch.bool, device=device)
        if self.prefix_len is not None:
            seen = (key <= position) & self.inside_item(position, key)
        elif self.mask is not None:
            seen = self.mask.to(device=device, dtype=torch.bool)
        elif self.causal:
            seen = key <= position
        if self.window_left >= 0:
            seen = seen & (key >= position - self.window_left)
        return seen

    def inside_item(self, position: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        prefix, places = self.prefix_len, self.token_pos
        assert prefix is not None and places is not None
        place = torch.zeros_like(position)
        for row, p in enumerate(position[:, 0].tolist()):
            place[row] = int(places[p - prefix]) if p >= prefix else 0
        return (position < prefix) | (key < prefix) | (position < key + place)

    def rotate(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        frequency = self.rope_theta ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
        angle = (position / self.rope_scale)[:, None, None] * frequency
        one, two = x[..., :half], x[..., half:]
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([one * cos - two * sin, one * sin + two * cos], dim=-1)

    def with_(self, **changes: object) -> Attention:
        """Return a copy with other settings."""
        return replace(self, **changes)  # type: ignore[arg-type]


def alibi_slopes(heads: int) -> torch.Tensor:
    """Return slopes: a geometric series for the largest power of two, every other term of a finer one for the rest."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    slopes += [2 ** (-4 * (2 * i - 1) / power) for i in range(1, heads - power + 1)]
    return torch.tensor(slopes, dtype=torch.float64)


def batched(what: Sequence[Attention], q: Sequence[torch.Tensor], kv: Sequence[tuple[torch.Tensor, ...]]) -> Result:
    """Compute each request by itself and concatenate the results."""
    parts = [f(a, *b) for f, a, b in zip(what, q, kv, strict=True)]
    o, lse = zip(*parts, strict=True)
    return torch.cat(o), torch.cat(lse)


def split(x: torch.Tensor, indptr: Sequence[int]) -> list[torch.Tensor]:
    """Split rows by request."""
    return [x[a:b] for a, b in itertools.pairwise(indptr)]


def ragged(
    what: Attention | Sequence[Attention],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qo_indptr: Sequence[int],
    kv_indptr: Sequence[int],
) -> Result:
    """Compute a ragged batch whose queries, keys and values are concatenated by request (NHD)."""
    requests = len(qo_indptr) - 1
    each = [what] * requests if isinstance(what, Attention) else what
    kv = list(zip(split(k, kv_indptr), split(v, kv_indptr), strict=True))
    return batched(each, split(q, qo_indptr), kv)
