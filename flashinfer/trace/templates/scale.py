# SPDX-License-Identifier: Apache-2.0
"""Template and reference of ``flashinfer.scale``."""

from __future__ import annotations

from typing import Any

import torch

from ..template import Scalar, Tensor, TraceTemplate, Var, by_rank

__all__ = ["scale_trace"]


def _scale_reference(input: torch.Tensor, factor: float, **_: Any) -> torch.Tensor:
    return (input.float() * factor).to(input.dtype)


def _scale_template(rank: int) -> TraceTemplate:
    axes = [f"dim{i}" for i in range(rank)]
    return TraceTemplate(
        "scale",
        axes={axis: Var() for axis in axes},
        inputs={"input": Tensor(axes), "factor": Scalar()},
        outputs={"out": Tensor(axes, param="out", dtype_from="input")},
        name_prefix=f"scale_{rank}d",
        reference=_scale_reference,
        description="Multiply every element by one factor.",
    )


# An elementwise op takes any rank; definitions need their dimensions named. Past eight nobody has asked.
scale_trace = by_rank("input", {rank: _scale_template(rank) for rank in range(9)})
