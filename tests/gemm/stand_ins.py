# SPDX-License-Identifier: Apache-2.0
"""What tests of shortcuts put in place of native functions."""

from __future__ import annotations


class Native:
    """Stands for a native function: records the arguments of its calls, writes ones, returns ``takes``."""

    def __init__(self, takes: bool = True) -> None:
        self.calls: list[tuple] = []
        self.takes = takes

    def __call__(self, out, *args):
        self.calls.append((out, *args))
        if self.takes:
            out.fill_(1)
        return self.takes
