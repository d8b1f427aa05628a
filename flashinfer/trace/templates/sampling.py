# SPDX-License-Identifier: Apache-2.0
"""Templates and references of ``flashinfer.sampling``. With a seed and an offset a reference draws what kernels draw,
but for rounding: it adds floats where they add integers."""

from __future__ import annotations

from typing import Any, Callable, Optional, Union

import torch

from ..notation import template_of_text
from ..template import TraceTemplate
from .sampling_arguments import (
    _chain_speculative_sampling_init,
    _min_p_sampling_init,
    _sampling_from_logits_init,
    _sampling_from_probs_init,
    _softmax_init,
    _top_k_mask_logits_init,
    _top_k_renorm_probs_init,
    _top_k_sampling_init,
    _top_k_top_p_sampling_from_logits_init,
    _top_k_top_p_sampling_init,
    _top_p_renorm_probs_init,
    _top_p_sampling_init,
)
from .sampling_shared import as_column, draw_columns, keep_top_k, keep_top_p, random_units, random_words, same_shapes
from .topk import top_k_page_table_transform_trace, top_k_ragged_transform_trace

__all__ = [
    "chain_speculative_outputs",
    "chain_speculative_sampling_trace",
    "min_p_sampling_trace",
    "sampling_from_logits_trace",
    "sampling_from_probs_trace",
    "softmax_trace",
    "top_k_mask_logits_trace",
    "top_k_page_table_transform_trace",
    "top_k_ragged_transform_trace",
    "top_k_renorm_probs_trace",
    "top_k_sampling_trace",
    "top_k_top_p_sampling_from_logits_trace",
    "top_k_top_p_sampling_trace",
    "top_p_renorm_probs_trace",
    "top_p_sampling_trace",
]

Parameter = Union[torch.Tensor, float]
Seed = Optional[Union[torch.Tensor, int]]


def rows_of(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.shape[0], device=x.device)


def probabilities(logits: torch.Tensor) -> torch.Tensor:
    """Softmax; 0 for NaN, and for a row of -inf."""
    return torch.softmax(torch.nan_to_num(logits.double(), nan=-torch.inf, neginf=-torch.inf), dim=-1).nan_to_num(0.0)


def normalised(x: torch.Tensor) -> torch.Tensor:
    total = x.sum(dim=-1, keepdim=True)
    return x / total.masked_fill(total == 0, 1)


def chosen_rows(x: torch.Tensor, indices: Optional[torch.Tensor]) -> torch.Tensor:
    """The rows that are drawn from, one for each token."""
    return x if indices is None else x[indices.long()]


def _sampling_from_probs_reference(
    probs: torch.Tensor,
    indices: Optional[torch.Tensor] = None,
    seed: Seed = None,
    offset: Seed = None,
    **_: Any,
) -> torch.Tensor:
    probs = chosen_rows(probs, indices)
    return draw_columns(probs.float(), random_units(seed, offset, rows_of(probs)), normalise=False).int()


def _sampling_from_logits_reference(
    logits: torch.Tensor,
    indices: Optional[torch.Tensor] = None,
    seed: Seed = None,
    offset: Seed = None,
    **_: Any,
) -> torch.Tensor:
    logits = chosen_rows(logits, indices)
    return draw_columns(probabilities(logits), random_units(seed, offset, rows_of(logits))).int()


def _top_p_sampling_reference(
    probs: torch.Tensor,
    top_p: Parameter,
    seed: Seed = None,
    offset: Seed = None,
    samples_dtype: torch.dtype = torch.int32,
    **_: Any,
) -> torch.Tensor:
    return draw_columns(keep_top_p(probs, top_p), random_units(seed, offset, rows_of(probs))).to(samples_dtype)


def _top_k_sampling_reference(
    probs: torch.Tensor,
    top_k: Parameter,
    seed: Seed = None,
    offset: Seed = None,
    samples_dtype: torch.dtype = torch.int32,
    **_: Any,
) -> torch.Tensor:
    return draw_columns(keep_top_k(probs, top_k), random_units(seed, offset, rows_of(probs))).to(samples_dtype)


def _min_p_sampling_reference(
    probs: torch.Tensor,
    min_p: Parameter,
    indices: Optional[torch.Tensor] = None,
    seed: Seed = None,
    offset: Seed = None,
    **_: Any,
) -> torch.Tensor:
    probs = chosen_rows(probs, indices)
    threshold = as_column(min_p, probs).float().clamp(max=1) * probs.float().amax(dim=-1, keepdim=True)
    kept = torch.where(probs.float() >= threshold, probs.float(), 0)
    return draw_columns(kept, random_units(seed, offset, rows_of(probs))).int()


def _top_k_top_p_sampling_reference(
    probs: torch.Tensor,
    top_k: Parameter,
    top_p: Parameter,
    filter_apply_order: str = "top_k_first",
    seed: Seed = None,
    offset: Seed = None,
    samples_dtype: torch.dtype = torch.int32,
    **_: Any,
) -> torch.Tensor:
    by_count = keep_top_k(probs.double(), top_k)
    by_mass = keep_top_p(normalised(by_count) if filter_apply_order == "top_k_first" else probs, top_p)
    kept = torch.where((by_mass > 0) & (by_count > 0), probs.double(), 0)
    return draw_columns(kept, random_units(seed, offset, rows_of(probs))).to(samples_dtype)


def _top_k_top_p_sampling_from_logits_reference(
    logits: torch.Tensor,
    top_k: Parameter,
    top_p: Parameter,
    indices: Optional[torch.Tensor] = None,
    filter_apply_order: str = "top_k_first",
    seed: Seed = None,
    offset: Seed = None,
    **_: Any,
) -> torch.Tensor:
    probs = probabilities(chosen_rows(logits, indices))
    return _top_k_top_p_sampling_reference(probs, top_k, top_p, filter_apply_order, seed, offset)


def _softmax_reference(logits: torch.Tensor, temperature: Optional[Parameter] = None, **_: Any) -> torch.Tensor:
    x = logits.double()
    if temperature is not None:
        scale = as_column(temperature, x).double()
        x = torch.where(x == -torch.inf, x, x * torch.where(scale == 0, 0.0, 1 / scale))
    return probabilities(x).masked_fill(x.isnan(), torch.nan).float()


def _top_p_renorm_probs_reference(probs: torch.Tensor, top_p: Parameter, **_: Any) -> torch.Tensor:
    return normalised(keep_top_p(probs, top_p)).float()


def _top_k_renorm_probs_reference(probs: torch.Tensor, top_k: Parameter, **_: Any) -> torch.Tensor:
    return normalised(keep_top_k(probs.double(), top_k)).to(probs.dtype)


def _top_k_mask_logits_reference(logits: torch.Tensor, top_k: Parameter, **_: Any) -> torch.Tensor:
    return keep_top_k(logits, top_k, fill=-torch.inf)


def chain_speculative_outputs(
    draft_probs: torch.Tensor,
    draft_token_ids: torch.Tensor,
    target_probs: torch.Tensor,
    maybe_output_accepted_token_num: Optional[torch.Tensor] = None,
    maybe_output_emitted_draft_token_num: Optional[torch.Tensor] = None,
    seed: Seed = None,
    offset: Seed = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, and the counters that the op returns besides them."""
    batch, drafts = draft_probs.shape[:2]
    rows, device = rows_of(draft_probs), draft_probs.device
    if seed is None or offset is None:
        seed, offset = torch.randint(2**62, (2,)).tolist()
    ids = draft_token_ids.long().unsqueeze(-1)
    p, q = (x.float()[:, :drafts].gather(2, ids).squeeze(-1) for x in (draft_probs, target_probs))
    units = [(random_words(seed, offset + i, rows)[0] >> 8).float() * 2**-24 for i in range(drafts)]
    u = torch.stack(units, dim=1) if drafts else p
    passed = u * p < q
    first = torch.where(passed.all(dim=1), drafts, (~passed).int().argmax(dim=1)) if drafts else torch.zeros_like(rows)
    nothing = draft_probs.new_zeros(batch, 1, draft_probs.shape[2])
    difference = target_probs.float() - torch.cat([draft_probs, nothing], dim=1).float()
    wanted = difference.clamp(min=0)[rows, first]
    wanted = torch.where(wanted.amax(dim=-1, keepdim=True) > 0, wanted, target_probs.float()[rows, first])
    last = draw_columns(wanted, random_units(seed, offset + drafts, rows)).int()
    out = torch.full((batch, drafts + 1), -1, dtype=torch.int32, device=device)
    positions = torch.arange(drafts, device=device)
    out[:, :drafts] = torch.where(positions < first.unsqueeze(1), draft_token_ids.int(), -1)
    out[rows, first] = last
    accepted, emitted = passed.sum(dim=1).int(), first.int()
    if maybe_output_accepted_token_num is not None:
        accepted = accepted + maybe_output_accepted_token_num
    if maybe_output_emitted_draft_token_num is not None:
        emitted = emitted + maybe_output_emitted_draft_token_num
    return out, accepted, emitted


def _chain_speculative_sampling_reference(
    draft_probs: torch.Tensor,
    draft_token_ids: torch.Tensor,
    target_probs: torch.Tensor,
    seed: Seed = None,
    offset: Seed = None,
    **_: Any,
) -> torch.Tensor:
    return chain_speculative_outputs(draft_probs, draft_token_ids, target_probs, seed=seed, offset=offset)[0]


_NOTES = {
    "indices": "row of each token; the rows in order when it is missing",
    "min_p": "or one for each row",
    "temperature": "or one for each row",
}


def _drawing(
    stem: str, inputs: str, reference: Callable[..., Any], init: Callable[..., Any], description: str
) -> TraceTemplate:
    """A template of a draw. Those with a limit for each row have int64 tokens in the published set."""
    by_row = "[batch_size]!" in inputs
    return template_of_text(
        f"{stem}_v{{vocab_size}}",
        "sampling",
        var="batch_size" if by_row else "batch_size num_indices",
        inputs=inputs if by_row else f"{inputs}; indices[num_indices]:int32?",
        outputs=f"samples[batch_size]:{'int64' if by_row else 'int32'}",
        notes=_NOTES,
        reference=reference,
        check=same_shapes,
        init=init,
        stem=stem,
        description=description,
    )


_PROBS, _LOGITS = "probs[batch_size, vocab_size]", "logits[batch_size, vocab_size]"
_TOP_K, _TOP_P = "top_k[batch_size]!:int32", "top_p[batch_size]!:float32"  # or a number for all rows

sampling_from_probs_trace = _drawing(
    "sampling_from_probs",
    _PROBS,
    _sampling_from_probs_reference,
    _sampling_from_probs_init,
    "A token of each row of probabilities.",
)
sampling_from_logits_trace = _drawing(
    "sampling_from_logits",
    _LOGITS,
    _sampling_from_logits_reference,
    _sampling_from_logits_init,
    "A token of each row of logits.",
)
top_p_sampling_trace = _drawing(
    "top_p_sampling",
    f"{_PROBS}; {_TOP_P}",
    _top_p_sampling_reference,
    _top_p_sampling_init,
    "A token of each row, from its most likely ones that have top_p together.",
)
top_k_sampling_trace = _drawing(
    "top_k_sampling",
    f"{_PROBS}; {_TOP_K}",
    _top_k_sampling_reference,
    _top_k_sampling_init,
    "A token of each row, from its k most likely ones.",
)
min_p_sampling_trace = _drawing(
    "min_p_sampling",
    f"{_PROBS}; min_p:float32",
    _min_p_sampling_reference,
    _min_p_sampling_init,
    "A token of each row, from those at least min_p times as likely as the most likely one.",
)
top_k_top_p_sampling_trace = _drawing(
    "top_k_top_p_sampling",
    f"{_PROBS}; {_TOP_K}; {_TOP_P}",
    _top_k_top_p_sampling_reference,
    _top_k_top_p_sampling_init,
    "A token of each row, from what top-k and top-p keep.",
)
top_k_top_p_sampling_from_logits_trace = _drawing(
    "top_k_top_p_sampling_from_logits",
    f"{_LOGITS}; top_k:int32; top_p:float32",
    _top_k_top_p_sampling_from_logits_reference,
    _top_k_top_p_sampling_from_logits_init,
    "A token of each row of logits, from what top-k and top-p keep.",
)


def _rewriting(
    stem: str, inputs: str, output: str, reference: Callable[..., Any], init: Callable[..., Any], description: str
) -> TraceTemplate:
    return template_of_text(
        f"{stem}_v{{vocab_size}}",
        "sampling",
        var="batch_size",
        inputs=inputs,
        outputs=output,
        notes=_NOTES,
        reference=reference,
        init=init,
        stem=stem,
        description=description,
    )


softmax_trace = _rewriting(
    "softmax",
    f"{_LOGITS}; temperature:float32?",
    "output[batch_size, vocab_size]:float32",
    _softmax_reference,
    _softmax_init,
    "softmax(logits / temperature) in float32.",
)
top_p_renorm_probs_trace = _rewriting(
    "top_p_renorm_probs",
    f"{_PROBS}; top_p:float32",
    "renormalized[batch_size, vocab_size]:float32",
    _top_p_renorm_probs_reference,
    _top_p_renorm_probs_init,
    "What top-p keeps of each row, divided by its sum.",
)
top_k_renorm_probs_trace = _rewriting(
    "top_k_renorm_probs",
    f"{_PROBS}; top_k:int32",
    "renormalized[batch_size, vocab_size]=probs",
    _top_k_renorm_probs_reference,
    _top_k_renorm_probs_init,
    "What top-k keeps of each row, divided by its sum.",
)
top_k_mask_logits_trace = _rewriting(
    "top_k_mask_logits",
    f"{_LOGITS}; top_k:int32",
    "masked_logits[batch_size, vocab_size]=logits",
    _top_k_mask_logits_reference,
    _top_k_mask_logits_init,
    "Logits with all but the k largest of each row set to -inf.",
)

chain_speculative_sampling_trace = template_of_text(
    "chain_speculative_sampling_v{vocab_size}",
    "sampling",
    var="batch_size num_speculative num_speculative_plus_1",
    inputs="draft_probs[batch_size, num_speculative, vocab_size]; draft_token_ids[batch_size, num_speculative];"
    "target_probs[batch_size, num_speculative_plus_1, vocab_size]",
    outputs="accepted_token_ids[batch_size, num_speculative_plus_1]:int32",
    reference=_chain_speculative_sampling_reference,
    check=same_shapes,
    init=_chain_speculative_sampling_init,
    description="Accepts drafted tokens as long as the target model agrees and emits one token more.",
)
