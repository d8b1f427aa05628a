# SPDX-License-Identifier: Apache-2.0
"""Global scales of NVFP4 appends: rejected values, the time when tensors are read, and captured graphs."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from flashinfer._runtime.errors import ArgumentError
from flashinfer.page import global_scale
from flashinfer.page import nvfp4_quantize_append_paged_kv_cache_with_slot_mapping as append

from .inputs import same
from .nvfp4_caches import BF16, make_caches

BAD = [0.0, -1.0, float("nan"), float("inf"), float("-inf")]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def make_call(device):
    rows = [torch.ones(7, 2, 64, dtype=BF16, device=device) for _ in range(2)]
    caches = make_caches("NHD", "combined", 1, 8, 2, 64, device)
    return (*rows, torch.arange(7, device=device)), caches


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_a_bad_value_in_a_tensor_is_refused_and_nothing_is_written(device, name, value):
    rows, caches = make_call(device)
    before = [cache.clone() for cache in caches]
    scales = {n: torch.ones(1, device=device) for n in ("k_scale", "v_scale")}
    scales[name].fill_(value)
    with pytest.raises(ValueError, match=f"{name} must be a positive finite global decode scale.*, got .*"):
        append(*rows, *caches, **scales)
    assert all(same(cache, old) for cache, old in zip(caches, before, strict=True))


@pytest.mark.parametrize("device_of_scale", ["rows", "cpu"])
def test_a_value_is_looked_at_again_after_a_write(device, device_of_scale):
    rows, caches = make_call(device)
    scale = torch.ones(1, device=device if device_of_scale == "rows" else "cpu")
    append(*rows, *caches, scale, scale)
    scale.zero_()
    with pytest.raises(ValueError, match=r"k_scale must be a positive finite global decode scale .*, got 0"):
        append(*rows, *caches, scale, scale)


def count_reads(monkeypatch):
    reads = []
    stack = torch.stack
    monkeypatch.setattr(torch, "stack", lambda tensors: reads.append(len(tensors)) or stack(tensors))
    return reads


def test_values_are_read_in_one_copy_and_not_again(monkeypatch):
    reads = count_reads(monkeypatch)
    scales = {"k_scale": torch.tensor([0.5]), "v_scale": torch.tensor(2.0)}
    global_scale._check_values("op", scales)
    global_scale._check_values("op", scales)
    assert reads == [2]
    scales["v_scale"].fill_(3.0)
    global_scale._check_values("op", scales)
    assert reads == [2, 1]


def test_inference_tensors_count_no_writes_and_are_read_each_time(monkeypatch):
    reads = count_reads(monkeypatch)
    with torch.inference_mode():
        scale = torch.ones(1)
        global_scale._check_values("op", {"k_scale": scale})
        scale.zero_()
        with pytest.raises(ArgumentError, match=r"op: k_scale must be a positive .*, got 0\.0"):
            global_scale._check_values("op", {"k_scale": scale})
    assert reads == [1, 1]


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
@pytest.mark.parametrize("scale", [0.5, torch.ones(1, device="meta")], ids=["number", "elsewhere"])
def test_a_capture_takes_tensors_of_the_device_only(device, monkeypatch, name, scale):
    rows, caches = make_call(device)
    good = torch.ones(1, device=device)
    append(*rows, *caches, good, good)
    monkeypatch.setattr(global_scale, "_is_capturing", lambda device: True)
    append(*rows, *caches, good, good)
    with pytest.raises(
        ValueError, match=f"{name} must be a contiguous float32 tensor on .*CUDA graph capture.*, got .*"
    ):
        append(*rows, *caches, **{"k_scale": good, "v_scale": good, name: scale})


@needs_gpu
def test_a_capture_refuses_a_number():
    rows, caches = make_call("cuda")
    scale = torch.ones(1, device="cuda")
    append(*rows, *caches, scale, scale)
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(ValueError, match="CUDA graph capture"):
        append(*rows, *caches, scale, 0.5)


REPLAY = """
import sys
import torch
from tests.page.test_page_scales import append, make_call
rows, caches = make_call("cuda")
scale = torch.ones(1, device="cuda")
append(*rows, *caches, scale, scale)
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    append(*rows, *caches, scale, scale)
scale.fill_(float(sys.argv[1]))
graph.replay()
try:
    torch.cuda.synchronize()
    print("fine", caches[1].float().max().item())
except RuntimeError as error:
    print("refused", error)
"""


@needs_gpu
@pytest.mark.parametrize("value", [0.5, *BAD])
def test_a_replay_with_a_bad_value_is_a_cuda_error(value):
    """Run in a subprocess: the error destroys the CUDA context."""
    run = subprocess.run([sys.executable, "-c", REPLAY, str(value)], capture_output=True, text=True)
    assert run.stdout.startswith("fine" if value == 0.5 else "refused"), run.stdout + run.stderr
