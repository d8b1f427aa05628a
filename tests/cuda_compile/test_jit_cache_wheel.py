# SPDX-License-Identifier: Apache-2.0
"""A pre-built CUDA module of flashinfer-jit-cache loads on a machine with neither nvcc nor a host compiler.

There is no GPU here: ``FLASHINFER_CUDA_ARCH_LIST`` stands in for it, and the call ends where the launcher asks for a
CUDA tensor. No process may be started, and nothing may be written to the cache.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from flashinfer.jit.companion_wheels import Wheel, minimal_jit_cache_wheel
from tests.packaging.tree import ROOT

PROGRAM = """
import shutil
import sys

STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork")


def forbid(event, arguments):
    if event in STARTS:
        raise AssertionError(f"{event} {arguments}")


import torch

sys.addaudithook(forbid)
import flashinfer
from flashinfer.jit.concat_ops import gen_concat_ops_modules
from flashinfer.jit.toolchain import find_cxx, find_nvcc

assert find_nvcc() is None and find_cxx() is None and shutil.which("ninja") is None
(spec,) = gen_concat_ops_modules("cuda")
assert spec.is_aot and spec.is_compiled
module = spec.build_and_load()
print(spec.get_library_path())
x = torch.zeros(2, 4, 192, dtype=torch.bfloat16)
try:
    module.concat_mla_k(x, x[..., :128].contiguous(), x[:, :1, :64].contiguous())
except (RuntimeError, ValueError) as error:
    print(str(error).splitlines()[0])
"""


def build(folder: Path, *options: str) -> Path:
    """Build a wheel of the folder flashinfer-jit-cache with these options."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("FLASHINFER_AOT")}
    env |= {"FLASHINFER_CUDA_ARCH_LIST": "9.0a", "FLASHINFER_EXTRA_CFLAGS": "-O0"}  # O0: half the host compile time
    before = set(folder.glob("*.whl"))
    words = ["-m", "build", "--no-isolation", "--wheel", "--outdir", str(folder), *(f"-C{each}" for each in options)]
    done = subprocess.run(
        [sys.executable, *words, str(ROOT / "flashinfer-jit-cache")], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = set(folder.glob("*.whl")) - before
    assert "+cu" in wheel.name
    return wheel


def installed(folder: Path, *wheels: Path) -> Path:
    words = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(folder / "site")]
    subprocess.run([sys.executable, *words, *map(str, wheels)], check=True, capture_output=True)
    return folder / "site"


@pytest.fixture(scope="module")
def site(nvcc, tmp_path_factory):
    """Build the wheel of one family for one CUDA target, and install it into a folder."""
    folder = tmp_path_factory.mktemp("jit-cache-cuda")
    return installed(folder, build(folder, "aot=--family concat_ops"))


@pytest.fixture(scope="module")
def wheels(nvcc, tmp_path_factory):
    """Build the provider of one architecture, with one family, and the package that requires two providers."""
    folder = tmp_path_factory.mktemp("jit-cache-providers")
    provider = build(folder, "provider=sm90a", "aot=--family concat_ops")
    return build(folder, "shim=sm80 sm90a"), provider


def run(site, tmp_path, targets: str) -> subprocess.CompletedProcess:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("FLASHINFER_", "CUDA_"))}
    env = {k: v for k, v in kept.items() if k not in ("CXX", "CC")} | {
        "PATH": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)]),
        "FLASHINFER_WORKSPACE_BASE": str(tmp_path / "base"),
        "FLASHINFER_NVCC": str(tmp_path / "nvcc"),
        "FLASHINFER_CUDA_ARCH_LIST": targets,
    }
    return subprocess.run([sys.executable, "-c", PROGRAM], env=env, cwd=tmp_path, capture_output=True, text=True)


def test_loads_without_any_compiler(site, tmp_path):
    done = run(site, tmp_path, "9.0a")
    assert done.returncode == 0, done.stderr
    library, refused = done.stdout.splitlines()
    assert library == str(site / "flashinfer_jit_cache" / "jit_cache" / "concat_mla" / "concat_mla.so")
    assert "CUDA" in refused and "concat_mla_k" in refused
    assert not (tmp_path / "base").exists(), "nothing was built"


def test_other_targets_are_not_taken_from_it(site, tmp_path):
    """Check a GPU that the wheel has no code for: loading would fail at the first launch, so it is not loaded."""
    done = run(site, tmp_path, "8.0")
    assert done.returncode != 0 and "AssertionError" in done.stderr
    assert "are for 90a, not for 80" in done.stderr


def test_wheels_of_a_provider(wheels):
    shim, provider = wheels
    version = shim.name.split("-")[1]
    assert shim.name == f"flashinfer_jit_cache-{version}-py3-none-any.whl"
    assert provider.name.startswith(f"flashinfer_jit_cache_sm90a-{version}-py3-none-manylinux_2_")
    with zipfile.ZipFile(shim) as archive:
        names = {name for name in archive.namelist() if ".dist-info" not in name}
        (metadata,) = (name for name in archive.namelist() if name.endswith("METADATA"))
        required = [line for line in archive.read(metadata).decode().splitlines() if line.startswith("Requires-Dist")]
    assert names == {f"flashinfer_jit_cache/{name}.py" for name in ("__init__", "_names", "_version")}
    assert required == [f"Requires-Dist: flashinfer-jit-cache-{name}=={version}" for name in ("sm80", "sm90a")]
    with zipfile.ZipFile(provider) as archive:
        assert "flashinfer_jit_cache_sm90a/jit_cache/concat_mla/concat_mla.so" in archive.namelist()


def test_modules_of_a_provider(wheels, tmp_path):
    """Check that the loader takes a module from the one provider that is installed, and none for another GPU."""
    site = installed(tmp_path, *wheels)
    done = run(site, tmp_path, "9.0a")
    assert done.returncode == 0, done.stderr
    library = site / "flashinfer_jit_cache_sm90a" / "jit_cache" / "concat_mla" / "concat_mla.so"
    assert done.stdout.splitlines()[0] == str(library)
    assert run(site, tmp_path, "8.0").returncode != 0


def test_minimal_installation_from_an_index(wheels, tmp_path):
    """Check that the provider for a GPU is found in the metadata of the package as it was built."""
    shim, _ = wheels
    version = shim.name.split("-")[1]
    pages = tmp_path / "flashinfer-jit-cache"
    pages.mkdir()
    (pages / "index.html").write_text(f'<a href="{shim.as_uri()}">{shim.name}</a>')
    wheel = Wheel(
        "flashinfer-jit-cache", "JIT Cache", f"flashinfer-jit-cache=={version}", tmp_path.as_uri(), ("", ""), False
    )
    chosen = minimal_jit_cache_wheel(wheel, ["9.0a"], subprocess.run)
    assert chosen.providers == (f"flashinfer-jit-cache-sm90a=={version}",) and not chosen.has_dependencies
    with pytest.raises(
        RuntimeError, match=r"No published jit-cache provider .* sm75\. Available providers: sm80, sm90a"
    ):
        minimal_jit_cache_wheel(wheel, ["sm75"], subprocess.run)


def test_names_of_providers(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "build", "-n", "-w", "-o", str(tmp_path), "-Cprovider=hopper", "flashinfer-jit-cache"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode != 0
    assert "provider must be an architecture such as sm80, sm90a or sm120f, got 'hopper'" in done.stdout + done.stderr
