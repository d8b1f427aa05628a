# SPDX-License-Identifier: Apache-2.0
"""``flashinfer.tactics_blocklist_gen``: bad tactics are found in processes of their own."""

from __future__ import annotations

import pytest

from flashinfer._runtime.errors import ArgumentError
from flashinfer.tactics_blocklist import TacticsBlocklist
from flashinfer.tactics_blocklist_gen import PROBE_FUNCTIONS, generate

from .bad_tactics import Unreliable, broken_probe, probe

KEY = "ones::Unreliable"


def test_tactics_that_fail_are_listed(tmp_path, caplog):
    """Check all ways to fail; 8 s is more than a process needs to start, and is waited for once."""
    path = tmp_path / "folder" / "blocklist.json"
    found = generate(path, num_tokens=1, num_experts=1, top_k=1, device="cpu", timeout=8, probes={"mine": probe})
    assert found == {KEY: ["raises", "exits", ["wrong", 1], "hangs"]}
    for text in ("raises RuntimeError: no kernel", "ends the process", "is wrong by 0.5", "does not return in 8 s"):
        assert text in caplog.text
    blocklist = TacticsBlocklist()
    assert blocklist.load(path)
    every = Unreliable().get_valid_tactics([], None)
    assert blocklist.filter("ones", Unreliable(), every) == ["good", "good too"]


@pytest.mark.parametrize("mode", ["Fp8-PerTensor-CUTLASS", "BF16-CUTLASS", "BF16-Relu2-CUTLASS"])
def test_tactics_of_this_package_are_good(device, mode, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = {"num_tokens": 16, "num_experts": 8, "hidden_size": 256, "intermediate_size": 128, "top_k": 2}
    assert generate(quant_modes=[mode], device=device, **sizes) == {}
    (made,) = tmp_path.iterdir()  # the default name
    assert made.name.startswith("tactics_") and made.suffix == ".json"


@pytest.mark.parametrize("name", ["file/list.json", "folder", "x" * 300, "nul\0.json"])
def test_output_that_cannot_be_written(tmp_path, name):
    """Check that this is said before the first tactic runs; the probe would fail."""
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(ArgumentError, match=r"generate: output must be a file that can be written, got .* \(.+\)"):
        generate(tmp_path / name, num_tokens=1, num_experts=1, top_k=1, device="cpu", probes={"mine": broken_probe})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_inputs_that_cannot_be_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RuntimeError, match="broken_probe failed in its process"):
        generate(num_tokens=1, num_experts=1, top_k=1, device="cpu", probes={"mine": broken_probe})


def test_unknown_modes():
    with pytest.raises(ArgumentError, match=r"Unknown quant mode: .* among NvFP4xNvFP4, .*, got \['fp5'\]"):
        generate(quant_modes=["fp5"])
    names = ["NvFP4xNvFP4", "Fp8-Block", "NvFP4-CUTLASS", "Fp8-PerTensor-CUTLASS", "BF16-CUTLASS", "BF16-Relu2-CUTLASS"]
    assert list(PROBE_FUNCTIONS) == names
    with pytest.raises(RuntimeError, match="must be formats with kernels here"):
        generate(quant_modes=["NvFP4-CUTLASS"])
