# SPDX-License-Identifier: Apache-2.0
"""``import flashinfer`` reads modules and does nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .tree import ROOT

# Runs in a process of its own. torch comes first: what it does at import is not ours to judge, nor to pay for.
PROBE = """
import json, os, sys, time
import torch
seen = []

def audit(event, args):
    if event == "open" and args[0] is not None:
        path, mode, flags = args
        write = (isinstance(mode, str) and any(c in mode for c in "wax+")) or (
            isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        if write and "__pycache__" not in str(path):
            seen.append(["open", str(path)])
    elif event in ("subprocess.Popen", "os.system", "os.posix_spawn", "os.exec", "os.fork", "os.mkdir", "ctypes.dlopen",
                   "socket.connect", "os.rename", "os.remove", "os.symlink"):
        seen.append([event, repr(args)[:200]])

sys.addaudithook(audit)
start = time.perf_counter()
import flashinfer
seconds = time.perf_counter() - start
optional = ["tvm_ffi", "safetensors", "matplotlib", "cupti", "jinja2", "requests"]
print(json.dumps({
    "seen": seen,
    "seconds": seconds,
    "cuda": torch.cuda.is_initialized(),
    "optional": [name for name in optional if name in sys.modules],
    "version": flashinfer.__version__,
}))
"""


def probe(env_changes):
    # -B: a byte-compiled module written beside its source would be Python's doing, and only the first time.
    env = {**os.environ, "PYTHONPATH": str(ROOT), **env_changes}
    env = {k: v for k, v in env.items() if not k.startswith("FLASHINFER_")}
    done = subprocess.run([sys.executable, "-B", "-c", PROBE], env=env, cwd="/", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("home", ["/nonexistent", "/proc"], ids=["missing", "unwritable"])
def test_import_has_no_side_effects(home):
    result = probe({"HOME": home})
    assert result["seen"] == []
    assert not result["cuda"], "importing touched the GPU"
    assert result["version"] == (ROOT / "version.txt").read_text().strip()


def test_optional_packages_are_not_imported():
    assert probe({})["optional"] == []


def test_import_is_quick():
    """0.2 s on top of torch. The best of five counts: other work on the machine only ever adds time."""
    probe({})  # warms the page cache
    assert min(probe({})["seconds"] for _ in range(5)) < 0.2


def test_import_leaves_the_home_directory_alone(tmp_path):
    probe({"HOME": str(tmp_path)})
    assert list(Path(tmp_path).iterdir()) == []
