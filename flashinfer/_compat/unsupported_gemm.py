# SPDX-License-Identifier: Apache-2.0
"""Products that serving engines import and that only Blackwell GPUs can serve.

They are no implementations: each can be imported, has the published signature where that is known, says that it
supports no device, and raises an error that names what it would need.
"""

from __future__ import annotations

from typing import Any, Callable, NoReturn, Optional

from .unsupported import needs

#: Names that ``flashinfer`` exports.
__all__ = [
    "bmm_mxfp8",
    "mm_bf16_fp4",
    "mm_fp8",
    "mm_nvfp4_svdquant",
    "nvfp4_quantize_smooth",
    "prepare_bf16_fp4_weights",
    "prepare_low_latency_gemm_weights",
    "svdquant_linear",
    "tgv_gemm_sm100",
]


def _needs_gpu(
    name: str, parameters: Optional[str] = None, arch: str = "SM100 on", trace: Any = None
) -> Callable[..., NoReturn]:
    what = f"a Blackwell GPU ({arch}) and kernels for it, which this package does not have"
    return needs(name, what, parameters, trace, "gemm.gemm_base")


mm_fp8 = _needs_gpu("mm_fp8", "a, b, alpha=None, out_dtype=torch.bfloat16, out=None, backend='trtllm_low_latency'")
bmm_mxfp8 = _needs_gpu("bmm_mxfp8")
mm_bf16_fp4 = _needs_gpu("mm_bf16_fp4")
prepare_bf16_fp4_weights = _needs_gpu("prepare_bf16_fp4_weights")
prepare_low_latency_gemm_weights = _needs_gpu("prepare_low_latency_gemm_weights")
mm_nvfp4_svdquant = _needs_gpu("mm_nvfp4_svdquant")
nvfp4_quantize_smooth = _needs_gpu("nvfp4_quantize_smooth")
svdquant_linear = _needs_gpu("svdquant_linear")
tgv_gemm_sm100 = _needs_gpu("tgv_gemm_sm100", arch="SM100 or SM103")

# Not at top level.
group_gemm_mxfp4_nt_groupwise = _needs_gpu("group_gemm_mxfp4_nt_groupwise")
group_gemm_mxfp8_mxfp4_nt_groupwise = _needs_gpu("group_gemm_mxfp8_mxfp4_nt_groupwise")
group_gemm_nvfp4_nt_groupwise = _needs_gpu("group_gemm_nvfp4_nt_groupwise")
grouped_gemm_nt_masked = _needs_gpu(
    "grouped_gemm_nt_masked",
    "lhs, rhs, out, masked_m, *, ab_dtype, sf_dtype, c_dtype, sf_vec_size, topk_weights=None, idx_src_info=None, "
    "rank_src_info=None, out_ptrs=None, num_ranks=0, dst_signals=None, sm_count=None, barrier_flag_local=None, "
    "barrier_flag_multicast=None, is_combine_fusion=False, is_swap_ab=False, **kwargs",
)
create_scale_factor_tensor = _needs_gpu("create_scale_factor_tensor")
get_nvfp4_svdquant_module = _needs_gpu("get_nvfp4_svdquant_module")
get_trtllm_low_latency_gemm_module = _needs_gpu("get_trtllm_low_latency_gemm_module")
trtllm_low_latency_gemm = _needs_gpu("trtllm_low_latency_gemm")
Sm100BlockScaledPersistentDenseGemmKernel = _needs_gpu("Sm100BlockScaledPersistentDenseGemmKernel")
Sm107BlockScaledPersistentDenseGemmKernel = _needs_gpu("Sm107BlockScaledPersistentDenseGemmKernel", arch="SM107")
Sm120B12xBlockScaledDenseGemmKernel = _needs_gpu(
    "Sm120B12xBlockScaledDenseGemmKernel",
    "sf_vec_size, mma_tiler_mn, cluster_shape_mn, mma_k=64, tile_k=None, single_work_tile_per_cta=False, "
    "use_prefetch=False, enable_pdl=True, direct_one_m_tile_scheduler=False, split_k_slices=1, "
    "split_k_atomic_bf16=False, use_m1_non_tma_a=False, use_m1_non_tma_c=False, use_m1_non_tma_sfa=False, "
    "load_path='tma', swap_ab=False",
    arch="SM120",
)

# Products of the package cuda.tile, and those of Blackwell that came with 0.7.
_NEEDS_TILE = "kernels of the package cuda.tile, which this package does not have"
masked_bmm = needs("masked_bmm", _NEEDS_TILE)
ragged_bmm = needs("ragged_bmm", _NEEDS_TILE)
gemm_alpha_beta = needs("gemm_alpha_beta", _NEEDS_TILE)
masked_scaled_bmm = needs("masked_scaled_bmm", _NEEDS_TILE)
ragged_scaled_bmm = needs("ragged_scaled_bmm", _NEEDS_TILE)
ragged_block_scaled_bmm = needs("ragged_block_scaled_bmm", _NEEDS_TILE)
group_gemm_fp8_nt_groupwise_contiguous = _needs_gpu("group_gemm_fp8_nt_groupwise_contiguous")
fp4_linear = _needs_gpu("fp4_linear")
fp8_linear = _needs_gpu("fp8_linear")

# Launchers and runners inside published modules.
_OTHER = "the native launcher of another package: this one has launchers of its own"
get_gemm_sm90_module = needs("get_gemm_sm90_module", _OTHER)
get_fp8_blockscale_gemm_runner_sm90 = needs("get_fp8_blockscale_gemm_runner_sm90", _OTHER)
launch_compute_sm80_group_gemm_args = needs("launch_compute_sm80_group_gemm_args", _OTHER)
launch_compute_sm90_group_gemm_args = needs("launch_compute_sm90_group_gemm_args", _OTHER)
_cudnn_gemm_fp8_runner = needs("_cudnn_gemm_fp8_runner", "graphs of cuDNN for FP8, which this package does not make")
