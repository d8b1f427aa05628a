# SPDX-License-Identifier: Apache-2.0
"""Templates and references of ``flashinfer.sampling``. With a seed and an offset a reference draws what kernels draw,
but for rounding: it adds floats where they add integers."""

from __future__ import annotations

import functools
from typing import Any, Callable, Mapping, Optional, Union

import torch

from ..template import Axis, Const, Scalar, Tensor, TraceTemplate, Value, Var
from .sampling_shared import as_column, draw_columns, keep_top_k, keep_top_p, random_units, random_words, same_shapes

__all__ = [
    "chain_speculative_sampling_trace",
    "min_p_sampling_from_probs_trace",
    "sampling_from_logits_trace",
    "sampling_from_probs_trace",
    "softmax_trace",
    "top_k_mask_logits_trace",
    "top_k_renorm_probs_trace",
    "top_k_sampling_from_probs_trace",
    "top_k_top_p_sampling_from_logits_trace",
    "top_k_top_p_sampling_from_probs_trace",
    "top_p_renorm_probs_trace",
    "top_p_sampling_from_probs_trace",
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


def _sampling_from_probs_reference(
    probs: torch.Tensor, seed: Seed = None, offset: Seed = None, **_: Any
) -> torch.Tensor:
    return draw_columns(probs.float(), random_units(seed, offset, rows_of(probs)), normalise=False).int()


def _sampling_from_logits_reference(
    logits: torch.Tensor, seed: Seed = None, offset: Seed = None, **_: Any
) -> torch.Tensor:
    return draw_columns(probabilities(logits), random_units(seed, offset, rows_of(logits))).int()


def _top_p_sampling_reference(
    probs: torch.Tensor, top_p: Parameter, seed: Seed = None, offset: Seed = None, **_: Any
) -> torch.Tensor:
    return draw_columns(keep_top_p(probs, top_p), random_units(seed, offset, rows_of(probs))).int()


def _top_k_sampling_reference(
    probs: torch.Tensor, top_k: Parameter, seed: Seed = None, offset: Seed = None, **_: Any
) -> torch.Tensor:
    return draw_columns(keep_top_k(probs, top_k), random_units(seed, offset, rows_of(probs))).int()


def _min_p_sampling_reference(
    probs: torch.Tensor, min_p: Parameter, seed: Seed = None, offset: Seed = None, **_: Any
) -> torch.Tensor:
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
    **_: Any,
) -> torch.Tensor:
    by_count = keep_top_k(probs.double(), top_k)
    by_mass = keep_top_p(normalised(by_count) if filter_apply_order == "top_k_first" else probs, top_p)
    kept = torch.where((by_mass > 0) & (by_count > 0), probs.double(), 0)
    return draw_columns(kept, random_units(seed, offset, rows_of(probs))).int()


def _top_k_top_p_sampling_from_logits_reference(
    logits: torch.Tensor,
    top_k: Parameter,
    top_p: Parameter,
    filter_apply_order: str = "top_k_first",
    seed: Seed = None,
    offset: Seed = None,
    **_: Any,
) -> torch.Tensor:
    return _top_k_top_p_sampling_reference(probabilities(logits), top_k, top_p, filter_apply_order, seed, offset)


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


def _chain_speculative_sampling_reference(
    draft_probs: torch.Tensor,
    draft_token_ids: torch.Tensor,
    target_probs: torch.Tensor,
    maybe_output_accepted_token_num: Optional[torch.Tensor] = None,
    maybe_output_emitted_draft_token_num: Optional[torch.Tensor] = None,
    seed: Seed = None,
    offset: Seed = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
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


def _drawing_init(
    batch_size: int = 4, vocab_size: int = 128256, device: str = "cpu", rows: str = "probs", **parameters: float
) -> dict[str, Any]:
    """Normalised rows, and a seed: without one, no two calls agree."""
    x = 3 * torch.randn(batch_size, vocab_size, device=device)
    return {rows: torch.softmax(x, dim=-1) if rows == "probs" else x, **parameters, "seed": 42, "offset": 0}


def _chain_speculative_sampling_init(
    batch_size: int = 4, vocab_size: int = 128256, num_drafts: int = 3, device: str = "cpu"
) -> dict[str, Any]:
    """A draft that the target agrees with now and then."""
    draft = torch.softmax(3 * torch.randn(batch_size, num_drafts, vocab_size, device=device), dim=-1)
    target = torch.softmax(3 * torch.randn(batch_size, num_drafts + 1, vocab_size, device=device), dim=-1)
    target[:, :num_drafts] = (target[:, :num_drafts] + draft) / 2
    counters = torch.zeros(2, batch_size, dtype=torch.int32, device=device)
    return {
        "draft_probs": draft,
        "draft_token_ids": draft.argmax(dim=-1).int(),
        "target_probs": target,
        "maybe_output_accepted_token_num": counters[0],
        "maybe_output_emitted_draft_token_num": counters[1],
        "seed": 42,
        "offset": 0,
    }


_AXES: dict[str, Axis] = {"batch_size": Var(), "vocab_size": Const(abbrev="v")}
_ROWS = Tensor(("batch_size", "vocab_size"))
_SEEDS: dict[str, Value] = {
    name: Scalar("int64", optional=True, description="or one for each row") for name in ("seed", "offset")
}
_TOP_K = Scalar("int32", description="or one for each row")
_TOP_P = Scalar("float32", description="or one for each row")
_ORDER = Scalar("int32", optional=True, description="'top_k_first' or 'joint'")


def _drawing(
    name: str,
    inputs: Mapping[str, Value],
    reference: Callable[..., torch.Tensor],
    description: str,
    **numbers: float,
) -> TraceTemplate:
    """A template of a draw; ``numbers`` are what its init gives to scalars."""
    bound: dict[str, Any] = {"rows": next(iter(inputs)), **numbers}
    return TraceTemplate(
        "sampling",
        axes=_AXES,
        inputs={**inputs, **_SEEDS},
        outputs={"samples": Tensor(("batch_size",), dtype="int32")},
        name_prefix=name,
        reference=reference,
        check=same_shapes,
        init=functools.partial(_drawing_init, **bound),
        description=description,
    )


sampling_from_probs_trace = _drawing(
    "sampling_from_probs", {"probs": _ROWS}, _sampling_from_probs_reference, "A token of each row of probabilities."
)
sampling_from_logits_trace = _drawing(
    "sampling_from_logits", {"logits": _ROWS}, _sampling_from_logits_reference, "A token of each row of logits."
)
top_p_sampling_from_probs_trace = _drawing(
    "top_p_sampling_from_probs",
    {"probs": _ROWS, "top_p": _TOP_P},
    _top_p_sampling_reference,
    "A token of each row, from its most likely ones that have top_p together.",
    top_p=0.9,
)
top_k_sampling_from_probs_trace = _drawing(
    "top_k_sampling_from_probs",
    {"probs": _ROWS, "top_k": _TOP_K},
    _top_k_sampling_reference,
    "A token of each row, from its k most likely ones.",
    top_k=50,
)
min_p_sampling_from_probs_trace = _drawing(
    "min_p_sampling_from_probs",
    {"probs": _ROWS, "min_p": _TOP_P},
    _min_p_sampling_reference,
    "A token of each row, from those at least min_p times as likely as the most likely one.",
    min_p=0.1,
)
top_k_top_p_sampling_from_probs_trace = _drawing(
    "top_k_top_p_sampling_from_probs",
    {"probs": _ROWS, "top_k": _TOP_K, "top_p": _TOP_P, "filter_apply_order": _ORDER},
    _top_k_top_p_sampling_reference,
    "A token of each row, from what top-k and top-p keep.",
    top_k=50,
    top_p=0.9,
)
top_k_top_p_sampling_from_logits_trace = _drawing(
    "top_k_top_p_sampling_from_logits",
    {"logits": _ROWS, "top_k": _TOP_K, "top_p": _TOP_P, "filter_apply_order": _ORDER},
    _top_k_top_p_sampling_from_logits_reference,
    "A token of each row of logits, from what top-k and top-p keep.",
    top_k=50,
    top_p=0.9,
)


def _rewriting(
    name: str,
    inputs: Mapping[str, Value],
    output: tuple[str, Tensor],
    reference: Callable[..., torch.Tensor],
    description: str,
) -> TraceTemplate:
    return TraceTemplate(
        "sampling",
        axes=_AXES,
        inputs=inputs,
        outputs=dict([output]),
        name_prefix=name,
        reference=reference,
        description=description,
    )


_PROBS = Tensor(("batch_size", "vocab_size"), dtype="float32")
softmax_trace = _rewriting(
    "softmax",
    {"logits": _ROWS, "temperature": Scalar("float32", optional=True, description="or one for each row")},
    ("probs", _PROBS),
    _softmax_reference,
    "softmax(logits / temperature) in float32.",
)
top_p_renorm_probs_trace = _rewriting(
    "top_p_renorm_probs",
    {"probs": _ROWS, "top_p": _TOP_P},
    ("renormed", _PROBS),
    _top_p_renorm_probs_reference,
    "What top-p keeps of each row, divided by its sum.",
)
top_k_renorm_probs_trace = _rewriting(
    "top_k_renorm_probs",
    {"probs": _ROWS, "top_k": _TOP_K},
    ("renormed", Tensor(("batch_size", "vocab_size"), dtype_from="probs")),
    _top_k_renorm_probs_reference,
    "What top-k keeps of each row, divided by its sum.",
)
top_k_mask_logits_trace = _rewriting(
    "top_k_mask_logits",
    {"logits": _ROWS, "top_k": _TOP_K},
    ("masked", Tensor(("batch_size", "vocab_size"), dtype_from="logits")),
    _top_k_mask_logits_reference,
    "Logits with all but the k largest of each row set to -inf.",
)

_COUNTER = Tensor(("batch_size",), dtype="int32", optional=True, description="is added to")
chain_speculative_sampling_trace = TraceTemplate(
    "sampling",
    axes={**_AXES, "num_drafts": Var("tokens proposed"), "num_targets": Var("num_drafts + 1")},
    inputs={
        "draft_probs": Tensor(("batch_size", "num_drafts", "vocab_size")),
        "draft_token_ids": Tensor(("batch_size", "num_drafts"), dtype="int32"),
        "target_probs": Tensor(("batch_size", "num_targets", "vocab_size")),
        "maybe_output_accepted_token_num": _COUNTER,
        "maybe_output_emitted_draft_token_num": _COUNTER,
        **_SEEDS,
    },
    outputs={
        "output_token_ids": Tensor(("batch_size", "num_targets"), dtype="int32"),
        "output_accepted_token_num": Tensor(("batch_size",), dtype="int32"),
        "output_emitted_draft_token_num": Tensor(("batch_size",), dtype="int32"),
    },
    name_prefix="chain_speculative_sampling",
    reference=_chain_speculative_sampling_reference,
    check=same_shapes,
    init=_chain_speculative_sampling_init,
    constraints=("num_targets == num_drafts + 1",),
    description="Accepts drafted tokens as long as the target model agrees and emits one token more.",
)
