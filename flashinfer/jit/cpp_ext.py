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

from .._runtime.errors import ArgumentError
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
from .utils import write_if_different

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
    debug, tokens = knobs.jit_debug or "-O0" in spec.default_cuda_cflags, flag_tokens(spec)
    extra = [f"-I{tokenise(str(directory), tokens)}" for directory in spec.extra_include_dirs]
    optimise = ["-O0", "-g"] if debug else ["-O3", "-DNDEBUG"]
    search = ["-I{include}", "-I{csrc}", *extra, "-isystem", "{tvm_ffi_include}"]
    standard = [] if any(f.startswith("-std=") for f in spec.extra_cflags) else ["-std=c++17"]

    # Hidden: two modules define the same flashinfer:: templates for different element types.
    given = split_cxx()[2]
    host = [*given, *search, *standard, "-fPIC", "-fvisibility=hidden", "-Wall", "-Wno-switch-bool"]
    host += [flag for flag in optimise if flag not in spec.extra_cflags]
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
        cuda=(*cuda, *_for_this_nvcc(spec.extra_cuda_cflags), *knobs.extra_cuda_cflags) if cuda else (),
        link=(*link, *spec.extra_ldflags, *knobs.extra_ldflags),
    )


ENABLED_DTYPES = tuple(f"-DFLASHINFER_ENABLE_{name}" for name in ("F16", "BF16", "FP8_E4M3", "FP8_E5M2"))


def _for_this_nvcc(flags: Sequence[str]) -> list[str]:
    """Leave out ``--threads``, which does not change the result, and what a compiler before CUDA 12.8 does not know."""
    old = "--compress-mode=size" in flags and (0, 0) < get_cuda_version().release[:2] < (12, 8)
    return [f for f in flags if not f.startswith("--threads") and not (old and f == "--compress-mode=size")]


def _cuda_flags(spec: ModuleSpec, debug: bool) -> list[str]:
    if spec.default_cuda_cflags:  # the module has all of these among its own
        return ["-Xcompiler=-fPIC,-fvisibility=hidden", *_cuda_environment(spec, debug)]
    flags = [] if any(f.startswith(("-std=", "--std=")) for f in spec.extra_cuda_cflags) else ["-std=c++17"]
    flags += ["-Xcompiler=-fPIC,-fvisibility=hidden", "-Xfatbin=-compress-all", *ENABLED_DTYPES]
    # No -use_fast_math: it flushes subnormals everywhere; kernels name the approximate instructions they want.
    if debug:
        # Not -G: compiler caches refuse it.
        flags += ["-O0", "-g", "--device-debug", "-lineinfo", "-Xptxas=-v"]
    else:
        flags += ["-O3", "-DNDEBUG"]
    return [*flags, *_cuda_environment(spec, debug)]


def _cuda_environment(spec: ModuleSpec, debug: bool) -> list[str]:
    """Return the flags that follow from variables and targets."""
    flags = []
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
            # --threads is not in the flags of the module, because it does not change the result.
            own = [flag for flag in self.spec.extra_cuda_cflags if flag.startswith("--threads")]
            threads = (own or get_nvcc_parallelism_flags())[-1]
            return f"{self.nvcc} {threads} {_join([*helper, *self._cuda_flags_of(unit)], self.tokens)}"
        flags = self.flags.host if unit.has_kernels else self.flags.launcher
        return f"{self.cxx} -x c++ {_join([*helper, *flags], self.tokens)}"

    def _cuda_flags_of(self, unit: Unit) -> Sequence[str]:
        own = self.spec.cuda_cflags_by_source.get(unit.source)
        if own is None:
            return self.flags.cuda
        given = _for_this_nvcc(self.spec.extra_cuda_cflags)
        count = len(self.flags.cuda) - len(given) - len(knobs.extra_cuda_cflags)
        defaults = [f for f in _for_this_nvcc(self.spec.default_cuda_cflags) if f != "-use_fast_math"]
        return [*self.flags.cuda[:count], *defaults, *own, *knobs.extra_cuda_cflags]

    def link(self) -> tuple[str, str]:
        """Return the parts of the link command before and after the object files."""
        if self.spec.needs_device_linking:
            targets = [f for f in self.flags.cuda if "-gencode" in f or f.startswith(("-arch", "--gpu-architecture"))]
            flags = _join([*targets, *_for_nvcc(self.flags.link)], self.tokens)
            return f"{self.nvcc} -ccbin {shlex.quote(str(find_cxx()))}", f"{shlex.join(self.spec.embedded)} {flags}"
        return self.cxx, f"{shlex.join(self.spec.embedded)} {_join(self.flags.link, self.tokens)}".strip()


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


#: The flag of nvcc for a depfile while it compiles. The short form leaves out the headers of the system, which the
#: manifest would have to hash; the long one is what sccache recognises in programs that write the file themselves.
_OWN_HEADERS, _ALL_HEADERS = "-MMD", "--generate-dependencies-with-compile"


def group_ninja_text(out_dirs: Mapping[ModuleSpec, Path], depfile_flag: str = _OWN_HEADERS) -> str:
    """Return the graph of several modules, each with all outputs in its own directory.

    ninja starts what is ready in the order of the file. Units of all modules are sorted by their expected time, longest
    first, so that no processor waits for a long unit that was started last; those without kernels end the list.
    """
    lines, compiles, links = ["ninja_required_version = 1.5"], [], []
    for number, (spec, out_dir) in enumerate(out_dirs.items()):
        commands = Commands(spec)
        before, after = (part.replace("$", "$$") for part in commands.link())
        lines += [
            *(
                line
                for tool, flag in (("cxx", _OWN_HEADERS), ("nvcc", depfile_flag))
                for line in (
                    f"rule {tool}{number}",
                    f"  command = $compiler {flag} -MF $out.d -c $in -o $out",
                    "  depfile = $out.d",
                    f"  description = {spec.name}: $what",
                )
                if any(unit.tool == tool for unit in commands.units)
            ),
            # The output is renamed when complete: a linker that is killed leaves half a library.
            f"rule link{number}",
            f"  command = {before} $in -o $out.part {after} && mv -f $out.part $out",
            f"  description = {spec.name}: link",
        ]
        objects = {unit: _ninja_path(out_dir / unit.object_name) for unit in commands.units}
        for unit, path in objects.items():
            statement = [
                f"build {path}: {unit.tool}{number} {_ninja_path(unit.source)}",
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
    embedded_cubins: Optional[Mapping[str, Union[str, Path]]] = None,
    extra_cuda_cflags_by_source: Optional[Mapping[Union[str, Path], list[str]]] = None,
) -> str:
    """Return ``build.ninja`` of a CUDA module of these sources, with outputs where ``gen_jit_spec`` puts them.

    The sources need not exist yet. ``embedded_cubins`` maps symbols to files that are linked into the library.
    """
    paths = [Path(source).absolute() for source in sources]
    linked = [word for symbol, path in (embedded_cubins or {}).items() for word in embedding(symbol, Path(path))]
    spec = ModuleSpec(
        name=name,
        sources=paths,
        extra_cflags=list(extra_cflags or []),
        extra_cuda_cflags=list(extra_cuda_cflags or []),
        extra_ldflags=[*linked, *(extra_ldflags or [])],
        extra_include_dirs=[Path(folder).absolute() for folder in extra_include_dirs or []],
        needs_device_linking=needs_device_linking,
        generated={path: "" for path in paths if not path.is_file()},  # read to find includes; not written
        cuda_cflags_by_source={Path(s).absolute(): list(f) for s, f in (extra_cuda_cflags_by_source or {}).items()},
    )
    return group_ninja_text({spec: spec.build_dir}, _ALL_HEADERS)


def embedding(symbol: str, path: Path) -> list[str]:
    """Return the link flags that put the bytes of a file between ``<symbol>`` and ``<symbol>_end``.

    The object that the assembler makes of them is beside the file.
    """
    if not re.fullmatch(r"[A-Za-z_]\w*", symbol):
        raise ArgumentError(f"gen_jit_spec: symbols of embedded files must be C names, got {symbol!r}")
    assembly, compiled = path.with_name(f"{symbol}.S"), path.with_name(f"{symbol}.o")
    quoted = str(path.absolute()).replace("\\", "\\\\").replace('"', '\\"')
    lines = [".section .rodata", ".balign 16"]
    lines += [f".global {symbol}", f"{symbol}:", f'.incbin "{quoted}"']
    lines += [f".global {symbol}_end", f"{symbol}_end:", '.section .note.GNU-stack,"",%progbits', ""]
    write_if_different(assembly, "\n".join(lines))
    subprocess.run([str(find_cxx()), "-c", str(assembly), "-o", str(compiled)], check=True)
    return [str(compiled)]


# The pieces of the flags that published programs put together themselves.


def parse_env_flags(env_var_name: str) -> list[str]:
    """Return the words of an environment variable, split as a shell does; at blanks, with a warning, if that fails."""
    text = os.environ.get(env_var_name, "")
    try:
        return shlex.split(text)
    except ValueError as error:
        say(f"{env_var_name}: {error} in {text!r}; it is split at blanks")
        return text.split()


def join_multiline(vs: Sequence[str]) -> str:
    """Join words to a value of a ninja file, a line for each."""
    return " $\n    ".join(vs)


def get_cccl_includes() -> list[str]:
    """Return the folder of Thrust, CUB and libcu++ that a host compiler is not told of; none before CUDA 13."""
    folder = Path(get_cuda_path()) / "include" / "cccl"
    return [str(folder)] if folder.is_dir() else []


def get_system_includes(cuda_home: str) -> list[str]:
    """Return the folders of headers that are not those of this package: TVM-FFI, the toolkit and its C++ libraries."""
    include, _ = tvm_ffi_paths()
    toolkit = Path(cuda_home, "include")
    return [str(include), str(toolkit), *(str(folder) for folder in (toolkit / "cccl",) if folder.is_dir())]


def build_common_cflags(cuda_home: str, extra_include_dirs: Optional[Sequence[Union[str, Path]]] = None) -> list[str]:
    """Return the include flags that host compiler and nvcc share."""
    own = [jit_env.FLASHINFER_INCLUDE_DIR, jit_env.FLASHINFER_CSRC_DIR, *(extra_include_dirs or [])]
    system = (word for folder in get_system_includes(cuda_home) for word in ("-isystem", folder))
    return [*(f"-I{folder}" for folder in own), *system]


def build_cflags(common_cflags: Sequence[str], extra_cflags: Optional[Sequence[str]] = None) -> list[str]:
    """Return the flags of the host compiler: these, a shared library's, the given ones, the variable's."""
    return [*common_cflags, "-fPIC", *(extra_cflags or []), *knobs.extra_cflags]


def build_cuda_cflags(common_cflags: Sequence[str], extra_cuda_cflags: Optional[Sequence[str]] = None) -> list[str]:
    """Return the flags of nvcc: these, a shared library's, the targets', the given ones, the variable's."""
    targets = current_compilation_context.get_nvcc_flags_list()
    given = [*(extra_cuda_cflags or []), *knobs.extra_cuda_cflags]
    return [*common_cflags, "--compiler-options=-fPIC", *(f for f in targets if f not in given), *given]


def host_compiler_is_gcc() -> bool:
    """Return True if the host compiler is GCC, whatever it is called."""
    compiler = find_cxx()
    if compiler is None:
        return False
    done = subprocess.run([str(compiler), "-dM", "-E", "-x", "c++", "/dev/null"], capture_output=True, text=True)
    return "__GNUC__" in done.stdout and "__clang__" not in done.stdout


# ------------------------------------------------------------------------------------------------ running


def run_ninja(workdir: Path, ninja_file: Path, verbose: bool, max_jobs: Optional[int] = None) -> None:
    """Run ninja on a file of :func:`generate_ninja_build_for_op`; RuntimeError with its output when it fails.

    ``max_jobs`` are compiled at once, by default ``MAX_JOBS``, else as many as ninja chooses.
    """
    command = ["ninja", "-v", "-C", str(Path(workdir).resolve()), "-f", str(Path(ninja_file).resolve())]
    jobs = knobs.max_jobs if max_jobs is None else max_jobs
    command += ["-j", str(jobs)] if jobs is not None else []
    done = subprocess.run(
        command,
        executable=find_ninja(),  # also if it is not on PATH
        stdout=None if verbose else subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    if done.returncode != 0:
        raise RuntimeError(f"Ninja build failed. Command: {shlex.join(command)}\n{done.stdout or ''}")


def watch_ninja(
    workdir: Path,
    ninja_file: Path,
    verbose: bool,
    on_step: Optional[Callable[[int, int, str], None]] = None,
    is_group: bool = False,
) -> tuple[int, str]:
    """Run ninja until all modules are done or have failed; return its exit status and everything it printed.

    Several modules (``is_group``) take ``FLASHINFER_JIT_PREBUILD_MAX_JOBS`` jobs.
    ``on_step(done, total, description)`` is called for each finished step.
    """
    jobs = (knobs.jit_prebuild_max_jobs if is_group else None) or job_count()
    command = [find_ninja(), "-C", str(workdir), "-f", str(ninja_file), "-j", str(jobs), "-k", "0"]
    command += ["-v"] if verbose else []
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
