# SPDX-License-Identifier: Apache-2.0
"""Compressed keys appended in NVFP4, and their rotary parts in e4m3."""

from __future__ import annotations

import pytest
import torch

from flashinfer.page import nvfp4_quantize_append_paged_mla_kv_cache as append
from flashinfer.trace.templates.page_nvfp4_mla import nvfp4_quantize_append_paged_mla_kv_cache_trace as trace
from flashinfer.trace.templates.quantization_blocks import e2m1_values

CACHES = ("ckv_cache", "ckv_sf_cache", "kpe_cache")


def arguments(device: str, **sizes: int) -> dict:
    made = trace.init(nnz_kv=9, batch_size=3, page_size=4, device=device, **sizes)
    made["batch_indices"][2] = -1  # a row without a slot
    made["append_ckv"][0, :16] = 0
    return made


@pytest.mark.parametrize("is_tensor", [False, True])
def test_values(device, is_tensor):
    kw = arguments(device)
    kw |= {"ckv_scale": 0.01, "kpe_scale": 1e-3}  # kpe beyond 448 saturates
    if is_tensor:
        kw |= {name: torch.tensor([kw[name]], device=device) for name in ("ckv_scale", "kpe_scale")}
    expected = trace.reference(**kw)
    assert append(**kw) is None
    for name, wanted in zip(CACHES, expected, strict=True):
        assert torch.equal(kw[name].view(torch.uint8), wanted.view(torch.uint8))
    # A cache that is read again has the appended values.
    first = (int(kw["kv_indices"][int(kw["positions"][0]) // 4]), int(kw["positions"][0]) % 4)
    sf = kw["ckv_sf_cache"][first].float().repeat_interleave(16)
    values = e2m1_values(kw["ckv_cache"][first]) * sf * 0.01
    error = (values - kw["append_ckv"][0].float()).abs().max()
    assert error < 0.2 * kw["append_ckv"][0].float().abs().max()
    assert not values[:16].any()


def test_ties_go_to_the_even_code(device):
    kw = arguments(device)
    row = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, -6.0])
    kw["append_ckv"][1] = row.repeat(32).to(device)
    append(**kw)
    page = int(kw["kv_indices"][int(kw["positions"][1]) // 4]), int(kw["positions"][1]) % 4
    got = e2m1_values(kw["ckv_cache"][page])[:8].tolist()
    assert got == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"append_ckv": (9, 256)}, r"append_ckv must be \(nnz, 512\)"),
        ({"append_kpe": (9, 32)}, r"append_kpe must be \(nnz, 64\)"),
        ({"ckv_cache": (6, 4, 128)}, "ckv_cache must have shape"),
        ({"ckv_sf_cache": (4, 4, 16)}, "ckv_sf_cache must have shape"),
        ({"ckv_scale": (2,)}, "ckv_scale must be a number or a tensor of one element"),
    ],
    ids=str,
)
def test_refused(changes, text):
    kw = arguments("cpu")
    for name, shape in changes.items():
        dtype = kw[name].dtype if isinstance(kw[name], torch.Tensor) else torch.float32
        kw[name] = torch.zeros(shape, dtype=dtype)
    with pytest.raises(ValueError, match=text):
        append(**kw)
