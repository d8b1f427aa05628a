# SPDX-License-Identifier: Apache-2.0
"""Pre-built modules of flashinfer-python, in a package for each CUDA architecture: this one requires and names them."""

import importlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from ._names import NAMES as _NAMES
from ._version import __version__ as __version__

__all__ = ["Provider", "get_jit_cache_providers"]


@dataclass(frozen=True)
class Provider:
    """A package of modules."""

    provider_id: str  #: such as ``sm90a``
    distribution: str
    version: str
    jit_cache_dir: str
    cuda_architectures: tuple[str, ...]
    modules: tuple[str, ...]


def get_jit_cache_providers() -> tuple[Provider, ...]:
    """Return the providers that are installed: ``--mode minimal`` installs those that the GPUs need."""
    found = []
    for name in _NAMES:
        package = f"{__name__}_{name}"
        if importlib.util.find_spec(package) is None:
            continue
        module = importlib.import_module(package)
        folder = Path(module.get_jit_cache_dir())
        modules = tuple(sorted(path.name for path in folder.iterdir() if (path / f"{path.name}.so").is_file()))
        distribution = f"flashinfer-jit-cache-{name}"
        found.append(Provider(name, distribution, module.__version__, str(folder), (name,), modules))
    return tuple(found)
