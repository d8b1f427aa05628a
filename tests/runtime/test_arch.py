# SPDX-License-Identifier: Apache-2.0
"""Device probes and architecture sets. GPUs are simulated by patching torch.cuda, except in the tests at the end."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from flashinfer import utils
from flashinfer._runtime import arch
from flashinfer._runtime.errors import ArgumentError

PROBES = [
    "get_compute_capability",
    "get_device_name",
    "get_device_properties",
    "get_device_sm_count",
    "get_gpu_memory_bandwidth",
    "get_shared_bytes_per_block_optin",
]
TARGETS = ["sm90a", "sm100a", "sm100f", "sm110a", "sm120a", "sm120f", "sm121a", "sm12x"]


@pytest.fixture
def gpu(monkeypatch):
    """Return gpu((9, 0), cuda="12.8"), which simulates two GPUs, the second one current, and counts queries."""
    asked = []
    memoised = [getattr(arch, name) for name in PROBES] + [arch.device_support_pdl, arch._cuda_generator]

    def install(capability, cuda="13.0"):
        properties = SimpleNamespace(
            multi_processor_count=132,
            shared_memory_per_block_optin=232448,
            memory_clock_rate=3201000,
            memory_bus_width=6016,
        )
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: asked.append(i) or capability)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: properties)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: f"GPU {i}")
        for probe in memoised:
            probe.cache_clear()
        return asked

    yield install
    for probe in memoised:
        probe.cache_clear()


def test_sets_are_nested():
    assert arch.ALL_CCS[0] == 75 and arch.ALL_CCS[-1] == 121 and arch.CPU not in arch.ALL_CCS
    chain = [arch.TURING_ON, arch.AMPERE_ON, arch.ADA_ON, arch.HOPPER_ON, arch.BLACKWELL_ON]
    for wide, narrow in pairwise(chain):
        assert set(narrow) < set(wide)
    assert set(arch.BLACKWELL) | set(arch.SM12X) == set(arch.BLACKWELL_ON)
    assert arch.HOPPER_ON_MAJORS == [9, 10, 11, 12] and arch.AMPERE_ON_MAJORS == [8, 9, 10, 11, 12]
    assert arch.BLACKWELL_MAJORS == [10, 11] and arch.SM12X_MAJORS == [12]


@pytest.mark.parametrize("probe", PROBES)
@pytest.mark.parametrize("device", [torch.device("cpu"), "cpu", torch.device("meta")])
def test_probes_refuse_what_is_not_cuda(probe, device):
    with pytest.raises(ArgumentError, match=f"{probe}: device must be a CUDA device, got {device}"):
        getattr(utils, probe)(device)


def test_device_index_refuses_what_is_not_cuda():
    with pytest.raises(ValueError, match="CUDA"):
        utils.get_device_index("cpu")


def test_capability_is_asked_once_per_device(gpu):
    asked = gpu((9, 0))
    for device in (torch.device("cuda:0"), "cuda:0", 0, torch.device("cuda:0")):
        assert utils.get_compute_capability(device) == (9, 0)
    assert asked == [0]
    assert utils.get_compute_capability(torch.device("cuda")) == (9, 0)
    assert asked == [0, 1]  # without an index: the current device, 1


def test_cuda_without_index_follows_the_current_device(gpu, monkeypatch):
    gpu((9, 0))
    assert utils.get_device_name("cuda") == "GPU 1"
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert utils.get_device_name("cuda") == "GPU 0"


def test_properties(gpu):
    gpu((9, 0))
    assert utils.get_device_sm_count("cuda:0") == 132
    assert utils.get_shared_bytes_per_block_optin("cuda:0") == 232448
    assert utils.get_gpu_memory_bandwidth("cuda:0") == pytest.approx(4814, abs=1)  # GB/s of an H200
    assert utils.get_device_index("cuda") == 1 and utils.get_device_index(torch.device("cuda:3")) == 3


@pytest.mark.parametrize(
    "capability, cuda, supported",
    [
        ((8, 9), "13.0", []),
        ((9, 0), "12.2", []),
        ((9, 0), "12.3", ["sm90a"]),
        ((10, 0), "12.8", ["sm100a"]),
        ((10, 3), "12.9", ["sm100a", "sm100f"]),
        ((11, 0), "12.9", []),
        ((11, 0), "13.0", ["sm110a"]),
        ((12, 0), "12.8", ["sm120a", "sm12x"]),
        ((12, 0), "12.9", ["sm120a", "sm120f", "sm12x"]),
        ((12, 1), "12.8", []),
        ((12, 1), "12.9", ["sm120f", "sm121a", "sm12x"]),
    ],
)
def test_targets_need_chip_and_compiler(gpu, capability, cuda, supported):
    gpu(capability, cuda)
    for device in ((), (None,), ("cuda:0",), (torch.device("cuda"),)):
        assert [t for t in TARGETS if getattr(utils, f"is_{t}_supported")(*device)] == supported
    assert not any(getattr(utils, f"is_{t}_supported")("cpu") for t in TARGETS)


def test_targets_read_the_probe_in_utils(gpu, monkeypatch):
    gpu((8, 0))
    monkeypatch.setattr(utils, "get_compute_capability", lambda device: (9, 0))
    assert utils.is_sm90a_supported()


def test_no_gpu_no_target(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for target in TARGETS:
        assert getattr(utils, f"is_{target}_supported")() is False
        assert getattr(utils, f"is_{target}_supported")(torch.device("cuda")) is False
    assert utils.is_cvt_rs_supported() is False


def test_pdl(gpu):
    gpu((9, 0))
    assert utils.device_support_pdl(torch.device("cuda:0")) is True
    assert utils.device_support_pdl(torch.device("cpu")) is False
    gpu((8, 9))
    assert utils.device_support_pdl("cuda:0") is False


def test_default_generator():
    assert utils.get_default_generators(torch.device("cpu")) is torch.default_generator


def test_probe_is_a_constant_of_a_graph(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *index: (9, 0))  # dynamo asks without one
    arch.get_compute_capability.cache_clear()

    def model(x):
        return x * utils.get_compute_capability("cuda:0")[0] + utils.device_support_pdl(x.device)

    assert torch.compile(model, fullgraph=True, backend="eager")(torch.ones(1)).tolist() == [9]
    arch.get_compute_capability.cache_clear()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_real_gpu():
    device = torch.device("cuda")
    major, minor = utils.get_compute_capability(device)
    assert (major, minor) == torch.cuda.get_device_capability()
    assert utils.is_sm90a_supported() == utils.is_sm90a_supported(device) == (major == 9)
    assert utils.device_support_pdl(device) == (major >= 9)
    assert utils.get_device_sm_count(device) > 0 and utils.get_device_name(device)
    assert utils.get_shared_bytes_per_block_optin(device) >= 48 * 1024
    assert 100 < utils.get_gpu_memory_bandwidth(device) < 100_000
    assert utils.get_default_generators(device).device.type == "cuda"
