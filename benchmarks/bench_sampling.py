# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of ``flashinfer.sampling``: rows of Llama 3's vocabulary. One read of them is the least traffic.

python benchmarks/bench_sampling.py [-k top_p] [--device cpu] [--json FILE]
"""

from __future__ import annotations

from typing import Any, Callable

import torch
from harness import Bench, bf16, case, fp32, grid, main, nbytes

import flashinfer.sampling as sampling
from flashinfer.trace.templates import sampling as templates

VOCAB = {"vocab_size": [128256]}
# One request, a decode batch, a large one.
CUDA = grid(batch_size=[1, 64, 512], **VOCAB)
CPU = grid(batch_size=[1, 16], **VOCAB)
SEED = {"seed": 42, "offset": 0}


def _probs(batch_size: int, vocab_size: int) -> torch.Tensor:
    return torch.softmax(3 * torch.randn(batch_size, vocab_size), dim=-1)


def _torch_draw(probs: torch.Tensor) -> torch.Tensor:
    return torch.multinomial(probs, 1)


def _torch_top_p_renorm(probs: torch.Tensor, top_p: float) -> torch.Tensor:
    ordered, at = probs.sort(dim=-1, descending=True)
    ordered[ordered.cumsum(dim=-1) - ordered >= top_p] = 0
    return torch.zeros_like(probs).scatter_(1, at, ordered / ordered.sum(dim=-1, keepdim=True))


def _torch_top_k_mask(logits: torch.Tensor, top_k: int, fill: float = -torch.inf) -> torch.Tensor:
    return logits.masked_fill(logits < logits.topk(top_k, dim=-1).values[:, -1:], fill)


def _torch_top_k_renorm(probs: torch.Tensor, top_k: int) -> torch.Tensor:
    kept = _torch_top_k_mask(probs, top_k, 0.0)
    return kept / kept.sum(dim=-1, keepdim=True)


def _torch_min_p(probs: torch.Tensor, min_p: float) -> torch.Tensor:
    return _torch_draw(probs.masked_fill(probs < min_p * probs.amax(dim=-1, keepdim=True), 0))


def _torch_top_k_top_p(probs: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    values, at = probs.topk(top_k, dim=-1)
    values = values / values.sum(dim=-1, keepdim=True)
    values[values.cumsum(dim=-1) - values >= top_p] = 0
    return at.gather(1, _torch_draw(values))


def _drawing(name: str, baseline: Callable[..., Any], *parameters: float, logits: bool = False) -> None:
    """Register a sampling case. A fixed seed lets the check expect the tokens of the reference."""
    function = getattr(sampling, name)
    reference = function._trace_template.reference

    @case(name, cpu=CPU, cuda=CUDA)
    def build(batch_size: int, vocab_size: int) -> Bench:
        x = _probs(batch_size, vocab_size)
        return Bench(
            run=lambda *args: function(*args, **SEED),
            args=(x.log() if logits else x, *parameters),
            baseline=baseline,
            reference=lambda *args: reference(*args, **SEED),
            bytes=nbytes(x),
        )


_drawing("sampling_from_probs", _torch_draw)
_drawing("sampling_from_logits", lambda x: _torch_draw(torch.softmax(x, dim=-1)), logits=True)
_drawing("top_p_sampling_from_probs", lambda p, top_p: _torch_draw(_torch_top_p_renorm(p, top_p)), 0.9)
_drawing("top_k_sampling_from_probs", lambda p, top_k: _torch_draw(_torch_top_k_renorm(p, top_k)), 50)
_drawing("min_p_sampling_from_probs", _torch_min_p, 0.1)
_drawing("top_k_top_p_sampling_from_probs", _torch_top_k_top_p, 50, 0.9)
_drawing(
    "top_k_top_p_sampling_from_logits",
    lambda x, top_k, top_p: _torch_top_k_top_p(torch.softmax(x, dim=-1), top_k, top_p),
    50,
    0.9,
    logits=True,
)


@case("softmax", cpu=CPU, cuda=CUDA)
def softmax(batch_size: int, vocab_size: int) -> Bench:
    x = 3 * torch.randn(batch_size, vocab_size)
    return Bench(
        run=sampling.softmax,
        args=(x, 0.7),
        baseline=lambda x, temperature: torch.softmax(x / temperature, dim=-1),
        reference=templates.softmax_trace.reference,
        bytes=nbytes(x) * 2,
    )


@case("top_p_renorm_probs", cpu=CPU, cuda=CUDA)
def top_p_renorm_probs(batch_size: int, vocab_size: int) -> Bench:
    x = _probs(batch_size, vocab_size)
    return Bench(
        run=sampling.top_p_renorm_probs,
        args=(x, 0.9),
        baseline=_torch_top_p_renorm,
        reference=templates.top_p_renorm_probs_trace.reference,
        bytes=nbytes(x) * 2,
    )


DTYPES = [p | {"dtype": fp32} for p in CUDA] + grid(batch_size=[512], **VOCAB, dtype=[bf16])


@case("top_k_renorm_probs", cpu=[p | {"dtype": fp32} for p in CPU], cuda=DTYPES)
def top_k_renorm_probs(batch_size: int, vocab_size: int, dtype: torch.dtype) -> Bench:
    x = _probs(batch_size, vocab_size).to(dtype)
    return Bench(
        run=sampling.top_k_renorm_probs,
        args=(x, 50),
        baseline=_torch_top_k_renorm,
        reference=templates.top_k_renorm_probs_trace.reference,
        bytes=nbytes(x) * 2,
    )


@case("top_k_mask_logits", cpu=[p | {"dtype": fp32} for p in CPU], cuda=DTYPES)
def top_k_mask_logits(batch_size: int, vocab_size: int, dtype: torch.dtype) -> Bench:
    x = torch.randn(batch_size, vocab_size).to(dtype)
    return Bench(
        run=sampling.top_k_mask_logits,
        args=(x, 50),
        baseline=_torch_top_k_mask,
        reference=templates.top_k_mask_logits_trace.reference,
        bytes=nbytes(x) * 2,
    )


@case("chain_speculative_sampling", cpu=grid(batch_size=[4], **VOCAB), cuda=grid(batch_size=[1, 64], **VOCAB))
def chain_speculative_sampling(batch_size: int, vocab_size: int) -> Bench:
    drafts = 4
    draft = _probs(batch_size * drafts, vocab_size).view(batch_size, drafts, vocab_size)
    target = _probs(batch_size * (drafts + 1), vocab_size).view(batch_size, drafts + 1, vocab_size)
    ids = torch.randint(0, vocab_size, (batch_size, drafts), dtype=torch.int32)
    reference = templates.chain_speculative_outputs
    return Bench(
        run=lambda *args: sampling.chain_speculative_sampling(*args, **SEED),
        args=(draft, ids, target),
        reference=lambda *args: reference(*args, **SEED),
        bytes=nbytes(draft) // drafts * 2,  # draft and target row of the position that is sampled
    )


if __name__ == "__main__":
    main()
