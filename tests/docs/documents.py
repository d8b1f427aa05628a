# SPDX-License-Identifier: Apache-2.0
"""Documentation files, and the names they mention."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

DOCUMENTS = sorted(
    [ROOT / "README.md", ROOT / "CLAUDE.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
    + [*ROOT.glob("docs/**/*.md"), *ROOT.glob(".claude/skills/*/SKILL.md"), *ROOT.glob("examples/**/*.md")]
    + [*ROOT.glob("benchmarks/*.md"), *ROOT.glob("3rdparty/*/README.md")]
)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def code(text: str) -> list[str]:
    """Return inline code, and the lines of fenced and indented blocks."""
    fenced = re.findall(r"^ *```[^\n]*\n(.*?)^ *```", text, re.S | re.M)
    prose = re.sub(r"^ *```[^\n]*\n.*?^ *```", "", text, flags=re.S | re.M)
    indented = re.findall(r"^(?: {4,}|\t)(.+)$", prose, re.M)
    inline = re.findall(r"`([^`\n]+)`", prose)
    return inline + indented + [line for block in fenced for line in block.splitlines()]


def links(text: str) -> list[str]:
    """Return targets of links, without anchors and web addresses."""
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    return [t.split("#")[0] for t in targets if not re.match(r"[a-z]+://|#", t)]


def paths(text: str) -> list[str]:
    """Return inline code that is a path of this repository, without placeholders in angle brackets."""
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"^ *```[^\n]*\n.*?^ *```", "", text, flags=re.S | re.M))
    top = {p.name for p in ROOT.iterdir()}
    found = []
    for word in inline:
        if "<" in word or " " in word or "(" in word:
            continue
        in_tree = word.split("/")[0] in top and "/" in word
        is_file = re.fullmatch(r"[\w.-]+\.(md|toml|txt|yaml|in)", word)
        if in_tree or is_file or word in top:
            found.append(word)
    return found
