# SPDX-License-Identifier: Apache-2.0
"""Dumps and their replay: files, size caps, in-place functions, objects, CUDA graphs."""

import collections
import enum
import gc
import inspect
import json
import re
import warnings

import pytest
import torch

from flashinfer import api_logging
from flashinfer._runtime.knobs import knobs
from flashinfer.api_logging import LogSettings, make_api_decorator
from flashinfer.dump import (
    DumpSettings,
    apis,
    clear_graph_dumps,
    codec,
    compare,
    files,
    flush_graph_dumps,
    graph,
    replay_from_dump,
    replay_main,
    replay_sequence,
)

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

Pair = collections.namedtuple("Pair", "left right")


class Mode(enum.IntEnum):
    FAST = 4


class Dumps:
    """A decorator at level 10 and its dump directory."""

    def __init__(self, tmp_path, **settings):
        self.root = tmp_path / "dumps"
        self.log = tmp_path / "api.log"
        dump = DumpSettings(directory=self.root, **settings)
        self.api = make_api_decorator(LogSettings(level=10, dest=str(self.log), dump=dump))

    @property
    def directories(self):
        return sorted(path for path in self.root.iterdir() if path.is_dir())

    @property
    def text(self):
        return self.log.read_text()


@pytest.fixture
def dumps(tmp_path):
    yield lambda **settings: Dumps(tmp_path, **settings)
    api_logging._set_destination(knobs.log_dest)
    clear_graph_dumps()


def scaled_sum(x, pair, *, factor=1.0, mode=None, dtype=None):
    return (x + pair[0]) * factor, x.sum()


def add_in_place(input, residual, weight):
    residual += input
    input.copy_(residual * weight)


def write_out(x, out=None):
    out.copy_(x + 1)
    return out


class Accumulator:
    """Fake wrapper object: ``plan`` sets state, ``run`` uses it."""

    def __init__(self, start):
        self.start = start

    def plan(self, step):
        self.step = step

    def run(self, x):
        return x * self.step + self.start

    def run_twice(self, x, other):
        return other.run(self.run(x))


@pytest.fixture
def wrapper_class(monkeypatch):
    """Decorate the methods of ``Accumulator``; restore them afterwards."""

    def decorate(api):
        for name in ("__init__", "plan", "run", "run_twice"):
            monkeypatch.setattr(Accumulator, name, api(getattr(Accumulator, name)))
        return Accumulator

    return decorate


def test_one_directory_per_call(dumps):
    on = dumps()
    scaled = on.api(scaled_sum)
    x, pair = torch.arange(6.0).reshape(2, 3), (torch.ones(3), 7)
    result = scaled(x, pair, factor=2.0, mode=Mode.FAST, dtype=torch.float16)
    scaled(x, pair)
    first, second = on.directories
    assert re.fullmatch(r"\d{8}_\d{6}_\d{3}_pid\d+_scaled_sum_call0001", first.name)
    assert second.name.endswith("_scaled_sum_call0002")

    inputs, outputs = torch.load(first / "inputs.pt"), torch.load(first / "outputs.pt")
    assert inputs.keys() == {"arg_0", "arg_1__0"} and torch.equal(inputs["arg_0"], x)
    assert outputs.keys() == {"result_0", "result_1"} and torch.equal(outputs["result_0"], result[0])

    states = [json.loads(line) for line in (first / "metadata.jsonl").read_text().splitlines()]
    assert [state["execution_status"] for state in states] == ["inputs_saved", "completed"]
    record = states[-1]
    common = (
        "function_name module call_sequence timestamp process_id dump_dir versions function_signature graph_capture"
    )
    tensors = "input_metadata output_metadata tensor_info tensor_details tensor_format execution_status"
    assert record.keys() >= {*common.split(" "), *tensors.split(" ")}
    assert (record["function_name"], record["module"], record["call_sequence"]) == ("scaled_sum", __name__, 1)
    assert record["tensor_info"] == {
        "input_tensor_keys": ["arg_0", "arg_1__0"],
        "output_tensor_keys": ["result_0", "result_1"],
        "input_size_bytes": 36,
        "output_size_bytes": 28,
        "total_size_bytes": 64,
        "input_size_mb": 36 / 2**20,
        "output_size_mb": 28 / 2**20,
        "total_size_mb": 64 / 2**20,
    }
    details = {"shape": [2, 3], "dtype": "torch.float32", "stride": [3, 1], "device": "cpu"}
    assert record["tensor_details"]["arg_0"] == details and record["tensor_details"].keys() == {*inputs, *outputs}
    assert record["function_signature"] == "(x, pair, *, factor=1.0, mode=None, dtype=None)"
    assert "self_id" not in record and record["graph_capture"] is False and record["dump_dir"] == str(first)
    session = [json.loads(line) for line in (on.root / "session.jsonl").read_text().splitlines()]
    assert [(s["call_sequence"], s["execution_status"]) for s in session] == [
        (1, "inputs_saved"),
        (1, "completed"),
        (2, "inputs_saved"),
        (2, "completed"),
    ]
    assert f"dumped to {first}" in on.text and "user data" in on.text


def test_inputs_are_synced_before_the_call(dumps, monkeypatch):
    on = dumps()
    synced = []
    monkeypatch.setattr(files.os, "fsync", lambda descriptor: synced.append(descriptor))

    @on.api
    def op(x):
        (directory,) = on.directories
        assert (directory / "inputs.pt").exists() and files.read_record(directory)["execution_status"] == "inputs_saved"
        assert len(synced) >= 4  # fsync of tensors, their directory, both records (and the log)
        raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        op(torch.ones(2))
    record = files.read_record(on.directories[0])
    assert (record["execution_status"], record["error"]) == ("inputs_saved", "ValueError: inside")


def test_filters(dumps):
    on = dumps(include="scaled*,write*", exclude="*_out")
    x = torch.ones(2)
    on.api(scaled_sum)(x, (x,))
    on.api(write_out)(x, out=torch.empty(2))
    on.api(add_in_place)(x, x.clone(), x.clone())
    assert [re.sub(r".*pid\d+_", "", path.name) for path in on.directories] == ["scaled_sum_call0001"]


def test_count_cap(dumps):
    on = dumps(max_count=2)
    scaled = on.api(scaled_sum)
    x = torch.ones(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaled(x, (x,))
        scaled(x, (x,))
    with pytest.warns(RuntimeWarning, match="scaled_sum dropped: FLASHINFER_DUMP_MAX_COUNT=2 is reached"):
        assert scaled(x, (x,))[1] == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a warning raised as an error is a failure of the log, not of the call
        assert scaled(x, (x,))[1] == 2
    assert len(on.directories) == 2 and "FLASHINFER_DUMP_MAX_COUNT=2" in on.text


def test_size_cap(dumps):
    on = dumps(max_size_gb=1000 * 1e-9)
    write = on.api(write_out)
    write(torch.ones(25), out=torch.zeros(25))  # bytes: 200 in, 100 out
    with pytest.warns(RuntimeWarning, match="8000 bytes would pass FLASHINFER_DUMP_MAX_SIZE_GB="):
        write(torch.ones(1000), out=torch.zeros(1000))
    with pytest.warns(RuntimeWarning, match="280 bytes"):  # 560 bytes fit, their result does not
        write(torch.ones(70), out=torch.zeros(70))
    small, cut = on.directories
    assert (small / "outputs.pt").exists() and not (cut / "outputs.pt").exists()
    assert files.read_record(cut)["outputs_saved"] is False
    result = replay_from_dump(cut, compare_outputs=True, device="cpu", run=True)
    assert "comparison_match" not in result and torch.equal(result["execution_result"], torch.full((70,), 2.0))


def test_safetensors(dumps):
    pytest.importorskip("safetensors")
    on = dumps(safetensors=True)
    base = torch.arange(12.0).reshape(3, 4)
    on.api(scaled_sum)(base.T[:, :2], (torch.ones(1).expand(4, 2),))
    (directory,) = on.directories
    assert sorted(path.name for path in directory.iterdir()) == [
        "inputs.safetensors",
        "metadata.jsonl",
        "outputs.safetensors",
    ]
    result = replay_from_dump(directory, compare_outputs=True, device="cpu", run=True)
    assert result["comparison_match"] and result["metadata"]["tensor_format"] == "safetensors"
    assert result["args"][0].stride() == (1, 4)  # the file is packed; the metadata keeps the strides


def test_safetensors_missing_falls_back(dumps, monkeypatch):
    on = dumps(safetensors=True)
    monkeypatch.setattr(files.importlib.util, "find_spec", lambda name: None)
    on.api(scaled_sum)(torch.ones(2), (1,))
    assert (on.directories[0] / "inputs.pt").exists()
    assert "safetensors is not installed, writing .pt files instead" in on.text


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3).T,
        torch.arange(24.0).reshape(4, 6)[:, ::2],
        torch.arange(100.0).reshape(10, 10)[:, 3],  # a view of a small part of its memory is packed
        torch.arange(3.0)[None, :, None].expand(4, 3, 2),
        torch.tensor(5),
        torch.empty(0, 4),
        torch.ones(3).to(torch.float8_e4m3fn),
        torch.arange(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        torch.nn.Parameter(torch.ones(2)),
    ],
    ids=lambda t: f"{t.dtype}-{tuple(t.shape)}",
)
def test_host_copies_keep_values_and_layout(tensor):
    copy = codec.host_copy(tensor)
    assert copy.shape == tensor.shape and copy.dtype == tensor.dtype and not copy.requires_grad
    as_bytes = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (copy, tensor)]
    assert torch.equal(*as_bytes)
    assert copy.untyped_storage().nbytes() <= 2 * codec.tensor_bytes(tensor)
    restored = codec.with_layout(copy, tensor.shape, tensor.stride(), torch.device("cpu"))
    assert restored.stride() == tensor.stride() or tensor.numel() == 0
    if tensor.numel():
        assert restored.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()


def test_arguments_survive_the_round_trip():
    t = torch.ones(2)
    value = {
        "plain": [None, True, 3, 2.5, "s", float("inf")],
        "pair": Pair(t, (t, torch.zeros(1))),
        5: Mode.FAST,
        "torch": (torch.bfloat16, torch.device("cpu"), torch.Size([2, 3])),
    }
    encoder = codec.Encoder()
    encoded = json.loads(json.dumps(encoder.encode(value, "arg_0")))
    assert encoder.tensors.keys() == {"arg_0__value_1__0", "arg_0__value_1__1__0", "arg_0__value_1__1__1"}
    assert encoder.aliases == {"arg_0__value_1__1__0": "arg_0__value_1__0"}
    back = codec.decode(encoded, encoder.tensors, lambda device: device, lambda encoded: None)
    assert back["plain"] == value["plain"] and back["torch"] == value["torch"] and back[5] is Mode.FAST
    assert isinstance(back["pair"], Pair) and back["pair"].left is back["pair"].right[0] is t


def test_colliding_names_get_their_own_key():
    encoder = codec.Encoder()
    keys = [encoder.encode(torch.ones(1), "kwarg_x__0")["key"] for _ in range(2)]
    assert len(set(keys)) == 2


def test_replay_matches_and_detects_changes(dumps, monkeypatch):
    on = dumps()
    on.api(scaled_sum)(torch.ones(2, 3), (torch.ones(3),), factor=3.0)
    (directory,) = on.directories
    loaded = replay_from_dump(str(directory), device="cpu")
    assert loaded.keys() == {"args", "kwargs", "metadata"} and loaded["kwargs"] == {"factor": 3.0}
    assert replay_from_dump(directory, compare_outputs=True, device="cpu")["expected_tensors"].keys() == {
        "result_0",
        "result_1",
    }
    result = replay_from_dump(directory, compare_outputs=True, device="cpu", run=True)
    assert result["comparison_match"] is True and torch.equal(result["execution_result"][0], torch.full((2, 3), 6.0))

    key = (__name__, "scaled_sum")
    monkeypatch.setitem(apis._apis, key, lambda x, pair, factor: (x * 6.1, x.sum()))
    result = replay_from_dump(directory, compare_outputs=True, device="cpu", run=True)
    assert result["comparison_match"] is False
    assert result["comparison_details"] == ["result[0] differs in 6 of 6 elements, largest difference 0.1"]
    monkeypatch.setitem(apis._apis, key, lambda x, pair, factor: 1 / 0)
    result = replay_from_dump(directory, compare_outputs=True, device="cpu", run=True)
    assert result["execution_error"] == "ZeroDivisionError: division by zero" and "comparison_match" not in result


@pytest.mark.parametrize(
    "expected, actual, same",
    [
        (1.0, 1.0005, True),
        (1.0, 1.1, False),
        (float("nan"), float("nan"), True),
        (float("nan"), 1.0, False),
        ("a", "a", True),
        (None, 0, False),
        ([1, 2], (1, 2), True),
        ([1, 2], [1], False),
        ({"a": 1}, {"b": 1}, False),
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0005, float("nan")]), True),
        (torch.tensor([10000]), torch.tensor([10001]), False),  # integers must be equal
        (torch.ones(2), torch.ones(3), False),
        (torch.ones(2), torch.ones(2).half(), False),
        (torch.ones(2).to(torch.float8_e5m2), torch.ones(2).to(torch.float8_e5m2), True),
        *[
            (
                *(torch.tensor([v], dtype=torch.uint8).view(torch.float4_e2m1fn_x2) for v in values),
                values[0] == values[1],
            )
            for values in ((3, 3), (3, 4))
        ],
    ],
)
def test_comparison(expected, actual, same):
    assert (compare.compare(expected, actual, "result") == []) is same


def test_in_place_functions_are_compared_through_their_arguments(dumps, monkeypatch):
    on = dumps()
    x, residual, weight = torch.full((2, 4), 3.0), torch.ones(2, 4), torch.full((4,), float("nan"))
    weight[0] = 2.0
    assert on.api(add_in_place)(x, residual, weight=weight) is None
    (directory,) = on.directories
    outputs, record = torch.load(directory / "outputs.pt"), files.read_record(directory)
    assert outputs.keys() == {"arg_0", "arg_1"} and record["encoded"]["mutated"] == ["arg_0", "arg_1"]
    assert torch.load(directory / "inputs.pt")["arg_0"][0, 0] == 3  # the value before the call
    result = replay_from_dump(directory, compare_outputs=True, device="cpu", run=True)
    assert result["comparison_match"] and result["execution_result"] is None

    def forgets_input(input, residual, weight):
        residual += input

    monkeypatch.setitem(apis._apis, (__name__, "add_in_place"), forgets_input)
    result = replay_from_dump(directory, compare_outputs=True, device="cpu", run=True)
    assert result["comparison_details"] == ["arg_0 differs in 8 of 8 elements, largest difference nan"]


def test_a_destination_that_is_returned_is_saved_once(dumps):
    on = dumps()
    x = torch.ones(3)
    on.api(write_out)(x, out=x)  # in place: one tensor object twice
    (directory,) = on.directories
    inputs = torch.load(directory / "inputs.pt")
    assert inputs["arg_0"].data_ptr() == inputs["kwarg_out"].data_ptr()  # stored once in the file
    assert torch.load(directory / "outputs.pt").keys() == {"result"}
    result = replay_from_dump(directory, compare_outputs=True, device="cpu", run=True)
    assert result["comparison_match"] and result["args"][0] is result["kwargs"]["out"]


def test_objects_are_rebuilt_in_a_sequence(dumps, wrapper_class):
    on = dumps()
    cls = wrapper_class(on.api)
    one, two = cls(1.0), cls(start=2.0)
    one.plan(3)
    two.plan(5)
    assert two.run(torch.ones(2)).tolist() == [7, 7]
    assert one.run_twice(torch.ones(1), other=two).tolist() == [22]  # the two inner calls are recorded too
    results = replay_sequence(on.root, device="cpu")
    assert [r["metadata"]["function_name"] for r in results] == [
        f"Accumulator.{name}" for name in ["__init__", "__init__", "plan", "plan", "run", "run_twice", "run", "run"]
    ]
    assert all(r["comparison_match"] for r in results)
    assert results[0]["metadata"]["self_id"] == id(one)

    run = next(path for path in on.directories if "run_call" in path.name)
    alone = replay_from_dump(run, device="cpu", run=True)
    assert "must have a dump of its __init__ before" in alone["execution_error"]
    record = files.read_record(run)
    ready = object.__new__(Accumulator)
    ready.start, ready.step = 2.0, 5
    registry = {(record["process_id"], record["self_id"]): ready}
    assert replay_from_dump(run, True, "cpu", True, registry)["comparison_match"]


class Doubled(Accumulator):
    """Subclass by a user: its own ``__init__`` is not logged."""

    def __init__(self, start):
        super().__init__(2 * start)


def test_an_id_that_is_used_again_is_another_object(dumps, wrapper_class):
    on = dumps()
    cls = wrapper_class(on.api)
    cls(1.0).plan(3)
    other = Doubled(2.0)
    with pytest.raises(AttributeError):
        other.run(torch.ones(2))
    same = {"self_id": id(other)}  # the allocator may reuse an id
    for directory in on.directories:
        files.append_record(directory / "metadata.jsonl", {**files.read_record(directory), **same})
    unplanned = replay_sequence(on.root, device="cpu")[-1]
    assert unplanned["comparison_match"], "the plan of the object that died is not used"


def test_an_id_of_an_object_of_another_class(dumps, wrapper_class):
    """Check a reused id whose ``__init__`` dump was dropped by a cap: the object is unknown, not the earlier one."""
    on = dumps()
    cls = wrapper_class(on.api)
    cls(1.0).plan(3)
    other = object.__new__(Doubled)
    other.plan(4)
    last = on.directories[-1]
    same = {"self_id": files.read_record(on.directories[0])["self_id"]}
    files.append_record(last / "metadata.jsonl", {**files.read_record(last), **same})
    assert (
        "Doubled of this call must have a dump of its __init__ before"
        in replay_sequence(on.root, device="cpu")[-1]["execution_error"]
    )


def test_calls_within_one_millisecond_keep_their_order(dumps, monkeypatch):
    on = dumps()
    monkeypatch.setattr("time.time_ns", lambda: 1_700_000_000_000_000_000)
    functions = [type(plain)(plain.__code__, globals(), name) for name in ("zeta", "alpha", "midway")]
    for func in functions:
        on.api(func)(torch.ones(1))
    assert [re.search(r"pid\d+_(\w+)_call", path.name)[1] for path in on.directories] == ["zeta", "alpha", "midway"]


def plain(x):
    return x


def test_replay_calls_only_known_functions(dumps, tmp_path):
    on = dumps()
    on.api(plain)(torch.ones(1))
    (directory,) = on.directories
    record = files.read_record(directory)
    for module, qualname in (("os", "getcwd"), ("flashinfer._runtime.knobs", "Knobs.all")):
        ours = {"defining_module": module, "qualname": qualname}
        of_others = {"defining_module": None, "qualname": None, "module": module, "function_name": qualname}
        for names in (ours, of_others):
            files.append_record(directory / "metadata.jsonl", {**record, **names})
            result = replay_from_dump(directory, device="cpu", run=True)
            assert f"{module}.{qualname} must be a function with @flashinfer_api" in result["execution_error"]
    with pytest.raises(RuntimeError, match="is not imported"):
        codec.load_class("this_module_is_not_there:Thing")


@pytest.mark.parametrize("by_name", [True, False])
def test_source_in_a_dump_is_compiled_only_on_request(dumps, capsys, by_name):
    on = dumps()
    built = []

    @on.api
    def build(x, jit_args=None, jit_kwargs=None):
        built.append(jit_args)

    source = ["my_variant", torch.float16, "struct Variant { /* any C++ */ };"]
    build(torch.ones(1), jit_args=source) if by_name else build(torch.ones(1), source)
    build(torch.ones(1), None, jit_kwargs=None)
    with_source, _ = on.directories
    built.clear()
    result = replay_from_dump(with_source, device="cpu", run=True)
    assert (
        re.search(
            "jit_args of .*build must not hold code .*allow_code=True.*, got C.. source", result["execution_error"]
        )
        and not built
    )
    assert replay_main(on.root, "cpu") == 1 and built == [None], "the other one runs"
    assert "--allow-code" in capsys.readouterr().out

    assert "execution_error" not in replay_from_dump(with_source, device="cpu", run=True, allow_code=True)
    assert built == [None, source]
    assert len(replay_sequence(on.root, "cpu", allow_code=True)) == 2 and replay_main(on.root, "cpu", True) == 0


def test_every_parameter_that_holds_source_is_known():
    """Check the list of parameters that hold source: the replay rejects source by parameter name."""
    parameters = {
        name
        for (module, _), func in apis._apis.items()
        if module.startswith("flashinfer.")
        for name in inspect.signature(func).parameters
    }
    parameters -= {"initial_state_source", "layout_code"}  # a pool of states; a number of the all-reduce
    assert {name for name in parameters if re.search("jit|source|decl|code|cpp|variant_name|uri", name)} == {
        *apis._CODE
    }


def test_the_init_of_a_base_runs_once(dumps, monkeypatch):
    """Check that ``__init__`` of a base runs once: its dump lies beside that of the subclass, and may hold source."""
    on = dumps()
    monkeypatch.setattr(Accumulator, "__init__", on.api(Accumulator.__init__))
    monkeypatch.setattr(Doubled, "__init__", on.api(Doubled.__init__))
    Doubled(2.0)
    started = []
    monkeypatch.setattr(Accumulator, "__init__", lambda self, start: started.append(start))
    assert [result["comparison_match"] for result in replay_sequence(on.root, "cpu")] == [True, True]
    assert started == [4.0]


def test_a_recorded_class_must_have_the_method(dumps, wrapper_class):
    on = dumps()
    wrapper_class(on.api)(1.0)
    (directory,) = on.directories
    files.append_record(
        directory / "metadata.jsonl", {**files.read_record(directory), "self_class": "json:JSONDecoder"}
    )
    error = replay_from_dump(directory, device="cpu", run=True)["execution_error"]
    assert "must name a class with Accumulator.__init__, got json:JSONDecoder" in error


def test_unrecorded_arguments_are_named(dumps):
    on = dumps()

    @on.api
    def send(x, group):
        return x

    send(torch.ones(1), group=object())
    result = replay_from_dump(on.directories[0], compare_outputs=True, device="cpu", run=True)
    assert "kwarg_group (builtins:object) must be a value or an object of an earlier dump" in result["execution_error"]


@pytest.mark.parametrize("fmt", [False, True], ids=["pt", "safetensors"])
@pytest.mark.parametrize("given", [True, False], ids=["of the caller", "of torch"])
def test_a_replay_draws_the_same_numbers(dumps, given, fmt):
    """Check that a replay draws the same random numbers, without which a bug report would be useless."""
    on = dumps(safetensors=fmt)

    @on.api
    def sample(x, generator=None):
        return torch.rand(8, generator=generator) + x

    generator = torch.Generator().manual_seed(5) if given else None
    sample(torch.zeros(1), generator=generator)
    sample(torch.zeros(1), generator=generator)
    first, second = (replay_from_dump(d, compare_outputs=True, device="cpu", run=True) for d in on.directories)
    assert first["comparison_match"] and second["comparison_match"], (first, second)
    assert not torch.equal(first["execution_result"], second["execution_result"])
    assert first["metadata"]["encoded"]["kwargs"]["generator"].get("is_default", False) is not given


def test_a_torn_record_falls_back_to_the_line_before(tmp_path):
    (tmp_path / "metadata.jsonl").write_text('{"execution_status": "inputs_saved"}\n{"execution_st')
    assert files.read_record(tmp_path) == {"execution_status": "inputs_saved"}
    (tmp_path / "metadata.jsonl").write_text("{")
    with pytest.raises(RuntimeError, match="no complete line"):
        files.read_record(tmp_path)


def test_replay_main_reports_and_returns_a_code(dumps, monkeypatch, capsys, tmp_path):
    on = dumps()

    @on.api
    def fails(x):
        raise ValueError("always")

    @on.api
    def steady(x):
        return x + 1

    with pytest.raises(ValueError):
        fails(torch.ones(1))
    steady(torch.ones(1))
    assert replay_main(on.root, "cpu") == 0
    out = capsys.readouterr().out
    assert out.startswith(f"Replaying session from {on.root}\n")
    assert re.search(r"Passed \(raised the same error\) .*_fails_call0001\n", out)
    assert re.search(r"Passed .*_steady_call0001\n", out)
    assert "Summary: 2 passed, 0 failed/mismatch" in out

    key = next(key for key in apis._apis if key[1].endswith("steady"))
    monkeypatch.setitem(apis._apis, key, lambda x: x)
    assert replay_main(on.root, "cpu") == 1
    out = capsys.readouterr().out
    assert re.search(r"Mismatch .*_steady_call0001\n +result differs in 1 of 1 elements", out)
    assert "Summary: 1 passed, 1 failed/mismatch" in out
    assert replay_main(on.directories[1], "cpu") == 1
    assert capsys.readouterr().out.startswith(f"Replaying single dump from {on.directories[1]}\n")
    (on.directories[0] / "inputs.pt").write_bytes(b"torn")
    assert replay_main(str(on.root), "cpu") == 1
    assert re.search(r"Error .*_fails_call0001\n", capsys.readouterr().out)
    (tmp_path / "empty").mkdir()
    assert replay_main(tmp_path / "empty", "cpu") == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_default_device_falls_back_to_the_recorded_one(dumps):
    on = dumps()
    on.api(plain)(torch.ones(1))
    on.api(plain)(torch.ones(1))
    results = replay_sequence(on.root)
    assert [r["args"][0].device.type for r in results] == ["cpu", "cpu"] and results[0]["comparison_match"]
    assert on.text.count("replay: CUDA is not available") == 1


def test_dump_failures_do_not_reach_the_caller(dumps, monkeypatch):
    on = dumps()
    monkeypatch.setattr(files, "save_tensors", lambda *args: 1 / 0)
    assert on.api(plain)(torch.ones(1)) == 1
    assert "the dump of the inputs failed: ZeroDivisionError" in on.text


class FakeGraph:
    """Fake graph on the CPU: records functions during the capture, runs them at replay."""

    def __init__(self):
        self.work = []

    def capture_begin(self, pool=None):
        graph.is_capturing = lambda: True

    def capture_end(self):
        graph.is_capturing = lambda: False

    def replay(self):
        for func in self.work:
            func()


@pytest.fixture
def graph_class(monkeypatch):
    monkeypatch.setattr(graph, "is_capturing", lambda: False)
    monkeypatch.setattr(graph, "_install_exit_hooks", lambda: None)
    cls = type("Graph", (FakeGraph,), dict(vars(FakeGraph)))
    graph.install_graph_hooks(cls)
    graph.install_graph_hooks(cls)  # a second call does nothing
    assert cls.replay.__wrapped__ is FakeGraph.replay
    return cls


@pytest.fixture
def fake_graph(graph_class):
    return graph_class()


def test_captured_calls_are_written_at_replay(dumps, fake_graph):
    on = dumps()
    x, out = torch.zeros(3), torch.zeros(3)

    @on.api
    def enqueue(x, out):
        fake_graph.work.append(lambda: torch.add(x, 1, out=out))
        return out.view(3)

    fake_graph.capture_begin(pool=None)
    enqueue(x, out=out)
    assert flush_graph_dumps() == 0 and "not flushed: a CUDA graph is being captured" in on.text
    fake_graph.capture_end()
    (directory,) = on.directories
    assert [path.name for path in directory.iterdir()] == ["metadata.jsonl"]
    assert files.read_record(directory)["execution_status"] == "graph_capture_pending_flush"
    with pytest.raises(RuntimeError, match="never flushed"):
        replay_from_dump(directory, device="cpu")

    for value in (4.0, 9.0):
        x.fill_(value)
        fake_graph.replay()
    flushes = sorted((directory / "graph_flushes").iterdir())
    assert [path.name for path in flushes] == ["flush_0001", "flush_0002"]
    for path, value in zip(flushes, (4.0, 9.0), strict=True):
        assert torch.load(path / "inputs.pt")["arg_0"].tolist() == [value] * 3
        assert torch.load(path / "outputs.pt")["result"].tolist() == [value + 1] * 3
    record = files.read_record(directory)
    assert (record["execution_status"], record["graph_capture"], record["replays_seen"]) == ("completed", True, 2)
    assert replay_from_dump(directory, device="cpu")["args"][0].tolist() == [9.0] * 3  # the last snapshot

    assert torch.load(directory / "outputs.pt")["result"].tolist() == [10.0] * 3, "the newest values"
    assert (record["graph_capture_flushed"], record["graph_capture_flush_index"]) == (True, 2)
    assert record["graph_capture_snapshot_dir"] == str(flushes[-1]) and record["dump_dir"] == str(directory)
    assert files.read_record(flushes[0])["graph_capture_base_dump_dir"] == str(directory)
    assert replay_from_dump(flushes[0], device="cpu")["args"][0].tolist() == [4.0] * 3

    x.fill_(1.0)
    assert flush_graph_dumps(synchronize=False) == 2 and len(list((directory / "graph_flushes").iterdir())) == 3
    assert torch.load(directory / "inputs.pt")["arg_0"].tolist() == [1.0] * 3
    assert torch.load(flushes[1] / "inputs.pt")["arg_0"].tolist() == [9.0] * 3, "an older snapshot stays"
    assert clear_graph_dumps() == 2 and clear_graph_dumps() == 0 and flush_graph_dumps() == 0


def test_captured_in_place_calls_have_nothing_to_compare(dumps, fake_graph):
    on = dumps()
    fake_graph.capture_begin()
    on.api(write_out)(torch.ones(2), out=torch.zeros(2))
    on.api(add_in_place)(torch.ones(2), torch.ones(2), torch.ones(2))
    fake_graph.capture_end()
    fake_graph.replay()
    assert ["comparison_match" in result for result in replay_sequence(on.root, "cpu")] == [False, False]
    assert replay_main(on.root, "cpu") == 0


def test_a_deleted_graph_releases_its_tensors(dumps, graph_class):
    on = dumps()
    captured = graph_class()
    captured.capture_begin()
    on.api(plain)(torch.ones(1))
    captured.capture_end()
    graph_class().replay()  # another graph, without recorded calls
    assert not list(on.root.glob("*/graph_flushes"))
    del captured
    gc.collect()
    assert clear_graph_dumps() == 0


def test_graph_snapshots_obey_the_size_cap(dumps, fake_graph):
    on = dumps(max_size_gb=20e-9)
    fake_graph.capture_begin()
    on.api(plain)(torch.ones(2))  # bytes: 8 in, 8 out
    fake_graph.capture_end()
    fake_graph.replay()
    with pytest.warns(RuntimeWarning, match="16 bytes would pass"):
        fake_graph.replay()
    assert len(list(on.root.glob("*/graph_flushes/*"))) == 1


def test_a_failing_flush_does_not_break_the_replay(dumps, fake_graph, monkeypatch):
    on = dumps()
    ran = []
    fake_graph.work.append(lambda: ran.append(1))
    monkeypatch.setattr(graph, "_flush_replayed", lambda g: 1 / 0)
    fake_graph.replay()
    assert ran == [1] and "not flushed after a replay: ZeroDivisionError" in on.text


@needs_cuda
def test_cuda_graph_dumps(dumps):
    on = dumps()
    double = on.api(lambda x: (x + x) * 1)
    x = torch.ones(8, device="cuda")
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        y = double(x)
        double(y)  # an intermediate as input: its memory must not be reused
    for value in (2.0, 3.0):
        x.fill_(value)
        captured.replay()
    first, second = on.directories
    for directory, factor in ((first, 2), (second, 4)):
        flushes = sorted((directory / "graph_flushes").iterdir())
        values = [torch.load(path / "outputs.pt")["result"][0].item() for path in flushes]
        assert values == [2.0 * factor, 3.0 * factor]
        result = replay_from_dump(directory, compare_outputs=True, run=True)
        assert result["comparison_match"] and result["args"][0].is_cuda
    assert flush_graph_dumps() == 4
    del captured, y
    assert clear_graph_dumps() == 0  # released with the graph


@needs_cuda
def test_cuda_dumps_and_devices(dumps):
    on = dumps()
    on.api(scaled_sum)(torch.ones(2, 3, device="cuda").T, (torch.tensor(2.0),))
    result = replay_from_dump(on.directories[0], compare_outputs=True, run=True)
    assert result["comparison_match"] and result["args"][0].is_cuda and result["args"][0].stride() == (1, 3)
    assert result["args"][1][0].device.type == "cpu"  # host tensors beside CUDA ones keep their device
    assert replay_from_dump(on.directories[0], True, "cpu", True)["comparison_match"]


@pytest.mark.parametrize("level, named, count", [(0, 1, 0), (1, 1, 1), (3, 1, 1), (5, 0, 0), (10, 0, 1)])
def test_levels_that_dump(tmp_path, monkeypatch, level, named, count):
    """Check that a folder that is named is written to at any level, and the default one from level 10 on."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLASHINFER_LOGLEVEL", str(level))
    monkeypatch.setenv("FLASHINFER_LOGDEST", str(tmp_path / "log"))
    monkeypatch.setenv("FLASHINFER_DUMP_DIR", str(tmp_path / "flashinfer_dumps") if named else "")

    @make_api_decorator(LogSettings.from_knobs())
    def double(x):
        return 2 * x

    double(torch.ones(2))
    found = [path for path in (tmp_path / "flashinfer_dumps").glob("*") if path.is_dir()]
    assert len(found) == count
    assert not found or len(list(found[0].glob("*.pt"))) == 2, "inputs and outputs"
