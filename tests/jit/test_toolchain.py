# SPDX-License-Identifier: Apache-2.0
"""Search for compilers: places, their order, and the errors if none is found."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from packaging.version import Version

from flashinfer.jit import toolchain
from flashinfer.jit.cpp_ext import get_cuda_path, get_cuda_version, is_cuda_version_at_least

from .toolbox import executable, fake_nvcc, fake_toolkit


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch, tmp_path):
    """Set up a machine without PATH entries, /usr/local/cuda and pip packages."""
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setattr(toolchain, "_SYSTEM_TOOLKIT", tmp_path / "none")
    monkeypatch.setattr(toolchain, "_pip_toolkits", lambda: iter(()))


def test_nothing():
    assert toolchain.find_nvcc() is None
    assert toolchain.find_cxx() is None
    with pytest.raises(
        RuntimeError, match=r"cannot find nvcc: looked at \$FLASHINFER_NVCC.*pip install 'flashinfer-python\[nvcc\]'"
    ):
        get_cuda_path()


def test_order(monkeypatch, tmp_path):
    """Check the search order: each place overrides those before it in this test."""
    pip, system = fake_toolkit(tmp_path / "pip"), fake_toolkit(tmp_path / "system")
    monkeypatch.setattr(toolchain, "_pip_toolkits", lambda: iter([pip]))
    assert get_cuda_path() == str(pip)
    monkeypatch.setattr(toolchain, "_SYSTEM_TOOLKIT", system)
    assert get_cuda_path() == str(system)
    on_path = fake_toolkit(tmp_path / "on_path")
    monkeypatch.setenv("PATH", str(on_path / "bin"))
    assert get_cuda_path() == str(on_path)
    for variable in ("CUDA_PATH", "CUDA_HOME"):
        home = fake_toolkit(tmp_path / variable)
        monkeypatch.setenv(variable, str(home))
        assert get_cuda_path() == str(home)
        assert toolchain.find_nvcc() == home / "bin" / "nvcc"
    chosen = fake_nvcc(tmp_path / "mine" / "nvcc")
    monkeypatch.setenv("FLASHINFER_NVCC", str(chosen))
    assert toolchain.find_nvcc() == chosen
    assert get_cuda_path() == str(tmp_path / "CUDA_HOME")  # the toolkit is still that of CUDA_HOME


def test_chosen_nvcc_that_does_not_exist_is_not_replaced(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_HOME", str(fake_toolkit(tmp_path / "cuda")))
    monkeypatch.setenv("FLASHINFER_NVCC", str(tmp_path / "typo"))
    assert toolchain.find_nvcc() is None


def test_chosen_nvcc_by_name(monkeypatch, tmp_path):
    nvcc = fake_nvcc(tmp_path / "path" / "nvcc-13")
    monkeypatch.setenv("FLASHINFER_NVCC", "nvcc-13")
    assert toolchain.find_nvcc() == nvcc


def test_home_without_nvcc_is_passed_over(monkeypatch, tmp_path):
    """Check a CUDA_HOME left behind by another installation."""
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "gone"))
    toolkit = fake_toolkit(tmp_path / "cuda")
    monkeypatch.setenv("PATH", str(toolkit / "bin"))
    assert get_cuda_path() == str(toolkit)


def test_wrapper_script_is_asked_for_its_toolkit(monkeypatch, tmp_path):
    """Check /usr/local/bin/nvcc as a script that calls the real compiler."""
    toolkit = fake_toolkit(tmp_path / "real toolkit")
    say = f'echo "#\\$ _SPACE_= " >&2; echo "#\\$ _HERE_={toolkit}/bin" >&2'
    wrapper = executable(tmp_path / "path" / "nvcc", f'#!/bin/sh\ncase "$*" in *--dryrun*) {say};; esac\n')
    assert toolchain.find_nvcc() == wrapper
    assert get_cuda_path() == str(toolkit)


def test_pip_package(monkeypatch, tmp_path):
    """Check the tree of the nvidia-cuda-nvcc package: site-packages/nvidia/cu13/bin/nvcc, a namespace package."""
    monkeypatch.undo()
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setattr(toolchain, "_SYSTEM_TOOLKIT", tmp_path / "none")
    toolkit = fake_toolkit(tmp_path / "site" / "nvidia" / "cu13")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])
    for name in [n for n in sys.modules if n.partition(".")[0] == "nvidia"]:
        monkeypatch.delitem(sys.modules, name)
    importlib.invalidate_caches()
    assert toolchain.find_nvcc() == toolkit / "bin" / "nvcc"
    assert get_cuda_path() == str(toolkit)


def test_version(monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHINFER_NVCC", str(fake_nvcc(tmp_path / "nvcc", version="12.9")))
    assert Version("12.10") > get_cuda_version() == Version("12.9")
    assert is_cuda_version_at_least(version_str="12.9")
    assert is_cuda_version_at_least("12.10") is False
    assert is_cuda_version_at_least("13.0") is False


@pytest.mark.parametrize("of_torch, expected", [("12.8", "12.8"), (None, "0.0")])
def test_version_without_nvcc_is_torchs(monkeypatch, of_torch, expected):
    monkeypatch.setattr(torch.version, "cuda", of_torch)
    assert get_cuda_version() == Version(expected)


def test_host_compiler(monkeypatch, tmp_path):
    for name in ("clang++", "g++", "c++"):
        found = executable(tmp_path / "path" / name, "#!/bin/sh\n")
        assert toolchain.find_cxx() == found
    monkeypatch.setenv("CXX", "g++")
    assert toolchain.find_cxx() == tmp_path / "path" / "g++"
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    assert toolchain.find_cxx() is None


def test_host_compiler_in_several_words(monkeypatch, tmp_path):
    compiler = executable(tmp_path / "path" / "g++", "#!/bin/sh\n")
    executable(tmp_path / "path" / "ccache", "#!/bin/sh\n")
    for words, expected in (
        ("g++", ([], compiler, [])),
        ("ccache g++", (["ccache"], compiler, [])),
        ("ccache g++ -m64 '-DA=b c'", (["ccache"], compiler, ["-m64", "-DA=b c"])),
        (f"{compiler} -m64", ([], compiler, ["-m64"])),
        ("none -m64", ([], None, [])),
    ):
        monkeypatch.setenv("CXX", words)
        assert toolchain.split_cxx() == expected
        assert toolchain.find_cxx() == expected[1]


def test_host_compiler_with_broken_quoting(monkeypatch, tmp_path):
    """Check CXX with an unbalanced quote: it is split at blanks, with a warning that shows the text."""
    compiler = executable(tmp_path / "path" / "g++", "#!/bin/sh\n")
    monkeypatch.setenv("CXX", "g++ -DA='b")
    with pytest.warns(UserWarning, match=r"cannot parse .*-DA='b"):
        assert toolchain.split_cxx() == ([], compiler, ["-DA='b"])


def test_package_of_the_ffi_is_named(workshop, monkeypatch):
    monkeypatch.setitem(sys.modules, "tvm_ffi", None)
    toolchain.tvm_ffi_paths.cache_clear()
    with pytest.raises(ImportError, match="pip install apache-tvm-ffi"):
        workshop.spec().build_and_load()


def test_ninja(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="cannot find ninja"):
        toolchain.find_ninja()
    ninja = executable(tmp_path / "path" / "ninja", "#!/bin/sh\n")
    assert toolchain.find_ninja() == str(ninja)


@pytest.mark.parametrize(
    "limit, used, expected",
    [("max", "0", 8 << 30), (str(4 << 30), str(1 << 30), 3 << 30), (str(64 << 30), "0", 8 << 30)],
    ids=["no limit", "container", "generous container"],
)
def test_memory_within_a_container(monkeypatch, tmp_path, limit, used, expected):
    files = {
        "/proc/meminfo": f"MemTotal: 99 kB\nMemAvailable: {8 << 20} kB\n",
        "/sys/fs/cgroup/memory.max": limit,
        "/sys/fs/cgroup/memory.current": used,
    }
    monkeypatch.setattr(toolchain, "_read", lambda path: files[path])
    assert toolchain._available_bytes() == expected


def test_memory_of_an_unknown_system(monkeypatch):
    def missing(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr(toolchain, "_read", missing)
    assert toolchain._available_bytes() > 1 << 36
    monkeypatch.undo()
    assert toolchain._available_bytes() < 1 << 46


def test_spelling_of_versions_has_no_path(tmp_path):
    compiler = executable(tmp_path / "c++", f"#!/bin/sh\necho '{tmp_path}/c++ (Debian) 12.2.0'\n")
    assert toolchain.identify(compiler).version == "(Debian) 12.2.0"
    silent = executable(tmp_path / "silent", "#!/bin/sh\n")
    assert toolchain.identify(silent).version == "unknown"
    assert isinstance(toolchain.identify(Path(compiler)).path, Path)
