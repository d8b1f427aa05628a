# SPDX-License-Identifier: Apache-2.0
"""One command line over every benchmark case.

    python benchmarks/flashinfer_benchmark.py --list
    python benchmarks/flashinfer_benchmark.py -R rmsnorm --batch_size 128 --hidden_size 8192 --refcheck -v
    python benchmarks/flashinfer_benchmark.py -R fused_add_rmsnorm --output_path out.csv --plot out.png
    python benchmarks/flashinfer_benchmark.py --testlist lists/nightly.txt --output_path nightly.csv

A routine is a case of a ``bench_<stem>.py``; the arguments of its build function are its flags. Without flags, the
routine runs all its points. With flags, it runs one point: the first point of the device, with the values of the flags.
"""

from __future__ import annotations

import argparse
import difflib
import shlex
import sys
import warnings
from pathlib import Path
from typing import Any, NoReturn, Optional, Sequence

import report
import torch
from harness import Bench, Case, default_device, load_cases, positive
from measure import Result, Settings, check, measure

from flashinfer._runtime.errors import ArgumentError, BackendSupportedError

_FLAG_ALIASES = {"dtype": ("input_dtype", "q_dtype"), "q_len": ("s_qo",), "num_heads": ("num_qo_heads",)}
_SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32",
                 "e4m3": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2",
                 "fp8_e5m2": "float8_e5m2"}  # fmt: skip


class UsageError(Exception):
    """Invalid command line; the text states the expected value."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def _dtype(text: str) -> torch.dtype:
    dtype = getattr(torch, _SHORT_DTYPES.get(text, text), None)
    if not isinstance(dtype, torch.dtype):
        raise argparse.ArgumentTypeError(f"{text!r} is not a dtype, expected one like bfloat16 or fp8_e4m3")
    return dtype


def _bool(text: str) -> bool:
    if text.lower() not in ("0", "1", "true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a truth value, expected true or false")
    return text.lower() in ("1", "true")


def _whole(text: str) -> int:
    if not text.strip().isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a size, expected a whole number")
    return int(text)


def shared_parser() -> argparse.ArgumentParser:
    p = _Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )  # abbreviations would swallow flags of the routine
    p.add_argument("-R", "--routine", help="name of the case, or all; --list shows them")
    p.add_argument("--list", action="store_true", help="print the routines, their devices and flags")
    p.add_argument("--testlist", metavar="FILE", help="run one command per line; # begins a comment line")
    p.add_argument("--device", default=default_device(), choices=["cpu", "cuda"])
    p.add_argument("--backends", nargs="+", default=["auto"], help="backends to time; torch is the baseline")
    p.add_argument("--refcheck", action="store_true", help="compare every backend with the reference first")
    p.add_argument("--allow_output_mismatch", action="store_true", help="report a failed refcheck and go on")
    p.add_argument("--num_iters", "-n", type=positive, default=30)
    p.add_argument("--dry_run_iters", "-d", type=int, default=5)
    p.add_argument("--no_cuda_graph", action="store_true", help="time eager calls instead of a replayed CUDA graph")
    p.add_argument("--use_cuda_events", action="store_true", help="CUDA events even where cupti-python is installed")
    p.add_argument("--use_cupti", action="store_true", help="deprecated: CUPTI is used wherever it is installed")
    p.add_argument("--enable_pdl", action="store_true", help="programmatic dependent launch, in routines that have it")
    p.add_argument("--random_seed", type=int, default=42)
    p.add_argument("--output_path", metavar="CSV", help="write a row per backend")
    p.add_argument("--json", metavar="FILE", help="write all results, in the form of benchmarks/results/")
    p.add_argument("--plot", metavar="FILE", help="write a chart; needs matplotlib")
    p.add_argument("--case_tag", help="text for the case_tag column")
    p.add_argument("--generate_repro_command", action="store_true", help="print the command that repeats each result")
    p.add_argument("-v", "--verbose", action="count", default=0, help="-v: bandwidth and peak; -vv: also the tensors")
    return p


def _first_point(case: Case, device: str) -> dict[str, Any]:
    return (case.points[device] or [p for points in case.points.values() for p in points])[0]


def routine_flags(case: Case) -> list[str]:
    return [f"--{name}" for name in case.parameters if name != "enable_pdl"]


def _how_to_read(name: str, value: Any) -> dict[str, Any]:
    """Return the argparse options of a flag, from its name and the type of ``value``. ``--causal`` alone means true."""
    if name.endswith("dtype"):  # test the name, because some dtype parameters are None by default
        return {"type": _dtype}
    if isinstance(value, bool):
        return {"type": _bool, "nargs": "?", "const": True}
    return {"type": _whole if isinstance(value, int) else type(value)}


def parse_point(case: Case, device: str, flags: Sequence[str]) -> Optional[dict[str, Any]]:
    """Return the point that a routine's flags describe, or ``None`` if there are no flags."""
    if not flags:
        return None
    point = _first_point(case, device)
    parser = _Parser(add_help=False, allow_abbrev=False)
    for name, default in case.parameters.items():
        if name == "enable_pdl":
            continue
        aliases = (alias for alias in _FLAG_ALIASES.get(name, ()) if alias not in case.parameters)
        names = [f"--{n}" for n in (name, *aliases)]
        parser.add_argument(
            *names, dest=name, default=argparse.SUPPRESS, **_how_to_read(name, point.get(name, default))
        )
    try:
        given, unknown = parser.parse_known_args(flags)
    except UsageError as error:
        raise UsageError(f"{case.name}: {error}") from None
    if unknown:
        raise UsageError(
            f"{case.name}: {unknown[0]} is not a flag of this routine, expected {', '.join(routine_flags(case))}"
            " or a shared flag (--help)"
        )
    return {**point, **vars(given)}


def points_to_run(case: Case, args: argparse.Namespace, flags: Sequence[str]) -> list[dict[str, Any]]:
    one = parse_point(case, args.device, flags)
    points = case.points[args.device] if one is None else [one]
    if not case.points[args.device]:
        raise UsageError(f"{case.name}: device is {args.device}, expected {_devices(case)} (it has no other kernel)")
    if args.enable_pdl:
        if "enable_pdl" not in case.parameters:
            warnings.warn(f"{case.name} has no enable_pdl; the flag is ignored", stacklevel=2)
        else:
            points = [{**point, "enable_pdl": True} for point in points]
    return points


def _devices(case: Case) -> str:
    return " or ".join(device for device, points in case.points.items() if points)


def repro_command(case: Case, point: dict[str, Any], backend: str, args: argparse.Namespace) -> str:
    words = ["python", "benchmarks/flashinfer_benchmark.py", "--routine", case.name, "--device", args.device]
    words += ["--backends", backend, "--num_iters", str(args.num_iters), "--dry_run_iters", str(args.dry_run_iters)]
    words += ["--random_seed", str(args.random_seed)]
    for flag in ("refcheck", "allow_output_mismatch", "no_cuda_graph", "use_cuda_events", "enable_pdl"):
        words += [f"--{flag}"] if getattr(args, flag) else []
    for name, value in point.items():
        if name != "enable_pdl" and value is not None:
            words += [f"--{name}", report.show(value)]
    return shlex.join(words)


def _checked(case: Case, bench: Bench, backend: str, args: argparse.Namespace) -> None:
    if bench.reference is None:
        print(f"[WARNING] {case.name} has no reference; --refcheck is skipped")
        return
    try:
        check(bench, bench.backends(args.device)[backend], f"{case.name} {backend}")
    except AssertionError as error:
        if not args.allow_output_mismatch:
            raise
        print(f"[WARNING] output mismatch: {error}")
    else:
        if args.verbose:
            print(f"[REFCHECK] {backend} agrees with the reference")


def settings_of(args: argparse.Namespace) -> Settings:
    cuda_graph, cupti = not args.no_cuda_graph, not args.use_cuda_events
    return Settings(args.device, args.dry_run_iters, args.num_iters, cuda_graph, cupti)


def run_point(case: Case, point: dict[str, Any], args: argparse.Namespace, columns: list[str]) -> list[Result]:
    """Check and time the requested backends on one point, and write one CSV row per backend."""
    settings = settings_of(args)
    bench = case.make(args.device, point, args.random_seed)
    available = bench.backends(args.device)
    if args.verbose:
        print(f"[INFO] {case.name} {report.show_point(point)} on {args.device}, timer: {settings.timer}")
    if args.verbose > 1:
        for i, value in enumerate(bench.args):
            shape = f"{tuple(value.shape)} {report.show(value.dtype)}" if isinstance(value, torch.Tensor) else value
            print(f"[VVERBOSE] argument {i}: {shape}")
    results, rows = [], []
    for asked in args.backends:
        backend = next(iter(available)) if asked == "auto" else asked
        if backend not in available:
            why = bench.missing.get(backend, f"expected one of {list(available)}")
            print(f"[WARNING] {case.name}: backend {backend!r} is skipped, {why}")
            continue
        try:
            # torch is not checked: it rounds intermediate results that the op does not round.
            if args.refcheck and backend != "torch":
                _checked(case, bench, backend, args)
            result = measure(case.name, point, bench, settings, backend)
        except BackendSupportedError as error:
            print(f"[WARNING] {case.name}: backend {backend!r} is skipped on this device: {error}")
            continue
        print(report.perf_line(result), flush=True)
        if args.verbose:
            print(f"[INFO] {report.line(result)}")
        command = repro_command(case, point, asked, args)
        if args.generate_repro_command:
            print(f"[REPRO] {command}")
        flags = ("enable_pdl", "refcheck", "no_cuda_graph", "allow_output_mismatch", "random_seed", "case_tag")
        extra = {name: getattr(args, name) for name in flags}
        extra |= {"backend": asked, "use_cupti": settings.timer == "CUPTI"}
        extra |= {"generate_repro_command": args.generate_repro_command}
        extra |= {"repro_command": command if args.generate_repro_command else None}
        rows.append(report.csv_row(result, settings, extra))
        results.append(result)
    if args.output_path:
        report.append_csv(args.output_path, columns, rows)
    return results


def choose(args: argparse.Namespace, flags: Sequence[str], cases: dict[str, Case]) -> list[tuple[Case, dict[str, Any]]]:
    """Return the cases and points that a command selects. ``flags`` are the flags of the routine."""
    if args.routine is None:
        raise UsageError("--routine is missing, expected a name from --list")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device is cuda, expected cpu (torch sees no GPU)")
    if args.use_cupti:
        warnings.warn("--use_cupti is deprecated: CUPTI is used wherever it is installed", stacklevel=2)
    if args.routine == "all":
        if flags:
            raise UsageError(f"{flags[0]} belongs to a routine, expected none with --routine all")
        chosen = [case for case in cases.values() if case.points[args.device]]
    elif args.routine in cases:
        chosen = [cases[args.routine]]
    else:
        near = difflib.get_close_matches(args.routine, cases) or list(cases)[:1]
        raise UsageError(
            f"--routine is {args.routine!r}, expected all or a name from --list, such as {', '.join(near)}"
        )
    return [(case, point) for case in chosen for point in points_to_run(case, args, flags)]


def run_all(
    asked: Sequence[tuple[Case, dict[str, Any]]], args: argparse.Namespace, cases: dict[str, Case]
) -> list[Result]:
    columns = report.csv_columns(cases.values())
    return [result for case, point in asked for result in run_point(case, point, args, columns)]


def run_testlist(
    path: str, lines: Sequence[str], outer: argparse.Namespace, cases: dict[str, Case]
) -> tuple[list[Result], int]:
    """Run the lines of a test list; a line that fails is reported and the rest run. Returns results and failures."""
    parser, results, failures = shared_parser(), [], 0
    for number, text in enumerate(lines, 1):
        if not text.strip() or text.lstrip().startswith("#"):
            continue
        try:
            args, flags = parser.parse_known_args(shlex.split(text))
            args.output_path = args.output_path or outer.output_path
            results += run_all(choose(args, flags, cases), args, cases)
        except Exception as error:  # any error of one line must not stop the other lines
            failures += 1
            print(f"[ERROR] {path}:{number}: {text.strip()}: {type(error).__name__}: {error}")
    return results, failures


def print_list(cases: dict[str, Case]) -> None:
    for case in cases.values():
        print(f"{case.name}  ({_devices(case)})  {' '.join(routine_flags(case))}")


def check_files(args: argparse.Namespace) -> None:
    """Check that the result files can be written, before the measurements start."""
    for flag in ("output_path", "json", "plot"):
        path = getattr(args, flag)
        if path and (Path(path).is_dir() or not Path(path).parent.is_dir()):
            raise UsageError(f"--{flag} is {path}, expected a file in a folder that exists")
    if args.plot:
        from chart import picture_formats

        suffix = Path(args.plot).suffix.removeprefix(".")
        if suffix not in picture_formats():
            raise UsageError(f"--plot is {args.plot}, expected a name that ends in one of {sorted(picture_formats())}")


def main(argv: Optional[Sequence[str]] = None) -> int:
    try:
        args, flags = shared_parser().parse_known_args(argv)
        cases = load_cases()
        if args.list:
            print_list(cases)
            return 0
        check_files(args)
        if args.testlist and (flags or args.routine):
            word = flags[0] if flags else "--routine"
            raise UsageError(f"{word} belongs to a routine, expected in the lines of --testlist")
        lines = Path(args.testlist).read_text().splitlines() if args.testlist else []
        asked = [] if args.testlist else choose(args, flags, cases)
        if args.output_path:
            # Start with a new file, to which the commands of this run append.
            Path(args.output_path).unlink(missing_ok=True)
        failures = 0
        if args.testlist:
            results, failures = run_testlist(args.testlist, lines, args, cases)
        else:
            results = run_all(asked, args, cases)
    except (UsageError, ArgumentError, OSError) as error:  # OSError: for example a missing test list or a full disk
        print(f"flashinfer_benchmark.py: {error}", file=sys.stderr)
        return 2
    if args.json:
        report.write_json(args.json, settings_of(args), results)
    if args.plot and results:
        from chart import plot

        plot(args.plot, results)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
