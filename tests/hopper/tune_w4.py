# SPDX-License-Identifier: Apache-2.0
"""Times of every tile for four-bit weights in layers of experts, in one run.

python -m tests.hopper.tune_w4 [-k gpt_oss] [--kind mxfp4_fp8] [--tokens 64,1024] [--json FILE]

Each tile is timed for each of the two products of a layer while the rule of gemm/w4_sm90/choose.h chooses for the other
one, after its results were compared with those of the rule. A line has the tiles that were fastest, and what the rule
loses.
"""

from __future__ import annotations

import argparse
import json
from typing import Any, Callable, Optional

import torch

from flashinfer.fused_moe import cutlass_fused_moe
from flashinfer.fused_moe.cutlass import call as cutlass_op
from flashinfer.fused_moe.cutlass.tuning import BY_RULE, _product_of
from flashinfer.gemm.launch import experts_product
from flashinfer.jit.gemm import W4_TILES

from .tune import seconds

#: Experts, experts per token, hidden and intermediate size.
MODELS = {
    "gpt_oss_120b": (128, 4, 2944, 2944),
    "gpt_oss_20b": (32, 4, 2944, 2944),
    "qwen3_30b": (128, 8, 2048, 768),
    "dsv3_tp8": (256, 8, 7168, 256),
    "kimi_k2_tp8": (384, 8, 7168, 256),
    "mixtral": (8, 2, 4096, 14336),
    "llama4": (16, 1, 5120, 8192),
    "olmoe": (64, 8, 2048, 1024),
}
TOKENS = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 16384)
#: Kinds, and the largest error of a layer beside one with other tiles.
MOST_ERROR = {"mxfp4": 5e-3, "mxfp4_fp8": 2e-2}


class Layer:
    """A layer with random codes and scales, whose tokens are routed at random."""

    def __init__(self, kind: str, experts: int, top_k: int, hidden: int, inner: int) -> None:
        self.kind = kind
        shapes = ((2 * inner, hidden), (hidden, inner))
        draw = lambda low, high, *shape: torch.randint(low, high, shape, dtype=torch.uint8, device="cuda")  # noqa: E731
        self.experts, self.top_k, self.hidden = experts, top_k, hidden
        self.weights = [draw(0, 256, experts, n, k // 2) for n, k in shapes]
        bounds = (118, 122) if kind == "mxfp4" else (1, 13)
        scales = [draw(*bounds, experts, n // 64, k // 128, 16, 16) for n, k in shapes]
        if kind == "mxfp4_fp8":  # offsets of exponents, and a factor of each expert
            folded = [(x.view(torch.int32), torch.full((experts,), 2.0**-11, device="cuda")) for x in scales]
            scales = [*folded[0], torch.ones((), device="cuda"), *folded[1]]
        self.scales = scales

    def call(self, tokens: int, out: torch.Tensor) -> Callable[[], Any]:
        scores, ids = torch.rand(tokens, self.experts, device="cuda").topk(self.top_k, dim=1)
        x = torch.randn(tokens, self.hidden, device="cuda").bfloat16()
        arguments = (x, ids.int(), scores.softmax(1), *self.weights, torch.bfloat16, self.scales)
        flags = {"use_w4_group_scaling": True, "use_wfp4afp8_humming": self.kind == "mxfp4_fp8"}
        return lambda: cutlass_fused_moe(*arguments, output=out, **flags)


def candidates(mean: float) -> list[int]:
    """Return the tiles worth a trial for ``mean`` rows per expert."""
    return [i for i, t in enumerate(W4_TILES) if min(64, 0.45 * mean) <= t.tokens <= 8 * mean + 16]


def measure(layer: Layer, tokens: int) -> dict[str, Optional[list[float]]]:
    """Return microseconds of the layer with each tile for GEMM 1 and for GEMM 2; "rule": with its own tiles."""
    out = torch.empty(tokens, layer.hidden, dtype=torch.bfloat16, device="cuda")
    kind = layer.kind
    call, by_rule = layer.call(tokens, out), experts_product(kind)
    call()
    expected = out.float()
    found: dict[str, Optional[list[float]]] = {"rule": [seconds(call) * 1e6]}
    for i in candidates(tokens * layer.top_k / layer.experts):
        times = []
        for tactics in (((i, 1), BY_RULE), (BY_RULE, (i, 1))):
            measured = _product_of(kind, tactics, by_rule)
            cutlass_op.experts_product = lambda kind, product=measured: product
            cutlass_op.layer_launches.clear()
            out.fill_(torch.nan)
            call()
            error = ((out.float() - expected).norm() / expected.norm()).item()  # hidden values round to either side
            times.append(seconds(call) * 1e6 if error <= MOST_ERROR[kind] else float("inf"))
        cutlass_op.experts_product = experts_product
        cutlass_op.layer_launches.clear()
        found["{}x{}".format(*W4_TILES[i])] = times
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", default="", help="models whose names contain this")
    parser.add_argument("--kind", choices=MOST_ERROR, default="mxfp4")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--json", help="write all times to this file")
    options = parser.parse_args()
    results: dict[str, dict[int, Any]] = {}
    for name, sizes in MODELS.items():
        if options.k not in name:
            continue
        layer = Layer(options.kind, *sizes)
        for tokens in map(int, options.tokens.split(",")):
            found = results.setdefault(name, {})[tokens] = measure(layer, tokens)
            rule = found.pop("rule")[0]
            best = [min((times[i], tile) for tile, times in found.items()) for i in (0, 1)]
            lost = [rule - time for time, _ in best]
            wrong = [tile for tile, times in found.items() if float("inf") in times]
            print(
                f"{name:13} {tokens:6} tokens, rule {rule:7.1f} us, fastest {best[0][1]:>7} and {best[1][1]:>7}: "
                f"{max(0, lost[0]) + max(0, lost[1]):6.1f} us less{'  WRONG: ' + ' '.join(wrong) if wrong else ''}",
                flush=True,
            )
            found["rule"] = [rule]
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
