# SPDX-License-Identifier: Apache-2.0
"""Candidates: functions that compute what a definition says.

Loading a solution runs its code, as importing a module does: name only folders that you trust.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import sys
import tempfile
from dataclasses import dataclass, field
from multiprocessing.util import Finalize
from pathlib import Path, PurePosixPath
from typing import Any, Callable, Mapping, Optional, Union

from ..._runtime.errors import ArgumentError
from ...jit import env as jit_env
from ...jit.core import describe_module
from ...jit.utils import write_if_different
from ..solution import Solution, SupportedBindings, SupportedLanguages

__all__ = ["Candidate", "Definition", "candidates_of", "load"]

_NATIVE = (SupportedLanguages.CPP, SupportedLanguages.CUDA)


@dataclass(frozen=True)
class Definition:
    """The part of a definition that tells which calls it describes."""

    name: str
    op_type: str
    axes: Mapping[str, Any]
    inputs: Mapping[str, Any]
    outputs: Mapping[str, Any]
    tags: tuple[str, ...] = ()

    @property
    def fi_api(self) -> Optional[str]:
        """The API that a tag ``fi_api:...`` names; None without one."""
        return next((tag.removeprefix("fi_api:") for tag in self.tags if tag.startswith("fi_api:")), None)

    @property
    def const_axes(self) -> dict[str, int]:
        """The sizes that the definition fixes."""
        return {name: axis["value"] for name, axis in self.axes.items() if axis.get("type") == "const"}

    @property
    def input_dtypes(self) -> dict[str, str]:
        """The dtypes of the inputs that are tensors."""
        return {name: one["dtype"] for name, one in self.inputs.items() if one.get("shape") is not None}

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> Definition:
        """Read a definition from its JSON object; what is not needed here is left out."""
        if not isinstance(d, Mapping):
            raise ArgumentError(f"Definition: the object must be a mapping, got {type(d).__name__}")
        missing = [key for key in ("name", "op_type", "axes", "inputs", "outputs") if key not in d]
        if missing:
            raise ArgumentError(f"Definition: the object must have {missing}, got {sorted(d)}")
        for key in ("name", "op_type"):
            if not isinstance(d[key], str):
                raise ArgumentError(f"Definition: {key} must be a string, got {d[key]!r}")
        for key in ("axes", "inputs", "outputs"):
            if not isinstance(d[key], Mapping):
                raise ArgumentError(f"Definition: {key} must be a mapping, got {d[key]!r}")
        tags = d.get("tags") or []
        if not isinstance(tags, (list, tuple)) or not all(isinstance(tag, str) for tag in tags):
            raise ArgumentError(f"Definition: tags must be a list of strings, got {tags!r}")
        return cls(d["name"], d["op_type"], d["axes"], d["inputs"], d["outputs"], tuple(tags))


@dataclass
class Candidate:
    """A function, or a solution that becomes one when it is first called."""

    definition: str
    solution: Optional[Solution] = None
    function: Optional[Callable[..., Any]] = None
    dps: bool = False
    positional: bool = False
    is_warm: bool = field(default=False, init=False)  # has run: nothing is compiled or loaded any more

    def load(self) -> Callable[..., Any]:
        """Return the function; the first call imports or builds the solution."""
        if self.function is None:
            assert self.solution is not None
            self.function = _load_native(self.solution) if self.positional else _load_python(self.solution)
        return self.function


def candidates_of(
    solutions: Mapping[str, Union[Callable[..., Any], Solution]],
) -> dict[str, Candidate]:
    """Return the candidates by definition name."""
    found = {}
    for name, thing in solutions.items():
        if isinstance(thing, Solution):
            found[name] = _of_solution(name, thing)
        elif callable(thing):
            found[name] = Candidate(name, function=thing)
        else:
            raise ArgumentError(f"enable_apply: solutions[{name!r}] must be a function or a Solution, got {thing!r}")
    return found


def load(path: Union[str, Path]) -> dict[str, Solution]:
    """Return the solutions of the JSON files under a folder, or of one file, by definition.

    Of several solutions of one definition, the one whose file comes last in the alphabet counts. Objects without
    sources, such as definitions, are passed over.
    """
    root = Path(path)
    if not root.exists():
        raise ArgumentError(f"trace_apply: path must be a file or folder of solutions, got {root}")
    found = {}
    for file in [root] if root.is_file() else sorted(root.rglob("*.json")):
        try:
            content = json.loads(file.read_bytes())
            if isinstance(content, dict) and "sources" in content:
                solution = Solution.from_dict(content)
                found[solution.definition] = solution
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            what = f"{type(error).__name__}: {error}"
            raise ArgumentError(f"trace_apply: {file} must hold a solution, got {what}") from error
    return found


def _of_solution(definition: str, solution: Solution) -> Candidate:
    spec = solution.spec
    if spec.binding is SupportedBindings.TORCH or spec.language is SupportedLanguages.CUTLASS:
        raise ArgumentError(
            f"trace_apply: {solution.name}: spec must be of Python or of C++ with TVM-FFI, got "
            f"{spec.language.value} with {spec.binding and spec.binding.value}"
        )
    return Candidate(definition, solution, None, spec.destination_passing_style, spec.language in _NATIVE)


def _place_sources(solution: Solution, folder: Path) -> dict[Path, str]:
    """Return the text of each file of a solution by its path in ``folder``."""
    for source in solution.sources:
        relative = PurePosixPath(source.path)
        if relative.is_absolute() or ".." in relative.parts:
            raise ArgumentError(f"trace_apply: {solution.name}: paths of sources must stay inside, got {source.path!r}")
    return {folder / source.path: source.content for source in solution.sources}


def _make_private_folder() -> Path:
    """Make a folder that exists until this process ends: Triton and tracebacks read sources long after the import.

    ``Finalize`` serves workers of multiprocessing, which leave without the functions of ``atexit``, and is not run by
    the forked children of the process that made the folder.
    """
    folder = tempfile.mkdtemp(prefix="flashinfer_solution_")
    Finalize(None, shutil.rmtree, (folder, True), exitpriority=0)
    return Path(folder)


def _load_python(solution: Solution) -> Callable[..., Any]:
    file, name = solution.spec.entry_point.split("::")
    texts = _place_sources(solution, Path())
    folder = _make_private_folder()
    for path, text in texts.items():
        write_if_different(folder / path, text)
    title = f"_flashinfer_solution_{folder.name}"
    spec = importlib.util.spec_from_file_location(title, folder / file)
    if spec is None or spec.loader is None:
        raise ArgumentError(f"trace_apply: {solution.name}: entry_point must name a Python file, got {file!r}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[title] = module  # Triton and pickle look functions up by module
    sys.path.insert(0, str(folder))  # the files of a solution import each other
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(folder))
    function = getattr(module, name, None)
    if not callable(function):
        raise ArgumentError(f"trace_apply: {solution.name}: entry_point must name a function of {file}, got {name!r}")
    return function


def _load_native(solution: Solution) -> Callable[..., Any]:
    """Build the sources with the compiler of our modules; the exported function takes arguments by position.

    The sources are placed like those that our generators render, under a name made of their contents: a solution is
    compiled once, and ``flashinfer clear-cache`` deletes it.
    """
    function = solution.spec.entry_point.split("::")[1]
    content = "\0".join(text for source in solution.sources for text in (source.path, source.content))
    name = f"solution_{hashlib.sha256(content.encode()).hexdigest()[:16]}"
    backend = "cpu" if solution.spec.language is SupportedLanguages.CPP else "cuda"
    folder = jit_env.gen_src_dir(backend) / name
    texts = _place_sources(solution, folder)
    sources = [path for path in texts if path.suffix in (".cu", ".cc", ".cpp")]
    spec = describe_module(name, sources, extra_include_paths=[folder], backend=backend, generated=texts)
    return getattr(spec.build_and_load(), function)
