# SPDX-License-Identifier: Apache-2.0
"""The model with sparse latent attention in examples/serve, against the same model written in plain torch."""

from __future__ import annotations

import random

import pytest
import torch
from torch.nn.functional import embedding, layer_norm, linear, silu

from .examples_path import EXAMPLES as EXAMPLES  # isort: skip
from serve.__main__ import parse_arguments
from serve.engine import Engine, Request, serve
from serve.model import RANDOM_MODELS, Llama, random_weights

CONFIG = RANDOM_MODELS["random-deepseek-v3.2"]


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + CONFIG.eps) * weight


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotate ``(tokens, heads, 64)`` by the positions of a text from its begin: numbers i and i + 32 are a pair."""
    angles = torch.arange(len(x))[:, None] * CONFIG.rope.theta ** (-torch.arange(32) / 32)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x.split(32, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def through_e4m3(x: torch.Tensor) -> torch.Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 448
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


class Plain:
    """The whole text at once: no pages, no batches, no kernels of ours. Attention is not absorbed into the queries."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self.weights = weights
        self.left_out = 0  #: pairs of tokens that the indexer kept from each other

    def attend(self, x: torch.Tensor, layer: str) -> torch.Tensor:
        sizes, heads, count = CONFIG.sparse, CONFIG.num_qo_heads, len(x)

        def weight(name: str) -> torch.Tensor:
            return self.weights[f"{layer}.self_attn.{name}.weight"]

        down = norm(linear(x, weight("q_a_proj")), weight("q_a_layernorm"))
        query = linear(down, weight("q_b_proj")).view(count, heads, -1)
        nope, rotary = query.split((sizes.nope_dim, 64), -1)
        latent, key_rotary = linear(x, weight("kv_a_proj_with_mqa")).split((512, 64), -1)
        up = linear(norm(latent, weight("kv_a_layernorm")), weight("kv_b_proj")).view(count, heads, -1)
        keys, values = up.split((sizes.nope_dim, sizes.value_dim), -1)
        keys = torch.cat((keys, rotated(key_rotary[:, None]).expand(-1, heads, -1)), -1)
        logits = torch.einsum("qhd,khd->hqk", torch.cat((nope, rotated(rotary)), -1), keys)
        logits = logits * (sizes.nope_dim + 64) ** -0.5
        chosen = self.choose(x, down, layer, weight)
        attended = torch.einsum("hqk,khd->qhd", logits.masked_fill(~chosen, -torch.inf).softmax(-1), values)
        return linear(attended.reshape(count, -1), weight("o_proj"))

    def choose(self, x: torch.Tensor, down: torch.Tensor, layer: str, weight) -> torch.Tensor:
        """Return which tokens each token attends to."""
        sizes, count = CONFIG.sparse, len(x)
        bias = self.weights[f"{layer}.self_attn.indexer.k_norm.bias"]
        query = linear(down, weight("indexer.wq_b")).view(count, sizes.index_heads, 128)
        key = layer_norm(linear(x, weight("indexer.wk")), (128,), weight("indexer.k_norm"), bias, CONFIG.eps)[:, None]
        query, key = (torch.cat((rotated(y[..., :64]), y[..., 64:]), -1) for y in (query, key))
        products = torch.einsum("qhd,kd->hqk", through_e4m3(query), through_e4m3(key[:, 0])).relu()
        scores = torch.einsum("hqk,qh->qk", products, linear(x, weight("indexer.weights_proj")))
        is_before = torch.ones(count, count).tril().bool()
        best = scores.masked_fill(~is_before, -torch.inf).topk(min(sizes.top_k, count), -1).indices
        chosen = torch.zeros(count, count, dtype=torch.bool).scatter_(1, best, True) & is_before
        self.left_out += int((is_before & ~chosen).sum())
        return chosen

    def mlp(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        gate, up, down = (self.weights[f"{prefix}.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return linear(silu(linear(x, gate)) * linear(x, up), down)

    def experts(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        """DeepSeek-V3: of the groups, the two with the largest sums of two experts; sigmoids are the weights."""
        experts = CONFIG.experts
        scores = linear(x, self.weights[f"{prefix}.gate.weight"]).sigmoid()
        compared = scores + self.weights[f"{prefix}.gate.e_score_correction_bias"]
        groups = compared.view(len(x), experts.groups[0], -1)
        best = groups.topk(2, -1).values.sum(-1).topk(experts.groups[1], -1).indices
        allowed = torch.zeros(groups.shape[:2], dtype=torch.bool).scatter_(1, best, True)
        ids = groups.masked_fill(~allowed[..., None], -torch.inf).flatten(1).topk(experts.top_k, -1).indices
        weights = scores.gather(1, ids)
        weights = weights / weights.sum(-1, keepdim=True) * experts.scaling
        out = self.mlp(x, f"{prefix}.shared_experts")
        for row in range(len(x)):
            for expert, weight in zip(ids[row].tolist(), weights[row], strict=True):
                out[row] += weight * self.mlp(x[row], f"{prefix}.experts.{expert}")
        return out

    def next_token(self, tokens: list[int]) -> int:
        x = embedding(torch.tensor(tokens), self.weights["model.embed_tokens.weight"])
        for i in range(CONFIG.num_layers):
            layer = f"model.layers.{i}"
            x = x + self.attend(norm(x, self.weights[f"{layer}.input_layernorm.weight"]), layer)
            y = norm(x, self.weights[f"{layer}.post_attention_layernorm.weight"])
            is_dense = i in CONFIG.experts.dense_layers
            x = x + (self.mlp if is_dense else self.experts)(y, f"{layer}.mlp")
        x = norm(x[-1], self.weights["model.norm.weight"])
        return int(linear(x, self.weights["lm_head.weight"]).argmax())


@pytest.fixture(scope="module")
def weights():
    return random_weights(CONFIG, "cpu")


def requests_of(*lengths: int, new: int = 6) -> list[Request]:
    tokens = random.Random(0)
    return [Request(tokens.choices(range(256), k=n), new) for n in lengths]


def served(engine: Engine, requests: list[Request]) -> list[list[int]]:
    serve(engine, requests, lambda request: None)
    return [request.output for request in requests]


def test_plain_torch_generates_the_same_tokens(weights):
    """Prompts within and beyond the selection of 32 tokens, over several pages, in pieces, in one batch."""
    model = Llama(CONFIG, weights, torch.float32, "cpu")
    requests = requests_of(1, 20, 64, 70, 130)
    outputs = served(Engine(model, num_pages=20, max_prefill_tokens=90), requests)
    plain = Plain(weights)
    for request, output in zip(requests, outputs, strict=True):
        tokens = list(request.prompt)
        for token in output:
            assert plain.next_token(tokens) == token
            tokens.append(token)
    assert plain.left_out > 10000, "the selection must leave tokens out, or it is not tested"
    assert len({token for output in outputs for token in output}) > 8, "repetitions prove little"


def test_batches_change_nothing(weights):
    model = Llama(CONFIG, weights, torch.float32, "cpu")
    together = served(Engine(model, num_pages=20), requests_of(3, 65, 90))
    alone = [served(Engine(model, num_pages=4), [request])[0] for request in requests_of(3, 65, 90)]
    assert together == alone


def test_bfloat16(weights):
    """The fused experts, which have no float32, and a bfloat16 cache, on a prompt of which nothing is left out."""
    logits = []
    for dtype in (torch.bfloat16, torch.float32):
        model = Llama(CONFIG, weights, dtype, "cpu")
        forward, seen = model.forward, []
        model.forward = lambda *rows, forward=forward, seen=seen: seen.append(forward(*rows)) or seen[-1]
        served(Engine(model, num_pages=4), requests_of(25, new=1))
        logits.append(seen[0])
    assert float((logits[0] - logits[1]).norm() / logits[1].norm()) < 0.1  # three layers of bfloat16


def test_what_is_refused(weights):
    model = Llama(CONFIG, weights, torch.float32, "cpu")
    with pytest.raises(ValueError, match="page_size is 16, expected 64"):
        Engine(model, page_size=16)
    with pytest.raises(ValueError, match="use_cuda_graphs is True, expected False"):
        Engine(model, num_pages=4, use_cuda_graphs=True)


def test_command_line():
    arguments = parse_arguments(["--model", "random-deepseek-v3.2"])
    assert arguments.random and arguments.model in RANDOM_MODELS
