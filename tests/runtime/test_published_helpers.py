# SPDX-License-Identifier: Apache-2.0
"""Small functions that published code imports: ranges, bases of logarithms, queries of names that refuse."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch

import flashinfer
from flashinfer import api_logging, utils
from flashinfer.fused_moe import runners
from flashinfer.fused_moe.core import _moe_topk_ids_init
from flashinfer.topk_varlen.kernels import GvrTopKLBConfig
from flashinfer.topk_varlen.topk_varlen import _lb_max_batch_size
from flashinfer.trace import template


def test_ranges_and_powers():
    found = utils._get_range_buf(5, "cpu")
    assert found.tolist() == [0, 1, 2, 3, 4] and found.dtype is torch.int32
    assert utils._get_range_buf(5, "cpu") is found
    assert [utils._ceil_pow2(x) for x in (1, 3, 8, 9)] == [1, 4, 8, 16]


def test_logarithms():
    assert utils.LSE_BASES == ("log2", "ln") and utils.LSE_LAYOUTS == ("NH", "HN")
    utils.check_lse_base("ln")
    utils.check_lse_layout("HN")
    with pytest.raises(ValueError, match="lse_base must be one of log2, ln, got 'e'"):
        utils.check_lse_base("e")
    with pytest.raises(ValueError, match="lse_layout must be one of NH, HN, got 'N'"):
        utils.check_lse_layout("N")


def test_sizes_of_the_balanced_top_k():
    assert [_lb_max_batch_size(n) for n in (1, 64, 65, 1024)] == [64, 64, 128, 1024]
    with pytest.raises(ValueError, match="at most 1024"):
        _lb_max_batch_size(1025)
    made = GvrTopKLBConfig()
    assert (made.max_batch_size, made.long_threshold, made.cluster_size, made.num_threads) == (1024, 65536, 4, 512)
    for bad in ({"num_threads": 256}, {"cluster_size": 17}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            GvrTopKLBConfig(**bad)


@pytest.mark.parametrize("name", ["mm_fp8"])
def test_queries_of_names_that_refuse(name):
    op = getattr(flashinfer, name)
    assert not op.is_backend_supported("cudnn") and not op.is_backend_supported("cudnn", 80)
    assert not op.is_compute_capability_supported(90) and not op.has_backend("cudnn")
    assert isinstance(op.has_backend_choices(), bool) and op.suitable_auto_backends == []
    assert callable(op.fi_trace)


def test_the_chosen_backend_of_decode():
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1024, dtype=torch.uint8))
    assert wrapper.resolved_backend == "fa2"


def test_alignment_of_groups():
    a, b = torch.ones(6, 128).to(torch.float8_e4m3fn), torch.ones(2, 128, 128).to(torch.float8_e4m3fn)
    scales = torch.ones(6, 1), torch.ones(2, 1, 1), torch.tensor([0, 4, 6], dtype=torch.int32)
    product = functools.partial(flashinfer.gemm.group_gemm_fp8_nt_groupwise, a, b, *scales, scale_major_mode="K")
    assert torch.equal(product(segment_alignment=2), product())
    with pytest.raises(ValueError, match="segment_alignment must be at least 1, got 0"):
        product(segment_alignment=0)


def test_tolerances_of_templates():
    assert template.default_tolerances(torch.float16) == (1e-3, 1e-3)
    assert template.default_tolerances(torch.int32) == (0.0, 0.0)
    assert template.standard_check(torch.ones(3), torch.ones(3), rtol=0.0, atol=0.0)


def test_experimental_backends(monkeypatch):
    """Check that a marked backend warns once, and that "auto" leaves it out unless it is allowed."""
    from flashinfer._runtime import experimental

    experimental.warn_once.cache_clear()

    @utils.experimental_backend
    def is_new(x, backend="auto"):
        return True

    @utils.backend_requirement({"new": is_new, "old": lambda x, backend="auto": True})
    def double(x, backend="auto"):
        return backend if backend != "auto" else double.suitable_auto_backends[0]

    assert double.experimental_backends == {"new"}
    assert double(1) == "old" and not api_logging.experimental_auto_backends_allowed()
    with pytest.raises(RuntimeError, match="FLASHINFER_ALLOW_EXPERIMENTAL_AUTO_BACKENDS"):
        api_logging.require_experimental_auto_backends("double")
    with pytest.warns(api_logging.ExperimentalWarning, match="backend 'new' is experimental"):
        assert double(1, backend="new") == "new"
    monkeypatch.setenv("FLASHINFER_ALLOW_EXPERIMENTAL_AUTO_BACKENDS", "1")
    with pytest.warns(api_logging.ExperimentalWarning, match="was chosen automatically"):
        assert double(1) == "new"


def test_experimental_functions():
    @api_logging.flashinfer_experimental_api(feature="doubling")
    def twice(x):
        return 2 * x

    assert twice.is_experimental
    with pytest.warns(api_logging.ExperimentalWarning, match="doubling is experimental"):
        assert twice(2) == 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert twice(3) == 6


def test_random_experts_of_trials():
    packed = _moe_topk_ids_init(8)((64, 2), torch.int32, "cpu")
    experts, weights = runners.unpack_topk(packed)
    assert packed.shape == (64, 2) and set(experts.flatten().tolist()) == set(range(8))
    assert (weights == 1).all()
    plain = _moe_topk_ids_init(8, packed=False)((64, 2), torch.int64, "cpu")
    assert plain.dtype is torch.int64 and plain.max() == 7
