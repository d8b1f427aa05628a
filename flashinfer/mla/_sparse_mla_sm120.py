# SPDX-License-Identifier: Apache-2.0
"""The path under which published code imports sparse MLA for SM120, which raises an error when it is called."""

from .._compat.unsupported import needs

__all__ = ["get_sparse_mla_sm120_module", "sparse_mla_sm120_decode", "sparse_mla_sm120_prefill"]

_GPU = "a Blackwell GPU (SM120) and kernels for it, which this package does not have"

get_sparse_mla_sm120_module = needs("get_sparse_mla_sm120_module", _GPU)
sparse_mla_sm120_decode = needs("sparse_mla_sm120_decode", _GPU)
sparse_mla_sm120_prefill = needs("sparse_mla_sm120_prefill", _GPU)
