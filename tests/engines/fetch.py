# SPDX-License-Identifier: Apache-2.0
"""Python sources of the engines' published wheels, in a folder outside of the repository."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

RELEASES = {"vllm": "0.33.0", "sglang": "0.5.23"}
#: Its interpreter runs Triton kernels of the engines on CPU tensors. One library and the sources are kept of the wheel.
INTERPRETER = ("triton", "3.8.0", (".py", "/libtriton.so"))
#: Small packages that the engines build their own classes from, so that an empty module does not do.
HELPERS = ("msgspec", "einops")
SOURCES = (".py", ".json", "METADATA")


def cache_folder() -> Path:
    """Return ``FLASHINFER_ENGINES_DIR``, or a folder of the user's cache."""
    given = os.environ.get("FLASHINFER_ENGINES_DIR")
    return Path(given) if given else Path.home() / ".cache" / "flashinfer-engines"


def wheel_of(package: str, version: str) -> Path:
    """Return the wheel of a package, fetched from PyPI without its dependencies if it is not there."""
    folder = cache_folder() / "wheels"
    name = f"{package}-{version}-*.whl"
    if not list(folder.glob(name)):
        folder.mkdir(parents=True, exist_ok=True)
        options = ("--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "-q")
        ask = f"{package}=={version}"
        subprocess.run([sys.executable, "-m", "pip", "download", *options, "-d", str(folder), ask], check=True)
    return next(folder.glob(name))


def extract(target: Path, packages: dict[str, str], suffixes: tuple[str, ...]) -> Path:
    """Fill a folder with the files of wheels that end so, once."""
    ready = target / ".ready"
    if not ready.exists():
        for package, version in packages.items():
            with zipfile.ZipFile(wheel_of(package, version)) as wheel:
                wheel.extractall(target, [name for name in wheel.namelist() if name.endswith(suffixes)])
        ready.touch()
    return target


def source_folder() -> Path:
    """Return a folder with the Python files of all engines, for ``sys.path``."""
    return extract(
        cache_folder() / "_".join(f"{name}-{version}" for name, version in RELEASES.items()), RELEASES, SOURCES
    )


def interpreter_folder() -> Path:
    """Return a folder with Triton, for the end of ``sys.path``."""
    package, version, suffixes = INTERPRETER
    return extract(cache_folder() / f"{package}-{version}", {package: version}, suffixes)


def helper_folder() -> Path:
    """Return a folder with the packages of ``HELPERS``, for the end of ``sys.path``."""
    target = cache_folder() / "helpers"
    if not all((target / name).exists() for name in HELPERS):
        options = ("--no-deps", "--disable-pip-version-check", "-q", "--target", str(target))
        subprocess.run([sys.executable, "-m", "pip", "install", *options, *HELPERS], check=True)
    return target
