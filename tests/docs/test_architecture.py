# SPDX-License-Identifier: Apache-2.0
"""docs/architecture.md: the list of files that one call enters matches a real call of rmsnorm."""

from __future__ import annotations

import re

import torch

import flashinfer

from ..entered_files import entered_files
from .documents import ROOT

DOCUMENT = ROOT / "docs" / "architecture.md"


def documented_files() -> list[str]:
    """Return the first link of each numbered Python step of the section "One call"."""
    section = DOCUMENT.read_text().split("## One call\n")[1].split("\nThen C++")[0]
    return re.findall(r"^\d+\. \[[^\]]*\]\(\.\./flashinfer/([^)]+)\)", section, re.M)


def test_the_document_lists_the_files_that_a_call_enters():
    x, weight = torch.randn(4, 64), torch.ones(64)
    flashinfer.rmsnorm(x, weight)  # loads the module
    assert entered_files(lambda: flashinfer.rmsnorm(x, weight)) == documented_files()


def test_the_document_is_short():
    assert len(DOCUMENT.read_text().splitlines()) <= 120
