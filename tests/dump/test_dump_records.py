# SPDX-License-Identifier: Apache-2.0
"""Dump format for programs of others, and dumps written by others."""

import enum
import json
import re

import pytest
import torch

import flashinfer
from flashinfer import api_logging
from flashinfer._runtime.knobs import knobs
from flashinfer.api_logging import LogSettings, make_api_decorator
from flashinfer.dump import DumpSettings, apis, replay_from_dump, replay_sequence


class Mode(enum.Enum):
    SLOW = 1


class Group:
    """Object that no dump can hold."""

    def __repr__(self):
        return "Group(2 ranks)"


@pytest.fixture
def api(tmp_path):
    dump = DumpSettings(directory=tmp_path / "dumps")
    yield make_api_decorator(LogSettings(level=10, dest=str(tmp_path / "api.log"), dump=dump))
    api_logging._set_destination(knobs.log_dest)


@pytest.fixture
def records(tmp_path):
    """Return the records of all completed calls, in order."""

    def read():
        lines = [json.loads(line) for line in (tmp_path / "dumps" / "session.jsonl").read_text().splitlines()]
        return [line for line in lines if line["execution_status"] == "completed"]

    return read


def test_entries_of_arguments_and_results(api, records):
    @api
    def op(x, count, pair, table, *, dtype, mode, group, scale=1.0, out=None):
        return x + 1, 3, [x]

    x = torch.ones(2, 3).T
    table = {"a": torch.zeros(1), 5: 6}
    op(x, 7, (x, "s", [1.5]), table, dtype=torch.bfloat16, mode=Mode.SLOW, group=Group(), scale=float("inf"))
    (record,) = records()
    tensor = {
        "type": "torch.Tensor",
        "shape": [3, 2],
        "dtype": "torch.float32",
        "stride": [1, 3],
        "device": "cpu",
        "requires_grad": False,
        "is_contiguous": False,
    }
    inner = {"type": "list", "length": 1, "items": [1.5], "truncated": False}
    entries = dict(record["input_metadata"])
    assert entries.pop("arg_2") == {
        "type": "tuple",
        "length": 3,
        "items": [{**tensor, "tensor_key": "arg_2__0"}, "s", inner],
        "truncated": False,
    }
    first, second = entries.pop("arg_3")["items"]
    assert (first["key"], first["value"]["tensor_key"], second) == ("a", "arg_3__value_0", {"key": 5, "value": 6})
    assert entries == {
        "arg_1": 7,
        "kwarg_dtype": {"type": "torch.dtype", "value": "torch.bfloat16"},
        "kwarg_mode": {"type": "enum", "name": "Mode.SLOW", "value": 1},
        "kwarg_group": {"type": "Group", "repr": "Group(2 ranks)"},
        "kwarg_scale": float("inf"),
    }
    assert record["output_metadata"].keys() == {"result_1", "result_2"} and record["output_metadata"]["result_1"] == 3
    assert record["tensor_info"]["input_tensor_keys"] == ["arg_0", "arg_2__0", "arg_3__value_0"]
    assert record["tensor_info"]["output_tensor_keys"] == ["result_0", "result_2__0"]
    assert record["tensor_details"]["arg_0"] == {k: tensor[k] for k in ("shape", "dtype", "stride", "device")}
    assert record["tensor_format"] == "torch" and re.fullmatch(r"\d{8}_\d{6}_\d{3}", record["timestamp"])


def test_entries_of_a_method(api, records):
    class Wrapper:
        @api
        def run(self, x):
            return None

    wrapper = Wrapper()
    wrapper.run(torch.ones(2))
    (record,) = records()
    assert record["input_metadata"] == {"arg_0": {"type": "Wrapper", "repr": repr(wrapper)}}
    assert record["tensor_info"]["input_tensor_keys"] == ["arg_1"] and record["self_id"] == id(wrapper)
    assert record["output_metadata"] == {"result": None}


def test_the_module_is_where_the_name_is_found():
    names = {
        "flashinfer.norm": flashinfer.norm.rmsnorm,
        "flashinfer.decode": flashinfer.BatchDecodeWithPagedKVCacheWrapper.run,
        "flashinfer.activation": flashinfer.silu_and_mul,
        __name__: test_entries_of_a_method,
    }
    for module, func in names.items():
        while hasattr(func, "__wrapped__"):
            func = func.__wrapped__
        assert apis.public_module(func) == module


@pytest.fixture
def poor(tmp_path):
    """Write a dump as another program might: tensors and minimal metadata."""

    def write(inputs, outputs=None, fmt="pt", name="call", **record):
        directory = tmp_path / "others" / name
        directory.mkdir(parents=True)
        for stem, tensors in (("inputs", inputs), ("outputs", outputs)):
            if tensors is not None and fmt == "pt":
                torch.save(tensors, directory / f"{stem}.pt")
            elif tensors is not None:
                pytest.importorskip("safetensors.torch").save_file(tensors, directory / f"{stem}.safetensors")
        record = {"function_name": "rmsnorm", "module": "flashinfer.norm", **record}
        (directory / "metadata.jsonl").write_text(json.dumps(record) + "\n")
        return directory

    return write


@pytest.mark.parametrize("fmt", ["pt", "safetensors"])
def test_tensors_alone(poor, fmt):
    x, weight = torch.randn(3, 64), torch.randn(64)
    expected = flashinfer.rmsnorm(x, weight)
    directory = poor({"kwarg_weight": weight, "arg_0": x}, {"result": expected}, fmt, input_metadata={})
    result = replay_from_dump(directory, compare_outputs=True, device="cpu", run=True)
    assert torch.equal(result["args"][0], x) and torch.equal(result["kwargs"]["weight"], weight)
    assert result["comparison_match"] is True, result
    wrong = poor({"arg_0": x, "arg_1": weight}, {"result": expected + 1}, fmt, name="wrong")
    assert replay_from_dump(wrong, compare_outputs=True, device="cpu", run=True)["comparison_match"] is False


def test_a_function_that_is_not_here(poor):
    directory = poor({"arg_0": torch.ones(1)}, function_name="gone", module="not_a_module")
    assert replay_from_dump(directory, device="cpu")["args"][0].item() == 1
    assert (
        "not_a_module.gone must be a function with @flashinfer_api"
        in replay_from_dump(directory, device="cpu", run=True)["execution_error"]
    )


def test_containers_and_plain_values(poor):
    a, b = torch.ones(1), torch.zeros(2)
    entries = {
        "arg_1": {
            "type": "tuple",
            "length": 2,
            "items": [
                {"type": "torch.Tensor", "tensor_key": "arg_1__0"},
                {"type": "torch.dtype", "value": "torch.int8"},
            ],
        },
        "arg_2": 5,
        "kwarg_mode": {"type": "enum", "name": "PosEncodingMode.ROPE_LLAMA", "value": 1},
        "kwarg_other": {"type": "enum", "name": "Unknown.MEMBER", "value": 9},
        "kwarg_table": {"type": "dict", "length": 1, "items": [{"key": "k", "value": None}]},
        "kwarg_where": {"type": "device", "repr": "device(type='cpu')"},
    }
    tensors = {"arg_0__1": b, "arg_0__0": a, "arg_1__0": b, "kwarg_kv__0": a, "kwarg_kv__1__0": b, "arg_10": a}
    loaded = replay_from_dump(poor(tensors, input_metadata=entries), device="cpu")
    first, second, third, tenth = loaded["args"]
    assert [t.numel() for t in first] == [1, 2] and second[0].numel() == 2 and second[1] is torch.int8
    assert third == 5 and tenth.numel() == 1
    kwargs = loaded["kwargs"]
    assert [kwargs["kv"][0].numel(), kwargs["kv"][1][0].numel()] == [1, 2]
    assert kwargs["mode"] is flashinfer.utils.PosEncodingMode.ROPE_LLAMA and kwargs["other"] == 9
    assert kwargs["table"] == {"k": None} and kwargs["where"] == torch.device("cpu")


def test_objects_of_others(poor, api):
    """Check ``__init__`` and a method given by name only; arguments without a stored value are named."""
    started = []

    class Wrapper:
        @api
        def __init__(self, n):
            started.append(n)

        @api
        def run(self, x):
            return x + started[-1]

    globals()["Wrapper"] = Wrapper
    Wrapper.__qualname__ = "Wrapper"
    try:
        for name in ("__init__", "run"):
            plain = vars(Wrapper)[name].__wrapped__
            plain.__qualname__ = f"Wrapper.{name}"
            apis.register_api(plain)
        here = {"module": __name__, "process_id": 3, "self_id": 4}
        owner = {"arg_0": {"type": "Wrapper", "repr": "<Wrapper>"}}
        poor(None, None, name="1", function_name="Wrapper.__init__", input_metadata={**owner, "arg_1": 2.0},
             tensor_info={"input_tensor_keys": []}, **here)  # fmt: skip
        x = {"arg_1": torch.ones(2)}
        poor(x, {"result": torch.full((2,), 3.0)}, name="2", function_name="Wrapper.run", input_metadata=owner, **here)
        unknown = {**owner, "kwarg_x": {"type": "Group", "repr": "Group(2 ranks)"}}
        root = poor({}, name="3", function_name="Wrapper.run", input_metadata=unknown, **here).parent
        results = replay_sequence(root, "cpu")
        assert started == [2.0] and results[1]["comparison_match"] is True, results
        assert (
            "kwarg_x (Group(2 ranks)) must be a value or an object of an earlier dump" in results[2]["execution_error"]
        )
    finally:
        del globals()["Wrapper"]


def test_what_is_missing(poor, tmp_path):
    for name in ("nowhere", "others"):
        with pytest.raises(FileNotFoundError):
            replay_from_dump(tmp_path / name, device="cpu")
        (tmp_path / "others").mkdir(exist_ok=True)  # a directory without metadata
    with pytest.raises(FileNotFoundError, match="nowhere must be a directory"):
        replay_sequence(tmp_path / "nowhere", "cpu")
    directory = poor(None)
    (result,) = replay_sequence(directory.parent, "cpu")
    assert result.keys() == {"error", "dump_dir"} and result["dump_dir"] == str(directory)
    assert "FileNotFoundError" in result["error"]
