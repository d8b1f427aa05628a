# SPDX-License-Identifier: Apache-2.0
"""Compile the norm kernels, check them against torch, time both.

python examples/demo.py      run it twice: the second time the module comes from the cache
"""

from __future__ import annotations

import time

import torch

import flashinfer
from flashinfer.jit import JitSpec, gen_norm_module
from flashinfer.testing import bench_gpu_time, tolerances

DTYPE = torch.bfloat16
EPS = 1e-6


def device_name(device: str) -> str:
    if device == "cuda":
        return f"{torch.cuda.get_device_name()} (cuda)"
    return f"{torch.get_num_threads()} CPU threads, {torch.backends.cpu.get_cpu_capability()} (no GPU found)"


def build(spec: JitSpec) -> str:
    """Build the module unless it is in the cache, and return a line for the report."""
    if spec.is_compiled:
        return "warm: found in the cache, nothing compiled"
    start = time.perf_counter()
    try:
        spec.build()
    except RuntimeError as error:  # no compiler, for example: the text names the remedy, a traceback would hide it
        raise SystemExit(f"demo.py: {error}") from error
    return f"cold: compiled in {time.perf_counter() - start:.1f} s; run again to start warm"


def time_pair(ours, theirs, moved_bytes: int) -> list[tuple[str, float, float]]:
    """Time both functions; return (name, microseconds, GB/s) of each. Both move ``moved_bytes`` bytes."""
    rows = []
    for name, function in (("flashinfer", ours), ("torch", theirs)):
        median, _ = bench_gpu_time(function, dry_run_iters=3, num_iters=11)
        rows.append((name, median * 1e6, moved_bytes / median / 1e9))
    return rows


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    spec = gen_norm_module(device)
    print(f"device   {device_name(device)}")
    print(f"module   {spec.name}: {build(spec)}")
    print(f"library  {spec.get_library_path()}")

    shapes = [(1, 4096), (512, 4096), (4096, 8192)] if device == "cuda" else [(1, 4096), (32, 4096), (512, 8192)]
    for rows, hidden in shapes:
        x = torch.randn(rows, hidden, device=device).to(DTYPE)
        weight = torch.rand(hidden, device=device).to(DTYPE)
        out = torch.empty_like(x)
        flashinfer.rmsnorm(x, weight, EPS, out=out)
        expected = torch.nn.functional.rms_norm(x.float(), (hidden,), weight.float(), EPS)
        rtol, atol = tolerances(DTYPE)
        torch.testing.assert_close(out.float(), expected, rtol=rtol, atol=atol)

        moved_bytes = (2 * x.numel() + weight.numel()) * x.element_size()  # read x and weight, write out
        pair = time_pair(
            lambda x=x, w=weight, out=out: flashinfer.rmsnorm(x, w, EPS, out=out),
            lambda x=x, w=weight: torch.nn.functional.rms_norm(x, (x.shape[1],), w, EPS),
            moved_bytes,
        )
        print(f"\nrmsnorm {rows} x {hidden} {str(DTYPE).removeprefix('torch.')}: agrees with torch")
        for name, microseconds, bandwidth in pair:
            ratio = pair[1][1] / microseconds
            print(f"  {name:<10} {microseconds:9.1f} us  {bandwidth:8.1f} GB/s  {ratio:5.2f}x torch")


if __name__ == "__main__":
    main()
