# SPDX-License-Identifier: Apache-2.0
"""Dumps of expert layers: tables of addresses, which mean nothing in another process, and results without meaning."""

from __future__ import annotations

import inspect
import json
import os

import pytest

import flashinfer.fused_moe  # noqa: F401 - registers its functions
from flashinfer.dump import apis, files

from ..fresh_process import run_python

BEGIN = "import torch, flashinfer.fused_moe as M; bf = torch.bfloat16; t = torch.zeros(1, 4).long()\n"
LAYER = "M.cutlass_fused_moe(torch.randn(4, 64).to(bf), torch.zeros(4, 2).int(), None, *w, bf, [])\n"
WEIGHTS = "w = torch.randn(4, 64, 64).to(bf), torch.randn(4, 64, 32).to(bf)\n"
SHRINK = """
a, z = torch.randn(3, 4, 8, 64).to(bf)[:2], torch.zeros(1).long()
s = M.fill_w_ptr(t, a, 4, 0)
M.bgmv_moe_shrink(torch.zeros(1, 1, 8), torch.randn(1, 64).to(bf), {table}, z, z, z, s)
"""
DELTA = """
a, b = torch.randn(1, 4, 8, 32).to(bf), torch.randn(1, 4, 64, 8).to(bf)
u = torch.zeros(1, 4).long()
sa, sb = M.fill_w_ptr(t, a, 4, 0), M.fill_w_ptr(u, b, 4, 0)
x, pairs, half = torch.randn(4, 32).to(bf), torch.tensor([[0, 3], [1, 2]]), torch.full((2, 2), .5)
M.bgmv_moe_gemm2_lora_delta(
    x, torch.arange(4), t, sa, u, sb, pairs, half, torch.tensor([0, 0]), rank=8, hidden_size=64
)
"""


@pytest.fixture
def dump(tmp_path):
    """Return a function that dumps the calls of a program, and the folder of the dumps."""
    folder = tmp_path / "dumps"

    def run(program):
        env = {**os.environ, "FLASHINFER_LOGLEVEL": "10", "FLASHINFER_LOGDEST": str(tmp_path / "log")}
        run_python(["-c", BEGIN + program], env={**env, "FLASHINFER_DUMP_DIR": str(folder)}, check=True)
        return folder

    return run


def replay(folder):
    return run_python(["-m", "flashinfer", "replay", "--dir", str(folder), "--device", "cpu"], env=dict(os.environ))


def test_calls_with_adapters_and_layers(dump):
    """Check that a process of its own replays all of them, and that results without meaning are not compared."""
    calls = DELTA + SHRINK.format(table="t") + WEIGHTS + 2 * LAYER
    done = replay(dump(calls))
    assert done.returncode == 0 and "Summary: 4 passed, 0 failed" in done.stdout, done.stdout + done.stderr


def test_results_with_a_meaning_are_compared(dump):
    """Check that a table leads to the dumped matrices, and that the first result of a layer counts."""
    folder = dump(SHRINK.format(table="t") + WEIGHTS + LAYER)
    for path, changed in zip(sorted(folder.glob("2*")), ("bank_0__arg_2", "arg_3"), strict=True):
        tensors = dict(files.load_tensors(path, "inputs"))
        tensors[changed] = 2 * tensors[changed]
        files.save_tensors(path, "inputs", tensors, "torch")
    done = replay(folder)
    assert done.returncode == 1 and "0 passed, 2 failed" in done.stdout, done.stdout
    assert "differs in" in done.stdout and "result[0] differs" in done.stdout, done.stdout


@pytest.mark.parametrize("how", ["copy", "stripped", "other rows"])
def test_tables_without_banks_are_refused(dump, how):
    """Check that no address of the dump is read, and that later dumps are replayed."""
    folder = dump(SHRINK.format(table="t.clone()" if how == "copy" else "t") + WEIGHTS + LAYER)
    first = sorted(folder.glob("2*"))[0] / files.METADATA
    lines = []
    for line in first.read_text().splitlines():
        record = json.loads(line)
        if how == "stripped":
            del record["encoded"]["banks"]
        elif how == "other rows":
            record["encoded"]["banks"]["arg_2"] = {"1": "bank_0__arg_2"}
        lines.append(json.dumps(record) + "\n")
    first.write_text("".join(lines))
    done = replay(folder)
    assert done.returncode == 1 and "1 passed, 1 failed" in done.stdout, done.stdout + done.stderr
    assert "w_ptr of bgmv_moe_shrink must be dumped with the bank of each row" in done.stdout


def test_every_parameter_that_holds_addresses_is_known():
    """Check that public functions name tables of addresses ``w_ptr...``: others that are pointers have another end."""
    named = set()
    for func in apis._apis.values():
        named |= {name for name in inspect.signature(func).parameters if "ptr" in name and "indptr" not in name}
    known = {name for name in named if name.startswith("w_ptr")}
    assert {"w_ptr", "w_ptr_a", "w_ptr_b"} <= known
    offsets = {"prefix_len_ptr", "token_pos_in_items_ptr", "max_item_len_ptr"}  # published names; they hold numbers
    assert named - known <= offsets
