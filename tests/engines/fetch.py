# SPDX-License-Identifier: Apache-2.0
"""Python sources of the engines' published wheels, in a folder outside of the repository."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

RELEASES = {"vllm": "0.33.0", "sglang": "0.5.23"}
#: Small packages that the engines build their own classes from, so that an empty module does not do.
HELPERS = ("msgspec", "einops")
SOURCES = (".py", ".json", "METADATA")


def cache_folder() -> Path:
    """Return ``FLASHINFER_ENGINES_DIR``, or a folder of the user's cache."""
    given = os.environ.get("FLASHINFER_ENGINES_DIR")
    return Path(given) if given else Path.home() / ".cache" / "flashinfer-engines"


def wheel_of(engine: str) -> Path:
    """Return the wheel of an engine, fetched from PyPI without its dependencies if it is not there."""
    folder = cache_folder() / "wheels"
    name = f"{engine}-{RELEASES[engine]}-*.whl"
    if not list(folder.glob(name)):
        folder.mkdir(parents=True, exist_ok=True)
        ask = f"{engine}=={RELEASES[engine]}"
        options = ("--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "-q")
        subprocess.run([sys.executable, "-m", "pip", "download", *options, "-d", str(folder), ask], check=True)
    return next(folder.glob(name))


def source_folder() -> Path:
    """Return a folder with the Python files of all engines, for ``sys.path``."""
    target = cache_folder() / "_".join(f"{name}-{version}" for name, version in RELEASES.items())
    ready = target / ".ready"
    if not ready.exists():
        for engine in RELEASES:
            with zipfile.ZipFile(wheel_of(engine)) as wheel:
                wheel.extractall(target, [name for name in wheel.namelist() if name.endswith(SOURCES)])
        ready.touch()
    return target


def helper_folder() -> Path:
    """Return a folder with the packages of ``HELPERS``, for the end of ``sys.path``."""
    target = cache_folder() / "helpers"
    if not all((target / name).exists() for name in HELPERS):
        options = ("--no-deps", "--disable-pip-version-check", "-q", "--target", str(target))
        subprocess.run([sys.executable, "-m", "pip", "install", *options, *HELPERS], check=True)
    return target
