# SPDX-License-Identifier: Apache-2.0
"""Wheels, sdists and editable installs are built from a copy of the tree and inspected. Nothing is compiled."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile

import pytest

from .tree import ROOT, build, copy_tree, listing

VERSION = (ROOT / "version.txt").read_text().strip()


def test_version_scheme():
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.post1)?", VERSION)


def test_requirements_agree_with_pyproject():
    tomllib = pytest.importorskip("tomllib", reason="in the standard library from Python 3.11")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    assert [line for line in lines if not line.startswith("#")] == project["dependencies"]
    assert project["name"] == "flashinfer-python"
    assert project["requires-python"] == ">=3.10"


def test_requirements_are_imported():
    """Check that the package imports what it requires; each requirement is one more download for every user."""
    modules = {"apache-tvm-ffi": "tvm_ffi"}
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    names = [re.split(r"[<>=]", line)[0] for line in lines if not line.startswith("#")]
    text = "\n".join(path.read_text() for path in (ROOT / "flashinfer").rglob("*.py") if "data" not in path.parts)
    unused = [
        name
        for name in names
        if not re.search(
            rf"^\s*(import|from) {modules.get(name, name)}\b|import_module\(.{modules.get(name, name)}", text, re.M
        )
    ]
    assert not unused


def test_old_setuptools_is_named():
    """Check ``--no-build-isolation`` with an old setuptools: version 65 of a new venv only reports an invalid key."""
    program = "import setuptools; setuptools.__version__ = '65.5.0'; import build_backend"
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1].startswith("RuntimeError: setuptools is 65.5.0, expected 77 or newer")


def test_wheel_contents(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        for folder in ("csrc", "include"):
            for path in listing(ROOT / folder):
                shipped = f"flashinfer/data/{folder}/{path}"
                assert archive.read(shipped) == (ROOT / folder / path).read_bytes(), shipped
        modules = {str(p.relative_to(ROOT)) for p in (ROOT / "flashinfer").rglob("*.py") if "data" not in p.parts}
        assert modules <= names
        assert "flashinfer/py.typed" in names
        assert "flashinfer/data/cutlass/README.md" in names
        assert {name.split("/")[0] for name in names} == {"flashinfer", f"flashinfer_python-{VERSION}.dist-info"}
        assert not [name for name in names if name.endswith((".so", ".o", ".pyc"))], "nothing compiled is shipped"
        info = f"flashinfer_python-{VERSION}.dist-info"
        assert "flashinfer = flashinfer.__main__:main" in archive.read(f"{info}/entry_points.txt").decode()
        metadata = archive.read(f"{info}/METADATA").decode()
    assert "Name: flashinfer-python" in metadata
    assert "Requires-Python: >=3.10" in metadata
    assert "Keywords: attention,cuda" in metadata and "Author: The flashinfer contributors" in metadata
    assert "Classifier: Environment :: GPU :: NVIDIA CUDA" in metadata


def test_wheel_is_small(wheel):
    """Check the limit of 3 MB; sources are compiled where they are used."""
    assert wheel.stat().st_size <= 3_000_000


def test_wheel_is_not_tied_to_a_platform(wheel):
    assert wheel.name == f"flashinfer_python-{VERSION}-py3-none-any.whl"


def test_sdist_keeps_the_commit_it_was_made_from(tree, tmp_path):
    """Check the commit in an unpacked sdist: it has no git, so only the shipped file knows the commit."""
    meta = tree / "flashinfer" / "_build_meta.py"
    meta.write_text(f'__version__ = "{VERSION}"\n__git_commit__ = "abc123"\n')
    try:
        sdist = build(tree, "build_sdist", tmp_path / "sdist")
    finally:
        meta.unlink()
    with tarfile.open(sdist) as archive:
        # Python has filters from 3.10.12 and 3.11.4 on.
        archive.extractall(tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    unpacked = tmp_path / f"flashinfer_python-{VERSION}"
    assert listing(unpacked / "csrc") == listing(ROOT / "csrc")
    wheel = build(unpacked, "build_wheel", tmp_path / "wheel")
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read("flashinfer/_build_meta.py").decode()
        assert "abc123" in text
        assert f'__version__ = "{VERSION}"' in text


def test_editable_install_links_the_sources(tmp_path):
    tree = copy_tree(tmp_path / "tree")
    stale = tree / "flashinfer" / "data" / "csrc"  # left by hand or by an older install; a link replaces it
    stale.mkdir(parents=True)
    (stale / "old.cu").write_text("")
    build(tree, "build_editable", tmp_path / "out")
    for name, folder in {"csrc": "csrc", "include": "include", "cutlass": "3rdparty/cutlass"}.items():
        link = tree / "flashinfer" / "data" / name
        assert link.is_symlink()
        assert link.resolve() == (tree / folder).resolve()
        assert not os.path.isabs(os.readlink(link)), "a relative link survives moving the checkout"
    assert f'__version__ = "{VERSION}"' in (tree / "flashinfer" / "_build_meta.py").read_text()


def test_commit_comes_from_git(tmp_path):
    tree = copy_tree(tmp_path / "tree")
    git = ["git", "-C", str(tree), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "chore: start"], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    build(tree, "build_editable", tmp_path / "out")
    assert f'__git_commit__ = "{head}"' in (tree / "flashinfer" / "_build_meta.py").read_text()


REMOTES = {
    "https://me:secret@forge.example.org/team/flashinfer.git": "https://forge.example.org/team/flashinfer",
    "git@forge.example.org:team/flashinfer.git": "https://forge.example.org/team/flashinfer",
    "/srv/git/flashinfer": "",
}


@pytest.mark.parametrize("remote, url", REMOTES.items())
def test_package_page_links_to_the_repository(remote, url, tmp_path):
    """Check what a package index shows: no link to a file that only the repository has, and no password of a remote."""
    tree = copy_tree(tmp_path / "tree")
    subprocess.run(["git", "-C", str(tree), "init", "-q"], check=True)
    subprocess.run(["git", "-C", str(tree), "remote", "add", "origin", remote], check=True)
    (tree / "README.md").write_text("[a](docs/a.md), [web](https://w.example.org) and [below](#below)\n")
    before = listing(tree)
    info = build(tree, "prepare_metadata_for_build_wheel", tmp_path / "out")
    assert listing(tree) == before
    metadata = (info / "METADATA").read_text()
    link = f"[a]({url}/blob/HEAD/docs/a.md)" if url else "a"
    assert f"{link}, [web](https://w.example.org) and [below](#below)" in metadata
    assert ("Project-URL: Source, " + url + "\n" in metadata) == bool(url)
    assert "secret" not in metadata
