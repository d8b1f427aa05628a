# SPDX-License-Identifier: Apache-2.0
"""Repository of kernel binaries: a local folder, a fake server, checksums, missing files."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from flashinfer import artifacts
from flashinfer._runtime.errors import ArgumentError
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
    with pytest.raises(RuntimeError, match="Failed to fetch the checksum manifest for artifact pin other/"):
        artifacts.get_checksums(["other/"])


@pytest.mark.parametrize(
    "content",
    [
        b"<html>404</html>",
        b"\0" * 64,
        f"{SHA}\tx.cubin\n".encode(),
        f"{SHA}\n".encode(),
        f"{SHA}  \n".encode(),
        f"{SHA[:-1]}  x.cubin\n".encode(),
        f"{SHA}  x.cubin\n{'g' * 64}  y.cubin\n".encode(),
        f"{SHA}  {'x' * 300}\n".encode(),
        f"{SHA}  a\0b\n".encode(),
        b"\xff\xfe\x80",
        f"{SHA}  \xfc.cubin\n".encode("latin-1"),
        b"",
        b"\n\n",
    ],
)
def test_checksums_that_are_none(repository, cubins, content):
    """Check that a page of a proxy is an error that names the file, and does not replace the earlier file."""
    artifacts.download_artifacts()
    good = (cubins / FOLDER / "checksums.txt").read_bytes()
    (repository / FOLDER / "checksums.txt").write_bytes(content)
    for call in (artifacts.download_artifacts, artifacts.get_artifacts_status):
        with pytest.raises(RuntimeError, match=rf"get_checksums: .*{repository / FOLDER}/checksums\.txt must"):
            call()
    assert (cubins / FOLDER / "checksums.txt").read_bytes() == good
    assert not list(cubins.rglob("*.part"))
    (repository / FOLDER / "checksums.txt").unlink()
    assert artifacts.get_artifacts_status() == ((f"{FOLDER}x.cubin", True),), "the repository does not answer"


def test_damaged_checksums_of_an_earlier_download(repository, cubins):
    artifacts.download_artifacts()
    (repository / FOLDER / "checksums.txt").unlink()
    (cubins / FOLDER / "checksums.txt").write_bytes(b"\0")
    with pytest.raises(RuntimeError, match=rf"each line of {cubins / FOLDER}/checksums\.txt must be"):
        artifacts.get_artifacts_status()


@pytest.mark.parametrize("line", ["{sha} *x.cubin", "{SHA}  x.cubin", "\r\n{sha}  x.cubin\r\n\r\n"])
def test_checksums_as_programs_write_them(repository, line):
    (repository / FOLDER / "checksums.txt").write_text(line.format(sha=SHA, SHA=SHA.upper()))
    artifacts.download_artifacts()
    assert artifacts.get_artifacts_status() == ((f"{FOLDER}x.cubin", True),)


@pytest.mark.parametrize("name", ["a\0.cubin", "x" * 300, "a/" + "x" * 300 + "/b", "", "a//b", "tab\t"])
def test_names_that_no_file_has(repository, name):
    with pytest.raises(ArgumentError, match="file_name must be printable, each part at most 245 bytes"):
        get_artifact(name, SHA)


@pytest.mark.parametrize("destination", ["x" * 300, "file/x", "nul\0"])
def test_destinations_that_cannot_be_written(repository, tmp_path, caplog, destination):
    (tmp_path / "file").touch()
    assert download_file(str(repository / FOLDER / "x.cubin"), tmp_path / destination) is False
    assert "cannot be written" in caplog.text


@pytest.mark.parametrize("name", ["%2e%2e/secret", "a/%2E%2E/%2e./secret", "%2fetc/passwd"])
def test_escaped_names(repository, monkeypatch, name):
    """Check names that leave a file:// repository only once they are unquoted."""
    (repository.parent / "secret").write_bytes(CONTENT)
    monkeypatch.setenv("FLASHINFER_CUBINS_REPOSITORY", repository.as_uri())
    with pytest.raises(ArgumentError, match="must lie in the repository"):
        get_artifact(name, SHA)
    (repository / FOLDER / "checksums.txt").write_text(f"{SHA}  {name}\n")
    with pytest.raises(RuntimeError, match="must lie in it"):
        artifacts.download_artifacts()


@pytest.mark.parametrize("link", ["symbolic", "hard"])
def test_links_are_not_written_through(repository, cubins, tmp_path, link):
    """Check a link by the name of the file in progress, which leads to a file of the user."""
    mine = tmp_path / "mine"
    mine.write_text("mine")
    part = cubins / FOLDER / "x.cubin.part"
    part.parent.mkdir(parents=True)
    part.symlink_to(mine) if link == "symbolic" else part.hardlink_to(mine)
    artifacts.download_artifacts()
    assert mine.read_text() == "mine" and (cubins / FOLDER / "x.cubin").read_bytes() == CONTENT


@pytest.mark.parametrize("is_older", [False, True])
def test_clearing_keeps_what_no_download_made(repository, cubins, is_older):
    """Check a folder that holds other files too, and one of a release that kept no list of downloads."""
    artifacts.download_artifacts()
    get_artifact(f"{FOLDER}x.cubin", SHA)
    mine = [cubins / "thesis.txt", cubins / FOLDER / "notes"]
    for path in mine:
        path.write_text("mine")
    if is_older:
        (cubins / "downloads.txt").unlink()
    artifacts.clear_cubin()
    assert sorted(path for path in cubins.rglob("*") if path.is_file()) == sorted(mine)
    artifacts.clear_cubin()


def test_clearing_stays_in_the_folder(repository, cubins, tmp_path):
    (tmp_path / "mine").write_text("mine")
    artifacts.download_artifacts()
    with open(cubins / "downloads.txt", "a") as file:
        file.write("../mine\n\0\n/etc/none\n")
    artifacts.clear_cubin()
    assert (tmp_path / "mine").exists() and not cubins.exists()


@pytest.mark.parametrize("module", [artifacts, cubin_loader], ids=lambda m: m.__name__)
def test_clearing_deletes_a_rebound_folder_alone(repository, cubins, tmp_path, monkeypatch, module):
    """Check that a program that binds the name to another folder loses that folder and none of its downloads."""
    artifacts.download_artifacts()
    other = tmp_path / "other"
    other.mkdir()
    (other / "stale.cubin").touch()
    monkeypatch.setitem(vars(module), "FLASHINFER_CUBIN_DIR", other)
    artifacts.clear_cubin()
    assert not other.exists() and (cubins / FOLDER / "x.cubin").exists()


@pytest.mark.parametrize("name", ["/etc/passwd", "../../x.cubin"])
def test_files_outside_of_their_folder(repository, name):
    (repository / FOLDER / "checksums.txt").write_text(f"{SHA}  {name}\n")
    with pytest.raises(RuntimeError, match="must lie in it"):
        artifacts.get_checksums([FOLDER])


def test_a_file_that_is_not_there(repository, tmp_path, caplog):
    assert not download_file(str(repository / "none"), tmp_path / "here", retries=2)
    assert not (tmp_path / "here").exists() and not list(tmp_path.glob("*.part"))


def test_links_of_a_page(monkeypatch):
    pages = {
        "https://a.b/": '<a href="a.cubin">a</a> <a href="b.h">b</a> <a href="sub/">s</a> <a href="../">up</a>',
        "https://a.b/sub/": '<a href="c.h">c</a> <a href="./deep/">d</a> <a href="/">root</a>',
        "https://a.b/sub/deep/": '<a href="d.h">d</a>',
    }
    monkeypatch.setattr(artifacts, "read_url", lambda url, timeout: pages[url])
    assert artifacts.get_available_cubin_files("https://a.b/") == ("a.cubin",)
    assert artifacts.get_available_header_files("https://a.b/") == ("b.h", "sub/c.h", "sub/deep/d.h")

    def error(url, timeout):
        raise OSError("500")

    monkeypatch.setattr(artifacts, "read_url", error)
    with pytest.raises(RuntimeError, match="Failed to fetch the cubin artifact index https:"):
        artifacts.get_available_cubin_files("https://a.b/", retries=1)
    with pytest.raises(RuntimeError, match="Failed to fetch the header artifact index https:"):
        artifacts.get_available_header_files("https://a.b/", retries=1)


def test_names_that_programs_replace(repository, cubins, monkeypatch):
    """Check that list, download and comparison are looked up in the module when they are needed."""
    names = [f"k{i}.cubin" for i in range(7)]
    monkeypatch.setattr(artifacts, "get_subdir_file_list", lambda: iter([(name, SHA) for name in names]))
    with pytest.raises(RuntimeError, match=r"Failed to download cubins: k0.cubin, .*k4.cubin, \.\.\. \(\+2 more\)"):
        artifacts.download_artifacts()

    def copy(source, destination, **options):
        destination.parent.mkdir(exist_ok=True)
        destination.write_bytes(CONTENT)
        return True

    monkeypatch.setattr(artifacts, "download_file", copy)
    checked = []
    monkeypatch.setattr(artifacts, "verify_cubin", lambda path, sha256: bool(checked.append((path, sha256))))
    with pytest.raises(RuntimeError, match="Failed to download cubins: checksum mismatch"):
        artifacts.download_artifacts()
    assert (str(cubins / "k0.cubin"), SHA) in checked


def test_downloads_that_the_repository_no_longer_names_are_deleted(repository, cubins, tmp_path, monkeypatch):
    artifacts.download_artifacts()
    (cubins / "mine").touch()
    (repository / FOLDER / "y.cubin").write_bytes(CONTENT)
    (repository / FOLDER / "checksums.txt").write_text(f"{SHA}  y.cubin\n")
    artifacts.download_artifacts()
    assert not (cubins / FOLDER / "x.cubin").exists() and (cubins / "mine").exists()
    other = tmp_path / "other"
    other.mkdir()
    (other / "stale.cubin").touch()
    monkeypatch.setitem(vars(artifacts), "FLASHINFER_CUBIN_DIR", other)
    artifacts.download_artifacts()
    assert (other / FOLDER / "y.cubin").exists() and not (other / "stale.cubin").exists()


def test_retry_window(repository, monkeypatch):
    """Check that failed downloads are tried again until the window is over, and that a bad window is an error."""
    monkeypatch.setenv("FLASHINFER_CUBIN_RETRY_WINDOW_SECONDS", "60")
    pauses = []
    monkeypatch.setattr(artifacts.time, "sleep", pauses.append)
    original = artifacts.download_file

    def later(source, destination, **options):
        return len(pauses) >= 2 and original(source, destination, **options)

    monkeypatch.setattr(artifacts, "download_file", later)
    artifacts.download_artifacts()
    assert 1 <= pauses[0] <= 2 <= pauses[1] <= 4
    for text in ("-1", "soon"):
        monkeypatch.setenv("FLASHINFER_CUBIN_RETRY_WINDOW_SECONDS", text)
        with pytest.raises(RuntimeError, match="Invalid FLASHINFER_CUBIN_RETRY_WINDOW_SECONDS value"):
            artifacts.download_artifacts()


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
