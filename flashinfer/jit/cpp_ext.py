# SPDX-License-Identifier: Apache-2.0
"""Compiler command lines of a ModuleSpec: translation units, flags, the text of ``build.ninja``, running ninja."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Mapping, Optional, Sequence, Union

from .._runtime.knobs import knobs
from .._runtime.log import say
from ..compilation_context import gencode
from . import env as jit_env
from .context import current_compilation_context
from .cpu_targets import march
from .spec import ModuleSpec
from .toolchain import (  # noqa: F401  (the contract looks for the discovery functions here)
    NO_CXX,
    NO_NVCC,
    find_cxx,
    find_ninja,
    find_nvcc,
    get_cuda_path,
    get_cuda_version,
    identify,
    job_count,
    split_command,
    split_cxx,
    tvm_ffi_paths,
)
from .unit_order import own_bytes

_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
_FFI = re.compile(r"\bTensorView\b|\bTVM_FFI_")
_HELPER_HEADER = "tvm_ffi_utils.h"


def is_cuda_version_at_least(version_str: str) -> bool:
    from packaging.version import Version

    return get_cuda_version() >= Version(version_str)


def get_nvcc_parallelism_flags() -> list[str]:
    """Return the flag that lets one nvcc compile for several targets at once (``FLASHINFER_NVCC_THREADS``)."""
    return [f"--threads={knobs.nvcc_threads}"]


# ------------------------------------------------------------------------------------------------ units


@dataclass(frozen=True)
class Unit:
    """One object file: its source, the tool that compiles the source, and whether the helper header is pre-included."""

    source: Path
    tool: str  # "nvcc" or "cxx"
    needs_helper: bool
    object_name: str
    has_kernels: bool = True  #: False: argument checks and calls only, compiled with Flags.launcher


def translation_units(spec: ModuleSpec) -> list[Unit]:
    """Return the sources to compile, each once.

    A listed source that another listed source includes (a binding including its launcher) is a dependency of the other
    source, not a unit. A unit that uses TVM-FFI without including the helper header gets the header through
    ``-include``: the launcher of the add-a-kernel tutorial is written this way.
    """
    texts = {source: spec.source_text(source) for source in spec.sources}
    by_path = {os.path.normpath(source): source for source in texts}
    includes: dict[Path, list[Path]] = {
        source: [
            by_path[path]
            for name in _INCLUDE.findall(text)
            if (path := os.path.normpath(source.parent / name)) in by_path
        ]
        for source, text in texts.items()
    }
    included = {part for source, parts in includes.items() for part in parts if part != source}
    units: list[Unit] = []
    for source, text in texts.items():
        if source in included:
            continue
        uses_nvcc = spec.backend == "cuda" and source.suffix == ".cu" and source not in spec.host_sources
        speaks_ffi = any(_FFI.search(texts[part]) for part in (source, *includes[source]))
        needs_helper = speaks_ffi and _needs_preinclude(text)
        object_name = _object_name(source, {unit.object_name for unit in units})
        has_kernels = any(part not in spec.host_sources for part in (source, *includes[source]))
        units.append(Unit(source, "nvcc" if uses_nvcc else "cxx", needs_helper, object_name, has_kernels))
    return units


def _object_name(source: Path, taken: set[str]) -> str:
    """Return ``<folder>_<stem>.cuda.o``, or ``.o``; with a number if another folder of that name has such a file."""
    stem, suffix = f"{source.parent.name}_{source.stem}", ".cuda.o" if source.suffix == ".cu" else ".o"
    numbered = (f"{stem}_{number}{suffix}" for number in itertools.count(2))
    return next(name for name in itertools.chain([stem + suffix], numbered) if name not in taken)


def _needs_preinclude(text: str) -> bool:
    """Return True unless the helper header is the first header that the unit includes."""
    names = _INCLUDE.findall(text)
    return not names or Path(names[0]).name != _HELPER_HEADER


# ------------------------------------------------------------------------------------------------ flags


@dataclass(frozen=True)
class Flags:
    """Flags of one module. Directories appear as ``{tokens}``: the manifest must not depend on their location."""

    host: tuple[str, ...]
    launcher: tuple[str, ...]  #: options of the host compiler for sources without kernels
    cuda: tuple[str, ...]
    link: tuple[str, ...]


def flag_tokens(spec: ModuleSpec) -> dict[str, str]:
    """Return the values of the ``{tokens}`` in this module's flags and manifest paths, on this machine."""
    include, lib = tvm_ffi_paths()
    tokens = {
        "include": str(jit_env.FLASHINFER_INCLUDE_DIR),
        "csrc": str(jit_env.FLASHINFER_CSRC_DIR),
        "gen": str(jit_env.gen_src_dir(spec.backend)),
        "tvm_ffi_include": str(include),
        "tvm_ffi_lib": str(lib),
    }
    if spec.backend == "cuda" and find_nvcc() is not None:
        tokens["cuda"] = get_cuda_path()
    return tokens


def tokenise(path: str, tokens: dict[str, str]) -> str:
    """Replace the deepest directory that contains a path and has a token by the ``{token}``."""
    for name, directory in sorted(tokens.items(), key=lambda item: -len(item[1])):
        if path.startswith(directory + "/"):
            return f"{{{name}}}{path[len(directory) :]}"
    return path


def expand(text: str, tokens: dict[str, str]) -> str:
    """Replace ``{tokens}`` by paths, the reverse of :func:`tokenise`; an unknown token stays unchanged."""
    return re.sub(r"\{(\w+)\}", lambda m: tokens.get(m[1], m[0]), text)


def module_flags(spec: ModuleSpec) -> Flags:
    debug, tokens = knobs.jit_debug, flag_tokens(spec)
    extra = [f"-I{tokenise(str(directory), tokens)}" for directory in spec.extra_include_dirs]
    optimise = ["-O0", "-g"] if debug else ["-O3", "-DNDEBUG"]
    search = ["-I{include}", "-I{csrc}", *extra, "-isystem", "{tvm_ffi_include}"]
    standard = [] if any(f.startswith("-std=") for f in spec.extra_cflags) else ["-std=c++17"]

    # Hidden: two modules define the same flashinfer:: templates for different element types.
    given = split_cxx()[2]
    host = [*given, *search, *standard, "-fPIC", "-fvisibility=hidden", "-Wall", "-Wno-switch-bool", *optimise]
    link = [*given, "-shared", "-Wl,-z,defs", "-L{tvm_ffi_lib}", "-ltvm_ffi"]
    cuda: list[str] = []
    if spec.backend == "cpu":
        host += ["-DFLASHINFER_CPU", march(spec.cpu_target), "-fopenmp"]
        link += ["-fopenmp"]
    else:
        host += ["-isystem{cuda}/include"]
        cuda = [*search, *_cuda_flags(spec, debug)]
        link += [
            *(f"-L{{cuda}}/{folder}" for folder in ("lib64", "lib", "lib64/stubs", "lib/stubs")),  # stubs: for -lcuda
            "-Wl,-rpath,{cuda}/lib64",
            "-Wl,-rpath,{cuda}/lib",
            "-l:libcudart.so.{cudart}",
        ]
    # -O3 inlines the FFI conversions of each exported function: 8.5 s instead of 5.1 s for batch_prefill_jit_binding.cu
    # (g++ 12), and no measured difference in the host time of plan() and run().
    launcher = ["-O2" if flag == "-O3" else flag for flag in host]
    return Flags(
        host=(*host, *spec.extra_cflags, *knobs.extra_cflags),
        launcher=(*launcher, *spec.extra_cflags, *knobs.extra_cflags),
        cuda=(*cuda, *spec.extra_cuda_cflags, *knobs.extra_cuda_cflags) if cuda else (),
        link=(*link, *spec.extra_ldflags, *knobs.extra_ldflags),
    )


def _cuda_flags(spec: ModuleSpec, debug: bool) -> list[str]:
    flags = [] if any(f.startswith(("-std=", "--std=")) for f in spec.extra_cuda_cflags) else ["-std=c++17"]
    flags += ["-Xcompiler=-fPIC,-fvisibility=hidden", "-Xfatbin=-compress-all"]
    flags += [f"-DFLASHINFER_ENABLE_{name}" for name in ("F16", "BF16", "FP8_E4M3", "FP8_E5M2")]
    # No -use_fast_math: it flushes subnormals everywhere; kernels name the approximate instructions they want.
    if debug:
        # Not -G: compiler caches refuse it.
        flags += ["-O0", "-g", "--device-debug", "-lineinfo", "-Xptxas=-v"]
    else:
        flags += ["-O3", "-DNDEBUG"]
    if knobs.jit_lineinfo and not debug:
        flags += ["-lineinfo"]
    if knobs.cc:
        before, compiler, given = split_command(knobs.cc)  # nvcc -ccbin takes one word: no launcher, no flags
        flags += ["-ccbin", str(compiler) if before or given else knobs.cc]
        flags += [word for flag in given for word in ("-Xcompiler", flag)]
    targets = current_compilation_context.get_nvcc_flags_list(spec.supported_major_versions)
    left_out = {gencode(target) for target in spec.left_out}
    targets = [flag for flag in targets if flag not in left_out]
    if any("-gencode" in f or f.startswith(("-arch", "--gpu-architecture")) for f in spec.extra_cuda_cflags):
        targets = [f for f in targets if "-gencode" not in f]  # the module names its own targets
    return flags + targets


# ------------------------------------------------------------------------------------------------ command lines


def _join(flags: Sequence[str], tokens: dict[str, str]) -> str:
    words = (expand(flag, tokens) for flag in flags)
    # -isystem/usr/include (a toolkit of the distribution) would come before libstdc++, whose #include_next then fails.
    return shlex.join(word for word in words if word != "-isystem/usr/include")


class Commands:
    """The command lines of one module. Needs the compilers of the spec's backend."""

    def __init__(self, spec: ModuleSpec) -> None:
        self.spec, self.units = spec, translation_units(spec)
        self.flags, self.tokens = module_flags(spec), flag_tokens(spec)
        (before_cxx, cxx, _), nvcc = split_cxx(), find_nvcc() if spec.backend == "cuda" else None
        if spec.backend == "cuda" and nvcc is None:
            raise RuntimeError(f"{spec.name}: {NO_NVCC}")
        if cxx is None:
            raise RuntimeError(f"{spec.name}: {NO_CXX}")
        if spec.backend == "cuda":
            self.tokens["cudart"] = str(get_cuda_version().major)
        self.cxx = f"{knobs.cxx_launcher} {shlex.join([*before_cxx, str(cxx)])}".strip()
        self.nvcc = f"{knobs.nvcc_launcher} {shlex.quote(str(nvcc))}".strip()

    def compile(self, unit: Unit) -> str:
        """Return everything before ``-c source -o object``."""
        helper = ["-include", "{csrc}/" + _HELPER_HEADER] if unit.needs_helper else []
        if unit.tool == "nvcc":
            (threads,) = get_nvcc_parallelism_flags()  # not in the flags, because it does not change the result
            return f"{self.nvcc} {threads} {_join([*helper, *self.flags.cuda], self.tokens)}"
        flags = self.flags.host if unit.has_kernels else self.flags.launcher
        return f"{self.cxx} -x c++ {_join([*helper, *flags], self.tokens)}"

    def link(self) -> tuple[str, str]:
        """Return the parts of the link command before and after the object files."""
        if self.spec.needs_device_linking:
            targets = [f for f in self.flags.cuda if "-gencode" in f or f.startswith(("-arch", "--gpu-architecture"))]
            flags = _join([*targets, *_for_nvcc(self.flags.link)], self.tokens)
            return f"{self.nvcc} -ccbin {shlex.quote(str(find_cxx()))}", flags
        return self.cxx, _join(self.flags.link, self.tokens)


def _for_nvcc(flags: Sequence[str]) -> list[str]:
    """Convert link flags to the form nvcc takes: ``-Wl`` and ``-l:`` words follow ``-Xlinker``."""
    words: list[str] = []
    for flag in flags:
        if flag.startswith("-Wl,"):
            words += [word for part in flag[4:].split(",") for word in ("-Xlinker", part)]
        elif flag.startswith("-l:"):
            words += ["-Xlinker", flag]
        else:
            words.append(flag)
    return words


def _ninja_path(path: Path) -> str:
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def ninja_text(spec: ModuleSpec, out_dir: Path) -> str:
    """Return ``build.ninja`` of one module with all outputs in ``out_dir``."""
    return group_ninja_text({spec: out_dir})


def group_ninja_text(out_dirs: Mapping[ModuleSpec, Path]) -> str:
    """Return the graph of several modules, each with all outputs in its own directory.

    ninja starts what is ready in the order of the file. Units of all modules are sorted by their expected time, longest
    first, so that no processor waits for a long unit that was started last; those without kernels end the list.
    """
    lines, compiles, links = ["ninja_required_version = 1.5"], [], []
    for number, (spec, out_dir) in enumerate(out_dirs.items()):
        commands = Commands(spec)
        before, after = (part.replace("$", "$$") for part in commands.link())
        lines += [
            f"rule compile{number}",
            "  command = $compiler -MMD -MF $out.d -c $in -o $out",
            "  depfile = $out.d",
            f"  description = {spec.name}: $what",
            # The output is renamed when complete: a linker that is killed leaves half a library.
            f"rule link{number}",
            f"  command = {before} $in -o $out.part {after} && mv -f $out.part $out",
            f"  description = {spec.name}: link",
        ]
        objects = {unit: _ninja_path(out_dir / unit.object_name) for unit in commands.units}
        for unit, path in objects.items():
            statement = [
                f"build {path}: compile{number} {_ninja_path(unit.source)}",
                f"  compiler = {commands.compile(unit).replace('$', '$$')}",
                f"  what = {unit.source.name}",
            ]
            compiles.append((unit.has_kernels, own_bytes(spec, unit.source, unit.has_kernels), statement))
        library = _ninja_path(out_dir / spec.library_name)
        links += [f"build {library}: link{number} {' '.join(objects.values())}", f"default {library}"]
    for _, _, statement in sorted(compiles, key=lambda item: item[:2], reverse=True):
        lines += statement
    return "\n".join([*lines, *links, ""])


def generate_ninja_build_for_op(
    name: str,
    sources: Sequence[Union[str, Path]],
    extra_cflags: Optional[list[str]],
    extra_cuda_cflags: Optional[list[str]],
    extra_ldflags: Optional[list[str]],
    extra_include_dirs: Optional[Sequence[Union[str, Path]]],
    needs_device_linking: bool = False,
) -> str:
    """Return ``build.ninja`` of a CUDA module of these sources, with outputs where ``gen_jit_spec`` puts them."""
    spec = ModuleSpec(
        name=name,
        sources=[Path(source).absolute() for source in sources],
        extra_cflags=list(extra_cflags or []),
        extra_cuda_cflags=list(extra_cuda_cflags or []),
        extra_ldflags=list(extra_ldflags or []),
        extra_include_dirs=[Path(folder).absolute() for folder in extra_include_dirs or []],
        needs_device_linking=needs_device_linking,
    )
    return ninja_text(spec, spec.build_dir)


# ------------------------------------------------------------------------------------------------ running


def run_ninja(workdir: Path, ninja_file: Path, verbose: bool) -> None:
    """Run ninja on a file of :func:`generate_ninja_build_for_op`; RuntimeError with its output when it fails."""
    command = _ninja_command(workdir, ninja_file, verbose)
    done = subprocess.run(
        command, stdout=None if verbose else subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    if done.returncode != 0:
        raise RuntimeError(f"Ninja build failed: {shlex.join(command)}\n{done.stdout or ''}")


def _ninja_command(workdir: Path, ninja_file: Path, verbose: bool) -> list[str]:
    command = [find_ninja(), "-C", str(workdir), "-f", str(ninja_file), "-j", str(job_count())]
    return [*command, "-v"] if verbose else command


def watch_ninja(
    workdir: Path,
    ninja_file: Path,
    verbose: bool,
    on_step: Optional[Callable[[int, int, str], None]] = None,
) -> tuple[int, str]:
    """Run ninja until all modules are done or have failed; return its exit status and everything it printed.

    ``on_step(done, total, description)`` is called for each finished step.
    """
    command = [*_ninja_command(workdir, ninja_file, verbose), "-k", "0"]
    environment = {**os.environ, "NINJA_STATUS": "[%f/%t] ", "LC_ALL": "C"}  # the failure report looks for "error"
    log = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=environment
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            log.append(line)
            if verbose:
                say(line, end="", stream=sys.stdout)
            match = re.match(r"\[(\d+)/(\d+)\] (.*)", line)
            if match and on_step is not None:
                on_step(int(match[1]), int(match[2]), match[3])
    return process.returncode, "".join(log)
