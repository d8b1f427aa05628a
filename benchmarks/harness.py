# SPDX-License-Identifier: Apache-2.0
"""Benchmark cases: the registry that ``bench_<stem>.py`` files fill and ``flashinfer_benchmark.py`` walks.

    @case("clamp", grid(rows=[1, 4096], cols=[4096, 16384], dtype=[bf16]))
    def clamp(rows, cols, dtype):
        x, y = rand(rows, cols, dtype), empty(rows, cols, dtype)
        return Bench(run=lambda: flashinfer.clamp(x, -1, 1, out=y), baseline=lambda: torch.clamp(x, -1, 1, out=y),
                     bytes=nbytes(x, y))

A case builds its tensors and says what to run; ``measure.py`` owns warm-up, cold cache, median and peak, ``report.py``
the printing. Every file runs on its own: ``python benchmarks/bench_norm.py -k rmsnorm --device cpu --json out.json``.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import sys
from pathlib import Path
from typing import Any, Callable, Iterable, Optional, Sequence

import measure
import report
import torch
from case import Bench, Case, Point, Run

from flashinfer.testing import count_bytes as nbytes

__all__ = [
    "CASES", "Bench", "Case", "Run", "bf16", "case", "e4m3", "empty", "fp16", "fp32", "grid", "load_cases", "main",
    "nbytes", "rand",
]  # fmt: skip

bf16, fp16, fp32, e4m3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn

CASES: dict[str, Case] = {}


def grid(**axes: Iterable[Any]) -> list[Point]:
    """Return all combinations of the axes, the last one varying fastest. Concatenate grids with ``+``."""
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def case(
    name: str,
    points: Sequence[Point] = (),
    *,
    cpu: Optional[Sequence[Point]] = None,
    cuda: Optional[Sequence[Point]] = None,
) -> Callable[[Callable[..., Bench]], Callable[..., Bench]]:
    """Register a build function under ``name``.

    Parameters
    ----------
    name : str
        Name of the routine: that of the API function, if there is one.
    points : list of dict
        Arguments of the build function, for every device.
    cpu, cuda : list of dict, optional
        Points of that device, which replace ``points``; ``[]`` if the op does not run on the device.
    """

    def register(build: Callable[..., Bench]) -> Callable[..., Bench]:
        if name in CASES and CASES[name].build.__module__ != build.__module__:
            raise ValueError(f"case: name is {name!r}, expected one that {CASES[name].build.__module__} has not taken")
        per_device = {"cpu": points if cpu is None else cpu, "cuda": points if cuda is None else cuda}
        CASES[name] = Case(name, build, {device: list(chosen) for device, chosen in per_device.items()})
        return build

    return register


def _shape_and_dtype(spec: Sequence[Any]) -> tuple[tuple[int, ...], torch.dtype]:
    return (tuple(spec[:-1]), spec[-1]) if isinstance(spec[-1], torch.dtype) else (tuple(spec), fp32)


def rand(*spec: Any) -> torch.Tensor:
    """Normal random numbers on the case's device: ``rand(rows, cols, dtype)``."""
    shape, dtype = _shape_and_dtype(spec)
    return torch.randn(shape).to(dtype)


def empty(*spec: Any) -> torch.Tensor:
    """Uninitialised memory on the case's device: ``empty(rows, cols, dtype)``."""
    shape, dtype = _shape_and_dtype(spec)
    return torch.empty(shape, dtype=dtype)


def load_cases() -> dict[str, Case]:
    """Import every ``bench_*.py`` beside this file and return what they registered."""
    folder = Path(__file__).parent
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    for path in sorted(folder.glob("bench_*.py")):
        importlib.import_module(path.stem)
    return CASES


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def selected(cases: Iterable[Case], words: str) -> list[Case]:
    """Cases whose name contains one of the comma-separated words; all for an empty string."""
    wanted = [word for word in words.split(",") if word]
    return [c for c in cases if not wanted or any(word in c.name for word in wanted)]


def positive(text: str) -> int:
    """Parse a positive number of runs."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of runs, expected 1 or more")
    return int(text)


def main(argv: Optional[Sequence[str]] = None) -> list[Any]:
    """Command line of a single ``bench_<stem>.py``: run the cases registered so far, a line each."""
    parser = argparse.ArgumentParser(description="Benchmark of one family; flashinfer_benchmark.py has more options.")
    parser.add_argument("-k", default="", metavar="WORDS", help="comma list; a case runs if its name contains one")
    parser.add_argument("--device", default=default_device(), choices=["cpu", "cuda"])
    parser.add_argument("--json", metavar="FILE", help="also write the results there")
    parser.add_argument("--num_iters", type=positive, help="timed iterations; default: what fits the time budget")
    parser.add_argument("--cuda_graph", action="store_true", help="time inside a CUDA graph instead of with events")
    args = parser.parse_args(argv)
    cases = selected(CASES.values(), args.k)
    if not cases:
        parser.error(f"-k is {args.k!r}, expected a part of one of {', '.join(CASES)}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device is cuda, expected cpu (torch sees no GPU)")
    if args.json and (Path(args.json).is_dir() or not Path(args.json).parent.is_dir()):
        parser.error(f"--json is {args.json}, expected a file in a folder that exists")

    settings = measure.Settings(device=args.device, num_iters=args.num_iters, cuda_graph=args.cuda_graph)
    report.print_header(settings)
    results = []
    for chosen in cases:
        if not chosen.points[args.device]:
            print(f"{chosen.name}: no {args.device} kernel, skipped")
        for point in chosen.points[args.device]:
            bench = chosen.make(args.device, point)
            results.append(measure.measure(chosen.name, point, bench, settings))
            print(report.line(results[-1]), flush=True)
            del bench  # the next point may need the memory
    if args.json:
        report.write_json(args.json, settings, results)
    return results
