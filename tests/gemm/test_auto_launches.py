# SPDX-License-Identifier: Apache-2.0
"""Kept launches of ``backend="auto"``: the tuner's choice without asking the tuner again.

CPU tensors stand for those of a Hopper here, and the native functions are replaced, as in test_launches.py. The first
call of a size is computed by the CPU kernel, because the checks know where the tensors are.
"""

from __future__ import annotations

import functools
import os
from types import SimpleNamespace

import pytest
import torch

import flashinfer
from flashinfer import utils
from flashinfer._runtime.arch import capability_of
from flashinfer._runtime.requirements import SuitableBackends
from flashinfer.autotuner import AutoTuner, autotune
from flashinfer.gemm import bf16, fp8, launch, tiles, tuning

from ..autotuner.sleeper import record_choices
from ..fresh_process import run_python
from ..hopper.devices import needs_hopper
from .references import BF16, E4M3, FP16, FP32, operand
from .stand_ins import Native

TILE = (3, 2, True)
ROWS = 8


def forget():
    for launches in (bf16._mm_launches, bf16._bmm_launches, fp8._launches):
        launches.clear()


@pytest.fixture(autouse=True)
def tuner(monkeypatch):
    """Give each test a new tuner."""
    found = AutoTuner(warmup=1, repeat=1)
    monkeypatch.setattr(AutoTuner, "_instance", found)
    forget()
    yield found
    forget()


@pytest.fixture
def asked(monkeypatch):
    return record_choices(monkeypatch)


def zeros(*shape, dtype=BF16):
    return torch.zeros(shape, dtype=dtype)


BF16_CALL = {"a": zeros(8, 64), "b": zeros(32, 64).mT, "bias": None, "pdl": False, "out": None, "out_dtype": BF16}
FP8_CALL = {"A": zeros(1, 8, 64, dtype=E4M3), "B": zeros(1, 32, 64, dtype=E4M3).mT, "out": zeros(1, 8, 32)}
FP8_CALL |= {"A_scale": zeros(dtype=FP32), "B_scale": zeros(dtype=FP32)}


@pytest.mark.parametrize(
    "change",
    [{"a": zeros(9, 64)}, {"a": zeros(64, 8).mT}, {"b": zeros(64, 32)}, {"bias": zeros(32)}, {"pdl": True}]
    + [{"out": zeros(32, 8).mT}, {"out_dtype": FP16}],
)  # fmt: skip
def test_facts_of_a_bf16_product(change):
    """A kept choice holds for calls of the same facts: what it and the names of backends depend on is in them."""
    assert tuning.bf16_facts(**BF16_CALL) == tuning.bf16_facts(**BF16_CALL | {"a": zeros(8, 64)})
    assert tuning.bf16_facts(**BF16_CALL) != tuning.bf16_facts(**BF16_CALL | change)


@pytest.mark.parametrize(
    "change",
    [{"A": zeros(1, 9, 64, dtype=E4M3)}, {"A": zeros(1, 64, 8, dtype=E4M3).mT}, {"B": zeros(1, 64, 32, dtype=E4M3)}]
    + [{"A": zeros(1, 8, 64, dtype=torch.float8_e5m2)}, {"B": zeros(1, 32, 64, dtype=torch.float8_e5m2).mT}]
    + [{"out": zeros(1, 32, 8).mT}, {"out": zeros(257)[1:].view(1, 8, 32)}, {"out": zeros(1, 8, 32, dtype=FP16)}]
    + [{"A_scale": zeros(1, dtype=FP32)}, {"B_scale": zeros(1, dtype=FP32)}],
)  # fmt: skip
def test_facts_of_an_fp8_product(change):
    assert tuning.fp8_facts(**FP8_CALL) == tuning.fp8_facts(**FP8_CALL | {"out": zeros(1, 8, 32)})
    assert tuning.fp8_facts(**FP8_CALL) != tuning.fp8_facts(**FP8_CALL | change)


@pytest.fixture
def native(monkeypatch):
    """Pretend that CPU tensors are on a Hopper; return what replaces products by the rule, by tile, and of torch."""
    found = SimpleNamespace(rule=Native(), tile=Native(), torch=[])
    monkeypatch.setitem(capability_of, -1, 90)
    for kind in ("bf16", "fp8"):
        monkeypatch.setitem(launch.ordinary_product, kind, found.rule)
        monkeypatch.setitem(launch.gemm_sm90, kind, found.tile)
    refuse = {kind: lambda *arguments: False for kind in ("bf16", "fp8")}
    monkeypatch.setattr(tiles, "gemm_sm90", refuse)  # the checked way then runs the CPU kernel
    real_mm = torch.mm

    def multiply(*args, **kwargs):
        found.torch.append(args)
        return real_mm(*args, **kwargs)

    def scaled(a, b, *scales, out_dtype, use_fast_accum, out=None):
        found.torch.append((a, b, *scales))
        made = real_mm(a.float(), b.float()).to(out_dtype)
        return made if out is None else out.copy_(made)

    monkeypatch.setattr(torch, "mm", multiply)
    monkeypatch.setattr(torch, "_scaled_mm", scaled)
    return found


@functools.cache
def mm_operands(rows=ROWS, n=64, k=256):
    return operand(rows, k, dtype=BF16, device="cpu"), operand(n, k, dtype=BF16, device="cpu").T


@functools.cache
def fp8_operands(rows=ROWS, n=64, k=256):
    a, b = operand(1, rows, k, dtype=E4M3, device="cpu"), operand(1, n, k, dtype=E4M3, device="cpu").mT
    return a, b, torch.ones(()), torch.ones(())


def call(op, rows=ROWS, **options):
    if op == "bf16_gemm":
        a, b = mm_operands(rows)
        return flashinfer.mm_bf16(b=b, a=a, backend="auto", **options)
    a, b, a_scale, b_scale = fp8_operands(rows)
    return flashinfer.bmm_fp8(B=b, A=a, B_scale=b_scale, A_scale=a_scale, dtype=BF16, backend="auto", **options)


OPS = {"bf16_gemm": (ROWS, 64), "fp8_gemm": (1, ROWS, 64)}


@pytest.mark.parametrize("op", OPS)
def test_the_tuner_is_asked_once_for_a_size(native, asked, op):
    for count in range(3):
        call(op)
        assert asked == [op] and len(native.rule.calls) == count
    call(op, rows=2 * ROWS)
    assert asked == [op] * 2 and len(native.rule.calls) == 2, "another size is another choice"


def test_batched_bf16_has_nothing_to_ask(native, asked):
    a, b = torch.empty(16, ROWS, 768, dtype=BF16), torch.empty(16, 768, 768, dtype=BF16).mT  # our kernel is faster
    for backend in ("auto", "cudnn", "cutile"):
        flashinfer.bmm_bf16(a, b, backend=backend)
        assert (flashinfer.bmm_bf16(a, b, backend=backend) == 1).all()
    assert not asked and len(native.rule.calls) == 3


def test_names_of_suitable_backends(native):
    """Check the list that every call with "auto" leaves, whichever way the call went."""
    a, b = mm_operands()
    padded, out = operand(64, 264, dtype=BF16, device="cpu")[:, :256].T, torch.empty(ROWS, 128, dtype=BF16)[:, ::2]
    bias = operand(64, dtype=BF16, device="cpu")
    changes = [{}, {"bias": bias}, {"pdl": True}, {"out": out}, {"b": padded}, {"out_dtype": FP32}]
    changes += [{"a": operand(ROWS, 264, dtype=BF16, device="cpu")[:, :256]}, {"bias": bias, "out_dtype": FP32}]
    expected = []
    for i in range(2):
        for j, change in enumerate(changes):
            count = len(native.rule.calls)
            flashinfer.mm_bf16(**({"a": a, "b": b, "backend": "auto"} | change))
            names = list(flashinfer.mm_bf16.suitable_auto_backends)
            assert len(native.rule.calls) == count + i, "only the second round goes straight"
            if i == 0:
                expected.append(names)
            assert names == expected[j], change
    assert len({tuple(names) for names in expected}) >= 3
    assert flashinfer.bmm_bf16(a[None], b[None], backend="auto").shape == (1, ROWS, 64)
    assert flashinfer.bmm_bf16.suitable_auto_backends == ["cudnn"]
    for _ in range(2):
        call("fp8_gemm")
        assert flashinfer.bmm_fp8.suitable_auto_backends == ["cublas", "cudnn"]


def test_a_call_in_progress_keeps_its_list():
    suitable = SuitableBackends()
    before = suitable.begin(["one"])
    suitable.note(("two",))
    assert suitable == ["one"]
    suitable.end(before)
    suitable.note(("two",))
    assert suitable == ["two"]


def win(monkeypatch, runner, tactic):
    """Let every trial find that ``tactic`` of ``runner`` is fastest."""
    monkeypatch.setattr(AutoTuner, "_trials", lambda *others: [(runner, tactic, 1.0)])


WINNERS = {
    "bf16_gemm": (tuning._cublaslt_bf16, tuning._own_bf16),
    "fp8_gemm": (tuning._cublaslt_fp8, tuning._own_fp8),
}
CASES = [(op, i, tactic) for op in OPS for i, tactic in ((0, 0), (1, 0), (1, TILE))]


@pytest.mark.parametrize("op, winner, tactic", CASES)
@pytest.mark.parametrize("is_loaded", [False, True])
@pytest.mark.parametrize("is_given", [False, True])
def test_measured_choices(native, asked, tuner, monkeypatch, tmp_path, op, winner, tactic, is_loaded, is_given):
    """Check that the launch runs the runner and the tactic that were measured, or read from a file."""
    runner, path = WINNERS[op][winner], tmp_path / "tuned.json"
    if op == "fp8_gemm":  # CPU tensors have one runner there
        real = AutoTuner.choose_and_keep
        monkeypatch.setattr(
            AutoTuner,
            "choose_and_keep",
            lambda self, facts, op, runners, *others: real(self, facts, op, lambda: list(WINNERS[op]), *others),
        )
    win(monkeypatch, runner, tactic)
    monkeypatch.setattr(type(runner), "get_valid_tactics", lambda *others: [0, TILE])  # those of a Hopper
    given = {"out": torch.empty(OPS[op], dtype=BF16)} if is_given else {}
    with autotune(cache=path):
        call(op, **given)
    if is_loaded:
        tuner.clear_cache()
        assert tuner.load_configs(path)
    native.torch.clear()
    call(op, **given)
    ((chosen, found, is_known, _),) = tuner.kept.values()
    assert chosen is runner and is_known and (tuple(found) if tactic == TILE else found) == tactic
    count = len(asked)
    native.torch.clear()
    result = call(op, **given)
    used = {"torch": len(native.torch), "rule": len(native.rule.calls), "tile": len(native.tile.calls)}
    expected = "torch" if winner == 0 else "tile" if tactic == TILE else "rule"
    assert used == {name: int(name == expected) for name in used}
    assert len(asked) == count and (not is_given or result is given["out"]) and result.shape == OPS[op]
    assert tuner.stats.cache_misses == 0
    if expected == "tile":
        (arguments,) = native.tile.calls
        a, b = arguments[1], arguments[2]
        assert b.shape[-1] == a.shape[-1] and b.stride()[-1] == 1, "weights are (n, k)"
        assert arguments[8:] == (0, 1, 0, *TILE, 0, 0, True, False)


@pytest.mark.parametrize("op", OPS)
def test_a_tile_that_does_not_take_the_operands(native, monkeypatch, op):
    """Check what product_with_tile does: the rule, and if its kernel refuses too, the checked way."""
    expected = call(op)
    win(monkeypatch, WINNERS[op][1], TILE)
    with autotune():
        call(op)
    call(op)
    native.tile.takes = False
    assert (call(op) == 1).all() and len(native.tile.calls) == len(native.rule.calls) == 1
    native.rule.takes = False
    assert call(op).equal(expected)
    assert len(native.tile.calls) == len(native.rule.calls) == 2


def test_other_capabilities(native, monkeypatch, asked):
    """Check that our Hopper kernel runs on Hopper only, and torch's product from Ampere on."""
    for capability, count in ((80, 0), (90, 1), (100, 0), (75, 0), (0, 0)):
        forget()
        monkeypatch.setitem(capability_of, -1, capability)
        native.rule.calls.clear()
        for _ in range(2):
            call("bf16_gemm")
        assert len(native.rule.calls) == count and asked == ["bf16_gemm"]
    win(monkeypatch, tuning._cublaslt_bf16, 0)
    with autotune():
        call("bf16_gemm")
    for capability, count in ((90, 1), (80, 1), (100, 1), (75, 0), (0, 0)):
        forget()
        monkeypatch.setitem(capability_of, -1, capability)
        call("bf16_gemm")
        native.torch.clear()
        call("bf16_gemm")
        assert len(native.torch) == 1 and len(bf16._mm_launches) == count, "the checked way calls torch too"


@pytest.mark.parametrize("op", OPS)
def test_contexts_and_changes(native, asked, tuner, op):
    call(op)
    call(op)
    assert len(native.rule.calls) == 1
    with autotune(False):
        call(op)
        call(op)
    assert len(native.rule.calls) == 1 and len(asked) == 3
    call(op)
    tuner.clear_cache()
    call(op)
    assert len(native.rule.calls) == 1 and len(asked) == 5
    call(op)
    assert len(native.rule.calls) == 2 and len(asked) == 5


@pytest.mark.parametrize("op", OPS)
def test_misses_are_counted(native, tuner, op):
    for count in range(1, 5):
        call(op)
        assert tuner.stats.cache_misses == count
    native.rule.takes = False  # the checked way counts the call then
    call(op)
    assert tuner.stats.cache_misses == 5
    assert len(tuner.stats.cache_miss_config_collection[op]) == 1


PROGRAM = """
import torch, flashinfer
from flashinfer._runtime.arch import capability_of
from flashinfer.gemm import launch

calls = []
capability_of[-1] = 90
launch.ordinary_product["bf16"] = lambda *arguments: calls.append(arguments) or True
b = torch.randn(32, 64).bfloat16().T
for _ in range(3):
    flashinfer.mm_bf16(torch.randn(4, 64).bfloat16(), b, backend="auto")
assert len(calls) == 2
"""


def test_logs_and_traces_see_the_calls(tmp_path):
    log, traces = tmp_path / "log", tmp_path / "traces"
    env = {**os.environ, "FLASHINFER_LOGLEVEL": "1", "FLASHINFER_LOGDEST": str(log)}
    env |= {"FLASHINFER_TRACE_DUMP": "1", "FLASHINFER_TRACE_DUMP_DIR": str(traces)}
    run_python(["-c", PROGRAM], env=env, check=True)
    assert log.read_text().count("FlashInfer API Call: mm_bf16") == 3
    assert [path.name.startswith("mm_bf16") for path in traces.iterdir()] == [True]


@needs_hopper
@pytest.mark.parametrize("rows", [1, 64, 300])
def test_same_bits_as_checked_calls(monkeypatch, rows):
    """Check the real kernels: each choice in turn, straight and through the checks."""
    probe = utils.get_compute_capability
    for op, runners in WINNERS.items():
        function = flashinfer.mm_bf16 if op == "bf16_gemm" else flashinfer.bmm_fp8
        operands = mm_operands(rows, 128) if op == "bf16_gemm" else (*fp8_operands(rows, 128), BF16)
        operands = [x.cuda() if isinstance(x, torch.Tensor) else x for x in operands]
        kind, k = op[: op.index("_")], 256
        tactics = [0, *tiles.tile_tactics(kind, rows, k)]
        for runner, tactic in [(runners[0], 0), *((runners[1], tactic) for tactic in tactics)]:
            AutoTuner.get().clear_cache()
            win(monkeypatch, runner, tactic)
            with autotune():
                function(*operands, backend="auto")
            found = [function(*operands, backend="auto") for _ in range(3)]
            monkeypatch.setattr(utils, "get_compute_capability", lambda device: probe(device))
            expected = function(*operands, backend="auto")
            monkeypatch.setattr(utils, "get_compute_capability", probe)
            assert all(x.equal(expected) for x in found), (op, runner, tactic)
