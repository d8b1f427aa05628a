# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of a whole model: the engine of examples/serve with random weights of a known model's sizes.

    python benchmarks/bench_serve.py --model llama-3.1-8b --cases decode1,decode64,prefill,mixed [--json FILE]
    python benchmarks/bench_serve.py --model tiny --device cpu --keys 64

``decodeN`` is a step of N requests with ``--keys`` tokens each, ``prefill`` the prompts of 8 requests in one step,
``mixed`` 64 requests that arrive one after the other. Pages are filled with random numbers, because only their number
matters; nothing is loaded. ``limit`` is what the hardware allows: bytes of weights and pages at 4.25 TB/s, or
operations at 800 TFLOP/s, whichever takes longer; ``of_limit`` is that time over the measured one. ``--profile``
prints where the time of a step goes: kernels by their share, gaps between them, and the host.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional, Sequence

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from serve.engine import Engine, Request, build_kernels, serve, warm_up
from serve.experts import Experts
from serve.model import Llama, LlamaConfig, Rope, has_experts, random_weights

BYTES_PER_S, FLOP_PER_S = 4.25e12, 800e12
PAGE_SIZE = 16
PREFILL_REQUESTS, MIXED_REQUESTS, MIXED_TOKENS = 8, 64, 64

_EXPERTS = Experts(128, 8, 768, True, "mlp", ("gate_proj", "up_proj", "down_proj"))
MODELS = {
    "tiny": LlamaConfig(num_layers=2),
    "llama-3.1-8b": LlamaConfig(128256, 4096, 14336, 32, 32, 8, 128, 8192, rope=Rope(5e5, 8.0, (1.0, 4.0, 8192))),
    "qwen3-30b-a3b": LlamaConfig(
        151936, 2048, 6144, 48, 32, 4, 128, 8192, rope=Rope(theta=1e6), has_head_norms=True, experts=_EXPERTS
    ),
}


def active_parameters(config: LlamaConfig, tokens: int) -> tuple[float, float]:
    """Return the weights that one token multiplies, and those that a batch of tokens reads, without the embedding.

    Each token takes ``top_k`` of the experts, all equally likely: the batch reads those that any token takes.
    """
    hidden, heads = config.hidden_size, config.num_qo_heads + 2 * config.num_kv_heads
    attention = hidden * config.head_dim * (heads + config.num_qo_heads)
    of_token, read = 0.0, 0.0
    for layer in range(config.num_layers):
        if has_experts(config, layer):
            assert config.experts is not None
            count, chosen = config.experts.num_experts, config.experts.top_k
            expert = 3 * hidden * config.experts.intermediate_size
            of_token += attention + chosen * expert + count * hidden
            read += attention + count * (1 - (1 - chosen / count) ** tokens) * expert + count * hidden
        else:
            of_token += attention + 3 * hidden * config.intermediate_size
            read += attention + 3 * hidden * config.intermediate_size
    return of_token, read


def limit(config: LlamaConfig, dtype: torch.dtype, requests: int, tokens: int, keys: int) -> float:
    """Return the seconds that a step takes at least: ``tokens`` of each request, ``keys`` of each in the pages."""
    of_token, read = active_parameters(config, requests * tokens)
    head = config.vocab_size * config.hidden_size
    of_pages = 2 * config.num_layers * config.num_kv_heads * config.head_dim * requests * keys
    pairs = requests * (tokens * (keys - tokens) + tokens * (tokens + 1) / 2)
    flops = 2 * (of_token * requests * tokens + head * requests)
    flops += 4 * config.num_layers * config.num_qo_heads * config.head_dim * pairs
    return max((read + head + of_pages) * dtype.itemsize / BYTES_PER_S, flops / FLOP_PER_S)


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
    engine = engine_for(model, requests, keys, steps + 8)
    for _ in range(requests):
        engine.submit(Request(tokens_of(model.config, keys), steps + 8))
    engine._admit()
    for request in engine.running:
        request.num_cached = keys - 1  # as if prefilled
    timed_steps(engine, 3)
    seconds = timed_steps(engine, steps)
    if profile:
        print_profile(lambda: timed_steps(engine, 3), steps=3)
    least = limit(model.config, model.dtype, requests, 1, keys)
    return {"step_us": seconds * 1e6, "tokens_per_s": requests / seconds, "of_limit": least / seconds}


def prefill(model: Llama, keys: int, profile: bool) -> dict[str, Any]:
    tokens = PREFILL_REQUESTS * keys
    engine = engine_for(model, PREFILL_REQUESTS, keys, 2, max_prefill_tokens=tokens, use_cuda_graphs=False)
    times = []
    for index in range(4):
        for _ in range(PREFILL_REQUESTS):
            engine.submit(Request(tokens_of(model.config, keys), 1))
        if profile and index == 3:
            print_profile(lambda: timed_steps(engine, 1), steps=1)
        else:
            times.append(timed_steps(engine, 1))
    seconds = min(times)
    least = limit(model.config, model.dtype, PREFILL_REQUESTS, keys, keys)
    return {"step_us": seconds * 1e6, "tokens_per_s": tokens / seconds, "of_limit": least / seconds}


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


def print_profile(step: Any, steps: int) -> None:
    """Print kernels by their share of the time, and the gaps during which no kernel ran."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    spans = sorted(
        (e.time_range.start, e.time_range.end, e.name) for e in profiler.events() if e.device_type.name == "CUDA"
    )
    if not spans:
        print("  no kernels in the profile")
        return
    shares: Counter[str] = Counter()
    gaps, done = [], spans[0][0]
    for start, end, name in spans:
        shares[name.replace("void ", "").split("<")[0].split("(")[0]] += end - start
        gaps.append(max(start - done, 0))
        done = max(done, end)
    total = done - spans[0][0]
    print(f"  {total / steps:.1f} us a step with the profiler, {len(spans) // steps} kernels, gaps:")
    long = sorted(gaps)[-3 * steps :][::-1]
    print(f"  {sum(gaps) / steps:.1f} us in all, the longest {', '.join(f'{gap:.1f}' for gap in long)}")
    for name, spent in shares.most_common(16):
        print(f"  {100 * spent / total:5.1f} %  {spent / steps:9.1f} us  {name[:100]}")


def measure(model: Llama, case: str, arguments: argparse.Namespace) -> dict[str, Any]:
    if case.startswith("decode"):
        return decode(model, int(case.removeprefix("decode")), arguments.keys, arguments.steps, arguments.profile)
    if case == "prefill":
        return prefill(model, arguments.keys, arguments.profile)
    return mixed(model, arguments.keys, arguments.interval)


def parse(argv: Optional[Sequence[str]] = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--layers", type=int, help="layers in place of the model's own")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--cases", default="decode1,decode64,prefill,mixed")
    parser.add_argument("--keys", type=int, default=2048, help="tokens of each request")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--interval", type=float, default=0.02, help="seconds between arrivals of `mixed`")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    for case in arguments.cases.split(","):
        if case not in ("prefill", "mixed") and not (case.startswith("decode") and case[6:].isdigit()):
            parser.error(f"--cases must be prefill, mixed or decodeN, got {case!r}")
    return arguments


def main(argv: Optional[Sequence[str]] = None) -> dict[str, dict[str, Any]]:
    arguments = parse(argv)
    config, dtype = MODELS[arguments.model], getattr(torch, arguments.dtype)
    if arguments.layers is not None:
        config = replace(config, num_layers=arguments.layers)
    model = Llama(config, random_weights(config, arguments.device, dtype=dtype), dtype, arguments.device)
    built, seconds = build_kernels(model)
    print(f"{arguments.model}, {model.num_parameters / 1e9:.2f}e9 weights; {built} modules built in {seconds:.1f} s")
    results = {}
    for case in arguments.cases.split(","):
        results[case] = {name: round(value, 4) for name, value in measure(model, case, arguments).items()}
        print(f"{case:10s}", "  ".join(f"{name} {value:,}" for name, value in results[case].items()), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({"model": arguments.model, "cases": results}, indent=1) + "\n")
    return results


if __name__ == "__main__":
    main()
