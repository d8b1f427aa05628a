# SPDX-License-Identifier: Apache-2.0
"""The autotuner on dense products: torch or our kernel, and the tile of our SM90 kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import flashinfer
from flashinfer import utils
from flashinfer._runtime.requirements import SuitableBackends
from flashinfer.autotuner import AutoTuner, autotune
from flashinfer.gemm import tiles, tuning
from flashinfer.gemm.launch import is_sm90
from flashinfer.jit.gemm import tiles_of
from flashinfer.testing import timers
from flashinfer.trace.templates import gemm as templates

from .stand_ins import on_cuda

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
CLOSE = {"rtol": 2**-7, "atol": 2**-7}

#: Tunes one size, and tells which runners and tactics the file has for it.
PROGRAM = """
import sys
from types import SimpleNamespace
import torch
import flashinfer

path, rows = sys.argv[1], int(sys.argv[2])
a, b = torch.randn(rows, 64).bfloat16(), torch.randn(32, 64).bfloat16().T
with flashinfer.autotune(cache=path, tuning_buckets=(rows,)):
    flashinfer.mm_bf16(a, b, backend="auto")
"""


@pytest.fixture(autouse=True)
def tuner():
    found = AutoTuner.get()
    found.clear_cache()
    yield found
    found.clear_cache()


def operands(rows: int, device, k: int = 256, n: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and K-major weights, which the SM90 kernels take."""
    a = torch.randn(rows, k, device=device).to(torch.bfloat16)
    return a, torch.randn(n, k, device=device).to(torch.bfloat16).T


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
@pytest.mark.parametrize("m, k", [(1, 64), (16, 4096), (64, 7168), (300, 4096), (8192, 4096)])
def test_tactics_are_tiles_that_exist(kind, m, k):
    known = tiles_of(kind)
    found = tiles.tile_tactics(kind, m, k)
    assert found and len(set(found)) == len(found)
    for tile, cluster, share_b in found:
        assert known[tile].swapped or (cluster, share_b) in ((1, False), (2, False), (2, True))
        if known[tile].swapped:
            assert cluster <= max(1, k * (2 if kind == "bf16" else 1) // 128), "a block would have no part of K"
            assert m <= 256 and not share_b and cluster <= known[tile].most_blocks
        else:
            assert m >= 32


def test_chosen_tile_runs_later(monkeypatch, tmp_path):
    """Play a GPU on which tile 3 of the bf16 module is fastest: it is found, used, kept in a file and read again."""
    ran = []
    clock = SimpleNamespace(seconds=0.0)  # advanced by the runners, so that the load of the machine does not matter

    def with_tile(out, a, b, *rest):
        tile, cluster = rest[8], rest[9]
        ran.append((tile, cluster, rest[10]))
        clock.seconds += 0.001 if (tile, cluster) == (3, 2) else 0.004
        out.copy_(a @ b.mT)
        return True

    monkeypatch.setattr(timers, "time", SimpleNamespace(perf_counter=lambda: clock.seconds))

    monkeypatch.setattr(tuning, "is_sm90", lambda tensor: True)
    monkeypatch.setattr(tuning, "tile_tactics", lambda kind, m, k: [(0, 1, False), (3, 2, True)])
    monkeypatch.setattr(tiles, "gemm_sm90", {"bf16": with_tile})
    a, b = operands(64, "cpu")
    path = str(tmp_path / "tuned.json")
    out = torch.empty(64, 128, dtype=torch.bfloat16)
    inputs = [a, b, None, False, out, None]

    class Slow(tuning.OwnBf16Runner):
        """Our runner, whose rule has chosen badly."""

        def forward(self, inputs, tactic=-1, do_preparation=False, **kwargs):
            if not isinstance(tactic, (list, tuple)):
                clock.seconds += 0.004
            return super().forward(inputs, tactic, do_preparation, **kwargs)

    with autotune(cache=path, tuning_buckets=(64,)):
        tuning.choose_bf16(inputs, [Slow()])
    assert set(ran) == {(0, 1, False), (3, 2, True)}
    ran.clear()
    tuning.choose_bf16(inputs, [Slow()])
    assert ran == [(3, 2, True)]
    AutoTuner.get().clear_cache()
    with autotune(tune_mode=False, cache=path, tuning_buckets=(64,)):
        tuning.choose_bf16(inputs, [Slow()])
    assert ran == [(3, 2, True)] * 2
    torch.testing.assert_close(out, templates.mm_bf16_trace.reference(a, b), **CLOSE)


@pytest.fixture
def orders(monkeypatch):
    """Pretend a Hopper; return the runners that the tuner is given, call by call. None of them runs."""
    found = []

    def choose(self, facts, op, runners, *others):
        found.append(runners())
        return (lambda inputs, tactic: None), 0

    monkeypatch.setattr(AutoTuner, "choose_and_keep", choose)
    monkeypatch.setattr(utils, "get_compute_capability", lambda device: (9, 0))
    return found


@pytest.mark.parametrize(
    "m, n, k, has_bias, out_dtype, is_ours_first",
    [
        (8, 3072, 3072, False, BF16, True),
        (8, 3064, 3072, False, BF16, False),
        (8, 64, 256, True, BF16, True),
        (8, 64, 256, False, torch.float32, True),
        (33, 3072, 3072, False, BF16, False),
        (33, 64, 256, True, BF16, False),
    ],
)
def test_order_of_bf16_runners(orders, m, n, k, has_bias, out_dtype, is_ours_first):
    a, b, bias = on_cuda(m, k, dtype=BF16), on_cuda(n, k, dtype=BF16).T, on_cuda(n, dtype=BF16) if has_bias else None
    tuning.tuned_mm_bf16(on_cuda(m, n, dtype=out_dtype), a, b, bias, False, SuitableBackends())
    expected = [tuning._own_bf16, tuning._cublaslt_bf16]
    assert orders == [expected if is_ours_first else expected[::-1]]


@pytest.mark.parametrize("n, is_ours_first", [(2560, True), (2544, False)])
def test_order_of_fp8_runners(orders, n, is_ours_first):
    a, b, one = on_cuda(1, 8, 4096, dtype=E4M3), on_cuda(1, n, 4096, dtype=E4M3).mT, torch.ones(())
    tuning.tuned_bmm_fp8(on_cuda(1, 8, n, dtype=BF16), a, b, one, one, SuitableBackends())
    expected = [tuning._own_fp8, tuning._cublaslt_fp8]
    assert orders == [expected if is_ours_first else expected[::-1]]


def test_torch_or_ours_on_every_device(device, tuner):
    """Check the real choice: both runners are tried, and the faster one, whichever it is, gives the right values."""
    a, b = operands(5, device)
    with autotune(tuning_buckets=(4,)):
        flashinfer.mm_bf16(a, b, backend="auto")
    keys = {(key.custom_op, key.runner_class_name) for key in tuner.profiling_cache}
    assert {op for op, _ in keys} == {"bf16_gemm"} and len(tuner.profiling_cache) >= 1
    torch.testing.assert_close(
        flashinfer.mm_bf16(a, b, backend="auto"), templates.mm_bf16_trace.reference(a, b), **CLOSE
    )


def test_processes_share_a_file(tmp_path):
    """Check two processes that tune different sizes at once: the file has the results of both."""
    path = tmp_path / "tuned.json"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-c", PROGRAM, str(path)]
    started = [subprocess.Popen([*words, rows], env=env, stderr=subprocess.PIPE, text=True) for rows in ("2", "8")]
    for process in started:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
    results = [key for key in json.loads(path.read_text()) if not key.startswith("_")]
    assert any("(2, 64)" in key for key in results) and any("(8, 64)" in key for key in results)
    assert all("bf16_gemm" in key for key in results)


def test_time_budget(device, tuner):
    """Check that a spent budget leaves the default, and the right values."""
    a, b = operands(5, device)
    with autotune(tuning_buckets=(1, 2, 4), time_budget=0.0):
        out = flashinfer.mm_bf16(a, b, backend="auto")
    assert len(tuner.profiling_cache) <= 1
    torch.testing.assert_close(out, templates.mm_bf16_trace.reference(a, b), **CLOSE)


@pytest.mark.parametrize("rows", [1, 64, 300])
def test_every_tactic_on_hopper(device, rows):
    """Check the values of each tile that a trial may choose."""
    if not is_sm90(torch.empty(0, device=device)):
        pytest.skip("the tiles are those of SM90 kernels")
    a, b = operands(rows, device)
    expected = templates.mm_bf16_trace.reference(a, b)
    for tactic in tiles.tile_tactics("bf16", rows, a.shape[1]):
        out = torch.full_like(expected, torch.nan)
        tiles.product_with_tile(tactic, "bf16", out, a, b.mT)
        torch.testing.assert_close(out, expected, **CLOSE, msg=lambda text, tactic=tactic: f"{tactic}: {text}")
