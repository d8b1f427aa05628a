# SPDX-License-Identifier: Apache-2.0
"""The ``flashinfer`` command (also ``python -m flashinfer``). No subcommand needs a GPU, nvcc or a network to start."""

from __future__ import annotations

import contextlib
import difflib
import functools
import json
import os
import subprocess
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, Optional, Sequence

import click
import torch
from tabulate import tabulate

from ._runtime.errors import ArgumentError, BackendSupportedError
from ._runtime.knobs import knobs
from .artifacts import clear_cubin, download_artifacts, get_artifacts_status
from .jit import JitSpec, clear_cache_dir, cpp_ext, current_compilation_context, jit_spec_registry
from .jit import env as jit_env
from .jit.companion_wheels import Wheel, cubin_wheel, jit_cache_wheel, minimal_jit_cache_wheel
from .jit.cpp_ext import get_cuda_version
from .jit.cubin_loader import download_dir
from .jit.progress import some_of
from .version import __git_commit__, __version__

as_json = click.option("--json", "json_", is_flag=True, help="Print JSON for scripts.")


class _Commands(click.Group):
    """Turn failures that the user can act on into one line on stderr and exit code 1, not a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (RuntimeError, OSError, ValueError, ImportError, BackendSupportedError) as error:
            if isinstance(error, (click.exceptions.Exit, click.Abort, BrokenPipeError)):  # click handles these
                raise
            raise click.ClickException(str(error)) from error


@contextlib.contextmanager
def _named_failure(action: str) -> Iterator[None]:
    """Begin the line of a failure with ``<action> failed:``, which published scripts look for."""
    try:
        yield
    except (RuntimeError, OSError, ValueError) as error:
        if isinstance(error, (click.exceptions.Exit, click.Abort, BrokenPipeError)):
            raise
        raise click.ClickException(f"{action} failed: {error}") from error


@click.group(cls=_Commands, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="flashinfer")
@click.option("--download-cubin", is_flag=True, help="The same as the command download-cubin.")
@click.pass_context
def main(ctx: click.Context, download_cubin: bool) -> None:
    """Inspect and manage compiled kernels."""
    if download_cubin:
        _download()
    elif ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


#: The published name.
cli = main


# ------------------------------------------------------------------------------------------------ binaries

_DONE = "All cubin download tasks completed successfully"
_NO_BINARIES = (
    f"{_DONE}: there are no binaries to download, since all kernels are "
    "compiled where they run (flashinfer warmup does it now)"
)


def _download() -> None:
    with _named_failure("Cubin download"):
        download_artifacts()
    click.echo(_DONE if knobs.cubins_repository else _NO_BINARIES)


@main.command("download-cubin")
def download_cubin() -> None:
    """Download the files of FLASHINFER_CUBINS_REPOSITORY; nothing without it."""
    _download()


@main.group()
def artifacts() -> None:
    """Kernels that published releases download."""


artifacts.add_command(download_cubin, "download")


@main.command("list-cubins")
def list_cubins() -> None:
    """List the files of FLASHINFER_CUBINS_REPOSITORY; none without it."""
    rows = [(name, "Downloaded" if is_here else "Missing") for name, is_here in get_artifacts_status()]
    click.echo(_table(rows, headers=["Cubin", "Status"]))


@main.command("clear-cubin")
def clear_cubin_command() -> None:
    """Delete the downloads in ``FLASHINFER_CUBIN_DIR``, and that folder if nothing else is in it."""
    folder = download_dir()
    with _named_failure("Cubin clear"):
        clear_cubin()
    click.echo(f"Cubin cleared successfully: {folder}")


# ------------------------------------------------------------------------------------------------ companions

#: CUDA releases that companion packages are built for, as in ci/cuda-versions.json.
_SUPPORTED_JIT_CACHE_CUDA_VERSIONS = ("12.9", "13.0", "13.4")

_version = click.option("--flashinfer-version", default=None, help="Default: the version of this package.")
_cuda = click.option("--cuda-version", default=None, help="12.9 or cu129; default: torch's, else the toolkit's.")
_index = click.option("--index-url", default=None, help="Index that serves companions of this package.")
_mode = click.option(
    "--mode", type=click.Choice(["all", "minimal"]), default="all", help="All pre-built modules, or those for --sm."
)
_sm = click.option(
    "--sm", multiple=True, help="Architecture such as sm90a or 9.0a; may be repeated. Default: the GPUs."
)
_nightly = click.option("--nightly", is_flag=True, help="Accept development versions.")
_dry_run = click.option("--dry-run", is_flag=True, help="Print what would be installed.")


def _cuda_of(given: Optional[str]) -> str:
    if given or torch.version.cuda:
        return given or torch.version.cuda or ""
    return str(get_cuda_version())


def _install(wheel: Wheel, dry_run: bool) -> None:
    click.echo(wheel.describe())
    if dry_run:
        click.echo("Dry run requested; pip install was not executed.")
    else:
        wheel.install(subprocess.run)


@main.command("install-cubin-wheel")
@_version
@_index
@_nightly
@_dry_run
def install_cubin_wheel(
    flashinfer_version: Optional[str], index_url: Optional[str], nightly: bool, dry_run: bool
) -> None:
    """Install flashinfer-cubin from an index of one's own."""
    _install(cubin_wheel(flashinfer_version or __version__, index_url, nightly), dry_run)


def _jit_cache(version: str, index: Optional[str], nightly: bool, cuda: Optional[str], mode: str, sm: tuple) -> Wheel:
    if sm and mode != "minimal":
        raise click.UsageError("--sm can only be used with --mode minimal.")
    wheel = jit_cache_wheel(version, index, nightly, _cuda_of(cuda), _SUPPORTED_JIT_CACHE_CUDA_VERSIONS)
    return minimal_jit_cache_wheel(wheel, sm, subprocess.run) if mode == "minimal" else wheel


@main.command("install-jit-cache-wheel")
@_cuda
@_version
@_index
@_mode
@_sm
@_nightly
@_dry_run
def install_jit_cache_wheel(
    cuda_version: Optional[str],
    flashinfer_version: Optional[str],
    index_url: Optional[str],
    mode: str,
    sm: tuple[str, ...],
    nightly: bool,
    dry_run: bool,
) -> None:
    """Install flashinfer-jit-cache, modules that are built already, from an index of one's own."""
    _install(_jit_cache(flashinfer_version or __version__, index_url, nightly, cuda_version, mode, sm), dry_run)


main.add_command(
    click.Command(
        "download-jit-cache",
        params=install_jit_cache_wheel.params,
        callback=install_jit_cache_wheel.callback,
        hidden=True,
    )
)


@main.command("download-kernels")
@_cuda
@_version
@click.option("--cubin-index-url", default=None, help="Index that serves flashinfer-cubin of this package.")
@click.option("--jit-cache-index-url", default=None, help="Index that serves flashinfer-jit-cache of this package.")
@_mode
@_sm
@_nightly
@_dry_run
def download_kernels(
    cuda_version: Optional[str],
    flashinfer_version: Optional[str],
    cubin_index_url: Optional[str],
    jit_cache_index_url: Optional[str],
    mode: str,
    sm: tuple[str, ...],
    nightly: bool,
    dry_run: bool,
) -> None:
    """Install both companion packages from indexes of one's own."""
    version, mode = flashinfer_version or __version__, "minimal" if sm else mode
    wheels: dict[str, Callable[[], Wheel]] = {
        "flashinfer-cubin": lambda: cubin_wheel(version, cubin_index_url, nightly),
        "flashinfer-jit-cache": lambda: _jit_cache(version, jit_cache_index_url, nightly, cuda_version, mode, sm),
    }
    failed = []
    for package, make in wheels.items():
        try:
            _install(make(), dry_run)
        except (RuntimeError, ValueError) as error:
            failed.append(f"{package} install failed: {error}")
            click.echo(failed[-1])
        else:
            if not dry_run:
                click.echo(f"{package} installed successfully")
    if failed:
        raise RuntimeError("\n".join(["One or more kernel wheel installs failed:", *failed]))


# ------------------------------------------------------------------------------------------------ configuration


def _config() -> dict[str, dict[str, Any]]:
    """Collect the sections of ``show-config``. Guarded: a broken part must not hide the others."""
    return {
        "Versions": {
            "flashinfer": f"{__version__} ({__git_commit__[:12]})",
            "flashinfer-jit-cache": _try(lambda: _companion("flashinfer_jit_cache")),
            "flashinfer-cubin": _try(lambda: _companion("flashinfer_cubin")),
            "torch": _try(_torch_text),
        },
        "Toolchain": {
            "nvcc": _try(cpp_ext.find_nvcc) or "not found: CPU modules and pre-built CUDA modules only",
            "CUDA": _try(_cuda_text),
            "host compiler": _try(cpp_ext.find_cxx) or "not found",
            "CUDA targets": _try(_targets_text),
        },
        "Directories": {
            "cache": _try(lambda: jit_env.FLASHINFER_CACHE_DIR),
            "modules": _try(lambda: jit_env.FLASHINFER_JIT_DIR),
            "generated sources": _try(lambda: jit_env.FLASHINFER_GEN_SRC_DIR),
            "csrc": _try(lambda: jit_env.FLASHINFER_CSRC_DIR),
            "include": _try(lambda: jit_env.FLASHINFER_INCLUDE_DIR),
            "pre-built modules": _try(lambda: jit_env.FLASHINFER_AOT_DIR),
            "cubins": _try(lambda: jit_env.FLASHINFER_CUBIN_DIR),
        },
        "Modules": _module_totals(),
        "Settings": {knob.variable: _try(functools.partial(getattr, knobs, knob.attribute)) for knob in knobs.all()},
        "Variables that nothing reads": _unread_variables(),
    }


#: Variables of published releases for kernels that this package does not have: known, and without effect.
_WITHOUT_EFFECT = frozenset(
    f"FLASHINFER_{name}"
    for name in (
        "CUTE_DSL_DISABLE_CACHE",
        "DECODE_AUTO_CUDNN",
        "DISABLE_EAGLE_VERIFY_FP8KV_SM90",
        "RAGGED_AUTO_BACKEND_ORDER",
        "SPECIALIZED_KERNEL_DISABLE",
    )
)


def _unread_variables() -> dict[str, str]:
    """Return the ``FLASHINFER_*`` variables that are set but that nothing reads: misspelt, or of a missing feature."""
    known = {knob.variable for knob in knobs.all()} | _WITHOUT_EFFECT
    return {name: text for name, text in os.environ.items() if name.startswith("FLASHINFER_") and name not in known}


def _try(probe: Callable[[], Any]) -> Any:
    try:
        return probe()
    except Exception as error:
        return f"unknown ({error})"


def _companion(package: str) -> str:
    version = jit_env.companion_version(package)
    if version is None:
        return "not installed"
    return version if jit_env.accepts_companion(version) else f"{version} (ignored: flashinfer is {__version__})"


def _cuda_text() -> str:
    version = cpp_ext.get_cuda_version()
    return str(version) if version.major else "none"


def _torch_text() -> str:
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return f"{torch.__version__}, " + (", ".join(devices) if devices else "no GPU")


def _targets_text() -> str:
    targets = sorted(current_compilation_context.TARGET_CUDA_ARCHS)
    return " ".join(f"{major}.{minor}" for major, minor in targets) or "none (no GPU, no FLASHINFER_CUDA_ARCH_LIST)"


def _module_totals() -> dict[str, Any]:
    def count() -> dict[str, int]:
        _ensure_modules_registered()
        return jit_spec_registry.get_stats()

    totals = _try(count)
    return totals if isinstance(totals, dict) else {"total": totals}


#: Headings that programs look for in the text.
_PUBLISHED_TITLES = {
    "Versions": "=== Torch Version Info ===",
    "Directories": "=== Artifact Path ===",
    "Settings": "=== Environment Variables ===",
}


@main.command("show-config")
@as_json
def show_config(json_: bool) -> None:
    """Print versions, toolchain, directories and every setting."""
    config = _config()
    if json_:
        _echo_json(config)
        return
    for title, facts in config.items():
        title = _PUBLISHED_TITLES.get(title, title)
        if facts is config["Settings"]:
            rows = [(k.variable, facts[k.variable], "" if facts[k.variable] == k.default else "*") for k in knobs.all()]
            click.echo(f"{title}\n(* = not the default)\n{_table(rows)}\n")
        elif facts:
            click.echo(f"{title}\n{_table(facts.items())}\n")
    files = _try(get_artifacts_status)  # text, if the repository does not answer
    here = f"{sum(x for _, x in files)}/{len(files)}" if isinstance(files, tuple) else files
    click.echo(f"=== Downloaded Cubins ===\nDownloaded {here} cubins")


@main.command("collect-env")
@as_json
def collect_env(json_: bool) -> None:
    """Print a report about this machine to paste into a bug report."""
    from .collect_env import collect_env_info, format_report

    report = collect_env_info()
    if json_:
        _echo_json(report)
    else:
        click.echo(format_report(report))


# ------------------------------------------------------------------------------------------------ modules


def _ensure_modules_registered() -> None:
    """Register the modules of every family and backend; compiles nothing."""
    from .aot import FAMILIES, gen_family_modules

    for family in FAMILIES:
        for backend in ("cuda", "cpu"):
            list(gen_family_modules(family, backend))


def _specs(names: Sequence[str] = ()) -> list[JitSpec]:
    _ensure_modules_registered()
    specs = jit_spec_registry.get_all_specs()
    unknown = [name for name in names if name not in specs]
    if unknown:
        near = difflib.get_close_matches(unknown[0], specs) or sorted(specs)[:1]
        raise click.ClickException(
            f"Module '{unknown[0]}' not found. module must be a name of list-modules, such as {near[0]}"
        )
    return [specs[name] for name in names or sorted(specs)]


def _state(spec: JitSpec) -> str:
    if spec.is_aot:
        return "pre-built"
    return "compiled" if spec.is_compiled else "not compiled"


def _describe(spec: JitSpec) -> dict[str, Any]:
    state = _state(spec)
    return {
        "name": spec.name,
        "backend": spec.backend,
        "state": state,
        "library": spec.get_library_path() if state != "not compiled" else None,
        "reason": spec.staleness() if state == "not compiled" else None,
        "sources": list(spec.sources),
    }


@main.command("list-modules")
@click.argument("name", required=False)
@as_json
def list_modules(name: Optional[str], json_: bool) -> None:
    """List the modules that can be built, or describe one of them."""
    specs = _specs([name] if name else [])
    if json_:
        _echo_json([_describe(spec) for spec in specs])
    elif name:
        click.echo(_all_about(specs[0]))
    else:
        click.echo("\n".join(["Available compilation modules:", *(f"  {spec.name}" for spec in specs)]))


def _created(name: str) -> Optional[str]:
    """Return the time at which a module was registered."""
    status = jit_spec_registry.get_spec_status(name)
    return status.created_at.strftime("%Y-%m-%d %H:%M:%S") if status else None


def _all_about(spec: JitSpec) -> str:
    row = _describe(spec)
    facts = {
        "Module:": row["name"],
        "Backend:": row["backend"],
        "Status:": row["state"],
        "Library Path:": row["library"] or f"none ({row['reason']})",
        "Source Files:": row["sources"],
        "Created:": _created(spec.name),
        "Device Linking:": "Required" if spec.needs_device_linking else "Not required",
    }
    return _table(facts.items())


_FILTERS: dict[str, tuple[str, ...]] = {
    "all": ("pre-built", "compiled", "not compiled"),
    "aot": ("pre-built",),
    "jit": ("compiled",),
    "compiled": ("pre-built", "compiled"),
    "not-compiled": ("not compiled",),
}


def _built_for_calls() -> list[str]:
    """List libraries in the cache that no family lists: dtypes, head dimensions and variants that calls asked for."""
    folders = {folder for backend in ("cuda", "cpu") for folder in jit_env.read_dirs(backend)}
    found = {library.stem: str(library) for folder in folders for library in folder.glob("*/*.so")}
    return [found[name] for name in sorted(found.keys() - jit_spec_registry.get_all_specs().keys())]


def _details(row: dict[str, Any]) -> str:
    facts = {
        "Module:": row["name"],
        "Backend:": row["backend"],
        "Status:": row["state"],
        "Library:": row["library"] or f"none ({row['reason']})",
        "Sources:": row["sources"],
        "Created:": _created(row["name"]),
    }
    return _table(facts.items())


@main.command("module-status")
@click.option("--detailed", is_flag=True, help="Show sources, time and library, or why it would be built.")
@click.option("--filter", "filter_", type=click.Choice(list(_FILTERS)), default="all", show_default=True)
@as_json
def module_status(detailed: bool, filter_: str, json_: bool) -> None:
    """List the modules and tell which of them are ready to load."""
    rows = [row for row in map(_describe, _specs()) if row["state"] in _FILTERS[filter_]]
    if json_:
        _echo_json(rows)
        return
    columns = ["backend", "state", "name"]  # names are long, so the state comes before the name
    if detailed:
        click.echo("\n\n".join(map(_details, rows)))
    elif rows:
        click.echo(_table([[row[c] for c in columns] for row in rows], headers=columns))
    ready = sum(row["state"] != "not compiled" for row in rows)
    totals = {"Total modules:": len(rows), "Compiled:": ready, "Not compiled:": len(rows) - ready}
    click.echo(f"\n=== Summary ===\n{_table(totals.items())}")
    others = _built_for_calls()
    if others:
        click.echo(f"{len(others)} more in the cache, which calls asked for")
    if others and detailed:
        click.echo("\n".join(others))


@main.command()
@click.argument("names", nargs=-1)
@click.option("--device", help="cpu or cuda; default: what this machine has.")
def warmup(names: tuple[str, ...], device: Optional[str]) -> None:
    """Build modules (default: all for this device) before a server needs them."""
    from . import warmup as warm_up

    report = warm_up(list(names) or None, device=device)
    built = f"built {some_of(report.built)}" if report.built else "nothing to build"
    click.echo(f"{len(report.modules)} modules ready in {report.seconds:.1f} s, {built}")


@main.command("clear-cache")
def clear_cache() -> None:
    """Delete the compiled modules of this version; they are built again on demand."""
    rebound = "FLASHINFER_JIT_DIR" in vars(jit_env)
    folder = jit_env.FLASHINFER_JIT_DIR if rebound else jit_env.FLASHINFER_WORKSPACE_DIR.parent
    size = sum(_size(path) for path in folder.rglob("*"))
    with _named_failure("Cache clear"):
        clear_cache_dir()
    click.echo(f"Cache cleared successfully: {size / 2**20:.1f} MiB in {folder}")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:  # another process deletes the file too
        return 0


@main.command("export-compile-commands")
@click.argument("path", required=False, type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The same as PATH.")
def export_compile_commands(path: Optional[Path], output: Optional[Path]) -> None:
    """Write a compilation database for clangd (default: compile_commands.json here)."""
    target = output or path or Path("compile_commands.json")
    entries: list[dict[str, str]] = []
    left_out: dict[str, list[str]] = {}  # reason -> names of modules
    specs = _specs()
    if not specs:
        click.echo("No modules found")
        return
    for spec in specs:
        try:
            entries += spec.get_compile_commands()
        except Exception as error:  # no nvcc, no target, an error of a user's spec: the others can still be browsed
            left_out.setdefault(str(error).removeprefix(f"{spec.name}: "), []).append(spec.name)
        else:
            if isinstance(spec, JitSpec):  # programs register others, which have a name and commands alone
                spec.write_generated()  # an editor opens the generated files
    for why, names in left_out.items():
        click.echo(f"Failed to generate compile commands for {some_of(names)}: {why}", err=True)
    target.write_text(json.dumps(entries, indent=2) + "\n")
    click.echo(f"Successfully exported {len(entries)} compile commands to {target}")


@main.command()
@click.option("--dir", "directory", required=True, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--device", default=None, help="cpu or cuda; default: what this machine has.")
@click.option("--allow-code", is_flag=True, help="Compile and run C++ source in the dumps. Only for dumps of your own.")
def replay(directory: Path, device: Optional[str], allow_code: bool) -> None:
    """Run dumped calls again and compare with the recorded results (see FLASHINFER_LOGLEVEL=10)."""
    from .dump import replay_main

    with _named_failure("Replay"):
        code = replay_main(directory, device or ("cuda" if torch.cuda.is_available() else "cpu"), allow_code)
    click.get_current_context().exit(code)


@main.command("generate-tactics-blocklist")
@click.option("-o", "--output", default="tactics_blocklist.json", show_default=True, type=click.Path(dir_okay=False))
@click.option("--quant-modes", multiple=True, help="Number format of the products; may be repeated. Default: all.")
@click.option("--num-tokens", default=64, show_default=True, type=click.IntRange(min=1))
@click.option("--num-experts", default=256, show_default=True, type=click.IntRange(min=1))
@click.option("--hidden-size", default=7168, show_default=True, type=click.IntRange(min=1))
@click.option("--intermediate-size", default=2048, show_default=True, type=click.IntRange(min=1))
@click.option("--top-k", default=8, show_default=True, type=click.IntRange(min=1))
@click.option("--device", default="cuda:0", show_default=True, help="Where to run the tactics; cpu works too.")
def generate_tactics_blocklist(output: str, quant_modes: Sequence[str], **sizes: Any) -> None:
    """Run every tactic of an expert layer's products; list those that fail.

    FLASHINFER_TACTICS_BLOCKLIST names the list that the autotuner leaves out.
    """
    from .autotuner import blocklist_gen

    known = list(blocklist_gen.PROBE_FUNCTIONS)
    for mode in quant_modes:
        if mode not in known:
            raise click.BadParameter(f"{mode!r} is not one of {', '.join(known)}", param_hint="--quant-modes")
    try:
        found = blocklist_gen.generate(output, list(quant_modes) or None, **sizes)
    except ArgumentError as error:
        raise click.ClickException(str(error)) from error
    for key, tactics in found.items():
        click.echo(f"{key}: {len(tactics)} tactics fail")
    click.echo(f"Wrote {output}: {sum(map(len, found.values()))} tactics are left out")


# ------------------------------------------------------------------------------------------------ output


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "\n".join(map(str, value))
    return "" if value is None else str(value)


def _table(rows: Iterable[Sequence[Any]], headers: Sequence[str] = ()) -> str:
    return tabulate([[_text(cell) for cell in row] for row in rows], headers, tablefmt="plain", disable_numparse=True)


def _echo_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2, default=str))


if __name__ == "__main__":
    main(prog_name="flashinfer")
