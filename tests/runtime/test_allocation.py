# SPDX-License-Identifier: Apache-2.0
"""Output allocation: as torch would allocate, on the device of the input whatever device is current."""

from __future__ import annotations

import pytest
import torch

from flashinfer._runtime import allocation
from flashinfer._runtime.allocation import allocate, contiguous_strides, new_empty, reshaped

DEVICES = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
SHAPES = [(), (5,), (0,), (3, 4), (3, 0), (0, 4), (2, 3, 4), (2, 0, 4), (2, 3, 0), (2, 3, 4, 5), (2, 0, 4, 5)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES)
def test_makes_what_torch_makes(shape, device):
    like = torch.empty(1, device=device)
    for dtype in (torch.float32, torch.int64, torch.bool, torch.float8_e4m3fn):
        made, expected = new_empty(like, dtype, *shape), torch.empty(shape, dtype=dtype, device=device)
        assert (made.shape, made.stride(), made.dtype, made.device) == (shape, expected.stride(), dtype, like.device)


def test_other_devices_count_as_the_cpu():
    """Check other devices: the launcher rejects their outputs by device name; no CUDA function is called for them."""

    class OnAnother:
        is_cuda = False

        def get_device(self) -> int:
            return 0

    assert new_empty(OnAnother(), torch.int32, 3).device.type == "cpu"


def test_takes_the_sizes_of_a_tensor():
    like = torch.empty(3, 4)
    assert new_empty(like, like.dtype, *like.shape).shape == like.shape


@pytest.mark.parametrize("shape", SHAPES)
def test_is_the_same_without_the_private_functions(shape, monkeypatch):
    monkeypatch.delattr(torch._C._dynamo.guards, "_empty_strided_cpu")
    on_cpu, _ = allocation._makers()
    made = on_cpu(shape, contiguous_strides(shape), torch.int32)
    assert (made.shape, made.dtype, made.device.type) == (shape, torch.int32, "cpu")


def test_memory_is_of_the_index_though_another_device_is_current(monkeypatch):
    """Check that memory of the current device is not returned if the input is on another device."""
    elsewhere = torch.empty(2, device="meta")
    asked = []
    monkeypatch.setattr(allocation, "_on_cuda", lambda *args: elsewhere)
    monkeypatch.setattr(torch, "empty_strided", lambda *args, device, dtype: asked.append((*args, dtype, device)))
    allocate((2, 3), (3, 1), torch.float16, 1)
    assert asked == [((2, 3), (3, 1), torch.float16, 1)]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_other_device():
    with torch.cuda.device(0):
        assert new_empty(torch.empty(1, device="cuda:1"), torch.int32, 4).get_device() == 1


def test_belongs_to_inference_where_torch_would():
    like = torch.empty(1)
    with torch.inference_mode():
        assert new_empty(like, like.dtype, 3).is_inference()
    assert not new_empty(like, like.dtype, 3).is_inference()


def test_compiled_graphs_allocate_by_torch():
    @torch.compile(backend="eager", fullgraph=True)
    def zeros(x: torch.Tensor) -> torch.Tensor:
        return new_empty(x, torch.int32, x.shape[0], 2).zero_()

    assert zeros(torch.ones(3)).tolist() == [[0, 0]] * 3


@pytest.mark.parametrize("has_private_function", [True, False])
def test_reshaped_memory(has_private_function, monkeypatch):
    if not has_private_function:
        monkeypatch.delattr(torch._C._dynamo.guards, "_reinterpret_tensor")
    view = allocation._viewer() if not has_private_function else reshaped
    x = torch.arange(24.0).view(2, 3, 4)[1:].requires_grad_()
    y = view(x, (4, 3), (1, 4), 0)
    assert y.equal(x[0].T) and y.data_ptr() == x.data_ptr() and not y.requires_grad
    assert view(x, (2,), (1,), 3).tolist() == [15.0, 16.0]
