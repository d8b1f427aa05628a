# SPDX-License-Identifier: Apache-2.0
"""The table, the timeline image and the web page at the end of a run of examples/serve."""

from __future__ import annotations

import base64
import re
import struct
import sys
import zlib
from types import SimpleNamespace

import numpy as np
import pytest

from .examples_path import EXAMPLES as EXAMPLES  # isort: skip
from serve.page import write_page
from serve.report import COLOURS, Step, batch_sizes, paint, spans, table, token_rates, write_png, write_timeline

ONE = SimpleNamespace(arrival=0.0, first_token_at=1.0, finished_at=3.0)
TWO = SimpleNamespace(arrival=0.5, first_token_at=2.0, finished_at=4.0)
REQUESTS = [ONE, TWO]
STEPS = [
    Step("prefill", 0.0, 1.0, ((ONE, 10),)),
    Step("prefill", 1.0, 2.0, ((TWO, 30),)),
    Step("decode", 2.0, 3.0, ((ONE, 1), (TWO, 1))),
    Step("decode", 3.0, 4.0, ((TWO, 1),)),
]


def read_png(path):
    """Return the pixels of an RGB image whose rows have no filter; check lengths and checksums."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {}, 8
    while at < len(data):
        (length,) = struct.unpack_from(">I", data, at)
        body = data[at + 4 : at + 8 + length]
        assert struct.unpack_from(">I", data, at + 8 + length) == (zlib.crc32(body),)
        chunks[body[:4]] = body[4:]
        at += 12 + length
    assert list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    width, height = struct.unpack(">II", chunks[b"IHDR"][:8])
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, 1 + 3 * width)
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape(height, width, 3)


def test_batch_sizes():
    assert batch_sizes(STEPS, REQUESTS) == ([1, 1, 2, 1], [0.0, 1.0, 2.0, 3.0, 4.0])
    late = SimpleNamespace(arrival=7.0, first_token_at=8.0, finished_at=9.0)
    steps = [*STEPS, Step("prefill", 7.0, 8.0, ((late, 5),)), Step("decode", 8.0, 9.0, ((late, 1),))]
    sizes, times = batch_sizes(steps, [*REQUESTS, late])
    assert sizes == [1, 1, 2, 1, 0, 1, 1], "nothing is drawn where nothing was done"
    assert times == [0.0, 1.0, 2.0, 3.0, 4.0, 7.0, 8.0, 9.0]


def test_token_rates():
    """Check that every request of a step gains a token at the end of the step."""
    rates, edges = token_rates(STEPS, num_bins=4)
    assert edges.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert rates.tolist() == [
        0.0,
        1.0,
        1.0,
        3.0,
    ]  # an end on an edge counts behind it, the last one before it


def test_table():
    text = table(STEPS, REQUESTS, {"device": "a toaster"})
    assert "a toaster" in text
    assert "prefill                   20 tokens/s (40 in 2.00 s, 2 steps)" in text
    assert "decode                    2 tokens/s (3 in 2.00 s, 2 steps)" in text
    assert "time to first token       median 1250.0 ms, worst 1500.0 ms" in text
    assert "requests per decode step  1.5" in text


def test_spans_begin_with_waiting():
    assert [span for span in spans(STEPS, REQUESTS) if span[0] == 1] == [
        (1, "waiting", 0.5, 1.0),
        (1, "prefill", 1.0, 2.0),
        (1, "decode", 2.0, 3.0),
        (1, "decode", 3.0, 4.0),
    ]


def test_png_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    write_timeline(tmp_path / "timeline.png", STEPS, REQUESTS)
    image = read_png(tmp_path / "timeline.png")
    middle = image.shape[1] // 8  # half a second on an axis of four
    assert tuple(image[image.shape[0] // 4, middle]) == COLOURS["prefill"]
    assert tuple(image[-7, 2 * middle - 3]) == COLOURS["waiting"]
    assert tuple(image[-7, -1]) == COLOURS["decode"]


def test_png_with_matplotlib(tmp_path):
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="draws the better picture")
    write_timeline(tmp_path / "timeline", STEPS, REQUESTS)  # a name without suffix is kept
    image = pyplot.imread(tmp_path / "timeline", format="png")
    for colour in COLOURS.values():
        assert (np.abs(image[..., :3] - np.array(colour) / 255) < 0.01).all(axis=-1).any()


def test_png_is_read_by_others(tmp_path):
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="reads PNG")
    image = paint(list(spans(STEPS, REQUESTS)), 2, width=50)
    write_png(tmp_path / "image.png", image)
    assert np.array_equal(np.round(255 * pyplot.imread(tmp_path / "image.png")).astype(np.uint8), image)


def test_page(tmp_path):
    """One file that loads nothing: the table, the picture and the texts, which may hold anything."""
    picture, page = tmp_path / "timeline.png", tmp_path / "serve.html"
    write_png(picture, np.zeros((2, 3, 3), np.uint8))
    report = table(STEPS, REQUESTS, {"device": "a <b> & c"})
    write_page(page, report, picture, REQUESTS, lambda request: f"1+1: <script>{request.arrival}</script>")
    text = page.read_text()
    assert "<th>device</th><td>a &lt;b&gt; &amp; c</td>" in text and "<th>requests</th><td>2 in 4.00 s</td>" in text
    assert "<code>1+1: &lt;script&gt;0.5&lt;/script&gt;</code>" in text and "<script" not in text
    assert base64.b64encode(picture.read_bytes()).decode() in text
    assert all(url.startswith("data:") for url in re.findall(r'(?:src|href)="([^"]*)"', text)) and "http" not in text
