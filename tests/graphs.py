# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of test steps."""

from __future__ import annotations

from typing import Any, Callable

import torch


def capture(step: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Capture ``step``; return the graph and the result, which every replay overwrites."""
    step()  # builds and loads modules, which must not happen during a capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    return graph, result
