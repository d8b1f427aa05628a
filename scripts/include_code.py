# SPDX-License-Identifier: Apache-2.0
"""Copy code from files of the repository into the documentation, so that a page never shows code that does not run.

python scripts/include_code.py            list pages that are out of date; exit code 1 if there are any
python scripts/include_code.py --write    bring them up to date

A marker `<!-- code: PATH -->` in a page is followed by a fenced block with the content of that file, without its
license line.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

_BLOCK = re.compile(r"^<!-- code: (\S+) -->\n(?:```[^\n]*\n.*?^```\n)?", re.S | re.M)
_LANGUAGES = {".py": "python", ".cu": "cpp", ".cuh": "cpp", ".h": "cpp", ".jinja": "cpp"}


def pages() -> list[Path]:
    return [page for page in sorted(ROOT.glob("docs/**/*.md")) if _BLOCK.search(page.read_text())]


def _block(match: re.Match[str]) -> str:
    path = ROOT / match[1]
    code = re.sub(r"^(?://|#) SPDX-License-Identifier:[^\n]*\n+", "", path.read_text())
    return f"<!-- code: {match[1]} -->\n```{_LANGUAGES[path.suffix]}\n{code.rstrip()}\n```\n"


def render(page: Path) -> str:
    """Return the text of the page with every marked block replaced by the content of its file."""
    return _BLOCK.sub(_block, page.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="bring the pages up to date")
    write = parser.parse_args().write
    stale = [page for page in pages() if render(page) != page.read_text()]
    for page in stale:
        if write:
            page.write_text(render(page))
        print(f"{'updated' if write else 'out of date:'} {page.relative_to(ROOT)}")
    sys.exit(bool(stale) and not write)


if __name__ == "__main__":
    main()
