# SPDX-License-Identifier: Apache-2.0
"""Level 5 of the API log while a CUDA graph is captured: a kernel prints the statistics at each replay."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from flashinfer import api_logging
from flashinfer._runtime import api_log_stats
from flashinfer._runtime.api_log_stats import deferred_statistics

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SKIPPED = "[statistics skipped: CUDA graph capture in progress]"


def test_ids_and_what_the_kernel_gets(monkeypatch):
    launched = []
    monkeypatch.setattr(api_log_stats, "_is_served", lambda tensor: True)
    x = torch.ones(3, requires_grad=True)
    texts = [deferred_statistics(x, lambda tensor, number: launched.append((tensor, number))) for _ in range(2)]
    ids = [int(re.fullmatch(r"\[stats deferred to GPU kernel: id=(\d+)\]", text)[1]) for text in texts]
    assert ids[1] == ids[0] + 1 and [number for _, number in launched] == ids
    assert all(tensor.data_ptr() == x.data_ptr() and not tensor.requires_grad for tensor, _ in launched)


def test_what_is_skipped():
    def kernel(tensor, number):
        raise AssertionError("no kernel reads it")

    assert deferred_statistics(torch.ones(2), kernel) == SKIPPED  # a host tensor
    assert deferred_statistics(torch.ones(2), None) == SKIPPED


def test_a_launch_that_fails_is_a_text(monkeypatch):
    monkeypatch.setattr(api_log_stats, "_is_served", lambda tensor: True)
    text = deferred_statistics(torch.ones(2), lambda tensor, number: 1 / 0)
    assert text == "[statistics unavailable: ZeroDivisionError: division by zero]"


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_there_is_no_kernel_without_a_gpu():
    assert api_logging._get_api_log_stats_kernel() is None


CAPTURE = """
    import torch
    from flashinfer.api_logging import _get_api_log_stats_kernel, flashinfer_api

    assert _get_api_log_stats_kernel() is not None and not torch.cuda.is_initialized()

    @flashinfer_api
    def op(*tensors):
        return None

    values = [-1.5, float("nan"), 4.5, float("inf")]
    kinds = (torch.float32, torch.float16, torch.bfloat16)
    floats = [torch.tensor(values, device="cuda", dtype=dtype) for dtype in kinds]
    integers = [torch.arange(2000, device="cuda", dtype=dtype) for dtype in (torch.int32, torch.int64)]
    small = torch.full((3,), 200, device="cuda", dtype=torch.uint8)
    others = [floats[0][::2], torch.ones(2, device="cuda", dtype=torch.float64), torch.ones(2)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op(*floats, *integers, small, *others)
    graph.replay()
    floats[0][0] = 2.5
    graph.replay()
    torch.cuda.synchronize()
"""


@needs_cuda
def test_each_replay_prints_a_line_per_tensor(tmp_path):
    log = tmp_path / "log"
    variables = {
        "FLASHINFER_LOGLEVEL": "5",
        "FLASHINFER_LOGDEST": str(log),
        "PYTHONPATH": os.pathsep.join([str(Path(api_logging.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-c", textwrap.dedent(CAPTURE)]
    run = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    text = log.read_text().partition("Output value:")[0]
    ids = re.findall(r"\[stats deferred to GPU kernel: id=(\d+)", text)
    assert len(ids) == 6 and text.count(SKIPPED) == 3 and "min=" not in text
    lines = [line for line in run.stdout.splitlines() if line.startswith("[flashinfer stats] ")]
    first, second = [line for line in lines if f" id={ids[0]} " in line]
    assert first == f"[flashinfer stats] id={ids[0]} numel=4 min=-1.500000 max=4.500000 mean=1.500000 nan=1 inf=1"
    assert second == f"[flashinfer stats] id={ids[0]} numel=4 min=2.500000 max=4.500000 mean=3.500000 nan=1 inf=1"
    expected = [
        *["numel=4 min=-1.500000 max=4.500000 mean=1.500000 nan=1 inf=1"] * 2,
        *["numel=2000 min=0.000000 max=1999.000000 mean=999.500000 nan=0 inf=0"] * 2,
        "numel=3 min=200.000000 max=200.000000 mean=200.000000 nan=0 inf=0",
    ]
    for number, values in zip(ids[1:], expected, strict=True):
        assert lines.count(f"[flashinfer stats] id={number} {values}") == 2
