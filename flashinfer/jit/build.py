# SPDX-License-Identifier: Apache-2.0
"""Build modules such that no process ever loads an incomplete one.

Each module has an advisory lock. Inside the lock, sources are generated, compiled and linked in a private directory,
and published by renaming: objects, library, then the manifest that makes the library trusted. A process that builds in
order to load does both inside the lock, so that it loads what it built. A builder that dies leaves a private directory,
which the next holder of the lock deletes. A warm start takes no lock: it loads the file that it has validated, by
descriptor if another file has taken the name. The cache is deleted module by module inside the same locks.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shlex
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Iterator, Mapping, Optional, Sequence, Union

from .._runtime.errors import MissingJITCacheError
from .._runtime.knobs import knobs
from .._runtime.log import say
from . import env as jit_env
from .context import current_compilation_context
from .cpp_ext import embedding, find_ninja, group_ninja_text, ninja_text, translation_units, watch_ninja
from .load import is_fresh, load, load_fresh, staleness, try_load
from .manifest import manifest_path, source_digests, unreadable, write_manifest
from .progress import ProgressBar, ProgressLine
from .spec import ModuleSpec
from .utils import make_folder, write_atomically, write_if_different

if TYPE_CHECKING:
    from filelock import BaseFileLock

logger = logging.getLogger("flashinfer.jit")

Progress = Callable[[Sequence[str]], Union[ProgressLine, ProgressBar]]

_PRIVATE_PREFIX = ".build-"
_ERROR_LINE = re.compile(
    r"error[ :#]|error\b.*:|undefined reference|No space left|cannot find|not found|Permission denied|Killed|fatal",
    re.IGNORECASE,
)
_NINJA_LINE = re.compile(r"FAILED: |\[\d+/\d+\] |ninja: (Entering directory|build stopped)")


def build_and_load(spec: ModuleSpec) -> Any:
    """Return the loaded module: pre-built, else fresh in the cache, else compiled now."""
    try:
        module = try_load(spec)
    except Exception as error:  # the content is fresh, but the library does not load: system libraries differ, say
        logger.warning("cached %s cannot be loaded (%s); building it again", spec.name, error)
        with built([spec], force=True):
            return load(spec.jit_library_path)
    if module is None:
        check_target(spec)
    while module is None:
        with built([spec]) as locked:
            module = load_fresh(spec)
            if module is None and locked:  # a header was edited during the build: load what was built
                module = load(spec.jit_library_path)
    return module


def build_modules(
    specs: Sequence[ModuleSpec], verbose: Optional[bool] = None, progress: Progress = ProgressLine
) -> None:
    """Build those of ``specs`` that are not fresh, all in one ninja graph; refuse CUDA modules without a target."""
    for spec in specs:
        check_target(spec)
    ensure_built(specs, verbose, progress)


def check_target(spec: ModuleSpec) -> None:
    if spec.backend == "cuda" and not current_compilation_context.TARGET_CUDA_ARCHS:
        raise RuntimeError(
            f"{spec.name}: no CUDA target to compile for: no GPU is visible and FLASHINFER_CUDA_ARCH_LIST is not set "
            "(FlashInfer requires GPUs with sm75 or higher)"
        )


def write_generated(spec: ModuleSpec) -> None:
    """Write the generated sources whose text changed. A build calls this inside its lock."""
    for path, text in spec.generated.items():
        write_if_different(path, text)


def write_ninja(spec: ModuleSpec) -> None:
    """Write ``build.ninja`` into the module's directory, if its text changed."""
    write_generated(spec)  # the file is of use to a program that runs ninja itself only with its sources
    write_if_different(spec.ninja_path, ninja_text(spec, spec.build_dir))


def ensure_built(
    specs: Sequence[ModuleSpec], verbose: Optional[bool] = None, progress: Progress = ProgressLine
) -> None:
    """Build those of ``specs`` that are not fresh, all in one ninja graph."""
    with built(specs, verbose, progress):
        pass


@contextlib.contextmanager
def built(
    specs: Sequence[ModuleSpec], verbose: Optional[bool] = None, progress: Progress = ProgressLine, force: bool = False
) -> Iterator[bool]:
    """Run :func:`ensure_built` and hold the locks of stale modules until the block ends; yields True if there are any.

    ``force`` builds fresh modules too. Inside the block, modules of these names must not be built.
    """
    by_lock = {str(s.lock_path): s for s in specs if force or not is_fresh(s)}  # a module named twice is built once
    if not by_lock:
        yield False
        return
    pending = [by_lock[lock] for lock in sorted(by_lock)]
    if knobs.disable_jit:
        raise MissingJITCacheError(
            f"{pending[0].name}: no usable module in the cache ({staleness(pending[0]) or 'it does not load'}) "
            "nor pre-built, and FLASHINFER_DISABLE_JIT is set",
            pending[0],
        )
    for spec in pending:
        _check_sources(spec)
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("building %s: %s", spec.name, staleness(spec) or "it does not load")
    jit_env.check_base()
    for spec in pending:
        _check_trust(spec)
    with contextlib.ExitStack() as locks:
        # All processes lock in the same order, so that two groups cannot wait for each other.
        held = [spec for spec in pending if locks.enter_context(_lock(spec, force))]
        pending = [s for s in held if force or not is_fresh(s)]
        if pending:
            _build_locked(pending, knobs.jit_verbose if verbose is None else verbose, progress)
        yield bool(held)


def _check_sources(spec: ModuleSpec) -> None:
    for source in spec.sources:
        if source in spec.generated:
            continue
        try:
            open(source, "rb").close()
        except PermissionError as error:
            raise RuntimeError(f"{spec.name}: source {unreadable(source, error)}") from error
        except OSError as error:
            raise RuntimeError(f"{spec.name}: source {source} does not exist") from error


def _check_trust(spec: ModuleSpec) -> None:
    """Check the directories before a build: the result is loaded, and other users must not be able to change it."""
    for folder in (spec.build_dir, jit_env.gen_src_dir(spec.backend) / spec.name):
        reason = jit_env.untrusted(folder)
        if reason is not None:
            raise RuntimeError(f"{spec.name}: {reason}")


@contextlib.contextmanager
def _explain_os_error(spec: ModuleSpec) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = staleness(spec) or "it does not load"  # root may have built it from a file that others may not read
        why = "" if reason == "not built" else f". The module there is not used: {reason}"
        raise RuntimeError(
            f"{spec.name}: cannot write to the cache directory {spec.build_dir} ({error.strerror or error}); "
            f"free space there or set FLASHINFER_WORKSPACE_BASE to another directory{why}"
        ) from error


@contextlib.contextmanager
def _lock(spec: ModuleSpec, force: bool = False) -> Iterator[bool]:
    """Hold the lock of a module and make its folder. Yields False, without the lock, if another process built it."""
    with _explain_os_error(spec):
        lock = _acquire(spec.name, spec.lock_path, lambda: not force and is_fresh(spec))
    try:
        if lock is not None:
            with _explain_os_error(spec):
                make_folder(spec.build_dir)
        yield lock is not None
    finally:
        if lock is not None:
            lock.release()


def _acquire(name: str, path: Path, no_longer: Callable[[], bool]) -> Optional[BaseFileLock]:
    """Acquire the lock ``path``; None if ``no_longer()`` became true while another process held the lock."""
    from filelock import FileLock, Timeout  # takes 20 ms, and a warm start does not need it

    lock, patience, deleted = FileLock(str(path)), 2.0, 0
    while True:
        try:
            make_folder(path.parent)
            lock.acquire(timeout=patience)
            return lock
        except Timeout:
            if no_longer():
                return None
            if patience == 2.0:
                say(f"flashinfer: waiting for another process or thread to build {name}")
            patience = 0.5
        except FileNotFoundError:  # `flashinfer clear-cache` has deleted the folder meanwhile
            deleted += 1
            if deleted == 100:
                raise


def clear_modules(modules: Path, generated: Optional[Path] = None) -> None:
    """Delete the folder ``modules``, and ``generated``, module by module, each inside its lock.

    The holder of a lock deletes the lock file; a process that waited for the lock notices that and makes a new one.
    """
    folders = [folder for folder in (modules, generated) if folder is not None]
    found = {path for folder in folders if folder.is_dir() for path in folder.iterdir()}
    for name in sorted({path.name.removesuffix(".lock") for path in found}):
        lock_path = modules / f"{name}.lock"
        lock = _acquire(name, lock_path, lambda: False)
        assert lock is not None
        try:
            for folder in folders:
                _remove(folder / name)
            lock_path.unlink(missing_ok=True)
        finally:
            lock.release()
    for folder in folders:
        with contextlib.suppress(OSError):  # the folder is missing, or another process builds again
            folder.rmdir()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _build_locked(specs: Sequence[ModuleSpec], verbose: bool, progress: Progress) -> None:
    private, sources = {}, {}
    try:
        for spec in specs:
            with _explain_os_error(spec):
                private[spec] = _prepare(spec)
            sources[spec] = source_digests(spec)
        first = private[specs[0]]
        ninja_file = first / "build.ninja"
        if len(specs) > 1:
            ninja_file = first / "all.ninja"
            with _explain_os_error(specs[0]):
                write_atomically(ninja_file, group_ninja_text(private))
        with progress([s.name for s in specs]) as shown, _Publisher(private, sources) as publisher:
            shown.step(0, sum(len(translation_units(s)) + 1 for s in specs), "")  # steps: units, and the link

            def on_step(done: int, total: int, description: str) -> None:
                shown.step(done, total, description)
                publisher.publish_finished()

            _, log = watch_ninja(first, ninja_file, verbose, on_step, len(specs) > 1)
            publisher.publish_finished()
            if publisher.waiting:
                raise RuntimeError(_failure(publisher.waiting, log))
    finally:
        for directory in private.values():
            shutil.rmtree(directory, ignore_errors=True)


class _Publisher:
    """Publishes each module of a group as soon as it is linked: other processes load it while the rest compiles.

    A module that cannot be published does not stop the others; its error is raised at the end.
    """

    def __init__(self, private: Mapping[ModuleSpec, Path], sources: Mapping[ModuleSpec, dict[str, str]]) -> None:
        self._private, self._sources = private, sources
        self.waiting = list(private)
        self._error: Optional[Exception] = None

    def publish_finished(self) -> None:
        # The link step renames its complete output, so a library that exists is complete.
        for spec in [s for s in self.waiting if (self._private[s] / s.library_name).exists()]:
            self.waiting.remove(spec)
            try:
                with _explain_os_error(spec):
                    _publish(spec, self._private[spec], self._sources[spec])
            except Exception as error:
                self._error = self._error or error

    def __enter__(self) -> _Publisher:
        return self

    def __exit__(self, kind: object, value: object, traceback: object) -> None:
        if kind is None and self._error is not None:
            raise self._error


def _prepare(spec: ModuleSpec) -> Path:
    """Write the generated sources and the ninja files; return a fresh private directory."""
    for stale in spec.build_dir.glob(_PRIVATE_PREFIX + "*"):
        shutil.rmtree(stale, ignore_errors=True)
    if spec.embedded_cubin_factory is not None:
        files = spec.embedded_cubin_factory(spec.build_dir)
        spec.embedded = [word for symbol, path in files.items() for word in embedding(symbol, Path(path))]
    write_ninja(spec)
    directory = Path(tempfile.mkdtemp(prefix=_PRIVATE_PREFIX, dir=spec.build_dir))
    write_atomically(directory / "build.ninja", ninja_text(spec, directory))
    return directory


def _publish(spec: ModuleSpec, private: Path, sources: dict[str, str]) -> None:
    library = spec.jit_library_path
    manifest_path(library).unlink(missing_ok=True)
    for path in private.glob("*.o"):
        os.replace(path, spec.build_dir / path.name)
    os.chmod(private / spec.library_name, (private / spec.library_name).stat().st_mode & 0o755)  # whatever the umask
    os.replace(private / spec.library_name, library)
    write_manifest(spec, private, library, sources)


def _failure(failed: Sequence[ModuleSpec], log: str) -> str:
    """Format one message: the module, the first compiler error, the path of the log, how to repeat the build."""
    spec = failed[0]
    log_path = spec.build_dir / "build.log"
    where = str(log_path)
    try:
        write_atomically(log_path, log)
    except OSError as error:
        where = f"(not written: {error.strerror})"
    names = ", ".join(s.name for s in failed)
    repeat = shlex.join([find_ninja(), "-v", "-C", str(spec.build_dir)])
    return f"Ninja build failed for {names}: {_first_error(log)}\n  full log: {where}\n  repeat:   {repeat}"


def _first_error(log: str) -> str:
    """Return the first line that looks like an error, else the last line of a compiler, else ninja's FAILED line.

    ninja prints ``FAILED: target`` and the command, then the output.
    """
    lines = [line.strip() for line in log.splitlines()]
    failed = [line for line in lines if line.startswith("FAILED: ")]
    pairs = zip(["", *lines[:-1]], lines, strict=True)
    said = [
        line for before, line in pairs if line and not _NINJA_LINE.match(line) and not before.startswith("FAILED: ")
    ]
    return next((line for line in said if _ERROR_LINE.search(line)), (said or failed or ["no output"])[-1])
