# SPDX-License-Identifier: Apache-2.0
"""Templates and references of the dense products of ``flashinfer.gemm``: sums in fp32, one rounding at the end.

Those of Blackwell have a file of their own and are gathered here.
"""

from __future__ import annotations

from typing import Any, Optional

import torch

from ..template import Axis, Const, Tensor, TraceTemplate, Var
from .gemm_blackwell import bmm_mxfp8_trace, mm_bf16_fp4_cudnn_trace, mm_fp4_trace, mm_mxfp8_trace
from .gemm_blocks import spread_scales, to_e4m3_blocks
from .shared import normal, seeded

__all__ = [
    "bmm_bf16_trace",
    "bmm_fp8_trace",
    "bmm_mxfp8_trace",
    "fp8_blockscale_gemm_sm90_trace",
    "mm_bf16_fp4_cudnn_trace",
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
    *, M: int, N: int = 256, K: int = 7168, device: Any = "cuda", seed: int = 0
) -> dict[str, Any]:
    g = seeded(seed, device)
    out = torch.empty(M, N, dtype=torch.bfloat16, device=device)
    return {"mat_a": normal(g, M, K), "mat_b": normal(g, N, K).T, "out": out}


def _router_float32_init(*, M: int, N: int = 256, K: int = 7168, device: Any = "cuda", seed: int = 0) -> dict[str, Any]:
    g = seeded(seed, device)
    out = torch.empty(M, N, dtype=torch.float32, device=device)
    return {"mat_a": normal(g, M, K), "mat_b": normal(g, N, K).T, "out": out}


def _mm_bf16_init(*, M: int, N: int = 4096, K: int = 4096, device: Any = "cuda", seed: int = 0) -> dict[str, Any]:
    g = seeded(seed, device)
    return {"a": normal(g, M, K), "b": normal(g, N, K).T}


def _bmm_bf16_init(
    *, batch_size: int, M: int, N: int = 512, K: int = 128, device: Any = "cuda", seed: int = 0
) -> dict[str, Any]:
    g = seeded(seed, device)
    return {"A": normal(g, batch_size, M, K), "B": normal(g, batch_size, N, K).mT}


def _bmm_fp8_init(
    *, batch_size: int, M: int, N: int = 4096, K: int = 4096, device: Any = "cuda", seed: int = 0
) -> dict[str, Any]:
    g = seeded(seed, device)
    return {
        "A": normal(g, batch_size, M, K, dtype=torch.float8_e4m3fn),
        "B": normal(g, batch_size, N, K, dtype=torch.float8_e4m3fn).mT,
        "A_scale": torch.full((), 0.5, device=device),
        "B_scale": torch.full((), 0.25, device=device),
        "dtype": torch.bfloat16,
    }


def _fp8_blockscale_gemm_sm90_init(
    *, M: int, N: int = 2112, K: int = 7168, K_div_128: int = 0, N_div_128: int = 0, device: Any = "cuda", seed: int = 0
) -> dict[str, Any]:
    g = seeded(seed, device)
    weight, weight_scale = to_e4m3_blocks(normal(g, N, K), 128)
    return {"input": normal(g, M, K), "weight": weight, "weight_scale": weight_scale}


def _tinygemm_bf16_init(*, M: int, N: int = 128, K: int = 2880, device: Any = "cuda", seed: int = 0) -> dict[str, Any]:
    g = seeded(seed, device)
    out = torch.empty(M, N, dtype=torch.bfloat16, device=device)
    return {"input": normal(g, M, K), "weight": normal(g, N, K), "out": out, "bias": normal(g, N)}


_AXES: dict[str, Axis] = {
    "M": Var("rows of tokens"),
    "N": Const("output features", abbrev="n"),
    "K": Const("input features", abbrev="k"),
}
_BATCHED: dict[str, Axis] = {"batch_size": Var(), **_AXES}
_OUT = Tensor(("M", "N"), param="out", dtype_from="out_dtype")
_BATCHED_OUT = ("batch_size", "M", "N")

mm_bf16_trace = TraceTemplate(
    "gemm_bf16",
    axes=_AXES,
    inputs={"a": Tensor(("M", "K")), "b": Tensor(("K", "N")), "bias": Tensor(("N",), optional=True)},
    outputs={"out": _OUT},
    name_prefix="mm_bf16",
    reference=_mm_bf16_reference,
    init=_mm_bf16_init,
    description="a @ b + bias.",
)
bmm_bf16_trace = TraceTemplate(
    "gemm_bf16",
    axes=_BATCHED,
    inputs={"A": Tensor(("batch_size", "M", "K")), "B": Tensor(("batch_size", "K", "N"))},
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
        "A": Tensor(("batch_size", "M", "K")),
        "B": Tensor(("batch_size", "K", "N")),
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
    axes={**_AXES, "K_div_128": Var("blocks of 128 input features"), "N_div_128": Var("rows or blocks of weights")},
    inputs={
        "input": Tensor(("M", "K")),
        "weight": Tensor(("N", "K")),
        "input_scale": Tensor(("K_div_128", "M"), dtype="float32", optional=True),
        "weight_scale": Tensor(("N_div_128", "K_div_128"), dtype="float32", optional=True),
    },
    outputs={"out": Tensor(("M", "N"), param="out", dtype="bfloat16", dtype_from="out_dtype")},
    name_prefix="fp8_blockscale_gemm_sm90",
    reference=_fp8_blockscale_gemm_sm90_reference,
    init=_fp8_blockscale_gemm_sm90_init,
    constraints=["K == 128 * K_div_128"],
    description="input @ weight.T with a scale per 1 x 128 input block and per row or 128 x 128 block of weights.",
)
tinygemm_bf16_trace = TraceTemplate(
    "gemm_bf16",
    axes=_AXES,
    inputs={"input": Tensor(("M", "K")), "weight": Tensor(("N", "K")), "bias": Tensor(("N",), optional=True)},
    outputs={"out": Tensor(("M", "N"), param="out", dtype_from="input")},
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
        inputs={"mat_a": Tensor(("M", "K")), "mat_b": Tensor(("K", "N"))},
        outputs={"out": Tensor(("M", "N"), param="out", dtype="float32" if is_float else "bfloat16")},
        name_prefix=name,
        reference=_router_float32_reference if is_float else _router_bfloat16_reference,
        init=_router_float32_init if is_float else _router_bfloat16_init,
        description="mat_a @ mat_b, for few rows.",
    )
