# SPDX-License-Identifier: Apache-2.0
"""Modules of Mamba-2: one of the state update for each pair of types, one of the chunk scan."""

from __future__ import annotations

from typing import Iterator

import torch

from ..._runtime.errors import ArgumentError
from ..codegen import stage
from ..core import JitSpec

__all__ = ["gen_mamba_modules", "gen_ssd_module", "gen_ssu_module", "gen_ssu_replay_module"]

_STATES = {
    torch.float32: "float",
    torch.bfloat16: "flashinfer::bfloat16_t",
    torch.float16: "flashinfer::float16_t",
    torch.int16: "int16_t",
}
_INPUTS = {dtype: name for dtype, name in _STATES.items() if dtype != torch.int16}
_REPLAY_STATES = {dtype: name for dtype, name in _STATES.items() if dtype != torch.int16} | {
    torch.int8: "int8_t",
    torch.float8_e4m3fn: "flashinfer::float8_e4m3_t",
}
_WIDTHS = (64, 128, 256)  # numbers of a row of the state, at most: a unit each


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_dtypes(op: str, *checked: tuple[str, torch.dtype, dict[torch.dtype, str]]) -> None:
    for name, dtype, known in checked:
        if dtype not in known:
            kinds = ", ".join(map(_name_of, known))
            raise ArgumentError(f"{op}: {name} must be one of {kinds}, got {dtype}")


def gen_ssu_module(state_dtype: torch.dtype, input_dtype: torch.dtype, backend: str = "cuda") -> JitSpec:
    """Describe the module of ``selective_state_update`` for one dtype of states and one of tokens."""
    _check_dtypes("selective_state_update", ("state", state_dtype, _STATES), ("x", input_dtype, _INPUTS))
    types = {"state": _STATES[state_dtype], "input": _INPUTS[input_dtype]}
    return stage(
        "ssu",
        backend=backend,
        name=f"ssu_{_name_of(state_dtype)}_{_name_of(input_dtype)}",
        kernels={f"w{width}": {**types, "width": width} for width in _WIDTHS},
        config=types,
    )


def gen_ssu_replay_module(state_dtype: torch.dtype, input_dtype: torch.dtype, backend: str = "cuda") -> JitSpec:
    """Describe the module of ``checkpointing_ssu`` and ``replayssm_materialize`` for a pair of dtypes."""
    inputs = {dtype: name for dtype, name in _INPUTS.items() if dtype != torch.float32}
    _check_dtypes("checkpointing_ssu", ("state", state_dtype, _REPLAY_STATES), ("x", input_dtype, inputs))
    types = {"state": _REPLAY_STATES[state_dtype], "input": inputs[input_dtype]}
    return stage(
        "ssu_replay",
        backend=backend,
        name=f"ssu_replay_{_name_of(state_dtype)}_{_name_of(input_dtype)}",
        kernels={f"w{width}": {**types, "width": width} for width in _WIDTHS},
        config=types,
    )


def gen_ssd_module(backend: str = "cuda") -> JitSpec:
    """Describe the module of the chunk scan; the dtype of tokens is dispatched inside."""
    units: dict[str, dict[str, object]] = {"bounds": {"width": 0, "input": ""}}
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        units |= {f"{name}_w{width}": {"width": width, "input": _INPUTS[dtype]} for width in _WIDTHS}
        units |= {f"{name}_sm90": {"width": 90, "input": _INPUTS[dtype]}}
    return stage("ssd", backend=backend, kernels=units)


def gen_mamba_modules(backend: str = "cuda") -> Iterator[JitSpec]:
    """Yield the modules for tokens in bfloat16, which engines have."""
    for state_dtype in _STATES:
        yield gen_ssu_module(state_dtype, torch.bfloat16, backend)
    for state_dtype in _REPLAY_STATES:
        yield gen_ssu_replay_module(state_dtype, torch.bfloat16, backend)
    yield gen_ssd_module(backend)
