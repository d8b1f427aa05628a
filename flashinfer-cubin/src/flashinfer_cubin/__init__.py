# SPDX-License-Identifier: Apache-2.0
"""Kernels of flashinfer-python as cubins."""

from pathlib import Path

from ._version import __version__ as __version__

__all__ = ["get_cubin_dir", "get_cubin_path", "list_cubins"]


def get_cubin_dir() -> str:
    """Return the folder of the cubins."""
    return str(Path(__file__).resolve().parent / "cubins")


def list_cubins() -> list[str]:
    """Return the paths of all cubins below the folder."""
    folder = Path(get_cubin_dir())
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.cubin"))


def get_cubin_path(relative: str) -> str:
    """Return the path of one cubin; a FileNotFoundError if the package does not hold it."""
    if relative not in list_cubins():
        raise FileNotFoundError(f"flashinfer_cubin has no {relative}")
    return str(Path(get_cubin_dir()) / relative)
