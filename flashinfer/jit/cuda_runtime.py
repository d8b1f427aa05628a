# SPDX-License-Identifier: Apache-2.0
"""The CUDA runtime library (``libcudart``) that a CUDA module needs, on machines without a toolkit.

A module names ``libcudart.so.<major>``. A CUDA build of torch of that major has loaded it already, and the dynamic
linker then takes that one. Otherwise it may lie in pip's ``nvidia-cuda-runtime``, where the linker does not look.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
from pathlib import Path
from typing import Optional

__all__ = ["load_missing_cudart"]

_MISSING = re.compile(r"(libcudart\.so\.(\d+)): cannot open shared object file")


def _in_pip_packages(name: str) -> Optional[Path]:
    """Return ``nvidia/cu13/lib/<name>``, ``nvidia/cuda_runtime/lib/<name>`` or another of pip's ``nvidia`` packages."""
    spec = importlib.util.find_spec("nvidia")
    roots = (spec.submodule_search_locations or []) if spec else []
    return next((path for root in roots for path in sorted(Path(root).glob(f"*/lib/{name}"))), None)


def load_missing_cudart(error: str) -> bool:
    """Load the runtime that a failed load has named; return False if the failure was another one.

    RuntimeError if the runtime is not installed.
    """
    found = _MISSING.search(error)
    if found is None:
        return False
    name, major = found[1], found[2]
    path = _in_pip_packages(name)
    if path is None:
        package = "nvidia-cuda-runtime-cu12" if major == "12" else f"nvidia-cuda-runtime=={major}.*"
        raise RuntimeError(
            f"{name} is neither loaded by torch nor installed: `pip install '{package}'`, or install the modules that "
            "were built for torch's CUDA release"
        )
    ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)  # a library is found by its soname once it is loaded
    return True
