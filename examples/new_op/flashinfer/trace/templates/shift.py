# SPDX-License-Identifier: Apache-2.0
"""Template and reference of ``flashinfer.shift``."""

from __future__ import annotations

from typing import Any

import torch

from ..template import Const, Scalar, Tensor, TraceTemplate, Var

__all__ = ["shift_trace"]


def _shift_reference(input: torch.Tensor, amount: float, **_: Any) -> torch.Tensor:
    return (input.float() + amount).to(input.dtype)


shift_trace = TraceTemplate(
    "shift",
    axes={"num_rows": Var(), "hidden": Const(abbrev="h")},
    inputs={"input": Tensor(("num_rows", "hidden")), "amount": Scalar()},
    outputs={"out": Tensor(("num_rows", "hidden"), param="out", dtype_from="input")},
    name_prefix="shift",
    reference=_shift_reference,
    description="Add one number to every element.",
)
