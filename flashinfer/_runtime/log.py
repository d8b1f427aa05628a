# SPDX-License-Identifier: Apache-2.0
"""Log levels of the ``flashinfer`` loggers. The log of API calls is separate: see ``api_logging``."""

from __future__ import annotations

import contextlib
import enum
import functools
import logging
import sys
from typing import Optional, TextIO

from .errors import ArgumentError
from .knobs import knobs

__all__ = ["LogLevel", "configure_jit_log", "get_logging_module", "is_terminal", "say", "set_log_level"]


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
        raise ArgumentError(f"set_log_level: lvl_str must be one of {names}, got {lvl_str!r}") from None
    logging.getLogger("flashinfer").setLevel(_PYTHON_LEVEL[level])


class _LoggingModule:
    """Calls of published programs to the native logger: native code here reports through Python."""

    @staticmethod
    def set_log_level(level: int) -> None:
        """Set the level of the logger ``flashinfer`` by the number of a :class:`LogLevel`."""
        try:
            chosen = LogLevel(level)
        except ValueError:
            numbers = ", ".join(f"{each.value} ({each.name.lower()})" for each in LogLevel)
            raise ArgumentError(f"set_log_level: level must be one of {numbers}, got {level!r}") from None
        set_log_level(chosen.name)


@functools.cache
def get_logging_module() -> _LoggingModule:
    """Return the object whose ``set_log_level(number)`` sets the level of the messages of this package."""
    return _LoggingModule()


def say(text: str, end: str = "\n", stream: Optional[TextIO] = None) -> None:
    """Print to stderr, or to ``stream``; do nothing if the stream is closed, full or missing, as in some services."""
    stream = sys.stderr if stream is None else stream
    if stream is not None:  # print() would write to stdout for None
        with contextlib.suppress(OSError, ValueError):
            print(text, end=end, file=stream, flush=True)


def is_terminal() -> bool:
    """Return True if stderr is a terminal; stderr may be missing, closed, or an object that can only write."""
    try:
        return sys.stderr.isatty()
    except (AttributeError, OSError, ValueError):
        return False


class _StderrUnlessConfigured(logging.Handler):
    """Print records to stderr until the program configures logging, whose handlers then get every record.

    The default handler of Python's logging prints no record below WARNING, whatever the level of a logger.
    """

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            say(self.format(record))


def configure_jit_log() -> logging.Logger:
    """Set ``flashinfer.jit`` to the level of ``FLASHINFER_LOGGING_LEVEL``; DEBUG tells why a module is built."""
    logger = logging.getLogger("flashinfer.jit")
    if not logger.handlers:
        logger.addHandler(_StderrUnlessConfigured())
    logger.setLevel(knobs.logging_level)
    return logger
