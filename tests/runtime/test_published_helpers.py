# SPDX-License-Identifier: Apache-2.0
"""Small functions that published code imports: ranges, bases of logarithms, queries of names that refuse."""

from __future__ import annotations

import pytest
import torch

import flashinfer
from flashinfer import utils
from flashinfer.topk_varlen.kernels import GvrTopKLBConfig
from flashinfer.topk_varlen.topk_varlen import _lb_max_batch_size


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


@pytest.mark.parametrize("name", ["mm_fp4", "mm_fp8", "mm_mxfp8"])
def test_queries_of_names_that_refuse(name):
    op = getattr(flashinfer, name)
    assert not op.is_backend_supported("cudnn") and not op.is_backend_supported("cudnn", 80)
    assert not op.is_compute_capability_supported(90) and not op.has_backend("cudnn")
    assert isinstance(op.has_backend_choices(), bool) and op.suitable_auto_backends == []
    assert callable(op.fi_trace)


def test_the_chosen_backend_of_decode():
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1024, dtype=torch.uint8))
    assert wrapper.resolved_backend == "fa2"
