# SPDX-License-Identifier: Apache-2.0
"""``FLASHINFER_TRACE_DUMP``: definitions written while a program runs."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch

import flashinfer
from flashinfer._runtime.knobs import knobs
from flashinfer.fi_trace import attach_fi_trace, dump_call
from flashinfer.trace.templates.norm import rmsnorm_trace

from .programs import execute
from .schema import validate


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_one_file_per_shape_in_the_folder_asked_for(tmp_path):
    code = """
        import flashinfer, torch

        for rows in (1, 2):
            for cols in (64, 96):
                x = torch.ones(rows, cols, dtype=torch.bfloat16)
                assert flashinfer.rmsnorm(x, x[0]).float().sum() == x.numel()
        try:
            flashinfer.scale(x, 2.0)
        except ValueError as error:
            print(error)
    """
    target, cwd = tmp_path / "a" / "b", tmp_path / "cwd"
    cwd.mkdir()
    output = execute(code, cwd, FLASHINFER_TRACE_DUMP="1", FLASHINFER_TRACE_DUMP_DIR=str(target))
    assert "CUDA" in output
    assert files(target) == ["rmsnorm_h64.json", "rmsnorm_h96.json", "scale_2d.json"]  # scale is dumped, then rejected
    assert files(cwd) == []
    for name in files(target):
        validate(json.loads((target / name).read_text()))
        assert (target / name).stat().st_mode & 0o444 == 0o444, "for whoever benchmarks it"


# A call that is rejected at once, so that nothing is compiled before its definition is dumped or not.
REFUSED = """
    import contextlib, flashinfer, torch

    with contextlib.suppress(ValueError):
        flashinfer.scale(torch.ones(4), 2.0)
"""


@pytest.mark.parametrize("value, expected", [("1", ["scale_1d.json"]), ("0", []), (None, [])])
def test_switch_and_current_directory(tmp_path, value, expected):
    execute(REFUSED, tmp_path, **({} if value is None else {"FLASHINFER_TRACE_DUMP": value}))
    assert files(tmp_path) == expected


def api():
    """Make a new function each time: written and failed definitions are remembered by name."""

    def rmsnorm(input, weight, eps=1e-6, out=None):
        raise AssertionError("a dump must not run the function")

    attach_fi_trace(rmsnorm, rmsnorm_trace)
    return rmsnorm


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


def test_variables_may_be_set_after_the_import(tmp_path):
    code = f"""
        import contextlib, os, flashinfer, torch

        os.environ["FLASHINFER_TRACE_DUMP"] = "1"
        os.environ["FLASHINFER_TRACE_DUMP_DIR"] = {str(tmp_path)!r}
        with contextlib.suppress(ValueError):
            flashinfer.scale(torch.ones(4), 2.0)
        del os.environ["FLASHINFER_TRACE_DUMP"]
        with contextlib.suppress(ValueError):
            flashinfer.scale(torch.ones(4, 4), 2.0)
    """
    execute(code, tmp_path)
    assert files(tmp_path) == ["scale_1d.json"]


def test_asking_writes_to_the_folder_of_the_variable(tmp_path):
    """Check that a requested definition is written once per name and process, also without FLASHINFER_TRACE_DUMP."""
    x = torch.empty(2, 24, device="meta")
    with knobs.override(trace_dump_dir=str(tmp_path)):
        made = flashinfer.rmsnorm.fi_trace(input=x, weight=x[0], name="asked_for")
        assert json.loads((tmp_path / "asked_for.json").read_text()) == made
        (tmp_path / "asked_for.json").unlink()
        flashinfer.rmsnorm.fi_trace(input=x, weight=x[0], name="asked_for")
    assert files(tmp_path) == []


def test_a_name_is_written_once(tmp_path):
    with knobs.override(trace_dump_dir=str(tmp_path)):
        dump_call(api(), (ones(2, 8), ones(8)), {})
        (tmp_path / "rmsnorm_h8.json").unlink()
        dump_call(api(), (ones(3, 8),), {"weight": ones(8)})
        assert files(tmp_path) == []
        dump_call(api(), (ones(3, 9), ones(9)), {})
    assert files(tmp_path) == ["rmsnorm_h9.json"]


def test_directory_is_read_at_the_call(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "later").mkdir()
    with knobs.override(trace_dump_dir=None):
        dump_call(api(), (ones(2, 8), ones(8)), {})
    with knobs.override(trace_dump_dir="later"):
        dump_call(api(), (ones(2, 8), ones(8)), {})
    assert files(tmp_path) == ["later", "rmsnorm_h8.json"]
    assert files(tmp_path / "later") == ["rmsnorm_h8.json"]


def test_failure_warns_once(tmp_path):
    function = api()
    function.__qualname__ = "rmsnorm_of_test_failure"
    with knobs.override(trace_dump_dir=str(tmp_path)):
        with pytest.warns(
            UserWarning, match=r"no trace definition is written \(rmsnorm: weight.shape\[0\] must be .*, got 7"
        ):
            dump_call(function, (ones(2, 8), ones(7)), {})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            dump_call(function, (ones(2, 8), ones(7)), {})
    assert files(tmp_path) == []


def test_unwritable_folder_is_no_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    function = api()
    function.__qualname__ = "rmsnorm_of_test_unwritable"
    target = str(tmp_path / "file" / "x")
    with knobs.override(trace_dump_dir=target), pytest.warns(UserWarning, match="no trace definition is written"):
        dump_call(function, (ones(2, 8), ones(8)), {})
