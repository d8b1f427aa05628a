# SPDX-License-Identifier: Apache-2.0
"""Pre-built modules from several distributions, one for each CUDA architecture, and calls that choose among them.

``flashinfer_jit_cache.get_jit_cache_providers()`` names them: ``flashinfer-jit-cache-sm90a`` and so on, each with a
folder like that of ``FLASHINFER_AOT_DIR`` (:mod:`.prebuilt`). A module is taken from the provider whose code suits a
target best; on a machine with several targets it may come from several, and each call goes to the library of its
device.
"""

from __future__ import annotations

import functools
import importlib
import logging
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, Optional

import torch

from .._runtime.probes import probes
from . import env as jit_env
from ._cuda_architecture import cuda_binary_target_compatibility_score, parse_cuda_architecture

__all__ = ["ModuleByDevice", "aot_providers", "best_artifacts"]

logger = logging.getLogger("flashinfer.jit")

_COMPANION = "flashinfer_jit_cache"


def aot_providers() -> tuple[jit_env.AOTProvider, ...]:
    """Return the providers that the companion package names and that are of our release, by their name."""
    version = jit_env.companion_version(_COMPANION)
    if version is None or not jit_env.has_companion(_COMPANION):
        return ()
    listed = getattr(importlib.import_module(_COMPANION), "get_jit_cache_providers", None)
    if listed is None:  # one package with all modules, as up to 0.6.18
        return ()
    found = []
    for given in listed():
        reason = _refusal(given, version)
        if reason is None:
            found.append(_provider(given))
        else:
            _warn_provider(str(getattr(given, "distribution", given)), reason)
    return tuple(sorted(found, key=lambda provider: provider.provider_id))


def _provider(given: Any) -> jit_env.AOTProvider:
    return jit_env.AOTProvider(
        str(given.provider_id),
        str(given.distribution),
        str(given.version),
        Path(given.jit_cache_dir),
        frozenset(given.cuda_architectures),
        frozenset(given.modules),
    )


def _refusal(given: Any, shim_version: str) -> Optional[str]:
    """Return the reason not to take modules from a provider; None if there is none."""
    try:
        provider = _provider(given)
        for name in provider.cuda_architectures:
            parse_cuda_architecture(name)
    except (AttributeError, TypeError, ValueError) as error:
        return f"it does not describe a provider ({error})"
    if not jit_env.accepts_companion(provider.version):
        return f"its version is {provider.version}, and flashinfer is {jit_env.__version__}"
    if jit_env.checks_versions() and provider.version != shim_version:
        return f"its version is {provider.version}, and that of {_COMPANION} is {shim_version}"
    if not (provider.jit_cache_dir / "index.json").is_file():
        return f"{provider.jit_cache_dir} has no index.json, so its modules are not of this package"
    return None


@functools.cache
def _warn_provider(distribution: str, reason: str) -> None:
    logger.warning("%s is ignored: %s", distribution, reason)


def _best(
    module: str, target: str, providers: Iterable[jit_env.AOTProvider]
) -> Iterator[tuple[tuple[int, int], str, jit_env.AOTProvider]]:
    for provider in providers:
        if module not in provider.modules or not _library(provider, module).is_file():
            continue
        for name in provider.cuda_architectures:
            score = cuda_binary_target_compatibility_score(name, target)
            if score is not None:
                yield score, provider.provider_id, provider


def _library(provider: jit_env.AOTProvider, module: str) -> Path:
    return provider.jit_cache_dir / module / f"{module}.so"


def best_artifacts(module: str, targets: Iterable[str]) -> tuple[jit_env.AOTArtifact, ...]:
    """Return a library for each target such as ``sm90a`` that has one, without duplicates, by provider."""
    known, chosen = aot_providers(), {}
    for target in targets:
        fitting = sorted(_best(module, target, known), key=lambda one: one[:2])
        if fitting:
            provider = fitting[-1][2]
            chosen[provider.provider_id] = jit_env.AOTArtifact(
                provider.provider_id, _library(provider, module), provider.cuda_architectures
            )
    return tuple(chosen[name] for name in sorted(chosen))


def _devices(arguments: Iterable[Any]) -> Iterator[torch.device]:
    for value in arguments:
        if isinstance(value, torch.Tensor):
            if value.is_cuda:
                yield value.device
        elif isinstance(value, (tuple, list)):
            yield from _devices(value)


class ModuleByDevice:
    """Libraries of one module, each for some architectures; a call goes to the one of its CUDA tensors' device.

    Without a CUDA tensor, that is the current device.
    """

    def __init__(self, modules: Iterable[tuple[frozenset[str], Any]]) -> None:
        self._modules = tuple(modules)
        self._of_index: dict[int, Any] = {}

    def _module_for(self, device: torch.device) -> Any:
        index = torch.cuda.current_device() if device.index is None else device.index
        if index not in self._of_index:
            major, minor = probes.get_compute_capability(torch.device("cuda", index))
            scores = []
            for place, (names, module) in enumerate(self._modules):
                # Code with suffix a is for one chip, whose name has it too.
                of_chip = (cuda_binary_target_compatibility_score(name, f"sm{major}{minor}a") for name in names)
                scores += [(score, -place, module) for score in of_chip if score is not None]
            if not scores:
                raise RuntimeError(f"no pre-built library of the module has code for SM{major}{minor}")
            self._of_index[index] = max(scores, key=lambda one: one[:2])[2]
        return self._of_index[index]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        if not any(hasattr(module, name) for _, module in self._modules):
            raise AttributeError(f"no pre-built library of the module has a function {name!r}")

        def call(*arguments: Any) -> Any:
            found = dict.fromkeys(_devices(arguments))
            device = next(iter(found), torch.device("cuda"))
            return getattr(self._module_for(device), name)(*arguments)

        setattr(self, name, call)
        return call
