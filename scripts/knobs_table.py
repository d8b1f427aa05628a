# SPDX-License-Identifier: Apache-2.0
"""Write docs/environment.md from the declarations in flashinfer/_runtime/knobs.py.

python scripts/knobs_table.py            print the page
python scripts/knobs_table.py --write    store it; tests/docs fails while the stored page is out of date
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "environment.md"

# Heading of each group of knobs, in the order of the page. A group without one gets its own name.
HEADINGS = {
    "jit": "Building and caching modules",
    "compiler": "Compilers and flags",
    "log": "API logging and dumps",
    "trace": "Traces",
    "ops": "Operators",
}

INTRODUCTION = """# Environment variables

Written by `python scripts/knobs_table.py --write` from [knobs.py](../flashinfer/_runtime/knobs.py): edit that file.
`flashinfer show-config` prints the values in force. A variable is read when it matters, not at import, except for those
of logging and traces, which decide whether a function is wrapped at all. An unknown value is an
error that lists the known ones; switches take 1, true, yes, on, 0, false, no and off.
"""


def _default(knob: Any) -> str:
    """Return the value used when the variable is unset; empty for "none" and for switches that any text turns on."""
    if knob.default in (None, "", []) or (knob.default is False and knob.parse("0")):
        return ""
    return f"`{int(knob.default) if isinstance(knob.default, bool) else knob.default}`"


def render() -> str:
    """Return the text of the page."""
    sys.path.insert(0, str(ROOT))
    from flashinfer._runtime.knobs import knobs

    groups = dict.fromkeys([*HEADINGS, *(knob.group for knob in knobs.all())])
    parts = [INTRODUCTION]
    for group in groups:
        members = [knob for knob in knobs.all() if knob.group == group]
        if members:
            rows = [f"| `{k.variable}` | {_default(k)} | {k.doc} |" for k in members]
            heading = HEADINGS.get(group, group.capitalize())
            table = ["| variable | default | effect |", "|---|---|---|", *rows]
            parts.append("\n".join([f"## {heading}", "", *table, ""]))
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"store the page in {PAGE.relative_to(ROOT)}")
    if parser.parse_args().write:
        PAGE.write_text(render())
    else:
        print(render(), end="")


if __name__ == "__main__":
    main()
