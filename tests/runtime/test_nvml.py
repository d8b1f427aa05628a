# SPDX-License-Identifier: Apache-2.0
"""Capabilities of GPUs from NVML. A small library with the functions that are asked stands for the driver's."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import flashinfer
from flashinfer._runtime import arch, nvml
from flashinfer.jit.toolchain import find_cxx

# GPUs are named in FAKE_GPUS: "9.0 GPU-1a;8.0 GPU-2b". A capability of 0 makes the GPU refuse to answer.
SOURCE = """
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

struct Gpu { int major, minor; std::string uuid; };
static std::vector<Gpu> gpus;
static int open_sessions = 0;

extern "C" {
int nvmlInit_v2() {
  const char* text = std::getenv("FAKE_GPUS");
  if (text == nullptr) return 9;
  ++open_sessions;
  gpus.clear();
  std::string list(text);
  for (char* entry = std::strtok(list.data(), ";"); entry != nullptr; entry = std::strtok(nullptr, ";")) {
    Gpu gpu;
    char uuid[96];
    std::sscanf(entry, "%d.%d %95s", &gpu.major, &gpu.minor, uuid);
    gpu.uuid = uuid;
    gpus.push_back(gpu);
  }
  return 0;
}
int nvmlShutdown() { --open_sessions; return 0; }
int OpenSessions() { return open_sessions; }
int nvmlDeviceGetCount_v2(unsigned* count) { *count = gpus.size(); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, Gpu** handle) { *handle = &gpus.at(index); return 0; }
int nvmlDeviceGetCudaComputeCapability(Gpu* gpu, int* major, int* minor) {
  *major = gpu->major;
  *minor = gpu->minor;
  return gpu->major == 0 ? 4 : 0;
}
int nvmlDeviceGetUUID(Gpu* gpu, char* uuid, unsigned length) {
  if (gpu->uuid.size() + 1 > length) return 7;
  std::strcpy(uuid, gpu->uuid.c_str());
  return 0;
}
}
"""

MIXED = "9.0 GPU-1a11;8.0 GPU-1b22;9.0 GPU-2c33"


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nvml")
    (folder / "nvml.cc").write_text(SOURCE)
    built = folder / nvml.LIBRARY
    subprocess.run([find_cxx(), "-std=c++17", "-shared", "-fPIC", folder / "nvml.cc", "-o", built], check=True)
    return str(built)


@pytest.fixture
def gpus(library, monkeypatch):
    """Return gpus("9.0 GPU-1a", visible, order), which makes NVML show these GPUs."""

    def install(text, visible=None, order=None):
        monkeypatch.setattr(nvml, "LIBRARY", library)
        values = {"FAKE_GPUS": text, "CUDA_VISIBLE_DEVICES": visible, "CUDA_DEVICE_ORDER": order}
        for name, value in values.items():
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, value)

    return install


@pytest.mark.parametrize(
    "text, visible, order, expected",
    [
        ("9.0 GPU-1a", None, None, {(9, 0)}),
        ("9.0 GPU-1a;9.0 GPU-1b", "1", None, {(9, 0)}),  # GPUs of one kind: which are visible does not matter
        ("9.0 GPU-1a;9.0 GPU-1b", "MIG-55", None, {(9, 0)}),
        (MIXED, None, None, {(9, 0), (8, 0)}),
        (MIXED, "1", "PCI_BUS_ID", {(8, 0)}),
        (MIXED, "0, 2", "PCI_BUS_ID", {(9, 0)}),
        (MIXED, "2,1", "PCI_BUS_ID", {(8, 0), (9, 0)}),
        (MIXED, "GPU-1b22", None, {(8, 0)}),
        (MIXED, "GPU-2,GPU-1a", None, {(9, 0)}),
        (MIXED, "1", None, None),  # the fastest GPU comes first, and NVML does not know which it is
        (MIXED, "3", "PCI_BUS_ID", None),
        (MIXED, "GPU-1", None, None),  # two GPUs begin with it
        (MIXED, "GPU-7", None, None),
        (MIXED, "MIG-55", None, None),
        ("9.0 GPU-1a;0.0 GPU-1b", None, None, None),  # one does not answer
        (None, None, None, None),
        ("", None, None, None),
    ],
)
def test_capabilities(gpus, text, visible, order, expected):
    gpus(text, visible, order)
    assert nvml.visible_capabilities() == expected


def test_sessions_are_closed(gpus):
    gpus("9.0 GPU-1a")
    with pytest.raises(KeyError), nvml.nvml_session() as library:
        assert library.OpenSessions() == 1
        raise KeyError
    assert library.OpenSessions() == 0


def test_no_library(monkeypatch):
    monkeypatch.setattr(nvml, "LIBRARY", "libno-such-library.so.1")
    assert nvml.visible_capabilities() is None


@pytest.mark.parametrize("initialised", [False, True])
def test_torch_is_asked_last(gpus, monkeypatch, initialised):
    asked = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialised)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: asked.append(index) or (8, 0))
    gpus("9.0 GPU-1a")
    assert arch.get_visible_capabilities() == ({(8, 0)} if initialised else {(9, 0)})
    assert asked == ([0, 1] if initialised else [])
    gpus(None)
    assert arch.get_visible_capabilities() == {(8, 0)} and len(asked) >= 2
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert arch.get_visible_capabilities() == set()


# torch acts as on a machine with one GPU, and any use of CUDA ends the process.
UNTOUCHED = """
    import sys
    import torch

    def fail(*args):
        sys.exit("CUDA was touched")

    torch.cuda._lazy_init = torch.cuda.is_available = torch.cuda.get_device_capability = fail
    torch.cuda.device_count = lambda: 1
    import flashinfer
    from flashinfer.jit.core import current_compilation_context

    @flashinfer.api_logging.flashinfer_api
    def op(x):
        return x + 1

    op(torch.zeros(3))
    print(sorted(current_compilation_context.TARGET_CUDA_ARCHS))
"""


@pytest.mark.parametrize("level", ["0", "5"])
def test_neither_import_nor_log_nor_targets_touch_cuda(library, tmp_path, level):
    log = tmp_path / "log"
    changed = {
        "FAKE_GPUS": "9.0 GPU-1a",
        "LD_LIBRARY_PATH": os.pathsep.join([str(Path(library).parent), os.environ.get("LD_LIBRARY_PATH", "")]),
        "FLASHINFER_LOGLEVEL": level,
        "FLASHINFER_LOGDEST": str(log),
        "FLASHINFER_DISABLE_JIT": "1",  # the kernel for statistics is looked for, and not compiled
        "PYTHONPATH": os.pathsep.join([str(Path(flashinfer.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
    }
    left_out = ("FLASHINFER_CUDA_ARCH_LIST", "FLASHINFER_AOT_DIR", "CUDA_VISIBLE_DEVICES")
    env = {name: value for name, value in os.environ.items() if name not in left_out} | changed
    command = [sys.executable, "-c", textwrap.dedent(UNTOUCHED)]
    run = subprocess.run(command, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == "[(9, '0a')]"
    assert (level == "0") or "min=0.000000, max=0.000000" in log.read_text()
