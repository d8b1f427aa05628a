# SPDX-License-Identifier: Apache-2.0
"""Print and write results: a line per case, JSON, CSV of the unified benchmark, a chart."""

from __future__ import annotations

import csv
import json
import platform
from pathlib import Path
from typing import Any, Iterable, Mapping, Sequence, Union

import torch
from case import Case
from measure import Result, Settings, peak_of

__all__ = ["PERF_COLUMNS", "csv_columns", "line", "perf_line", "print_header", "show", "show_point", "write_json"]

_DTYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32",
    torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2",
}  # fmt: skip

PERF_COLUMNS = ["routine", "median_time", "std_time", "tflops", "tb_per_sec", "backend", "resolved_backend"]
GENERAL_COLUMNS = [
    "device", "timer", "peak_fraction", "speedup_torch", "enable_pdl", "refcheck", "no_cuda_graph", "use_cupti",
    "allow_output_mismatch", "random_seed", "case_tag", "generate_repro_command", "repro_command",
]  # fmt: skip


def show(value: Any) -> str:
    """Format a parameter for printing."""
    return _DTYPES.get(value, str(value)) if isinstance(value, torch.dtype) else str(value)


def show_point(point: Mapping[str, Any]) -> str:
    """Format parameters as ``name=value``. A parameter named ``dtype`` comes last, without its name."""
    named = [f"{k}={show(v)}" for k, v in point.items() if k != "dtype" and v is not None]
    return " ".join([*named, show(point["dtype"])] if "dtype" in point else named)


def device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    model = next((text.split(":", 1)[1].strip() for text in lines if text.startswith("model name")), None)
    return f"{model or platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def print_header(settings: Settings) -> None:
    """Print the device, the timer and the measured copy bandwidth, as a heading of the result lines."""
    bandwidth = peak_of(settings.device).bytes_per_sec
    print(f"# {device_name(settings.device)}; timer: {settings.timer}; peak copy {_rate(bandwidth)}", flush=True)


def _rate(bytes_per_sec: float) -> str:
    return f"{bytes_per_sec / 1e12:.2f} TB/s" if bytes_per_sec >= 1e11 else f"{bytes_per_sec / 1e9:.1f} GB/s"


def line(result: Result) -> str:
    """``rmsnorm rows=4096 cols=16384 bf16   61.3 us   4.38 TB/s  91 % peak   1.00x torch``, what is known of it."""
    parts = [f"{result.routine} {show_point(result.point)}", f"{result.time.median * 1e6:.1f} us"]
    if result.bytes:
        parts.append(_rate(result.bytes / result.time.median))
    if result.flops:
        parts.append(f"{result.tflops:.1f} TFLOP/s")
    if result.fraction is not None:
        parts.append(f"{100 * result.fraction:.0f} % peak")
    if result.speedup is not None:
        parts.append(f"{result.speedup:.2f}x torch")
    return "   ".join(parts)


def perf_line(result: Result) -> str:
    """Format a result as a line of the unified benchmark."""
    return (
        f"[PERF] {result.backend} :: median time {result.time.median * 1e3:.4f} ms; std {result.time.std * 1e3:.4f} ms;"
        f" achieved tflops {result.tflops:.4g} TFLOPs/sec; achieved tb_per_sec {result.tb_per_sec:.4g} TB/sec"
    )


def _row(result: Result) -> dict[str, Any]:
    row: dict[str, Any] = {"routine": result.routine, "backend": result.backend}
    row |= {key: show(value) if isinstance(value, torch.dtype) else value for key, value in result.point.items()}
    row |= {"us": round(result.time.median * 1e6, 2), "std_us": round(result.time.std * 1e6, 2)}
    known = {
        "tb_s": result.tb_per_sec or None,
        "tflops": result.tflops or None,
        "peak_fraction": result.fraction,
        "speedup_torch": result.speedup,
        "host_us": result.host_us,
    }
    return row | {key: round(value, 4) for key, value in known.items() if value is not None}


def write_json(path: Union[str, Path], settings: Settings, results: Sequence[Result]) -> None:
    """Write the results of a device to one file, in the form kept under ``benchmarks/results/``."""
    import flashinfer

    head = {
        "package": flashinfer.__version__,
        "torch": torch.__version__,
        "device": device_name(settings.device),
        "timer": settings.timer,
        "peak_tb_s": round(peak_of(settings.device).bytes_per_sec / 1e12, 3),
    }
    Path(path).write_text(json.dumps({**head, "results": [_row(r) for r in results]}, indent=1) + "\n")


def csv_columns(cases: Iterable[Case]) -> list[str]:
    """Return the CSV columns of all routines: performance, every parameter of every routine, then settings."""
    parameters = dict.fromkeys(name for c in cases for name in c.parameters if name not in GENERAL_COLUMNS)
    return [*PERF_COLUMNS, *parameters, *GENERAL_COLUMNS]


def append_csv(path: Union[str, Path], columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Append rows, after a header if the file is new. Columns without a value stay empty."""
    path = Path(path)
    fresh = not path.exists() or path.stat().st_size == 0
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        if fresh:
            writer.writeheader()
        writer.writerows({key: row[key] for key in columns if row.get(key) is not None} for row in rows)


def csv_row(result: Result, settings: Settings, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return a result as a CSV row. Times are in milliseconds."""
    return {
        "routine": result.routine,
        "median_time": result.time.median * 1e3,
        "std_time": result.time.std * 1e3,
        "tflops": result.tflops,
        "tb_per_sec": result.tb_per_sec,
        "backend": result.backend,
        "resolved_backend": result.backend,
        **{key: show(value) for key, value in result.point.items() if value is not None},
        "device": result.device,
        "timer": settings.timer,
        "peak_fraction": result.fraction,
        "speedup_torch": result.speedup,
        **extra,
    }
