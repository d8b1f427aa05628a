# SPDX-License-Identifier: Apache-2.0
"""Tiles of the two products of ``cutlass_fused_moe``, measured by the autotuner for each bucket of token counts.

Each product is an operator of the tuner (``trtllm::fused_moe::gemm1`` and ``gemm2``, the published names) whose trials
run the whole layer, the other product by the rule. A tactic is ``(tile, cluster)`` of the SM90 kernels, or the weights
per tile on the CPU.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, Callable, Optional, Sequence

import torch

from ..._runtime.errors import ArgumentError
from ...autotuner import (
    AutoTuner,
    DynamicTensorSpec,
    OptimizationProfile,
    TunableRunner,
    TuningConfig,
    make_bucket_mapper,
)
from ...gemm.launch import experts_product
from ...gemm.tiles import tile_tactics, w4_tactics
from ...jit.gemm import W4_KINDS, tiles_of

__all__ = ["FEWEST_TOKENS", "NOT_ASKED", "FusedMoeTileRunner", "Product", "product_tuned_before", "tuned_product"]

#: Fewer tokens take one kernel, which has no tiles, or tiles of 8 tokens by the rule.
FEWEST_TOKENS = 9
BY_RULE = -1
CPU_TILES = (48, 96, 192)  # weights per tile; the first is the rule. csrc/fused_moe.cu takes multiples of 48 up to 192

Product = Optional[Callable[..., Any]]

NOT_ASKED: Any = object()  #: product that the tuner has not chosen; None is that of the CPU by the rule


@cache
def _cpu_product(tile1: int, tile2: int) -> Callable[[int], int]:
    """Return what csrc/fused_moe.cu asks for the weights per tile of a product."""
    return lambda index: tile1 if index == 1 else tile2


def _product_of(kind: Optional[str], tactics: Sequence[Any], by_rule: Product) -> Product:
    """Return the product with a tactic for each of the two; ``by_rule`` if neither has one."""
    if all(tactic == BY_RULE for tactic in tactics):
        return by_rule
    if kind is None:
        return _cpu_product(*(CPU_TILES[0] if tactic == BY_RULE else int(tactic) for tactic in tactics))
    (tile1, cluster1), (tile2, cluster2) = [(-1, 1) if tactic == BY_RULE else tactic for tactic in tactics]
    return experts_product(kind, (int(tile1), int(cluster1), int(tile2), int(cluster2)))


class FusedMoeTileRunner(TunableRunner):
    """A layer whose product ``index`` has the tile of a tactic.

    Inputs are the arguments of the native function before the workspace: output, input, experts, scales of tokens,
    weights, and so on. ``launch_cache(inputs, product)`` runs the layer.
    """

    def __init__(
        self,
        index: int,
        kind: Optional[str],
        format: int,
        activation: int,
        by_rule: Product,
        launch: Callable[[Sequence[Any], Product], None],
        ranks: int = 1,
    ) -> None:
        self.index, self.kind, self.format, self.activation = index, kind, int(format), int(activation)
        self.by_rule_cache, self.launch_cache, self.ranks = by_rule, launch, int(ranks)

    def get_valid_tactics(self, inputs: list[Any], profile: OptimizationProfile) -> Sequence[Any]:
        if self.kind is None:
            return CPU_TILES
        experts, weights = inputs[2], inputs[3 + self.index]
        rows = max(1, experts.numel() // (weights.shape[0] * self.ranks))  # mean over the experts of all ranks
        if self.kind in W4_KINDS:
            return [BY_RULE, *w4_tactics(rows, 2 * weights.shape[-1])]  # two codes a byte
        # Experts have up to four times the mean, so that all their rows may be in one tile.
        tactics = tile_tactics(self.kind, rows, weights.shape[-1], 4 * rows)
        tiles = tiles_of(self.kind)
        # Pairs of blocks that share an operand have not been seen to win (gemm/sm90/choose.h).
        return [BY_RULE, *((tile, cluster) for tile, cluster, _ in tactics if cluster == 1 or tiles[tile].swapped)]

    def get_cache_key_extras(self, inputs: list[Any]) -> tuple[Any, ...]:
        dtypes = str(inputs[0].dtype), str(inputs[1].dtype)
        extras = self.kind, self.format, self.activation, *dtypes, inputs[6] is None
        return extras if self.ranks == 1 else (*extras, self.ranks)

    def forward(self, inputs: list[Any], tactic: Any = BY_RULE, do_preparation: bool = False, **kwargs: Any) -> Any:
        tactics = (tactic, BY_RULE) if self.index == 1 else (BY_RULE, tactic)
        self.launch_cache(inputs, _product_of(self.kind, tactics, self.by_rule_cache))
        return inputs[0]


@cache
def _buckets(most_tokens: int) -> tuple[int, ...]:
    """Return the token counts to measure: powers of two from 16, the last one ``most_tokens``."""
    if most_tokens < 1:
        raise ArgumentError(f"cutlass_fused_moe: tune_max_num_tokens must be 1 or more, got {most_tokens}")
    return (*(2**i for i in range(4, most_tokens.bit_length()) if 2**i < most_tokens), most_tokens)


@cache
def _mapper(most_tokens: int) -> Callable[[int], int]:
    return make_bucket_mapper(_buckets(most_tokens))


@cache
def _config(experts: int, has_scales: bool, most_tokens: int) -> TuningConfig:
    """Describe layers with a varying number of tokens, whose experts are drawn anew among those of all ranks."""

    def draw(shape: Sequence[int], dtype: torch.dtype, device: Any) -> torch.Tensor:
        numbers = torch.rand(shape[0], max(experts, shape[1]), device=device).topk(shape[1]).indices % experts
        return numbers.to(dtype)

    places = (0, 1, 2, 3) if has_scales else (0, 1, 2)  # output, input, ids, scales
    spec = DynamicTensorSpec(places, (0,) * len(places), _buckets(most_tokens), _mapper(most_tokens))
    return TuningConfig(dynamic_tensor_specs=(spec,), tensor_initializers=((2, draw),))


@lru_cache(maxsize=1 << 14)
def _bucket(tokens: int, most_tokens: int) -> int:
    return _mapper(most_tokens)(tokens)


def _key(
    kind: Optional[str], format: int, activation: int, ranks: int, inputs: Sequence[Any], most_tokens: int
) -> tuple[Any, ...]:
    output, x, experts, scales, fc1, fc2, bias1 = inputs[:7]
    sizes = (_bucket(x.shape[0], most_tokens), most_tokens, experts.shape[1], fc1.shape, fc2.shape)
    facts = (ranks, *sizes, x.dtype, output.dtype, scales is None, bias1 is None)
    return ("trtllm::fused_moe", kind, format, activation, *facts)


def product_tuned_before(
    kind: Optional[str], format: int, activation: int, ranks: int, inputs: Sequence[Any], most_tokens: int
) -> Product:
    """Return what :func:`tuned_product` returns for the same arguments if it is known, or else ``NOT_ASKED``."""
    return AutoTuner.get().kept.get(_key(kind, format, activation, ranks, inputs, most_tokens), NOT_ASKED)


def tuned_product(
    kind: Optional[str],
    format: int,
    activation: int,
    ranks: int,
    inputs: Sequence[Any],
    by_rule: Product,
    launch: Callable[[Sequence[Any], Product], None],
    most_tokens: int,
) -> Product:
    """Return the product for a layer: measured inside ``autotune()``, else of an earlier run of it, else ``by_rule``.

    Parameters
    ----------
    kind : Optional[str]
        Kind of the SM90 module; None on the CPU.
    format, activation : int
        As the native function takes them.
    ranks : int
        Ranks that share the experts of the tokens, each with as many as ``inputs`` have weights: one in so many pairs
        of token and expert is of this rank.
    inputs : Sequence[Any]
        Arguments of the native function up to the last constant of the activation.
    by_rule : Optional[Callable]
        The product that chooses its tiles by rules.
    launch : Callable
        Runs the layer for such inputs with a product.
    most_tokens : int
        The largest token count to measure, which also stands for larger ones.
    """
    if (inputs[1].is_cuda and kind is None) or inputs[1].shape[0] < FEWEST_TOKENS:
        return by_rule
    tuner = AutoTuner.get()

    def choose() -> Product:
        config = _config(inputs[4].shape[0] * ranks, inputs[3] is not None, most_tokens)
        tactics = []
        for index in (1, 2):
            runner = FusedMoeTileRunner(index, kind, format, activation, by_rule, launch, ranks)
            tactics.append(tuner.choose_one(f"trtllm::fused_moe::gemm{index}", [runner], config, list(inputs))[1])
        return _product_of(kind, tactics, by_rule)

    # Two look-ups take longer than all else that a call does on the host.
    kept, key = tuner.kept, _key(kind, format, activation, ranks, inputs, most_tokens)
    product = kept.get(key, NOT_ASKED)
    if product is NOT_ASKED:
        product = kept[key] = choose()
    return product
