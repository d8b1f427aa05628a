# SPDX-License-Identifier: Apache-2.0
"""CPU kernels use GCC vector extensions; Clang has them too, partly under other names."""

from __future__ import annotations

import shlex
import shutil
import subprocess

import pytest

from flashinfer.aot import gen_family_modules
from flashinfer.jit import write_if_different

CLANG = next(filter(None, map(shutil.which, ["clang++", *(f"clang++-{n}" for n in range(22, 9, -1))])), None)


@pytest.mark.skipif(CLANG is None, reason="no clang++ on PATH")
@pytest.mark.parametrize("family", ["norm", "rope", "page", "quantization", "sampling", "decode"])
def test_clang_takes_the_launchers(monkeypatch, family):
    """Compile the launchers, which include the CPU kernels. Bindings are skipped: they only declare and export."""
    monkeypatch.setenv("CXX", str(CLANG))
    spec = next(iter(gen_family_modules(family, "cpu")))
    for path, text in spec.generated.items():
        write_if_different(path, text)
    commands = [entry["command"] for entry in spec.get_compile_commands() if "jit_binding" not in entry["file"]]
    assert commands
    for command in commands:
        words = shlex.split(command)
        result = subprocess.run([*words, "-fsyntax-only"], capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
