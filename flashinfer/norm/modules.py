# SPDX-License-Identifier: Apache-2.0
"""Compiled modules of the family, and helpers that its functions share."""

from __future__ import annotations

import warnings
from typing import Union

import torch

from .._runtime.checks import check_tensors
from .._runtime.errors import ArgumentError
from ..jit.codegen import module_cache
from ..jit.norm import gen_dit_layernorm_module, gen_norm_module, gen_qk_rmsnorm_rope_module

get_norm_module = module_cache(gen_norm_module)
get_dit_layernorm_module = module_cache(gen_dit_layernorm_module)
get_qk_rmsnorm_rope_module = module_cache(gen_qk_rmsnorm_rope_module)


def scale_tensor(op: str, scale: Union[torch.Tensor, float], input: torch.Tensor) -> torch.Tensor:
    """Convert a quantisation scale to a one-element float32 tensor on the input's device."""
    if not isinstance(scale, torch.Tensor):
        if not isinstance(scale, (int, float)):
            kind = type(scale).__name__
            raise ArgumentError(f"{op}: scale must be a scalar tensor of float32, got a {kind}")
        if not torch.compiler.is_compiling():  # torch.compile cannot trace a warning
            warnings.warn(
                f"{op}: a float scale is deprecated, pass a float32 tensor of one element", FutureWarning, stacklevel=3
            )
        return torch.tensor([scale], dtype=torch.float32, device=input.device)
    if scale.shape not in ((), (1,)):
        raise ArgumentError(f"{op}: scale must be a scalar tensor (shape () or (1,)), got shape {tuple(scale.shape)}")
    try:
        return scale.to(device=input.device, dtype=torch.float32)
    except (AttributeError, NotImplementedError) as error:  # input is no tensor, or the scale is on the meta device
        check_tensors(op, input=input)
        raise ArgumentError(f"{op}: scale must be on the CPU or a CUDA device, got {scale.device}") from error
