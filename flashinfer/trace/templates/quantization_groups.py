# SPDX-License-Identifier: Apache-2.0
"""Template and reference of ``flashinfer.quantization.per_token_group_quant_8bit``."""

from __future__ import annotations

from typing import Any, Optional

import torch

from ..notation import template_of_text
from .shared import fp8_check, normal, seeded

__all__ = ["per_token_group_quant_8bit_trace"]


def _reference(
    x: torch.Tensor,
    group_size: int,
    eps: float = 1e-10,
    dst_dtype: Optional[torch.dtype] = None,
    scale_ue8m0: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Layouts of the scales are strides, which values do not have."""
    dtype = dst_dtype or torch.float8_e4m3fn
    largest = float(torch.iinfo(dtype).max if dtype is torch.int8 else torch.finfo(dtype).max)
    groups = x.double().unflatten(-1, (-1, group_size))
    scale = groups.abs().amax(dim=-1).clamp(min=eps) / largest
    if scale_ue8m0:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    values = (groups / scale.unsqueeze(-1)).flatten(-2)
    if dtype is torch.int8:
        values = values.round()
    return values.clamp(-largest, largest).to(dtype), scale.float()


def _init(
    *, num_tokens: int, num_columns: int = 1024, num_groups: int = 8, device: Any = "cuda", seed: int = 0
) -> dict[str, Any]:
    return {"x": normal(seeded(seed, device), num_tokens, num_columns), "group_size": num_columns // num_groups}


per_token_group_quant_8bit_trace = template_of_text(
    "per_token_group_quant_8bit_n{num_columns}",
    "quantization",
    var="num_tokens num_groups",
    inputs="x[num_tokens, num_columns]; group_size:int32; eps:float32?; column_major_scales:bool?;"
    "scale_tma_aligned:bool?; scale_ue8m0:bool?",
    outputs="values[num_tokens, num_columns]:float8_e4m3fn=dst_dtype; scales[num_tokens, num_groups]:float32",
    reference=_reference,
    check=fp8_check,
    init=_init,
    constraints=["num_groups * group_size == num_columns"],
    description="Round columns of a token to 8 bits, with a scale for each group of them.",
)
