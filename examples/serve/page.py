# SPDX-License-Identifier: Apache-2.0
"""A web page of a run: one HTML file with the table, the timeline and the texts, without a network."""

from __future__ import annotations

import base64
from html import escape
from pathlib import Path
from typing import Any, Callable, Sequence

STYLE = """
body { font-family: sans-serif; max-width: 70em; margin: 2em auto; color: #333 }
table { border-collapse: collapse } td, th { text-align: left; padding: 0.2em 1em 0.2em 0; vertical-align: top }
tr:nth-child(even) { background: #f4f4f4 } img { max-width: 100% } code { white-space: pre-wrap }
"""


def rows_of(requests: Sequence[Any], show: Callable[[Any], str]) -> str:
    """Return a row for each request: its times in seconds, and its text."""
    rows = []
    for number, request in enumerate(requests):
        times = (request.arrival, request.first_token_at, request.finished_at)
        cells = [str(number), *(f"{at:.3f}" for at in times), f"<code>{escape(show(request))}</code>"]
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return "\n".join(rows)


def write_page(path: Path, report: str, timeline: Path, requests: Sequence[Any], show: Callable[[Any], str]) -> None:
    """Write the page. ``report`` is the printed table, ``timeline`` a PNG, ``show`` returns the text of a request."""
    facts = "\n".join(
        f"<tr><th>{escape(name)}</th><td>{escape(value.strip())}</td></tr>"
        for name, _, value in (line.partition("  ") for line in report.splitlines())
    )
    picture = base64.b64encode(timeline.read_bytes()).decode()
    path.write_text(
        f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>flashinfer: a run of examples/serve</title>
<style>{STYLE}</style></head>
<body>
<h1>A run of examples/serve</h1>
<table>
{facts}
</table>
<h2>What each request was doing</h2>
<img alt="timeline of the batch" src="data:image/png;base64,{picture}">
<h2>Requests</h2>
<table>
<tr><th>#</th><th>arrived (s)</th><th>first token</th><th>finished</th><th>text</th></tr>
{rows_of(requests, show)}
</table>
</body></html>
"""
    )
