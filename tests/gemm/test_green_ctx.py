# SPDX-License-Identifier: Apache-2.0
"""Green contexts: rules and sums without a GPU, the driver calls against a recorded driver, and the real one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashinfer import green_ctx
from flashinfer._runtime.errors import LibraryError
from flashinfer.green_ctx import get_sm_count_constraint


def has_driver() -> bool:
    try:
        green_ctx._driver()
    except LibraryError:
        return False
    return True


def test_constraints():
    assert [get_sm_count_constraint(major, 0) for major in range(6, 13)] == [(1, 1), (2, 2), (4, 2), *[(8, 8)] * 4]
    with pytest.raises(ValueError, match=r"compute capability must be at least 6\.0, got 5\.2"):
        get_sm_count_constraint(5, 2)


def test_rounding():
    assert green_ctx._rounded("op", [1, 8, 9], (8, 8), 132) == [8, 8, 16]
    assert green_ctx._rounded("op", [1, 5], (4, 2), 40) == [4, 6]
    with pytest.raises(ValueError, match=r"op: sm_counts\[1\] must be positive, got 0"):
        green_ctx._rounded("op", [8, 0], (8, 8), 132)
    with pytest.raises(RuntimeError, match=r"2 groups need 144 SMs .* has 132: reduce the number of groups"):
        green_ctx._rounded("op", [70, 66], (8, 8), 132)


class Driver:
    """A driver of a GPU with 132 SMs, which splits like the real one and lets a rest be split only in a context."""

    CUdevResourceType = SimpleNamespace(CU_DEV_RESOURCE_TYPE_SM=1)
    CUgreenCtxCreate_flags = SimpleNamespace(CU_GREEN_CTX_DEFAULT_STREAM=1)
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)

    def __init__(self) -> None:
        self.contexts: list[int] = []

    def resource(self, count: int, may_split: bool = False) -> Any:
        return SimpleNamespace(sm=SimpleNamespace(smCount=count), may_split=may_split)

    def cuInit(self, flags: int) -> Any:
        return (0,)

    def cuDeviceGet(self, index: int) -> Any:
        return (0, index)

    def cuDeviceGetDevResource(self, device: int, kind: int) -> Any:
        return 0, self.resource(132, may_split=True)

    def cuDevSmResourceSplitByCount(self, groups: int, resource: Any, flags: int, count: int) -> Any:
        if count % 8 or not resource.may_split:
            return 914, None, 0, None
        rest = resource.sm.smCount - groups * count
        return 0, [self.resource(count) for _ in range(groups)], groups, self.resource(rest)

    def cuDevResourceGenerateDesc(self, resources: list[Any], count: int) -> Any:
        return 0, resources[0].sm.smCount

    def cuGreenCtxCreate(self, description: int, device: int, flags: int) -> Any:
        self.contexts.append(description)
        return 0, description

    def cuGreenCtxGetDevResource(self, context: int, kind: int) -> Any:
        return 0, self.resource(context, may_split=True)

    def cuGreenCtxStreamCreate(self, context: int, flags: int, priority: int) -> Any:
        return 0, 1000 + context

    def cuGetErrorName(self, status: int) -> Any:
        return 0, b"CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION"


@pytest.fixture
def driver(monkeypatch):
    fake = Driver()
    monkeypatch.setattr(green_ctx, "_driver", lambda: fake)
    monkeypatch.setattr(green_ctx, "get_compute_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_stream_from_external", lambda pointer, device: (pointer, device.index))
    return fake


def counts(resources: list[Any]) -> list[int]:
    return [resource.sm.smCount for resource in resources]


def test_equal_groups(driver):
    streams, resources = green_ctx.split_device_green_ctx(torch.device("cuda", 3), 2, 10)
    assert counts(resources) == [16, 16, 100]
    assert streams == [(1016, 3), (1016, 3), (1100, 3)]


def test_groups_of_given_sizes(driver):
    streams, resources = green_ctx.split_device_green_ctx_by_sm_count(torch.device("cuda", 0), [8, 17, 64])
    assert counts(resources) == [8, 24, 64, 36]
    assert [pointer for pointer, _ in streams] == [1008, 1024, 1064, 1036]


def test_too_many_sms(driver):
    with pytest.raises(RuntimeError, match="reduce the number of groups or the number of SMs"):
        green_ctx.split_device_green_ctx(torch.device("cuda", 0), 9, 16)
    with pytest.raises(RuntimeError, match="reduce the number of groups or the number of SMs"):
        green_ctx.split_device_green_ctx_by_sm_count(torch.device("cuda", 0), [100, 40])
    with pytest.raises(ValueError, match="num_groups and min_count must be positive, got 0 and 8"):
        green_ctx.split_device_green_ctx(torch.device("cuda", 0), 0, 8)


def test_errors_of_the_driver_have_their_names(driver):
    with pytest.raises(
        RuntimeError, match="cuDevSmResourceSplitByCount failed with CUDA_ERROR_INVALID_RESOURCE_CONFIG"
    ):
        green_ctx.split_resource(driver.resource(132, may_split=True), 1, 7)


def test_counts_are_refused_before_the_driver_is_asked():
    with pytest.raises(ValueError, match=r"sm_counts\[0\] must be positive, got -8"):
        green_ctx.split_device_green_ctx_by_sm_count(torch.device("cuda", 0), [-8])


@pytest.mark.skipif(has_driver(), reason="cuda-python is installed")
def test_without_cuda_python():
    with pytest.raises(LibraryError, match="needs the package cuda-python"):
        green_ctx.get_cudevice(torch.device("cuda", 0))


@pytest.mark.skipif(not (has_driver() and torch.cuda.is_available()), reason="needs cuda-python and a GPU")
def test_kernels_run_on_the_streams():
    device = torch.device("cuda", 0)
    total = torch.cuda.get_device_properties(device).multi_processor_count
    for streams, resources in (
        green_ctx.split_device_green_ctx(device, 2, 16),
        green_ctx.split_device_green_ctx_by_sm_count(device, [8, 32]),
    ):
        assert sum(counts(resources)) == total and len(streams) == 3
        x = torch.randn(64, 64, device=device)
        torch.cuda.synchronize()
        for stream in streams:
            with torch.cuda.stream(stream):
                y = x @ x
            stream.synchronize()
            torch.testing.assert_close(y, x @ x)
