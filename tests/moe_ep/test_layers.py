# SPDX-License-Identifier: Apache-2.0
"""flashinfer.moe_ep with one rank: transports, kernels by name, layers in stages and in one kernel, the runtime."""

from __future__ import annotations

import dataclasses
import socket

import pytest
import torch

from flashinfer import moe_ep
from flashinfer.fused_moe import (
    BackendOptions,
    CutlassBf16Config,
    ExpertConfig,
    MoEConfig,
    MoEFinalizeConfig,
    QuantConfig,
    RoutingConfig,
)
from flashinfer.moe_ep import (
    BootstrapConfig,
    CombineInputParams,
    DispatchInputParams,
    EpAlgorithm,
    EpLayout,
    FleetParams,
    FusedMoeKernelConfig,
    HandleParams,
    IdentityConfig,
    LocalConfig,
    MegaConfig,
    MoEEpArchError,
    MoEEpConfigError,
    MoEEpFaultToleranceUnsupportedError,
    MoEEpLayer,
    MoEEpMegaLayer,
    MoEEpNotBuiltError,
    MoEEpSplitLayer,
    MoEEpTensors,
    MoEWeightPack,
    Sm90_Fp8_Fp8_Bf16_PushCuda_MegaMoeConfig,
    SplitConfig,
    SplitKernelContext,
    availability,
)
from flashinfer.moe_ep.algo_knobs import HandleAlgoKnobNumReceivedTokens, HandleAlgoKnobTopKWeights
from flashinfer.moe_ep.core.comm import fleet as fleets
from flashinfer.moe_ep.core.kernel import registry

E, K, H, I, T, CAPACITY = 8, 2, 128, 64, 13, 16
ONE = BootstrapConfig(1, 0)
LAYOUTS = {
    "by expert": (EpAlgorithm.LOW_LATENCY, EpLayout.EXPERT_MAJOR),
    "by rank": (EpAlgorithm.LOW_LATENCY, EpLayout.RANK_MAJOR),
    "many": (EpAlgorithm.HIGH_THROUGHPUT, EpLayout.EXPERT_MAJOR),
}


def params(layout: str = "by expert", hidden: int = H) -> FleetParams:
    algorithm, order = LAYOUTS[layout]
    return FleetParams(E, CAPACITY, hidden, algorithm=algorithm, layout=order)


def call(device: str, hidden: int = H) -> MoEEpTensors:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(T, hidden, generator=generator).bfloat16()
    weights, ids = torch.randn(T, E, generator=generator).softmax(-1).topk(K)
    return MoEEpTensors(*(t.to(device) for t in (x, ids.to(torch.int32), weights)))


def make_weights(device: str, hidden: int = H, inner: int = I) -> MoEWeightPack:
    generator = torch.Generator().manual_seed(1)
    w13 = torch.randn(E, 2 * inner, hidden, generator=generator) / hidden**0.5
    w2 = torch.randn(E, hidden, inner, generator=generator) / inner**0.5
    return MoEWeightPack(w13.bfloat16().to(device), w2.bfloat16().to(device))


def reference(t: MoEEpTensors, weights: MoEWeightPack) -> torch.Tensor:
    """Compute the layer in float64: rows of w13 are [gate ; up]."""
    x, out = t.hidden_states.double(), torch.zeros_like(t.hidden_states, dtype=torch.float64)
    for token in range(len(x)):
        for expert, scale in zip(t.topk_ids[token].tolist(), t.topk_weights[token].double(), strict=True):
            gate, up = (weights.w13[expert].double() @ x[token]).chunk(2)
            out[token] += scale * (weights.w2[expert].double() @ (torch.nn.functional.silu(gate) * up))
    return out


def moe_config(**changes) -> MoEConfig:
    backend = BackendOptions((CutlassBf16Config(),))
    made = MoEConfig(RoutingConfig(E, K), QuantConfig(), ExpertConfig(I), backend=backend)
    return dataclasses.replace(made, **changes)


# ------------------------------------------------------------------------------------------------ transports


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_sends_to_itself(device, layout):
    t = call(device)
    t.topk_ids[3, 1] = -1  # no expert
    fleet = moe_ep.create_fleet(ONE, params(layout), backend=LocalConfig())
    received = torch.zeros(1, dtype=torch.int32, device=device)
    knobs = (HandleAlgoKnobTopKWeights(t.topk_weights), HandleAlgoKnobNumReceivedTokens(received))
    handle = fleet.create_handle(HandleParams(t.topk_ids), knobs)
    got = handle.dispatch(DispatchInputParams([t.hidden_states]))
    x = got.expert_tensors[0]
    assert received.item() == T
    if layout == "by expert":
        assert x.shape == (E, CAPACITY, H) and got.get_num_tokens() == T * K - 1
        for expert in range(E):
            rows = t.hidden_states[(t.topk_ids == expert).any(1)]
            assert got.expert_counts[expert] == len(rows) and torch.equal(x[expert, : len(rows)], rows)
            assert not x[expert, len(rows) :].any()
        kept = torch.where(t.topk_ids >= 0, t.topk_weights, 0)
        expected = (t.hidden_states.float() * kept.sum(1, keepdim=True)).bfloat16()
    else:
        rows = x[0] if layout == "by rank" else x
        assert x.shape == ((1, CAPACITY, H) if layout == "by rank" else (T, H)) and got.get_num_tokens() == T
        assert torch.equal(rows[:T], t.hidden_states) and not rows[T:].any()
        ids = got.recv_topk_idx.flatten(0, -2)
        assert torch.equal(ids[:T], t.topk_ids) and (ids[T:] == -1).all()
        expected = t.hidden_states
    out = torch.empty_like(t.hidden_states)
    assert handle.combine(CombineInputParams([x], out)).x is out
    torch.testing.assert_close(out, expected)
    handle.complete()
    for _ in range(2):
        handle.destroy()
        fleet.destroy()


def test_one_expert_named_twice(device):
    ids = torch.full((CAPACITY, 2), 5, dtype=torch.int32, device=device)  # more slots than the buffer has rows
    x = torch.ones(CAPACITY, H, device=device)
    handle = moe_ep.create_fleet(ONE, params(), backend="local").create_handle(HandleParams(ids))
    got = handle.dispatch(DispatchInputParams([x]))
    assert got.expert_counts.tolist() == [0] * 5 + [CAPACITY] + [0] * 2
    assert torch.equal(handle.combine(CombineInputParams(got.expert_tensors)).x, 2 * x)


def test_transports_by_name():
    assert set(fleets._BACKEND_REGISTRY) == {"local", "nccl_ep", "nixl_ep"}
    for name in ("nccl_ep", moe_ep.NvepConfig()):
        with pytest.raises(MoEEpNotBuiltError, match="has no adapter for n"):
            moe_ep.create_fleet(ONE, params(), backend=name)
    for error in (KeyError, ValueError):
        with pytest.raises(error, match=r"must be one of \['local', 'nccl_ep', 'nixl_ep'\], got 'tcp'"):
            moe_ep.create_fleet(ONE, params(), backend="tcp")
    with pytest.raises(TypeError, match="must be a name or an object with backend_name, got int"):
        moe_ep.create_fleet(ONE, params(), backend=3)
    with pytest.raises(TypeError, match="expected AlgoKnob, got int"):
        moe_ep.create_fleet(ONE, params(), (3,), "local")
    with pytest.raises(MoEEpConfigError, match="world_size must be 1, got 2"):
        moe_ep.create_fleet(BootstrapConfig(2, 0), params(), backend="local")


def test_what_a_transport_lacks():
    fleet = moe_ep.create_fleet(ONE, params(), backend="local")
    assert fleet.supports_fault_tolerance is False and fleet.active_mask_epoch == 0
    mask = torch.ones(1, dtype=torch.int32)
    calls = (fleet.query_active_mask, fleet.query_fault, lambda: fleet.set_active_mask(mask))
    for fault_call in (*calls, fleet.reconcile_active_mask, lambda: fleet.clear_faults(readmit=True)):
        with pytest.raises(MoEEpFaultToleranceUnsupportedError, match="must support fault tolerance"):
            fault_call()
    handle = fleet.create_handle(HandleParams(torch.zeros(1, 1, dtype=torch.int32)))
    for half in (lambda: handle.dispatch_send_only(DispatchInputParams([])), handle.dispatch_recv_only):
        with pytest.raises(NotImplementedError, match="dispatch must be one call"):
            half()
    with pytest.raises(MoEEpConfigError, match=r"topk_ids must be \(at most 16, top_k\), got \(17, 1\)"):
        fleet.create_handle(HandleParams(torch.zeros(17, 1, dtype=torch.int32)))


@pytest.mark.parametrize("flag", ["BUILD_NVEP", "BUILD_NCCL_EP", "BUILD_NIXL_EP"])
def test_a_build_that_is_not_here(monkeypatch, flag):
    monkeypatch.setattr(availability, "available_backends", list)
    availability.warn_about_builds()
    monkeypatch.setenv(flag, "1")
    with pytest.warns(RuntimeWarning, match=f"{flag} is set, but no transport is installed"):
        availability.warn_about_builds()
    monkeypatch.setattr(availability, "available_backends", lambda: ["nccl_ep"])
    availability.warn_about_builds()


# ------------------------------------------------------------------------------------------------ kernels by name


def test_kernels_by_name():
    @dataclasses.dataclass
    class Config:
        kernel_name: str

    x = [torch.zeros(1)]
    assert moe_ep.run_split_kernel(IdentityConfig(), SplitKernelContext(x, 1, params())) is x
    assert not moe_ep.kernel_requires_weights(IdentityConfig())
    assert moe_ep.kernel_requires_weights(FusedMoeKernelConfig(moe_config()))
    for create, kind in ((registry.create_split_kernel, "split"), (registry.create_mega_kernel, "mega")):
        with pytest.raises(KeyError, match=f"unknown {kind} kernel 'none'; available: ") as caught:
            create(Config("none"))
        assert "sm90_push_fp8" not in str(caught.value), "aliases are not listed"
        for wrong in (Config(""), 3):
            with pytest.raises(TypeError, match="must have a kernel_name that is not empty"):
                create(wrong)
    aliases = ("deep_gemm_mega", "nvfp4_cutedsl", "mxfp8_cutedsl", "bf16_cutedsl", "sm90_pull_fp8", "sm90_push_fp8")
    for alias in aliases:
        assert registry.is_mega_kernel_config(Config(alias))
        with pytest.warns(DeprecationWarning, match=f"mega kernel '{alias}' is called 'sm"):
            registry.create_mega_kernel(Config(alias))


# ------------------------------------------------------------------------------------------------ layers


def test_which_layer_is_made(device):
    weights, push = make_weights(device), Sm90_Fp8_Fp8_Bf16_PushCuda_MegaMoeConfig(I, K)
    with pytest.raises(TypeError, match=r"Wrap Sm90_.* in MegaConfig\(megakernel=\.\.\.\)"):
        MoEEpLayer(ONE, params(), weights, backend=push)
    with pytest.raises(TypeError, match=r"Pass split inner kernels via SplitConfig\(kernel=\.\.\.\)"):
        MoEEpLayer(ONE, params(), weights, backend=IdentityConfig())
    assert isinstance(MoEEpLayer(ONE, params(), None, backend="local"), MoEEpSplitLayer)
    assert SplitConfig() == SplitConfig(moe_ep.NcclEpConfig(), IdentityConfig())
    with pytest.raises(MoEEpNotBuiltError, match="no adapter for nccl"):
        MoEEpLayer(ONE, params(), None)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layer_in_stages(device, layout):
    t, weights = call(device), make_weights(device)
    layer = MoEEpLayer(
        ONE, params(layout), weights, backend=SplitConfig(LocalConfig(), FusedMoeKernelConfig(moe_config()))
    )
    assert layer.last_timings_ms == {}
    layer.enable_timing = True
    out = layer.forward(t)
    torch.testing.assert_close(out.double(), reference(t, weights), atol=2e-2, rtol=2e-2)
    assert set(layer.last_timings_ms) == {"dispatch", "compute", "combine"}
    for _ in range(2):
        layer.destroy()


def test_experts_that_return_their_input(device):
    t = call(device)
    layer = MoEEpLayer(ONE, params(), None, backend=SplitConfig(LocalConfig()))
    expected = t.hidden_states.float() * t.topk_weights.sum(1, keepdim=True)
    torch.testing.assert_close(layer.forward(t), expected.bfloat16())
    with pytest.raises(MoEEpConfigError, match="exceeds max_tokens_per_rank = 16"):
        layer.forward(MoEEpTensors(*(torch.cat([x, x]) for x in (t.hidden_states, t.topk_ids, t.topk_weights))))


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"routing": RoutingConfig(2 * E, K)}, "routing.num_experts must be 8 in this fleet, got 16"),
        ({"experts": ExpertConfig(I, 0, 4)}, "experts.local_num_experts must be 8 in this fleet, got 4"),
        ({"experts": ExpertConfig(I, 4, 8)}, "experts.local_expert_offset must be 0 in this fleet, got 4"),
        ({"finalize": MoEFinalizeConfig(False)}, "finalize.do_finalize must be True in this fleet, got False"),
    ],
)
def test_experts_of_another_fleet(changes, text):
    backend = SplitConfig(LocalConfig(), FusedMoeKernelConfig(moe_config(**changes)))
    with pytest.raises(MoEEpConfigError, match=text):
        MoEEpLayer(ONE, params(), make_weights("cpu"), backend=backend)


def test_weights_of_stages():
    backend = SplitConfig(LocalConfig(), FusedMoeKernelConfig(moe_config()))
    with pytest.raises(MoEEpConfigError, match="weights must be a MoEWeightPack, got NoneType"):
        MoEEpLayer(ONE, params(), None, backend=backend)
    plain = make_weights("cpu")
    scaled = MoEWeightPack(plain.w13, plain.w2, plain.w13, plain.w2)
    with pytest.raises(MoEEpConfigError, match="weights must be UnquantizedMoEWeights, got Prequantized"):
        MoEEpLayer(ONE, params(), scaled, backend=backend)


def hopper_or_cpu(device: str) -> None:
    if device == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("other GPUs refuse the kernel")


@pytest.mark.parametrize("is_quantised", [False, True])
def test_a_layer_in_one_kernel(device, is_quantised):
    hopper_or_cpu(device)
    t, weights = call(device, 256), make_weights(device, 256, 128)
    expected = reference(t, weights)
    config = Sm90_Fp8_Fp8_Bf16_PushCuda_MegaMoeConfig(128, K)
    if is_quantised:
        sizes = {"intermediate_size": 128, "hidden_size": 256, "num_local_experts": E, "fuse_fc1_epilogue": False}
        weights = moe_ep.preprocess_sm90_push_fp8_mega_weights(weights, **sizes)
        assert weights.w13.dtype == torch.float8_e4m3fn and weights.w13_scale.shape == (E, 2, 2)
    with pytest.warns(UserWarning, match="fleet_knobs are ignored"):
        knobs = (moe_ep.FleetAlgoKnobTopologyCapacity(1),)
        layer = MoEEpLayer(ONE, params(hidden=256), weights, knobs, MegaConfig(config))
    assert isinstance(layer, MoEEpMegaLayer) and layer.supports_output_view is False
    layer.warmup(t)
    assert layer._weights is None, "the source is dropped"
    out = layer.forward(t).double()
    error = (out - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    cosine = torch.nn.functional.cosine_similarity(out.flatten(), expected.flatten(), 0)
    assert out.dtype == torch.float64 and error < 0.15 and cosine > 0.98
    with pytest.raises(MoEEpConfigError, match="return_workspace_view must be False"):
        layer.forward(t, return_workspace_view=True)
    t.hidden_states = t.hidden_states.float()
    with pytest.raises(MoEEpConfigError, match=r"hidden_states must be torch\.bfloat16 with quantize_input"):
        layer.forward(t)
    for _ in range(2):
        layer.destroy()


def test_blocks_of_zeros():
    w13, w2 = torch.zeros(1, 256, 128), torch.zeros(1, 128, 128)
    w2[0, 0, 0] = 2.0
    sizes = {"intermediate_size": 128, "hidden_size": 128, "num_local_experts": 1, "fuse_fc1_epilogue": False}
    made = moe_ep.preprocess_sm90_push_fp8_mega_weights(MoEWeightPack(w13, w2), **sizes)
    assert made.w13_scale.flatten().tolist() == [1.0, 1.0] and made.w2_scale.item() == pytest.approx(2 / 448)
    assert made.w2[0, 0, 0].float() == 448
    with pytest.raises(MoEEpConfigError, match=r"w13 must be \(2, 256, 128\), got \(1, 256, 128\)"):
        moe_ep.preprocess_sm90_push_fp8_mega_weights(MoEWeightPack(w13, w2), **{**sizes, "num_local_experts": 2})


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"top_k": 3}, "top_k must be one of 1, 2, 4, 6, 8, got 3"),
        ({"intermediate_size": 96}, "intermediate_size must be a positive multiple of 128, got 96"),
        ({"intermediate_size": 16512}, "intermediate_size must be at most 16384, got 16512"),
        ({"capacity_factor": 0.0}, r"capacity_factor must be in \(0, 1\], got 0.0"),
        ({"combine_dtype": "bf16"}, "grouped_combine must be False unless combine_dtype is fp8"),
        ({"combine_dtype": "fp4"}, "combine_dtype must be fp8 or bf16, got fp4"),
    ],
)
def test_what_the_kernel_refuses(device, changes, text):
    hopper_or_cpu(device)
    config = Sm90_Fp8_Fp8_Bf16_PushCuda_MegaMoeConfig(**({"intermediate_size": 128, "top_k": K} | changes))
    with pytest.raises(MoEEpConfigError, match=text):
        MoEEpLayer(ONE, params(), make_weights(device), backend=MegaConfig(config))


def test_kernels_that_are_not_here(device):
    hopper_or_cpu(device)
    names = [name for name in moe_ep.__all__ if name.startswith("Sm100_") and name.endswith("MegaMoeConfig")]
    assert len(names) == 4
    for name in names:
        with pytest.raises(MoEEpArchError, match=r"requires sm_100\+"):
            MoEEpLayer(ONE, params(), make_weights(device), backend=MegaConfig(getattr(moe_ep, name)(128, K)))
    split = SplitConfig(LocalConfig(), moe_ep.Sm100_Mxfp8_Mxfp4_Bf16_Cutedsl_SplitConfig())
    with pytest.raises(MoEEpArchError, match=r"requires sm_100\+"):
        MoEEpLayer(ONE, params(), make_weights(device), backend=split)
    with pytest.raises(MoEEpNotBuiltError, match="needs the CuTe DSL and NVSHMEM"):
        MoEEpLayer(ONE, params(), None, backend=MegaConfig(moe_ep.Sm90PullFp8MegaMoeConfig(128, K)))
    push = MegaConfig(Sm90_Fp8_Fp8_Bf16_PushCuda_MegaMoeConfig(128, K))
    with pytest.raises(MoEEpNotBuiltError, match="world_size must be 1 without a transport, got 2"):
        MoEEpLayer(BootstrapConfig(2, 0), params(), None, backend=push)


@pytest.mark.parametrize(
    "capability, cuda, refused",
    [
        ((9, 0), "13.0", {"validate_mega_arch": r"requires sm_100\+"}),
        ((9, 0), "12.8", {"validate_mega_arch": r"requires sm_100\+", "validate_arch_for_backend": "requires CUDA 13"}),
        (
            (8, 0),
            "13.0",
            {
                "validate_mega_arch": r"requires sm_100\+, got sm_80",
                "validate_mega_arch_sm90": "requires sm_90, got sm_80",
                "validate_arch_for_backend": r"requires sm_90\+, got sm_80",
            },
        ),
        ((10, 0), "13.0", {"validate_mega_arch_sm90": "requires sm_90, got sm_100"}),
    ],
)
def test_gpus(monkeypatch, capability, cuda, refused):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    checks = {"validate_arch_for_backend": ("nccl_ep",), "validate_mega_arch": (), "validate_mega_arch_sm90": ()}
    for name, arguments in checks.items():
        if name in refused:
            with pytest.raises(MoEEpConfigError, match=refused[name]):
                getattr(moe_ep, name)(*arguments)
        else:
            getattr(moe_ep, name)(*arguments)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name, arguments in checks.items():
        getattr(moe_ep, name)(*arguments)


# ------------------------------------------------------------------------------------------------ runtime


def test_the_runtime_is_counted(monkeypatch):
    with socket.socket() as busy:
        if busy.connect_ex(("127.0.0.1", 29500)) == 0:
            pytest.skip("another program has the port of torch.distributed")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    with pytest.raises(RuntimeError, match=r"torchrun must have started the process.* got 2"):
        moe_ep.bootstrap_moe_ep_runtime(BootstrapConfig(2, 0), {"torch_dist"})
    first, second = (moe_ep.bootstrap_moe_ep_runtime(ONE, {"torch_dist"}) for _ in range(2))
    assert torch.distributed.is_initialized()
    for _ in range(2):  # ending twice counts once
        moe_ep.finalize_moe_ep_runtime(first)
    assert torch.distributed.is_initialized()
    moe_ep.finalize_moe_ep_runtime(second)
    assert not torch.distributed.is_initialized()
    with pytest.raises(MoEEpNotBuiltError, match="nvshmem"):
        moe_ep.bootstrap_moe_ep_runtime(ONE, {"nvshmem"})
    with pytest.raises(ValueError, match=r"must be of torch_dist, nvshmem, got \['mpi'\]"):
        moe_ep.bootstrap_moe_ep_runtime(ONE, {"mpi"})


def test_what_ran_before_goes_on(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", world_size=1, rank=0)
    try:
        moe_ep.finalize_moe_ep_runtime(moe_ep.bootstrap_moe_ep_runtime(ONE, {"torch_dist"}))
        assert torch.distributed.is_initialized()
    finally:
        torch.distributed.destroy_process_group()


def test_the_gpu_of_a_rank(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert moe_ep.ensure_moe_ep_cuda_device(BootstrapConfig(4, 3)) == 3
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert moe_ep.ensure_moe_ep_cuda_device(BootstrapConfig(4, 3)) == 1
    assert moe_ep.ensure_moe_ep_cuda_device(BootstrapConfig(4, 3, device=2)) == 2 and chosen == [3, 1, 2]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert moe_ep.ensure_moe_ep_cuda_device(ONE) is None
