# SPDX-License-Identifier: Apache-2.0
"""Names of release 0.7.2 that stop published files at their import, or that answer something."""

from __future__ import annotations

import importlib

import pytest
import torch

import flashinfer
from flashinfer import aot, green_ctx, logits_processor
from flashinfer._runtime.errors import BackendSupportedError
from flashinfer.jit.attention import modules
from flashinfer.logits_processor import fusion_rules, legalization, validators
from flashinfer.testing import attention_tb_per_sec

BF16 = torch.bfloat16
GENERATORS = {
    "bgmv_moe": "gen_bgmv_moe_module",
    "comm": "gen_allreduce_module",
    "dsv3_optimizations": "gen_dsv3_fused_routing_module",
    "fp4_kv_dequantization": "gen_fp4_kv_dequantization_module",
    "fp4_kv_quantization": "gen_fp4_kv_quantization_module",
    "fp4_quantization": "gen_fp4_quantization_module",
    "fp8_quantization": "gen_mx_quantization_module",
    "hash_topk": "gen_hash_topk_module",
    "mla": "gen_batch_mla_module",
    "moe_utils": "gen_moe_utils_module",
    "monomoe": "gen_monomoe_module",
    "rmsnorm_silu": "gen_rmsnorm_silu_module",
    "tinygemm2": "gen_tinygemm2_module",
}


@pytest.mark.parametrize("name", GENERATORS)
def test_generators_have_modules_of_their_own(name):
    assert callable(getattr(importlib.import_module(f"flashinfer.jit.{name}"), GENERATORS[name]))


@pytest.mark.parametrize(
    "protocol, module",
    [
        *((name, "allreduce") for name in ("trtllm_comm", "trtllm_mnnvl_comm", "pcie_ipc_comm")),
        *((name, "alltoall") for name in ("moe_alltoall", "dcp_alltoall")),
        *(("vllm_comm", "vllm_ar"), ("comm_alltoall", "moe_comm")),
    ],
)
def test_modules_of_communication(protocol, module):
    generate = getattr(flashinfer.jit, f"gen_{protocol}_module")
    assert generate.__module__ == "flashinfer.jit.comm" and generate("cpu").name == f"{module}_cpu"


@pytest.mark.parametrize(
    "path",
    [
        "jit.cute_dsl_core.build_and_load_cute_dsl_kernel",
        "jit.spdlog.gen_spdlog_module",
        "jit.tllm_utils.gen_trtllm_utils_module",
        "gemm.masked_bmm",
        "gemm.ragged_block_scaled_bmm",
        "gemm.gemm_alpha_beta",
        "gemm.group_gemm_fp8_nt_groupwise_contiguous",
        "gemm.gemm_base.get_gemm_sm90_module",
        "gemm.gemm_base.launch_compute_sm90_group_gemm_args",
        "gemm.gemm_base._cudnn_gemm_fp8_runner",
        "mla._core._build_mla_decode_tuning_config",
        "mla._sparse_mla_sm120.get_sparse_mla_sm120_module",
        "attention.prims_ts.BatchPrefillTSWrapper",
        "attention.prims_ts.block_sparse.block_sparse_attention",
        "prefill.trtllm_sage_attention_quantize",
    ],
)
def test_names_that_refuse(path):
    module, _, name = path.rpartition(".")
    with pytest.raises(RuntimeError, match=f"{name}: needs"):
        getattr(importlib.import_module(f"flashinfer.{module}"), name)()


def test_generators_of_products_are_a_folder():
    """Check the tree that the guide prints: flashinfer/jit has folders of attention, gemm and fused_moe."""
    for name in ("attention", "gemm", "fused_moe"):
        assert importlib.import_module(f"flashinfer.jit.{name}").__path__
    assert flashinfer.jit.gemm.core.gen_gemm_module is flashinfer.jit.gemm.gen_gemm_module


def test_names_that_answer():
    base = importlib.import_module("flashinfer.gemm.gemm_base")
    assert base.clear_cudnn_graph_cache() is None and "SM120" in base.CUDNN_FP4_MXFP4_SM120_CUDNN_VERSION_ERROR
    assert base._FP8_GEMM_SM100_TUNING_CONFIG.dynamic_tensor_specs
    tuner = importlib.import_module("flashinfer.autotuner.autotuner")
    assert tuner.get_config_path(True).startswith("flashinfer.tuning_configs.v0_1_")
    assert tuner.get_config_path().endswith(".py") and tuner.load_from_file(None)[0] is False
    assert green_ctx.get_locality_domain_count() == 1
    (made,) = green_ctx.empty_per_locality_domain(2, 3, dtype=BF16, device="cpu")
    assert made.shape == (2, 3) and made.dtype == BF16
    with pytest.raises(BackendSupportedError, match="does not support backend 'cute-dsl'"):
        x, ones = torch.ones(1, 4, 128).to(torch.float8_e4m3fn), torch.ones(1, 4, 1)
        flashinfer.gemm.batch_deepgemm_fp8_nt_groupwise(
            x, x, ones, ones[:, :1], torch.ones(1).int(), 1, backend="cute-dsl"
        )


def test_uris_of_attention_modules():
    dtypes, dims = (BF16, BF16, BF16), (128, 128)
    name = modules.get_batch_prefill_attention_sink_uri("fa2", *dtypes, torch.int32, *dims, 0, False)
    assert name.endswith("_attention_sink")
    assert (
        modules.gen_batch_prefill_attention_sink_module("fa2", *dtypes, torch.int32, *dims, 0, False, "cuda").name
        == name
    )
    assert modules.get_single_decode_uri(*dtypes, *dims, 0, False, False)
    assert modules.gen_fmha_v2_module("PACKED_QKV", BF16, device="cuda").name == modules.get_batch_prefill_uri(
        "fa2", *dtypes, torch.int32, *dims, 0, False, False, False
    )


def test_flags_of_targets_that_hold_a_tile(monkeypatch):
    context = modules.current_compilation_context
    monkeypatch.setattr(context, "TARGET_CUDA_ARCHS", {(7, "5"), (9, "0a")})
    flags = modules._fa2_head_dim_nvcc_flags(512, 512, BF16)
    assert flags == ["-gencode=arch=compute_90a,code=sm_90a"]
    assert len(modules._fa2_head_dim_nvcc_flags(64, 64, BF16)) == 2
    monkeypatch.setattr(context, "TARGET_CUDA_ARCHS", {(7, "5")})
    with pytest.raises(RuntimeError, match="No supported CUDA architectures"):
        modules._fa2_head_dim_nvcc_flags(512, 512, BF16)


def test_pod_of_two_variants_is_refused():
    with pytest.raises(ValueError, match="variant_name_d must equal variant_name_p = 'A'"):
        modules.gen_customize_pod_module(
            *("mine", BF16, BF16, BF16, torch.int32, 128, [], [], [], []),
            variant_name_p="A",
            variant_name_d="B",
            variant_decl="",
        )


def test_kinds_of_attention_modules_ahead_of_time(monkeypatch):
    monkeypatch.setattr(modules.current_compilation_context, "TARGET_CUDA_ARCHS", {(9, "0a")})
    all_of, prefill = (
        {spec.name for spec in aot.gen_fa2(BF16, BF16, 128, 128, False, False, prefill_only=only)}
        for only in (False, True)
    )
    assert len(all_of) == 4 and len(prefill) == 2 and prefill < all_of
    assert len(list(aot.gen_fa3(BF16, BF16, BF16, 128, 128, False, False))) == 2
    kinds = ([BF16], [False, True], [16, 64], [128], [4, 8], [False, True])
    assert len(list(aot.gen_xqa(*kinds, True, False, False, False))) == 2  # a cache of bfloat16, and of e4m3
    config = aot.get_default_config()
    assert config["fa2_head_dim"] == [(64, 64), (128, 128), (256, 256)] and (192, 128) in config["fa3_head_dim"]


def test_parts_of_pipelines():
    assert fusion_rules.get_default_fusion_rules() and validators.get_default_validity_checks()
    for name in ("FusedTemperatureSoftmaxOp", "FusedProbsTopKTopPSampleOp"):
        assert issubclass(getattr(logits_processor, name), logits_processor.ParameterizedOp)
    assert logits_processor.FusedTemperatureSoftmaxOp(enable_pdl=None).default_params == {"enable_pdl": None}
    sample = logits_processor.FusedProbsTopPSampleOp(deterministic=True)
    probs = logits_processor.TaggedTensor.probs(torch.tensor([[0.0, 1.0]]))
    assert sample(probs, top_p=0.9).data.tolist() == [1]
    chain = [logits_processor.Softmax(), logits_processor.TopP()]
    assert legalization.validate_processor_chain(chain) is None
    with pytest.raises(legalization.LegalizationError):
        legalization.validate_processor_chain([logits_processor.Softmax(), logits_processor.Softmax()])
    ops = legalization.legalize_processors(chain)
    assert validators.validate_pipeline(ops) is None
    with pytest.raises(validators.CompileError, match="at least one op"):
        validators.validate_pipeline([])


def test_keys_and_values_of_two_dtypes():
    sizes = (1, 1, 1024, 64, 64, 8, 8, 1.0)
    both = attention_tb_per_sec(*sizes)
    assert attention_tb_per_sec(*sizes, k_dtype=BF16, v_dtype=BF16) == both
    fewer = attention_tb_per_sec(*sizes, v_dtype=torch.float8_e4m3fn)
    assert both - fewer == pytest.approx(1024 * 8 * 64 / 1e9)


def test_replacement_of_ops_by_its_published_names(tmp_path, monkeypatch):
    from flashinfer.trace_apply import adapt, apply, config, plan_capture

    x, weight = torch.ones(2, 8), torch.ones(8)
    entry = config.Definition.from_dict(flashinfer.rmsnorm.fi_trace(input=x, weight=weight))
    assert entry.fi_api == "flashinfer.norm.rmsnorm" and entry.const_axes == {"hidden_size": 8}
    assert entry.input_dtypes == {"hidden_states": "float32", "weight": "float32"}
    template = flashinfer.trace.templates.norm.rmsnorm_trace.templates[0]
    values = adapt.ordered_input_values(template, {"input": x, "weight": weight})
    assert values[0] is x and values[1] is weight
    assert apply._derive_output_dests(template) == {"output": "out"}
    assert not apply.is_enabled() and apply.stats_snapshot() == {}
    apply.bump_stat("mine", "hit")
    assert apply.stats_snapshot()["mine"]["hit"] == 1
    apply.reset_loaded()
    assert apply.stats_snapshot() == {}
    assert apply.current_sm() is None or apply.current_sm().startswith("sm")
    name = "flashinfer.decode.BatchDecodeWithPagedKVCacheWrapper.run"
    assert plan_capture.is_stateful(name) and not plan_capture.is_stateful("flashinfer.norm.rmsnorm")
    assert isinstance(plan_capture.STATEFUL_ADAPTERS[name], plan_capture.StatefulAdapter)

    class Wrapper:
        pass

    wrapper = Wrapper()
    plan_capture.stash_plan_kwargs(wrapper, {"indptr": 1, "page_size": 16})
    assert plan_capture.augment_namespace(name, wrapper, {"q": 2}) == {"kv_indptr": 1, "q": 2}
    assert (config.ENABLE_ENV, config.PATH_ENV) == ("FLASHINFER_TRACE_APPLY", "FLASHINFER_TRACE_APPLY_PATH")
    assert config.load_config() == config.TraceConfig()
    monkeypatch.setenv(config.PATH_ENV, str(tmp_path))
    assert config.resolve_trace_path() == tmp_path and config.load_config().solutions == {}
    assert config.Axis("const", 8).value == 8 and config.IOSpec("float32").shape is None
