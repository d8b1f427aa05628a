# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of ``flashinfer.activation``: bound by memory, so the figure to read is the fraction of peak.

python benchmarks/bench_activation.py [-k silu] [--device cpu] [--json FILE]
"""

from __future__ import annotations

from typing import Any, Callable, Optional

import torch
import torch.nn.functional as F
from harness import Bench, bf16, case, empty, fp16, grid, main, nbytes, rand

import flashinfer.activation as activation
from flashinfer.trace.templates import activation as templates

# Widths of 8B to 70B models: one token, a decode batch, a prompt; and a half width no 16-byte vector divides.
SHAPES = [(1, 14336), (64, 14336), (1024, 4096), (8192, 14336), (8192, 11012)]
CUDA = [{"batch_size": b, "hidden_size": h, "dtype": bf16} for b, h in SHAPES]
CUDA += grid(batch_size=[8192], hidden_size=[14336], dtype=[fp16])
CPU = [{"batch_size": b, "hidden_size": h, "dtype": bf16} for b, h in [(1, 14336), (64, 14336), (1024, 14336)]]
CPU += grid(batch_size=[1024], hidden_size=[14336], dtype=[fp16])


def _act_and_mul(
    name: str,
    torch_act: Callable[[torch.Tensor], torch.Tensor],
    batch_size: int,
    hidden_size: int,
    dtype: torch.dtype,
    enable_pdl: Optional[bool],
) -> Bench:
    op, template = getattr(activation, name), getattr(templates, f"{name}_trace")
    x, out = rand(batch_size, 2 * hidden_size, dtype), empty(batch_size, hidden_size, dtype)

    def baseline(x: torch.Tensor, out: torch.Tensor) -> Any:
        gate, up = x.chunk(2, dim=-1)
        return torch.mul(torch_act(gate), up, out=out)

    return Bench(
        run=lambda x, out: op(x, out=out, enable_pdl=enable_pdl),
        args=(x, out),
        baseline=baseline,
        reference=lambda x, out: template.reference(x),
        bytes=nbytes(x, out),
    )


@case("silu_and_mul", cpu=CPU, cuda=CUDA)
def silu_and_mul(batch_size: int, hidden_size: int, dtype: torch.dtype, enable_pdl: Optional[bool] = None) -> Bench:
    return _act_and_mul("silu_and_mul", F.silu, batch_size, hidden_size, dtype, enable_pdl)


@case("gelu_and_mul", cpu=CPU, cuda=CUDA)
def gelu_and_mul(batch_size: int, hidden_size: int, dtype: torch.dtype, enable_pdl: Optional[bool] = None) -> Bench:
    return _act_and_mul("gelu_and_mul", F.gelu, batch_size, hidden_size, dtype, enable_pdl)


@case("gelu_tanh_and_mul", cpu=CPU, cuda=CUDA)
def gelu_tanh_and_mul(
    batch_size: int, hidden_size: int, dtype: torch.dtype, enable_pdl: Optional[bool] = None
) -> Bench:
    def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x, approximate="tanh")

    return _act_and_mul("gelu_tanh_and_mul", gelu_tanh, batch_size, hidden_size, dtype, enable_pdl)


@case("swiglu", cpu=CPU, cuda=CUDA)
def swiglu(batch_size: int, hidden_size: int, dtype: torch.dtype) -> Bench:
    x, gate, out = (rand(batch_size, hidden_size, dtype) for _ in range(3))
    return Bench(
        run=lambda x, gate, out: activation.swiglu(x, gate, out=out),
        args=(x, gate, out),
        baseline=lambda x, gate, out: torch.mul(x, torch.sigmoid(gate), out=out),
        reference=lambda x, gate, out: templates.swiglu_trace.reference(x, gate),
        bytes=nbytes(x, gate, out),
    )


if __name__ == "__main__":
    main()
