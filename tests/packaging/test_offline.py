# SPDX-License-Identifier: Apache-2.0
"""An install set made by scripts/offline_prepare.sh is installed and used where there is no network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .tree import ROOT, copy_tree


def shell(*command: object, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a command whose ``python`` is this one and whose proxy is dead: whatever asks a network fails."""
    dead = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:1")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("FLASHINFER_", "PYTHONPATH"))}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**kept, **dead, "PATH": path, "PYTHONDONTWRITEBYTECODE": "1", **more}
    return subprocess.run([str(word) for word in command], cwd=cwd, env=env, capture_output=True, text=True)


def without_network() -> list[str]:
    """Return a prefix that starts a command without network interfaces, where the system allows that."""
    probe = ["unshare", "-n", "true"]
    allowed = shutil.which("unshare") and subprocess.run(probe, capture_output=True).returncode == 0
    return probe[:2] if allowed else []


@pytest.fixture(scope="module")
def install_set(tmp_path_factory) -> Path:
    tree = copy_tree(tmp_path_factory.mktemp("offline") / "tree")
    shutil.copytree(ROOT / "scripts", tree / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    folder = tree.parent / "set"
    done = shell("bash", tree / "scripts" / "offline_prepare.sh", folder, cwd=tree, REQUIREMENTS="no")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_install_without_a_network(install_set, tmp_path):
    site, alone = tmp_path / "site", without_network()
    install = install_set / "offline_install.sh"
    done = shell(*alone, "bash", install, "--target", site, "--no-deps", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    program = "import flashinfer; print(flashinfer.__file__)"
    done = shell(*alone, sys.executable, "-c", program, cwd=tmp_path, PYTHONPATH=str(site))
    assert done.stdout.strip() == str(site / "flashinfer" / "__init__.py"), done.stderr


def test_damaged_set_is_refused(install_set, tmp_path):
    damaged = shutil.copytree(install_set, tmp_path / "set")
    (wheel,) = (damaged / "wheels").iterdir()
    wheel.write_bytes(wheel.read_bytes()[:-1])
    done = shell("bash", damaged / "offline_install.sh", "--target", tmp_path / "site", cwd=tmp_path)
    assert done.returncode == 1 and "a file is damaged" in done.stderr
    assert not (tmp_path / "site").exists()
