# SPDX-License-Identifier: Apache-2.0
"""Runner with known times: it advances the clock of the measurement."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from flashinfer.autotuner import (
    AutoTuner,
    ConstraintSpec,
    DynamicTensorSpec,
    TunableRunner,
    TuningConfig,
    is_in_profile_measurement,
    make_bucket_mapper,
)

BUCKETS = (4, 16)
TO_BUCKET = make_bucket_mapper(BUCKETS)


def record_choices(monkeypatch):
    """Return a list that receives the name of each operator that the tuner is asked to choose for."""
    asked = []
    real = AutoTuner._choose
    monkeypatch.setattr(AutoTuner, "_choose", lambda self, op, *others: asked.append(op) or real(self, op, *others))
    return asked


class Sleeper(TunableRunner):
    """Runner whose tactic ``(n,)`` takes 4 n ms for up to 4 rows and 4 (4 - n) ms for more; n = 3 fails."""

    def __init__(self, name="one", tactics=(1, 2, 3)):
        self.name, self.tactics = name, tactics

    def get_valid_tactics(self, inputs, profile):
        assert profile.get_opt_shapes()[0] == inputs[0].shape
        return [(n,) for n in self.tactics]

    def get_cache_key_extras(self, inputs):
        return (str(inputs[0].dtype),)

    def forward(self, inputs, tactic=-1, do_preparation=False, **kwargs):
        calls.append((inputs[0].shape[0], tactic, do_preparation, is_in_profile_measurement(), kwargs))
        if tactic == -1:
            return inputs[0]
        if tactic == (3,):
            raise RuntimeError("no such tactic")
        clock.seconds += (tactic[0] if inputs[0].shape[0] <= 4 else 4 - tactic[0]) / 250
        return inputs[0]


calls: list = []
clock = SimpleNamespace(seconds=0.0)
CONFIG = TuningConfig(
    dynamic_tensor_specs=(DynamicTensorSpec((0,), (0,), BUCKETS, TO_BUCKET),),
    constraint_specs=(ConstraintSpec(1, 0, lambda shapes: 2 * shapes[0][0]),),
)


def inputs_of(rows, dtype=torch.float32):
    return [torch.ones(rows, 3, dtype=dtype), torch.ones(2 * rows), "no tensor"]


def choose(rows, runners=None, op="sleep", config=CONFIG, dtype=torch.float32, **kwargs):
    return AutoTuner.get().choose_one(op, runners or [Sleeper()], config, inputs_of(rows, dtype), **kwargs)
