# SPDX-License-Identifier: Apache-2.0
"""The source that ``get_act_and_mul_cu_str`` makes of a user's activation compiles and exports its function."""

from __future__ import annotations

import pytest

from flashinfer._runtime.errors import ArgumentError
from flashinfer.jit import gen_jit_spec, get_act_and_mul_cu_str

RELU = "__device__ __forceinline__ float relu(const float& x) { return x > 0.f ? x : 0.f; }"


def test_a_module_of_the_source(hopper, tmp_path):
    (tmp_path / "relu_and_mul.cu").write_text(get_act_and_mul_cu_str("relu", RELU))
    module = gen_jit_spec("relu_and_mul", [tmp_path / "relu_and_mul.cu"]).build_and_load()
    assert callable(module.relu_and_mul)


def test_the_name_must_be_defined():
    with pytest.raises(ArgumentError, match="act_func_name must be the function that act_func_def defines, got 'silu'"):
        get_act_and_mul_cu_str("silu", RELU)
