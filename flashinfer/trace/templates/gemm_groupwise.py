# SPDX-License-Identifier: Apache-2.0
"""Templates and references of fp8 products with scales of blocks: fp32 sums, rounded once.

Rows that belong to no group are zero in a reference; the functions leave them as they are.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, Optional

import torch

from ..template import Axis, Const, Scalar, Tensor, TraceDispatch, TraceTemplate, Var
from .shared import normal, seeded

__all__ = [
    "batch_deepgemm_fp8_nt_groupwise_trace",
    "gemm_fp8_nt_blockscaled_trace",
    "gemm_fp8_nt_groupwise_trace",
    "group_deepgemm_fp8_nt_groupwise_trace",
    "group_gemm_fp8_nt_groupwise_trace",
]


def _scaled(x: torch.Tensor, scale: torch.Tensor, rows: int, depth: int) -> torch.Tensor:
    """Multiply ``(..., r, k)`` by ``(..., r / rows, k / depth)``, one factor per block."""
    wide = scale.repeat_interleave(rows, -2)[..., : x.shape[-2], :].repeat_interleave(depth, -1)
    return x.float() * wide[..., : x.shape[-1]]


def _gemm_fp8_nt_groupwise_k_reference(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    scale_granularity_mnk: tuple[int, int, int] = (1, 128, 128),
    out_dtype: Optional[torch.dtype] = None,
    **_: Any,
) -> torch.Tensor:
    gm, gn, gk = scale_granularity_mnk
    out = _scaled(a, a_scale, gm, gk) @ _scaled(b, b_scale, gn, gk).T
    return out.to(out_dtype or torch.bfloat16)


def _gemm_fp8_nt_groupwise_mn_reference(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    scale_granularity_mnk: tuple[int, int, int] = (1, 128, 128),
    out_dtype: Optional[torch.dtype] = None,
    **_: Any,
) -> torch.Tensor:
    return _gemm_fp8_nt_groupwise_k_reference(a, b, a_scale.mT, b_scale.mT, scale_granularity_mnk, out_dtype)


def _gemm_fp8_nt_groupwise_trtllm_reference(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    out_dtype: Optional[torch.dtype] = None,
    **_: Any,
) -> torch.Tensor:
    return _gemm_fp8_nt_groupwise_k_reference(a, b, a_scale, b_scale.mT, (1, 128, 128), out_dtype)


def _gemm_fp8_nt_blockscaled_k_reference(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    out_dtype: Optional[torch.dtype] = None,
    **_: Any,
) -> torch.Tensor:
    return _gemm_fp8_nt_groupwise_k_reference(a, b, a_scale, b_scale, (128, 128, 128), out_dtype)


def _gemm_fp8_nt_blockscaled_mn_reference(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    out_dtype: Optional[torch.dtype] = None,
    **_: Any,
) -> torch.Tensor:
    return _gemm_fp8_nt_groupwise_k_reference(a, b, a_scale.mT, b_scale.mT, (128, 128, 128), out_dtype)


def _group_gemm_fp8_nt_groupwise_k_reference(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    m_indptr: torch.Tensor,
    scale_granularity_mnk: tuple[int, int, int] = (1, 128, 128),
    out_dtype: Optional[torch.dtype] = None,
    **_: Any,
) -> torch.Tensor:
    gm, gn, gk = scale_granularity_mnk
    rows, weights = _scaled(a, a_scale, gm, gk), _scaled(b, b_scale, gn, gk)
    out = rows.new_zeros(a.shape[0], b.shape[1])
    for group, (begin, end) in enumerate(itertools.pairwise(m_indptr.tolist())):
        out[begin:end] = rows[begin:end] @ weights[group].T
    return out.to(out_dtype or torch.bfloat16)


def _group_gemm_fp8_nt_groupwise_mn_reference(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    m_indptr: torch.Tensor,
    scale_granularity_mnk: tuple[int, int, int] = (1, 128, 128),
    out_dtype: Optional[torch.dtype] = None,
    **_: Any,
) -> torch.Tensor:
    return _group_gemm_fp8_nt_groupwise_k_reference(
        a, b, a_scale.mT, b_scale.mT, m_indptr, scale_granularity_mnk, out_dtype
    )


def _group_deepgemm_fp8_nt_groupwise_reference(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    m_indices: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    rows, weights = _scaled(a, a_scale, 1, 128), _scaled(b, b_scale, 128, 128)
    out = rows.new_zeros(a.shape[0], b.shape[1])
    for group in range(b.shape[0]):
        mine = m_indices == group
        out[mine] = rows[mine] @ weights[group].T
    return out.to(torch.bfloat16)


def _batch_deepgemm_fp8_nt_groupwise_reference(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    masked_m: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    rows, weights = _scaled(a, a_scale, 1, 128), _scaled(b, b_scale, 128, 128)
    computed = torch.arange(a.shape[1], device=a.device) < masked_m.unsqueeze(1)
    out = (rows @ weights.mT).masked_fill(~computed.unsqueeze(2), 0)
    return out.to(torch.bfloat16)


def _operand(
    generator: torch.Generator, *shape: int, rows: int, is_transposed: bool = False, size: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """An e4m3 matrix, or several, and factors of blocks of ``rows`` by 128 around ``size``."""
    blocks = (*shape[:-2], (shape[-2] + rows - 1) // rows, (shape[-1] + 127) // 128)
    factors = (torch.rand(blocks, generator=generator, device=generator.device) + 0.5) * size
    factors = factors.mT.contiguous() if is_transposed else factors
    return normal(generator, *shape, dtype=torch.float8_e4m3fn), factors


def _dense_init(
    *,
    m: int,
    n: int = 4096,
    k: int = 7168,
    rows: int = 1,
    a_transposed: bool = False,
    b_transposed: bool = False,
    m_blocks: int = 0,
    n_blocks: int = 0,
    k_blocks: int = 0,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    g = seeded(seed, device)
    a, a_scale = _operand(g, m, k, rows=rows, is_transposed=a_transposed)
    b, b_scale = _operand(g, n, k, rows=128, is_transposed=b_transposed, size=k**-0.5)
    made = {"a": a, "b": b, "a_scale": a_scale, "b_scale": b_scale}
    if a_transposed != b_transposed:
        return {**made, "backend": "trtllm"}
    return {**made, "scale_major_mode": "MN" if a_transposed else "K"}


def _group_gemm_init(
    *,
    cum_m: int = 6,
    groups: int = 3,
    n: int = 4096,
    k: int = 7168,
    is_transposed: bool = False,
    groups_plus_1: int = 0,
    m_blocks: int = 0,
    n_blocks: int = 0,
    k_blocks: int = 0,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    g = seeded(seed, device)
    a, a_scale = _operand(g, cum_m, k, rows=1, is_transposed=is_transposed)
    b, b_scale = _operand(g, groups, n, k, rows=128, is_transposed=is_transposed, size=k**-0.5)
    bounds = torch.arange(groups + 1, device=device) * cum_m // groups
    made = {"a": a, "b": b, "a_scale": a_scale, "b_scale": b_scale, "m_indptr": bounds.int()}
    return {**made, "scale_major_mode": "MN" if is_transposed else "K"}


def _group_deepgemm_init(
    *,
    m: int,
    groups: int = 2,
    n: int = 4096,
    k: int = 7168,
    m_blocks: int = 0,
    n_blocks: int = 0,
    k_blocks: int = 0,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    g = seeded(seed, device)
    a, a_scale = _operand(g, m, k, rows=1)
    b, b_scale = _operand(g, groups, n, k, rows=128, size=k**-0.5)
    indices = torch.arange(m, device=device) // 128 % groups
    return {"a": a, "b": b, "a_scale": a_scale, "b_scale": b_scale, "m_indices": indices.int()}


def _batch_deepgemm_init(
    *,
    m: int,
    groups: int = 2,
    n: int = 4096,
    k: int = 7168,
    m_blocks: int = 0,
    n_blocks: int = 0,
    k_blocks: int = 0,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    """Each group has all its rows."""
    g = seeded(seed, device)
    a, a_scale = _operand(g, groups, m, k, rows=1)
    b, b_scale = _operand(g, groups, n, k, rows=128, size=k**-0.5)
    counts = torch.full((groups,), m, dtype=torch.int32, device=device)
    return {"a": a, "b": b, "a_scale": a_scale, "b_scale": b_scale, "masked_m": counts, "expected_m": m}


_WEIGHTS: dict[str, Axis] = {"n": Const("rows of a weight"), "k": Const("length of a sum")}
_BLOCKS: dict[str, Axis] = {
    "m_blocks": Var("blocks of rows of a"),
    "n_blocks": Var("blocks of rows of b"),
    "k_blocks": Var("blocks along k"),
}
_FACTORS = "factors of blocks"


def _blocks(*names: str, is_transposed: bool = False) -> Tensor:
    order = (*names[:-2], names[-1], names[-2]) if is_transposed else names
    return Tensor(order, dtype="float32", description=_FACTORS)


def _out(*names: str) -> Tensor:
    return Tensor(names, param="out", dtype_from="out_dtype", dtype="bfloat16")


def _dense(name: str, reference: Any, a_transposed: bool, b_transposed: bool, rows: int = 1) -> TraceTemplate:
    return TraceTemplate(
        "gemm_fp8",
        axes={"m": Var(), **_WEIGHTS, **_BLOCKS},
        inputs={
            "a": Tensor(("m", "k")),
            "b": Tensor(("n", "k")),
            "a_scale": _blocks("m_blocks", "k_blocks", is_transposed=a_transposed),
            "b_scale": _blocks("n_blocks", "k_blocks", is_transposed=b_transposed),
        },
        outputs={"out": _out("m", "n")},
        name_prefix=name,
        reference=reference,
        init=functools.partial(_dense_init, rows=rows, a_transposed=a_transposed, b_transposed=b_transposed),
        description="Product a @ b.T of fp8 matrices with one scale per block.",
    )


_GROUPWISE = {
    "K": _dense("gemm_fp8_nt_groupwise_k_major", _gemm_fp8_nt_groupwise_k_reference, False, False),
    "MN": _dense("gemm_fp8_nt_groupwise_mn_major", _gemm_fp8_nt_groupwise_mn_reference, True, True),
    None: _dense("gemm_fp8_nt_groupwise_trtllm", _gemm_fp8_nt_groupwise_trtllm_reference, False, True),
}
_BLOCKSCALED = {
    "MN": _dense("gemm_fp8_nt_blockscaled_mn_major", _gemm_fp8_nt_blockscaled_mn_reference, True, True, 128),
    "K": _dense("gemm_fp8_nt_blockscaled_k_major", _gemm_fp8_nt_blockscaled_k_reference, False, False, 128),
}


def _group_gemm(name: str, reference: Any, is_transposed: bool) -> TraceTemplate:
    return TraceTemplate(
        "grouped_gemm_fp8",
        axes={"cum_m": Var("rows of all groups"), "groups": Var(), "groups_plus_1": Var(), **_WEIGHTS, **_BLOCKS},
        inputs={
            "a": Tensor(("cum_m", "k")),
            "b": Tensor(("groups", "n", "k")),
            "a_scale": _blocks("m_blocks", "k_blocks", is_transposed=is_transposed),
            "b_scale": _blocks("groups", "n_blocks", "k_blocks", is_transposed=is_transposed),
            "m_indptr": Tensor(("groups_plus_1",), dtype="int32", description="where the rows of each group begin"),
        },
        outputs={"out": _out("cum_m", "n")},
        name_prefix=name,
        reference=reference,
        init=functools.partial(_group_gemm_init, is_transposed=is_transposed),
        constraints=["groups_plus_1 == groups + 1"],
        description="Product of each group of rows with the fp8 matrix of its group, one scale per block.",
    )


_GROUP_GEMM = {
    "MN": _group_gemm("group_gemm_fp8_nt_groupwise_mn_major", _group_gemm_fp8_nt_groupwise_mn_reference, True),
    "K": _group_gemm("group_gemm_fp8_nt_groupwise_k_major", _group_gemm_fp8_nt_groupwise_k_reference, False),
}


def _by_major(templates: dict[Any, TraceTemplate]) -> TraceDispatch:
    """Choose by the layout of the scales; the first template is that of the default, if any."""
    default = next(iter(templates))

    def choose(scale_major_mode: Any = default, **_: Any) -> TraceTemplate:
        return templates.get(scale_major_mode, templates[default])

    return TraceDispatch(choose, tuple(templates.values()))


gemm_fp8_nt_groupwise_trace = _by_major(_GROUPWISE)
gemm_fp8_nt_blockscaled_trace = _by_major(_BLOCKSCALED)
group_gemm_fp8_nt_groupwise_trace = _by_major(_GROUP_GEMM)

group_deepgemm_fp8_nt_groupwise_trace = TraceTemplate(
    "grouped_gemm_fp8",
    axes={"m": Var("rows of all groups"), "groups": Var(), **_WEIGHTS, **_BLOCKS},
    inputs={
        "a": Tensor(("m", "k")),
        "b": Tensor(("groups", "n", "k")),
        "a_scale": _blocks("m", "k_blocks"),
        "b_scale": _blocks("groups", "n_blocks", "k_blocks"),
        "m_indices": Tensor(("m",), dtype="int32", description="group of each row, the same in each 128 rows"),
    },
    outputs={"out": _out("m", "n")},
    name_prefix="group_deepgemm_fp8_nt_groupwise",
    reference=_group_deepgemm_fp8_nt_groupwise_reference,
    init=_group_deepgemm_init,
    description="Product of each row with the fp8 matrix of its group, rows sorted by group.",
)

batch_deepgemm_fp8_nt_groupwise_trace = TraceTemplate(
    "grouped_gemm_fp8",
    axes={"groups": Var(), "m": Var("rows that a group can have"), **_WEIGHTS, **_BLOCKS},
    inputs={
        "a": Tensor(("groups", "m", "k")),
        "b": Tensor(("groups", "n", "k")),
        "a_scale": _blocks("groups", "m", "k_blocks"),
        "b_scale": _blocks("groups", "n_blocks", "k_blocks"),
        "masked_m": Tensor(("groups",), dtype="int32", description="rows that each group has"),
        "expected_m": Scalar("int32", description="rows that a group has on average"),
    },
    outputs={"out": _out("groups", "m", "n")},
    name_prefix="batch_deepgemm_fp8_nt_groupwise",
    reference=_batch_deepgemm_fp8_nt_groupwise_reference,
    init=_batch_deepgemm_init,
    description="Product of the first rows of each group with the fp8 matrix of the group.",
)
