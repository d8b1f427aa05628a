# SPDX-License-Identifier: Apache-2.0
"""The API log: levels, destinations, no cost when off, and no failed calls when on."""

import enum
import importlib
import logging
import math
import os
import re
import textwrap
import timeit
from pathlib import Path

import pytest
import torch

from flashinfer import api_logging
from flashinfer._runtime import describe
from flashinfer._runtime.knobs import knobs
from flashinfer.api_logging import LogSettings, flashinfer_api, make_api_decorator
from flashinfer.dump import DumpSettings, graph
from flashinfer.version import __version__

from ..fresh_process import run_python

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Color(enum.Enum):
    RED = 3


class Log:
    """A decorator whose output can be read back."""

    def __init__(self, tmp_path, level, **dump):
        self.path = tmp_path / "api.log"
        dump_settings = DumpSettings(directory=tmp_path / "dumps", **dump)
        self.decorate = make_api_decorator(LogSettings(level=level, dest=str(self.path), dump=dump_settings))

    @property
    def text(self):
        return self.path.read_text() if self.path.exists() else ""


@pytest.fixture
def log(tmp_path):
    yield lambda level, **dump: Log(tmp_path, level, **dump)
    api_logging._set_destination(knobs.log_dest)


def plain(x, factor=2.0, *, mode=None):
    return x * factor


def test_level_0_returns_the_function_itself(log):
    off = log(0)
    assert off.decorate(plain) is plain
    assert off.decorate()(plain) is plain
    seconds = [min(timeit.repeat(lambda f=f: f(1), number=20000)) for f in (plain, off.decorate(plain))]
    print(f"call: plain {seconds[0] / 20000 * 1e9:.0f} ns, decorated at level 0 {seconds[1] / 20000 * 1e9:.0f} ns")
    assert off.text == ""


def test_settings_come_from_the_variables():
    with knobs.override(log_level="5", log_dest="stderr", dump_include="a*", dump_max_count="7"):
        settings = LogSettings.from_knobs()
    assert (settings.level, settings.dest) == (5, "stderr")
    assert (settings.dump.include, settings.dump.max_count) == ("a*", 7)
    with knobs.override(**dict.fromkeys(["log_level", "log_dest", "dump_dir"])):
        assert LogSettings.from_knobs() == LogSettings()
        assert LogSettings().dump == DumpSettings(Path("flashinfer_dumps"), "", "", 1000, 20.0, False)


def test_decorator_keeps_the_signature_and_works_bare_and_called(log):
    on = log(1)
    for wrapped in (on.decorate(plain), on.decorate()(plain)):
        assert wrapped is not plain and wrapped.__wrapped__ is plain and wrapped.__name__ == "plain"
        assert wrapped(3, factor=2) == 6
    assert flashinfer_api()(plain)(2) == 4


@pytest.mark.parametrize("level", [1, 2])
def test_level_1_is_one_line_per_call(log, level):
    on = log(level)
    func = on.decorate(plain)
    func(torch.ones(3))
    func(torch.ones(3))
    calls = [line for line in on.text.splitlines() if "plain" in line]
    assert [re.sub(r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] ", "", line) for line in calls] == [
        "FlashInfer API Call: plain (call 1)",
        "FlashInfer API Call: plain (call 2)",
    ]
    assert "shape" not in on.text


def test_the_name_is_logged_before_a_call_that_raises(log):
    on = log(1)

    @on.decorate
    def broken(x):
        assert "FlashInfer API Call: broken" in on.text  # on disk before the body runs
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        broken(1)
    assert "raised" not in on.text


def test_level_3_describes_arguments_and_results(log):
    on = log(3)

    @on.decorate
    def op(x, pair, color, *, dtype, eps=1e-6, out=None):
        assert "Output value:" not in on.text
        return x, {"count": 4}

    x = torch.zeros(3, 2, dtype=torch.float16).T
    op(x, [torch.ones(1), "s"], color=Color.RED, dtype=torch.bfloat16)
    text = re.sub(r"(?s)^.*?\n(?======)", "", on.text)  # without the banner
    one = "Tensor(shape=(1,), stride=(1,), dtype=torch.float32, device=cpu, requires_grad=False, is_contiguous=True)"
    x_text = (
        "Tensor(shape=(2, 3), stride=(1, 2), dtype=torch.float16, device=cpu, requires_grad=False, is_contiguous=False)"
    )
    assert re.sub(r"\[\d.*?\] ", "[time] ", text).splitlines() == [
        "=" * 80,
        "[time] FlashInfer API Call: op (call 1)",
        "-" * 80,
        "Positional input arguments:",
        "  arg[0]:",
        f"    {x_text}",
        "  arg[1]:",
        "    list of 2",
        f"      [0]: {one}",
        "      [1]: 's'",
        "Keyword input arguments:",
        "  color=",
        "    Color.RED (value=3)",
        "  dtype=",
        "    torch.bfloat16",
        "Default parameters (not explicitly provided):",
        "  eps= [DEFAULT]",
        "    1e-06",
        "  out= [DEFAULT]",
        "    None",
        "[time] op returned (call 1)",
        "Output value:",
        "  tuple of 2",
        f"    [0]: {x_text}",
        "    [1]: dict of 1 {'count': 4}",
    ]


def test_level_3_without_arguments(log):
    on = log(3)
    on.decorate(lambda: 5)()
    text = on.text.partition("FlashInfer API Call: <lambda>")[2]
    assert "arguments" not in text and "Default" not in text and "Output value:\n  5\n" in text


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_tensor_that_cannot_be_described_hides_nothing_else(log):
    on = log(3)
    on.decorate(lambda x, y: None)(torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), 7)
    assert "  arg[0]:\n    Tensor that cannot be described (" in on.text
    assert "\n  arg[1]:\n    7\n" in on.text


def test_level_3_tells_how_a_call_failed_even_with_wrong_arguments(log):
    on = log(3)
    with pytest.raises(TypeError):
        on.decorate(plain)(torch.ones(2), wrong=5)
    assert "arg[0]:\n    Tensor(shape=(2,)," in on.text and "wrong=\n    5\n" in on.text
    assert "plain raised (call 1): TypeError" in on.text and "Output value" not in on.text


def test_level_5_adds_statistics(log):
    on = log(5)

    @on.decorate
    def in_place(x, index):
        x.add_(1)

    x = torch.tensor([1.0, -3.0, float("nan"), float("inf"), float("-inf"), 5.0])
    in_place(x, torch.tensor([1, 2, 6]))
    before, after = on.text.split("in_place returned")
    floats = "is_contiguous=True, min={}, max={}, mean={}, nan_count=1, inf_count=2)"
    assert floats.format("-3.000000", "5.000000", "1.000000") in before
    assert "min=1, max=6, mean=3.000000)" in before  # integers have no NaN
    assert "Output value:\n  None" in after
    assert floats.format("-2.000000", "6.000000", "2.000000") in after  # the result is in an argument


@pytest.mark.parametrize(
    "tensor, text",
    [
        (torch.empty(0, 3), "[empty: no statistics]"),
        (
            torch.tensor(2.5, dtype=torch.bfloat16, requires_grad=True),
            "min=2.500000, max=2.500000, mean=2.500000, nan_count=0, inf_count=0",
        ),
        (
            torch.tensor([1.0, -2.0]).to(torch.float8_e4m3fn),
            "min=-2.000000, max=1.000000, mean=-0.500000, nan_count=0, inf_count=0",
        ),
        (torch.tensor([True, False]), "min=0, max=1, mean=0.500000"),
        (
            torch.tensor([1.0, -math.inf, 3.0]),
            "min=1.000000, max=3.000000, mean=2.000000, nan_count=0, inf_count=1",
        ),
        (  # 16 GiB, were each element looked at
            torch.tensor([[2.0], [math.nan]]).expand(2, 1 << 31),
            "min=2.000000, max=2.000000, mean=2.000000, nan_count=1, inf_count=0 (each repeated element counted once)",
        ),
        (torch.full((2,), float("nan")), "min=nan, max=nan, mean=nan, nan_count=2, inf_count=0"),
        (torch.ones(2, dtype=torch.complex64), "[statistics unavailable: complex]"),
    ],
)
def test_statistics(tensor, text):
    assert describe.tensor_statistics(tensor) == text


def test_statistics_of_a_large_tensor_are_taken_in_pieces(monkeypatch):
    monkeypatch.setattr(describe, "_CHUNK", 10)
    for shape in [(35,), (2, 3, 7), (7, 3), (1, 40)]:
        x = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
        assert all(part.numel() <= 10 for part in describe._chunks(x))
        n = x.numel()
        assert describe.tensor_statistics(x) == (
            f"min=0.000000, max={n - 1:.6f}, mean={(n - 1) / 2:.6f}, nan_count=0, inf_count=0"
        )
    assert describe.tensor_statistics(torch.empty(3, device="meta")).startswith("[statistics unavailable: ")


def test_objects_are_named_but_not_printed():
    class Holder:
        def __repr__(self):
            raise AssertionError("repr may synchronise")

    assert re.fullmatch(r"    \S*Holder object at 0x[0-9a-f]+", describe.describe("h=", Holder())[1])
    assert len(describe.describe("s=", "y" * 5000)[1]) < 300
    many = describe.describe("list=", [torch.ones(1)] * 100)
    assert len(many) < 20 and many[-1] == "      ... 100 in all"
    assert describe.describe("f=", plain)[1].endswith("test_api_logging.plain")


def test_statistics_are_skipped_during_a_capture(log, monkeypatch):
    on = log(5)
    monkeypatch.setattr(graph, "is_capturing", lambda: True)
    on.decorate(plain)(torch.ones(2))
    assert on.text.count("[statistics skipped: CUDA graph capture in progress]") == 2  # argument and result
    assert "min=" not in on.text


def test_capture_probe_never_raises(monkeypatch):
    assert graph.is_capturing() is False  # a CPU build of torch raises if queried directly

    def broken():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", broken)
    assert graph.is_capturing() is False


def test_filters_reduce_a_call_to_its_name(log):
    on = log(5, include="pla*,keep", exclude="*_secret")

    def plain_secret(x):
        return x

    def other(x):
        return x

    for func in (plain, plain_secret, other):
        on.decorate(func)(torch.ones(2))
    assert all(f"API Call: {name} " in on.text for name in ("plain", "plain_secret", "other"))
    assert on.text.count("min=") == 2 and "plain_secret returned" not in on.text and "other returned" not in on.text


def test_patterns_are_case_sensitive():
    settings = DumpSettings(include=" Batch*.run , rms?orm", exclude="*Wrapper.plan")
    names = ["BatchX.run", "batchX.run", "rmsnorm", "rmsorm", "BatchWrapper.plan"]
    assert [settings.selects(name) for name in names] == [True, False, True, False, False]
    assert DumpSettings(include="*", exclude="a, ,").selects("b") and not DumpSettings(exclude="a").selects("a")


def test_methods_carry_the_class_name(log):
    on = log(1)

    class Wrapper:
        @on.decorate
        def __init__(self, n):
            self.n = n

        @on.decorate
        def run(self, x):
            return self.n + x

    class Derived(Wrapper):
        pass

    @on.decorate
    def run(x):
        return x

    assert Derived(1).run(2) == 3
    run(Wrapper(5))  # an instance as a plain argument makes no method
    names = re.findall(r"FlashInfer API Call: (\S+)", on.text)
    assert names == ["Derived.__init__", "Derived.run", "Wrapper.__init__", "run"]


def test_banner_is_written_once(log):
    on = log(1)
    for func in (on.decorate(plain), on.decorate(lambda x: x)):
        func(1)
    assert on.text.count("flashinfer API log") == 1 and on.text.startswith("[")
    assert f"torch {torch.__version__}, CUDA" in on.text and "GPUs: " in on.text


def test_a_broken_banner_is_one_line(log, monkeypatch):
    on = log(1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1 / 0)
    assert on.decorate(plain)(2) == 4
    assert "the list of GPUs failed: ZeroDivisionError" in on.text and "API Call: plain" in on.text


def test_failures_of_the_log_do_not_reach_the_caller(log, monkeypatch, tmp_path, capsys):
    on = log(3)
    for name in ("describe", "describe_result"):
        monkeypatch.setattr(api_logging, name, lambda *a, **k: 1 / 0)
    assert on.decorate(plain)(2) == 4
    assert "logging the call failed: ZeroDivisionError" in on.text
    assert "logging the result failed: ZeroDivisionError" in on.text

    (tmp_path / "file").touch()
    make = make_api_decorator(LogSettings(level=1, dest=str(tmp_path / "file" / "below.log")))
    func = make(plain)
    assert func(2) == func(2) == 4
    assert capsys.readouterr().err.count("flashinfer.api: cannot log to") == 1


@pytest.mark.parametrize("dest", ["stdout", "stderr"])
def test_standard_streams(log, capsys, dest):
    func = make_api_decorator(LogSettings(level=1, dest=dest))(plain)
    func(1)
    captured = capsys.readouterr()
    assert "API Call: plain" in getattr(captured, dest.removeprefix("std"))


def test_file_is_appended_and_named_after_the_process(log, tmp_path):
    target = tmp_path / "new" / "log_%i.txt"
    for _ in range(2):
        make_api_decorator(LogSettings(level=1, dest=str(target)))(plain)(1)
    text = (tmp_path / "new" / f"log_{os.getpid()}.txt").read_text()
    assert text.count("API Call: plain (call 1)") == 2


def test_home_in_the_name_of_the_file(log, tmp_path, monkeypatch):
    """Check ``~`` in the file name, from a Dockerfile or a service whose variables no shell expands."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    make_api_decorator(LogSettings(level=1, dest="~/log.txt"))(plain)(1)
    assert "API Call: plain" in (tmp_path / "log.txt").read_text()


def test_own_logger_is_not_propagated(log):
    on = log(1)
    logger = logging.getLogger("flashinfer.api")
    mine = logging.NullHandler()
    logger.addHandler(mine)
    make_api_decorator(LogSettings(level=1, dest=str(on.path)))
    ours = [handler for handler in logger.handlers if isinstance(handler, api_logging._Destination)]
    assert mine in logger.handlers and len(ours) == 1 and logger.propagate is False
    logger.removeHandler(mine)


def test_torch_compile_sees_the_plain_function(log):
    on = log(5)
    compiled = torch.compile(on.decorate(plain), fullgraph=True, backend="eager")
    assert compiled(torch.ones(2)).tolist() == [2, 2] and on.text == ""


def test_trace_is_attached_and_dumped_without_a_log(monkeypatch):
    """Check that the variable is read at each call: a program may set it after the import."""
    fi_trace = importlib.import_module("flashinfer.fi_trace")  # flashinfer.fi_trace itself is the function
    seen = []

    def attach(func, template):
        func._trace_template = template

    monkeypatch.setattr(fi_trace, "attach_fi_trace", attach)
    monkeypatch.setattr(fi_trace, "dump_call", lambda *call: seen.append(call))

    def traced(x, y=0):
        return x + y

    decorate = make_api_decorator(LogSettings(dest="stderr"))
    assert decorate(plain) is plain  # no template
    api = decorate(traced, trace="template")
    assert api._trace_template == "template" and api.__wrapped__ is traced
    with knobs.override(trace_dump=None):
        assert api(1, y=2) == 3
    with knobs.override(trace_dump="0"):
        assert api(1, y=2) == 3
    assert seen == []
    with knobs.override(trace_dump="1"):
        assert api(1, y=2) == 3
    assert seen == [(traced, (1, 2), {})]


CRASH = """
    import os, signal, sys
    import torch
    from flashinfer.api_logging import flashinfer_api
    from flashinfer.dump import graph

    os.environ["FLASHINFER_LOGLEVEL"] = "0"          # too late: settings were read at import

    @flashinfer_api
    def op(x, how):
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return x * 2

    def child(body):
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            body()
            sys.exit(0)                              # runs the exit hooks
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), pid

    def captured(number):
        graph.is_capturing = lambda: True
        op(torch.full((2,), number), how="capture")
        graph.is_capturing = lambda: False

    def terminated():
        captured(6.0)
        os.kill(os.getpid(), signal.SIGTERM)

    x = torch.tensor([1.5, -2.5])
    print(*child(lambda: op(x, how="kill")), *child(terminated), *child(lambda: captured(7.0)))
"""


def test_a_killed_process_leaves_its_inputs(tmp_path):
    """Run one process with three children: killed inside the op, terminated, and ended with pending graph dumps."""
    variables = {
        "FLASHINFER_LOGLEVEL": "10",
        "FLASHINFER_LOGDEST": str(tmp_path / "log_%i.txt"),
        "FLASHINFER_DUMP_DIR": str(tmp_path / "dumps"),
        "PYTHONPATH": str(Path(api_logging.__file__).parents[1]),
    }
    run = run_python(["-c", textwrap.dedent(CRASH)], env={**os.environ, **variables})
    assert run.returncode == 0, run.stderr
    killed, killed_pid, terminated, terminated_pid, ended, ended_pid = map(int, run.stdout.split())
    assert (killed, terminated, ended) == (-9, -15, 0)

    logs = [path.read_text() for path in tmp_path.glob("log_*.txt")]
    assert "\n".join(logs).count(f"FlashInfer {__version__} (commit ") == 1, "the import, once"
    text = (tmp_path / f"log_{killed_pid}.txt").read_text()
    assert "Tensor(shape=(2,)," in text and "min=-2.500000, max=1.500000, mean=-0.500000, nan_count=0" in text
    assert "how=\n    'kill'" in text and "Output value" not in text
    result = api_logging.replay_from_dump(
        next((tmp_path / "dumps").glob(f"*_pid{killed_pid}_op_call0001")), device="cpu"
    )
    assert result["metadata"]["execution_status"] == "inputs_saved"
    assert torch.equal(result["args"][0], torch.tensor([1.5, -2.5])) and result["kwargs"] == {"how": "kill"}

    for pid, value in ((terminated_pid, 6.0), (ended_pid, 7.0)):
        snapshot = next((tmp_path / "dumps").glob(f"*_pid{pid}_op_call0001/graph_flushes/flush_0001"))
        assert torch.load(snapshot / "outputs.pt")["result"].tolist() == [2 * value] * 2
    assert "user data" in "".join(path.read_text() for path in tmp_path.glob("log_*.txt"))


@needs_cuda
def test_level_5_inside_a_capture(log):
    on = log(5)
    func = on.decorate(plain)
    x = torch.ones(8, device="cuda")
    func(x)  # outside: statistics
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        y = func(x)
    x.fill_(3)
    captured.replay()
    torch.cuda.synchronize()
    assert y.eq(6).all()
    deferred = on.text.count("[stats deferred to GPU kernel: id=")
    assert deferred == 2 and on.text.count("min=") == 2, "argument and result, inside the capture and before it"
    assert torch.cuda.get_device_name(0) in on.text
