# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of what a test calls."""

from __future__ import annotations

from typing import Any, Callable

import torch


def capture(step: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of ``step``, and its result, which every replay writes anew."""
    step()  # builds and loads modules, which a capture must not
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    return graph, result
