# SPDX-License-Identifier: Apache-2.0
"""``--plot``: a roofline where the cases count operations, bars of achieved bandwidth where they only move bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Sequence, Union

from measure import Result, peak_of
from report import device_name, show_point

__all__ = ["plot"]


def _bars(axes: Any, results: Sequence[Result], device: str) -> None:
    """Bandwidth of each case, torch's beside it, the measured copy as a line."""
    peak = peak_of(device).bytes_per_sec / 1e12
    rows = range(len(results))
    axes.barh([y - 0.2 for y in rows], [r.tb_per_sec for r in results], height=0.4, label="flashinfer", color="#2a7f62")
    torch_rates = [r.bytes / r.baseline.median / 1e12 if r.baseline else 0.0 for r in results]
    if any(torch_rates):
        axes.barh([y + 0.2 for y in rows], torch_rates, height=0.4, label="torch", color="#c8c8c8")
    axes.axvline(peak, color="black", linestyle="--", linewidth=1, label=f"measured copy, {peak:.3g} TB/s")
    axes.set_yticks(list(rows), [f"{r.routine} {show_point(r.point)} {r.backend}" for r in results], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("TB/s")
    axes.legend(loc="lower right", fontsize=8)


def _roofline(axes: Any, results: Sequence[Result], device: str) -> None:
    """Operations per second over operations per byte, below the two measured ceilings."""
    import torch

    peak = peak_of(device)
    bandwidth, flops = peak.bytes_per_sec / 1e12, peak.flops_per_sec(torch.bfloat16) / 1e12
    intensity = [r.flops / r.bytes for r in results]
    ridge = flops / bandwidth
    edges = [min([ridge, *intensity]) / 4, ridge, max([ridge, *intensity]) * 4]
    axes.loglog(edges, [min(flops, bandwidth * x) for x in edges], "k--", linewidth=1, label="measured peak")
    for x, result in zip(intensity, results, strict=True):
        axes.plot(x, result.tflops, "o", label=f"{result.routine} {show_point(result.point)} {result.backend}")
    axes.set_xlabel("operations per byte")
    axes.set_ylabel("TFLOP/s")
    axes.legend(fontsize=6)


def plot(path: Union[str, Path], results: Sequence[Result]) -> None:
    """Write a chart of the results to ``path`` (png, svg or pdf)."""
    try:
        import matplotlib
    except ImportError as error:
        raise RuntimeError("--plot needs matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    device = results[0].device
    moving = [r for r in results if r.bytes and not r.flops]
    computing = [r for r in results if r.bytes and r.flops]
    panels = [(_bars, moving, 0.35 * len(moving)), (_roofline, computing, 5.0)]
    panels = [panel for panel in panels if panel[1]]
    if not panels:
        raise RuntimeError("--plot: no case counts bytes, expected at least one")
    heights = [max(height, 1.5) for _, _, height in panels]
    figure, axes = plt.subplots(
        len(panels), 1, figsize=(10, sum(heights) + 1.2), squeeze=False, gridspec_kw={"height_ratios": heights}
    )
    for (draw, chosen, _), ax in zip(panels, axes[:, 0], strict=True):
        draw(ax, chosen, device)
    figure.suptitle(device_name(device))
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
