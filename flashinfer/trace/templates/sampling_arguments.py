# SPDX-License-Identifier: Apache-2.0
"""Arguments of ``flashinfer.sampling``: normalised rows, so that every filter keeps something."""

from __future__ import annotations

from typing import Any

import torch

from .shared import seeded


def random_logits(g: torch.Generator, *shape: int) -> torch.Tensor:
    return 3 * torch.randn(shape, generator=g, device=g.device)


def random_probs(g: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.softmax(random_logits(g, *shape), dim=-1)


def _top_k_sampling_init(
    *, batch_size: int, vocab_size: int = 128256, device: Any = "cuda", seed: int = 0
) -> dict[str, Any]:
    probs = random_probs(seeded(seed, device), batch_size, vocab_size)
    return {"probs": probs, "top_k": torch.full((batch_size,), 50, dtype=torch.int32, device=device)}


def _top_p_sampling_init(
    *, batch_size: int, vocab_size: int = 128256, device: Any = "cuda", seed: int = 0
) -> dict[str, Any]:
    probs = random_probs(seeded(seed, device), batch_size, vocab_size)
    return {"probs": probs, "top_p": torch.full((batch_size,), 0.9, device=device)}


def _top_k_top_p_sampling_init(
    *, batch_size: int, vocab_size: int = 128256, device: Any = "cuda", seed: int = 0
) -> dict[str, Any]:
    made = _top_k_sampling_init(batch_size=batch_size, vocab_size=vocab_size, device=device, seed=seed)
    return {**made, "top_p": torch.full((batch_size,), 0.9, device=device)}


def _softmax_init(*, batch_size: int, vocab_size: int = 32000, device: Any = "cuda", seed: int = 0) -> dict[str, Any]:
    return {"logits": random_logits(seeded(seed, device), batch_size, vocab_size), "temperature": 0.8}


def _sampling_from_probs_init(
    *, batch_size: int, vocab_size: int = 32000, num_indices: int = 0, device: Any = "cuda", seed: int = 0
) -> dict[str, Any]:
    return {"probs": random_probs(seeded(seed, device), batch_size, vocab_size)}


def _sampling_from_logits_init(
    *, batch_size: int, vocab_size: int = 32000, num_indices: int = 0, device: Any = "cuda", seed: int = 0
) -> dict[str, Any]:
    return {"logits": random_logits(seeded(seed, device), batch_size, vocab_size)}


def _min_p_sampling_init(
    *, batch_size: int, vocab_size: int = 32000, num_indices: int = 0, device: Any = "cuda", seed: int = 0
) -> dict[str, Any]:
    return {"probs": random_probs(seeded(seed, device), batch_size, vocab_size), "min_p": 0.1}


def _top_p_renorm_probs_init(
    *, batch_size: int, vocab_size: int = 32000, device: Any = "cuda", seed: int = 0
) -> dict[str, Any]:
    return {"probs": random_probs(seeded(seed, device), batch_size, vocab_size), "top_p": 0.9}


def _top_k_renorm_probs_init(
    *, batch_size: int, vocab_size: int = 32000, device: Any = "cuda", seed: int = 0
) -> dict[str, Any]:
    return {"probs": random_probs(seeded(seed, device), batch_size, vocab_size), "top_k": 50}


def _top_k_mask_logits_init(
    *, batch_size: int, vocab_size: int = 32000, device: Any = "cuda", seed: int = 0
) -> dict[str, Any]:
    return {"logits": random_logits(seeded(seed, device), batch_size, vocab_size), "top_k": 50}


def _top_k_top_p_sampling_from_logits_init(
    *, batch_size: int, vocab_size: int = 32000, num_indices: int = 0, device: Any = "cuda", seed: int = 0
) -> dict[str, Any]:
    return {"logits": random_logits(seeded(seed, device), batch_size, vocab_size), "top_k": 50, "top_p": 0.9}


def _chain_speculative_sampling_init(
    *,
    batch_size: int,
    num_speculative: int = 3,
    num_speculative_plus_1: int = 0,
    vocab_size: int = 32000,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    """A draft that the target agrees with now and then."""
    g, drafts = seeded(seed, device), num_speculative_plus_1 - 1 if num_speculative_plus_1 else num_speculative
    draft, target = (random_probs(g, batch_size, drafts + i, vocab_size) for i in (0, 1))
    target[:, :drafts] = (target[:, :drafts] + draft) / 2
    return {"draft_probs": draft, "draft_token_ids": draft.argmax(dim=-1).int(), "target_probs": target}
