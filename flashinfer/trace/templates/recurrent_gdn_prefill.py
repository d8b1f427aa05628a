# SPDX-License-Identifier: Apache-2.0
"""Template and reference of ``flashinfer.gdn_prefill``: the recurrence in float64, token by token."""

from __future__ import annotations

from typing import Any, Optional

import torch

from ..template import Const, Scalar, Tensor, TraceDispatch, TraceTemplate, Value, Var
from .shared import even_indptr, normal, seeded

__all__ = ["chunk_gated_delta_rule_trace", "exact_gated_delta_rule"]


def exact_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: Optional[torch.Tensor] = None,
    beta: Optional[torch.Tensor] = None,
    scale: Optional[float] = None,
    initial_state: Optional[torch.Tensor] = None,
    cu_seqlens: Optional[torch.Tensor] = None,
    use_qk_l2norm_in_kernel: bool = False,
    state_indices: Optional[torch.Tensor] = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """S <- g S; S <- S + k (beta (v - k^T S)); o = scale q^T S. Returns outputs and final states in float64."""
    heads = max(q.shape[1], v.shape[1])
    if use_qk_l2norm_in_kernel:
        q, k = ((x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype) for x in (q, k))
    q, k, v = (x.double().repeat_interleave(heads // x.shape[1], dim=1) for x in (q, k, v))
    ones = torch.ones(q.shape[0], heads, dtype=torch.float64, device=q.device)
    decay, rate = (ones if x is None else x.double() for x in (g, beta))
    factor = scale or q.shape[-1] ** -0.5
    out = torch.zeros_like(q)
    offsets = torch.tensor([0, q.shape[0]]) if cu_seqlens is None else cu_seqlens
    finals = torch.zeros(offsets.shape[0] - 1, heads, v.shape[-1], q.shape[-1], dtype=torch.float64, device=q.device)
    for n in range(offsets.shape[0] - 1):
        begin, end = int(offsets[n]), int(offsets[n + 1])
        if initial_state is not None:
            finals[n] = initial_state[n if state_indices is None else int(state_indices[n])].double()
        s = finals[n]  # [head, V, K]
        for t in range(begin, end):
            s *= decay[t, :, None, None]
            u = rate[t, :, None] * (v[t] - (s @ k[t, :, :, None]).squeeze(-1))
            s += u[:, :, None] * k[t, :, None, :]
            out[t] = factor * (s @ q[t, :, :, None]).squeeze(-1)
    return out, finals


def _chunk_gated_delta_rule_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: Optional[torch.Tensor] = None,
    beta: Optional[torch.Tensor] = None,
    scale: Optional[float] = None,
    initial_state: Optional[torch.Tensor] = None,
    cu_seqlens: Optional[torch.Tensor] = None,
    use_qk_l2norm_in_kernel: bool = False,
    state_indices: Optional[torch.Tensor] = None,
    **_: Any,
) -> torch.Tensor:
    return exact_gated_delta_rule(
        q, k, v, g, beta, scale, initial_state, cu_seqlens, use_qk_l2norm_in_kernel, state_indices
    )[0].to(v.dtype)


def _chunk_gated_delta_rule_state_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: Optional[torch.Tensor] = None,
    beta: Optional[torch.Tensor] = None,
    scale: Optional[float] = None,
    initial_state: Optional[torch.Tensor] = None,
    cu_seqlens: Optional[torch.Tensor] = None,
    use_qk_l2norm_in_kernel: bool = False,
    state_indices: Optional[torch.Tensor] = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    out, states = exact_gated_delta_rule(
        q, k, v, g, beta, scale, initial_state, cu_seqlens, use_qk_l2norm_in_kernel, state_indices
    )
    return out.to(v.dtype), states.float()


def _chunk_gated_delta_rule_init(
    *,
    total_tokens: int,
    num_requests: int = 1,
    num_q_heads: int = 16,
    num_k_heads: int = 16,
    num_v_heads: int = 32,
    head_dim: int = 128,
    num_states: int = 0,
    num_offsets: int = 0,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    """Normalised queries and keys, decays near 1, as a model has them."""
    g = seeded(seed, device)
    heads = max(num_q_heads, num_v_heads)
    q, k = (
        torch.nn.functional.normalize(normal(g, total_tokens, h, head_dim, dtype=torch.float32), dim=-1).bfloat16()
        for h in (num_q_heads, num_k_heads)
    )
    uniform = [torch.rand(total_tokens, heads, generator=g, device=device) for _ in range(2)]
    return {
        "q": q,
        "k": k,
        "v": normal(g, total_tokens, num_v_heads, head_dim),
        "g": torch.exp(-0.1 * uniform[0]),
        "beta": uniform[1],
        "initial_state": 0.1 * normal(g, num_requests, heads, head_dim, head_dim, dtype=torch.float32),
        "cu_seqlens": even_indptr(total_tokens, num_requests, device),
    }


def _chunk_gated_delta_rule_state_init(
    *,
    total_tokens: int,
    num_requests: int = 1,
    num_q_heads: int = 16,
    num_k_heads: int = 16,
    num_v_heads: int = 32,
    head_dim: int = 128,
    num_states: int = 0,
    num_offsets: int = 0,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    heads = {"num_q_heads": num_q_heads, "num_k_heads": num_k_heads, "num_v_heads": num_v_heads}
    sizes = {"total_tokens": total_tokens, "num_requests": num_requests, "head_dim": head_dim, **heads}
    return {**_chunk_gated_delta_rule_init(**sizes, device=device, seed=seed), "output_final_state": True}


_STATE = ("num_states", "num_heads", "head_dim", "head_dim")


def _template(has_state: bool) -> TraceTemplate:
    outputs: dict[str, Value] = {
        "output": Tensor(["total_tokens", "num_heads", "head_dim"], param="output", dtype_from="v")
    }
    if has_state:
        outputs["output_state"] = Tensor(_STATE, param="output_state", dtype="float32")
    return TraceTemplate(
        "gdn",
        axes={
            "total_tokens": Var(),
            "num_states": Var("requests, or slots of a pool"),
            "num_requests": Var(),
            "num_offsets": Var("num_requests + 1"),
            "num_q_heads": Const(abbrev="qk"),
            "num_k_heads": Const(abbrev=""),
            "num_v_heads": Const(abbrev="v"),
            "num_heads": Const(
                "max(num_q_heads, num_v_heads)",
                abbrev="",
                of=lambda sizes: max(sizes["num_q_heads"], sizes["num_v_heads"]),
            ),
            "head_dim": Const(abbrev="d"),
        },
        inputs={
            "q": Tensor(["total_tokens", "num_q_heads", "head_dim"]),
            "k": Tensor(["total_tokens", "num_k_heads", "head_dim"]),
            "v": Tensor(["total_tokens", "num_v_heads", "head_dim"]),
            "g": Tensor(["total_tokens", "num_heads"], optional=True, description="decay, linear; None is 1"),
            "beta": Tensor(["total_tokens", "num_heads"], optional=True, description="None is 1"),
            "scale": Scalar(optional=True, description="None and 0 are head_dim ** -0.5"),
            "initial_state": Tensor(_STATE, optional=True, description="[V, K] of each head; None is 0"),
            "cu_seqlens": Tensor(["num_offsets"]),
            "use_qk_l2norm_in_kernel": Scalar("bool", optional=True),
            "state_indices": Tensor(["num_requests"], optional=True),
        },
        outputs=outputs,
        name_prefix="gdn_prefill_state" if has_state else "gdn_prefill",
        reference=_chunk_gated_delta_rule_state_reference if has_state else _chunk_gated_delta_rule_reference,
        init=_chunk_gated_delta_rule_state_init if has_state else _chunk_gated_delta_rule_init,
        description="Gated delta rule over packed requests: a chunk-wise prefill of the recurrent layer.",
    )


_with_state, _without_state = _template(True), _template(False)


def _choose(**arguments: Any) -> TraceTemplate:
    return _with_state if arguments.get("output_final_state") else _without_state


chunk_gated_delta_rule_trace = TraceDispatch(_choose, (_without_state, _with_state))
