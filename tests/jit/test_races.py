# SPDX-License-Identifier: Apache-2.0
"""Concurrent builders on one cache, and builders that die."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from filelock import FileLock, Timeout

from flashinfer.jit import build_jit_specs, clear_cache_dir, gen_jit_spec
from flashinfer.jit import env as jit_env
from flashinfer.jit import load as loading

from .toolbox import TINY, Workshop, fake_cxx, in_processes


def wait_for(path, seconds=20):
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.01)


def test_cold_processes_build_each_module_once(workshop):
    names = ["first", "second", "third"]

    def build(index):
        order = names[index % 3 :] + names[: index % 3]
        return [workshop.spec(name).build_and_load().answer() for name in order]

    for name in names:
        workshop.source(name)
    assert in_processes(8, build) == [[42, 42, 42]] * 8
    assert len(workshop.calls) == 2 * len(names)


def test_cold_processes_with_generated_sources(workshop):
    """Check that sources are rendered inside the lock: no process compiles half a file or invalidates a
    peer's module.
    """
    generated = jit_env.gen_src_dir("cpu") / "op" / "op.cpp"

    def build(index):
        header = generated.with_name("answer.h")
        text = TINY + "// filler\n" * 20000
        spec = gen_jit_spec("op", [generated], backend="cpu", generated={generated: text, header: "#define ANSWER 7\n"})
        return spec.build_and_load().answer()

    assert in_processes(8, build) == [7] * 8
    assert len(workshop.calls) == 2


def test_threads_of_one_process(workshop):
    workshop.source()
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: workshop.spec().build_and_load().answer(), range(8)))
    assert answers == [42] * 8
    assert len(workshop.calls) == 2


def test_groups_in_opposite_order(workshop):
    """Check groups that take several locks: all processes lock in one order, otherwise they would deadlock."""
    names = ["a", "b", "c"]
    for name in names:
        workshop.source(name)

    def build(index):
        build_jit_specs([workshop.spec(name) for name in (names if index % 2 else names[::-1])])
        return True

    assert in_processes(6, build) == [True] * 6
    assert len(workshop.calls) == 2 * len(names)


def test_module_named_twice_in_a_group(workshop):
    """Check a module listed twice: a second lock on it would wait for the first, held by this process."""
    workshop.source()
    assert in_processes(1, lambda _: build_jit_specs([workshop.spec(), workshop.spec()])) == [None]
    assert len(workshop.calls) == 2


@pytest.mark.parametrize("end", ["goes on", "killed"])
def test_group_publishes_each_module_as_it_is_done(workshop, tmp_path, end):
    """Check that each module is published as soon as it is built: waiters load it, and it survives a killed builder."""
    go = tmp_path / "go"
    fake_cxx(workshop.cxx, before=f'case "$*" in *slow.cpp*) while [ ! -e {go} ]; do sleep 0.02; done;; esac')
    fast, slow = workshop.spec("fast"), workshop.spec("slow")
    builder = multiprocessing.get_context("fork").Process(target=build_jit_specs, args=([slow, fast],))
    builder.start()
    wait_for(fast.lock_path)
    assert fast.build_and_load().answer() == 42
    assert not slow.is_fresh()
    if end == "killed":
        os.kill(builder.pid, signal.SIGKILL)
    go.touch()
    builder.join()
    assert fast.is_fresh()
    assert slow.is_fresh() == (end == "goes on")
    assert slow.build_and_load().answer() == 42


@pytest.mark.parametrize("step", ["compile", "link"])
def test_killed_builder_leaves_nothing_that_is_trusted(workshop, tmp_path, step):
    begun, go = tmp_path / "begun", tmp_path / "go"
    pattern = "*-shared*" if step == "link" else "*-c*"
    wait = f'case "$*" in {pattern}) touch {begun}; while [ ! -e {go} ]; do sleep 0.02; done;; esac'
    fake_cxx(workshop.cxx, before=wait)
    spec = workshop.spec()
    builder = multiprocessing.get_context("fork").Process(target=spec.build)
    builder.start()
    wait_for(begun)
    os.kill(builder.pid, signal.SIGKILL)
    builder.join()
    go.touch()  # the orphaned compiler continues

    assert list(spec.build_dir.glob(".build-*"))
    assert not spec.jit_library_path.exists()
    assert not spec.is_fresh()
    assert spec.build_and_load().answer() == 42
    assert spec.is_fresh()
    assert {p.name for p in spec.build_dir.iterdir()} == {"build.ninja", "src_tiny.o", "tiny.so", "tiny.manifest.json"}


def test_death_between_library_and_manifest(workshop, monkeypatch):
    """Check that a library without a manifest, which is written last, is not trusted."""
    spec = workshop.spec()
    monkeypatch.setattr("flashinfer.jit.build.write_manifest", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        spec.build()
    assert spec.jit_library_path.exists()
    assert spec.staleness() == "not built"


def test_old_module_stays_loadable_while_a_new_one_is_built(workshop, tmp_path):
    """Check that publishing renames: open libraries stay valid, and others open the old or the new file, never half."""
    spec = workshop.spec()
    spec.build()
    old = spec.jit_library_path.open("rb")
    size = os.fstat(old.fileno()).st_size
    workshop.set_answer(43)
    spec.build()
    assert os.fstat(old.fileno()).st_ino != spec.jit_library_path.stat().st_ino
    assert len(old.read()) == size


@pytest.mark.parametrize("before", ["nothing", "a library that does not load"])
def test_built_modules_are_loaded_inside_the_lock(workshop, monkeypatch, before):
    """Check that loading happens inside the lock: a peer with other flags might publish in between."""
    spec, held = workshop.spec(), []
    if before != "nothing":
        spec.build()

    def load(path, file):
        try:
            with FileLock(str(spec.lock_path), timeout=0):
                held.append(False)
        except (Timeout, RuntimeError):  # RuntimeError: filelock knows that this thread has it
            held.append(True)
        if before != "nothing" and len(held) == 1:
            raise OSError("cannot open shared object file")
        return load_library(path, file)

    load_library = loading._load_library
    monkeypatch.setattr(loading, "_load_library", load)
    assert spec.build_and_load().answer() == 42
    assert held == ([True] if before == "nothing" else [False, True])
    with FileLock(str(spec.lock_path), timeout=0):
        assert workshop.spec().build_and_load().answer() == 42


def test_lock_of_a_module_that_does_not_load_is_released(workshop):
    spec = workshop.spec(text=TINY + "extern int missing; int* user = &missing;", extra_ldflags=["-Wl,-z,undefs"])
    with pytest.raises(Exception, match="undefined symbol"):
        spec.build_and_load()
    with FileLock(str(spec.lock_path), timeout=0):
        pass


def other_checkout(workshop, tmp_path):
    """Return the spec of the same module in another checkout of this version: its answer is 43."""
    theirs = Workshop(tmp_path / "theirs")
    theirs.set_answer(43)
    return theirs.spec()


@pytest.mark.parametrize("meanwhile", ["published", "deleted"])
@pytest.mark.parametrize("loaded_before", [False, True])
def test_what_was_looked_at_is_loaded(workshop, tmp_path, monkeypatch, meanwhile, loaded_before):
    """Check that the validated file is loaded, whatever happens to its name between validation and load."""
    spec, theirs = workshop.spec(), other_checkout(workshop, tmp_path)
    spec.build()
    if loaded_before:
        assert spec.build_and_load().answer() == 42
    load_library = loading._load_library

    def load(path, file):
        monkeypatch.setattr(loading, "_load_library", load_library)
        if meanwhile == "published":
            theirs.build()
        else:
            clear_cache_dir()
        return load_library(path, file)

    monkeypatch.setattr(loading, "_load_library", load)
    assert spec.build_and_load().answer() == 42
    assert spec.build_and_load().answer() == 42
    assert theirs.build_and_load().answer() == 43


def test_two_checkouts_of_one_version_start_at_once(workshop, tmp_path):
    """Check that each process loads its own library, though each publishes over the other."""
    ours, theirs = workshop.spec(), other_checkout(workshop, tmp_path)

    def start(index):
        return [(theirs if index % 2 else ours).build_and_load().answer() for _ in range(4)]

    assert in_processes(4, start) == [[42] * 4, [43] * 4] * 2


def test_clear_cache_while_others_start(workshop):
    """Check that other processes build again, without failures, and that no file of a running build is deleted."""
    generated = jit_env.gen_src_dir("cpu") / "op" / "op.cpp"
    workshop.source("plain")

    def start(index):
        for _ in range(5):
            if index == 0:
                clear_cache_dir()
                time.sleep(0.05)
            else:
                header = {generated.with_name("answer.h"): "#define ANSWER 7\n"}
                made = gen_jit_spec("op", [generated], backend="cpu", generated={generated: TINY, **header})
                assert (made.build_and_load().answer(), workshop.spec("plain").build_and_load().answer()) == (7, 42)
        return "done"

    assert in_processes(5, start) == ["done"] * 5
    clear_cache_dir()
    assert not jit_env.FLASHINFER_WORKSPACE_DIR.parent.exists()


def test_clear_cache_waits_for_a_builder(workshop, tmp_path):
    begun, go = tmp_path / "begun", tmp_path / "go"
    fake_cxx(workshop.cxx, before=f"touch {begun}; while [ ! -e {go} ]; do sleep 0.02; done")
    with ThreadPoolExecutor(2) as pool:
        building = pool.submit(workshop.spec().build_and_load)
        wait_for(begun)
        clearing = pool.submit(clear_cache_dir)
        time.sleep(0.2)
        assert not clearing.done()
        go.touch()
        assert building.result().answer() == 42
        clearing.result()
    assert not jit_env.FLASHINFER_JIT_DIR.exists()


def test_warm_start_takes_no_lock(workshop):
    spec = workshop.spec()
    spec.build()
    with FileLock(str(spec.lock_path)):
        assert workshop.spec().build_and_load().answer() == 42
    spec.lock_path.unlink()
    assert workshop.spec().build_and_load().answer() == 42
    assert not spec.lock_path.exists()


def test_waiting_says_so(workshop, capfd):
    spec = workshop.spec()
    spec.build_dir.mkdir(parents=True)
    with FileLock(str(spec.lock_path)) as lock, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(spec.build_and_load)
        deadline = time.monotonic() + 10
        said = ""
        while "waiting for another process or thread to build tiny" not in said and time.monotonic() < deadline:
            time.sleep(0.05)
            said += capfd.readouterr().err
        assert said.count("waiting for another process or thread to build tiny") == 1
        lock.release()
        assert waiting.result().answer() == 42
