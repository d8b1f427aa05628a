# SPDX-License-Identifier: Apache-2.0
"""The bug-report command: complete, robust, and without secrets."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
from click.testing import CliRunner

import flashinfer
from flashinfer import collect_env
from flashinfer.__main__ import main
from flashinfer.jit.toolchain import find_ninja

SECTIONS = [
    "FlashInfer",
    "Python / Platform",
    "GPU / Driver",
    "CUDA Toolkit",
    "PyTorch",
    "cuDNN Frontend",
    "GPU Libraries: loaded vs on disk",
    "Relevant Packages",
    "Environment Variables",
    "GPU Topology",
]


def test_report_has_every_section():
    report = collect_env.collect_env_info()
    assert list(report) == SECTIONS
    assert report["FlashInfer"]["flashinfer"] == flashinfer.__version__
    assert not [title for title, facts in report.items() if "error" in facts], "a probe failed on a healthy machine"
    text = collect_env.format_report(report)
    assert text.splitlines()[0] == "FlashInfer environment report"
    assert all(f"\n==== {title} ====\n" in text for title in SECTIONS)
    assert json.loads(json.dumps(report)) == report  # serialisable without a custom encoder


def test_a_failing_probe_reports_itself(monkeypatch):
    def broken():
        raise OSError("no such device")

    monkeypatch.setitem(collect_env._SECTIONS, "PyTorch", broken)
    report = collect_env.collect_env_info()
    assert report["PyTorch"] == {"error": "OSError: no such device"}
    assert "no such device" in collect_env.format_report(report)


def test_ninja_is_the_one_that_builds():
    """Check that the reported ninja is the one that builds; PATH may have another."""
    assert collect_env.collect_env_info()["CUDA Toolkit"]["ninja"].startswith(f"{find_ninja()}: 1.")


def test_companion_with_a_cuda_suffix_is_no_mismatch(monkeypatch):
    own = flashinfer.__version__
    versions = {"flashinfer-jit-cache": f"{own}+cu130", "flashinfer-cubin": "0.0.1"}
    monkeypatch.setattr(collect_env, "_installed", versions.get)
    section = collect_env._flashinfer()
    assert section["flashinfer-jit-cache"] == f"{own}+cu130"
    assert section["flashinfer-cubin"] == f"0.0.1 (does not match {own})"


def test_secrets_are_not_shown(monkeypatch):
    monkeypatch.setenv("NCCL_AUTH_TOKEN", "hunter2")
    monkeypatch.setenv("FLASHINFER_LOGLEVEL", "0")
    variables = collect_env._variables()
    assert variables["FLASHINFER_LOGLEVEL"] == "0"
    assert "hunter2" not in str(variables)


@pytest.mark.parametrize("arguments", [["collect-env"], ["collect-env", "--json"]])
def test_command(arguments):
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    if "--json" in arguments:
        assert list(json.loads(result.output)) == SECTIONS
    else:
        assert result.output.startswith("FlashInfer environment report\n")


def test_runs_alone_without_the_package(tmp_path):
    """Run a copy of the file elsewhere, without access to torch and flashinfer."""
    script = tmp_path / "collect_env.py"
    shutil.copy(collect_env.__file__, script)
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [sys.executable, "-S", "-E", str(script), "--json"]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert "ModuleNotFoundError" in report["FlashInfer"]["error"]
    assert report["Python / Platform"]["python"]
