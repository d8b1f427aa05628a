# SPDX-License-Identifier: Apache-2.0
"""profile_kernel and the trace of an instrumented kernel."""

import json
import threading

import pytest
import torch

from flashinfer.profiler import EventType, decode_tag, export_to_perfetto_trace, profile_kernel, profile_session


def test_region_reports_its_label_and_time(device, capsys):
    with profile_kernel("batch_decode") as profile:
        torch.ones(64, 64, device=device).sum()
    assert profile.label == "batch_decode" and 0 < profile.elapsed_ms < 1e4
    assert profile.elapsed_s == profile.elapsed_ms / 1e3
    line = capsys.readouterr().out
    assert line.startswith("[profile] batch_decode: ") and line.endswith(f" ms ({profile.device})\n")


def test_quiet_region_prints_nothing(capsys):
    with profile_kernel("quiet", verbose=False) as profile:
        pass
    assert capsys.readouterr().out == "" and profile.elapsed_ms >= 0


def test_region_is_not_read_before_its_end():
    with (
        profile_kernel("early", verbose=False) as profile,
        pytest.raises(RuntimeError, match="'early' must be read after its block"),
    ):
        _ = profile.elapsed_ms


def test_region_passes_exceptions_on(capsys):
    with pytest.raises(KeyError), profile_kernel("broken"):
        raise KeyError
    assert capsys.readouterr().out == ""


@pytest.fixture
def session(device):
    """Two steps with a kernel in each, and a region of another thread."""

    def kernel():
        with profile_kernel("kernel", verbose=False):
            torch.ones(64, 64, device=device).sum()

    with profile_session() as found:
        for _ in range(2):
            with profile_kernel("step", verbose=False):
                kernel()
        other = threading.Thread(target=kernel)
        other.start()
        other.join()
    kernel()  # after the session: not collected
    return found


def test_session_table(session):
    head, _, *rows = session.table().splitlines()
    assert head.split()[:4] == ["label", "calls", "total", "ms"]
    cells = {row.split()[0]: row.split()[1:] for row in rows}
    assert cells["kernel"][0] == "3" and cells["step"][0] == "2"
    total = sum(profile.elapsed_ms for profile in session.profiles if profile.label == "step")
    assert float(cells["step"][1]) == pytest.approx(total, abs=5e-4)


def test_session_chrome_trace(session, tmp_path):
    session.export_chrome_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    regions = [event for event in events if event["ph"] == "X"]
    assert sorted(event["name"] for event in regions) == ["kernel"] * 3 + ["step"] * 2
    steps = [event for event in regions if event["name"] == "step"]
    inside = [
        any(step["ts"] <= e["ts"] and e["ts"] + e["dur"] <= step["ts"] + step["dur"] for step in steps)
        for e in regions
        if e["name"] == "kernel"
    ]
    assert sum(inside) == 2, "the kernel of the other thread is in no step"
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == ({"cuda"} if torch.cuda.is_available() else {"thread 0", "thread 1"})


def test_session_picture(session, tmp_path):
    pytest.importorskip("matplotlib", reason="draws the picture")
    session.export_png(tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def _entry(block, group, event, kind, sm, time_ns, groups=2):
    tag = kind.value | event << 2 | (block * groups + group) << 12 | sm << 24
    return tag | (time_ns % 2**32) << 32


def _signed(words):
    return torch.tensor([w - 2**64 if w >= 2**63 else w for w in words], dtype=torch.int64)


HEADER = 3 | 2 << 32  # three blocks of two groups


def test_decode_tag():
    tag = _entry(2, 1, 9, EventType.kInstant, 131, 0) & 0xFFFFFFFF
    assert decode_tag(tag, 3, 2) == (2, 1, 9, EventType.kInstant.value, 131)
    with pytest.raises(ValueError, match="must be below 2, got 2"):
        decode_tag(tag, 2, 2)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64])
def test_trace_has_a_row_per_block_and_group(tmp_path, dtype):
    words = [
        HEADER,
        _entry(0, 0, 0, EventType.kBegin, 200, 5_000),
        _entry(0, 0, 0, EventType.kEnd, 200, 7_500),
        0,  # an unwritten slot
        _entry(1, 1, 1, EventType.kInstant, 7, 4_000),
    ]
    path = tmp_path / "trace.json"
    export_to_perfetto_trace(_signed(words).view(dtype), ["load", "done"], path)
    events = json.loads(path.read_text())["traceEvents"]
    timed = [e for e in events if e["ph"] != "M"]
    assert [(e["name"], e["ph"], e["ts"], e["pid"], e["tid"]) for e in timed] == [
        ("load", "B", 1.0, 200, 0),
        ("load", "E", 3.5, 200, 0),
        ("done", "i", 0.0, 7, 3),
    ]
    names = {(e["name"], e["args"]["name"]) for e in events if e["ph"] == "M"}
    assert names == {
        ("process_name", "SM 200"),
        ("process_name", "SM 7"),
        ("thread_name", "block 0 group 0"),
        ("thread_name", "block 1 group 1"),
    }


def test_timer_may_wrap(tmp_path):
    words = [
        HEADER,
        _entry(0, 0, 0, EventType.kBegin, 0, 2**32 - 1_000),
        _entry(0, 0, 0, EventType.kEnd, 0, 2**32 + 1_000),
    ]
    path = tmp_path / "trace.json"
    export_to_perfetto_trace(_signed(words), ["load"], path)
    times = [e["ts"] for e in json.loads(path.read_text())["traceEvents"] if e["ph"] != "M"]
    assert times == [0.0, 2.0]


@pytest.mark.parametrize(
    "buffer, text",
    [
        (torch.zeros(2, 2, dtype=torch.int64), "must be 1-D uint64"),
        (torch.zeros(4), "must be 1-D uint64"),
        (torch.zeros(4, dtype=torch.int64), "must have a header"),
        (_signed([HEADER, _entry(0, 0, 5, EventType.kBegin, 0, 1)]), "an event below 1 .*, got event 5"),
    ],
)
def test_trace_errors(tmp_path, buffer, text):
    with pytest.raises(ValueError, match=text):
        export_to_perfetto_trace(buffer, ["load"], tmp_path / "trace.json")


def test_an_unused_buffer_gives_an_empty_trace(tmp_path):
    path = tmp_path / "trace.json"
    export_to_perfetto_trace(_signed([HEADER, 0, 0]), [], path)
    assert json.loads(path.read_text())["traceEvents"] == []


def test_gpu_region_is_an_nvtx_range_between_events(monkeypatch, capsys):
    """Check the order of calls without a GPU."""
    log = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            log.append("record")

        def synchronize(self):
            log.append("synchronize")

        def elapsed_time(self, end):
            return 1.5

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda label: log.append(label))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: log.append("pop"))
    with profile_kernel("step {0}"):
        log.append("work")
    assert log == ["step {0}", "record", "work", "record", "pop", "synchronize"]
    assert capsys.readouterr().out == "[profile] step {0}: 1.500 ms (cuda)\n"
