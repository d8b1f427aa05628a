# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of ``flashinfer.norm``: all of it is bound by memory, so the figure to read is the fraction of peak.

python benchmarks/bench_norm.py [-k rmsnorm] [--device cpu] [--json FILE]
"""

from __future__ import annotations

from typing import Any, Callable, Optional

import torch
import torch.nn.functional as F
from harness import Bench, bf16, case, e4m3, empty, fp16, fp32, grid, main, nbytes, rand

import flashinfer.norm as norm
from flashinfer.testing import Tolerance
from flashinfer.trace.templates import norm as templates
from flashinfer.trace.templates import norm_gated as gated
from flashinfer.trace.templates.norm_block_quant import fused_add_rmsnorm_fp8_block_quant_trace

# A decode batch, one step of a large batch, long prompts of a 7B and of a 400B model, and a width no vector divides.
SHAPES = [(1, 4096), (128, 8192), (16384, 4096), (4096, 16384), (4096, 4099)]
CUDA = [{"batch_size": b, "hidden_size": h, "dtype": bf16} for b, h in SHAPES]
CUDA += grid(batch_size=[16384], hidden_size=[4096], dtype=[fp16])
# Four figures on a CPU: latency of one token, a decode batch, a prompt, the same in fp16.
CPU = [{"batch_size": b, "hidden_size": h, "dtype": bf16} for b, h in [(1, 4096), (128, 8192), (4096, 4096)]]
CPU += grid(batch_size=[4096], hidden_size=[4096], dtype=[fp16])
SMALL_CPU = grid(batch_size=[1024], hidden_size=[4096])
LARGE_CUDA = grid(batch_size=[128, 16384], hidden_size=[4096])
EPS = 1e-6


def _torch_rmsnorm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Run torch's fused kernel if it has one. On the CPU ``F.rms_norm`` is the same sequence of operators."""
    if x.is_cuda:
        return F.rms_norm(x, (x.shape[-1],), w, EPS)
    f = x.float()
    return (f * torch.rsqrt(f.square().mean(-1, keepdim=True) + EPS) * w.float()).to(x.dtype)


def _torch_quant(y: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
    limit = torch.finfo(out.dtype).max
    out.copy_((y.float() / scale).clamp(-limit, limit))


def _rmsnorm(name: str, x: torch.Tensor, enable_pdl: Optional[bool]) -> Bench:
    op, w, out = getattr(norm, name), rand(x.shape[-1], x.dtype), torch.empty_like(x)
    offset = 1 if name.startswith("gemma") else 0
    return Bench(
        run=lambda x, w, out: op(x, w, out=out, enable_pdl=enable_pdl),
        args=(x, w, out),
        baseline=lambda x, w, out: _torch_rmsnorm(x, w + offset if offset else w),
        reference=lambda x, w, out: getattr(templates, f"{name}_trace").reference(x, w, EPS),
        bytes=nbytes(x, w, out),
    )


@case("rmsnorm", cpu=CPU, cuda=CUDA)
def rmsnorm(batch_size: int, hidden_size: int, dtype: torch.dtype, enable_pdl: Optional[bool] = None) -> Bench:
    return _rmsnorm("rmsnorm", rand(batch_size, hidden_size, dtype), enable_pdl)


@case("gemma_rmsnorm", cpu=CPU, cuda=CUDA)
def gemma_rmsnorm(batch_size: int, hidden_size: int, dtype: torch.dtype, enable_pdl: Optional[bool] = None) -> Bench:
    return _rmsnorm("gemma_rmsnorm", rand(batch_size, hidden_size, dtype), enable_pdl)


@case(
    "qk_rmsnorm",  # 65536 x 8 heads: the 524288 rows of 128 that a long prompt's keys have
    cpu=grid(batch_size=[2048], num_heads=[8], head_dim=[128], dtype=[bf16]),
    cuda=grid(batch_size=[64, 65536], num_heads=[8], head_dim=[128], dtype=[bf16]),
)
def qk_rmsnorm(
    batch_size: int, num_heads: int, head_dim: int, dtype: torch.dtype, enable_pdl: Optional[bool] = None
) -> Bench:
    """RMSNorm of every head: 3-D input."""
    return _rmsnorm("rmsnorm", rand(batch_size, num_heads, head_dim, dtype), enable_pdl)


def _fused_add(name: str, batch_size: int, hidden_size: int, dtype: torch.dtype, enable_pdl: Optional[bool]) -> Bench:
    op = getattr(norm, name)
    x, r, w = rand(batch_size, hidden_size, dtype), rand(batch_size, hidden_size, dtype), rand(hidden_size, dtype)
    offset = 1 if name.startswith("gemma") else 0

    def baseline(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> None:
        r += x
        x.copy_(_torch_rmsnorm(r, w + offset if offset else w))

    return Bench(
        run=lambda x, r, w: op(x, r, w, enable_pdl=enable_pdl),
        args=(x, r, w),
        results=(0, 1),
        baseline=baseline,
        reference=lambda x, r, w: getattr(templates, f"{name}_trace").reference(x, r, w, EPS),
        bytes=2 * nbytes(x, r) + nbytes(w),  # both are read and written
    )


@case("fused_add_rmsnorm", cpu=CPU, cuda=CUDA)
def fused_add_rmsnorm(
    batch_size: int, hidden_size: int, dtype: torch.dtype, enable_pdl: Optional[bool] = None
) -> Bench:
    return _fused_add("fused_add_rmsnorm", batch_size, hidden_size, dtype, enable_pdl)


@case("gemma_fused_add_rmsnorm", cpu=CPU, cuda=CUDA)
def gemma_fused_add_rmsnorm(
    batch_size: int, hidden_size: int, dtype: torch.dtype, enable_pdl: Optional[bool] = None
) -> Bench:
    return _fused_add("gemma_fused_add_rmsnorm", batch_size, hidden_size, dtype, enable_pdl)


@case("rmsnorm_quant", cpu=CPU, cuda=CUDA)
def rmsnorm_quant(batch_size: int, hidden_size: int, dtype: torch.dtype, enable_pdl: Optional[bool] = None) -> Bench:
    x, w, out = rand(batch_size, hidden_size, dtype), rand(hidden_size, dtype), empty(batch_size, hidden_size, e4m3)
    return Bench(
        run=lambda out, x, w, s: norm.rmsnorm_quant(out, x, w, s, enable_pdl=enable_pdl),
        args=(out, x, w, torch.full((1,), 0.1)),
        results=(0,),
        baseline=lambda out, x, w, s: _torch_quant(_torch_rmsnorm(x, w), s, out),
        reference=lambda out, x, w, s: templates.rmsnorm_quant_trace.reference(x, w, s, EPS),
        bytes=nbytes(x, w, out),
    )


@case("fused_add_rmsnorm_quant", cpu=CPU, cuda=CUDA)
def fused_add_rmsnorm_quant(
    batch_size: int, hidden_size: int, dtype: torch.dtype, enable_pdl: Optional[bool] = None
) -> Bench:
    x, r = rand(batch_size, hidden_size, dtype), rand(batch_size, hidden_size, dtype)
    w, out = rand(hidden_size, dtype), empty(batch_size, hidden_size, e4m3)

    def baseline(out: torch.Tensor, x: torch.Tensor, r: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> None:
        r += x
        _torch_quant(_torch_rmsnorm(r, w), s, out)

    return Bench(
        run=lambda out, x, r, w, s: norm.fused_add_rmsnorm_quant(out, x, r, w, s, enable_pdl=enable_pdl),
        args=(out, x, r, w, torch.full((1,), 0.1)),
        results=(0, 2),
        baseline=baseline,
        reference=lambda out, x, r, w, s: templates.fused_add_rmsnorm_quant_trace.reference(x, r, w, s, EPS),
        bytes=nbytes(out, x, w) + 2 * nbytes(r),
    )


@case("layernorm", cpu=SMALL_CPU, cuda=LARGE_CUDA)
def layernorm(batch_size: int, hidden_size: int) -> Bench:
    x, gamma, beta = rand(batch_size, hidden_size, bf16), rand(hidden_size, fp32), rand(hidden_size, fp32)
    return Bench(
        run=norm.layernorm,
        args=(x, gamma, beta),
        baseline=lambda x, g, b: F.layer_norm(x, (x.shape[-1],), g.to(x.dtype), b.to(x.dtype), EPS),
        reference=templates.layernorm_trace.reference,
        bytes=2 * nbytes(x) + nbytes(gamma, beta),
    )


@case("layernorm_quant", cpu=SMALL_CPU, cuda=LARGE_CUDA)
def layernorm_quant(batch_size: int, hidden_size: int) -> Bench:
    x, gamma, beta = rand(batch_size, hidden_size, bf16), rand(hidden_size, fp32), rand(hidden_size, fp32)
    out = empty(batch_size, hidden_size, e4m3)
    return Bench(
        run=norm.layernorm_quant,
        args=(out, x, gamma, beta, torch.full((1,), 0.1)),
        results=(0,),
        baseline=lambda out, x, g, b, s: _torch_quant(
            F.layer_norm(x, (x.shape[-1],), g.to(x.dtype), b.to(x.dtype), EPS), s, out
        ),
        reference=lambda out, *inputs: templates.layernorm_quant_trace.reference(*inputs),
        bytes=nbytes(x, gamma, beta, out),
    )


@case("fused_rmsnorm_silu", cpu=[], cuda=grid(batch_size=[128, 16384], hidden_size=[4096], out_dtype=[bf16, e4m3]))
def fused_rmsnorm_silu(batch_size: int, hidden_size: int, out_dtype: torch.dtype) -> Bench:
    x, w, out = rand(batch_size, hidden_size, bf16), rand(hidden_size, bf16), empty(batch_size, hidden_size, out_dtype)
    return Bench(
        run=lambda x, w, out: norm.fused_rmsnorm_silu(x, w, out=out),
        args=(x, w, out),
        baseline=lambda x, w, out: out.copy_(F.silu(_torch_rmsnorm(x, w))),
        reference=lambda x, w, out: templates.fused_rmsnorm_silu_trace.reference(x, w, EPS, out.dtype),
        bytes=nbytes(x, w, out),
    )


@case("fused_add_rmsnorm_fp8_block_quant", cpu=grid(rows=[64]), cuda=grid(rows=[64, 4096], hidden=[7168]))
def fused_add_rmsnorm_fp8_block_quant(rows: int, hidden: int = 7168) -> Bench:
    x, r, y = rand(rows, hidden, bf16), rand(rows, hidden, bf16), empty(rows, hidden, bf16)
    w, out, scale = rand(hidden, bf16), empty(rows, hidden, torch.float8_e4m3fn), empty(hidden // 128, rows, fp32)
    return Bench(
        run=lambda out, scale, y, x, r: norm.fused_add_rmsnorm_fp8_block_quant(out, scale, y, x, r, w),
        args=(out, scale, y, x, r),
        results=(0, 1, 2, 4),
        reference=lambda out, scale, y, x, r: fused_add_rmsnorm_fp8_block_quant_trace.reference(scale, x, r, w),
        bytes=nbytes(out, scale, y, x, r, r),
    )


@case("gated_residual_next_rmsnorm", cpu=grid(rows=[64]), cuda=grid(rows=[64, 4096]))
def gated_residual_next_rmsnorm(rows: int, hidden: int = 8192) -> Bench:
    x, r, out, y = rand(rows, hidden, bf16), rand(rows, hidden), empty(rows, hidden, fp32), empty(rows, hidden, bf16)
    w, alpha, beta = rand(hidden, bf16), rand(hidden), rand(hidden)
    return Bench(
        run=lambda x, r, out, y: norm.gated_residual_next_rmsnorm(x, r, w, alpha, beta, residual_out=out, ffn_input=y),
        args=(x, r, out, y),
        reference=lambda x, r, *_: gated.gated_residual_next_rmsnorm_trace.reference(x, r, w, alpha, beta),
        bytes=nbytes(x, r, out, y),
    )


@case("gated_residual_rmsnorm", cpu=grid(rows=[64]), cuda=grid(rows=[64, 4096]))
def gated_residual_rmsnorm(rows: int, hidden: int = 8192) -> Bench:
    x, r, out = rand(rows, hidden, bf16), rand(rows, hidden), empty(rows, hidden, fp32)
    w, alpha, beta = rand(hidden, bf16), rand(hidden), rand(hidden)
    return Bench(
        run=lambda x, r, out: norm.gated_residual_rmsnorm(x, r, w, alpha, beta, out=out),
        args=(x, r, out),
        reference=lambda x, r, _: gated.gated_residual_rmsnorm_trace.reference(x, r, w, alpha, beta),
        bytes=nbytes(x, r, out),
    )


@case("rmsnorm_sigmoid_gate", cpu=grid(rows=[64]), cuda=grid(rows=[4096]))
def rmsnorm_sigmoid_gate(rows: int, heads: int = 64) -> Bench:
    x, gate = rand(rows, heads, 64, bf16), rand(rows, heads, 64, bf16)
    return Bench(
        run=norm.rmsnorm_sigmoid_gate,
        args=(x, gate),
        results=(0,),
        reference=gated.rmsnorm_sigmoid_gate_trace.reference,
        bytes=nbytes(x, gate, x),
    )


# Diffusion transformers: every token has its own gate, scale and shift, slices of one (batch, seq, 6, hidden) buffer.
DIT_HIDDEN = 3072
DIT_CPU = grid(batch_size=[1], seq_len=[512])
DIT_CUDA = grid(batch_size=[2], seq_len=[256, 4096])


def _dit(name: str, names: tuple[str, ...], batch_size: int, seq_len: int, baseline: Callable[..., Any]) -> Bench:
    template = getattr(templates, f"{name}_trace")
    inputs = template.init(batch_size=batch_size, seq_len=seq_len, device=str(torch.get_default_device()))
    args = tuple(inputs[key] for key in names)
    return Bench(
        run=getattr(norm, name),
        args=args,
        baseline=baseline,
        reference=template.reference,
        bytes=nbytes(args) + 2 * nbytes(inputs["input"]),  # residual_out and norm_out
    )


def _modulate(r: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return r, F.layer_norm(r, (DIT_HIDDEN,), eps=EPS) * (1 + scale) + shift


@case("fused_dit_gate_residual_layernorm_gamma_beta", cpu=DIT_CPU, cuda=DIT_CUDA)
def dit_gate_residual_layernorm_gamma_beta(batch_size: int, seq_len: int) -> Bench:
    def baseline(x: torch.Tensor, r: torch.Tensor, gate: torch.Tensor, g: torch.Tensor, b: torch.Tensor) -> Any:
        r = r + x * gate
        return r, F.layer_norm(r, (DIT_HIDDEN,), g.to(r.dtype), b.to(r.dtype), EPS)

    names = ("input", "residual", "gate", "gamma", "beta")
    return _dit("fused_dit_gate_residual_layernorm_gamma_beta", names, batch_size, seq_len, baseline)


@case("fused_dit_gate_residual_layernorm_scale_shift", cpu=DIT_CPU, cuda=DIT_CUDA)
def dit_gate_residual_layernorm_scale_shift(batch_size: int, seq_len: int) -> Bench:
    names = ("input", "residual", "gate", "scale", "shift")
    return _dit(
        "fused_dit_gate_residual_layernorm_scale_shift", names, batch_size, seq_len,
        lambda x, r, gate, scale, shift: _modulate(r + x * gate, scale, shift),
    )  # fmt: skip


@case("fused_dit_residual_layernorm_scale_shift", cpu=DIT_CPU, cuda=DIT_CUDA)
def dit_residual_layernorm_scale_shift(batch_size: int, seq_len: int) -> Bench:
    names = ("input", "scale", "shift")
    return _dit("fused_dit_residual_layernorm_scale_shift", names, batch_size, seq_len, _modulate)


@case("fused_qk_rmsnorm_rope", cpu=[], cuda=grid(batch_size=[1], seq_len=[4096, 16384], num_heads=[24]))
def fused_qk_rmsnorm_rope(batch_size: int, seq_len: int, num_heads: int) -> Bench:
    """Tokens of a video model: frames of 16 x 16 patches, heads of 128 channels. torch has no comparable function."""
    head_dim, frame = 128, 16 * 16
    qkv = rand(batch_size, seq_len, 3 * num_heads * head_dim, bf16)
    q_weight, k_weight = rand(num_heads * head_dim, bf16), rand(num_heads * head_dim, bf16)
    shape: dict[str, Any] = {
        "ppf": seq_len // frame, "pph": 16, "ppw": 16, "head_dim": head_dim,
        "num_frame_channels": 32, "num_height_channels": 48, "num_width_channels": 48,
        "num_heads_q": num_heads, "num_heads_k": num_heads, "num_heads_v": num_heads,
    }  # fmt: skip
    return Bench(
        run=lambda *inputs: norm.fused_qk_rmsnorm_rope(*inputs, **shape),
        args=(qkv, q_weight, k_weight),
        reference=lambda *inputs: templates.fused_qk_rmsnorm_rope_trace.reference(*inputs, **shape),
        # The norm is rounded to bf16 before the rotation: one step of a large element (2^-6 at 4) reaches its partner.
        tolerance=Tolerance(1e-2, 4e-2),
        bytes=2 * nbytes(qkv) + nbytes(q_weight, k_weight),
    )


if __name__ == "__main__":
    main()
