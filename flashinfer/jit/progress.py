# SPDX-License-Identifier: Apache-2.0
"""Progress display of a build: nothing for the first second, then one line on stderr."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any, Optional, Sequence

from .._runtime.log import is_terminal, say

QUIET_SECONDS = 1.0


def short_name(name: str) -> str:
    """Return the name of a module without its dtypes and sizes, which fill a line: ``batch_prefill_with_kv_cache``."""
    short = name.partition("_dtype_")[0]
    return short if len(short) <= 40 else f"{short[:37]}..."


def some_of(names: Sequence[str]) -> str:
    """Return up to three short names and the number of others; a name stands for all modules that have it."""
    short = list(dict.fromkeys(map(short_name, names)))[:3]
    others = len(names) - sum(short_name(name) in short for name in names)
    return ", ".join(short) + (f" and {others} more" if others else "")


def _short_step(description: str) -> str:
    """Shorten ``<module>: <file>``, the description of a step."""
    module, colon, what = description.partition(": ")
    return f"{short_name(module)}{colon}{what if len(what) <= 40 else what[:37] + '...'}"


class ProgressLine:
    """``flashinfer: building norm, step 2 of 6, 3.4 s``; rewritten in place on a terminal, two lines elsewhere."""

    def __init__(self, names: Sequence[str]) -> None:
        self.label = some_of(names)
        self.done, self.total = 0, 0
        self.start = time.monotonic()
        self._finished = threading.Event()
        self._thread: Optional[threading.Thread] = None

    def __enter__(self) -> ProgressLine:
        self._thread = threading.Thread(target=self._show, daemon=True)
        self._thread.start()
        return self

    def step(self, done: int, total: int, description: str) -> None:
        """Record that ``done`` of ``total`` steps are finished."""
        self.done, self.total = done, total

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.start

    def _text(self) -> str:
        steps = f", step {min(self.done + 1, self.total)} of {self.total}" if self.total else ""
        return f"flashinfer: building {self.label}{steps}, {self.seconds:.1f} s"

    def _show(self) -> None:
        if self._finished.wait(QUIET_SECONDS):
            return
        terminal = is_terminal()
        say(self._text(), end="" if terminal else "\n")
        while terminal and not self._finished.wait(0.2):
            say("\r" + self._text(), end="")

    def __exit__(self, kind: object, value: object, traceback: object) -> None:
        self._finished.set()
        assert self._thread is not None
        self._thread.join()
        if self.seconds >= QUIET_SECONDS:
            word = "built" if kind is None else "failed to build"
            line = f"flashinfer: {word} {self.label} in {self.seconds:.1f} s"
            if is_terminal():
                line = f"\r{line:{len(self._text())}}"  # pad, to overwrite the previous line
            say(line)


class _Stderr:
    """stderr whose ``write`` never fails; everything else is passed on."""

    def write(self, text: str) -> int:
        say(text, end="")
        return len(text)

    def flush(self) -> None:
        """Do nothing: every write is flushed."""

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)


class ProgressBar:
    """Progress of warm-up and AOT builds of many modules, as a tqdm bar."""

    def __init__(self, names: Sequence[str]) -> None:
        from tqdm import tqdm

        # A log file gets a line each half minute: it keeps what a terminal would overwrite.
        interval = 0.1 if is_terminal() else 30.0
        desc = f"building {len(names)} modules"
        self.bar = tqdm(total=None, desc=desc, unit="step", mininterval=interval, file=_Stderr())

    def __enter__(self) -> ProgressBar:
        return self

    def step(self, done: int, total: int, description: str) -> None:
        self.bar.total = total
        self.bar.set_postfix_str(_short_step(description), refresh=False)
        self.bar.update(done - self.bar.n)

    def __exit__(self, kind: object, value: object, traceback: object) -> None:
        self.bar.close()
