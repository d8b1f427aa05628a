# SPDX-License-Identifier: Apache-2.0
"""Norms that only Blackwell GPUs can serve: published code can import them, and a call says what it needs."""

from __future__ import annotations

import importlib

import pytest
import torch

import flashinfer


@pytest.mark.parametrize("name", ["rmsnorm_fp4quant", "add_rmsnorm_fp4quant"])
def test_fp4_norms_say_what_they_need(name):
    module = importlib.import_module(f"flashinfer.cute_dsl.{name}")
    function = getattr(flashinfer, name)
    assert function is getattr(module, name) is getattr(importlib.import_module("flashinfer.cute_dsl"), name)
    x = torch.ones(2, 16)
    with pytest.raises(RuntimeError, match=rf"^{name}: needs a Blackwell GPU \(SM100\) .* which this package"):
        function(*([x] * (2 if name.startswith("rms") else 3)), eps=1e-6)
    assert not function.is_compute_capability_supported(90)
