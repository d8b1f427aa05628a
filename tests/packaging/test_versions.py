# SPDX-License-Identifier: Apache-2.0
"""The version of a build: the text of version.txt, an option for another post-release, suffixes of the environment."""

from __future__ import annotations

import subprocess
import sys
import zipfile

import pytest

from .tree import ROOT, build, copy_tree

VERSION = (ROOT / "version.txt").read_text().strip()
RELEASE = ".".join(VERSION.split(".")[:3])


def built_version(wheel):
    """Return the version in the metadata, which must be the one that the package tells at run time."""
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        version = next(
            line[9:] for line in archive.read(metadata).decode().splitlines() if line.startswith("Version: ")
        )
        assert f'__version__ = "{version}"' in archive.read("flashinfer/_build_meta.py").decode()
    return version


def test_suffixes_of_the_environment(tree, tmp_path):
    suffixes = {"FLASHINFER_DEV_RELEASE_SUFFIX": "20261119", "FLASHINFER_LOCAL_VERSION": "cu130"}
    wheel = build(tree, "build_wheel", tmp_path, **suffixes)
    assert built_version(wheel) == f"{VERSION}.dev20261119+cu130"


def test_editable_install_has_the_suffix(tmp_path):
    tree = copy_tree(tmp_path / "tree")
    wheel = build(tree, "build_editable", tmp_path / "out", FLASHINFER_LOCAL_VERSION="mine")
    assert f"{VERSION}+mine" in wheel.name
    assert f'__version__ = "{VERSION}+mine"' in (tree / "flashinfer" / "_build_meta.py").read_text()


def test_option_of_the_same_release(tree, tmp_path):
    assert built_version(build(tree, "build_wheel", tmp_path, {"version": f"{RELEASE}.post7"})) == f"{RELEASE}.post7"


@pytest.mark.parametrize("version", ["9.7.3", f"{RELEASE}.dev1", f"{RELEASE}0", "latest"])
def test_option_of_another_release_is_refused(version):
    program = f"import build_backend as b; b.version_to_build(b.ROOT, {{'version': {version!r}}})"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert (
        f"ValueError: version must be {RELEASE} or {RELEASE}.postN (the API level of this tree), got {version!r}"
        in done.stderr
    )
