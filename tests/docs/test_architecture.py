# SPDX-License-Identifier: Apache-2.0
"""docs/architecture.md: the list of files that one call enters matches a real call of rmsnorm."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import flashinfer

from .documents import ROOT

DOCUMENT = ROOT / "docs" / "architecture.md"
PACKAGE = Path(flashinfer.__file__).resolve().parent


def documented_files() -> list[str]:
    """Return the first link of each numbered Python step of the section "One call"."""
    section = DOCUMENT.read_text().split("## One call\n")[1].split("\nThen C++")[0]
    return re.findall(r"^\d+\. \[[^\]]*\]\(\.\./flashinfer/([^)]+)\)", section, re.M)


def entered_files(call: Any) -> list[str]:
    """Return the files of the package that a call enters, in order, without repetitions of a file by itself.

    A generated wrapper counts as codegen_wrapper.py, which generates it.
    """
    entered: list[str] = []

    def on_event(frame: FrameType, event: str, argument: Any) -> None:
        if event != "call":
            return
        name = frame.f_code.co_filename
        if name.startswith("<wrapper of"):
            entered.append("_runtime/codegen_wrapper.py")
        elif PACKAGE in Path(name).parents:
            entered.append(str(Path(name).relative_to(PACKAGE)))

    before = sys.getprofile()
    sys.setprofile(on_event)
    try:
        call()
    finally:
        sys.setprofile(before)
    return [name for i, name in enumerate(entered) if i == 0 or name != entered[i - 1]]


def test_the_document_lists_the_files_that_a_call_enters():
    x, weight = torch.randn(4, 64), torch.ones(64)
    flashinfer.rmsnorm(x, weight)  # loads the module
    assert entered_files(lambda: flashinfer.rmsnorm(x, weight)) == documented_files()


def test_the_document_is_short():
    assert len(DOCUMENT.read_text().splitlines()) <= 120
