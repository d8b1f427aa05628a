# SPDX-License-Identifier: Apache-2.0
"""New Python processes that start with torch imported, which is most of the time that such a process takes.

A helper process imports torch and nothing else, and forks for each call; everything after that is as in a new
interpreter: ``flashinfer`` is not imported, the environment, the folder and ``sys.path`` are those of the call. A test
that looks at the import of torch, or at options of the interpreter, starts a process itself.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any, Mapping, Optional, Sequence

#: A process that waits forever is ended by SIGALRM after this time; its status is then -14.
SECONDS = 600


def run_python(
    arguments: Sequence[str | Path],
    env: Optional[Mapping[str, str]] = None,
    cwd: Optional[str | Path] = None,
    check: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run ``python ARGUMENTS``: ``-c PROGRAM``, ``-m MODULE`` or a script, and arguments of it. Capture its output."""
    words = [str(word) for word in arguments]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        call = {
            "arguments": words,
            "env": dict(os.environ if env is None else env),
            "cwd": str(cwd or Path.cwd()),
            "files": [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in (out, err)],
        }
        status = _ask(_helper(), call)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    done = subprocess.CompletedProcess([sys.executable, *words], status, *texts)
    if check:
        done.check_returncode()
    return done


@functools.cache
def _helper() -> subprocess.Popen[str]:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", Path(__file__).read_text(), "serve"]
    helper = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, cwd="/", text=True)
    atexit.register(helper.communicate)  # the end of its input ends it
    return helper


def _ask(helper: subprocess.Popen[str], call: dict[str, Any]) -> int:
    assert helper.stdin is not None and helper.stdout is not None
    helper.stdin.write(json.dumps(call) + "\n")
    helper.stdin.flush()
    return int(helper.stdout.readline())


# The rest runs in the helper -----------------------------------------------------------------------------------


def _serve(calls: IO[str], replies: IO[str]) -> None:
    import torch  # noqa: F401 - the purpose of the helper

    installed = [entry for entry in sys.path if entry]
    for line in calls:
        pid = os.fork()
        if pid == 0:
            calls.close()
            _become(json.loads(line), installed)
        replies.write(f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n")
        replies.flush()


def _become(call: dict[str, Any], installed: list[str]) -> None:
    """Make this process what the interpreter would make of the call, run the program, and exit."""
    import importlib
    import random
    import signal

    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    for number, path in enumerate(call["files"], start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
    os.environ.clear()
    os.environ.update(call["env"])
    os.chdir(call["cwd"])
    tempfile.tempdir = None
    random.seed()
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    sys.pycache_prefix = os.environ.get("PYTHONPYCACHEPREFIX") or None
    sys.path[:] = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *installed]
    sys.orig_argv = [sys.executable, *call["arguments"]]
    importlib.invalidate_caches()
    signal.alarm(SECONDS)
    status = 0
    try:
        _run_program(call["arguments"])
    except SystemExit as error:
        status = _status(error)
    except BaseException as error:
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # without this function
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    finally:
        _finish(status)


def _run_program(arguments: list[str]) -> None:
    import runpy
    import types

    first, *rest = arguments
    if first == "-c":
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        exec(compile(rest[0], "<string>", "exec"), vars(main))
    elif first == "-m":
        sys.argv = ["-m", *rest[1:]]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *rest]
        sys.path.insert(0, os.path.dirname(os.path.abspath(first)))
        runpy.run_path(first, run_name="__main__")


def _status(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1


def _finish(status: int) -> None:
    """End as the interpreter does: threads, then exit functions, then files."""
    import threading

    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status & 0xFF)


if __name__ == "__main__" and sys.argv[1:] == ["serve"]:
    _serve(sys.stdin, os.fdopen(os.dup(1), "w"))
