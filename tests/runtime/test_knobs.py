# SPDX-License-Identifier: Apache-2.0
"""Settings: parsing of environment variables, and invalid values."""

from pathlib import Path

import pytest

from flashinfer._runtime.errors import ArgumentError
from flashinfer._runtime.knobs import Knob, Knobs, knobs


@pytest.mark.parametrize(
    "attribute, text, value",
    [
        ("jit_verbose", "1", True),
        ("jit_verbose", "off", False),
        ("jit_verbose", "", False),  # an empty value means unset
        ("disable_jit", "0", True),  # any value counts
        ("disable_jit", "", False),
        ("max_jobs", "4", 4),
        ("dump_max_size_gb", "0.5", 0.5),
        ("extra_cflags", "-DA='b c' -O1", ["-DA=b c", "-O1"]),
        ("workspace_base", "~/scratch", Path("/home/someone/scratch")),
        ("dump_dir", "~/dumps", Path("/home/someone/dumps")),
        ("trace_dump_dir", "/a/~/b", Path("/a/~/b")),
        ("logging_level", " debug", "DEBUG"),
        ("logging_level", "5", 5),
    ],
)
def test_value(monkeypatch, attribute, text, value):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv(getattr(Knobs, attribute).variable, text)
    assert getattr(knobs, attribute) == value


@pytest.mark.parametrize(
    "attribute, text, values",
    [
        ("max_jobs", "0", "a whole number from 1 on"),
        ("log_level", "loud", "a whole number from 0 on"),
        ("dump_max_size_gb", "big", "a number from 0 on"),
        ("dump_max_size_gb", "nan", "a number from 0 on"),
        ("jit_verbose", "maybe", "one of 1, true, yes, on, 0, false, no, off"),
        ("logging_level", "loud", "one of DEBUG, INFO, WARNING, ERROR, CRITICAL, or a number"),
        ("topk_algo", "fastest", "one of filtered, multi_cta, clusters, cub, default"),
        ("autotune_timer", "watch", "one of globaltimer, cuda_event"),
        ("nvfp4_4over6_err_mode", "max", "one of MAE, MSE"),
        ("confidential_compute", "yes", "one of 1, 0"),
    ],
)
def test_unknown_values_are_errors_that_list_the_known_ones(monkeypatch, attribute, text, values):
    knob = getattr(Knobs, attribute)
    monkeypatch.setenv(knob.variable, text)
    with pytest.raises(ArgumentError) as caught:
        getattr(knobs, attribute)
    assert str(caught.value) == f"{knob.variable} must be {values}, got '{text}'"


def test_override_lasts_as_long_as_its_block(monkeypatch):
    monkeypatch.setenv("MAX_JOBS", "3")
    monkeypatch.delenv("FLASHINFER_JIT_DEBUG", raising=False)
    with pytest.raises(KeyError), knobs.override(max_jobs=None, jit_debug="1"):
        assert knobs.max_jobs is None and knobs.jit_debug
        raise KeyError
    assert knobs.max_jobs == 3 and not knobs.jit_debug


def test_each_variable_is_declared_once():
    names = [knob.variable for knob in Knobs.all()]
    assert len(names) == len(set(names)) and all(isinstance(knob, Knob) and knob.doc for knob in Knobs.all())
