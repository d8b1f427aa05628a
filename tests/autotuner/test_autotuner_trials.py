# SPDX-License-Identifier: Apache-2.0
"""Trials: inputs, rotated argument lists, rankings, ranks."""

from __future__ import annotations

import pytest
import torch

from flashinfer.autotuner import (
    AutoTuner,
    DynamicTensorSpec,
    TuningConfig,
    ValueProfileArena,
    autotune,
    get_autotune_process_group,
    set_autotune_process_group,
)

from .sleeper import BUCKETS, CONFIG, TO_BUCKET, Sleeper, calls, choose, inputs_of


class Writer(Sleeper):
    """Runner that writes into its arguments."""

    def forward(self, inputs, tactic=-1, do_preparation=False, **kwargs):
        for x in inputs[:3]:
            x.add_(1)


def test_the_data_of_the_caller_is_not_changed(tuner):
    """Check that trials never run on the caller's tensors, even if a size equals a bucket; fixed tensors are shared."""
    config = TuningConfig(
        dynamic_tensor_specs=(DynamicTensorSpec(0, 0, BUCKETS, TO_BUCKET),), constraint_specs=CONFIG.constraint_specs
    )
    inputs = [torch.ones(4, 3), torch.ones(8), torch.ones(5), None, "no tensor"]
    seen = []

    class Look(Writer):
        def get_valid_tactics(self, tensors, profile):
            seen.append(tensors)
            return [0]

    with autotune():
        tuner.choose_one("write", [Look()], config, inputs)
    assert torch.equal(inputs[0], torch.ones(4, 3)) and torch.equal(inputs[1], torch.ones(8))
    for tensors in seen:
        assert tensors[2] is inputs[2] and tensors[3:] == [None, "no tensor"]


def test_initializers_are_pairs(tuner):
    config = TuningConfig(tensor_initializers=((1, torch.zeros),), dynamic_tensor_specs=CONFIG.dynamic_tensor_specs)
    profile = tuner._generate_optimization_profiles(config, inputs_of(4))[0]
    assert profile.tensor_initializers == [None, torch.zeros, None]
    with pytest.raises(ValueError, match="tensor_initializers must be pairs"):
        TuningConfig(tensor_initializers=(None, torch.zeros))


def test_lists_of_a_cold_cache(tuner, monkeypatch):
    monkeypatch.setattr(tuner, "_get_l2_cache_size_in_bytes", lambda device=None: 40)
    x, small = torch.arange(12.0).view(3, 4).t(), torch.ones(2)
    cold = TuningConfig(use_cold_l2_cache=True)
    assert tuner.prepare_tactic_profile([x], TuningConfig()) == (TuningConfig(), [[x]])
    config, lists = tuner.prepare_tactic_profile([x, None, "a"], cold)
    assert config == cold and len(lists) == 3  # five times 40 bytes would need more lists, but there are three calls
    assert lists[0][0] is x and len({one[0].data_ptr() for one in lists}) == 3
    assert all(torch.equal(one[0], x) and one[0].stride() == x.stride() and one[1:] == [None, "a"] for one in lists)
    monkeypatch.setattr(tuner, "_get_l2_cache_size_in_bytes", lambda device=None: 3)
    assert len(tuner.prepare_tactic_profile([small], cold)[1]) == 2
    assert len(tuner.prepare_tactic_profile([x], cold)[1]) == 1 and len(tuner.prepare_tactic_profile([], cold)[1]) == 1


@pytest.mark.parametrize("name", ["profile_arena_input_indices", "value_aware_input_indices"])
def test_lists_in_an_arena(tuner, monkeypatch, name):
    cache = 4096
    monkeypatch.setattr(tuner, "_get_l2_cache_size_in_bytes", lambda device=None: cache)
    x, other = torch.arange(12.0, dtype=torch.float16).view(3, 4).t(), torch.ones(5)
    repeated = torch.tensor([1, 2]).expand(3, 2)
    _, lists = tuner.prepare_tactic_profile([x, other, repeated, None], TuningConfig(**{name: (0, 2, 3)}))
    assert len(lists) == tuner.repeat == 3
    assert all(one[1] is other and one[3] is None for one in lists)
    for i, original in ((0, x), (2, repeated)):
        assert len({one[i].data_ptr() for one in lists} | {original.data_ptr()}) == 4
        assert all(torch.equal(one[i], original) and one[i].stride() == original.stride() for one in lists)
    buffers = {one[0].untyped_storage().data_ptr(): one[0].untyped_storage().nbytes() for one in lists}
    assert len(buffers) == 2 and min(buffers.values()) > 2 * cache
    assert lists[0][0].untyped_storage().data_ptr() != lists[1][0].untyped_storage().data_ptr()


def test_an_arena_keeps_its_addresses():
    """The class that published code makes arenas with: other values may be staged, at the same places."""
    x, other, repeated = torch.arange(12.0).view(3, 4).t(), torch.ones(5), torch.tensor([1, 2]).expand(3, 2)
    arena = ValueProfileArena([x, other, repeated, None], (2, 0, 3), num_ring_lanes=3, l2_cache_size_bytes=4096)
    lists = arena.iteration_inputs(5)
    assert all(torch.equal(one[0], x) and torch.equal(one[2], repeated) and one[1] is other for one in lists)
    places = [one[0].data_ptr() for one in lists]
    assert len(set(places)) == 3 and places[:2] == places[3:] and x.data_ptr() not in places
    assert min(one[0].untyped_storage().nbytes() for one in lists) > 2 * 4096
    arena.stage([x + 1, None, (repeated[0] + 1).expand(3, 2), "a"])
    staged = arena.inputs_for_iteration(4)
    assert staged[0].data_ptr() == places[4] and torch.equal(staged[0], x + 1) and x[0].tolist() == [0, 4, 8]
    assert torch.equal(staged[2], repeated + 1) and staged[1] is None and staged[3] == "a"
    with pytest.raises(ValueError, match=r"input 0 must be a tensor of shape \(4, 3\), strides \(1, 4\)"):
        arena.stage([x.contiguous(), None, repeated, None])
    with pytest.raises(ValueError, match=r"input 0 must be a tensor of .*, got NoneType"):
        arena.stage([None] * 4)
    with pytest.raises(ValueError, match="num_ring_lanes must be at least 1, got 0"):
        ValueProfileArena([x], (0,), 0, 4096)


def test_all_tactics_see_the_same_lists(tuner, monkeypatch):
    hooked, seen = [], []

    def profile(self, runner, inputs, tactic, tuning_config, input_tensor_batches=None, **kwargs):
        seen.append((inputs[0].shape[0], input_tensor_batches, kwargs))
        assert input_tensor_batches[0] == inputs or input_tensor_batches[0] is inputs
        return 5.0 - tactic[0]

    def hook(inputs):
        hooked.append(inputs[0].shape[0])
        return [*inputs[:2], "hooked"]

    monkeypatch.setattr(AutoTuner, "_profile_single_kernel", profile)
    config = TuningConfig(
        dynamic_tensor_specs=CONFIG.dynamic_tensor_specs, constraint_specs=CONFIG.constraint_specs, inputs_pre_hook=hook
    )
    with autotune():
        assert choose(4, [Sleeper(tactics=(1, 2))], config=config, factor=2)[1] == (2,)
    assert hooked == [16, 4] and [rows for rows, *_ in seen] == [16, 16, 4, 4]
    assert seen[0][1] is seen[1][1] and seen[0][1][0][2] == "hooked" and seen[0][2] == {"factor": 2}


def test_calls_take_turns_with_the_lists(tuner):
    lists = [[torch.ones(1)] for _ in range(3)]
    seen = []

    class Look(Sleeper):
        def forward(self, inputs, tactic=-1, do_preparation=False, **kwargs):
            seen.append(inputs)

    assert tuner.profile_tactic(Look(), lists[0], (1,), TuningConfig(), lists) == 0
    warmup, timed = seen[: tuner.warmup], seen[tuner.warmup :]
    assert warmup == [lists[-1]] and all(one is two for one, two in zip(timed, lists, strict=True))


def test_rankings(tuner):
    def rank(k, runner=None, rows=4, op="sleep"):
        return tuner.rank_tactics(op, [runner or Sleeper(tactics=(2, 3, 1))], CONFIG, inputs_of(rows), k)

    for k in (1, 3):
        assert rank(k) == [-1] and calls == []
    with pytest.raises(ValueError, match="k must be at least 1, got 0"):
        rank(0)
    with pytest.raises(ValueError, match="runners must have 1 element, got 2"):
        tuner.rank_tactics("sleep", [Sleeper(), Sleeper()], CONFIG, inputs_of(4))
    with autotune():
        assert rank(3, rows=9) == [(1,), (2,)]  # the third tactic fails
        assert {rows for rows, *_ in calls} == {4}  # only the bucket of these inputs
        tried = len(calls)
        assert rank(2) == [(1,), (2,)] and rank(1) == [(1,)] and len(calls) > tried  # k = 1 tunes as usual
        tried = len(calls)
        assert rank(9, Sleeper("broken", (3,))) == [-1] and tuner.stats.failed_tactics["sleep::Sleeper"] == {(3,)}
        tried = len(calls)
        with autotune(skip_ops="sleep"):
            assert rank(3) == [-1] and len(calls) == tried
    assert rank(3) == [(1,)] == rank(1) and len(calls) == tried


def test_rankings_measure_what_is_known(tuner):
    """Check that a ranking measures again: a known winner, measured or from a file, does not tell the second best."""
    runner = Sleeper(tactics=(2, 1))
    key = tuner._get_cache_key("sleep", runner, ((4, 3), (8,), ()), CONFIG, ("torch.float32",))
    tuner._file_configs[key.file_key] = ("Sleeper", (2,))
    with autotune():
        assert tuner.rank_tactics("sleep", [runner], CONFIG, inputs_of(4)) == [(2,)]
        assert tuner.rank_tactics("sleep", [runner], CONFIG, inputs_of(4), k=2) == [(1,), (2,)]
    assert choose(4, [runner])[1] == (1,) and tuner._dirty


@pytest.fixture
def ranks(monkeypatch):
    """Return a group of two ranks; the other rank adds the times in this list, one for each reduction."""
    others: list = []

    def all_reduce(tensor, op=None, group=None):
        assert group == "group"
        tensor += others.pop(0)

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce, raising=False)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2, raising=False)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda group: "gloo", raising=False)
    set_autotune_process_group("group")
    return others


ONE_BUCKET = TuningConfig(dynamic_tensor_specs=(DynamicTensorSpec(0, 0, (4,), lambda rows: 4),))


def test_times_are_the_mean_over_ranks(tuner, ranks):
    """Check mean times: here tactic 1 takes 4 ms and tactic 2 takes 8 ms, on the other rank 20 ms and 1 ms."""
    assert get_autotune_process_group() == "group"
    ranks[:] = [20, 1]
    with autotune():
        assert choose(4, [Sleeper(tactics=(1, 2))], config=ONE_BUCKET)[1] == (2,)
    assert ranks == []
    ranks[:] = [20]
    assert tuner.profile_tactic(Sleeper(), inputs_of(4), (1,), CONFIG) == pytest.approx(12)


def test_ranks_that_fail_take_part(tuner, ranks, monkeypatch):
    infinite = float("inf")
    ranks[:] = [1, infinite, 1]  # tactic 3 fails here, tactic 1 on the other rank
    with autotune():
        assert choose(4, [Sleeper(tactics=(3, 1, 2))], config=ONE_BUCKET)[1] == (2,)
    assert ranks == []

    def no_memory(*args):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(tuner, "_prepare_input_tensors", no_memory)
    ranks[:] = [1, 1]
    with autotune():
        assert choose(4, [Sleeper(tactics=(1, 2))], op="large", config=ONE_BUCKET)[1] == -1
    assert ranks == []


def test_runners_that_cannot_be_prepared(tuner, ranks):
    class Unprepared(Sleeper):
        def forward(self, inputs, tactic=-1, do_preparation=False, **kwargs):
            if do_preparation:
                raise RuntimeError("cannot be prepared")

    ranks[:] = [1, 1, 1]
    with autotune():
        runners = [Unprepared(tactics=(1, 2)), Sleeper(tactics=(1,))]
        assert choose(4, runners, config=ONE_BUCKET) == (runners[1], (1,))
    assert ranks == [] and tuner.stats.failed_tactics["sleep::Unprepared"] == {(1,), (2,)}
