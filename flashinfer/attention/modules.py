# SPDX-License-Identifier: Apache-2.0
"""The compiled modules of attention, built and loaded on first use.

Published callers pass the generator's arguments by position and mean CUDA; ``device="cpu"`` is ours.
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

_jit: Any = jit_attention  # typed loosely: positional arguments are passed on as they come


def _family(name: str) -> Any:
    """The family whose attribute the generator is: callers replace it there."""
    return importlib.import_module(f"flashinfer.{name}")


def make_hashable_cache(func: Callable[..., Any]) -> Callable[..., Any]:
    """``functools.cache`` for functions that take lists."""

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
    """The module itself: it needs no adapter here. ``module_name`` is for callers of published releases."""
    return jit_module


@functools.cache
def get_batch_prefill_jit_module(module_name: str, jit_module: Any) -> Any:
    """As :func:`get_batch_decode_jit_module`."""
    return jit_module


def device_kind(device: torch.device) -> str:
    """Which modules serve a device."""
    return "cpu" if device.type == "cpu" else "cuda"
