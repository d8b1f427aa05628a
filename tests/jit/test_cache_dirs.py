# SPDX-License-Identifier: Apache-2.0
"""Home, cache and package folders that are not writable."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile

import pytest

from flashinfer.jit import env as jit_env
from flashinfer.jit import manifest

from .toolbox import ROOT, in_processes, run_python

PROGRAM = """
import sys
from flashinfer.jit import gen_jit_spec
spec = gen_jit_spec("tiny", [sys.argv[1]], backend="cpu")
print(spec.build_and_load().answer())
print(spec.get_library_path())
"""


@pytest.fixture
def homes(workshop, tmp_path, monkeypatch):
    """Return two unwritable places (below a file, which holds for root too), a writable one, and a temporary one."""
    blocked = tmp_path / "file"
    blocked.touch()
    (tmp_path / "home").mkdir()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(blocked / "base"))
    return tmp_path


def warnings_in(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_home_when_the_workspace_is_unwritable(workshop, homes, caplog):
    spec = workshop.spec()
    assert spec.build_and_load().answer() == 42
    assert homes / "home" in spec.jit_library_path.parents
    workshop.spec("other").build()
    (warning,) = warnings_in(caplog)
    assert str(homes / "file" / "base") in warning
    assert str(homes / "home") in warning
    assert "FLASHINFER_WORKSPACE_BASE" in warning
    assert workshop.spec().build_and_load().answer() == 42
    assert len(workshop.calls) == 4


def test_temporary_directory_when_nothing_else_is_writable(workshop, homes, monkeypatch, caplog):
    monkeypatch.setenv("HOME", str(homes / "file"))
    old = os.umask(0o002)  # umask that makes new files group-writable: our cache must not be
    try:
        spec = workshop.spec()
        assert spec.build_and_load().answer() == 42
    finally:
        os.umask(old)
    base = homes / "tmp" / f"flashinfer-{os.getuid()}"
    assert base in spec.jit_library_path.parents
    assert base.stat().st_mode & 0o777 == 0o700
    assert workshop.spec().build_and_load().answer() == 42
    assert len(workshop.calls) == 2
    assert len(warnings_in(caplog)) == 1


@pytest.mark.parametrize("planted", ["open directory", "link"])
def test_temporary_directory_of_somebody_else(workshop, homes, monkeypatch, planted):
    """Check that a temporary directory of another user is not used: its files would be loaded into this process."""
    monkeypatch.setenv("HOME", str(homes / "file"))
    spec = workshop.spec()
    spec.build()
    base = homes / "tmp" / f"flashinfer-{os.getuid()}"
    if planted == "link":
        base.rename(homes / "elsewhere")
        base.symlink_to(homes / "elsewhere")
    else:
        base.chmod(0o777)
    assert not workshop.spec().is_fresh()
    with pytest.raises(RuntimeError, match=r"is not ours alone; set FLASHINFER_WORKSPACE_BASE"):
        workshop.spec().build_and_load()


def test_warm_module_in_an_unwritable_cache(workshop, homes, monkeypatch, caplog):
    """Check a read-only cache, as in a container image: modules are loaded in place, without copy or warning."""
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(homes / "image"))
    workshop.spec().build()
    wanted = homes / "image" / ".cache" / "flashinfer"
    monkeypatch.setattr(jit_env, "_is_writable", lambda path: path != wanted)
    spec = workshop.spec()
    assert spec.build_and_load().answer() == 42
    assert spec.get_library_path().is_relative_to(wanted)
    assert warnings_in(caplog) == []
    workshop.set_answer(43)  # the cached module is stale: the new one is built in the home directory and found there
    assert spec.build_and_load().answer() == 43
    assert workshop.spec().get_library_path().is_relative_to(homes / "home")
    assert workshop.spec().build_and_load().answer() == 43
    assert len(workshop.calls) == 4
    assert len(warnings_in(caplog)) == 1


def test_unloadable_module_in_an_unwritable_cache(workshop, homes, monkeypatch, caplog):
    """Check a library with a valid manifest that this machine cannot load or replace: another is built elsewhere."""
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(homes / "image"))
    spec = workshop.spec()
    spec.build()
    library = spec.jit_library_path
    path, digest = manifest.manifest_path(library), manifest._digest(library.read_bytes())
    library.write_bytes(b"junk")
    path.write_text(path.read_text().replace(digest, manifest._digest(b"junk")))
    wanted = homes / "image" / ".cache" / "flashinfer"
    monkeypatch.setattr(jit_env, "_is_writable", lambda path: path != wanted)
    assert workshop.spec().build_and_load().answer() == 42
    assert "cached tiny cannot be loaded" in caplog.text


def test_level_of_the_log(workshop, homes):
    workshop.source()
    arguments = f"import sys; sys.argv.append({str(workshop.src / 'tiny.cpp')!r})\n"
    quiet = run_python(arguments + PROGRAM, FLASHINFER_LOGGING_LEVEL="error")
    assert quiet.stdout.startswith("42\n"), quiet.stderr
    assert "not writable" not in quiet.stderr
    unknown = run_python(arguments + PROGRAM, FLASHINFER_LOGGING_LEVEL="loud")
    assert (
        "FLASHINFER_LOGGING_LEVEL must be one of DEBUG, INFO, WARNING, ERROR, CRITICAL, or a number" in unknown.stderr
    )
    loud = run_python(arguments + PROGRAM.replace('"tiny"', '"loud"'), FLASHINFER_LOGGING_LEVEL="info")
    assert loud.stderr.count("not writable") == 1
    why = run_python(arguments + PROGRAM.replace('"tiny"', '"why"'), FLASHINFER_LOGGING_LEVEL="debug")
    assert "building why: not built\n" in why.stderr and "why.so\n" in why.stderr
    theirs = "import logging; logging.basicConfig(filename='/dev/null')\n"
    assert "building" not in run_python(theirs + arguments + PROGRAM, FLASHINFER_LOGGING_LEVEL="debug").stderr


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become somebody else")
def test_home_that_may_not_even_be_looked_at(workshop, tmp_path, monkeypatch):
    """Check a home without access rights: an image made by root and run as another user, with HOME=/root."""
    home = tmp_path / "root"
    home.mkdir(mode=0o700)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("FLASHINFER_WORKSPACE_BASE")

    spec = workshop.spec()

    def answer(_):
        os.setuid(65534)
        return str(jit_env.writable_base()), spec.staleness()

    (result,) = in_processes(1, answer)
    temporary = f"{tempfile.gettempdir()}/flashinfer-65534"
    shutil.rmtree(temporary, ignore_errors=True)
    assert result == (temporary, "not built")


def test_what_counts_as_writable(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    assert not jit_env._is_writable(tmp_path / "file" / "x")
    assert not jit_env._is_writable(tmp_path / "dangling" / "x")
    assert jit_env._is_writable(tmp_path / "not" / "yet" / "there")


# ------------------------------------------------------------------------------------------------ real mounts


def in_namespace(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a shell script in a namespace where it may mount."""
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-ec", script]
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHON": sys.executable,
        **environment,
    }
    return subprocess.run(command, env=env, capture_output=True, text=True)


def can_mount() -> bool:
    return bool(shutil.which("unshare")) and in_namespace("mount -t tmpfs none /mnt").returncode == 0


needs_mount = pytest.mark.skipif(not can_mount(), reason="this sandbox does not allow user and mount namespaces")


@needs_mount
def test_read_only_package_and_home(workshop, tmp_path):
    """Build with everything read-only but the cache; then load with the cache read-only too."""
    workshop.source()
    home = tmp_path / "home"
    home.mkdir()
    read_only = 'mount --bind "{0}" "{0}"; mount -o remount,bind,ro "{0}"'.format
    mounts = "; ".join(read_only(path) for path in (ROOT, home, workshop.src))
    run = f"\"$PYTHON\" -c '{PROGRAM}' {workshop.src / 'tiny.cpp'}"
    settings = {"HOME": str(home), "FLASHINFER_WORKSPACE_BASE": str(workshop.base), "CXX": str(workshop.cxx)}
    script = f"{mounts}\n! touch {ROOT}/x\n{run}\n{read_only(workshop.base)}\n! touch {workshop.base}/x\n{run}"
    done = in_namespace(script, **settings)
    library = next(workshop.base.rglob("tiny.so"), None)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"42\n{library}\n" * 2
    assert len(workshop.calls) == 2
    assert "not writable" not in done.stderr


@needs_mount
def test_disk_that_is_full(workshop, tmp_path):
    workshop.source()
    script = f"mount -t tmpfs -o size=16k none {workshop.base}\n\"$PYTHON\" -c '{PROGRAM}' {workshop.src / 'tiny.cpp'}"
    done = in_namespace(script, FLASHINFER_WORKSPACE_BASE=str(workshop.base), CXX=str(workshop.cxx))
    assert done.returncode == 1
    error = done.stderr[done.stderr.rindex("RuntimeError") :]
    assert "No space left on device" in error
    assert "tiny" in error
    assert str(workshop.base) in error
