# SPDX-License-Identifier: Apache-2.0
"""Helpers of module generators: atomic conditional writes and the C++ names of torch dtypes."""

from __future__ import annotations

import contextlib
import os
import struct
import tempfile
from pathlib import Path
from typing import Any, BinaryIO, Iterator, Union

import torch

from .._runtime.errors import ArgumentError

__all__ = [
    "dtype_map",
    "filename_safe_dtype_map",
    "filename_safe_dtype_map_kv",
    "is_whole_library",
    "locked",
    "make_folder",
    "write_atomically",
    "write_if_different",
]


def make_folder(path: Path) -> None:
    """Make ``path`` and its missing parents, writable by this user alone for any umask."""
    if not path.is_dir():
        make_folder(path.parent)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o755)


def write_atomically(path: Path, content: Union[str, bytes], keeps_first: bool = False) -> None:
    """Write through a temporary file in the same directory, so that no reader ever sees half of the content.

    With ``keeps_first``, a file that another process has written meanwhile stays, where the file system has hard links.
    """
    data = content.encode() if isinstance(content, str) else content
    fd, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as f:
            f.write(data)
        os.chmod(temporary, 0o644)
        if not (keeps_first and _link(temporary, path)):
            os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _link(temporary: str, path: Path) -> bool:
    """Move a file to ``path`` unless there is one, and return True; False without links, having done nothing."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass
    except OSError:
        return False
    os.unlink(temporary)
    return True


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Let one process at a time merge into files of a folder. File systems without locks are not locked."""
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def write_if_different(path: Union[str, Path], content: str) -> None:
    """Store ``content`` at ``path`` unless the file has it already; makes parents; an equal file keeps its mtime."""
    path = Path(path)
    try:
        if path.read_bytes() == content.encode():
            return
    except OSError:
        make_folder(path.parent)
    write_atomically(path, content)


def is_whole_library(file: BinaryIO) -> bool:
    """Return True if an ELF file is as long as its header says: loading a truncated library dies of SIGBUS."""
    header = os.pread(file.fileno(), 64, 0)
    if len(header) < 64 or header[:5] != b"\x7fELF\2":  # 64-bit
        return False
    (table,), (entry, count) = struct.unpack_from("<Q", header, 40), struct.unpack_from("<HH", header, 58)
    return table + entry * count <= os.fstat(file.fileno()).st_size  # the section table is last in the file


#: C++ element type, as the templates of ``include/flashinfer`` name it.
dtype_map = {
    torch.float16: "flashinfer::float16_t",
    torch.bfloat16: "flashinfer::bfloat16_t",
    torch.float8_e4m3fn: "flashinfer::float8_e4m3_t",
    torch.float8_e5m2: "flashinfer::float8_e5m2_t",
    torch.float32: "float",
    torch.int8: "int8_t",
    torch.uint8: "uint8_t",
    torch.int32: "int32_t",
    torch.uint32: "uint32_t",
    torch.int64: "int64_t",
    torch.uint64: "uint64_t",
}


class _ShortNames(dict[torch.dtype, str]):
    def __missing__(self, dtype: Any) -> str:
        raise ArgumentError(f"dtype must be one of {', '.join(map(str, self))}, got {dtype}")


#: Short names for URIs.
filename_safe_dtype_map = _ShortNames(
    {
        torch.float16: "f16",
        torch.bfloat16: "bf16",
        torch.float8_e4m3fn: "e4m3",
        torch.float8_e5m2: "e5m2",
        torch.float32: "f32",
        torch.int8: "i8",
        torch.uint8: "u8",
        torch.int32: "i32",
        torch.uint32: "u32",
        torch.int64: "i64",
        torch.uint64: "u64",
    }
)


def filename_safe_dtype_map_kv(dtype: torch.dtype) -> str:
    """Return the name of a cache's dtype in file names; uint8 is NVFP4, two values in a byte."""
    return "fp4x2_e2m1" if dtype == torch.uint8 else filename_safe_dtype_map[dtype]
