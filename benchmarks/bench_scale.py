# SPDX-License-Identifier: Apache-2.0
"""Benchmark of ``flashinfer.scale``, the op of the add-a-kernel tutorial. Prints a table of size, dtype, time and std.

python benchmarks/bench_scale.py
"""

from __future__ import annotations

import torch
from harness import Bench, bf16, case, empty, fp16, fp32, grid, main, nbytes, rand

import flashinfer
from flashinfer.trace.templates.scale import scale_trace


@case("scale", cpu=[], cuda=grid(size=[1024, 1 << 20, 1 << 27], dtype=[fp16, bf16, fp32]))
def scale(size: int, dtype: torch.dtype, factor: float = 3.14) -> Bench:
    x, out = rand(size, dtype), empty(size, dtype)
    return Bench(
        run=lambda x, out: flashinfer.scale(x, factor, out=out),
        args=(x, out),
        baseline=lambda x, out: torch.mul(x, factor, out=out),
        reference=lambda x, out: scale_trace.reference(x, factor),
        bytes=nbytes(x, out),
    )


def print_table() -> None:
    from report import show

    results = main()
    if results:
        print(f"\n{'size':>10}  {'dtype':>5}  {'time (us)':>10}  {'std (us)':>9}")
    for r in results:
        size, dtype = r.point["size"], show(r.point["dtype"])
        print(f"{size:>10}  {dtype:>5}  {r.time.median * 1e6:>10.2f}  {r.time.std * 1e6:>9.2f}")


if __name__ == "__main__":
    print_table()
