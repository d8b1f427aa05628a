# SPDX-License-Identifier: Apache-2.0
"""GPU clock: the kernel compiles, and trials use it on request."""

from __future__ import annotations

import pytest
import torch

from flashinfer import utils
from flashinfer._runtime import globaltimer
from flashinfer._runtime.knobs import knobs
from flashinfer.autotuner import measure

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_confidential_computing_is_forced_or_found_out(monkeypatch):
    monkeypatch.setattr(globaltimer, "_nvml_says_so", lambda: True)
    assert utils.is_confidential_compute() is True
    for forced, expected in (("0", False), ("1", True)):
        with knobs.override(confidential_compute=forced):
            assert utils.is_confidential_compute() is expected
    for wrong in ("yes", "2"):
        with knobs.override(confidential_compute=wrong), pytest.raises(ValueError, match="must be one of 1, 0"):
            utils.is_confidential_compute()


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_a_gpu():
    assert utils.get_globaltimer_kernel() is None and utils.is_confidential_compute() is False


@pytest.mark.parametrize(
    "timer, confidential, uses_it",
    [
        ("", "0", False),
        ("", "1", True),
        ("globaltimer", "0", True),
        ("cuda_event", "1", False),
    ],
)
def test_the_clock_of_trials(monkeypatch, timer, confidential, uses_it):
    monkeypatch.setattr(utils, "get_globaltimer_kernel", lambda: "kernel", raising=False)
    with knobs.override(autotune_timer=timer, confidential_compute=confidential):
        assert measure._globaltimer() == ("kernel" if uses_it else None)


def test_times_are_between_two_reads():
    now = [0]

    def read(place):
        place[0] = now[0]

    def call():
        now[0] += 2_000_000

    def flush():
        now[0] += 500

    assert measure._time_by_globaltimer(call, 3, flush, read, "cpu") == [2.0, 2.0, 2.0]


@cuda
def test_the_kernel():
    read = utils.get_globaltimer_kernel()
    begin, end = torch.zeros(2, dtype=torch.int64, device="cuda").split(1)
    read(begin)
    torch.cuda._sleep(10_000_000)
    read(end)
    assert 1e6 < (end - begin).item() < 1e9  # 10 million cycles are 5 ms
    with pytest.raises(ValueError, match=r"out must have 1 element.*, got 2"):
        read(torch.zeros(2, dtype=torch.int64, device="cuda"))
