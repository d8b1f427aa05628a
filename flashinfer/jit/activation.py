# SPDX-License-Identifier: Apache-2.0
"""The module of the activation family: one per backend; activations and element types are dispatched inside."""

from __future__ import annotations

from typing import Iterator

from .._runtime.errors import ArgumentError
from .codegen import render, stage
from .core import JitSpec

__all__ = ["gen_act_and_mul_module", "gen_activation_module", "gen_activation_modules", "get_act_and_mul_cu_str"]

_NAMES = ("silu", "gelu", "gelu_tanh")


def gen_activation_module(backend: str = "cuda") -> JitSpec:
    """Describe the module of the gated activations and ``swiglu``."""
    dtypes = ("float16_t", "bfloat16_t", "float")  # in one unit: headers take longer than the kernels of a type
    return stage("activation", backend=backend, kernels={"kernels": {"dtypes": dtypes}})


def gen_act_and_mul_module(act_func_name: str, backend: str = "cuda") -> JitSpec:
    """Return the module with ``<act_func_name>_and_mul``: "silu", "gelu" or "gelu_tanh". One module has all three."""
    if act_func_name not in _NAMES:
        raise ArgumentError(
            f"gen_act_and_mul_module: act_func_name must be one of {', '.join(_NAMES)}, got {act_func_name!r}"
        )
    return gen_activation_module(backend)


def get_act_and_mul_cu_str(act_func_name: str, act_func_def: str) -> str:
    """Return the CUDA source of a module with ``<act_func_name>_and_mul(out, input, enable_pdl)`` for any activation.

    The source is for :func:`flashinfer.jit.gen_jit_spec`. It has our kernel of gated activations, which reads the first
    half of each row through the activation and multiplies it by the second.

    Parameters
    ----------
    act_func_name : str
        Name of the function that ``act_func_def`` defines, such as ``"relu"``.
    act_func_def : str
        CUDA source of it: ``__device__ __forceinline__ float relu(const float& x) { return x > 0.f ? x : 0.f; }``.
    """
    if not act_func_name.isidentifier() or f"{act_func_name}(" not in act_func_def.replace(" ", ""):
        raise ArgumentError(
            "get_act_and_mul_cu_str: act_func_name must be the function that act_func_def defines, got "
            f"{act_func_name!r}"
        )
    return render("activation_custom.jinja", name=act_func_name, definition=act_func_def)


def gen_activation_modules(backend: str = "cuda") -> Iterator[JitSpec]:
    """Yield the modules that AOT pre-builds and that a warm-up of the family loads."""
    yield gen_activation_module(backend)
