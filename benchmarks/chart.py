# SPDX-License-Identifier: Apache-2.0
"""``--plot``: a roofline where the cases count operations, bars of achieved bandwidth where they only move bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Sequence, Union

from measure import Result, peak_of
from report import device_name, show_point

__all__ = ["picture_formats", "plot"]


def picture_formats() -> set[str]:
    """Return the file suffixes that matplotlib can write."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise RuntimeError("--plot needs matplotlib: pip install matplotlib") from error
    return set(FigureCanvasBase.get_supported_filetypes())


def _label(result: Result) -> str:
    return f"{result.routine} {show_point(result.point)} {result.backend}"


def _bars(axes: Any, results: Sequence[Result], device: str) -> None:
    """Draw the bandwidth of each case next to that of torch, and the bandwidth of a plain copy as a line."""
    peak = peak_of(device).bytes_per_sec
    unit, name = (1e12, "TB/s") if peak >= 1e11 else (1e9, "GB/s")
    rows = range(len(results))
    rates = [r.bytes / r.time.median / unit for r in results]
    torch_rates = [r.bytes / r.baseline.median / unit if r.baseline else 0.0 for r in results]
    axes.barh([y - 0.2 for y in rows], rates, height=0.4, label="flashinfer", color="#2a7f62")
    if any(torch_rates):
        axes.barh([y + 0.2 for y in rows], torch_rates, height=0.4, label="torch", color="#c8c8c8")
    axes.axvline(
        peak / unit, color="black", linestyle="--", linewidth=1, label=f"measured copy, {peak / unit:.3g} {name}"
    )
    axes.set_yticks(list(rows), [_label(r) for r in results], fontsize=7)
    axes.set_ylim(len(results) + 0.9, -0.6)  # the first case on top, room for the legend below the last
    axes.set_xlabel(name)
    axes.legend(loc="lower right", fontsize=8)


def _roofline(axes: Any, results: Sequence[Result], device: str) -> None:
    """Draw operations per second over operations per byte, with the measured peaks of bandwidth and operations."""
    import torch

    peak = peak_of(device)
    bandwidth, flops = peak.bytes_per_sec / 1e12, peak.flops_per_sec(torch.bfloat16) / 1e12
    intensity = [r.flops / r.bytes for r in results]
    ridge = flops / bandwidth
    edges = [min([ridge, *intensity]) / 4, ridge, max([ridge, *intensity]) * 4]
    axes.loglog(edges, [min(flops, bandwidth * x) for x in edges], "k--", linewidth=1, label="measured peak")
    for x, result in zip(intensity, results, strict=True):
        axes.plot(x, result.tflops, "o", label=_label(result))
    axes.set_xlabel("operations per byte")
    axes.set_ylabel("TFLOP/s")
    axes.legend(fontsize=6)


def plot(path: Union[str, Path], results: Sequence[Result]) -> None:
    """Write a chart of the results to ``path`` (png, svg or pdf)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    device = results[0].device
    ours = [r for r in results if r.bytes and r.backend != "torch"]  # the baseline is drawn beside each of them
    moving, computing = [r for r in ours if not r.flops], [r for r in ours if r.flops]
    panels = [(_bars, moving, 0.35 * (len(moving) + 1.5)), (_roofline, computing, 5.0)]
    panels = [panel for panel in panels if panel[1]]
    if not panels:
        raise RuntimeError("--plot: no case counts bytes, expected at least one")
    heights = [max(height, 1.5) for _, _, height in panels]
    figure, axes = plt.subplots(
        len(panels), 1, figsize=(10, sum(heights) + 1.2), squeeze=False, gridspec_kw={"height_ratios": heights}
    )
    for (draw, chosen, _), ax in zip(panels, axes[:, 0], strict=True):
        draw(ax, chosen, device)
    axes[0, 0].set_title(device_name(device))
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
