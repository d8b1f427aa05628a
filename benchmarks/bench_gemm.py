# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of ``flashinfer.gemm``: few rows are bound by memory (read the bandwidth), many by the tensor cores.

python benchmarks/bench_gemm.py [-k bmm_fp8] [--device cpu] [--json FILE]
"""

from __future__ import annotations

from typing import Any, Callable, Optional

import torch
from harness import Bench, bf16, case, e4m3, empty, grid, main, nbytes, rand

from flashinfer import gemm
from flashinfer.testing import Tolerance
from flashinfer.trace.templates import gemm as templates
from flashinfer.trace.templates.gemm_blocks import to_e4m3_blocks

# Weights of a 7B model and of DeepSeek V3: one token, a decode batch, a prompt.
SHAPES = [(1, 7168, 4096), (64, 7168, 4096), (16, 4096, 14336), (4096, 7168, 4096)]
CUDA = [{"m": m, "n": n, "k": k} for m, n, k in SHAPES]
CPU = [{"m": m, "n": 2048, "k": 2048} for m in (1, 64)] + grid(m=[3], n=[192], k=[256])
# Sums in another order, rounded to bf16; an element near zero is off by the error of a sum of K products.
SUMS = Tolerance(rtol=2**-7, atol=2e-2)


def _flops(m: int, n: int, k: int, batch_size: int = 1) -> int:
    return 2 * batch_size * m * n * k


def _mm(backend: str, pdl: bool) -> Callable[..., Any]:
    return lambda a, b, out: gemm.mm_bf16(a, b.T, pdl=pdl, out=out, out_dtype=out.dtype, backend=backend)


@case("mm_bf16", cpu=CPU, cuda=CUDA)
def mm_bf16(m: int, n: int, k: int, out_dtype: torch.dtype = bf16, enable_pdl: Optional[bool] = None) -> Bench:
    """``cudnn`` is the rule of gemm/decide.py, ``cublaslt`` torch, ``tinygemm`` our kernel."""
    a, b, out = rand(m, k, bf16), rand(n, k, bf16), empty(m, n, out_dtype)
    names = [name for name in ("cudnn", "cublaslt", "tinygemm") if not (enable_pdl and name == "cublaslt")]
    names = [name for name in names if out_dtype is bf16 or name != "tinygemm"]
    return Bench(
        run={name: _mm(name, bool(enable_pdl)) for name in names},
        args=(a, b, out),
        baseline=(lambda a, b, out: torch.mm(a, b.T, out=out)) if out_dtype is bf16 else None,
        reference=lambda a, b, out: templates.mm_bf16_trace.reference(a, b.T, None, out.dtype),
        bytes=nbytes(a, b, out),
        flops=_flops(m, n, k),
        tolerance=SUMS,
    )


@case(
    "bmm_bf16",  # the absorbed projections of MLA: 128 heads, and a batch of prompts
    cpu=grid(batch_size=[16], m=[4], n=[512], k=[128]),
    cuda=grid(batch_size=[128], m=[16, 1024], n=[512], k=[128]),
)
def bmm_bf16(batch_size: int, m: int, n: int, k: int, out_dtype: torch.dtype = bf16) -> Bench:
    a, b, out = rand(batch_size, m, k, bf16), rand(batch_size, n, k, bf16), empty(batch_size, m, n, out_dtype)
    return Bench(
        run={"cudnn": lambda a, b, out: gemm.bmm_bf16(a, b.mT, out=out, out_dtype=out.dtype)},
        args=(a, b, out),
        baseline=(lambda a, b, out: torch.bmm(a, b.mT, out=out)) if out_dtype is bf16 else None,
        reference=lambda a, b, out: templates.bmm_bf16_trace.reference(a, b.mT, out.dtype),
        bytes=nbytes(a, b, out),
        flops=_flops(m, n, k, batch_size),
        tolerance=SUMS,
    )


def _by_torch(api: str, sizes: dict[str, int], m: int, n: int, k: int) -> Bench:
    """On the CPU the reference runs; on Blackwell torch would, which nobody here has measured."""
    template = getattr(templates, f"{api}_trace")
    given = template.init(**sizes, device=torch.get_default_device())
    return Bench(
        run=lambda *args: getattr(gemm, api)(*args),
        args=tuple(given.values()),
        reference=lambda *args: template.reference(*args),
        bytes=nbytes(*given.values()) + 2 * m * n,
        flops=_flops(m, n, k),
        tolerance=SUMS,
    )


@case("mm_fp4", cpu=grid(m=[3], n=[192], k=[256]), cuda=[])
def mm_fp4(m: int, n: int, k: int) -> Bench:
    return _by_torch("mm_fp4", {"M": m, "N": n, "K": k // 2}, m, n, k)


@case("mm_mxfp8", cpu=grid(m=[3], n=[192], k=[256]), cuda=[])
def mm_mxfp8(m: int, n: int, k: int) -> Bench:
    return _by_torch("mm_mxfp8", {"M": m, "N": n, "K": k}, m, n, k)


def _bmm_fp8(backend: str) -> Callable[..., Any]:
    return lambda a, b, scale, out: gemm.bmm_fp8(a, b.mT, scale, scale, out.dtype, out, backend)


def _scaled_mm(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> Any:
    return torch._scaled_mm(a[0], b[0].T, scale, scale, out_dtype=out.dtype, use_fast_accum=True, out=out[0])


@case(
    "bmm_fp8",
    cpu=[{"batch_size": 1, **point} for point in CPU],
    cuda=[{"batch_size": 1, **point} for point in CUDA] + grid(batch_size=[16], m=[1024], n=[4096], k=[4096]),
)
def bmm_fp8(
    batch_size: int,
    m: int,
    n: int,
    k: int,
    input_dtype: torch.dtype = e4m3,
    mat2_dtype: torch.dtype = e4m3,
    out_dtype: torch.dtype = bf16,
) -> Bench:
    a, b = rand(batch_size, m, k, input_dtype), rand(batch_size, n, k, mat2_dtype)
    out, scale = empty(batch_size, m, n, out_dtype), torch.full((), 0.5)
    can_compare = batch_size == 1 and a.is_cuda
    return Bench(
        run={name: _bmm_fp8(name) for name in ("cublas", "cudnn")},
        args=(a, b, scale, out),
        baseline=_scaled_mm if can_compare else None,
        reference=lambda a, b, scale, out: templates.bmm_fp8_trace.reference(a, b.mT, scale, scale, out.dtype),
        bytes=nbytes(a, b, out),
        flops=_flops(m, n, k, batch_size),
        flops_dtype=e4m3,
        tolerance=SUMS,
    )


@case(
    "fp8_blockscale_gemm_sm90",
    cpu=CPU,
    cuda=CUDA + [{"m": m, "n": n, "k": k} for m, n, k in [(4096, 2112, 7168), (128, 24576, 1536), (4096, 32768, 512)]],
)
def fp8_blockscale_gemm_sm90(m: int, n: int, k: int) -> Bench:
    """Quantisation of the activations is part of the time."""
    x, (w, scale) = rand(m, k, bf16), to_e4m3_blocks(rand(n, k, bf16), 128)
    out = empty(m, n, bf16)
    return Bench(
        run=lambda x, w, scale, out: gemm.fp8_blockscale_gemm_sm90(x, w, None, scale, out),
        args=(x, w, scale, out),
        reference=lambda x, w, scale, out: templates.fp8_blockscale_gemm_sm90_trace.reference(x, w, None, scale),
        bytes=nbytes(x, w, scale, out),
        flops=_flops(m, n, k),
        flops_dtype=e4m3,
        tolerance=SUMS,
    )


@case("tinygemm_bf16", cpu=grid(m=[1, 8], n=[128], k=[2880]), cuda=grid(m=[1, 8, 64], n=[128], k=[2880]))
def tinygemm_bf16(m: int, n: int, k: int, enable_pdl: Optional[bool] = None) -> Bench:
    """The router of GPT-OSS."""
    x, w, bias, out = rand(m, k, bf16), rand(n, k, bf16), rand(n, bf16), empty(m, n, bf16)
    return Bench(
        run=lambda x, w, bias, out: gemm.tinygemm_bf16(x, w, out, bias, bool(enable_pdl)),
        args=(x, w, bias, out),
        results=(3,),
        baseline=lambda x, w, bias, out: torch.nn.functional.linear(x, w, bias),
        reference=lambda x, w, bias, out: templates.tinygemm_bf16_trace.reference(x, w, bias),
        bytes=nbytes(x, w, bias, out),
        flops=_flops(m, n, k),
        tolerance=SUMS,
    )


def _router(name: str, k: int, n: int, dtype: torch.dtype) -> None:
    """Declare the case of a router: up to 16 tokens by fixed weights."""

    @case(name, cpu=grid(m=[16]), cuda=grid(m=[1, 16]))
    def build(m: int) -> Bench:
        x, w, out = rand(m, k, bf16), rand(n, k, bf16), empty(m, n, dtype)
        return Bench(
            run=lambda x, w, out: getattr(gemm, name)(x, w.t(), out),
            args=(x, w, out),
            results=(2,),
            baseline=lambda x, w, out: torch.nn.functional.linear(x, w),
            reference=lambda x, w, out: (x.double() @ w.double().t()).to(out.dtype),
            bytes=nbytes(x, w, out),
            flops=_flops(m, n, k),
            tolerance=SUMS,
        )


for _name, _k, _n, _dtype in (
    ("mm_M1_16_K7168_N128", 7168, 128, bf16),
    ("mm_M1_16_K7168_N256", 7168, 256, torch.float32),
    ("mm_M1_16_K6144_N256", 6144, 256, torch.float32),
    ("mm_M1_16_K7168_N256_bf16", 7168, 256, bf16),
    ("mm_M1_16_K7168_N384", 7168, 384, torch.float32),
    ("mm_M1_16_K7168_N384_bf16", 7168, 384, bf16),
    ("mm_M1_16_K7168_N896", 7168, 896, torch.float32),
    ("mm_M1_16_K7168_N896_bf16", 7168, 896, bf16),
):
    _router(_name, _k, _n, _dtype)


if __name__ == "__main__":
    main()
