# SPDX-License-Identifier: Apache-2.0
"""Repository of kernel binaries: a local folder, a fake server, checksums, missing files."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from flashinfer import artifacts
from flashinfer.artifacts import ArtifactPath
from flashinfer.jit import cubin_loader, download
from flashinfer.jit.cubin_loader import download_file, get_artifact, safe_urljoin

FOLDER = ArtifactPath.TRTLLM_GEN_FMHA
CONTENT = b"machine code"
SHA = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def cubins(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("FLASHINFER_CUBIN_DIR", str(tmp_path / "cubins"))
    return tmp_path / "cubins"


@pytest.fixture
def repository(tmp_path, monkeypatch, cubins) -> Path:
    """Make a repository with one folder that has one file, and no other folders."""
    root = tmp_path / "repository"
    (root / FOLDER).mkdir(parents=True)
    (root / FOLDER / "x.cubin").write_bytes(CONTENT)
    (root / FOLDER / "checksums.txt").write_text(f"{SHA}  x.cubin\n")
    monkeypatch.setenv("FLASHINFER_CUBINS_REPOSITORY", str(root))
    monkeypatch.setattr(artifacts, "_folders", lambda: [FOLDER])
    monkeypatch.setattr(download.time, "sleep", lambda seconds: None)
    return root


@pytest.mark.parametrize(
    "base, path, joined",
    [
        ("https://a.b/c", "d/e", "https://a.b/c/d/e"),
        ("https://a.b/c/", "d/e", "https://a.b/c/d/e"),
        ("https://a.b/c", "/d", "https://a.b/d"),
        ("fmha/x", "y.cubin", "fmha/x/y.cubin"),
    ],
)
def test_urls(base, path, joined):
    assert safe_urljoin(base, path) == joined


def test_nothing_without_a_repository(cubins):
    assert artifacts.FLASHINFER_CUBINS_REPOSITORY == "" and cubins == artifacts.FLASHINFER_CUBIN_DIR
    assert list(artifacts.get_subdir_file_list()) == [] and artifacts.get_artifacts_status() == ()
    artifacts.download_artifacts()
    assert not cubins.exists()
    with pytest.raises(RuntimeError, match="no binaries are published"):
        get_artifact("a.cubin", SHA)


def test_paths_are_strings():
    assert isinstance(ArtifactPath().CUDNN_SDPA, str) and isinstance(ArtifactPath.DEEPGEMM, str)


def test_download(repository, cubins):
    assert artifacts.get_artifacts_status() == ((f"{FOLDER}x.cubin", False),)
    artifacts.download_artifacts()
    assert artifacts.get_artifacts_status() == ((f"{FOLDER}x.cubin", True),)
    assert get_artifact(f"{FOLDER}x.cubin", SHA) == CONTENT
    assert sorted(path.name for path in (cubins / FOLDER).iterdir() if path.suffix != ".lock") == [
        "checksums.txt",
        "x.cubin",
    ]
    artifacts.clear_cubin()
    assert not cubins.exists()


def test_a_changed_file_is_not_accepted(repository, monkeypatch):
    (repository / FOLDER / "x.cubin").write_bytes(b"other code")
    with pytest.raises(RuntimeError, match=r"x\.cubin"):
        artifacts.download_artifacts()
    assert get_artifact(f"{FOLDER}x.cubin", SHA) == b""
    monkeypatch.setenv("FLASHINFER_CUBIN_CHECKSUM_DISABLED", "1")
    assert get_artifact(f"{FOLDER}x.cubin", SHA) == b"other code"


def test_no_download(repository, monkeypatch):
    monkeypatch.setenv("FLASHINFER_NO_DOWNLOAD", "1")
    with pytest.raises(RuntimeError, match=r"y\.cubin.*FLASHINFER_NO_DOWNLOAD"):
        get_artifact("y.cubin", SHA)


def test_checksums_of_an_earlier_download(repository):
    expected = {f"{FOLDER}x.cubin": SHA}
    assert artifacts.get_checksums([FOLDER]) == expected
    (repository / FOLDER / "checksums.txt").unlink()
    assert artifacts.get_checksums([FOLDER]) == expected
    with pytest.raises(RuntimeError, match="other/"):
        artifacts.get_checksums(["other/"])


@pytest.mark.parametrize("name", ["/etc/passwd", "../../x.cubin"])
def test_files_outside_of_their_folder(repository, name):
    (repository / FOLDER / "checksums.txt").write_text(f"{SHA}  {name}\n")
    with pytest.raises(RuntimeError, match="must lie in it"):
        artifacts.get_checksums([FOLDER])


def test_a_file_that_is_not_there(repository, tmp_path, caplog):
    assert not download_file(str(repository / "none"), tmp_path / "here", retries=2)
    assert not (tmp_path / "here").exists() and not list(tmp_path.glob("*.part"))


def test_links_of_a_page(monkeypatch):
    page = '<a href="a.cubin">a</a> <a href="b.h">b</a> <a href="c.cubin">c</a>'
    monkeypatch.setattr(artifacts, "read_url", lambda url, timeout: page)
    assert artifacts.get_available_cubin_files("https://a.b/") == ("a.cubin", "c.cubin")
    assert artifacts.get_available_header_files("https://a.b/") == ("b.h",)

    def error(url, timeout):
        raise OSError("500")

    monkeypatch.setattr(artifacts, "read_url", error)
    assert artifacts.get_available_cubin_files("https://a.b/", retries=1) == ()


def test_links_and_headers(tmp_path):
    target = tmp_path / "real"
    target.mkdir()
    (target / "a.h").write_bytes(CONTENT)
    for _ in range(2):
        cubin_loader.ensure_symlink(tmp_path / "link", target)
    cubin_loader.verify_symlinked_headers(tmp_path / "link", ["a.h"], {"a.h": SHA})
    with pytest.raises(RuntimeError, match=r"a\.h"):
        cubin_loader.verify_symlinked_headers(tmp_path / "link", ["a.h"], {"a.h": "0"})
    assert cubin_loader.get_meta_hash(f"{SHA}  include/flashinferMetaInfo.h\n".encode()) == SHA
