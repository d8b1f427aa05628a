# SPDX-License-Identifier: Apache-2.0
"""Verifying the tokens that a draft model proposed."""

from __future__ import annotations

from typing import Optional

import torch

from .._runtime.allocation import cuda_index
from .._runtime.dispatch import NativeFunction
from .._runtime.errors import ArgumentError
from .._runtime.explain_error import explain_type_errors
from .._runtime.torch_ops import register_custom_op
from ..api_logging import flashinfer_api
from ..trace.templates.sampling import chain_speculative_sampling_trace
from .modules import as_float, get_native_module
from .random_stream import Number, stream_arguments, take_from_default

_native_chain = NativeFunction(get_native_module, "chain_speculative_sampling")


@register_custom_op("flashinfer::chain_speculative_sampling", mutates_args=("out", "accepted", "emitted"))
def _chain_speculative_sampling(
    out: torch.Tensor,
    accepted: torch.Tensor,
    emitted: torch.Tensor,
    draft_probs: torch.Tensor,
    draft_token_ids: torch.Tensor,
    target_probs: torch.Tensor,
    seeds: Optional[torch.Tensor],
    seed: Optional[int],
    offsets: Optional[torch.Tensor],
    offset: Optional[int],
    increment: int,
) -> None:
    if seed is None:
        seed, offset = take_from_default(increment, target_probs, cuda_index(target_probs))
    _native_chain[target_probs.is_cuda](
        out, accepted, emitted, draft_probs, draft_token_ids, target_probs, seeds, seed, offsets, offset
    )


def _counter(counter: Optional[torch.Tensor], batch: int, device: torch.device) -> torch.Tensor:
    if counter is None:
        return torch.zeros(batch, dtype=torch.int32, device=device)
    return counter if counter.dtype is torch.int32 else counter.int()


@flashinfer_api(trace=chain_speculative_sampling_trace)
@explain_type_errors
def chain_speculative_sampling(
    draft_probs: torch.Tensor,
    draft_token_ids: torch.Tensor,
    target_probs: torch.Tensor,
    maybe_output_accepted_token_num: Optional[torch.Tensor] = None,
    maybe_output_emitted_draft_token_num: Optional[torch.Tensor] = None,
    deterministic: bool = True,
    generator: Optional[torch.Generator] = None,
    seed: Optional[Number] = None,
    offset: Optional[Number] = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    r"""Accept drafted tokens as long as the target model agrees, then emit one token more.

    Draft ``i`` passes if ``u * draft_p < target_p``, with one uniform ``u`` per draft. Tokens before the first failing
    draft are emitted, then one drawn from ``max(target - draft, 0)`` at that position, or from the target alone behind
    the last draft. So the emitted tokens are distributed as if the target model had drawn them.

    Parameters
    ----------
    draft_probs : torch.Tensor
        ``(batch, num_drafts, vocab)``. Computed in float32; other dtypes are converted.
    draft_token_ids : torch.Tensor
        ``(batch, num_drafts)``, int32. An id outside of the vocabulary does not pass.
    target_probs : torch.Tensor
        ``(batch, num_drafts + 1, vocab)``.
    maybe_output_accepted_token_num : Optional[torch.Tensor]
        ``(batch,)``, int32: the number of drafts that pass, each judged by itself, is added to it. Default: to zeros.
    maybe_output_emitted_draft_token_num : Optional[torch.Tensor]
        ``(batch,)``, int32: the number of drafts emitted is added to it. Default: to zeros.
    deterministic, generator, seed, offset
        As for :func:`sampling_from_logits`.

    Returns
    -------
    output_token_ids : torch.Tensor
        ``(batch, num_drafts + 1)``, int32: the emitted drafts, one token more, then -1.
    output_accepted_token_num, output_emitted_draft_token_num : torch.Tensor
        The counters, those passed in if they were int32.

    Examples
    --------
    >>> draft, target = torch.softmax(torch.randn(4, 3, 1000), -1), torch.softmax(torch.randn(4, 4, 1000), -1)
    >>> ids = torch.randint(0, 1000, (4, 3), dtype=torch.int32)
    >>> tokens, accepted, emitted = flashinfer.chain_speculative_sampling(draft, ids, target)
    """
    op = "chain_speculative_sampling"
    target_probs = as_float(op, "target_probs", target_probs).contiguous()
    draft_probs = as_float(op, "draft_probs", draft_probs).contiguous()
    if target_probs.ndim != 3:
        raise ArgumentError(f"{op}: target_probs must have 3 dimensions, got {target_probs.ndim}")
    ids = draft_token_ids if draft_token_ids.dtype is torch.int32 else draft_token_ids.int()
    batch, length, device = target_probs.shape[0], target_probs.shape[1], target_probs.device
    accepted = _counter(maybe_output_accepted_token_num, batch, device)
    emitted = _counter(maybe_output_emitted_draft_token_num, batch, device)
    increment = batch * length
    stream = stream_arguments(op, seed, offset, generator, increment, target_probs, batch)
    out = torch.empty((batch, length), dtype=torch.int32, device=device)
    _chain_speculative_sampling(out, accepted, emitted, draft_probs, ids.contiguous(), target_probs, *stream, increment)
    return out, accepted, emitted
