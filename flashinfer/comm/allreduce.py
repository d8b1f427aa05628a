# SPDX-License-Identifier: Apache-2.0
"""All-reduce fused with what follows it in a layer: residual, RMS norm, quantisation."""

from __future__ import annotations

from typing import Optional, Union

import torch

from .._runtime.codegen_wrapper import compiler, is_traced
from .._runtime.errors import ArgumentError
from ..api_logging import flashinfer_api
from ..trace.templates.comm import allreduce_fusion_trace
from .reduce.call import run
from .reduce.op import launch_traced
from .workspace_base import AllReduceFusionWorkspace

__all__ = ["allreduce_fusion"]

_OP = "allreduce_fusion"


@flashinfer_api(trace=allreduce_fusion_trace)
def allreduce_fusion(
    input: torch.Tensor,
    workspace: AllReduceFusionWorkspace,
    pattern: int,
    launch_with_pdl: bool = False,
    trigger_completion_at_end: bool = True,
    output: Optional[torch.Tensor] = None,
    residual_out: Optional[torch.Tensor] = None,
    norm_out: Optional[torch.Tensor] = None,
    quant_out: Optional[torch.Tensor] = None,
    scale_out: Optional[torch.Tensor] = None,
    residual_in: Optional[torch.Tensor] = None,
    rms_gamma: Optional[torch.Tensor] = None,
    rms_eps: float = 1e-6,
    scale_factor: Union[torch.Tensor, float, None] = None,
    layout_code: Optional[int] = None,
    use_oneshot: Optional[bool] = None,
    fp32_acc: bool = False,
    moe_reduction_device_num_experts: Optional[int] = None,
    moe_reduction_scale_input: Optional[torch.Tensor] = None,
    moe_reduction_active_experts_token_input: Optional[torch.Tensor] = None,
    moe_reduction_token_input: Optional[torch.Tensor] = None,
    expanded_idx_to_permuted_idx: Optional[torch.Tensor] = None,
    expert_scale_factor: Optional[torch.Tensor] = None,
    shared_expert_output: Optional[torch.Tensor] = None,
    block_quant_group_size: Optional[int] = None,
    weight_bias: float = 0.0,
    *,
    moe_finalize_backend: str = "trtllm",
) -> torch.Tensor:
    r"""Sum ``input`` over the ranks of a workspace, and run what follows in a layer on the sum.

    ``S = round(sum of the inputs, in rank order)``; ``R = round(S + residual_in)``;
    ``N = round(R * rsqrt(mean(R^2) + rms_eps) * (weight_bias + rms_gamma))``; sums and products in float32, each
    ``round`` to the dtype of ``input``. Every rank gets the same bits. Every rank of the workspace calls with the same
    shape, dtype and pattern; an element of -0.0 counts as +0.0.

    Parameters
    ----------
    input : torch.Tensor
        ``(tokens, hidden)`` float16, bfloat16 or float32, contiguous; rows of a multiple of 16 bytes.
    workspace : AllReduceFusionWorkspace
        Of :func:`create_allreduce_fusion_workspace`.
    pattern : int
        A number of :class:`AllReduceFusionPattern`, 0 to 11.
    launch_with_pdl, trigger_completion_at_end : bool
        Programmatic dependent launch. With ``trigger_completion_at_end=False`` the next kernel may start early; its
        dependency wait still waits for the results.
    output : torch.Tensor, optional
        ``S``; pattern 0 allocates it when it is None.
    residual_in, residual_out, rms_gamma, norm_out
        Like ``input``, but ``rms_gamma`` ``(hidden,)``. Required by the patterns that use them. ``norm_out`` may be
        ``input``, and ``residual_out`` may be ``residual_in`` or ``input``.
    quant_out : torch.Tensor, optional
        float8_e4m3fn, the shape of ``input``: ``N / scale_factor`` (2 and 4), or ``N`` over the scale of its row. FP4
        (3 and 5, and 6 and 7 when it is given): ``tokens * hidden / 2`` bytes of e2m1, the even column in the low
        nibble, ``N * scale_factor / s`` with a scale ``s`` of 16 columns; float16 and bfloat16 only.
    scale_out : torch.Tensor, optional
        ``(tokens, 1)`` float32: ``amax / 448`` of each row, patterns 10 and 11; of 8 and 9 see below. FP4: the bytes of
        ``s = e4m3(scale_factor * amax / 6)`` in the order of ``layout_code``; rows of padding are not written.
    scale_factor : torch.Tensor or float, optional
        One float32, read by the kernel; 1 when None.
    layout_code : int, optional
        Order of FP4's scales, a number of :class:`QuantizationSFLayout`; default: tiles of 128 x 4.
    use_oneshot : bool, optional
        Whether every rank sends its rows to every rank, or each sums and sends a part (two-shot, more tokens than
        ranks); default: whichever takes less time for the bytes and ranks. Results have the same values.
    fp32_acc
        Accepted; sums are always float32.
    moe_reduction_device_num_experts : int, optional
        Of pattern 6; the number of rows in ``moe_reduction_scale_input`` where None.
    moe_reduction_scale_input, moe_reduction_active_experts_token_input, moe_reduction_token_input
        Pattern 6 sums ``sum_e scale[e, t] * active[e, t] + token[t]`` over the ranks: float32 ``(experts, tokens)``,
        rows ``(experts, tokens, hidden)`` and ``(tokens, hidden)`` like ``residual_in``. ``input`` is not read.
    expanded_idx_to_permuted_idx, expert_scale_factor, shared_expert_output : torch.Tensor, optional
        Pattern 7 sums ``sum_k expert_scale[t, k] * input[index[t, k]] + shared[t]`` over the ranks: int32
        ``(tokens, top_k)``, negative for nothing; ``(tokens, top_k)`` float32 or like ``input``, 1 where None; optional
        ``(tokens, hidden)``.
    moe_finalize_backend : str
        ``"trtllm"``; ``"cake"`` needs a Blackwell GPU.
    block_quant_group_size : int, optional
        Patterns 8 and 9: columns that share a scale, 16, 32, 64 or 128. The scales are powers of two, of which
        ``scale_out`` int32 ``(tokens, ceil(groups / 4))`` with strides ``(1, round_up(tokens, 4))`` has the exponents.
    rms_eps, weight_bias : float
        Constants of the formula; Gemma has ``weight_bias=1``.

    Returns
    -------
    torch.Tensor
        ``norm_out`` if given, else ``quant_out``, else ``output``.

    Examples
    --------
    Two ranks that are threads of this process:

    >>> from flashinfer.comm.local_ranks import call_on_ranks
    >>> def work(comm):
    ...     group = {"world_size": comm.Get_size(), "rank": comm.Get_rank(), "comm_backend": comm, "device": "cpu"}
    ...     sizes = {"max_token_num": 4, "hidden_dim": 64, "dtype": torch.float32}
    ...     workspace = flashinfer.comm.create_allreduce_fusion_workspace(**group, **sizes)
    ...     total = flashinfer.comm.allreduce_fusion(torch.full((1, 64), 1.0 + comm.Get_rank()), workspace, 0)
    ...     workspace.destroy()
    ...     return total[0, 0].item()
    >>> call_on_ranks(2, work)
    [3.0, 3.0]
    """
    if moe_finalize_backend != "trtllm":
        raise ArgumentError(f"{_OP}: moe_finalize_backend must be 'trtllm' on this GPU, got {moe_finalize_backend!r}")
    call = launch_traced if is_traced() or compiler._is_compiling_flag else run
    return call(
        input,
        workspace,
        pattern,
        launch_with_pdl,
        trigger_completion_at_end,
        output,
        residual_out,
        norm_out,
        quant_out,
        scale_out,
        residual_in,
        rms_gamma,
        rms_eps,
        scale_factor,
        layout_code,
        use_oneshot,
        moe_reduction_scale_input,
        moe_reduction_active_experts_token_input,
        moe_reduction_token_input,
        expanded_idx_to_permuted_idx,
        expert_scale_factor,
        shared_expert_output,
        block_quant_group_size,
        weight_bias,
    )
