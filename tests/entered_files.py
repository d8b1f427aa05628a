# SPDX-License-Identifier: Apache-2.0
"""Files of the package that a call enters."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import flashinfer

PACKAGE = Path(flashinfer.__file__).resolve().parent


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
