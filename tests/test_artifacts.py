# SPDX-License-Identifier: Apache-2.0
"""Downloads from an HTTP server that breaks off, changes bytes, stalls and answers with errors; always 127.0.0.1."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from flashinfer import artifacts
from flashinfer._runtime.errors import ArgumentError
from flashinfer.artifacts import ArtifactPath
from flashinfer.jit import cubin_loader, cubins, download
from flashinfer.jit.cubin_loader import download_file, get_artifact

FOLDER = ArtifactPath.FLASHINFER_KERNELS
CONTENT = bytes(range(256)) * 400
SHA = hashlib.sha256(CONTENT).hexdigest()
FILES = [f"m/k{i}.cubin" for i in range(6)]


def _wait(seconds: float) -> None:
    """Sleep, while ``time.sleep`` of the downloads is replaced."""
    threading.Event().wait(seconds)


class Server(ThreadingHTTPServer):
    """Serve ``CONTENT`` for every cubin; ``faults`` are what happens to the next requests for one."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.faults: list[str] = []
        self.seen: list[tuple[str, str]] = []  #: path and range of each request for a cubin
        self.busy, self.most_busy, self.lock = 0, 0, threading.Lock()  #: slow requests at once

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/repository"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *args: object) -> None: ...

    def do_GET(self) -> None:
        if self.path.endswith("checksums.txt"):
            self._answer("".join(f"{SHA}  {name}\n" for name in FILES).encode(), 200, {})
            return
        with self.server.lock:
            wanted = self.headers.get("Range", "")
            self.server.seen.append((self.path, wanted))
            fault = self.server.faults.pop(0) if self.server.faults else ""
        self._serve(fault, int(wanted[6:-1]) if wanted else 0)

    def _serve(self, fault: str, start: int) -> None:
        if fault.isdigit():
            self.send_error(int(fault))
        elif fault == "stall":
            _wait(1.0)
        elif fault == "slow":
            with self.server.lock:
                self.server.busy += 1
                self.server.most_busy = max(self.server.busy, self.server.most_busy)
            _wait(0.1)
            with self.server.lock:  # before the answer, after which the client may ask again
                self.server.busy -= 1
            self._answer(CONTENT, 200, {})
        elif fault == "corrupt":
            self._answer(b"x" + CONTENT[1:], 200, {})
        elif fault == "length":
            self._answer(CONTENT, 200, {"Content-Length": "abc"})
        elif fault == "redirect":
            self._answer(b"", 302, {"Location": "http://[::1"})
        elif fault == "garbage":
            self.wfile.write(b"no http at all\r\n\r\n")
        elif fault == "truncate":
            length = {"Content-Length": str(len(CONTENT) - start)}
            self._answer(CONTENT[start : start + 5000], 206 if start else 200, length)
        elif fault == "whole":  # a server that does not know ranges
            self._answer(CONTENT, 200, {})
        else:
            span = {"Content-Range": f"bytes {start}-{len(CONTENT) - 1}/{len(CONTENT)}"}
            self._answer(CONTENT[start:], 206 if start else 200, span)

    def _answer(self, body: bytes, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def server():
    made = Server()
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()


@pytest.fixture
def folder(server, tmp_path, monkeypatch):
    """Set the server as repository; return the folder of downloads. Waiting between attempts takes no time."""
    monkeypatch.setenv("FLASHINFER_CUBINS_REPOSITORY", server.url)
    monkeypatch.setenv("FLASHINFER_CUBIN_DIR", str(tmp_path / "cubins"))
    monkeypatch.setattr(download.time, "sleep", lambda seconds: None)
    for name in ("NO_DOWNLOAD", "CUBIN_CHECKSUM_DISABLED", "CUBIN_DOWNLOAD_THREADS", "DSL_FMHA_LOCAL_DIR"):
        monkeypatch.delenv(f"FLASHINFER_{name}", raising=False)
    return tmp_path / "cubins"


def leftovers(folder):
    return [
        path.name for path in folder.rglob("*") if path.is_file() and path.suffix not in (".cubin", ".lock", ".txt")
    ]


@pytest.mark.parametrize(
    "faults, ranges",
    [
        (["truncate"], ["", "bytes=5000-"]),
        (["truncate", "truncate"], ["", "bytes=5000-", "bytes=10000-"]),
        (["truncate", "whole"], ["", "bytes=5000-"]),
        (["truncate", "corrupt"], ["", "bytes=5000-", ""]),
        (["corrupt"], ["", ""]),
        (["503", "429"], ["", "", ""]),
        (["garbage"], ["", ""]),
        (["length"], ["", "bytes=102400-"]),
        (["redirect"], ["", ""]),
        (["truncate", "416"], ["", "bytes=5000-", ""]),
    ],
)
def test_faults_that_pass(server, folder, faults, ranges):
    """Check that a download recovers, resumes what it has, and keeps no byte of a wrong file."""
    server.faults = list(faults)
    assert get_artifact("a/x.cubin", SHA) == CONTENT
    assert [wanted for _, wanted in server.seen] == ranges
    assert not leftovers(folder)


def test_stalled_server(server, folder):
    server.faults = ["stall"]
    start = time.monotonic()
    assert download_file(f"{server.url}/x.cubin", folder / "x.cubin", timeout=0.3, sha256=SHA)
    assert time.monotonic() - start < 5


def test_faults_that_stay(server, folder, caplog):
    server.faults = ["corrupt"] * 4
    assert get_artifact("a/x.cubin", SHA) == b""
    assert not (folder / "a" / "x.cubin").exists() and not leftovers(folder), "nothing wrong is published"
    assert f"its SHA-256 is not {SHA}" in caplog.text
    server.faults = ["404"]
    server.seen.clear()
    assert get_artifact("a/x.cubin", SHA) == b""
    assert len(server.seen) == 1, "a file that is not there is not asked for again"


def test_no_server(folder, monkeypatch):
    monkeypatch.setenv("FLASHINFER_CUBINS_REPOSITORY", "http://127.0.0.1:1/")
    assert get_artifact("a/x.cubin", SHA) == b""
    with pytest.raises(
        RuntimeError, match="get_checksums: Failed to fetch the checksum manifest for artifact pin flashinfer/"
    ):
        artifacts.download_artifacts()


def test_part_of_another_process_is_resumed(server, folder):
    """Check what a process that was killed leaves: its bytes are not downloaded again."""
    (folder / "a").mkdir(parents=True)
    (folder / "a" / "x.cubin.part").write_bytes(CONTENT[:70000])
    assert get_artifact("a/x.cubin", SHA) == CONTENT
    assert [wanted for _, wanted in server.seen] == ["bytes=70000-"]


def test_part_of_a_file_without_checksum_is_dropped(server, folder):
    """Check that the beginning of an old file is not joined to the end of a new one."""
    folder.mkdir()
    (folder / "x.cubin.part").write_bytes(b"old" * 1000)
    assert download_file(f"{server.url}/x.cubin", folder / "x.cubin")
    assert (folder / "x.cubin").read_bytes() == CONTENT


def test_checksums_can_be_disabled(server, folder, monkeypatch):
    server.faults = ["corrupt"]
    monkeypatch.setenv("FLASHINFER_CUBIN_CHECKSUM_DISABLED", "1")
    assert get_artifact("a/x.cubin", SHA) == b"x" + CONTENT[1:]


def test_pool(server, folder, monkeypatch):
    """Check that FLASHINFER_CUBIN_DOWNLOAD_THREADS bounds the requests at once, and that nothing is fetched twice."""
    monkeypatch.setenv("FLASHINFER_CUBIN_DOWNLOAD_THREADS", "2")
    server.faults = ["slow"] * 6
    assert artifacts.get_artifacts_status() == tuple((FOLDER + name, False) for name in FILES)
    artifacts.download_artifacts()
    assert server.most_busy == 2 and len(server.seen) == len(FILES)
    artifacts.download_artifacts()
    assert len(server.seen) == len(FILES)
    assert all(is_here for _, is_here in artifacts.get_artifacts_status())


def test_pool_names_what_failed(server, folder):
    server.faults = ["404"]
    with pytest.raises(RuntimeError, match=r"Failed to download cubins: .*k\d\.cubin"):
        artifacts.download_artifacts()


def test_no_download(server, folder, monkeypatch):
    monkeypatch.setenv("FLASHINFER_NO_DOWNLOAD", "1")
    with pytest.raises(RuntimeError, match=r"x\.cubin.*FLASHINFER_NO_DOWNLOAD"):
        get_artifact("a/x.cubin", SHA)
    assert server.seen == []


def test_local_folder_of_dsl_kernels(server, folder, monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHINFER_DSL_FMHA_LOCAL_DIR", str(tmp_path))
    (tmp_path / "x.cubin").write_bytes(CONTENT)
    assert get_artifact("dsl/fmha/x.cubin", SHA) == CONTENT and server.seen == []
    assert get_artifact("other/x.cubin", SHA) == CONTENT and len(server.seen) == 1
    (tmp_path / "x.cubin").write_bytes(b"changed")
    assert get_artifact("dsl/fmha/x.cubin", SHA) == CONTENT and len(server.seen) == 2


def test_file_urls(folder, tmp_path, monkeypatch):
    (tmp_path / "my files").mkdir()
    (tmp_path / "my files" / "x.cubin").write_bytes(CONTENT)
    monkeypatch.setenv("FLASHINFER_CUBINS_REPOSITORY", (tmp_path / "my files").as_uri())
    assert get_artifact("x.cubin", SHA) == CONTENT
    with pytest.raises(ArgumentError, match="source must be http, https, file or a path"):
        download_file("ftp://a.b/c", tmp_path / "c")


@pytest.mark.parametrize("name", ["/etc/passwd", "../x.cubin", "a/../../x.cubin", "http://other.host/x.cubin"])
def test_names_stay_in_their_folder(server, folder, name):
    with pytest.raises(ArgumentError, match="file_name must lie in the repository"):
        get_artifact(name, SHA)
    assert server.seen == []


def test_companion_is_never_written(server, folder, tmp_path, monkeypatch):
    """Check that downloads and clear-cubin leave the installed package flashinfer-cubin alone."""
    monkeypatch.delenv("FLASHINFER_CUBIN_DIR")
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path / "base"))
    companion = tmp_path / "site"
    (companion / "a").mkdir(parents=True)
    (companion / "a" / "y.cubin").write_bytes(CONTENT)
    monkeypatch.setitem(vars(cubin_loader.jit_env), "FLASHINFER_CUBIN_DIR", companion)
    assert get_artifact("a/y.cubin", SHA) == CONTENT and server.seen == []
    assert get_artifact("a/x.cubin", SHA) == CONTENT and len(server.seen) == 1
    artifacts.clear_cubin()
    assert [path.name for path in companion.rglob("*.cubin")] == ["y.cubin"]
    assert not (tmp_path / "base" / ".cache" / "flashinfer" / "cubins").exists()


def test_processes_download_once(server, folder):
    """Check two processes that want the same file at once: one downloads it, both get it."""
    program = f"from flashinfer.jit.cubin_loader import get_artifact; print(len(get_artifact('a/x.cubin', '{SHA}')))"
    server.faults = ["slow"]
    started = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate(timeout=120)[0].strip() for process in started] == [str(len(CONTENT))] * 2
    assert len(server.seen) == 1


def test_repository_of_our_own_cubins(folder, tmp_path, monkeypatch):
    """Check names, checksums and commands with a compiler that copies the source."""
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo "release 13.0, V13.0.1" && echo "Build 1" && exit\n'
        '[ "$1" = --dryrun ] && exit\n'
        'for word in "$@"; do last=$word; done\necho "$*" > "$last"\n'
    )
    nvcc.chmod(0o755)
    monkeypatch.setenv("FLASHINFER_NVCC", str(nvcc))
    monkeypatch.setenv("FLASHINFER_NVCC_LAUNCHER", "")
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "8.0 9.0a")
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path / "base"))
    cubins.main(["--out-dir", str(tmp_path / "repository"), "--family", "concat_ops"])
    made = sorted((tmp_path / "repository" / FOLDER).rglob("*.cubin"))
    assert made and {path.name.split(".")[-2] for path in made} == {"sm_80", "sm_90a"}
    command = next(path for path in made if ".sm_90a." in path.name).read_text()
    assert "-arch=sm_90a -cubin" in command and "-gencode" not in command
    monkeypatch.setenv("FLASHINFER_CUBINS_REPOSITORY", str(tmp_path / "repository"))
    artifacts.download_artifacts()
    assert len(artifacts.get_artifacts_status()) == len(made)
    assert all(is_here for _, is_here in artifacts.get_artifacts_status())
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "ninety")
    with pytest.raises(SystemExit, match=r"target must be .*got 'ninety'"):
        cubins.main(["--out-dir", str(tmp_path / "repository")])
