# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of a whole model: the engine of examples/serve with random weights of a known model's sizes.

    python benchmarks/bench_serve.py --model llama-3.1-8b --cases decode64,prefill --profile --json FILE
    python benchmarks/bench_serve.py --model llama-3.1-8b --fp8
    python benchmarks/bench_serve.py --model tiny --device cpu --keys 64

``decodeN`` is a step of N requests with ``--keys`` tokens each, ``prefill`` the prompts of 8 requests in one step,
``mixed`` 64 requests that arrive one after the other. Pages are filled with random numbers, because only their number
matters; nothing is loaded. ``limit`` is what the hardware allows: bytes of weights, pages and recurrent states at
4.25 TB/s, or operations at 800 TFLOP/s (those of e4m3 products at 1,600), whichever takes longer; ``of_limit`` is that
time over the measured one. ``--fp8`` quantises projections and experts to e4m3 in blocks. Decode and prefill are also
timed for ``transformers`` with its own attention and the same weights in 16 bits, where it can be imported
(serve_transformers.py). ``--profile`` prints where the time of a step goes: kernels by group, gaps between them, and
phases of the host (serve_profile.py).
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional, Sequence

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from serve.engine import Engine, Request, build_kernels, serve, warm_up
from serve.experts import Experts
from serve.model import Llama, LlamaConfig, Rope, has_experts, random_weights
from serve.recurrent import HEAD_DIM, Recurrent
from serve_profile import print_profile
from serve_transformers import decode_seconds, prefill_seconds, reference_model, why_not

BYTES_PER_S, FLOP_PER_S, FP8_FLOP_PER_S = 4.25e12, 800e12, 1600e12
FP8_BYTES = 1 + 4 / 128**2  #: an e4m3 code, and its part of a block's scale
PAGE_SIZE = 16
PREFILL_REQUESTS, MIXED_REQUESTS, MIXED_TOKENS = 8, 64, 64

_NAMES = ("gate_proj", "up_proj", "down_proj")
_EXPERTS = Experts(128, 8, 768, True, "mlp", _NAMES)
_SHARED = Experts(512, 10, 512, True, "mlp", _NAMES, shared_size=512)
_RECURRENT = Recurrent(16, 32, 4, frozenset(i for i in range(48) if (i + 1) % 4))
MODELS = {
    "tiny": LlamaConfig(num_layers=2),
    "llama-3.1-8b": LlamaConfig(128256, 4096, 14336, 32, 32, 8, 128, 8192, rope=Rope(5e5, 8.0, (1.0, 4.0, 8192))),
    "qwen3-30b-a3b": LlamaConfig(
        151936, 2048, 6144, 48, 32, 4, 128, 8192, rope=Rope(theta=1e6), has_head_norms=True, experts=_EXPERTS
    ),
    "qwen3-next-80b-a3b": LlamaConfig(  # more than a card holds in 16 bits: fewer layers with --layers
        151936, 2048, 5120, 48, 16, 2, 256, 8192, 1e-6, Rope(1e7, share=0.25), has_head_norms=True, experts=_SHARED,
        recurrent=_RECURRENT,
    ),
}  # fmt: skip


def mixer_parameters(config: LlamaConfig, layer: int) -> int:
    """Return the weights of a layer's attention, or of the recurrent layer in its place."""
    hidden, sizes = config.hidden_size, config.recurrent
    if sizes is not None and layer in sizes.layers:
        inner = sizes.num_value_heads * HEAD_DIM
        projections = hidden * (sizes.num_channels + 2 * inner + 2 * sizes.num_value_heads)
        return projections + sizes.num_channels * sizes.num_taps
    queries = 3 if sizes is not None else 2  # in and out, and a gate beside each query
    return hidden * config.head_dim * (queries * config.num_qo_heads + 2 * config.num_kv_heads)


def routers(config: LlamaConfig) -> int:
    """Return the weights that choose experts, which are in 16 bits always."""
    layers = sum(has_experts(config, layer) for layer in range(config.num_layers))
    count = 0 if config.experts is None else config.experts.num_experts + bool(config.experts.shared_size)
    return layers * count * config.hidden_size


def active_parameters(config: LlamaConfig, tokens: int) -> tuple[float, float]:
    """Return the weights that one token multiplies, and those that a batch of tokens reads, without the embedding.

    Each token takes ``top_k`` of the experts, all equally likely: the batch reads those that any token takes.
    """
    hidden = config.hidden_size
    of_token, read = float(routers(config)), float(routers(config))
    for layer in range(config.num_layers):
        fixed = mixer_parameters(config, layer)
        if has_experts(config, layer):
            assert config.experts is not None
            count, chosen = config.experts.num_experts, config.experts.top_k
            fixed += 3 * hidden * config.experts.shared_size
            expert = 3 * hidden * config.experts.intermediate_size
            of_token += fixed + chosen * expert
            read += fixed + count * (1 - (1 - chosen / count) ** tokens) * expert
        else:
            of_token += fixed + 3 * hidden * config.intermediate_size
            read += fixed + 3 * hidden * config.intermediate_size
    return of_token, read


def limit(config: LlamaConfig, dtype: torch.dtype, requests: int, tokens: int, keys: int, fp8: bool = False) -> float:
    """Return the seconds that a step takes at least: ``tokens`` of each request, ``keys`` of each in the pages."""
    of_token, read = active_parameters(config, requests * tokens)
    head, wide = config.vocab_size * config.hidden_size, routers(config)
    layers = len(config.attention_layers)
    of_pages = 2 * layers * config.num_kv_heads * config.head_dim * requests * keys
    of_states = 0
    if config.recurrent is not None:  # read and written once, float32
        of_states = 2 * 4 * len(config.recurrent.layers) * config.recurrent.num_value_heads * HEAD_DIM**2 * requests
    pairs = requests * (tokens * (keys - tokens) + tokens * (tokens + 1) / 2)
    products = 2 * (of_token - wide) * requests * tokens
    flops = 2 * (wide * requests * tokens + head * requests)
    flops += 4 * layers * config.num_qo_heads * config.head_dim * pairs
    width = FP8_BYTES if fp8 else dtype.itemsize
    nbytes = (read - wide) * width + (wide + head + of_pages) * dtype.itemsize + of_states
    return max(nbytes / BYTES_PER_S, flops / FLOP_PER_S + products / (FP8_FLOP_PER_S if fp8 else FLOP_PER_S))


def tokens_of(config: LlamaConfig, count: int) -> list[int]:
    return random.Random(count).choices(range(config.vocab_size), k=count)


def engine_for(model: Llama, requests: int, keys: int, new_tokens: int, **options: Any) -> Engine:
    pages = requests * -(-(keys + new_tokens) // PAGE_SIZE) + 1
    engine = Engine(model, pages, PAGE_SIZE, max_batch_size=requests, **options)
    for layer in engine.cache:
        layer.normal_(std=0.5)
    return engine


def synchronize(model: Llama) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize()


def timed_steps(engine: Engine, count: int) -> float:
    """Return the time of a step. Each waits for its tokens, as a server that streams them does."""
    synchronize(engine.model)
    start = time.perf_counter()
    for _ in range(count):
        engine.step()
    return (time.perf_counter() - start) / count


def decode(model: Llama, requests: int, keys: int, steps: int, profile: bool) -> dict[str, Any]:
    engine = engine_for(model, requests, keys, steps + 16)
    for _ in range(requests):
        engine.submit(Request(tokens_of(model.config, keys), steps + 16))
    engine._admit()
    for request in engine.running:
        request.num_cached = keys - 1  # as if prefilled
    timed_steps(engine, 3)
    seconds = timed_steps(engine, steps)
    least = limit(model.config, model.dtype, requests, 1, keys, model.fp8)
    result = {"step_us": seconds * 1e6, "tokens_per_s": requests / seconds, "of_limit": least / seconds}
    if profile:
        result["profile"] = print_profile(lambda: timed_steps(engine, 3), 3, model.device.type == "cuda")
    return result


def prefill(model: Llama, keys: int, profile: bool) -> dict[str, Any]:
    tokens = PREFILL_REQUESTS * keys
    engine = engine_for(model, PREFILL_REQUESTS, keys, 2, max_prefill_tokens=tokens, use_cuda_graphs=False)

    def step() -> float:
        for _ in range(PREFILL_REQUESTS):
            engine.submit(Request(tokens_of(model.config, keys), 1))
        return timed_steps(engine, 1)

    seconds = min(step() for _ in range(4))
    least = limit(model.config, model.dtype, PREFILL_REQUESTS, keys, keys, model.fp8)
    result = {"step_us": seconds * 1e6, "tokens_per_s": tokens / seconds, "of_limit": least / seconds}
    if profile:
        result["profile"] = print_profile(step, 1, model.device.type == "cuda")
    return result


def mixed(model: Llama, keys: int, interval: float) -> dict[str, Any]:
    """Serve requests that arrive ``interval`` seconds after each other; prefills and decode steps take turns."""
    engine = engine_for(model, MIXED_REQUESTS, keys, MIXED_TOKENS, max_prefill_tokens=2 * keys)
    warm_up(engine)
    draw = random.Random(0)
    requests = [
        Request(tokens_of(model.config, draw.randint(keys // 4, keys)), MIXED_TOKENS, arrival=i * interval)
        for i in range(MIXED_REQUESTS)
    ]
    serve(engine, requests, lambda request: None)
    seconds = max(request.finished_at or 0 for request in requests)
    first = [(request.first_token_at or 0) - request.arrival for request in requests]
    return {
        "seconds": seconds,
        "tokens_per_s": MIXED_REQUESTS * MIXED_TOKENS / seconds,
        "prompt_tokens_per_s": sum(len(request.prompt) for request in requests) / seconds,
        "median_first_token_ms": statistics.median(first) * 1e3,
    }


def measure(model: Llama, case: str, arguments: argparse.Namespace) -> dict[str, Any]:
    if case.startswith("decode"):
        return decode(model, int(case.removeprefix("decode")), arguments.keys, arguments.steps, arguments.profile)
    if case == "prefill":
        return prefill(model, arguments.keys, arguments.profile)
    return mixed(model, arguments.keys, arguments.interval)


def compare(config: LlamaConfig, dtype: torch.dtype, arguments: argparse.Namespace) -> dict[str, float]:
    """Return the microseconds of a step of transformers by case. Batches that change have no counterpart there."""
    model, found = reference_model(config, dtype, arguments.device), {}
    for case in arguments.cases.split(","):
        if case.startswith("decode"):
            seconds = decode_seconds(model, int(case.removeprefix("decode")), arguments.keys, arguments.steps)
        elif case == "prefill":
            seconds = prefill_seconds(model, PREFILL_REQUESTS, arguments.keys)
        else:
            continue
        found[case] = seconds * 1e6
    return found


def parse(argv: Optional[Sequence[str]] = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--layers", type=int, help="layers in place of the model's own")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--cases", default="decode1,decode64,decode256,prefill,mixed")
    parser.add_argument("--keys", type=int, default=2048, help="tokens of each request")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--interval", type=float, default=0.02, help="seconds between arrivals of `mixed`")
    parser.add_argument("--fp8", action="store_true", help="e4m3 weights of projections and experts, in blocks")
    parser.add_argument("--profile", action="store_true", help="where the time of a step goes")
    parser.add_argument("--no-transformers", action="store_true", help="time the engine alone")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    for case in arguments.cases.split(","):
        if case not in ("prefill", "mixed") and not (case.startswith("decode") and case[6:].isdigit()):
            parser.error(f"--cases must be prefill, mixed or decodeN, got {case!r}")
    return arguments


def with_layers(config: LlamaConfig, count: int) -> LlamaConfig:
    """Return a configuration with so many of the first layers."""
    recurrent = config.recurrent
    if recurrent is not None:
        recurrent = replace(recurrent, layers=frozenset(i for i in recurrent.layers if i < count))
    return replace(config, num_layers=count, recurrent=recurrent)


def show(case: str, figures: dict[str, Any]) -> None:
    shown = "  ".join(f"{name} {round(x, 4):,}" for name, x in figures.items() if isinstance(x, (int, float)))
    print(f"{case:10s}", shown, flush=True)


def main(argv: Optional[Sequence[str]] = None) -> dict[str, dict[str, Any]]:
    arguments = parse(argv)
    config, dtype = MODELS[arguments.model], getattr(torch, arguments.dtype)
    if arguments.layers is not None:
        config = with_layers(config, arguments.layers)
    weights = random_weights(config, arguments.device, dtype=dtype)
    model = Llama(config, weights, dtype, arguments.device, fp8=arguments.fp8)
    del weights
    built, seconds = build_kernels(model)
    kind = "e4m3 blocks" if arguments.fp8 else arguments.dtype
    print(f"{arguments.model}, {model.num_parameters / 1e9:.2f}e9 weights, {kind}; {built} modules in {seconds:.1f} s")
    results = {}
    for case in arguments.cases.split(","):
        results[case] = measure(model, case, arguments)
        show(case, results[case])
        gc.collect()  # engines and their graphs refer to each other, and have most of the memory
    del model
    reason = "--no-transformers was given" if arguments.no_transformers else why_not()
    if reason is None:
        for case, us in compare(config, dtype, arguments).items():
            results[case] |= {"transformers_us": us, "times_as_fast": us / results[case]["step_us"]}
            show(case, {name: results[case][name] for name in ("transformers_us", "times_as_fast")})
    else:
        print(f"transformers was not measured: {reason}")
    if arguments.json:
        facts = {"model": arguments.model, "weights": kind, "transformers": reason or "measured"}
        arguments.json.write_text(json.dumps({**facts, "cases": results}, indent=1) + "\n")
    return results


if __name__ == "__main__":
    main()
