# SPDX-License-Identifier: Apache-2.0
"""Choices that callers keep: what drops them, what is counted, and that they equal those of a look-up."""

from __future__ import annotations

import threading

import pytest

from flashinfer._runtime import kept as kept_choices
from flashinfer.autotuner import AutoTuner, autotune

from .sleeper import BUCKETS, CONFIG, Sleeper, calls, inputs_of, record_choices

RUNNER = Sleeper()


@pytest.fixture
def made(monkeypatch):
    return record_choices(monkeypatch)


def keep(rows):
    return AutoTuner.get().choose_and_keep(("sleep", rows), "sleep", lambda: [RUNNER], CONFIG, inputs_of(rows))


def look_up(rows):
    return AutoTuner.get().choose_one("sleep", [RUNNER], CONFIG, inputs_of(rows))


def test_choices_equal_those_of_a_look_up(made):
    for _ in range(2):
        assert [keep(rows) for rows in (1, 4, 15, 16)] == [(RUNNER, -1)] * 4
    assert len(made) == 4
    with autotune():
        keep(4)
    del made[:]
    for _ in range(3):
        assert [keep(rows)[1] for rows in (1, 4, 15, 16)] == [(1,), (1,), (1,), (2,)]
    assert len(made) == 4
    assert [look_up(rows) for rows in (1, 4, 15, 16)] == [keep(rows) for rows in (1, 4, 15, 16)]


def _load(tuner, path):
    tuner.save_configs(path)
    tuner.load_configs(path)


def _nested(tuner, path):
    with autotune(False), autotune(False, tuning_buckets=(4,)):
        pass


def _tuned(tuner, path):
    with autotune():
        pass


def _raised(tuner, path):
    with pytest.raises(KeyError), autotune(False):
        raise KeyError


def _loaded_by_a_context(tuner, path):
    with autotune(False, cache=path):
        pass


def _by_hand(tuner, path):
    tuner.is_tuning_mode = True
    tuner.is_tuning_mode = False


CHANGES = {
    "clear_cache": lambda tuner, path: tuner.clear_cache(),
    "load_configs": _load,
    "contexts": _nested,
    "tuning": _tuned,
    "context that raises": _raised,
    "context with a file": _loaded_by_a_context,
    "is_tuning_mode": _by_hand,
    "other results": lambda tuner, path: setattr(tuner, "profiling_cache", dict(tuner.profiling_cache)),
    "added result": lambda tuner, path: tuner.profiling_cache.__setitem__("key", (1, None)),
    "updated results": lambda tuner, path: tuner.profiling_cache.update({}),
    "removed result": lambda tuner, path: tuner.profiling_cache.popitem(),
    "deleted results": lambda tuner, path: tuner.profiling_cache.clear(),
    "reset_statistics": lambda tuner, path: tuner.reset_statistics(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_drop_choices(tuner, made, tmp_path, change):
    with autotune():
        keep(4)
    keep(4)
    keep(4)
    del made[:]
    CHANGES[change](tuner, tmp_path / "tuned.json")
    assert keep(4) == look_up(4) and len(made) == 2, "the tuner was not asked again"
    assert keep(4) == look_up(4) and len(made) == 3, "the new choice was not kept"


def test_a_result_that_fails_to_change_still_drops_choices(tuner, made):
    keep(4)
    with pytest.raises(KeyError):
        del tuner.profiling_cache["no such key"]
    keep(4)
    assert len(made) == 2


def test_nothing_is_kept_inside_of_contexts(tuner, made):
    with autotune(False, tuning_buckets=(16,)):
        keep(4)
        keep(4)
        assert len(made) == 2 and not tuner.kept
        with autotune(skip_ops="sleep"):
            assert keep(4)[1] == -1
    tuner.is_tuning_mode = True
    assert keep(4)[1] == (1,) and not tuner.kept
    tuner.is_tuning_mode = False
    keep(4)
    assert len(made) == 5 and len(tuner.kept) == 1


def test_contexts_of_other_threads_are_seen(tuner, made):
    """Check that a thread outside of ``autotune()`` measures while another one is inside, as ``choose_one`` does."""
    keep(4)
    entered, may_leave = threading.Event(), threading.Event()

    def other():
        with autotune():
            entered.set()
            may_leave.wait(30)

    thread = threading.Thread(target=other)
    thread.start()
    assert entered.wait(30)
    try:
        assert keep(4)[1] == (1,) and calls and not tuner.kept
    finally:
        may_leave.set()
        thread.join()
    assert keep(4)[1] == (1,) and len(tuner.kept) == 1


def test_a_choice_made_during_a_change_is_not_kept(tuner, monkeypatch):
    """Check a result that arrives between a look-up and the moment its choice is kept."""
    real = AutoTuner._choose

    def choose(self, *others):
        found = real(self, *others)
        self.profiling_cache.update({})
        return found

    monkeypatch.setattr(AutoTuner, "_choose", choose)
    assert keep(4)[1] == -1 and not tuner.kept


def test_threads_see_changes():
    """Check many threads while results come and go: after each change, no thread is given the former choice."""
    tuner, stale, stop = AutoTuner.get(), [], threading.Event()
    with autotune():
        keep(4)
    ((key, result),) = [item for item in tuner.profiling_cache.items() if item[0].nearest_profile[0][0] == 4]
    lock, state = threading.Lock(), {"tactic": (1,)}

    def ask():
        while not stop.is_set():
            with lock:
                expected = state["tactic"]
                found = keep(4)[1]
            if found != expected:
                stale.append((expected, found))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for i in range(200):
        with lock:
            state["tactic"] = (1,) if i % 2 else (7,)
            tuner.profiling_cache[key] = (state["tactic"], result[1])
    stop.set()
    for thread in threads:
        thread.join()
    assert not stale


def test_misses_are_counted_as_by_a_look_up(tuner):
    for _ in range(3):
        keep(4)
    assert tuner.stats.cache_misses == 3
    profile = ((BUCKETS[0], 3), (-1,), ())
    assert tuner.stats.cache_miss_config_collection == {"sleep": {profile}}
    tuner.reset_statistics()
    keep(4)
    assert tuner.stats.cache_misses == 1 and tuner.stats.cache_miss_config_collection == {"sleep": {profile}}
    with autotune():
        keep(4)
    keep(4)
    keep(4)
    assert tuner.stats.cache_misses == 1, "known results are no misses"


def test_runners_are_made_when_they_are_needed():
    count = []
    for _ in range(3):
        AutoTuner.get().choose_and_keep("x", "sleep", lambda: count.append(1) or [RUNNER], CONFIG, inputs_of(4))
    assert len(count) == 1


def test_choices_are_bounded(tuner, monkeypatch):
    monkeypatch.setattr(kept_choices, "_MOST_CHOICES", 4)
    for rows in range(1, 20):
        keep(rows)
        assert 1 <= len(tuner.kept) <= 4 and ("sleep", rows) in tuner.kept


def test_one_tuner_for_all_threads(monkeypatch):
    monkeypatch.setattr(AutoTuner, "_instance", None)
    found = []
    threads = [threading.Thread(target=lambda: found.append(AutoTuner.get())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1 and not found[0].kept
