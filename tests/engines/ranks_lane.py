# SPDX-License-Identifier: Apache-2.0
"""Communication as the engines start and call it, on two CPU processes: all-reduce with norm, experts' all-to-all.

What asks for ranks answers with those of the two processes; what asks whether the platform is CUDA is told that it is.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from .ranks import on_ranks
from .table import case

F64 = torch.float64


def _inputs(size: int, tokens: int, hidden: int) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Return the parts of all ranks, a residual that they share, and a weight; the same on every rank."""
    torch.manual_seed(tokens)
    parts = [torch.randn(tokens, hidden).bfloat16() for _ in range(size)]
    return parts, torch.randn(tokens, hidden).bfloat16(), torch.randn(hidden).bfloat16()


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float, bias: float = 0.0) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (weight.to(F64) + bias)


def _close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float = 3e-2) -> None:
    torch.testing.assert_close(found.to(F64), wanted.to(F64), rtol=tolerance, atol=tolerance)


def vllm_allreduce(group: Any, rank: int) -> None:
    from vllm.distributed.device_communicators import flashinfer_all_reduce as module
    from vllm.platforms import current_platform

    most = staticmethod(lambda: {2: 1})  # MiB by number of ranks
    with (
        mock.patch.object(type(current_platform), "is_cuda", lambda self: True),
        mock.patch.object(module.PassConfig, "default_fi_allreduce_fusion_max_size_mb", most),
    ):
        reducer = module.FlashInferAllReduce(group, "cpu")
    assert not reducer.disabled
    for tokens in (1, 7, 130):
        parts, _, _ = _inputs(2, tokens, 256)
        assert reducer._ensure_workspace(256, torch.bfloat16), "vLLM could not create the workspace"
        _close(reducer.all_reduce(parts[rank]), sum(p.to(F64) for p in parts))
    module.checkpoint_prepare_fi_ar_workspaces(group, skip_unsupported=True)
    module.checkpoint_restore_fi_ar_workspaces(group, skip_unsupported=True)
    parts, _, _ = _inputs(2, 5, 256)
    _close(reducer.all_reduce(parts[rank]), sum(p.to(F64) for p in parts))
    reducer.destroy()


@case(
    "vllm",
    "all-reduce of two ranks: FlashInferAllReduce, suspend and resume",
    "comm.create_allreduce_fusion_workspace, allreduce_fusion",
)
def allreduce() -> None:
    on_ranks(vllm_allreduce)


def vllm_allreduce_norm(group: Any, rank: int) -> None:
    import vllm._custom_ops  # noqa: F401  it describes operators that are there

    from .stubs import Anything

    torch.ops._C = Anything()  # vLLM's compiled operators, whose names its pass reads to find them in a graph
    from vllm.compilation.passes.fusion import allreduce_rms_fusion as module

    platform = mock.patch.object(module, "get_tensor_model_parallel_rank", lambda: rank)
    ours = mock.patch.object(module, "get_tp_group", lambda: SimpleNamespace(cpu_group=group))
    patterns = module.flashinfer_comm.AllReduceFusionPattern
    with platform, ours:
        for tokens, bias in ((1, 0.0), (7, 1.0), (130, 0.0)):
            parts, residual, weight = _inputs(2, tokens, 256)
            total = sum(p.to(F64) for p in parts) + residual.to(F64)
            common = {
                "rms_gamma": weight, "rms_eps": 1e-5, "world_size": 2, "launch_with_pdl": True, "fp32_acc": True,
                "max_token_num": 512, "weight_bias": bias,
            }  # fmt: skip
            pattern = patterns.kARResidualRMSNorm
            x, left, out = parts[rank].clone(), residual.clone(), torch.empty_like(residual)
            module.call_trtllm_fused_allreduce_norm(x, left, pattern_code=pattern, norm_out=out, **common)
            _close(out, _norm(total, weight, 1e-5, bias), 5e-2)
            _close(x, total)  # the sum takes the place of the input
            assert torch.equal(left, residual)
            x, left = parts[rank].clone(), residual.clone()
            module.call_trtllm_fused_allreduce_norm(x, left, pattern_code=pattern, **common)
            _close(x, _norm(total, weight, 1e-5, bias), 5e-2)  # both results take the place of an input
            _close(left, total)
            x, left, out = parts[rank].clone(), residual.clone(), torch.empty_like(residual)
            quantized, scale = torch.empty(tokens, 256, dtype=torch.float8_e4m3fn), torch.tensor([0.05])
            fp8 = patterns.kARResidualRMSNormFP8Quant
            module.call_trtllm_fused_allreduce_norm(
                x, left, pattern_code=fp8, norm_out=out, quant_out=quantized, scale_factor=scale, **common
            )
            wanted = (_norm(total, weight, 1e-5, bias) / 0.05).clamp(-448, 448)
            torch.testing.assert_close(quantized.to(F64), wanted, rtol=0.15, atol=1.0)


@case("vllm", "all-reduce, residual and norm (and e4m3) of the fusion pass, in place", "comm.allreduce_fusion")
def allreduce_norm() -> None:
    on_ranks(vllm_allreduce_norm)


def sglang_allreduce_norm(group: Any, rank: int) -> None:
    from .sglang_lane import backend_module

    backend_module("flashinfer_backend")  # SGLang then takes this package to be there
    from .sglang_layers import for_cuda

    module = for_cuda("sglang.srt.layers.flashinfer_comm_fusion")
    coordinator = SimpleNamespace(device_group=group, cpu_group=group, world_size=2, rank_in_group=rank)
    ranks = SimpleNamespace(
        attn_tp_size=2, attn_tp_rank=rank, attn_tp_group=coordinator, tp_group=coordinator, nnodes=1
    )
    resources = SimpleNamespace(buffers={})
    values = {
        "get_parallel": lambda: ranks,
        "resolve_flashinfer_allreduce_fusion_backend": lambda: "trtllm",
        "uses_cutedsl_ar_fusion": lambda: False,
        "in_the_same_node_as": lambda *args, **kwargs: [True, True],
        "_preflight_check_workspace_memory": lambda **kwargs: True,
        "get_resources": lambda: resources,
    }
    with contextlib.ExitStack() as stack:
        for name, value in values.items():
            stack.enter_context(mock.patch.object(module, name, value))
        fused = module.flashinfer_allreduce_residual_rmsnorm
        for tokens, oneshot in ((1, None), (7, True), (130, False), (2048, None)):
            parts, residual, weight = _inputs(2, tokens, 256)
            total = sum(p.to(F64) for p in parts) + residual.to(F64)
            out, left = fused(parts[rank].clone(), residual, weight, 1e-6, use_oneshot=oneshot)
            assert out is not None, "SGLang turned the fusion off"
            _close(left, total)
            _close(out, _norm(total, weight, 1e-6), 5e-2)
            key = {"expected_world_size": 2, "expected_group_key": (group, group), "use_attn_tp_group": True}
            assert module.can_use_flashinfer_allreduce(parts[rank], **key)
            _close(module.flashinfer_allreduce(parts[rank], use_attn_tp_group=True), total - residual.to(F64))
        manager = module._get_workspace_manager(True)
        assert manager.backend == "trtllm" and manager._workspace_size_check_kwarg
        manager.cleanup()


@case(
    "sglang",
    "all-reduce, residual and norm: workspace manager, backend trtllm",
    "comm.create_allreduce_fusion_workspace, allreduce_fusion",
)
def sglang_allreduce() -> None:
    on_ranks(sglang_allreduce_norm)


def _quantize_rows(x: torch.Tensor, scale: Any, dtype: Any, *args: Any, **more: Any) -> tuple[torch.Tensor, Any]:
    """Do what vLLM's kernels do: rows as they are, or e4m3 by blocks of 128 columns with float32 scales."""
    if dtype is None:
        return x, None
    blocks = x.float().unflatten(-1, (-1, 128))
    scale = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448
    return (blocks / scale).to(torch.float8_e4m3fn).flatten(-2), scale[..., 0]


def vllm_one_sided(group: Any, rank: int) -> None:
    from vllm.distributed.device_communicators import all2all
    from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG, fp8_w8a8_moe_quant_config
    from vllm.model_executor.layers.fused_moe.prepare_finalize import flashinfer_nvlink_one_sided as module

    from flashinfer.fused_moe import QuantFormat

    experts, top_k, hidden, most = 8, 3, 256, 16
    manager = object.__new__(all2all.FlashInferNVLinkOneSidedManager)
    manager.cpu_group, manager.world_size, manager.rank = group, 2, rank
    manager.initialized, manager.communication, manager.top_k, manager.num_experts = False, None, 0, 0
    ours = SimpleNamespace(device_communicator=SimpleNamespace(all2all_manager=manager))
    quiet = SimpleNamespace(current_device_index=lambda: None, synchronize=lambda: None, empty_cache=lambda: None)
    lens = [5, 9]
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(module, "get_ep_group", lambda: ours))
        stack.enter_context(mock.patch.object(module, "get_local_sizes", lambda: lens))
        stack.enter_context(mock.patch.object(torch, "accelerator", quiet))
        for tokens_most in (8, most):  # the second layer wants more: vLLM replaces the communication
            layer = module.FlashInferNVLinkOneSidedPrepareAndFinalize(
                tokens_most, top_k, experts, hidden, dispatch_format=QuantFormat.BF16, num_dispatchers=2
            )
        blocks = torch.ones(experts // 2, 2, 2)
        fp8 = fp8_w8a8_moe_quant_config(blocks, blocks, block_shape=[128, 128])
        stack.enter_context(mock.patch.object(module, "moe_kernel_quantize_input", _quantize_rows))
        for step, quantisation in enumerate((FUSED_MOE_UNQUANTIZED_CONFIG, fp8, FUSED_MOE_UNQUANTIZED_CONFIG, fp8)):
            if quantisation is fp8:
                layer = module.FlashInferNVLinkOneSidedPrepareAndFinalize(
                    most, top_k, experts, hidden, dispatch_format=QuantFormat.DeepSeekFp8, num_dispatchers=2
                )
            torch.manual_seed(step)
            x = [torch.randn(n, hidden).bfloat16() for n in lens]
            weights, ids = zip(*(torch.randn(n, experts).softmax(-1).topk(top_k) for n in lens), strict=True)
            found, scale, _, found_ids, found_weights = layer.prepare(
                x[rank], weights[rank], ids[rank].int(), experts, None, False, quantisation
            )
            if quantisation is fp8:
                found = found.to(F64) * scale.to(F64).repeat_interleave(128, dim=-1)
            mine = (found_ids // (experts // 2)) == rank
            scales = torch.where(mine, found_weights, 0).to(F64) * (found_ids.to(F64) + 1)
            done = torch.where(mine.any(-1, keepdim=True), found.to(F64) * scales.sum(-1, keepdim=True), 0).bfloat16()
            out = torch.empty_like(x[rank])
            layer.finalize(out, done, weights[rank], ids[rank], False, None)
            wanted = x[rank].to(F64) * (weights[rank].to(F64) * (ids[rank].to(F64) + 1)).sum(-1, keepdim=True)
            _close(out, wanted, 4e-2 if quantisation is not fp8 else 8e-2)  # e4m3 rounds by one part in sixteen
        manager.cleanup()


@case(
    "vllm",
    "experts' all-to-all of two ranks, bf16 and e4m3 rows: FlashInferNVLinkOneSidedManager",
    "moe_ep.create_communication, dispatch, combine",
)
def one_sided() -> None:
    on_ranks(vllm_one_sided)


def sglang_all_to_all(group: Any, rank: int) -> None:
    from .sglang_lane import backend_module

    backend_module("flashinfer_backend")
    from sglang.srt.layers.moe.token_dispatcher import flashinfer as module
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    experts, top_k, hidden, lens = 8, 3, 256, [5, 9]
    assert module.use_flashinfer, "SGLang found no all-to-all in this package"
    bf16 = module.FlashinferA2ADispatchType.BF16
    values = {
        "get_flashinfer_a2a_dispatch_type": lambda: bf16,
        "StandardDispatcher": lambda config: SimpleNamespace(set_quant_config=lambda config: None),
        "flashinfer_a2a_max_dispatch_tokens_per_rank": lambda tokens: 16,
        "max_prefill_buffer_tokens": lambda: 16,
        "get_spec": lambda: SimpleNamespace(speculative_algorithm=None),
        "get_flags": lambda: SimpleNamespace(moe=SimpleNamespace(speculative_context=False)),
        "get_parallel": lambda: SimpleNamespace(attn_tp_size=1),
        "get_is_extend_in_batch": lambda: False,
        "get_dp_global_num_tokens": lambda: lens,
    }
    cutlass = SimpleNamespace(
        is_flashinfer_cutlass=lambda: True, is_deep_gemm=lambda: False, is_flashinfer_trtllm=lambda: False,
        is_flashinfer_trtllm_routed=lambda: False,
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        for name, value in values.items():
            stack.enter_context(mock.patch.object(module, name, value))
        stack.enter_context(mock.patch.object(torch.cuda, "device_count", lambda: 2))
        config = SimpleNamespace(runner_backend=cutlass)
        dispatcher = module.FlashinferDispatcher(group, top_k, experts, experts // 2, hidden, moe_runner_config=config)
        dispatcher.set_quant_config({})
        for step in range(3):
            torch.manual_seed(step)
            x = [torch.randn(n, hidden).bfloat16() for n in lens]
            weights, ids = zip(*(torch.randn(n, experts).softmax(-1).topk(top_k) for n in lens), strict=True)
            sent = dispatcher.dispatch(x[rank], StandardTopKOutput(weights[rank], ids[rank], None))
            found_ids, found_weights = sent.topk_output.topk_ids, sent.topk_output.topk_weights
            mine = (found_ids // (experts // 2)) == rank
            scales = torch.where(mine, found_weights, 0).to(F64) * (found_ids.to(F64) + 1)
            rows = sent.hidden_states.to(F64) * scales.sum(-1, keepdim=True)
            sent.moe_output.copy_(torch.where(mine.any(-1, keepdim=True), rows, 0))
            out = dispatcher.combine(module.FlashinferCombineInput(sent.moe_output))
            wanted = x[rank].to(F64) * (weights[rank].to(F64) * (ids[rank].to(F64) + 1)).sum(-1, keepdim=True)
            _close(out, wanted, 4e-2)


@case("sglang", "experts' all-to-all of two ranks: FlashinferDispatcher", "comm.MoeAlltoAll")
def sglang_dispatcher() -> None:
    on_ranks(sglang_all_to_all)


def sglang_context_parallel(group: Any, rank: int) -> None:
    from .sglang_lane import backend_module

    backend_module("flashinfer_backend")
    from sglang.srt.layers.dcp import comm as module

    ours = SimpleNamespace(world_size=2, rank_in_group=rank, device_group=group)
    ranks = SimpleNamespace(tp_size=2, pp_size=1, nnodes=1)
    torch.manual_seed(0)
    batch, heads, dim = 3, 8, 64
    outs = [torch.randn(batch, heads, dim).bfloat16() for _ in range(2)]
    lses = [torch.randn(batch, heads) for _ in range(2)]
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(module, "get_parallel", lambda: ranks))
        stack.enter_context(mock.patch.object(module, "is_fi_a2a_supported", lambda **kwargs: True))
        stack.enter_context(mock.patch.object(torch.cuda, "device_count", lambda: 2))
        module.init_fi_a2a_workspace(ours)
        for base_e in (True, False):
            out = module.dcp_a2a_lse_reduce(outs[rank], lses[rank], ours, base_e, comm_backend="fi_a2a")
            part = slice(rank * heads // 2, (rank + 1) * heads // 2)
            weights = torch.stack(lses).to(F64)[:, :, part] * (1.0 if base_e else torch.tensor(2.0).log().to(F64))
            wanted = (weights.softmax(0)[..., None] * torch.stack(outs).to(F64)[:, :, part]).sum(0)
            _close(out, wanted, 2e-2)
    assert dist.get_world_size() == 2


@case(
    "sglang",
    "decode with keys spread over two ranks: fi_a2a (it asks for Blackwell)",
    "comm.dcp_alltoall.decode_cp_a2a_*",
)
def sglang_dcp() -> None:
    on_ranks(sglang_context_parallel)


def vllm_beam_workspace(group: Any, rank: int) -> None:
    import vllm._custom_ops  # noqa: F401

    from flashinfer.comm.memory import probes

    from .stubs import Anything

    torch.ops._C = Anything()
    from vllm.models.beam.nvidia import allreduce as module

    quiet = SimpleNamespace(current_device_index=lambda: 0)
    with (
        mock.patch.object(module, "has_flashinfer", lambda: True),
        mock.patch.object(probes, "_has_attribute", lambda device, name: True),
        mock.patch.object(torch, "accelerator", quiet),
        mock.patch.object(torch.cuda, "get_device_capability", lambda device: (9, 0)),
    ):
        assert module.BeamAllReduceWorkspace.create(group, 4096, 64, torch.bfloat16) is None


@case("vllm", "all-reduce of Beam on Hopper with multicast: it does without", "comm.mnnvl.is_multicast_supported")
def beam_workspace() -> None:
    on_ranks(vllm_beam_workspace)


def vllm_two_sided(group: Any, rank: int) -> None:
    from vllm.distributed.device_communicators import all2all
    from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG
    from vllm.model_executor.layers.fused_moe.prepare_finalize import flashinfer_nvlink_two_sided as module

    experts, top_k, hidden, lens = 8, 3, 256, [5, 9]
    manager = object.__new__(all2all.FlashInferNVLinkTwoSidedManager)
    manager.cpu_group, manager.world_size, manager.rank, manager.initialized = group, 2, rank, False
    manager.workspace_tensor = manager.prepare_workspace_tensor = None
    ours = SimpleNamespace(device_communicator=SimpleNamespace(all2all_manager=manager))
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(all2all, "has_flashinfer_nvlink_two_sided", lambda: True))
        stack.enter_context(mock.patch.object(module, "get_ep_group", lambda: ours))
        stack.enter_context(mock.patch.object(module, "get_local_sizes", lambda: lens))
        layer = module.FlashInferNVLinkTwoSidedPrepareAndFinalize(2)
        for step in range(3):
            torch.manual_seed(step)
            x = [torch.randn(n, hidden).bfloat16() for n in lens]
            weights, ids = zip(*(torch.randn(n, experts).softmax(-1).topk(top_k) for n in lens), strict=True)
            found, _, _, found_ids, found_weights = layer.prepare(
                x[rank], weights[rank], ids[rank].int(), experts, None, False, FUSED_MOE_UNQUANTIZED_CONFIG
            )
            mine = (found_ids // (experts // 2)) == rank
            scales = torch.where(mine, found_weights, 0).to(F64) * (found_ids.to(F64) + 1)
            done = torch.where(mine.any(-1, keepdim=True), found.to(F64) * scales.sum(-1, keepdim=True), 0).bfloat16()
            out = torch.empty_like(x[rank])
            layer.finalize(out, done, weights[rank], ids[rank], False, None)
            wanted = x[rank].to(F64) * (weights[rank].to(F64) * (ids[rank].to(F64) + 1)).sum(-1, keepdim=True)
            _close(out, wanted, 4e-2)


@case("vllm", "experts' all-to-all of two ranks: FlashInferNVLinkTwoSidedManager", "comm.trtllm_alltoall.MnnvlMoe")
def two_sided() -> None:
    on_ranks(vllm_two_sided)
