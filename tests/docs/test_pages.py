# SPDX-License-Identifier: Apache-2.0
"""The code of the guides runs as it stands there: all blocks of a page in one process, in the order of the page."""

from __future__ import annotations

import re

import pytest

from ..fresh_process import run_python
from .documents import ROOT

PAGES = {"first_kernel.md": "leaky_relu.cu", "serving_a_model.md": "", "autotuner.md": "", "profiling.md": ""}


def blocks(text: str, language: str) -> str:
    return "\n".join(re.findall(rf"^```{language}\n(.*?)^```", text, re.S | re.M))


@pytest.mark.parametrize("page", PAGES)
def test_code_of_a_page(page, tmp_path):
    text = (ROOT / "docs" / page).read_text()
    if PAGES[page]:
        (tmp_path / PAGES[page]).write_text(blocks(text, "cpp"))
    (tmp_path / "page.py").write_text(blocks(text, "python"))
    done = run_python(["page.py"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    printed = re.findall(r"print\(error\)  # (.+)", text)
    assert all(line in done.stdout for line in printed), done.stdout
