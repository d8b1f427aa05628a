# SPDX-License-Identifier: Apache-2.0
"""Templates and references of the dense products of ``flashinfer.gemm``: sums in fp32, one rounding at the end.

Those of Blackwell have a file of their own and are gathered here.
"""

from __future__ import annotations

from typing import Any, Optional

import torch

from ..template import Axis, Const, Tensor, TraceTemplate, Var
from .gemm_blackwell import mm_fp4_trace, mm_mxfp8_trace
from .gemm_blocks import spread_scales, to_e4m3_blocks
from .shared import normal, seeded

__all__ = [
    "bmm_bf16_trace",
    "bmm_fp8_trace",
    "fp8_blockscale_gemm_sm90_trace",
    "mm_bf16_trace",
    "mm_fp4_trace",
    "mm_mxfp8_trace",
    "router_gemm_trace",
    "tinygemm_bf16_trace",
]


def _mm_bf16_reference(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: Optional[torch.Tensor] = None,
    out_dtype: torch.dtype = torch.bfloat16,
    **_: Any,
) -> torch.Tensor:
    out = a.float() @ b.float()
    return (out if bias is None else out + bias.float()).to(out_dtype)


def _bmm_bf16_reference(
    A: torch.Tensor, B: torch.Tensor, out_dtype: torch.dtype = torch.bfloat16, **_: Any
) -> torch.Tensor:
    return torch.bmm(A.float(), B.float()).to(out_dtype)


def _bmm_fp8_reference(
    A: torch.Tensor,
    B: torch.Tensor,
    A_scale: torch.Tensor,
    B_scale: torch.Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    **_: Any,
) -> torch.Tensor:
    scale = A_scale.reshape(()) * B_scale.reshape(())
    return (torch.bmm(A.float(), B.float()) * scale).to(out_dtype)


def _fp8_blockscale_gemm_sm90_reference(
    input: torch.Tensor,
    weight: torch.Tensor,
    input_scale: Optional[torch.Tensor] = None,
    weight_scale: Optional[torch.Tensor] = None,
    out_dtype: Optional[torch.dtype] = None,
    **_: Any,
) -> torch.Tensor:
    if input_scale is None:
        input, scales = to_e4m3_blocks(input, 1)
        input_scale = scales.T
    if weight_scale is None:
        weight, weight_scale = to_e4m3_blocks(weight, 128)
    a = input.float() * spread_scales(input_scale.T, *input.shape)
    b = weight.float() * spread_scales(weight_scale, *weight.shape)
    return (a @ b.T).to(torch.bfloat16 if out_dtype is None else out_dtype)


def _tinygemm_bf16_reference(
    input: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor] = None, **_: Any
) -> torch.Tensor:
    out = input.float() @ weight.float().T
    return (out if bias is None else out + bias.float()).to(torch.bfloat16)


def _router_bfloat16_reference(mat_a: torch.Tensor, mat_b: torch.Tensor, **_: Any) -> torch.Tensor:
    return (mat_a.float() @ mat_b.float()).to(torch.bfloat16)


def _router_float32_reference(mat_a: torch.Tensor, mat_b: torch.Tensor, **_: Any) -> torch.Tensor:
    return mat_a.float() @ mat_b.float()


def _router_bfloat16_init(
    *, m: int, n: int = 256, k: int = 7168, device: Any = "cuda", seed: int = 0
) -> dict[str, Any]:
    g = seeded(seed, device)
    out = torch.empty(m, n, dtype=torch.bfloat16, device=device)
    return {"mat_a": normal(g, m, k), "mat_b": normal(g, n, k).T, "out": out}


def _router_float32_init(*, m: int, n: int = 256, k: int = 7168, device: Any = "cuda", seed: int = 0) -> dict[str, Any]:
    g = seeded(seed, device)
    out = torch.empty(m, n, dtype=torch.float32, device=device)
    return {"mat_a": normal(g, m, k), "mat_b": normal(g, n, k).T, "out": out}


def _mm_bf16_init(*, m: int, n: int = 4096, k: int = 7168, device: Any = "cuda", seed: int = 0) -> dict[str, Any]:
    g = seeded(seed, device)
    return {"a": normal(g, m, k), "b": normal(g, n, k).T}


def _bmm_bf16_init(
    *, batch_size: int, m: int, n: int = 512, k: int = 128, device: Any = "cuda", seed: int = 0
) -> dict[str, Any]:
    g = seeded(seed, device)
    return {"A": normal(g, batch_size, m, k), "B": normal(g, batch_size, n, k).mT}


def _bmm_fp8_init(
    *, batch_size: int, m: int, n: int = 4096, k: int = 4096, device: Any = "cuda", seed: int = 0
) -> dict[str, Any]:
    g = seeded(seed, device)
    return {
        "A": normal(g, batch_size, m, k, dtype=torch.float8_e4m3fn),
        "B": normal(g, batch_size, n, k, dtype=torch.float8_e4m3fn).mT,
        "A_scale": torch.full((), 0.5, device=device),
        "B_scale": torch.full((), 0.25, device=device),
        "dtype": torch.bfloat16,
    }


def _fp8_blockscale_gemm_sm90_init(
    *, m: int, n: int = 2112, k: int = 7168, device: Any = "cuda", seed: int = 0
) -> dict[str, Any]:
    g = seeded(seed, device)
    weight, weight_scale = to_e4m3_blocks(normal(g, n, k), 128)
    return {"input": normal(g, m, k), "weight": weight, "weight_scale": weight_scale}


def _tinygemm_bf16_init(*, m: int, n: int = 128, k: int = 2880, device: Any = "cuda", seed: int = 0) -> dict[str, Any]:
    g = seeded(seed, device)
    out = torch.empty(m, n, dtype=torch.bfloat16, device=device)
    return {"input": normal(g, m, k), "weight": normal(g, n, k), "out": out, "bias": normal(g, n)}


_AXES: dict[str, Axis] = {"m": Var("rows of tokens"), "n": Const("output features"), "k": Const("input features")}
_BATCHED: dict[str, Axis] = {"batch_size": Var(), **_AXES}
_OUT = Tensor(("m", "n"), param="out", dtype_from="out_dtype")
_BATCHED_OUT = ("batch_size", "m", "n")

mm_bf16_trace = TraceTemplate(
    "gemm_bf16",
    axes=_AXES,
    inputs={"a": Tensor(("m", "k")), "b": Tensor(("k", "n")), "bias": Tensor(("n",), optional=True)},
    outputs={"out": _OUT},
    name_prefix="mm_bf16",
    reference=_mm_bf16_reference,
    init=_mm_bf16_init,
    description="a @ b + bias.",
)
bmm_bf16_trace = TraceTemplate(
    "gemm_bf16",
    axes=_BATCHED,
    inputs={"A": Tensor(("batch_size", "m", "k")), "B": Tensor(("batch_size", "k", "n"))},
    outputs={"out": Tensor(_BATCHED_OUT, param="out", dtype_from="out_dtype")},
    name_prefix="bmm_bf16",
    reference=_bmm_bf16_reference,
    init=_bmm_bf16_init,
    description="A @ B of each batch entry.",
)
bmm_fp8_trace = TraceTemplate(
    "gemm_fp8",
    axes=_BATCHED,
    inputs={
        "A": Tensor(("batch_size", "m", "k")),
        "B": Tensor(("batch_size", "k", "n")),
        "A_scale": Tensor((), dtype="float32", description="value = code * scale"),
        "B_scale": Tensor((), dtype="float32", description="value = code * scale"),
    },
    outputs={"out": Tensor(_BATCHED_OUT, param="out", dtype_from="dtype")},
    name_prefix="bmm_fp8",
    reference=_bmm_fp8_reference,
    init=_bmm_fp8_init,
    description="(A @ B) * A_scale * B_scale of each batch entry.",
)
fp8_blockscale_gemm_sm90_trace = TraceTemplate(
    "gemm_fp8",
    axes={**_AXES, "k_blocks": Var("blocks of 128 input features"), "scale_rows": Var("rows or blocks of weights")},
    inputs={
        "input": Tensor(("m", "k")),
        "weight": Tensor(("n", "k")),
        "input_scale": Tensor(("k_blocks", "m"), dtype="float32", optional=True),
        "weight_scale": Tensor(("scale_rows", "k_blocks"), dtype="float32", optional=True),
    },
    outputs={"out": Tensor(("m", "n"), param="out", dtype="bfloat16", dtype_from="out_dtype")},
    name_prefix="fp8_blockscale_gemm_sm90",
    reference=_fp8_blockscale_gemm_sm90_reference,
    init=_fp8_blockscale_gemm_sm90_init,
    constraints=["k == 128 * k_blocks"],
    description="input @ weight.T with a scale per 1 x 128 input block and per row or 128 x 128 block of weights.",
)
tinygemm_bf16_trace = TraceTemplate(
    "gemm_bf16",
    axes=_AXES,
    inputs={"input": Tensor(("m", "k")), "weight": Tensor(("n", "k")), "bias": Tensor(("n",), optional=True)},
    outputs={"out": Tensor(("m", "n"), param="out", dtype_from="input")},
    name_prefix="tinygemm_bf16",
    reference=_tinygemm_bf16_reference,
    init=_tinygemm_bf16_init,
    description="input @ weight.T + bias, for few rows.",
)


def router_gemm_trace(name: str, out_dtype: torch.dtype) -> TraceTemplate:
    """Return the template of the product of up to 16 tokens with the router of one published model."""
    is_float = out_dtype is torch.float32

    return TraceTemplate(
        "gemm_bf16",
        axes=_AXES,
        inputs={"mat_a": Tensor(("m", "k")), "mat_b": Tensor(("k", "n"))},
        outputs={"out": Tensor(("m", "n"), param="out", dtype="float32" if is_float else "bfloat16")},
        name_prefix=name,
        reference=_router_float32_reference if is_float else _router_bfloat16_reference,
        init=_router_float32_init if is_float else _router_bfloat16_init,
        description="mat_a @ mat_b, for few rows.",
    )
