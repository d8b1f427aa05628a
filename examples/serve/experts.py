# SPDX-License-Identifier: Apache-2.0
"""Experts of the models that ``examples/serve`` serves: Mixtral, Qwen3-MoE, which has more and smaller ones, and
Qwen3-Next, where one more expert is shared by all tokens. DeepSeek's are chosen by groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Mapping, Optional

import torch
from torch.nn import functional as F

import flashinfer
from flashinfer import RoutingMethodType
from serve.linear import GatedMlp, Linear, quantize_blocks


@dataclass(frozen=True)
class Experts:
    """Sizes and routing of the experts; layers in ``dense_layers`` have an ordinary MLP."""

    num_experts: int
    top_k: int
    intermediate_size: int
    renormalize: bool
    prefix: str  #: prefix of the names below a layer: ``mlp`` or ``block_sparse_moe``
    names: tuple[str, str, str]  #: names of gate, up and down
    dense_layers: frozenset[int] = frozenset()
    shared_size: int = 0  #: columns of the expert that all tokens take; 0 without one
    groups: tuple[int, int] = (0, 0)  #: DeepSeek's routing: groups of experts, and those to choose from; 0: another one
    scaling: float = 1.0  #: factor of the weights of DeepSeek's routing

    @staticmethod
    def of(config: Mapping[str, Any]) -> Experts:
        """Read them from config.json. Names of fields differ between releases of transformers."""
        count = config.get("num_local_experts") or config["num_experts"]
        top_k = config["num_experts_per_tok"]
        if config["model_type"] == "mixtral":
            return Experts(count, top_k, config["intermediate_size"], True, "block_sparse_moe", ("w1", "w3", "w2"))
        step, layers = config.get("decoder_sparse_step") or 1, range(config["num_hidden_layers"])
        dense = {i for i in layers if (i + 1) % step} | set(config.get("mlp_only_layers") or ())
        names = ("gate_proj", "up_proj", "down_proj")
        inner = config["moe_intermediate_size"]
        renormalize = config.get("norm_topk_prob", False)
        shared = config["shared_expert_intermediate_size"] if config["model_type"] == "qwen3_next" else 0
        return Experts(count, top_k, inner, renormalize, "mlp", names, frozenset(dense), shared)

    def shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the weights of one layer, keyed by their names below it."""
        gate, up, down = self.names
        shapes: dict[str, tuple[int, ...]] = {f"{self.prefix}.gate": (self.num_experts, hidden_size)}
        for i in range(self.num_experts):
            expert = f"{self.prefix}.experts.{i}"
            shapes |= {f"{expert}.{name}": (self.intermediate_size, hidden_size) for name in (gate, up)}
            shapes[f"{expert}.{down}"] = (hidden_size, self.intermediate_size)
        if self.shared_size:
            expert = f"{self.prefix}.{self.shared_name}"
            shapes |= {f"{expert}.{name}": (self.shared_size, hidden_size) for name in (gate, up)}
            shapes[f"{expert}.{down}"] = (hidden_size, self.shared_size)
            if not self.groups[0]:
                shapes[f"{expert}_gate"] = (1, hidden_size)
        return shapes

    @property
    def shared_name(self) -> str:
        """Name of the shared expert; DeepSeek's has no gate."""
        return "shared_experts" if self.groups[0] else "shared_expert"


class ExpertLayer:
    """The experts of one layer: routing and products are flashinfer's; those of float32, which exist on the CPU only
    and which tests compare exactly, are torch's.
    """

    def __init__(
        self, experts: Experts, weights: Mapping[str, torch.Tensor], layer: str, linear: type[Linear] = Linear
    ) -> None:
        self.experts = experts
        prefix, (gate, up, down) = f"{layer}.{experts.prefix}", experts.names
        self.router = weights[f"{prefix}.gate.weight"]

        def stacked(*names: str) -> torch.Tensor:
            numbers = range(experts.num_experts)
            parts = (torch.cat([weights[f"{prefix}.experts.{i}.{name}.weight"] for name in names]) for i in numbers)
            return torch.stack(list(parts))

        self.up_gate, self.down = stacked(up, gate), stacked(down)
        self.scales: Optional[list[torch.Tensor]] = None
        if linear.takes_codes(self.up_gate) and linear.takes_codes(self.down):
            (self.up_gate, scale1), (self.down, scale2) = (
                map(torch.stack, zip(*map(quantize_blocks, weight), strict=True))
                for weight in (self.up_gate, self.down)
            )
            self.scales = [scale1, scale2]
        self.shared: Optional[GatedMlp] = None
        if experts.shared_size:
            self.shared = GatedMlp(weights, f"{prefix}.{experts.shared_name}", linear)
        self.shared_gate = weights.get(f"{prefix}.shared_expert_gate.weight")
        self.bias = weights.get(f"{prefix}.gate.e_score_correction_bias")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = self.routed(x)
        if self.shared is None:
            return out
        shared = self.shared(x)
        return out + (shared if self.shared_gate is None else torch.sigmoid(F.linear(x, self.shared_gate)) * shared)

    def routed(self, x: torch.Tensor) -> torch.Tensor:
        method = RoutingMethodType.RenormalizeNaive if self.experts.renormalize else RoutingMethodType.Default
        options: dict[str, Any] = {}
        if self.experts.groups[0]:
            method, (n_group, topk_group) = RoutingMethodType.DeepSeekV3, self.experts.groups
            options = {"bias": self.bias, "n_group": n_group, "topk_group": topk_group}
            options["routed_scaling_factor"] = self.experts.scaling
        logits, top_k = F.linear(x, self.router), self.experts.top_k
        weights, ids = flashinfer.fused_moe.route_tokens(logits, top_k, method, **options)
        if x.dtype == torch.float32:
            return self.exact(x, ids, weights)
        return flashinfer.fused_moe.cutlass_fused_moe(
            x,
            ids,
            weights,
            self.up_gate,
            self.down,
            x.dtype,
            self.scales,
            use_deepseek_fp8_block_scale=bool(self.scales),
        )[0]

    def exact(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out, inner = torch.zeros_like(x), self.experts.intermediate_size
        for expert in ids.unique().tolist():
            rows, slots = torch.where(ids == expert)
            sums = F.linear(x[rows], self.up_gate[expert])
            hidden = F.silu(sums[:, inner:]) * sums[:, :inner]
            out.index_add_(0, rows, F.linear(hidden, self.down[expert]) * weights[rows, slots].unsqueeze(1))
        return out
