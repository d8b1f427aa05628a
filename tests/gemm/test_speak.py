# SPDX-License-Identifier: Apache-2.0
"""The log names the tile of a product at level 3, and costs nothing below."""

from __future__ import annotations

import logging
import types

import pytest
import torch

from flashinfer.gemm import speak
from flashinfer.gemm.launch import BY_RULE

from ..hopper.devices import needs_hopper

CHOSEN = {"tile": 9, "swap_ab": True, "block_m": 16, "block_n": 64, "cluster": 2, "split_k": True, "share_b": False}
CHOSEN |= {"raster": 8, "reason": "few rows, and few tiles: blocks split K"}


class Module:
    """Stands for a module for Hopper: notes what the rule is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple] = []

    def gemm_sm90_choose(self, *arguments):
        self.asked.append(arguments)
        return CHOSEN

    def gemm_sm90(self, out, a, b, *_):
        return True

    gemm_sm90_ordinary = gemm_sm90_blockscale = gemm_sm90


@pytest.fixture
def lines(monkeypatch):
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("flashinfer.api")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    monkeypatch.setenv("FLASHINFER_LOGLEVEL", "3")
    properties = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    yield found
    log.removeHandler(handler)
    log.setLevel(level)


A, B = torch.empty(16, 4096), torch.empty(512, 4096)


@pytest.mark.parametrize(
    "name, arguments, asked",
    [
        ("gemm_sm90_ordinary", (A, B.mT, *[None] * 4, 0, 0), (16, 512, 4096, 1, 0, False, False, 132)),
        (
            "gemm_sm90",
            (A, B, A, B, *[None] * 3, 0, 1, 0, *BY_RULE, True, False),
            (16, 512, 4096, 1, 0, True, False, 132),
        ),
        ("gemm_sm90_ordinary", (A[None], B[None], *[None] * 3, A, 2, 5), (5, 512, 4096, 1, 2, False, False, 132)),
        ("gemm_sm90_blockscale", (A, B, None, torch.empty(4, 32), None, 1), (16, 512, 4096, 1, 0, False, False, 132)),
    ],
)
def test_line(lines, name, arguments, asked):
    module = Module()
    assert speak.speaking(module, name)(A, *arguments)
    assert module.asked == [asked]
    (line,) = lines
    assert line.startswith(f"gemm_sm90 m={asked[0]} n=512 k=4096")
    assert line.endswith("-> swap_ab 16x64, split_k 2, raster 8 (few rows, and few tiles: blocks split K)")


@pytest.mark.parametrize("has_blocks, inner, gated", [(False, 192, True), (True, 192, False), (True, 256, True)])
def test_tiles_of_a_layer(lines, has_blocks, inner, gated):
    """GEMM 1 activates its results, with scales of blocks where these are whole blocks; 1 of 4 pairs is here."""
    module, ids = Module(), torch.empty(16, 2)
    weights = torch.empty(8, 2 * inner, 512), torch.empty(8, 512, inner)
    launch = speak.speaking_layer(module, lambda *arguments: arguments, 4, has_blocks, True)
    assert launch(A, ids, None, *weights, None)[1] is ids
    assert module.asked == [(8, 2 * inner, 512, 8, 3, False, gated, 132), (8, 512, inner, 8, 3, False, False, 132)]
    assert lines[0].startswith("cutlass_fused_moe tokens=16 top_k=2 -> GEMM 1 swap_ab 16x64, split_k 2, raster 8 (few")
    assert speak.speaking_layer(module, lambda *arguments: None, 4, has_blocks, True)(A, ids, None, *weights) is None
    assert len(lines) == 1, "a call that needs checks has no tiles yet"


def test_a_given_tile_is_not_the_choice_of_the_rule(lines):
    module = Module()
    assert speak.speaking(module, "gemm_sm90")(A, A, B, *[None] * 5, 0, 1, 0, 7, 2, 0, 0, 0, True, False)
    assert not module.asked and lines == ["gemm_sm90 m=16 n=512 k=4096 -> tile 7, as measured"]


def test_functions_are_plain_without_the_log(monkeypatch):
    monkeypatch.setenv("FLASHINFER_LOGLEVEL", "1")
    module = Module()
    assert speak.speaking(module, "gemm_sm90") == module.gemm_sm90


def test_the_log_reaches_no_caller(lines):
    """A module that cannot name its choice multiplies all the same."""
    module = types.SimpleNamespace(gemm_sm90_ordinary=lambda *_: True)
    assert speak.speaking(module, "gemm_sm90_ordinary")(A, A, B.mT, *[None] * 4, 0, 0)
    assert len(lines) == 1 and lines[0].startswith("naming the tile failed: AttributeError: ")


@needs_hopper
def test_a_module_names_its_choice():
    from flashinfer.jit.gemm import get_gemm_sm90_module, tiles_of

    chosen = speak.decision(get_gemm_sm90_module("bf16"), 16, 4096, 14336, by_row=False, sms=132)
    tile = tiles_of("bf16")[chosen.tile]
    assert (tile.swapped, tile.block_m, tile.block_n) == (chosen.swap_ab, chosen.block_m, chosen.block_n)
    assert chosen.swap_ab and chosen.reason.startswith("few rows")
