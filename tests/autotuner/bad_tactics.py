# SPDX-License-Identifier: Apache-2.0
"""An operator whose tactics fail in every way; child processes of test_blocklist_gen.py import it."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from flashinfer.autotuner import TunableRunner
from flashinfer.autotuner.blocklist_gen import Probe, Sizes


class Unreliable(TunableRunner):
    """Write ones; which of the tactics do is in their names."""

    def get_valid_tactics(self, inputs: Any, profile: Any) -> Any:
        return ["good", "raises", "exits", ("wrong", 1), "hangs", "good too"]

    def forward(self, inputs: Any, tactic: Any = -1, do_preparation: bool = False, **kwargs: Any) -> Any:
        if tactic == "raises":
            raise RuntimeError("no kernel")
        if tactic == "exits":
            os._exit(3)
        if tactic == "hangs":
            time.sleep(600)
        inputs[0].fill_(1.5 if tactic == ("wrong", 1) else 1.0)


def probe(sizes: Sizes) -> Probe:
    out = torch.empty(sizes.rows, 4)
    return Probe("ones", [Unreliable()], [out], out, torch.ones_like(out))


def broken_probe(sizes: Sizes) -> Probe:
    raise MemoryError("no inputs")
