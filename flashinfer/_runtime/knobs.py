# SPDX-License-Identifier: Apache-2.0
"""Every environment variable the package reads, declared once.

Read a setting as an attribute, ``knobs.jit_verbose``: the environment is consulted at that moment, so nothing is
frozen at import. ``flashinfer show-config`` and the table in the docs are printed from these declarations.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import warnings
from pathlib import Path
from typing import Any, Callable, Generic, Iterator, Optional, TypeVar, Union, overload

from .errors import ArgumentError

__all__ = ["Knob", "Knobs", "knobs", "split_words"]

T = TypeVar("T")


_OFF, _ON = ("0", "false", "no", "off"), ("1", "true", "yes", "on")


def _flag(text: str) -> bool:
    """Parse a switch: 0, false, no and off mean off; 1, true, yes, on and numbers above 1 mean on."""
    word = text.strip().lower()
    if word not in (*_OFF, *_ON) and not word.isdecimal():
        raise ValueError(f"must be one of {', '.join((*_ON, *_OFF))}")
    return word not in _OFF


def _is_set(text: str) -> bool:
    """Parse a switch that any non-empty value turns on."""
    return text != ""


def _whole(least: int) -> Callable[[str], int]:
    """Return a parser of a whole number that is at least ``least``."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise ValueError(f"must be a whole number from {least} on")
        return value

    return parse


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value >= 0:  # neither negative nor NaN
        raise ValueError("must be a number from 0 on")
    return value


def _one_of(*allowed: str) -> Callable[[str], str]:
    """Return a parser of one of a few words; the empty text is the default."""

    def parse(text: str) -> str:
        if text and text not in allowed:
            raise ValueError(f"must be one of {', '.join(allowed)}")
        return text

    return parse


def _path(text: str) -> Path:
    """Parse a path; ``~`` is the home directory also in variables that no shell has expanded (Dockerfile, service)."""
    return Path(os.path.expanduser(text))


def _logging_level(text: str) -> Union[str, int]:
    """Parse a level of Python's logging, by name or number."""
    name = text.strip().upper()
    if name.isdecimal():
        return int(name)
    if not isinstance(logging.getLevelName(name), int):
        raise ValueError("must be one of DEBUG, INFO, WARNING, ERROR, CRITICAL, or a number")
    return name


def _error_mode(text: str) -> str:
    """Parse the error measure that decides between the two scales of an NVFP4 block."""
    if text.strip().upper() not in ("MAE", "MSE"):
        raise ValueError("must be one of MAE, MSE")
    return text.strip().upper()


def split_words(text: str) -> list[str]:
    """Shell-style split; broken quoting falls back to a plain split with a warning."""
    try:
        return shlex.split(text)
    except ValueError as error:
        warnings.warn(f"cannot parse {text!r} shell-style ({error}); splitting at white space", stacklevel=2)
        return text.split()


class Knob(Generic[T]):
    """One variable: its name, its parser, the value when unset, and one line of documentation."""

    def __init__(self, variable: str, parse: Callable[[str], T], default: T, doc: str, group: str) -> None:
        self.variable, self.parse, self.default, self.doc, self.group = variable, parse, default, doc, group
        self.attribute = ""
        self._key = os.fsencode(variable) if os.name == "posix" else variable.upper()

    def __set_name__(self, owner: type, name: str) -> None:
        self.attribute = name

    @overload
    def __get__(self, instance: None, owner: type) -> Knob[T]: ...
    @overload
    def __get__(self, instance: Knobs, owner: type) -> T: ...
    def __get__(self, instance: Optional[Knobs], owner: type) -> Any:
        if instance is None:
            return self
        known = getattr(os.environ, "_data", None)
        if known is not None and self._key not in known:  # os.environ.get() takes 0.8 us; some knobs are read per call
            return self.default
        text = os.environ.get(self.variable)
        if not text:  # an empty value means unset
            return self.default
        try:
            return self.parse(text)
        except ValueError as error:  # a default in its place would run what nobody asked for
            raise ArgumentError(f"{self.variable} {error}, got {text!r}") from None


class Knobs:
    """All settings. Group names are the headings of ``show-config``."""

    # compiler
    nvcc = Knob("FLASHINFER_NVCC", str, "", "nvcc binary; default: found through CUDA_HOME, PATH, pip", "compiler")
    nvcc_launcher = Knob("FLASHINFER_NVCC_LAUNCHER", str, "", "prefix of nvcc commands, such as ccache", "compiler")
    cxx_launcher = Knob("FLASHINFER_CXX_LAUNCHER", str, "", "prefix of host compiler commands", "compiler")
    cxx = Knob("CXX", str, "", "host compiler, several words allowed; default: c++, g++ or clang++ on PATH", "compiler")
    cc = Knob("CC", str, "", "host compiler that nvcc drives (-ccbin)", "compiler")
    cuda_home = Knob("CUDA_HOME", str, "", "CUDA toolkit directory (CUDA_PATH is the second spelling)", "compiler")
    cuda_path = Knob("CUDA_PATH", str, "", "CUDA toolkit directory when CUDA_HOME is unset", "compiler")
    extra_cflags = Knob[list[str]](
        "FLASHINFER_EXTRA_CFLAGS", split_words, [], "appended to host compiler flags", "compiler"
    )
    extra_cuda_cflags = Knob[list[str]](
        "FLASHINFER_EXTRA_CUDAFLAGS", split_words, [], "appended to nvcc flags", "compiler"
    )
    extra_ldflags = Knob[list[str]]("FLASHINFER_EXTRA_LDFLAGS", split_words, [], "appended to link flags", "compiler")
    nvcc_threads = Knob("FLASHINFER_NVCC_THREADS", _whole(1), 1, "nvcc --threads=N, helps several targets", "compiler")
    max_jobs = Knob[Optional[int]](
        "MAX_JOBS", _whole(1), None, "parallel compile jobs; default: cores, bounded by free memory", "compiler"
    )
    jit_prebuild_max_jobs = Knob[Optional[int]](
        "FLASHINFER_JIT_PREBUILD_MAX_JOBS",
        _whole(1),
        None,
        "parallel compile jobs where many modules are built together; default: MAX_JOBS",
        "compiler",
    )

    # JIT
    cuda_arch_list = Knob(
        "FLASHINFER_CUDA_ARCH_LIST", str, "", "CUDA targets, e.g. '8.0 9.0a'; default: the GPUs present", "jit"
    )
    workspace_base = Knob[Optional[Path]](
        "FLASHINFER_WORKSPACE_BASE", _path, None, "root of .cache/flashinfer; default: the home directory", "jit"
    )
    aot_dir = Knob[Optional[Path]](
        "FLASHINFER_AOT_DIR", _path, None, "pre-built modules; default: flashinfer-jit-cache, if installed", "jit"
    )
    disable_jit = Knob("FLASHINFER_DISABLE_JIT", _is_set, False, "any value: never compile, only load", "jit")
    jit_verbose = Knob("FLASHINFER_JIT_VERBOSE", _flag, False, "1 shows the build commands and their output", "jit")
    jit_debug = Knob("FLASHINFER_JIT_DEBUG", _flag, False, "1 builds with -O0 and debug symbols", "jit")
    jit_lineinfo = Knob("FLASHINFER_JIT_LINEINFO", _flag, False, "1 adds -lineinfo for profilers", "jit")
    disable_version_check = Knob(
        "FLASHINFER_DISABLE_VERSION_CHECK",
        _is_set,
        False,
        "any value: load companion packages of other versions",
        "jit",
    )
    cubin_dir = Knob[Optional[Path]](
        "FLASHINFER_CUBIN_DIR", _path, None, "kernel binaries; default: the companion package, else the cache", "jit"
    )
    cubins_repository = Knob(
        "FLASHINFER_CUBINS_REPOSITORY",
        str,
        "",
        "URL or folder of kernel binaries of one's own; none is published",
        "jit",
    )
    wheel_index = Knob(
        "FLASHINFER_WHEEL_INDEX", str, "", "base URL of an index of one's own with companion packages", "jit"
    )
    cubin_checksum_disabled = Knob(
        "FLASHINFER_CUBIN_CHECKSUM_DISABLED", _is_set, False, "any value: accept binaries that were changed", "jit"
    )
    cubin_download_threads = Knob("FLASHINFER_CUBIN_DOWNLOAD_THREADS", _whole(1), 4, "files downloaded at once", "jit")
    cubin_retry_window_seconds = Knob(
        "FLASHINFER_CUBIN_RETRY_WINDOW_SECONDS",
        _whole(0),
        0,
        "seconds of download_artifacts() in which failed downloads are tried again",
        "jit",
    )
    dsl_fmha_local_dir = Knob[Optional[Path]](
        "FLASHINFER_DSL_FMHA_LOCAL_DIR", _path, None, "folder looked at before DSL FMHA kernels are downloaded", "jit"
    )
    no_download = Knob("FLASHINFER_NO_DOWNLOAD", _is_set, False, "any value: a missing binary is an error", "jit")
    logging_level = Knob[Union[str, int]](
        "FLASHINFER_LOGGING_LEVEL", _logging_level, "INFO", "log level of the JIT; DEBUG: why modules are built", "jit"
    )

    # API logging and dumps
    log_level = Knob(
        "FLASHINFER_LOGLEVEL", _whole(0), 0, "API log: 0 off, 1 names, 3 arguments, 5 statistics, 10 dumps", "log"
    )
    log_dest = Knob("FLASHINFER_LOGDEST", str, "stdout", "stdout, stderr or a file; %i becomes the process id", "log")
    dump_dir = Knob(
        "FLASHINFER_DUMP_DIR",
        _path,
        Path("flashinfer_dumps"),
        "set: levels from 1 on dump here; default of level 10",
        "log",
    )
    dump_include = Knob(
        "FLASHINFER_DUMP_INCLUDE", str, "", "comma list of wildcards: log and dump only these APIs", "log"
    )
    dump_exclude = Knob("FLASHINFER_DUMP_EXCLUDE", str, "", "comma list of wildcards: leave these APIs out", "log")
    dump_max_count = Knob("FLASHINFER_DUMP_MAX_COUNT", _whole(0), 1000, "dumps per process", "log")
    dump_max_size_gb = Knob("FLASHINFER_DUMP_MAX_SIZE_GB", _number, 20.0, "bytes dumped per process, in GB", "log")
    dump_safetensors = Knob("FLASHINFER_DUMP_SAFETENSORS", _flag, False, "1 writes .safetensors instead of .pt", "log")

    # traces
    trace_dump = Knob("FLASHINFER_TRACE_DUMP", _flag, False, "write a definition JSON per unique shape called", "trace")
    trace_dump_dir = Knob("FLASHINFER_TRACE_DUMP_DIR", _path, Path("."), "where the definitions go", "trace")
    trace_apply = Knob("FLASHINFER_TRACE_APPLY", _flag, False, "1 replaces ops by solutions at import", "trace")
    trace_apply_path: Knob[Optional[Path]] = Knob(
        "FLASHINFER_TRACE_APPLY_PATH", _path, None, "file or folder of solutions, whose code is run", "trace"
    )

    # families
    validate_inputs = Knob(
        "FLASHINFER_VALIDATE_INPUTS",
        _flag,
        False,
        "1 at import: check index values on the host, which waits for the GPU",
        "ops",
    )
    nvfp4_4over6 = Knob(
        "FLASHINFER_NVFP4_4OVER6", _flag, False, "1: current_nvfp4_4over6_config() is a configuration, else None", "ops"
    )
    nvfp4_4over6_e4m3_use_256 = Knob(
        "FLASHINFER_NVFP4_4OVER6_E4M3_USE_256", _flag, False, "1: its largest block scale is 256, else 448", "ops"
    )
    nvfp4_4over6_err_mode = Knob(
        "FLASHINFER_NVFP4_4OVER6_ERR_MODE", _error_mode, "MAE", "its error: MAE (mean absolute) or MSE (squared)", "ops"
    )
    nvfp4_4over6_err_use_fast_math = Knob(
        "FLASHINFER_NVFP4_4OVER6_ERR_USE_FAST_MATH", _flag, False, "1: its errors are computed with fast math", "ops"
    )
    disable_fp4_quant_fast_math = Knob(
        "FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH",
        _flag,
        False,
        "accepted for compatibility: FP4 quantisers that could use fast math need Blackwell",
        "ops",
    )
    use_cuda_norm = Knob(
        "FLASHINFER_USE_CUDA_NORM", _flag, False, "accepted for compatibility: norms always use the CUDA kernels", "ops"
    )
    build_nvep = Knob("BUILD_NVEP", _flag, False, "1: flashinfer.moe_ep warns if it finds no transport", "ops")
    build_nccl_ep = Knob("BUILD_NCCL_EP", _flag, False, "1: the same as BUILD_NVEP", "ops")
    build_nixl_ep = Knob("BUILD_NIXL_EP", _flag, False, "1: the same as BUILD_NVEP", "ops")

    fmha_v2_verbose = Knob(
        "FLASHINFER_FMHA_V2_VERBOSE",
        _is_set,
        False,
        "any value: trtllm_fmha_v2_prefill prints what serves a call",
        "ops",
    )
    comm_timeout_s: Knob[Optional[float]] = Knob(
        "FLASHINFER_COMM_TIMEOUT_S",
        _number,
        None,
        "seconds after which a rank that does not come to a call is given up, 0: never; default: as the process group",
        "ops",
    )
    comm_check = Knob(
        "FLASHINFER_COMM_CHECK",
        _flag,
        False,
        "1: all-reduces on CUDA compare what the ranks ask for first, and wait for it; those on the CPU always do",
        "ops",
    )
    autotuner_load_from_file = Knob(
        "FLASHINFER_AUTOTUNER_LOAD_FROM_FILE",
        _flag,
        False,
        "1: autotune() uses the results of its file and measures nothing",
        "ops",
    )
    autotune_cache_dir = Knob("FLASHINFER_AUTOTUNE_CACHE_DIR", str, "", "as FLASHINFER_AUTOTUNE_DIR, before it", "ops")
    autotune_dir = Knob(
        "FLASHINFER_AUTOTUNE_DIR",
        str,
        "",
        "folder of the results that autotune_v2() shares between processes; default: autotune in the cache directory",
        "ops",
    )
    autotune_timer = Knob(
        "FLASHINFER_AUTOTUNE_TIMER",
        _one_of("globaltimer", "cuda_event"),
        "",
        "clock of autotune's trials: globaltimer or cuda_event; default: the former under confidential computing",
        "ops",
    )
    confidential_compute = Knob(
        "FLASHINFER_CONFIDENTIAL_COMPUTE",
        _one_of("1", "0"),
        "",
        "1 or 0: take the GPU for one under confidential computing, or not; default: as its driver says",
        "ops",
    )
    tactics_blocklist = Knob(
        "FLASHINFER_TACTICS_BLOCKLIST",
        str,
        "",
        "file of tactics that autotune() must not try, read with the tuner",
        "ops",
    )
    routing_force_block_per_token = Knob[Optional[bool]](
        "FLASHINFER_ROUTING_FORCE_BLOCK_PER_TOKEN",
        _flag,
        None,
        "MoE routing on CUDA: 1 gives each token a block of its own, 0 puts four into a block; default: four",
        "ops",
    )
    b12x_micro_share_input = Knob(
        "FLASHINFER_B12X_MICRO_SHARE_INPUT", _flag, True, "MoE on SM12x: small batches share their input", "ops"
    )
    b12x_force_moe_w4a16 = Knob(
        "FLASHINFER_B12X_FORCE_MOE_W4A16", _is_set, False, "MoE on SM12x: any value forces bf16 activations", "ops"
    )
    allow_experimental_auto_backends = Knob(
        "FLASHINFER_ALLOW_EXPERIMENTAL_AUTO_BACKENDS", _flag, False, '1: "auto" may choose experimental backends', "ops"
    )
    cpu_backends = Knob(
        "FLASHINFER_CPU_BACKENDS",
        _one_of("any"),
        "",
        "any: CPU tensors take every backend name that the op has on CUDA, to test programs that name one",
        "ops",
    )
    topk_algo = Knob(
        "FLASHINFER_TOPK_ALGO",
        _one_of("filtered", "multi_cta", "clusters", "cub", "default"),
        "",
        "blocks per row of top-k: filtered: one, multi_cta: a cluster; clusters, cub, default or unset: by the batch",
        "ops",
    )

    @classmethod
    def all(cls) -> list[Knob[Any]]:
        return [k for k in vars(cls).values() if isinstance(k, Knob)]

    @contextlib.contextmanager
    def override(self, **values: Optional[str]) -> Iterator[None]:
        """Set variables by attribute name for the length of a ``with`` block; ``None`` unsets one."""
        names = {getattr(type(self), k).variable: v for k, v in values.items()}
        saved = {name: os.environ.get(name) for name in names}
        try:
            for name, value in names.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value
            yield
        finally:
            for name, value in saved.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value


knobs = Knobs()
