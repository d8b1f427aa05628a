# SPDX-License-Identifier: Apache-2.0
"""Size of the buffer that a call of ``cutlass_fused_moe`` needs between its stages."""

from __future__ import annotations

from typing import Optional, Union

import torch

from ..._runtime.dispatch import NativeFunction
from ..._runtime.errors import ArgumentError
from ...jit.fused_moe.cutlass import get_fused_moe_module
from ...tllm_enums import ActivationType, normalize_activation_type
from .call import sm90_kind
from .faults import refuse_modes, refuse_ranks
from .formats import format_of

__all__ = ["cutlass_fused_moe_workspace_size"]

_OP = "cutlass_fused_moe_workspace_size"
_native_size = NativeFunction(get_fused_moe_module, "fused_moe_workspace_size")


def _device_of(device: Optional[Union[torch.device, str, int]]) -> torch.device:
    """Return a CUDA device with its index, or the CPU. Default: the current CUDA device, else the CPU."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    made = torch.device(device)
    if made.type not in ("cuda", "cpu"):
        raise ArgumentError(f"{_OP}: device must be a CUDA device or the CPU, got {made}")
    return torch.device("cuda", torch.cuda.current_device()) if made.type == "cuda" and made.index is None else made


def cutlass_fused_moe_workspace_size(
    max_num_tokens: int,
    hidden_size: int,
    intermediate_size: int,
    num_experts_total: int,
    top_k: int,
    *,
    x_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    output_dtype: torch.dtype = torch.bfloat16,
    activation_type: Union[int, ActivationType] = ActivationType.Swiglu,
    tp_size: int = 1,
    tp_rank: int = 0,
    ep_size: int = 1,
    ep_rank: int = 0,
    min_latency_mode: bool = False,
    use_deepseek_fp8_block_scale: bool = False,
    use_w4_group_scaling: bool = False,
    use_mxfp8_act_scaling: bool = False,
    use_fused_finalize: bool = True,
    use_packed_weights: bool = False,
    use_wfp4afp8_humming: bool = False,
    device: Optional[Union[torch.device, str, int]] = None,
) -> int:
    """Bytes of ``workspace_buffer`` for calls of ``cutlass_fused_moe`` with at most so many tokens.

    Parameters
    ----------
    max_num_tokens, hidden_size, num_experts_total, top_k : int
        Sizes of the layer; experts of all ranks.
    intermediate_size : int
        Columns of this rank's fc2 weights; for four-bit weights the number of codes.
    x_dtype, weight_dtype, output_dtype : torch.dtype
        dtypes of ``input``, of the weights and of the output.
    activation_type : Union[int, ActivationType]
        Whether fc1 has two halves.
    tp_size, tp_rank, ep_size, ep_rank : int
        Groups and ranks. The experts are divided by ``ep_size``.
    min_latency_mode, use_deepseek_fp8_block_scale, use_w4_group_scaling, use_mxfp8_act_scaling : bool
        As in the call.
    use_fused_finalize, use_packed_weights, use_wfp4afp8_humming : bool
        As in the call.
    device : Optional[Union[torch.device, str, int]]
        Where the call runs. Default: the current CUDA device; the CPU on a machine without one.

    Returns
    -------
    int
        Bytes; a buffer with one byte less is refused.
    """
    sizes = {
        "max_num_tokens": max_num_tokens,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_experts_total": num_experts_total,
        "top_k": top_k,
    }
    for name, size in sizes.items():
        if size < 1:
            raise ArgumentError(f"{_OP}: {name} must be at least 1, got {size}")
    refuse_modes(min_latency_mode, use_mxfp8_act_scaling, 1, 0, False)
    refuse_ranks(_OP, tp_size, tp_rank, ep_size, ep_rank)
    if num_experts_total % ep_size:
        raise ArgumentError(
            f"{_OP}: num_experts_total must be divisible by ep_size = {ep_size}, got {num_experts_total}"
        )
    where = _device_of(device)
    flags = (use_deepseek_fp8_block_scale, use_w4_group_scaling, use_packed_weights, use_wfp4afp8_humming)
    format = format_of(weight_dtype, *flags)
    is_cuda = where.type == "cuda"
    is_sm90 = is_cuda and sm90_kind(where.index, x_dtype, format) is not None
    activation = int(normalize_activation_type(activation_type))
    return _native_size[is_cuda](
        *(max_num_tokens, top_k, hidden_size, intermediate_size, num_experts_total // ep_size),
        *(format, activation, is_sm90),
    )
