# SPDX-License-Identifier: Apache-2.0
"""Templates and references of products whose kernels need a Blackwell GPU: a definition runs none."""

from __future__ import annotations

from typing import Any, Optional

import torch

from ..template import Axis, Const, Scalar, Tensor, TraceTemplate, Var
from .quantization_blocks import dequantize, e2m1_values, mxfp8_blocks, padded_scales, random_bytes, scale_values
from .shared import normal, seeded

__all__ = ["bmm_mxfp8_trace", "mm_bf16_fp4_cudnn_trace", "mm_fp4_trace", "mm_mxfp8_trace"]


def _mm_fp4_reference(
    a: torch.Tensor,
    b: torch.Tensor,
    a_descale: torch.Tensor,
    b_descale: torch.Tensor,
    alpha: Optional[torch.Tensor] = None,
    out_dtype: torch.dtype = torch.bfloat16,
    block_size: int = 16,
    use_8x4_sf_layout: bool = False,
    use_nvfp4: bool = True,
    **_: Any,
) -> torch.Tensor:
    """Scales of ``a`` are in tiles of 128 x 4, or of 8 x 4 on request, those of ``b`` always in tiles of 128 x 4."""
    x = dequantize(e2m1_values(a), scale_values(a_descale, use_nvfp4), block_size, 1 if use_8x4_sf_layout else 0)
    y = dequantize(e2m1_values(b.T), scale_values(b_descale, use_nvfp4), block_size, 0)
    out = x @ y.T
    return (out if alpha is None else out * alpha.reshape(())).to(out_dtype)


def _mm_mxfp8_reference(
    a: torch.Tensor,
    b: torch.Tensor,
    a_descale: torch.Tensor,
    b_descale: torch.Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    use_8x4_sf_layout: bool = False,
    **_: Any,
) -> torch.Tensor:
    x = dequantize(a.float(), scale_values(a_descale, False), 32, 1 if use_8x4_sf_layout else 0)
    y = dequantize(b.T.float(), scale_values(b_descale, False), 32, 0)
    return (x @ y.T).to(out_dtype)


def _bmm_mxfp8_reference(
    A: torch.Tensor,
    B: torch.Tensor,
    A_scale: torch.Tensor,
    B_scale: torch.Tensor,
    dtype: torch.dtype = torch.bfloat16,
    **_: Any,
) -> torch.Tensor:
    """Scales of each matrix are in tiles of 128 x 4, one matrix after another."""
    x_scales, y_scales = (scale_values(s, False).reshape(A.shape[0], -1) for s in (A_scale, B_scale))
    products = [
        dequantize(A[i].float(), x_scales[i], 32, 0) @ dequantize(B[i].T.float(), y_scales[i], 32, 0).T
        for i in range(A.shape[0])
    ]
    return torch.stack(products).to(dtype)


def _mm_bf16_fp4_reference(
    a: torch.Tensor,
    b: torch.Tensor,
    b_descale: torch.Tensor,
    alpha: Optional[torch.Tensor] = None,
    out_dtype: torch.dtype = torch.bfloat16,
    block_size: int = 16,
    **_: Any,
) -> torch.Tensor:
    """Scales of ``b`` are in tiles of 128 x 4: e4m3 for 16 values, powers of two for 32."""
    y = dequantize(e2m1_values(b.T), scale_values(b_descale, block_size == 16), block_size, 0)
    out = a.float() @ y.T
    return (out if alpha is None else out * alpha.reshape(())).to(out_dtype)


def _fp4_operand(rows: int, k: int, device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    scales = random_bytes(rows, k // 16, device=device, low=40, high=72)  # e4m3 from 0.25 to 4
    return random_bytes(rows, k // 2, device=device), padded_scales(scales, 0)


def _mm_fp4_init(
    *,
    M: int,
    N: int = 4096,
    K: int = 4096,
    one: int = 0,
    A_scale_size: int = 0,
    B_scale_size: int = 0,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    torch.manual_seed(seed)
    a, a_descale = _fp4_operand(M, 2 * K, device)
    b, b_descale = _fp4_operand(N, 2 * K, device)
    alpha = torch.full((1,), 0.125, device=device)
    return {"a": a, "b": b.T, "a_descale": a_descale, "b_descale": b_descale, "alpha": alpha}


def _mm_mxfp8_init(
    *,
    M: int,
    N: int = 4096,
    K: int = 4096,
    A_scale_size: int = 0,
    B_scale_size: int = 0,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    g = seeded(seed, device)
    a, a_scales = mxfp8_blocks(normal(g, M, K))
    b, b_scales = mxfp8_blocks(normal(g, N, K))
    return {
        "a": a.view(torch.float8_e4m3fn),
        "b": b.view(torch.float8_e4m3fn).T,
        "a_descale": padded_scales(a_scales, 0),
        "b_descale": padded_scales(b_scales, 0),
    }


def _bmm_mxfp8_init(
    *,
    batch_size: int,
    M: int = 128,
    N: int = 4096,
    K: int = 4096,
    A_scale_size: int = 0,
    B_scale_size: int = 0,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    g = seeded(seed, device)

    def operand(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        made = [mxfp8_blocks(normal(g, rows, K)) for _ in range(batch_size)]
        scales = torch.cat([padded_scales(scale, 0) for _, scale in made])
        return torch.stack([x for x, _ in made]).view(torch.float8_e4m3fn), scales

    (a, a_scale), (b, b_scale) = operand(M), operand(N)
    return {"A": a, "B": b.mT, "A_scale": a_scale, "B_scale": b_scale}


def _mm_bf16_fp4_init(
    *, M: int, N: int = 4096, K: int = 2048, B_scale_size: int = 0, device: Any = "cuda", seed: int = 0
) -> dict[str, Any]:
    torch.manual_seed(seed)
    b, b_descale = _fp4_operand(N, 2 * K, device)
    a = normal(seeded(seed, device), M, 2 * K)
    return {"a": a, "b": b.T, "b_descale": b_descale, "alpha": torch.full((1,), 0.125, device=device)}


_SCALES: dict[str, Axis] = {"A_scale_size": Var("scales of a, in tiles"), "B_scale_size": Var("scales of b, in tiles")}
_OUT = Tensor(("M", "N"), param="out", dtype_from="out_dtype", dtype="bfloat16")

mm_fp4_trace = TraceTemplate(
    "gemm_fp4",
    axes={
        "M": Var("rows of tokens"),
        "N": Const("output features", abbrev="n"),
        "K": Const("pairs of input features", abbrev="k"),
        "one": Var(),
        **_SCALES,
    },
    inputs={
        "a": Tensor(("M", "K"), dtype="uint8", description="two e2m1 values in a byte"),
        "b": Tensor(("K", "N"), dtype="uint8", description="column-major"),
        "a_descale": Tensor(("A_scale_size",), dtype="uint8", unread=True),
        "b_descale": Tensor(("B_scale_size",), dtype="uint8", unread=True),
        "alpha": Tensor((), dtype="float32", optional=True),
        "block_size": Scalar("int32", optional=True),
        "use_8x4_sf_layout": Scalar("bool", optional=True),
        "use_nvfp4": Scalar("bool", optional=True),
    },
    outputs={"out": _OUT},
    name_prefix="mm_fp4",
    reference=_mm_fp4_reference,
    init=_mm_fp4_init,
    description="a @ b * alpha of e2m1 values with e4m3 scales for 16, or powers of two for 32.",
)
mm_mxfp8_trace = TraceTemplate(
    "gemm_mxfp8",
    axes={
        "M": Var("rows of tokens"),
        "N": Const("output features", abbrev="n"),
        "K": Const("input features", abbrev="k"),
        **_SCALES,
    },
    inputs={
        "a": Tensor(("M", "K")),
        "b": Tensor(("K", "N"), description="column-major"),
        "a_descale": Tensor(("A_scale_size",), dtype="uint8", unread=True),
        "b_descale": Tensor(("B_scale_size",), dtype="uint8", unread=True),
        "use_8x4_sf_layout": Scalar("bool", optional=True),
    },
    outputs={"out": _OUT},
    name_prefix="mm_mxfp8",
    reference=_mm_mxfp8_reference,
    init=_mm_mxfp8_init,
    description="a @ b of e4m3 values with a power of two for 32 of them.",
)
bmm_mxfp8_trace = TraceTemplate(
    "bmm_mxfp8",
    axes={
        "batch_size": Var(),
        "M": Var("rows of tokens"),
        "N": Const("output features", abbrev="n"),
        "K": Const("input features", abbrev="k"),
        **_SCALES,
    },
    inputs={
        "A": Tensor(("batch_size", "M", "K")),
        "B": Tensor(("batch_size", "K", "N"), description="column-major"),
        "A_scale": Tensor(("A_scale_size",), dtype="uint8", unread=True),
        "B_scale": Tensor(("B_scale_size",), dtype="uint8", unread=True),
    },
    outputs={"out": Tensor(("batch_size", "M", "N"), param="out", dtype_from="dtype", dtype="bfloat16")},
    name_prefix="bmm_mxfp8",
    reference=_bmm_mxfp8_reference,
    init=_bmm_mxfp8_init,
    description="A @ B of each pair of e4m3 matrices with a power of two for 32 values.",
)
mm_bf16_fp4_cudnn_trace = TraceTemplate(
    "gemm_bf16_fp4",
    axes={
        "M": Var("rows of tokens"),
        "N": Const("output features", abbrev="n"),
        "K": Const("pairs of input features", abbrev="k"),
        "K_values": Const("input features", abbrev=""),
        "B_scale_size": _SCALES["B_scale_size"],
    },
    inputs={
        "a": Tensor(("M", "K_values")),
        "b": Tensor(("K", "N"), dtype="uint8", description="column-major, two e2m1 values in a byte"),
        "b_descale": Tensor(("B_scale_size",), dtype="uint8", unread=True),
        "alpha": Tensor((), dtype="float32", optional=True),
        "block_size": Scalar("int32", optional=True),
    },
    outputs={"out": _OUT},
    name_prefix="mm_bf16_fp4",
    reference=_mm_bf16_fp4_reference,
    init=_mm_bf16_fp4_init,
    description="a @ b * alpha of bfloat16 tokens and e2m1 weights with e4m3 scales for 16.",
)
