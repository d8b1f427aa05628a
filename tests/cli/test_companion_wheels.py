# SPDX-License-Identifier: Apache-2.0
"""Commands that install companion packages. pip is not run here."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

import flashinfer.__main__ as program
from flashinfer.jit.companion_wheels import wheel_label

URL = "https://example.invalid/whl"
SUPPORTED = ("12.9", "13.0", "13.4")


@pytest.fixture
def pip(monkeypatch):
    """Replace pip; ``pip.codes`` are the exit codes of the next calls, ``pip.calls`` their arguments."""
    fake = SimpleNamespace(calls=[], codes=[])

    def run(command, check):
        assert not check
        fake.calls.append(command)
        return SimpleNamespace(returncode=fake.codes.pop(0) if fake.codes else 0)

    monkeypatch.setattr(subprocess, "run", run)
    return fake


def call(*arguments, code=0):
    result = CliRunner().invoke(program.main, list(arguments))
    assert result.exit_code == code, result.output
    return result.output


def test_cubin_wheel(pip):
    text = call("install-cubin-wheel", "--flashinfer-version", "0.6.18+local", "--index-url", URL, "--nightly")
    assert text.splitlines() == [
        "=== Cubin Wheel Install ===",
        "FlashInfer version: 0.6.18",
        f"Wheel index: {URL}",
        "Requirement: flashinfer-cubin==0.6.18",
    ]
    before = [sys.executable, "-m", "pip", "install", "--upgrade", "--no-deps"]
    assert pip.calls == [[*before, "--pre", "--index-url", URL, "flashinfer-cubin==0.6.18"]]


@pytest.mark.parametrize("command", ["install-jit-cache-wheel", "download-jit-cache"])
def test_jit_cache_wheel(pip, command):
    text = call(command, "--flashinfer-version", "0.6.18", "--cuda-version", "13.2", "--index-url", URL)
    assert "=== JIT Cache Wheel Install ===" in text
    assert "CUDA version: 13.2\nWheel CUDA label: cu130\n" in text
    assert pip.calls[0][-1] == "flashinfer-jit-cache==0.6.18+cu130"


def test_cuda_of_torch_and_of_the_toolkit(pip, monkeypatch):
    monkeypatch.setattr(program.torch.version, "cuda", "12.9")
    assert "Wheel CUDA label: cu129" in call("install-jit-cache-wheel", "--dry-run")
    monkeypatch.setattr(program.torch.version, "cuda", None)
    monkeypatch.setattr(program, "get_cuda_version", lambda: "13.4")
    assert "Wheel CUDA label: cu134" in call("install-jit-cache-wheel", "--dry-run")


def test_a_dry_run_does_nothing(pip):
    text = call("download-kernels", "--cuda-version", "cu129", "--dry-run")
    assert text.count("Dry run requested; pip install was not executed.") == 2
    assert not pip.calls


def test_without_an_index_nothing_is_installed(pip):
    """Check that packages of the same names, which others publish, are never installed by default."""
    assert "no index serves companions of this package" in call("install-cubin-wheel", code=1)
    assert not pip.calls


def test_pip_fails(pip):
    pip.codes = [3]
    assert "pip install failed with exit code 3." in call("install-cubin-wheel", "--index-url", URL, code=1)


def test_both(pip):
    pip.codes = [1, 0]
    urls = ("--cubin-index-url", URL, "--jit-cache-index-url", URL)
    text = call("download-kernels", "--cuda-version", "13.0", *urls, code=1)
    assert "flashinfer-cubin install failed: pip install failed with exit code 1." in text
    assert "flashinfer-jit-cache installed successfully" in text
    assert "One or more kernel wheel installs failed:" in text


@pytest.mark.parametrize("cuda, label", [("12.9", "cu129"), ("cu129", "cu129"), ("13.3.1", "cu130"), ("13.9", "cu134")])
def test_labels(cuda, label):
    assert wheel_label(cuda, SUPPORTED) == label


@pytest.mark.parametrize("cuda", ["12.8", "14.0"])
def test_no_label(cuda):
    text = call("install-jit-cache-wheel", "--cuda-version", cuda, code=1)
    assert f"No compatible flashinfer-jit-cache wheel found for CUDA {cuda}" in text
    assert "Supported wheel labels: cu129, cu130, cu134" in text


def test_a_version_that_is_none():
    assert "must be major.minor" in call("install-jit-cache-wheel", "--cuda-version", "new", code=1)
