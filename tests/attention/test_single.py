# SPDX-License-Identifier: Apache-2.0
"""Single-request attention: results, options, errors, torch.compile."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

import flashinfer
from flashinfer import single_decode_with_kv_cache, single_prefill_with_kv_cache
from flashinfer.prefill import single_prefill_with_kv_cache_return_lse

from ..hopper.devices import has_hopper
from .inputs import LAYOUTS, Batch
from .reference import Attention
from .wrappers import F16, close


def decode_inputs(device: str, layout: str = "NHD", kv_len: int = 97, **options):
    batch = Batch([1], [kv_len], device=device, **options)
    return batch, batch.q[0], *batch.dense(layout)


@pytest.mark.parametrize("tensor_cores", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_decode(device, layout, tensor_cores):
    batch, q, k, v = decode_inputs(device, layout)
    for options, what in (
        ({}, {}),
        ({"window_left": 20}, {"window_left": 20}),
        ({"sm_scale": 0.3, "q_scale": 0.5, "k_scale": 2.0, "v_scale": 3.0},) * 2,
    ):
        run = functools.partial(single_decode_with_kv_cache, q, k, v, layout, use_tensor_cores=tensor_cores, **options)
        out, lse = run(return_lse=True)
        expected = batch.expected(Attention(**what))
        close((out[None], lse[None]), expected, 5e-3)
        assert out.dtype == F16 and lse.shape == (4,)
        assert torch.equal(run(), out)


@pytest.mark.parametrize(
    "options, what",
    [
        ({"logits_soft_cap": 5.0}, {"logits_soft_cap": 5.0}),
        ({"pos_encoding_mode": "ALIBI"}, {"alibi": True}),
        ({"pos_encoding_mode": "ROPE_LLAMA", "rope_scale": 2.0}, {"rope": True, "rope_scale": 2.0}),
    ],
)
def test_compiled_options(device, options, what):
    batch, q, k, v = decode_inputs(device)
    out, lse = single_decode_with_kv_cache(q, k, v, return_lse=True, **options)
    close((out[None], lse[None]), batch.expected(Attention(**what)), 5e-3)
    batch = Batch([30], [97], device=device)
    got = single_prefill_with_kv_cache_return_lse(batch.q, *batch.dense(), causal=True, **options)
    close(got, batch.expected(Attention(causal=True, **what)), 1e-2)


def test_decode_without_keys(device):
    _, q, k, v = decode_inputs(device, kv_len=0)
    out, lse = single_decode_with_kv_cache(q, k, v, return_lse=True)
    assert (out == 0).all() and (lse == -torch.inf).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("qo_len, kv_len", [(1, 1), (33, 130), (70, 20)])
def test_prefill(device, layout, qo_len, kv_len):
    batch = Batch([qo_len], [kv_len], device=device)
    k, v = batch.dense(layout)
    mask = torch.rand(qo_len, kv_len) < 0.5
    bits = torch.from_numpy(np.packbits(mask.numpy().flatten(), bitorder="little")).to(device)
    for options, what in (
        ({}, {}),
        ({"causal": True, "window_left": 9},) * 2,
        ({"causal": True, "custom_mask": mask.to(device)}, {"mask": mask}),
        ({"packed_custom_mask": bits, "custom_mask": ~mask.to(device)}, {"mask": mask}),
        ({"sm_scale": 0.3, "k_scale": 2.0, "v_scale": 3.0},) * 2,
    ):
        got = single_prefill_with_kv_cache(batch.q, k, v, kv_layout=layout, return_lse=True, **options)
        close(got, batch.expected(Attention(**what)), 5e-3)
        out = single_prefill_with_kv_cache(batch.q, k, v, kv_layout=layout, **options)
        assert torch.equal(out, got[0])


def test_odd_heads_cannot_be_rotated():
    """Check that rotary embedding rejects odd head dimensions: CPU kernels would read one element past the head."""
    q, k, v = torch.zeros(3, 5, 2, 65).half().unbind()
    with pytest.raises(ValueError, match=r"head_dim_qk must be an even number with ROPE_LLAMA .*, got 65"):
        single_prefill_with_kv_cache(q, k, v, pos_encoding_mode="ROPE_LLAMA")


def test_prefill_takes_strided_tensors(device):
    batch = Batch([33], [97], device=device)
    k, v = batch.dense()
    joined = torch.cat([batch.q, batch.q], dim=1)[:, :4]
    kv = torch.cat([k, v], dim=-1)
    got = single_prefill_with_kv_cache(joined, kv[..., :64], kv[..., 64:], return_lse=True)
    close(got, batch.expected())


def test_prefill_of_fp8(device):
    batch = Batch([33], [97], dtype=torch.float8_e4m3fn, device=device)
    k, v = batch.dense()
    scales = [torch.full((n,), s, device=device) for n, s in ((4, 0.5), (2, 2.0), (2, 3.0))]
    expected = batch.expected(Attention(causal=True, q_scale=0.5, k_scale=2.0, v_scale=3.0))
    got = single_prefill_with_kv_cache(batch.q, k, v, *scales, F16, causal=True, return_lse=True)
    close(got, expected, 1e-2)
    for options, text in (
        ({"window_left": 3}, "window_left must be -1 .*, got 3"),
        ({"o_dtype": torch.float8_e4m3fn}, "16-bit"),
    ):
        with pytest.raises(AssertionError, match=text):
            single_prefill_with_kv_cache(batch.q, k, v, **options)
    with pytest.raises(AssertionError, match=r"must be torch\.float8_e4m3fn"):
        single_prefill_with_kv_cache(batch.q, k.half(), v.half())
    with pytest.raises(AssertionError, match="head dimensions"):
        single_prefill_with_kv_cache(batch.q, k, v[..., :32])


def test_prefill_of_nvfp4(device):
    batch = Batch([33], [97], kv_dtype=torch.uint8, device=device)
    k, v = batch.dense()
    options = {"k_scale": 0.5, "v_scale": 0.25, "return_lse": True}
    factors = batch.k_sf, batch.v_sf
    expected = batch.expected(Attention(k_scale=0.5, v_scale=0.25))
    for given in (factors, tuple(x.view(torch.uint8) for x in factors)):
        close(single_prefill_with_kv_cache(batch.q, k, v, kv_cache_sf=given, **options), expected, 1e-2)
    with pytest.raises(ValueError, match="kv_cache_sf"):
        single_prefill_with_kv_cache(batch.q, k, v)
    with pytest.raises(ValueError, match="kv_cache_sf of keys must be"):
        single_prefill_with_kv_cache(batch.q, k, v, kv_cache_sf=(batch.k_sf[1:], batch.v_sf))


def test_output_dtype_by_name(device):
    batch = Batch([3], [9], device=device)
    out = single_prefill_with_kv_cache(batch.q, batch.k, batch.v, o_dtype="bfloat16")
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), batch.expected()[0], rtol=1e-2, atol=1e-2)


def test_errors(device):
    _, q, k, v = decode_inputs(device)
    rows = q[None]
    many = q[:1].expand(32768, -1).contiguous()  # head count
    short = torch.full((3,), 255, dtype=torch.uint8, device=device)
    across = torch.ones(k.shape[0], 1, dtype=torch.bool, device=device)  # shape: keys x queries
    for call, error, text in (
        (lambda: single_decode_with_kv_cache(q, k, v, "DHN"), KeyError, "kv_layout must be one of NHD, HND, got 'DHN'"),
        (
            lambda: single_decode_with_kv_cache(q, k, v, "NHD", "SINE"),
            KeyError,
            "pos_encoding_mode must be one of NONE, ROPE_LLAMA, ALIBI, got 'SINE'",
        ),
        (lambda: single_decode_with_kv_cache(rows, k, v), ValueError, "q must have 2 dimensions.*, got 3"),
        (lambda: single_decode_with_kv_cache(q[:3], k, v), RuntimeError, "q must have a multiple of 2 heads .*, got 3"),
        (lambda: single_decode_with_kv_cache(q, k, v[1:]), RuntimeError, "v"),
        (lambda: single_decode_with_kv_cache(many, many[None], many[None]), ValueError, r"heads .*, got 32768"),
        (lambda: single_prefill_with_kv_cache(q, k, v), ValueError, "must have 3 dimensions each"),
        (lambda: single_prefill_with_kv_cache(rows, k, v, backend="fa9"), ValueError, "fa9"),
        (lambda: single_prefill_with_kv_cache(rows, k, v, custom_mask=torch.ones(2, 2)), ValueError, "custom_mask"),
        (
            lambda: single_prefill_with_kv_cache(rows, k, v, custom_mask=across),
            ValueError,
            "custom_mask must have shape",
        ),
        (lambda: single_prefill_with_kv_cache(rows, k, v, o_dtype=16), TypeError, "16|int"),
        (
            lambda: single_prefill_with_kv_cache(rows, k, v, packed_custom_mask=short),
            ValueError,
            "mask must have .*, got 3",
        ),
    ):
        with pytest.raises(error, match=text):
            call()
    if device == "cpu" or not has_hopper():
        with pytest.raises(NotImplementedError, match="fa2"):
            single_prefill_with_kv_cache(rows, k, v, backend="fa3")


def test_partial_is_published_as_such():
    partial = flashinfer.single_prefill_with_kv_cache_return_lse
    assert isinstance(partial, functools.partial) and partial.keywords == {"return_lse": True}
    assert single_decode_with_kv_cache.__module__.startswith("flashinfer.decode")


def test_torch_compile(device):
    batch, q, k, v = decode_inputs(device)
    mask = torch.rand(1, 97, device=device) < 0.5

    @torch.compile(fullgraph=True, backend="eager" if device == "cpu" else "inductor")
    def both(q, k, v):
        decode, lse = single_decode_with_kv_cache(q, k, v, return_lse=True, v_scale=0.5)
        prefill = single_prefill_with_kv_cache(q[None] * 2, k, v, causal=True, sm_scale=0.25)
        masked = single_prefill_with_kv_cache(q[None], k, v, custom_mask=mask)
        return decode + 1, lse, prefill, masked

    decode, lse, prefill, masked = both(q, k, v)
    expected = batch.expected(Attention(v_scale=0.5))
    close((decode[None] - 1, lse[None]), expected, 5e-3)
    assert torch.equal(prefill, single_prefill_with_kv_cache(q[None] * 2, k, v, causal=True, sm_scale=0.25))
    assert torch.equal(masked, single_prefill_with_kv_cache(q[None], k, v, custom_mask=mask))
