# SPDX-License-Identifier: Apache-2.0
"""Kernels of flashinfer-python as cubins."""

from pathlib import Path

from ._version import __git_version__ as __git_version__
from ._version import __version__ as __version__

__all__ = ["CUBIN_DIR", "get_cubin_dir", "get_cubin_path", "list_cubins"]

CUBIN_DIR = Path(__file__).resolve().parent / "cubins"


def get_cubin_dir() -> str:
    """Return the folder of the cubins."""
    return str(CUBIN_DIR)


def list_cubins() -> list[str]:
    """Return the paths of all cubins below the folder."""
    folder = Path(get_cubin_dir())
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.cubin"))


def get_cubin_path(relative: str) -> str:
    """Return the path of one cubin; a FileNotFoundError if the package does not hold it."""
    if relative not in list_cubins():
        raise FileNotFoundError(f"flashinfer_cubin has no {relative}")
    return str(Path(get_cubin_dir()) / relative)
