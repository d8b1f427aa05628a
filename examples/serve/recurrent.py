# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers of the hybrid models that ``examples/serve`` serves: the gated delta rule of Qwen3-Next.

Such a layer has no pages. A request has a slot in two pools for as long as it runs: a matrix for each value head, and
the last tokens before its convolution. Both are zeros when the request gets the slot, and each pass goes on from what
the last one left there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Mapping, Optional, Union

import torch
from torch.nn.functional import conv1d, silu, softplus

import flashinfer
from flashinfer.gdn_decode import gated_delta_rule_decode_pretranspose
from serve.linear import Linear, Weights

HEAD_DIM = 128  #: keys and values of a head: the size that the kernels have
PADDING_SLOT = -1  #: rows of a CUDA graph without a request: kernels skip it, the last window of the pool is its own


@dataclass(frozen=True)
class Recurrent:
    """Sizes of the recurrent layers; ``layers`` are those that have no attention."""

    num_key_heads: int
    num_value_heads: int
    num_taps: int  #: tokens that the convolution sees
    layers: frozenset[int]

    @staticmethod
    def of(config: Mapping[str, Any]) -> Recurrent:
        """Read them from config.json."""
        for name in ("linear_key_head_dim", "linear_value_head_dim"):
            if config[name] != HEAD_DIM:
                raise ValueError(f"config.json: {name} is {config[name]!r}, expected {HEAD_DIM}")
        count, every = config["num_hidden_layers"], config.get("full_attention_interval") or 4
        kinds = config.get("layer_types") or ["linear_attention" if (i + 1) % every else "" for i in range(count)]
        layers = frozenset(i for i, kind in enumerate(kinds) if kind == "linear_attention")
        keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
        return Recurrent(keys, values, config["linear_conv_kernel_dim"], layers)

    @property
    def num_channels(self) -> int:
        """Queries, keys and values of a token, which the convolution mixes with those before it."""
        return (2 * self.num_key_heads + self.num_value_heads) * HEAD_DIM

    def shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors of one layer, keyed by their whole names below it."""
        inner = self.num_value_heads * HEAD_DIM
        return {
            "linear_attn.in_proj_qkvz.weight": (self.num_channels + inner, hidden_size),
            "linear_attn.in_proj_ba.weight": (2 * self.num_value_heads, hidden_size),
            "linear_attn.conv1d.weight": (self.num_channels, 1, self.num_taps),
            "linear_attn.dt_bias": (self.num_value_heads,),
            "linear_attn.A_log": (self.num_value_heads,),
            "linear_attn.norm.weight": (HEAD_DIM,),
            "linear_attn.out_proj.weight": (hidden_size, inner),
        }


@dataclass(frozen=True)
class States:
    """States of all requests in the recurrent layers, by layer and slot."""

    matrices: torch.Tensor  #: ``(layers, slots, num_value_heads, 128, 128)`` float32, values before keys
    windows: torch.Tensor  #: ``(layers, slots + 1, num_taps - 1, num_channels)``; the last is for padding

    @staticmethod
    def empty(sizes: Recurrent, slots: int, dtype: torch.dtype, device: Union[str, torch.device]) -> States:
        layers = len(sizes.layers)
        of_slot = (sizes.num_value_heads, HEAD_DIM, HEAD_DIM)
        return States(
            torch.zeros(layers, slots, *of_slot, device=device),
            torch.zeros(layers, slots + 1, sizes.num_taps - 1, sizes.num_channels, dtype=dtype, device=device),
        )

    def clear(self, slot: int) -> None:
        """Make a slot that of a request without tokens."""
        self.matrices[:, slot].zero_()
        self.windows[:, slot].zero_()


@dataclass(frozen=True)
class Places:
    """Rows of tokens and windows where a pass's requests lie one after the other, each behind its window."""

    tokens: torch.Tensor  #: ``(rows,)`` the oldest token that each token's convolution sees
    before: torch.Tensor  #: ``(batch, num_taps - 1)`` the windows
    after: torch.Tensor  #: ``(batch, num_taps - 1)`` the windows of the next pass

    @staticmethod
    def of(rows: Any, num_taps: int) -> Optional[Places]:
        """Return the places, or None if every request has one token, as in a decode step."""
        kept, count, batch = num_taps - 1, len(rows.tokens), len(rows.slots)
        if count == batch:
            return None
        device = rows.tokens.device
        shift = kept * torch.arange(batch, device=device)
        window = torch.arange(kept, device=device)
        tokens = torch.arange(count, device=device) + shift[rows.batch_indices]
        ends = rows.qo_indptr + torch.cat([shift, shift[-1:] + kept])
        return Places(tokens, ends[:-1, None] + window, ends[1:, None] - kept + window)


class RecurrentLayer:
    """The gated delta rule of one layer: projections, convolution, the rule, a gated norm, the last projection.

    Parameters
    ----------
    sizes : Recurrent
    weights : Weights
    layer : str
        Prefix of the names, ``model.layers.0``.
    eps : float
    linear : type[Linear]
        Kind of the projections; that of the gates, which the states depend on most, stays in 16 bits.
    """

    def __init__(
        self, sizes: Recurrent, weights: Weights, layer: str, eps: float, linear: type[Linear] = Linear
    ) -> None:
        prefix = f"{layer}.linear_attn"
        self.sizes, self.eps = sizes, eps
        self.project = linear(self._by_kind(weights, prefix))
        self.gates = Linear(self._gates(weights, prefix).to(weights[f"{prefix}.norm.weight"].dtype))
        self.taps = weights[f"{prefix}.conv1d.weight"]
        self.a_log, self.dt_bias = weights[f"{prefix}.A_log"], weights[f"{prefix}.dt_bias"]
        self.norm = weights[f"{prefix}.norm.weight"]
        self.out = linear.of(weights, prefix, "out_proj")

    def _by_kind(self, weights: Weights, prefix: str) -> torch.Tensor:
        """Return the first projection with all queries first, then keys, values, gates: stored by key head."""
        sizes = self.sizes
        group = sizes.num_value_heads // sizes.num_key_heads * HEAD_DIM
        weight = weights[f"{prefix}.in_proj_qkvz.weight"]
        parts = weight.view(sizes.num_key_heads, -1, weight.shape[1]).split((HEAD_DIM, HEAD_DIM, group, group), dim=1)
        return torch.cat([part.reshape(-1, weight.shape[1]) for part in parts])

    def _gates(self, weights: Weights, prefix: str) -> torch.Tensor:
        """Return the projection of beta and of the decay, stored by key head too."""
        weight = weights[f"{prefix}.in_proj_ba.weight"]
        parts = weight.view(self.sizes.num_key_heads, -1, weight.shape[1]).chunk(2, dim=1)
        return torch.cat([part.reshape(-1, weight.shape[1]) for part in parts])

    def __call__(
        self, x: torch.Tensor, rows: Any, places: Optional[Places], matrices: torch.Tensor, windows: torch.Tensor
    ) -> torch.Tensor:
        """Return the layer's output; ``matrices`` and ``windows`` of the requests' slots go on."""
        sizes, count = self.sizes, len(x)
        mixed, z = self.project(x).split((sizes.num_channels, sizes.num_value_heads * HEAD_DIM), dim=1)
        mixed = silu(self.convolve(mixed, rows, places, windows)).reshape(count, -1, HEAD_DIM)
        q, k, v = mixed.split((sizes.num_key_heads, sizes.num_key_heads, sizes.num_value_heads), dim=1)
        b, a = self.gates(x).chunk(2, dim=1)
        if places is None:
            q, k, v, a, b = (part.unsqueeze(1) for part in (q, k, v, a, b))
            out, _ = gated_delta_rule_decode_pretranspose(
                q, k, v, None, self.a_log, a, self.dt_bias, b, initial_state=matrices, initial_state_indices=rows.slots
            )
        else:
            decay = torch.exp(-self.a_log.exp() * softplus(a.float() + self.dt_bias))
            out, _ = flashinfer.chunk_gated_delta_rule(
                *(part.contiguous() for part in (q, k, v)),
                decay,
                torch.sigmoid(b.float()),
                initial_state=matrices,
                output_final_state=True,
                cu_seqlens=rows.qo_indptr,
                use_qk_l2norm_in_kernel=True,
                output_state=matrices,
                state_indices=rows.slots,
            )
        normed = flashinfer.rmsnorm(out.view(-1, HEAD_DIM), self.norm, self.eps)
        return self.out((normed * silu(z.reshape(-1, HEAD_DIM))).view(count, -1))

    def convolve(self, x: torch.Tensor, rows: Any, places: Optional[Places], windows: torch.Tensor) -> torch.Tensor:
        """Mix each channel of a token with the same channel of the tokens before it."""
        slots, channels = rows.slots, x.shape[1]
        if places is None:
            joined = torch.cat([windows[slots], x.unsqueeze(1)], dim=1)
            windows[slots] = joined[:, 1:]
            return conv1d(joined.transpose(1, 2), self.taps, groups=channels).squeeze(2)
        joined = x.new_empty(len(x) + places.before.numel(), channels)
        joined[places.before] = windows[slots]
        joined[places.tokens + self.sizes.num_taps - 1] = x
        windows[slots] = joined[places.after]
        return conv1d(joined.T.unsqueeze(0), self.taps, groups=channels)[0].T[places.tokens]
