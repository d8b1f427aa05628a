# SPDX-License-Identifier: Apache-2.0
"""Names that always import, and the errors of those that need a Blackwell GPU."""

from __future__ import annotations

import inspect

import pytest
import torch

import flashinfer
from flashinfer._compat import unsupported_quantization as blackwell
from flashinfer._runtime.errors import ArgumentError, BackendSupportedError
from flashinfer.cute_dsl import utils as cute_dsl
from flashinfer.quantization import nvfp4_quantization_utils as nvfp4
from flashinfer.quantization.nvfp4_quantization_utils import (
    NVFP44Over6Config,
    NVFP44Over6ErrMode,
    current_nvfp4_4over6_config,
    env_flag_enabled,
    make_nvfp4_global_scale,
    nvfp4_4over6_mode_label,
    nvfp4_e4m3_max,
)

TOP_LEVEL = [*flashinfer.quantization.__all__, *blackwell.__all__, "nvfp4_block_scale_interleave"]
UNSUPPORTED = [
    name for name, value in vars(blackwell).items() if inspect.isfunction(value) and value.__name__ == name
    and inspect.unwrap(value).__code__.co_name == "unsupported"
]  # fmt: skip


@pytest.mark.parametrize("name", TOP_LEVEL)
def test_top_level(name):
    assert getattr(flashinfer, name) is getattr(flashinfer.quantization, name)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_needs_blackwell(name):
    with pytest.raises(BackendSupportedError, match=rf"^{name}: needs .*(SM1\d\d|cuda\.tile)") as caught:
        function = getattr(blackwell, name)
        required = [x for x in inspect.signature(function).parameters.values() if x.kind is x.POSITIONAL_OR_KEYWORD]
        function(*(torch.ones(4) for x in required if x.default is x.empty))
    assert isinstance(caught.value, RuntimeError)
    assert getattr(flashinfer.quantization, name) is getattr(blackwell, name)


def test_all_of_them_are_covered():
    assert len(UNSUPPORTED) == 25
    assert set(blackwell.__all__) <= set(UNSUPPORTED)


def test_paths_of_published_code():
    import flashinfer.fp4_quantization as fp4
    import flashinfer.fp8_quantization as fp8

    for name in TOP_LEVEL:
        assert getattr(fp4, name) is getattr(flashinfer, name)
    assert fp4.fp4_quantize is flashinfer.fp4_quantize
    assert fp8.mxfp8_quantize is flashinfer.mxfp8_quantize
    assert fp8.get_mxfp8_quantization_sm100_module is blackwell.get_mxfp8_quantization_sm100_module


def test_submodules_have_the_published_names():
    from flashinfer.quantization import fp4_quantization as fp4
    from flashinfer.quantization import fp8_quantization as fp8
    from flashinfer.quantization.kernels import nvfp4_quantize

    for name in ("fp4_quantize", "nvfp4_quantize", "mxfp4_quantize", "silu_and_mul_nvfp4_quantize"):
        assert getattr(fp4, name) is getattr(blackwell, name)
    assert fp4.nvfp4_kv_dequantize_paged is flashinfer.nvfp4_kv_dequantize_paged
    assert fp4.NVFP4_QUANT_ENV_VARS == (
        "FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH",
        "FLASHINFER_NVFP4_4OVER6",
        "FLASHINFER_NVFP4_4OVER6_ERR_MODE",
        "FLASHINFER_NVFP4_4OVER6_ERR_USE_FAST_MATH",
        "FLASHINFER_NVFP4_4OVER6_E4M3_USE_256",
    )
    assert fp8.mxfp8_grouped_quantize is blackwell.mxfp8_grouped_quantize
    assert callable(fp8.get_mxfp8_grouped_quantization_module().mxfp8_grouped_quantize_impl)
    assert (nvfp4_quantize.SF_LAYOUT_128x4, nvfp4_quantize.SF_LAYOUT_8x4) == (0, 1)


def test_4over6_configuration_of_the_environment(monkeypatch):
    assert current_nvfp4_4over6_config() is None
    monkeypatch.setenv("FLASHINFER_NVFP4_4OVER6", "1")
    assert current_nvfp4_4over6_config() == NVFP44Over6Config()
    monkeypatch.setenv("FLASHINFER_NVFP4_4OVER6_E4M3_USE_256", "1")
    monkeypatch.setenv("FLASHINFER_NVFP4_4OVER6_ERR_MODE", "mse")
    monkeypatch.setenv("FLASHINFER_NVFP4_4OVER6_ERR_USE_FAST_MATH", "1")
    assert current_nvfp4_4over6_config() == NVFP44Over6Config(256, NVFP44Over6ErrMode.MSE, True)


def test_4over6_arguments(monkeypatch):
    """Left out, the environment decides and says so once it is on; None is off; a configuration is itself."""
    config = NVFP44Over6Config(256, NVFP44Over6ErrMode.MSE, True)
    assert flashinfer.NVFP44Over6Config is NVFP44Over6Config and flashinfer.NVFP44Over6ErrMode is NVFP44Over6ErrMode
    assert nvfp4.resolve_nvfp4_4over6() is None and nvfp4.resolve_nvfp4_4over6(config) is config
    codes = {None: 0, NVFP44Over6Config(): 1, NVFP44Over6Config(256): 3, config: 0b10111}
    for one, code in codes.items():
        assert nvfp4.nvfp4_4over6_code(one) == code and nvfp4.nvfp4_4over6_from_code(code) == one
    assert nvfp4.nvfp4_4over6_cache_key(None) == "off" and nvfp4.nvfp4_4over6_cache_key(config) == "4over6_256_MSE_1"
    assert nvfp4.nvfp4_4over6_cache_key(NVFP44Over6Config()) == "4over6_448_MAE_0"
    assert nvfp4_e4m3_max() == 448 and nvfp4.nvfp4_per_token_scale_inv(config) == 1 / (6 * 256)
    assert nvfp4.nvfp4_4over6_from_code(-1) is None
    monkeypatch.setenv("FLASHINFER_NVFP4_4OVER6", "1")
    with pytest.warns(FutureWarning, match="give nvfp4_4over6="):
        assert nvfp4.resolve_nvfp4_4over6() == NVFP44Over6Config()
    with pytest.warns(FutureWarning):
        assert nvfp4.nvfp4_4over6_from_code(-1) == NVFP44Over6Config()
    assert nvfp4.resolve_nvfp4_4over6(None) is None
    with pytest.raises(TypeError, match="nvfp4_4over6 must be"):
        nvfp4.resolve_nvfp4_4over6(True)
    with pytest.raises(ValueError, match="must be either 256 or 448, got 300"):
        NVFP44Over6Config(300)
    with pytest.raises(ValueError, match="must be MAE or MSE, got 'mae'"):
        NVFP44Over6Config(err_mode="mae")
    with pytest.raises(ValueError, match="code must be"):
        nvfp4.nvfp4_4over6_from_code(2)
    for name in ("fp4_quantize", "nvfp4_quantize", "nvfp4_batched_quantize", "scaled_fp4_grouped_quantize"):
        assert "nvfp4_4over6" in inspect.signature(getattr(flashinfer, name)).parameters
    for name in ("silu_and_mul_nvfp4_quantize", "silu_and_mul_scaled_nvfp4_experts_quantize"):
        assert "nvfp4_4over6" in inspect.signature(getattr(flashinfer, name)).parameters
    assert "out_scale" in inspect.signature(flashinfer.nvfp4_quantize).parameters
    assert "backend" in inspect.signature(flashinfer.mxfp8_grouped_quantize).parameters


def test_labels_of_nvfp4():
    assert nvfp4_4over6_mode_label(False, None) == "standard"
    label = nvfp4_4over6_mode_label(True, NVFP44Over6Config())
    assert label == "per-token, 4over6-mae, e4m3-448, err-exactmath"
    config = NVFP44Over6Config(256, NVFP44Over6ErrMode.MSE, True)
    assert nvfp4_4over6_mode_label(False, config) == "4over6-mse, e4m3-256, err-fastmath"


def test_global_scale_of_nvfp4(device):
    x = torch.tensor([[1.0, -4.0]], device=device)
    assert make_nvfp4_global_scale(x, False).tolist() == [448 * 6 / 4]
    assert make_nvfp4_global_scale(x.half(), False, None, NVFP44Over6Config(256)).tolist() == [256 * 6 / 4]
    assert make_nvfp4_global_scale(x * 0, False).tolist() == [torch.finfo(torch.float32).max]
    assert make_nvfp4_global_scale(x, True).tolist() == [torch.tensor(1 / (448 * 6)).item()]
    for given in (2.5, torch.tensor(2.5), torch.tensor([2.5])):
        scale = make_nvfp4_global_scale(x, False, given)
        assert scale.tolist() == [2.5] and scale.dtype == torch.float32 and scale.device == x.device
    with pytest.raises(ValueError, match=r"global_scale must have one element, got shape \(2,\)"):
        make_nvfp4_global_scale(x, False, torch.ones(2))


def test_modules():
    assert flashinfer.fp4_quantization.gen_fp4_quantization_sm90_module().name == "mx_quantization"
    spec = flashinfer.fp4_quantization.gen_fp4_quantization_module(["-DANY=1"], "90")
    assert spec.name == "fp4_quantization_90" and "-DANY=1" in spec.extra_cuda_cflags
    assert flashinfer.jit.gen_fp4_kv_dequantization_module().name == "nvfp4_kv"
    assert flashinfer.jit.gen_fp4_kv_quantization_module is flashinfer.quantization.gen_fp4_kv_quantization_module


def test_layout_names_are_code():
    for layout in flashinfer.SfLayout:
        assert eval(repr(layout), {"SfLayout": flashinfer.SfLayout}) is layout
    assert [int(layout) for layout in flashinfer.SfLayout] == [0, 1, 2]


@pytest.mark.parametrize("b, m, k", [(2, 100, 200), (1, 128, 256), (3, 129, 127)])
def test_shapes_of_grouped_mxfp8(b, m, k):
    module = flashinfer.fp8_quantization.get_mxfp8_grouped_quantization_module()
    values, scales = module._fake_mxfp8_grouped_quantize(torch.empty(b, m, k), torch.empty(b, dtype=torch.int32))
    pk, pm = -(-k // 128) * 128, -(-m // 128) * 128
    assert values.shape == (m, pk, b) and values.stride() == (pk, 1, m * pk) and values.dtype == torch.float8_e4m3fn
    assert scales.shape == (32, 4, pm // 128, 4, pk // 128, b) and scales.dtype == torch.uint8
    with pytest.raises(RuntimeError, match="SM100"):
        module.mxfp8_grouped_quantize(torch.empty(b, m, k), torch.empty(b))


def test_4over6_settings(monkeypatch):
    config = NVFP44Over6Config()
    assert (config.e4m3_max, config.err_mode, config.err_use_fast_math) == (448, NVFP44Over6ErrMode.MAE, False)
    assert nvfp4_e4m3_max(None) == 448 and nvfp4_e4m3_max(NVFP44Over6Config(e4m3_max=256)) == 256
    for text, expected in (("1", True), ("true", True), ("0", False), ("off", False), ("", False)):
        monkeypatch.setenv("QUANTIZATION_TEST_FLAG", text)
        assert env_flag_enabled("QUANTIZATION_TEST_FLAG") is expected


def test_fp4_tensor():
    """Check the class that vLLM imports and passes as an output where kernels can write NVFP4."""
    from flashinfer.utils import FP4Tensor

    data, scale = torch.zeros(3, 32, dtype=torch.uint8), torch.zeros(128, 4, dtype=torch.float8_e4m3fn)
    x = FP4Tensor(data, scale, scale_start_index=2, original_shape=(3, 64))
    assert (x.data, x.scale, x.scale_start_index, x.dtype) == (data, scale, 2, "nvfp4")
    assert x.original_shape == FP4Tensor(data, scale).original_shape == (3, 64)
    for wrong, text in [
        ((data.float(), scale), r"data must be rows of uint8, got 2-dimensional torch.float32"),
        ((data, scale.float()), "scale must have dtype torch.float8_e4m3fn, got torch.float32"),
        ((data, scale, 0, (3, 32)), r"original_shape must be \(3, 64\)"),
    ]:
        with pytest.raises(ValueError, match=text):
            FP4Tensor(*wrong)
    q, cache = torch.zeros(3, 4, 64).half(), torch.zeros(2, 2, 4, 16, 64).half()
    table, lens = torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"out must be a tensor.*, got a FP4Tensor"):
        flashinfer.decode.trtllm_batch_decode_with_kv_cache(
            q, cache, torch.zeros(1 << 20, dtype=torch.uint8), table, lens, 16, out=x
        )


def test_mma_layout_of_swizzled_scales():
    """Look up each scale of two groups: tiles of 128 x 4, of which a column has the rows r, r + 32, r + 64, r + 96."""
    groups, m, k = 2, 130, 96
    linear = torch.arange(groups * m * 6, dtype=torch.int32).view(groups, m, 6)
    sf = torch.zeros(groups, 2, 2, 32, 4, 4, dtype=torch.int32)
    row, col = torch.arange(m).unsqueeze(1), torch.arange(6)
    for group in range(groups):
        sf[group, row // 128, col // 4, row % 32, row % 128 // 32, col % 4] = linear[group]
    swizzled = sf.view(groups * 256, 8)
    view = cute_dsl.convert_sf_to_mma_layout(swizzled, m, k, groups)
    assert view.shape == cute_dsl.get_mma_sf_shape(m, k, groups) == (32, 4, 2, 4, 2, 2)
    assert view.data_ptr() == swizzled.data_ptr()
    for group in range(groups):
        assert torch.equal(view[row % 32, row % 128 // 32, row // 128, col % 4, col // 4, group], linear[group])
    assert torch.equal(cute_dsl.convert_sf_from_mma_layout(view, m, k, groups), swizzled)
    with pytest.raises(ArgumentError, match="sf must be contiguous and have 2048 elements"):
        cute_dsl.convert_sf_to_mma_layout(swizzled, m, k)
    assert not cute_dsl.is_cute_dsl_available()
