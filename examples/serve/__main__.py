# SPDX-License-Identifier: Apache-2.0
"""A small serving engine on flashinfer: continuous batching over a paged cache, on a GPU or on the CPU.

python examples/serve                    a small model that adds numbers, so that you can check it; ``make demo``
python examples/serve --random           a random model of the size that the device can take, for its speed
python examples/serve --model DIR        a Hugging Face checkpoint: Llama, Mistral, Qwen2, Qwen3, Mixtral, Qwen3-MoE,
                                         Qwen3-Next
python examples/serve --model random-deepseek-v3.2    a random model with sparse latent attention, and experts
torchrun --nproc-per-node 2 examples/serve --tensor-parallel 2    the model over two GPUs, or two processes of the CPU

Read engine.py first. The model is in model.py, linear.py, experts.py, recurrent.py and sparse.py, tokenizers and
printing in text.py, the sums in addition.py, the report in report.py, its web page in page.py. This file has the rest.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
import time
from pathlib import Path
from typing import Any, Callable, Optional, Sequence

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # ``python examples/serve`` puts the folder itself there
from serve.addition import AnswerStream, count_right, draw_prompts
from serve.engine import Engine, Request, Sampling, build_kernels, serve, warm_up
from serve.model import RANDOM_MODELS, Llama, LlamaConfig, load_checkpoint, random_weights
from serve.page import write_page
from serve.parallel import TensorParallel
from serve.report import device_name, table, write_timeline
from serve.text import PROMPTS, ByteTokenizer, CheckpointTokenizer, TextStream, Tokenizer

ADDITION = Path(__file__).resolve().parents[1] / "addition"  # weights that train_addition.py wrote


def make_requests(tokenizer: Tokenizer, arguments: argparse.Namespace) -> list[Request]:
    """Make requests with exponential gaps between arrivals and different output lengths.

    Every other request is greedy; sums are all greedy, because their answers are right or wrong.
    """
    numbers = random.Random(arguments.seed)
    prompts = draw_prompts(arguments.requests, arguments.seed) if adds(arguments) else arguments.prompts or PROMPTS
    requests, arrival = [], 0.0
    for i, prompt in zip(range(arguments.requests), itertools.cycle(prompts), strict=False):
        is_greedy = i % 2 == 0 or adds(arguments)
        sampling = Sampling() if is_greedy else Sampling(0.8, 50, 0.95, seed=(arguments.seed + i) % 2**63)
        length = numbers.randint(-(-arguments.max_new_tokens // 2), arguments.max_new_tokens)
        requests.append(Request(tokenizer.encode(prompt), length, sampling, arrival))
        arrival += numbers.expovariate(arguments.rate)
    return requests


def adds(arguments: argparse.Namespace) -> bool:
    """Return True if the requests are sums, whose answers are checked."""
    return not (arguments.model or arguments.random or arguments.prompts)


def load(arguments: argparse.Namespace) -> tuple[Llama, Tokenizer]:
    """Load the model and its tokenizer. The default dtype is bfloat16 on a GPU and with e4m3 weights, else float32."""
    device, size = arguments.device, arguments.tensor_parallel
    parallel = TensorParallel.start(size) if size > 1 else None
    if parallel is not None and device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    on_gpu = device.type == "cuda"
    if arguments.model in RANDOM_MODELS or arguments.random:
        usual_size = LlamaConfig(256, 2048, 5504, 16, 16, 4, 128) if on_gpu else LlamaConfig()
        config = RANDOM_MODELS.get(arguments.model, usual_size)
        weights = random_weights(config, device)
    else:  # in the host's memory: each weight goes to the device when its layer is made
        config, weights = load_checkpoint(Path(arguments.model or ADDITION), "cpu")
    usual = torch.bfloat16 if on_gpu or arguments.fp8 or config.has_codes else torch.float32
    dtype = getattr(torch, arguments.dtype) if arguments.dtype else usual
    model = Llama(config, weights, dtype, device, parallel, arguments.fp8)
    has_tokenizer = arguments.model and arguments.model not in RANDOM_MODELS
    return model, CheckpointTokenizer(Path(arguments.model)) if has_tokenizer else ByteTokenizer()


def prompts_of(file: str) -> list[str]:
    try:
        prompts = [line for line in Path(file).read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise argparse.ArgumentTypeError(f"{file} cannot be read: {error}, expected UTF-8") from error
    if not prompts:
        raise argparse.ArgumentTypeError(f"{file} has no line of text")
    return prompts


def positive(kind: Callable[[str], Any], least: float = 0) -> Callable[[str], Any]:
    """Return an argparse type: a number above ``least``."""

    def number(text: str) -> Any:
        value = kind(text)
        if not value > least:
            raise argparse.ArgumentTypeError(f"is {text}, expected more than {least}")
        return value

    return number


def device_of(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:  # no device of any kind
        device = torch.device("meta")
    count = torch.cuda.device_count() if device.type == "cuda" else device.type == "cpu"
    if (device.index or 0) >= count:
        raise argparse.ArgumentTypeError(f"{name} is not here, expected cpu or a CUDA device that torch can use")
    return device


def picture(name: str) -> Path:
    if not Path(name).parent.is_dir():
        raise argparse.ArgumentTypeError(f"{Path(name).parent} is no folder")
    if Path(name).is_dir():
        raise argparse.ArgumentTypeError(f"{name} is a folder, expected a file in it")
    return Path(name)


def parse_arguments(argv: Optional[Sequence[str]] = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add, whole = parser.add_argument, positive(int)
    names = ", ".join(RANDOM_MODELS)
    add("--model", metavar="DIR", help=f"Hugging Face checkpoint: config.json, *.safetensors, tokenizer; or {names}")
    add(
        "--random", action="store_true", help="random weights, of a size for the device, instead of the model that adds"
    )
    add("--prompts", type=prompts_of, metavar="FILE", help="one prompt per line, instead of our own")
    add("--requests", type=whole, default=24, metavar="N")
    add("--rate", type=positive(float), default=20.0, metavar="R", help="requests per second, on average")
    add("--max-new-tokens", type=whole, default=64, metavar="N")
    add("--batch-size", type=whole, default=16, metavar="N", help="most requests at once")
    add("--pages", type=positive(int, 1), default=512, metavar="N", help="pages of 16 tokens in the cache; one is ours")
    add("--device", type=device_of, default="cuda" if torch.cuda.is_available() else "cpu")
    add("--dtype", choices=["float32", "float16", "bfloat16"])
    add("--fp8", action="store_true", help="e4m3 weights in blocks of 128 x 128, on Hopper or the CPU")
    add("--tensor-parallel", type=whole, default=1, metavar="N", help="processes of torchrun that share the model")
    add("--no-graphs", action="store_true", help="decode without CUDA graphs")
    add("--seed", type=int, default=0, metavar="N")
    add("--timeline", type=picture, default="serve_timeline.png", metavar="FILE")
    add("--page", type=picture, default="serve.html", metavar="FILE", help="web page of the run, one file")
    arguments = parser.parse_args(argv)
    if arguments.model and arguments.random:
        parser.error("argument --random: not allowed with argument --model")
    arguments.random = arguments.random or arguments.model in RANDOM_MODELS
    is_folder = arguments.model and arguments.model not in RANDOM_MODELS
    if is_folder and not (Path(arguments.model) / "config.json").is_file():
        parser.error(f"argument --model: {arguments.model} has no config.json, expected a Hugging Face checkpoint")
    return arguments


#: What is printed before the text, by (random, adds).
INTRODUCTIONS = {
    (False, False): "",
    (True, False): "the weights are random, and so is the text\n",
    (False, True): "sums of three digits: the columns from right to left with their carries, then the answer\n",
}


def main(argv: Optional[Sequence[str]] = None) -> None:
    arguments = parse_arguments(argv)
    try:
        model, tokenizer = load(arguments)
        builds, build_seconds = build_kernels(model)
        start = time.perf_counter()
        graphs = False if arguments.no_graphs else None
        pages = max(arguments.pages * 16 // model.page_size, 2)
        engine = Engine(model, pages, max_batch_size=arguments.batch_size, use_cuda_graphs=graphs)
        capture_seconds = time.perf_counter() - start
        requests = make_requests(tokenizer, arguments)
        for request in requests:
            engine.check(request)  # before serving starts, so that an invalid request does not stop it halfway
    except (ValueError, ImportError, MemoryError) as error:
        raise SystemExit(f"serve: {error}") from error
    warm_up(engine)
    if model.parallel is not None and model.parallel.rank > 0:  # rank 0 has the same text and shows it
        serve(engine, requests, lambda request: None)
        model.parallel.close()
        return
    print(f"{len(requests)} requests, about {arguments.rate:g} per second, on {device_name(model.device)}")
    print(INTRODUCTIONS[arguments.random, adds(arguments)])
    stream = AnswerStream if adds(arguments) else TextStream
    serve(engine, requests, stream(engine.now, tokenizer, requests))
    facts = {
        "device": device_name(model.device),
        "model": f"{model.num_parameters / 1e6:.1f} M parameters, {str(model.dtype).removeprefix('torch.')}",
        "kernel builds": f"{builds} modules in {build_seconds:.1f} s" + ("" if builds else ": all in the cache"),
        "CUDA graphs": f"{len(engine.graphs)} in {capture_seconds:.1f} s" if engine.graphs else "none",
    }
    if model.parallel is not None:
        model.parallel.close()
        facts["tensor parallel"] = f"{model.parallel.size} ranks"
    if adds(arguments):
        facts["right answers"] = f"{count_right(requests)} of {len(requests)}"
    report = table(engine.steps, requests, facts)
    print(f"\n{report}")
    write_timeline(arguments.timeline, engine.steps, requests)
    print(f"timeline of the batch: {arguments.timeline}")
    write_page(arguments.page, report, arguments.timeline, requests, lambda request: tokenizer.decode(request.tokens))
    print(f"web page of the run: {arguments.page}")


if __name__ == "__main__":
    main()
