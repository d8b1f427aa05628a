# SPDX-License-Identifier: Apache-2.0
"""Norms and activations under the paths of published versions in the CuTe DSL and Triton; ours are native."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu

from flashinfer import cute_dsl, norm, tllm_utils
from flashinfer.jit.utils import filename_safe_dtype_map_kv
from flashinfer.triton.activation import silu_and_mul
from flashinfer.triton.norm import rms_norm, rms_norm_add_residual

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(BF16)


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def test_norms_of_the_dsl():
    x, weight, out = rows(5, 128), rows(128), torch.empty(5, 128, dtype=BF16)
    for bias in (0.0, 1.0, 0.5):
        cute_dsl.rmsnorm_cute(x, weight, out, weight_bias=bias)
        torch.testing.assert_close(out.float(), rms(x.float(), weight.float() + bias), rtol=2e-2, atol=2e-2)
    heads = rows(5, 2, 64)
    per_head = torch.empty_like(heads)
    cute_dsl.qk_rmsnorm_cute(heads, weight[:64], per_head)
    assert torch.equal(per_head, norm.rmsnorm(heads, weight[:64]))
    for bias in (0.0, 1.0, 0.5):
        residual, ours = rows(5, 128), x.clone()
        total = x.float() + residual.float()
        cute_dsl.fused_add_rmsnorm_cute(ours, residual, weight, weight_bias=bias)
        torch.testing.assert_close(ours.float(), rms(total, weight.float() + bias), rtol=2e-2, atol=2e-2)
        assert torch.equal(residual, total.to(BF16))
    small, residual, scale = torch.empty(5, 128, dtype=E4M3), rows(5, 128), torch.tensor([0.5])
    cute_dsl.rmsnorm_quant_cute(small, x, weight, scale)
    torch.testing.assert_close(small.float(), rms(x.float(), weight.float()) / 0.5, rtol=0.1, atol=0.1)
    cute_dsl.fused_add_rmsnorm_quant_cute(small, x, residual, weight, scale)
    torch.testing.assert_close(small.float(), rms(residual.float(), weight.float()) / 0.5, rtol=0.1, atol=0.1)
    gain, offset = torch.randn(128), torch.randn(128)
    cute_dsl.layernorm_cute(out, x, gain, offset)
    assert torch.equal(out, norm.layernorm(x, gain, offset))


def test_objects_of_the_dsl_refuse():
    for name in ("RMSNormKernel", "LayerNormKernel", "make_ptr", "torch_to_cutlass_dtype"):
        with pytest.raises(RuntimeError, match=f"{name}: needs kernels in the CuTe DSL"):
            getattr(cute_dsl, name)(torch.float16, 128)
    assert cute_dsl.get_sm_version() >= 75


def test_norms_of_triton():
    x, weight, out = rows(5, 128), rows(128), torch.empty(5, 128, dtype=BF16)
    rms_norm(x, weight, out, 1e-6)
    assert torch.equal(out, norm.rmsnorm(x, weight))
    small = torch.empty(5, 128, dtype=E4M3)
    rms_norm(x, weight, small, 1e-6, torch.tensor(0.5), torch.tensor(1000.0))
    expected = (rms(x.float() * 0.5, weight.float()) * 1000).clamp(-448, 448)
    torch.testing.assert_close(small.float(), expected, rtol=0.1, atol=0.1)
    assert small.float().isfinite().all()
    residual, other, total = rows(5, 128), torch.empty_like(x), x.float() * 2 + rows(5, 128).float()
    rms_norm_add_residual(x, residual, weight, 1e-6, other, torch.tensor(2.0))
    assert torch.equal(residual, total.to(BF16))
    torch.testing.assert_close(other.float(), rms(total, weight.float()), rtol=2e-2, atol=2e-2)
    rms_norm_add_residual(x, residual, weight, 1e-6)  # in place
    torch.testing.assert_close(x.float(), rms(rows(5, 128).float() + total, weight.float()), rtol=3e-2, atol=3e-2)


def test_activation_of_triton():
    x = rows(3, 64)
    gate, up = x.float().chunk(2, dim=1)
    torch.testing.assert_close(silu_and_mul(x).float(), silu(gate) * up, rtol=2e-2, atol=2e-2)
    result = silu_and_mul(x, torch.tensor(2.0), torch.tensor(1000.0), E4M3)
    torch.testing.assert_close(result.float(), (silu(2 * gate) * 2 * up * 1000).clamp(-448, 448), rtol=0.1, atol=1e-3)
    with pytest.raises(ValueError, match=r"x must have shape \(rows, 2 \* hidden\), got \(3, 63\)"):
        silu_and_mul(x[:, :63])


def test_delay_and_names():
    assert tllm_utils.get_trtllm_utils_module().delay_kernel is tllm_utils.delay_kernel
    with pytest.raises(ValueError, match="stream_delay_micro_secs must be 0 or more, got -1"):
        tllm_utils.delay_kernel(-1)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="must have a CUDA device"):
            tllm_utils.delay_kernel(10)
    assert filename_safe_dtype_map_kv(torch.uint8) == "fp4x2_e2m1" and filename_safe_dtype_map_kv(BF16) == "bf16"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_delay_takes_time():
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    tllm_utils.delay_kernel(2000)
    end.record()
    torch.cuda.synchronize()
    assert 1.5 < start.elapsed_time(end) < 20
