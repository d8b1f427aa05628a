# SPDX-License-Identifier: Apache-2.0
"""RMSNorm of q and k with 3-D rotary embedding. The kernel is CUDA only; its argument checks are tested anywhere."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flashinfer.norm import fused_qk_rmsnorm_rope
from flashinfer.trace.templates.norm import fused_qk_rmsnorm_rope_trace

from ..bad_arguments import pattern

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
reference = fused_qk_rmsnorm_rope_trace.reference
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def setting(heads=(4, 4, 4), head_dim=128, grid=(3, 4, 5), channels=(44, 42, 42), **more):
    """Return the keyword arguments of one call."""
    names = ("num_heads_q", "num_heads_k", "num_heads_v", "ppf", "pph", "ppw")
    names += ("num_frame_channels", "num_height_channels", "num_width_channels")
    return dict(zip(names, (*heads, *grid, *channels), strict=True), head_dim=head_dim, **more)


def tensors(device, keywords, batch=2, flat=False):
    heads = [keywords[f"num_heads_{x}"] for x in "qkv"]
    seq, width = keywords["ppf"] * keywords["pph"] * keywords["ppw"], sum(heads) * keywords["head_dim"]
    qkv = torch.randn((batch * seq, width) if flat else (batch, seq, width), device=device).to(BF16)
    q_weight, k_weight = (torch.randn(n * keywords["head_dim"], device=device).to(BF16) for n in heads[:2])
    return qkv, q_weight, k_weight


def check(actual, expected, keywords):
    """Check the tolerance of the contract: a bf16 rounding between norm and rotation, then one at the end."""
    fp8, scale = keywords.get("output_fp8", False), keywords.get("output_quant_scale", 1.0)
    limit = max(0.75 * scale, 0.375) if fp8 else 0.1 if keywords.get("is_qk_norm", True) else 0.05
    for name, a, e in zip("qkv", actual, expected, strict=True):
        assert a.shape == e.shape and a.dtype == e.dtype, name
        if name == "v":
            assert torch.equal(a.view(torch.uint8), e.view(torch.uint8))
        elif a.numel():
            assert (a.float() - e.float()).abs().max() < limit, name


SETTINGS = {
    "interleaved": setting(),
    "half split": setting(interleave=False),
    "no norm": setting(is_qk_norm=False),
    "no norm, half split": setting(is_qk_norm=False, interleave=False),
    "head_dim 64": setting(head_dim=64, channels=(20, 22, 22)),
    "head_dim 256": setting(head_dim=256, channels=(84, 86, 86)),
    "grouped heads": setting(heads=(8, 2, 2)),
    "heads of three sizes": setting(heads=(5, 3, 1)),
    "most heads": setting(heads=(32, 32, 32)),
    "one axis": setting(channels=(0, 0, 128), grid=(1, 1, 17)),
    "one token": setting(grid=(1, 1, 1)),
    "yarn": setting(factor=4.0, low=2.0, high=12.0, attention_factor=1.2),
    "yarn with a step": setting(factor=4.0, low=5.0, high=5.0, attention_factor=1.2, interleave=False),
    "other base": setting(base=500.0, eps=1e-3),
    "fp8": setting(output_fp8=True, output_quant_scale=0.5, v_quant_scale=2.0),
    "fp8, half split, no norm": setting(output_fp8=True, interleave=False, is_qk_norm=False),
}


@needs_cuda
@pytest.mark.parametrize("flat", [False, True], ids=["3-D", "2-D"])
@pytest.mark.parametrize("case", SETTINGS)
def test_values(case, flat):
    keywords = SETTINGS[case]
    arguments = tensors("cuda", keywords, flat=flat)
    check(fused_qk_rmsnorm_rope(*arguments, **keywords), reference(*arguments, **keywords), keywords)


@needs_cuda
def test_empty_batch():
    keywords = setting()
    arguments = tensors("cuda", keywords, batch=0)
    check(fused_qk_rmsnorm_rope(*arguments, **keywords), reference(*arguments, **keywords), keywords)


@needs_cuda
@pytest.mark.parametrize("fp8", [False, True])
def test_buffers_are_returned(fp8):
    keywords = setting(output_fp8=fp8)
    arguments = tensors("cuda", keywords)
    outs = [torch.empty(2, 60, 4, 128, dtype=FP8 if fp8 else BF16, device="cuda") for _ in "qkv"]
    actual = fused_qk_rmsnorm_rope(*arguments, **keywords, **dict(zip(("q_out", "k_out", "v_out"), outs, strict=True)))
    assert all(a is out for a, out in zip(actual, outs, strict=True))
    check(actual, reference(*arguments, **keywords), keywords)


def test_reference_turns_pairs():
    """Check the reference: token (f, h, w) rotates each pair by the position on its axis, and lengths are kept."""
    keywords = setting(heads=(1, 1, 1), head_dim=64, channels=(20, 22, 22), grid=(2, 3, 4), is_qk_norm=False)
    qkv, q_weight, k_weight = tensors("cpu", keywords, batch=1)
    q, _, v = reference(qkv, q_weight, k_weight, **keywords)
    x = qkv[0, :, :64].float()
    assert torch.equal(q[0, 0, 0].float(), x[0])  # the first token is not rotated
    token, (f, h, w) = 1 * 12 + 2 * 4 + 3, (1, 2, 3)
    angle = torch.tensor([f * 10000 ** (-2 * i / 20) for i in range(10)])
    angle = torch.cat([angle, *(torch.tensor([p * 10000 ** (-2 * i / 22) for i in range(11)]) for p in (h, w))])
    turned = torch.view_as_complex(x[token].view(32, 2)) * torch.polar(torch.ones(32), angle)
    torch.testing.assert_close(q[0, token, 0].float(), torch.view_as_real(turned).flatten(), rtol=1e-2, atol=1e-2)
    assert torch.equal(v.flatten(), qkv[..., 128:].flatten())


def test_cpu_tensor():
    keywords = setting()
    with pytest.raises(ValueError, match=r"fused_qk_rmsnorm_rope: qkv must be on a CUDA device.*, got cpu"):
        fused_qk_rmsnorm_rope(*tensors("cpu", keywords), **keywords)


def resized(name, size):
    return lambda a: a.update({name: a[name].new_empty(size)})


def retyped(name, dtype):
    return lambda a: a.update({name: a[name].to(dtype)})


BAD = {
    "too many heads": (setting(heads=(33, 1, 1)), None, "heads must be 1 to 32.*, got (33, 1, 1)"),
    "no heads": (setting(heads=(4, 0, 4)), None, "heads must be 1 to 32.*, got (4, 0, 4)"),
    "head_dim": (setting(head_dim=96, channels=(32, 32, 32)), None, "head_dim must be one of (64, 128, 256).*, got 96"),
    "odd channels": (setting(channels=(43, 43, 42)), None, "channels must be even.*, got (43, 43, 42)"),
    "channels' sum": (setting(channels=(44, 44, 42)), None, "must be even numbers that sum to head_dim = 128"),
    "grid": (setting(grid=(0, 4, 5)), None, "must be positive"),
    "attention_factor": (setting(attention_factor=1.2), None, "attention_factor must be 1.*, got 1.2"),
    "qkv columns": (setting(), resized("qkv", (2, 60, 1000)), "qkv.shape[-1] must be 1536.*, got 1000"),
    "sequence": (setting(), resized("qkv", (2, 59, 1536)), "qkv.shape[1] must be 60.*, got 59"),
    "tokens": (setting(), resized("qkv", (119, 1536)), "qkv.shape[0] must be a multiple of 60.*, got 119"),
    "rank": (setting(), resized("qkv", (1, 2, 60, 1536)), "qkv must have 2 or 3 dimensions.*, got 4"),
    "qkv dtype": (setting(), retyped("qkv", torch.float16), "qkv must have dtype torch.bfloat16.*, got torch.float16"),
    "layout": (setting(), lambda a: a.update(qkv=a["qkv"].transpose(0, 1)), "must be contiguous"),
    "weight size": (setting(), resized("q_weight", 500), "q_weight must be (512,).*, got (500,)"),
    "weight dtype": (
        setting(),
        retyped("k_weight", torch.float32),
        "k_weight must be (512,) torch.bfloat16.*, got (512,) torch.float32",
    ),
    "out shape": (
        setting(),
        lambda a: a.update(q_out=a["qkv"].new_empty(2, 60, 512)),
        "q_out must be contiguous (2, 60, 4, 128).*, got (2, 60, 512)",
    ),
    "out dtype": (
        setting(),
        lambda a: a.update(v_out=a["qkv"].new_empty(2, 60, 4, 128, dtype=FP8)),
        "v_out must be contiguous.*, got (2, 60, 4, 128) torch.float8_e4m3fn",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case):
    """Check argument errors with fake GPU tensors: validation precedes any access."""
    keywords, change, text = BAD[case]
    with FakeTensorMode():
        arguments = dict(zip(("qkv", "q_weight", "k_weight"), tensors("cuda", keywords), strict=True))
        if change is not None:
            change(arguments)
        with pytest.raises(ValueError, match=pattern(text)):
            fused_qk_rmsnorm_rope(**arguments, **keywords)
