# SPDX-License-Identifier: Apache-2.0
"""Compiling kernels to cubins, without launchers: a repository for ``FLASHINFER_CUBINS_REPOSITORY``.

FLASHINFER_CUDA_ARCH_LIST="8.0 9.0a" python -m flashinfer.jit.cubins --out-dir repository --family norm

A cubin is loaded with the CUDA driver (cuModuleLoadData) by programs that launch kernels themselves. The result is
``flashinfer/<version>/<module>/<unit>.sm_<target>.cubin`` and a ``checksums.txt`` with the SHA-256 of each.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Iterable, Iterator, Optional

from ..aot import FAMILIES, gen_family_modules
from ..artifacts import ArtifactPath
from . import JitSpec
from .context import current_compilation_context
from .cpp_ext import Commands, job_count

__all__ = ["build_cubins", "main", "write_checksums"]


def _commands(spec: JitSpec, folder: Path) -> Iterator[tuple[list[str], Path]]:
    """Yield the nvcc command of each kernel unit for each target, and the file that it writes."""
    commands = Commands(spec)
    for unit in commands.units:
        if unit.tool != "nvcc":
            continue
        words = shlex.split(commands.compile(unit))
        words = [word for word in words if not word.startswith(("-gencode", "-Xfatbin", "--threads"))]
        for major, minor in spec.cuda_targets:
            path = folder / spec.name / f"{unit.source.stem}.sm_{major}{minor}.cubin"
            yield [*words, f"-arch=sm_{major}{minor}", "-cubin", str(unit.source), "-o"], path


def _compile(command: list[str], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    done = subprocess.run([*command, str(part)], capture_output=True, text=True, check=False)
    if done.returncode:
        part.unlink(missing_ok=True)
        raise RuntimeError(f"cubins: {path.name} cannot be compiled: {(done.stderr or done.stdout).strip()}")
    os.replace(part, path)


def write_checksums(folder: Path) -> int:
    """Write ``checksums.txt`` of a folder of cubins, by renaming; return the number of files."""
    files = sorted(folder.rglob("*.cubin"))
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(folder)}\n" for path in files]
    part = folder / "checksums.txt.part"
    part.write_text("".join(lines))
    os.replace(part, folder / "checksums.txt")
    return len(files)


def build_cubins(out_dir: Path, families: Iterable[str] = FAMILIES) -> int:
    """Compile the kernels of these families for the targets of ``FLASHINFER_CUDA_ARCH_LIST``; return their number."""
    from tqdm import tqdm

    if not current_compilation_context.TARGET_CUDA_ARCHS:
        raise RuntimeError("cubins: FLASHINFER_CUDA_ARCH_LIST must name the targets, e.g. '8.0 9.0a', got nothing")
    folder = Path(out_dir).absolute() / ArtifactPath.FLASHINFER_KERNELS
    specs = {spec.name: spec for family in families for spec in gen_family_modules(family, "cuda")}
    tasks = []
    for spec in specs.values():
        spec.write_generated()
        tasks += list(_commands(spec, folder))
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(job_count()) as pool:
        for _ in tqdm(pool.map(lambda task: _compile(*task), tasks), total=len(tasks), unit="cubin", desc="compiling"):
            pass
    return write_checksums(folder)


def main(argv: Optional[list[str]] = None) -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m flashinfer.jit.cubins", description=__doc__, formatter_class=form)
    parser.add_argument("--out-dir", type=Path, required=True, metavar="DIR", help="the repository")
    parser.add_argument("--family", action="append", choices=FAMILIES, metavar="NAME", help=", ".join(FAMILIES))
    args = parser.parse_args(argv)
    try:
        count = build_cubins(args.out_dir, args.family or FAMILIES)
    except (RuntimeError, ValueError, OSError) as error:
        raise SystemExit(str(error)) from error
    print(f"{count} cubins in {args.out_dir}")


if __name__ == "__main__":
    main()
