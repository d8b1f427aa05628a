# SPDX-License-Identifier: Apache-2.0
"""Compiled attention modules, built and loaded on first use.

Published callers pass the generator's arguments by position and expect CUDA; ``device="cpu"`` is an extension of this
package.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, Callable

import torch

from ..jit import attention as jit_attention

__all__ = [
    "get_batch_decode_jit_module",
    "get_batch_decode_mla_module",
    "get_batch_decode_module",
    "get_batch_fused_module",
    "get_batch_prefill_jit_module",
    "get_batch_prefill_module",
    "get_customize_batch_decode_module",
    "get_customize_batch_prefill_module",
    "get_single_decode_module",
    "get_single_prefill_module",
    "make_hashable_cache",
]

_jit: Any = jit_attention  # Any: positional arguments are forwarded unchecked


def _family(name: str) -> Any:
    """Return the package ``flashinfer.NAME`` that publishes the generator; callers patch the generator there."""
    return importlib.import_module(f"flashinfer.{name}")


def make_hashable_cache(func: Callable[..., Any]) -> Callable[..., Any]:
    """Cache results as ``functools.cache`` does, for functions whose arguments may be lists."""

    def hashable(value: Any) -> Any:
        return tuple(map(hashable, value)) if isinstance(value, (list, tuple)) else value

    cached = functools.cache(func)

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return cached(*map(hashable, args), **{name: hashable(value) for name, value in kwargs.items()})

    return wrapper


@functools.cache
def get_single_decode_module(*args: Any, device: str = "cuda") -> Any:
    return _family("decode").gen_single_decode_module(*args, device=device).build_and_load()


@functools.cache
def get_single_prefill_module(backend: str, *args: Any, device: str = "cuda") -> Any:
    return _family("prefill").gen_single_prefill_module(backend, *args, device=device).build_and_load()


@functools.cache
def get_batch_decode_module(*args: Any, device: str = "cuda") -> Any:
    return _family("decode").gen_batch_decode_module(*args, device=device).build_and_load()


@functools.cache
def get_batch_decode_mla_module(*args: Any, device: str = "cuda") -> Any:
    return jit_attention.gen_batch_decode_mla_module(*args, device=device).build_and_load()  # type: ignore[misc]


@functools.cache
def get_batch_fused_module(*args: Any) -> Any:
    return _jit.gen_batch_fused_module(*args).build_and_load()


@functools.cache
def get_batch_prefill_module(backend: str, *args: Any, device: str = "cuda") -> Any:
    return _family("prefill").gen_batch_prefill_module(backend, *args, device=device).build_and_load()


@make_hashable_cache
def get_customize_batch_decode_module(*args: Any, **kwargs: Any) -> Any:
    return _jit.gen_customize_batch_decode_module(*args, **kwargs).build_and_load()


@make_hashable_cache
def get_customize_batch_prefill_module(backend: str, *args: Any, **kwargs: Any) -> Any:
    return _jit.gen_customize_batch_prefill_module(backend, *args, **kwargs).build_and_load()


@functools.cache
def get_batch_decode_jit_module(module_name: str, jit_module: Any) -> Any:
    """Return the module unchanged: no adapter is needed here. ``module_name`` exists for published callers."""
    return jit_module


@functools.cache
def get_batch_prefill_jit_module(module_name: str, jit_module: Any) -> Any:
    """Return the module unchanged, like :func:`get_batch_decode_jit_module`."""
    return jit_module


def device_kind(device: torch.device) -> str:
    """Return the kind of modules that serve a device: "cpu" or "cuda"."""
    return "cpu" if device.type == "cpu" else "cuda"
