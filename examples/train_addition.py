# SPDX-License-Identifier: Apache-2.0
"""Train the model that ``examples/serve`` serves by default: a small Llama that adds three digits, byte by byte.

python examples/train_addition.py                            writes examples/addition/ (committed: 621 steps)
python examples/train_addition.py --minutes 1 --out trial    the best of one minute, elsewhere

The task is made by code, so that anybody can check an answer. The model shows its work as pupils do: for the prompt
``374+528: `` it generates ``12 10 09 -> 902``, the sum of each column from right to left with the carry, and the
answer. A token is a byte; a line feed is the end-of-text token. Only the answer is learned; the digits of the prompt
are random. One pair of numbers in ten is never trained on, and is used for the accuracy. Needs ``transformers``, whose
Llama is trained; ``examples/serve`` then runs the weights on flashinfer's kernels.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Optional, Sequence

import torch
from serve.addition import prompt_of, text_of
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

LEAST, MOST = 100, 999
PROMPT = len(prompt_of(LEAST, LEAST))
LENGTH = len(text_of(MOST, MOST))  # shorter texts are padded at the end
IGNORED = -100  # label of the padding


def model_config() -> LlamaConfig:
    """Return the sizes of the model: 0.18 M parameters."""
    return LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        bos_token_id=None,
        eos_token_id=ord("\n"),
    )


def is_held_out(a: int, b: int) -> bool:
    """Return True for the pairs that are never trained on: one in ten."""
    return (a * 7919 + b * 104729) % 1009 % 10 == 0


def draw_pairs(count: int, generator: torch.Generator, held_out: bool) -> list[tuple[int, int]]:
    """Draw pairs of numbers, either all from training or all held out."""
    pairs: list[tuple[int, int]] = []
    while len(pairs) < count:
        drawn = torch.randint(LEAST, MOST + 1, (count, 2), generator=generator).tolist()
        pairs += [(a, b) for a, b in drawn if is_held_out(a, b) == held_out]
    return pairs[:count]


def encode(pairs: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bytes ``(count, LENGTH)`` of the texts, and the labels ``(count, LENGTH - PROMPT)`` of the answers."""
    texts = [text_of(a, b).encode() for a, b in pairs]
    tokens = torch.tensor([list(text.ljust(LENGTH, b"\0")) for text in texts])
    answers = tokens[:, PROMPT:]
    return tokens, answers.masked_fill(answers == 0, IGNORED)


def answer_logits(model: LlamaForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits ``(count, LENGTH - PROMPT, vocab_size)`` of the bytes of the answers."""
    return model(tokens[:, :-1], logits_to_keep=LENGTH - PROMPT, use_cache=False).logits


@torch.inference_mode()
def accuracy(model: LlamaForCausalLM, count: int = 200, seed: int = 1) -> float:
    """Return the share of held-out sums that the model gets right in every byte.

    A text that is right when each byte is predicted from the right bytes before it is also what greedy decoding gives.
    """
    tokens, labels = encode(draw_pairs(count, torch.Generator().manual_seed(seed), held_out=True))
    found = answer_logits(model, tokens.to(model.device)).argmax(dim=-1).cpu()
    return ((found == labels) | (labels == IGNORED)).all(dim=1).float().mean().item()


def make_optimizers(model: LlamaForCausalLM, peak: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers, and AdamW for embeddings and norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "layers" in name]
    rest = [p for name, p in model.named_parameters() if p.ndim != 2 or "layers" not in name]
    return [
        torch.optim.Muon(matrices, lr=peak, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(rest, lr=peak / 4, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def learning_rate(progress: float) -> float:
    """Return the factor of the learning rate: up to 1 in the first 2 %, down to 0.02 in the last 60 %."""
    return min(progress / 0.02 + 0.02, 1.0, 0.02 + 0.98 * (1 - progress) / 0.6)


def train(model: LlamaForCausalLM, arguments: argparse.Namespace) -> None:
    """Minimise the cross entropy of the answers until the steps are done or the minutes are over."""
    generator = torch.Generator().manual_seed(0)
    optimizers = make_optimizers(model, arguments.rate)
    rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    start = time.perf_counter()
    progress, step = 0.0, 0
    while progress < 1:
        tokens, labels = encode(draw_pairs(arguments.batch_size, generator, held_out=False))
        logits = answer_logits(model, tokens.to(model.device))
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten().to(model.device), ignore_index=IGNORED)
        model.zero_grad(set_to_none=True)
        loss.backward()
        for optimizer, rate in zip(optimizers, rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * learning_rate(progress)
            optimizer.step()
        step += 1
        seconds = time.perf_counter() - start
        progress = max(step / arguments.steps, seconds / 60 / arguments.minutes)
        if step % 100 == 0 or progress >= 1:
            print(f"step {step:6}  loss {loss.item():.4f}  right {accuracy(model):.1%}  {seconds:.0f} s", flush=True)


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=800, metavar="N")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, metavar="M", help="end after this time at the latest"
    )
    parser.add_argument("--batch-size", type=int, default=96, metavar="N")
    parser.add_argument("--rate", type=float, default=1e-2, metavar="R", help="largest learning rate")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "addition", metavar="DIR")
    arguments = parser.parse_args(argv)
    torch.manual_seed(0)
    model = LlamaForCausalLM(model_config()).to(arguments.device)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters on {arguments.device}", flush=True)
    train(model, arguments)
    model = model.to(torch.bfloat16)  # what is stored; the accuracy is that of the stored weights
    print(f"right: {accuracy(model.float(), 2000):.2%} of 2000 pairs that were held out")
    model.to(torch.bfloat16).save_pretrained(arguments.out)
    print(f"weights: {arguments.out}")


if __name__ == "__main__":
    main()
