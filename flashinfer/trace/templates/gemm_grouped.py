# SPDX-License-Identifier: Apache-2.0
"""Templates and references of products of groups and segments of rows, and of those of ``flashinfer.triton``.

Sums are fp32, rounded once. Rows that belong to no group are zero in a reference; a given ``out`` keeps what it had.
"""

from __future__ import annotations

import itertools
from typing import Any, Optional

import torch

from ..template import Axis, Const, Scalar, Tensor, TraceDispatch, TraceTemplate, Var

__all__ = [
    "grouped_mm_bf16_trace",
    "grouped_mm_fp8_trace",
    "segment_gemm_run_trace",
    "sm_constraint_gemm_descriptor_persistent_trace",
    "sm_constraint_gemm_persistent_trace",
    "sm_constraint_gemm_trace",
]


def _grouped_mm_bf16_reference(
    a: torch.Tensor, b: torch.Tensor, m_indptr: torch.Tensor, out_dtype: torch.dtype = torch.bfloat16, **_: Any
) -> torch.Tensor:
    out = torch.zeros(a.shape[0], b.shape[1], device=a.device)
    for expert, (begin, end) in enumerate(itertools.pairwise(m_indptr.tolist())):
        out[begin:end] = a[begin:end].float() @ b[expert].float().T
    return out.to(out_dtype)


def _grouped_mm_fp8_reference(
    a: torch.Tensor,
    b: torch.Tensor,
    m_indptr: torch.Tensor,
    alpha: Optional[torch.Tensor] = None,
    out_dtype: torch.dtype = torch.bfloat16,
    **_: Any,
) -> torch.Tensor:
    out = _grouped_mm_bf16_reference(a, b, m_indptr, torch.float32)
    return (out if alpha is None else out * alpha).to(out_dtype)


_EXPERTS: dict[str, Axis] = {
    "cum_m": Var("rows of all experts"),
    "experts": Var(),
    "experts_plus_1": Var(),
    "n": Const("rows of a weight"),
    "k": Const("length of a sum"),
}
_EXPERT_INPUTS: dict[str, Tensor] = {
    "a": Tensor(("cum_m", "k"), description="rows sorted by expert"),
    "b": Tensor(("experts", "n", "k")),
    "m_indptr": Tensor(("experts_plus_1",), dtype="int32", description="where the rows of each expert begin"),
}

grouped_mm_bf16_trace = TraceTemplate(
    "grouped_gemm_bf16",
    axes=_EXPERTS,
    inputs=_EXPERT_INPUTS,
    outputs={"out": Tensor(("cum_m", "n"), param="out", dtype_from="out_dtype", dtype="bfloat16")},
    name_prefix="grouped_mm_bf16",
    reference=_grouped_mm_bf16_reference,
    constraints=["experts_plus_1 == experts + 1"],
    description="Product of each expert's rows with its weights.",
)

grouped_mm_fp8_trace = TraceTemplate(
    "grouped_gemm_fp8",
    axes={**_EXPERTS, "one": Const(abbrev="", value=1)},
    inputs={**_EXPERT_INPUTS, "alpha": Tensor(("one",), dtype="float32", optional=True, description="a factor")},
    outputs={"out": Tensor(("cum_m", "n"), param="out", dtype_from="out_dtype", dtype="bfloat16")},
    name_prefix="grouped_mm_fp8",
    reference=_grouped_mm_fp8_reference,
    constraints=["experts_plus_1 == experts + 1"],
    description="Product of each expert's fp8 rows with its fp8 weights.",
)


def _segment_gemm_reference(
    x: torch.Tensor,
    weights: torch.Tensor,
    seg_lens: Optional[torch.Tensor] = None,
    seg_indptr: Optional[torch.Tensor] = None,
    weight_indices: Optional[torch.Tensor] = None,
    out_dtype: Optional[torch.dtype] = None,
    **_: Any,
) -> torch.Tensor:
    if seg_indptr is None:
        assert seg_lens is not None
        bounds = [0, *seg_lens.cumsum(0).tolist()]
    else:
        bounds = seg_indptr.tolist()
    is_fp8 = x.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
    out = torch.zeros(x.shape[0], weights.shape[1], device=x.device)
    for i, (begin, end) in enumerate(itertools.pairwise(bounds)):
        which = i if weight_indices is None else int(weight_indices[i])
        out[begin:end] = x[begin:end].float() @ weights[which].float().T
    return out.to(out_dtype or (torch.bfloat16 if is_fp8 else x.dtype))


def _segment_gemm_row_major_reference(
    x: torch.Tensor,
    weights: torch.Tensor,
    seg_lens: Optional[torch.Tensor] = None,
    seg_indptr: Optional[torch.Tensor] = None,
    weight_indices: Optional[torch.Tensor] = None,
    out_dtype: Optional[torch.dtype] = None,
    **_: Any,
) -> torch.Tensor:
    return _segment_gemm_reference(x, weights.mT, seg_lens, seg_indptr, weight_indices, out_dtype)


def _segment_gemm(name: str, reference: Any, weight: tuple[str, ...], dtype: Optional[str]) -> TraceTemplate:
    return TraceTemplate(
        "segment_gemm",
        axes={
            "total_rows": Var("rows of all segments"),
            "batch_size": Var("segments"),
            "batch_size_plus_1": Var(),
            "num_weights": Var(),
            "N": Const(abbrev="n"),
            "K": Const(abbrev="k"),
        },
        inputs={
            "x": Tensor(("total_rows", "K")),
            "weights": Tensor(weight),
            "seg_lens": Tensor(("batch_size",), dtype="int64", optional=True, description="rows of each segment"),
            "seg_indptr": Tensor(
                ("batch_size_plus_1",), dtype="int64", optional=True, description="wins over seg_lens"
            ),
            "weight_indices": Tensor(("batch_size",), dtype="int64", optional=True),
        },
        outputs={"out": Tensor(("total_rows", "N"), param="out", dtype=dtype)},
        name_prefix=name,
        reference=reference,
        description="Product of each segment of rows with the weights of the segment.",
    )


_COLUMN_MAJOR = (_segment_gemm_reference, ("num_weights", "N", "K"))
_ROW_MAJOR = (_segment_gemm_row_major_reference, ("num_weights", "K", "N"))
#: By the layout of the weights, and whether operands are float8; results of others have the dtype of x.
_SEGMENT = {
    (True, False): _segment_gemm("segment_gemm", *_COLUMN_MAJOR, None),
    (False, False): _segment_gemm("segment_gemm_row_major", *_ROW_MAJOR, None),
    (True, True): _segment_gemm("segment_gemm_fp8", *_COLUMN_MAJOR, "bfloat16"),
    (False, True): _segment_gemm("segment_gemm_fp8_row_major", *_ROW_MAJOR, "bfloat16"),
}


def _is_fp8(x: Any) -> bool:
    return getattr(x, "dtype", None) in (torch.float8_e4m3fn, torch.float8_e5m2)


def _choose_segment(x: Any = None, weight_column_major: Any = True, **_: Any) -> TraceTemplate:
    return _SEGMENT[bool(weight_column_major), _is_fp8(x)]


segment_gemm_run_trace = TraceDispatch(_choose_segment, tuple(_SEGMENT.values()))


def _sm_constraint_gemm_reference(
    a: torch.Tensor,
    b: torch.Tensor,
    c: Optional[torch.Tensor] = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    out_dtype: Optional[torch.dtype] = None,
    **_: Any,
) -> torch.Tensor:
    out = alpha * (a.float() @ b.float())
    if c is not None:
        return (out + beta * c.float() if beta else out).to(c.dtype)
    is_fp8 = a.dtype == torch.float8_e4m3fn
    return out.to(out_dtype or (torch.bfloat16 if is_fp8 else a.dtype))


def _sm_constraint_gemm_nt_reference(
    a: torch.Tensor,
    b: torch.Tensor,
    c: Optional[torch.Tensor] = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    out_dtype: Optional[torch.dtype] = None,
    **_: Any,
) -> torch.Tensor:
    return _sm_constraint_gemm_reference(a, b.mT, c, alpha, beta, out_dtype)


def _sm_constraint(name: str, reference: Any, b: tuple[str, str]) -> TraceDispatch:
    """Return a template for float8, whose result is bfloat16, and one for other operands."""

    def template(prefix: str, dtype: Optional[str]) -> TraceTemplate:
        return TraceTemplate(
            "gemm",
            axes={"m": Var(), "n": Const("columns of the result"), "k": Const("length of a sum")},
            inputs={
                "a": Tensor(("m", "k")),
                "b": Tensor(b),
                "c": Tensor(("m", "n"), optional=True, description="overwritten by the result"),
                "alpha": Scalar(optional=True),
                "beta": Scalar(optional=True),
            },
            outputs={"out": Tensor(("m", "n"), param="c", dtype_from="out_dtype", dtype=dtype)},
            name_prefix=prefix,
            reference=reference,
            description="alpha times the product of two matrices plus beta times a third.",
        )

    plain, fp8 = template(name, None), template(f"{name}_fp8", "bfloat16")
    return TraceDispatch(lambda a=None, **_: fp8 if _is_fp8(a) else plain, (plain, fp8))


sm_constraint_gemm_trace = _sm_constraint("sm_constraint_gemm", _sm_constraint_gemm_reference, ("k", "n"))
sm_constraint_gemm_persistent_trace = _sm_constraint(
    "sm_constraint_gemm_persistent", _sm_constraint_gemm_reference, ("k", "n")
)
sm_constraint_gemm_descriptor_persistent_trace = _sm_constraint(
    "sm_constraint_gemm_descriptor_persistent", _sm_constraint_gemm_nt_reference, ("n", "k")
)
