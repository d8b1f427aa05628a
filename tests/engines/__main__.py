# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.engines``: run published engines on CPU tensors (``make engines``).

    python -m tests.engines            run all cases, print the table
    python -m tests.engines sampler    run one
    python -m tests.engines --write    and write docs/engines.md; with names, the rows of these alone

Not part of the tests: it fetches wheels of 620 MB. A case whose engine cannot be imported fails.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from pathlib import Path

from .prepare import prepare

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "engines.md"
BEGIN, END = "<!-- table of the lane: begin -->", "<!-- end -->"


def write(lines: list[str]) -> None:
    head, _, rest = DOCUMENT.read_text().partition(BEGIN)
    DOCUMENT.write_text("\n".join([head + BEGIN, "", *lines, "", END + rest.partition(END)[2]]))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.engines")
    parser.add_argument("names", nargs="*", help="cases, all by default")
    parser.add_argument("--write", action="store_true", help="write the table to docs/engines.md")
    options = parser.parse_args()
    prepare()
    from . import (  # noqa: F401
        ranks_lane,
        sglang_attention,
        sglang_lane,
        sglang_layers,
        sglang_mla,
        vllm_attention,
        vllm_lane,
        vllm_layers,
    )
    from .table import CASES, rows

    results, failed = {}, 0
    for each in CASES:
        name = each.run.__name__
        if options.names and name not in options.names:
            continue
        try:
            each.run()
            results[name] = "agrees"
        except Exception as error:
            failed += 1
            results[name] = f"fails: {type(error).__name__}"
            traceback.print_exc()
        print(f"{name}: {results[name]}", flush=True)
    lines = rows(results, DOCUMENT.read_text().splitlines())
    print("\n".join(lines))
    if options.write:
        write(lines)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
