# SPDX-License-Identifier: Apache-2.0
"""Commands that install companion packages. pip is not run here."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

import flashinfer.__main__ as program
from flashinfer.jit import companion_wheels
from flashinfer.jit._cuda_architecture import select_compatible_cuda_architecture
from flashinfer.jit.companion_wheels import wheel_label

URL = "https://example.invalid/whl"
SUPPORTED = ("12.9", "13.0", "13.4")


def write_shim(folder):
    """Write the package that requires a provider for each architecture."""
    pins = "".join(f"Requires-Dist: flashinfer-jit-cache-{sm}==0.7.2+cu130\n" for sm in ("sm80", "sm90a", "sm120f"))
    with zipfile.ZipFile(folder / "flashinfer_jit_cache-0.7.2+cu130-py3-none-any.whl", "w") as archive:
        metadata = f"Metadata-Version: 2.1\nName: flashinfer-jit-cache\nVersion: 0.7.2+cu130\n{pins}"
        archive.writestr("flashinfer_jit_cache-0.7.2+cu130.dist-info/METADATA", metadata)


@pytest.fixture
def pip(monkeypatch):
    """Replace pip; ``pip.codes`` are the exit codes of the next calls, ``pip.calls`` their arguments."""
    fake = SimpleNamespace(calls=[], codes=[])

    def run(command, check):
        assert not check
        fake.calls.append(command)
        if "download" in command:
            write_shim(Path(command[command.index("--dest") + 1]))
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
        "FlashInfer version: 0.6.18+local",
        f"Wheel index: {URL}",
        "Requirement: flashinfer-cubin==0.6.18",
        f"Command: {shlex.join(pip.calls[0])}",
    ]
    before = [sys.executable, "-m", "pip", "install", "--upgrade", "--no-deps"]
    assert pip.calls == [[*before, "--pre", "--index-url", URL, "flashinfer-cubin==0.6.18"]]


@pytest.mark.parametrize("command", ["install-jit-cache-wheel", "download-jit-cache"])
def test_jit_cache_wheel(pip, command):
    text = call(command, "--flashinfer-version", "0.6.18", "--cuda-version", "13.2", "--index-url", URL)
    assert "=== JIT Cache Wheel Install ===" in text
    assert "CUDA version: 13.2\nWheel CUDA label: cu130\n" in text
    assert "Install mode: all\nProviders: all\n" in text
    assert pip.calls[0][-1] == "flashinfer-jit-cache==0.6.18+cu130"
    assert "--no-deps" not in pip.calls[0]  # it may only require the providers, which hold the modules


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


def test_labels_are_those_of_the_list_that_build_scripts_read():
    listed = json.loads((Path(__file__).parents[2] / "ci" / "cuda-versions.json").read_text())["jit_cache"]
    assert tuple(entry["version"] for entry in listed) == program._SUPPORTED_JIT_CACHE_CUDA_VERSIONS


def test_label_is_printed_as_a_number(pip):
    text = call("install-jit-cache-wheel", "--cuda-version", "cu130", "--dry-run")
    assert "CUDA version: 13.0\nWheel CUDA label: cu130\n" in text


@pytest.mark.parametrize("nightly, folder", [((), ""), (("--nightly",), "/nightly")])
def test_index_of_the_environment(pip, monkeypatch, nightly, folder):
    monkeypatch.setenv("FLASHINFER_WHEEL_INDEX", "https://example.invalid/base/")
    call("install-cubin-wheel", "--flashinfer-version", "0.7.2", *nightly)
    call("install-jit-cache-wheel", "--flashinfer-version", "0.7.2", "--cuda-version", "13.0", *nightly)
    urls = [command[command.index("--index-url") + 1] for command in pip.calls]
    base = f"https://example.invalid/base{folder}"
    assert urls == [base, f"{base}/cu130"]


def test_version_that_is_not_known(pip, monkeypatch):
    monkeypatch.setattr(program, "__version__", "0.0.0+unknown")
    assert "Could not determine the installed FlashInfer version." in call("install-cubin-wheel", code=1)


def test_providers_of_some_architectures(pip):
    version = ("--flashinfer-version", "0.7.2", "--cuda-version", "13.0", "--index-url", URL)
    text = call("install-jit-cache-wheel", *version, "--mode", "minimal", "--sm", "9.0a", "--sm", "compute_86")
    assert "Install mode: minimal\nProviders: sm80, sm90a\n" in text
    download, install = pip.calls
    assert download[1:8] == [
        *["-m", "pip", "download", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:", "--dest"]
    ]
    shim, sm80, sm90a = (f"flashinfer-jit-cache{sm}==0.7.2+cu130" for sm in ("", "-sm80", "-sm90a"))
    assert download[-3:] == ["--index-url", URL, shim]
    assert install[5:] == ["--no-deps", "--index-url", URL, shim, sm80, sm90a]


def test_providers_of_the_gpus_here(pip, monkeypatch):
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "12.1a")
    urls = ("--cubin-index-url", URL, "--jit-cache-index-url", URL)
    text = call(
        "download-kernels", "--flashinfer-version", "0.7.2", "--cuda-version", "13.0", *urls, "--mode", "minimal"
    )
    assert "Providers: sm120f\n" in text


MINIMAL = ("install-jit-cache-wheel", "--flashinfer-version", "0.7.2", "--cuda-version", "13.0", "--index-url", URL)
REFUSED = {
    "no provider": (
        ("--mode", "minimal", "--sm", "sm75"),
        "No published jit-cache provider is compatible with sm75. Available providers: sm120f, sm80, sm90a",
    ),
    "no architecture": (("--mode", "minimal", "--sm", "hopper"), "Invalid SM architecture"),
    "mode": (("--sm", "sm90a"), "--sm can only be used with --mode minimal."),
}


@pytest.mark.parametrize("case", REFUSED)
def test_minimal_mode_refuses(pip, case):
    options, text = REFUSED[case]
    assert text in call(*MINIMAL, *options, code=2 if case == "mode" else 1)


def test_minimal_mode_without_a_gpu(pip, monkeypatch):
    monkeypatch.setattr(companion_wheels, "current_compilation_context", SimpleNamespace(TARGET_CUDA_ARCHS=set()))
    assert "No CUDA architecture could be detected" in call(*MINIMAL, "--mode", "minimal", code=1)


@pytest.mark.parametrize("made_by_uv", [True, False])
def test_uv_installs_where_it_made_the_environment(pip, monkeypatch, tmp_path, made_by_uv):
    (tmp_path / "pyvenv.cfg").write_text("home = /usr/bin\n" + "uv = 0.9.1\n" * made_by_uv)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(companion_wheels.shutil, "which", lambda name: "/opt/uv" if name == "uv" else None)
    call("install-cubin-wheel", "--flashinfer-version", "0.7.2", "--index-url", URL)
    uv = ["/opt/uv", "pip", "install", "--python", sys.executable, "--upgrade"]
    assert (pip.calls[0][:6] == uv) == made_by_uv


def test_which_binary_a_device_runs():
    assert select_compatible_cuda_architecture("sm90a", ["sm80", "sm90", "sm90a"]) == "sm90a"
    assert select_compatible_cuda_architecture("sm89", ["sm80", "sm86", "sm90a"]) == "sm86"
    assert select_compatible_cuda_architecture("sm121", ["sm120", "sm120f", "sm120a"]) == "sm120f"
    assert select_compatible_cuda_architecture("sm75", ["sm80"]) is None
    with pytest.raises(ValueError, match="Invalid CUDA architecture"):
        select_compatible_cuda_architecture("hopper", ["sm80"])
