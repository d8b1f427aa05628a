# SPDX-License-Identifier: Apache-2.0
"""Caches of other users, and caches writable by others: their owner could run code in this process."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from flashinfer._runtime.errors import MissingJITCacheError
from flashinfer.jit import build_jit_specs
from flashinfer.jit import env as jit_env
from flashinfer.jit.manifest import manifest_path
from flashinfer.jit.toolchain import tvm_ffi_paths

from .toolbox import Workshop, in_processes

SOMEBODY = 65534

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become somebody else")


def folders_of(spec) -> dict[str, Path]:
    """Return the folders that lead to a module, and its library."""
    names = ("module", "modules", "targets", "version", "cache")
    return {
        **dict(zip(names, (spec.build_dir, *spec.build_dir.parents), strict=False)),
        "library": spec.jit_library_path,
    }


@pytest.fixture
def built(workshop):
    spec = workshop.spec()
    spec.build()
    return spec


@pytest.mark.parametrize(
    "which, mode",
    [
        ("module", 0o777),
        ("modules", 0o775),
        ("targets", 0o757),
        ("version", 0o777),
        ("cache", 0o1777),
        ("library", 0o775),
    ],
)
def test_cache_that_others_can_write(workshop, built, caplog, which, mode):
    """Check that such a cache is neither loaded nor built into; the message gives the reason and the remedy."""
    path = folders_of(built)[which]
    path.chmod(mode)
    text = f"{path} is writable by others (mode {mode:04o})"
    assert text in built.staleness()
    if which != "library":  # a build replaces the library
        with pytest.raises(RuntimeError) as caught:
            built.build_and_load()
        assert str(caught.value).startswith(f"tiny: {text}")
        assert "`chmod -R go-w" in str(caught.value) and "set FLASHINFER_WORKSPACE_BASE" in str(caught.value)
        assert len(workshop.calls) == 2
        path.chmod(0o755)
    assert built.build_and_load().answer() == 42
    assert [record.getMessage() for record in caplog.records if text in record.getMessage()], "said why"
    assert len(workshop.calls) == (4 if which == "library" else 2)


@needs_root
@pytest.mark.parametrize("which", ["module", "modules", "targets", "version", "cache", "library"])
def test_cache_of_somebody_else(built, which):
    path = folders_of(built)[which]
    os.chown(path, SOMEBODY, SOMEBODY)
    text = f"{path} belongs to user {SOMEBODY}, not to user 0 who runs this"
    assert text in built.staleness()
    if which != "library":
        with pytest.raises(RuntimeError, match=text):
            built.build_and_load()


@pytest.mark.parametrize("which", [".cache", "."])
def test_place_of_the_cache_that_others_can_write(workshop, built, which):
    """Check parent folders writable by others, who could put another cache there, except under the sticky
    bit (/tmp).
    """
    (workshop.base / which).chmod(0o777)
    assert "is writable by others (mode 0777)" in built.staleness()
    with pytest.raises(
        RuntimeError, match=r"run `chmod o-w .* if you trust its content, or set FLASHINFER_WORKSPACE_BASE"
    ):
        built.build_and_load()
    (workshop.base / which).chmod(0o1777)
    assert built.build_and_load().answer() == 42


def test_generated_sources_that_others_can_write(workshop):
    folder = jit_env.gen_src_dir("cpu") / "tiny"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    with pytest.raises(RuntimeError, match=f"tiny: {folder} is writable by others"):
        workshop.spec().build()


def test_folder_bound_by_hand(workshop, monkeypatch, tmp_path):
    folder = tmp_path / "bound"
    monkeypatch.setitem(vars(jit_env), "FLASHINFER_JIT_DIR", folder)
    spec = workshop.spec()
    assert spec.build_and_load().answer() == 42
    folder.chmod(0o777)
    assert f"{folder} is writable by others" in spec.staleness()


def test_disabled_jit_names_the_reason(built, monkeypatch):
    """Check that a machine that must not compile reports why the existing module is rejected."""
    built.build_dir.chmod(0o777)
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    with pytest.raises(MissingJITCacheError, match="is writable by others"):
        built.build_and_load()


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o077])
def test_own_cache_whatever_the_umask(workshop, umask):
    """Check that our cache is private even if the umask lets the group write new files."""
    old = os.umask(umask)
    try:
        specs = [workshop.spec("one"), workshop.spec("two")]
        build_jit_specs(specs)
        assert [spec.build_and_load().answer() for spec in specs] == [42, 42]
    finally:
        os.umask(old)
    assert len(workshop.calls) == 4


@pytest.fixture
def image(monkeypatch):
    """Return a workshop that other users can read, with all that its modules include.

    The checkout and its ``.venv`` may lie in a private folder, such as the home of root.
    """
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        image = Workshop(Path(folder) / "image")
        monkeypatch.setenv("CXX", str(image.cxx))
        monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(image.base))
        monkeypatch.setitem(vars(jit_env), "FLASHINFER_CSRC_DIR", image.src)
        monkeypatch.setitem(vars(jit_env), "FLASHINFER_INCLUDE_DIR", image.src)
        shutil.copytree(tvm_ffi_paths()[0], image.src / "tvm_ffi")
        yield image


def spec_of(image):
    return image.spec(extra_include_paths=[image.src / "tvm_ffi"])


@needs_root
def test_cache_of_root_is_loaded_by_others(image):
    """Check an image made by root and run as another user, for whom the cache is read-only."""
    spec_of(image).build()

    def load(_):
        os.seteuid(SOMEBODY)
        return spec_of(image).build_and_load().answer()

    assert in_processes(1, load) == [42]


@needs_root
@pytest.mark.parametrize("what", ["answer.h", "tiny.cpp", "manifest", "library"])
def test_image_with_a_file_that_others_cannot_read(image, what):
    """Check that the message names the file: the module is stale for this user, who cannot build it either."""
    spec = spec_of(image)
    spec.build()
    library = spec.jit_library_path
    files = {"manifest": manifest_path(library), "library": library}
    secret = files.get(what, image.src / what)
    secret.chmod(0o600)

    def load(_):
        os.seteuid(SOMEBODY)
        return spec_of(image).build_and_load()

    (text,) = in_processes(1, load)
    assert f"{secret} cannot be read (Permission denied)" in text, text
    assert (f"cannot write to the cache directory {library.parent}" in text) == (what != "tiny.cpp")


@needs_root
def test_untrusted_read_only_cache_is_built_elsewhere(workshop, monkeypatch, tmp_path, caplog):
    """Check that the untrusted module is not used, and that the log gives the reason."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    spec = workshop.spec()
    spec.build()
    theirs = spec.build_dir
    os.chown(theirs, SOMEBODY, SOMEBODY)
    wanted = workshop.base / ".cache" / "flashinfer"
    monkeypatch.setattr(jit_env, "_is_writable", lambda path: path != wanted)
    again = workshop.spec()
    assert again.build_and_load().answer() == 42
    assert again.get_library_path().is_relative_to(tmp_path / "home")
    assert f"not loaded: {theirs} belongs to user {SOMEBODY}" in caplog.text


@pytest.mark.parametrize("hops", [1, 2])
@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_folder_that_a_link_leads_to(workshop, tmp_path, monkeypatch, caplog, hops, mode):
    """Check a library that is a link: whoever can write to the folder of its target can put another file there."""
    spec = workshop.spec("op")
    spec.build()
    folder, link = tmp_path / "aot" / "op", tmp_path / "links" / "op.so"
    theirs = tmp_path / "theirs"
    for path in (folder, link.parent, theirs):
        path.mkdir(parents=True)
    shutil.copy(spec.jit_library_path, theirs / "op.so")
    if hops == 2:
        link.symlink_to(theirs / "op.so")
    (folder / "op.so").symlink_to(link if hops == 2 else os.path.relpath(theirs / "op.so", folder))
    for path in (folder.parent, folder, theirs / "op.so"):
        path.chmod(0o755)
    monkeypatch.setenv("FLASHINFER_AOT_DIR", str(folder.parent))
    assert spec.is_aot
    theirs.chmod(mode)
    assert not spec.is_aot and f"{theirs} is writable by others" in caplog.text
    theirs.chmod(0o755)
    link.parent.chmod(mode)
    assert spec.is_aot == (hops == 1)


def test_links_in_a_circle(workshop, tmp_path, monkeypatch):
    (tmp_path / "aot" / "op").mkdir(parents=True)
    (tmp_path / "aot" / "op" / "op.so").symlink_to("op.so")
    monkeypatch.setenv("FLASHINFER_AOT_DIR", str(tmp_path / "aot"))
    assert not workshop.spec("op").is_aot


@pytest.mark.parametrize("which", ["root", "module", "library"])
def test_prebuilt_modules_that_others_can_write(workshop, tmp_path, monkeypatch, caplog, which):
    """Check a folder of FLASHINFER_AOT_DIR: it is not loaded from, and the module is compiled instead."""
    spec = workshop.spec("op")
    spec.build()
    folder = tmp_path / "aot" / "op"
    folder.mkdir(parents=True)
    library = folder / "op.so"
    library.write_bytes(spec.jit_library_path.read_bytes())
    for path in (folder.parent, folder, library):
        path.chmod(0o755)
    monkeypatch.setenv("FLASHINFER_AOT_DIR", str(folder.parent))
    assert spec.is_aot
    {"root": folder.parent, "module": folder, "library": library}[which].chmod(0o777)
    assert not spec.is_aot
    assert "writable by others (mode 0777)" in caplog.text
    assert "set FLASHINFER_AOT_DIR to a directory of your own" in caplog.text
    assert spec.build_and_load().answer() == 42
