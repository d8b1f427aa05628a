# SPDX-License-Identifier: Apache-2.0
"""Files of a repository of kernel binaries: fetched into ``FLASHINFER_CUBIN_DIR``, with their SHA-256 compared.

No binaries are published for this package. ``FLASHINFER_CUBINS_REPOSITORY`` names a repository of one's own: a URL or a
local folder, such as ``python -m flashinfer.jit.cubins`` makes.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from pathlib import Path
from typing import Any, Callable, Optional
from urllib.parse import unquote, urljoin

from .._runtime.errors import ArgumentError
from .._runtime.knobs import knobs
from . import env as jit_env
from .download import download_file, verify_cubin

__all__ = [
    "convert_to_ctypes_char_p",
    "download_file",
    "ensure_symlink",
    "get_artifact",
    "get_cubin",
    "get_meta_hash",
    "load_cubin",
    "safe_urljoin",
    "setup_cubin_loader",
    "verify_cubin",
    "verify_symlinked_headers",
]

logger = logging.getLogger("flashinfer.jit")

DOWNLOADS = "downloads.txt"  #: names of what was downloaded, for ``clear-cubin``
_MOST_BYTES = 255 - len(".part.lock")  # bytes of a part of a path on common file systems
DSL_FMHA = "dsl/fmha/"  #: folder whose files ``FLASHINFER_DSL_FMHA_LOCAL_DIR`` may hold


def __getattr__(name: str) -> Any:
    if name == "FLASHINFER_CUBIN_DIR":
        return jit_env.FLASHINFER_CUBIN_DIR
    if name == "FLASHINFER_CUBINS_REPOSITORY":
        return knobs.cubins_repository
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def safe_urljoin(base: str, path: str) -> str:
    """Join ``path`` to the folder ``base``, with or without a slash at its end; a leading slash replaces the path."""
    return urljoin(base if base.endswith("/") else f"{base}/", path)


def rebound_dir() -> Optional[Path]:
    """Return the folder that a program has bound to ``FLASHINFER_CUBIN_DIR`` of a module, None if none has.

    The modules are ``flashinfer.artifacts`` and this one, in this order. A name that was bound to what it would be
    anyway, as ``monkeypatch`` leaves it, is not rebound: it may be the companion package.
    """
    for name in ("flashinfer.artifacts", __name__):
        bound = vars(sys.modules[name]).get("FLASHINFER_CUBIN_DIR") if name in sys.modules else None
        if bound is not None and Path(bound) != jit_env.FLASHINFER_CUBIN_DIR:
            return Path(bound)
    return None


def download_dir() -> Path:
    """Return the folder that downloads go to: never the companion package, which is read-only."""
    return rebound_dir() or knobs.cubin_dir or jit_env.cache_dir(jit_env.writable_base()) / "cubins"


def find_artifact(file_name: str, sha256: str, verify: Callable[[Path, str], bool] = verify_cubin) -> Optional[Path]:
    """Return the file if it is here with this SHA-256, in ``FLASHINFER_CUBIN_DIR`` or where downloads go."""
    folders = dict.fromkeys([rebound_dir() or jit_env.FLASHINFER_CUBIN_DIR, download_dir()])
    places = [folder / file_name for folder in folders]
    if knobs.dsl_fmha_local_dir and file_name.startswith(DSL_FMHA):
        places.insert(0, knobs.dsl_fmha_local_dir / Path(file_name).name)
    return next((path for path in places if path.is_file() and verify(path, sha256)), None)


def check_name(file_name: str) -> None:
    """Refuse a name that leaves the folder of downloads, or that no file can have."""
    if leaves_folder(file_name):
        raise ArgumentError(f"get_artifact: file_name must lie in the repository, got {file_name!r}")
    if is_no_name(file_name):
        raise ArgumentError(
            f"get_artifact: file_name must be printable, each part at most {_MOST_BYTES} bytes, got {file_name[:80]!r}"
        )


def leaves_folder(name: str) -> bool:
    """Tell whether a name leads out of its folder, as a path or, with ``%2e%2e``, as the end of a URL."""
    return any(
        each.startswith(("/", "\\")) or ".." in Path(each).parts or "://" in each for each in (name, unquote(name))
    )


def is_no_name(name: str) -> bool:
    parts = name.split("/")
    return not name.isprintable() or any(not part or len(part.encode(errors="replace")) > _MOST_BYTES for part in parts)


def fetch(
    file_name: str,
    session: Optional[Any] = None,
    download: Optional[Callable[..., bool]] = None,
    **options: Any,
) -> bool:
    """Download a file of the repository with :func:`download_file`, or ``download``; note that it is a download."""
    folder = download_dir()
    source = safe_urljoin(knobs.cubins_repository, file_name)
    is_here = (download or download_file)(source, folder / file_name, session=session, **options)
    if is_here and file_name not in downloads():
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / DOWNLOADS, "a") as file:
            file.write(f"{file_name}\n")
    return is_here


def downloads() -> list[str]:
    """Return the names of the files that were downloaded to the folder of downloads."""
    try:
        return (download_dir() / DOWNLOADS).read_text(errors="replace").splitlines()
    except OSError:
        return []


def get_artifact(file_name: str, sha256: str, session: Optional[Any] = None) -> bytes:
    """Return a file of the repository, from ``FLASHINFER_CUBIN_DIR`` if it is there.

    Returns
    -------
    bytes
        Empty if the download failed or the file differs from what was expected. A RuntimeError if downloads are
        forbidden or there is no repository.
    """
    check_name(file_name)
    found = find_artifact(file_name, sha256)
    if found is not None:
        return found.read_bytes()
    local = download_dir() / file_name
    for why, reason in ((knobs.no_download, "FLASHINFER_NO_DOWNLOAD is set"), (not knobs.cubins_repository, _NONE)):
        if why:
            raise RuntimeError(f"get_artifact: {local} must exist with SHA-256 {sha256}, it does not ({reason})")
    if not fetch(file_name, session, sha256=sha256):
        return b""
    return local.read_bytes()


def load_cubin(cubin_path: str, sha256: str) -> bytes:
    """Return the content of a local file; empty if there is no such file, or if it has another SHA-256."""
    path = Path(cubin_path)
    try:
        content = path.read_bytes()
    except OSError:
        return b""
    if not verify_cubin(content, sha256):
        logger.warning("%s must have SHA-256 %s, it does not: it is not used", path, sha256)
        return b""
    return content


def convert_to_ctypes_char_p(data: bytes) -> ctypes.c_char_p:
    """Return a pointer to the bytes, zero bytes among them included; it is valid while ``data`` is."""
    return ctypes.c_char_p(data)


_SetCubin = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)
_callbacks: dict[str, Any] = {}  #: callbacks by library; ctypes would free them


def setup_cubin_loader(dll_path: str) -> None:
    """Let a library that includes ``flashinfer/cubin_loader.h`` ask for kernel binaries by path and SHA-256.

    The library then gets what :func:`get_artifact` returns: files of the companion package or of downloads, and empty
    bytes, after a message, for what cannot be had. An error of this function is an OSError (no such library) or an
    AttributeError (one without the two exports of the header).
    """
    library = ctypes.CDLL(str(dll_path))
    set_callback, set_current = library.FlashInferSetCubinCallback, library.FlashInferSetCurrentCubin
    set_current.argtypes, set_current.restype = [ctypes.c_char_p, ctypes.c_int], None

    def answer(path: bytes, sha256: bytes) -> None:
        content = b""
        try:
            content = get_artifact(path.decode(), sha256.decode())
        except Exception as error:  # an exception cannot pass through the C++ frames of the library
            logger.error("setup_cubin_loader: %s cannot be loaded (%s)", path.decode(errors="replace"), error)
        set_current(convert_to_ctypes_char_p(content), len(content))

    _callbacks[str(dll_path)] = callback = _SetCubin(answer)
    set_callback(callback)


#: The published name of an older release.
get_cubin = get_artifact
_NONE = "FLASHINFER_CUBINS_REPOSITORY is not set, and no binaries are published for this package"


def get_meta_hash(checksums_bytes: bytes, target_file: str = "flashinferMetaInfo.h") -> str:
    """Return the SHA-256 of the file in the text of a ``checksums.txt``."""
    for line in checksums_bytes.decode().splitlines():
        sha256, _, name = line.strip().partition(" ")
        if Path(name.strip()).name == target_file:
            return sha256
    raise ValueError(f"get_meta_hash: checksums must name {target_file}, got {len(checksums_bytes)} bytes without it")


def ensure_symlink(link: Path, target: Path) -> None:
    """Let ``link`` point to ``target``, in one step: other processes see the old link or the new one."""
    if link.is_symlink() and Path(os.readlink(link)) == target:
        return
    link.parent.mkdir(parents=True, exist_ok=True)
    part = link.with_name(f"{link.name}.{os.getpid()}.part")
    part.unlink(missing_ok=True)
    part.symlink_to(target)
    os.replace(part, link)


def verify_symlinked_headers(symlink_path: Path, headers: list[str], checksums: dict[str, str]) -> None:
    """Check the SHA-256 of each header in a folder; a RuntimeError names the first that differs."""
    for header in headers:
        path = Path(symlink_path) / header
        if not path.is_file() or not verify_cubin(path.read_bytes(), checksums[header]):
            raise RuntimeError(f"verify_symlinked_headers: {path} must have SHA-256 {checksums[header]}, it does not")
