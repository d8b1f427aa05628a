# SPDX-License-Identifier: Apache-2.0
"""How much the ``flashinfer`` loggers say. Logging of API calls is another thing: see ``api_logging``."""

from __future__ import annotations

import enum
import logging

from .errors import ArgumentError

__all__ = ["LogLevel", "set_log_level"]


class LogLevel(enum.Enum):
    TRACE = 0
    DEBUG = 1
    INFO = 2
    WARN = 3
    ERROR = 4
    CRITICAL = 5


_PYTHON_LEVEL = {
    LogLevel.TRACE: 5,
    LogLevel.DEBUG: logging.DEBUG,
    LogLevel.INFO: logging.INFO,
    LogLevel.WARN: logging.WARNING,
    LogLevel.ERROR: logging.ERROR,
    LogLevel.CRITICAL: logging.CRITICAL,
}


def set_log_level(lvl_str: str) -> None:
    """Set the level of the logger ``flashinfer`` by name, such as ``"info"``."""
    try:
        level = LogLevel[lvl_str.upper()]
    except KeyError:
        names = ", ".join(level.name.lower() for level in LogLevel)
        raise ArgumentError(f"set_log_level: lvl_str is {lvl_str!r}, expected one of {names}") from None
    logging.getLogger("flashinfer").setLevel(_PYTHON_LEVEL[level])
