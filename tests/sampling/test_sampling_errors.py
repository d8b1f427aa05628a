# SPDX-License-Identifier: Apache-2.0
"""Error messages for wrong arguments."""

from __future__ import annotations

import pytest
import torch

import flashinfer
from flashinfer._runtime.errors import ArgumentError

P = torch.full((4, 10), 0.1)


def every_other(t):
    return t.repeat_interleave(2, dim=-1)[..., ::2]


ZERO_D = r"Expected a 1D tensor of shape \(batch_size,\) or scalar.*got a 0-dimensional tensor"
TWO_D = "Expected a 1D tensor or scalar.*got a 2D tensor"
LENGTH = "Sampling parameter tensor batch size mismatch"
PARAMETERS = [
    ("min_p_sampling_from_probs", "min_p", {}),
    ("top_p_sampling_from_probs", "top_p", {}),
    ("top_k_sampling_from_probs", "top_k", {}),
    ("top_k_top_p_sampling_from_probs", "top_k", {"top_p": 0.5}),
    ("top_k_top_p_sampling_from_probs", "top_p", {"top_k": 5}),
    ("top_k_top_p_sampling_from_logits", "top_k", {"top_p": 0.5}),
    ("top_k_top_p_sampling_from_logits", "top_p", {"top_k": 5}),
    ("top_p_renorm_probs", "top_p", {}),
    ("top_k_renorm_probs", "top_k", {}),
    ("top_k_mask_logits", "top_k", {}),
    ("softmax", "temperature", {}),
]


@pytest.mark.parametrize("name, parameter, others", PARAMETERS)
@pytest.mark.parametrize("shape, text", [((), ZERO_D), ((4, 1), TWO_D), ((3,), LENGTH), ((0,), LENGTH), ((5,), LENGTH)])
def test_parameters(device, name, parameter, others, shape, text):
    call = getattr(flashinfer, name)
    with pytest.raises(ValueError, match=text):
        call(P.to(device), **others, **{parameter: torch.ones(shape, device=device)})


# (function, arguments, text)
BAD = [
    ("sampling_from_probs", {"probs": P[0]}, "probs must have 2 dimensions, got 1"),
    ("sampling_from_probs", {"probs": P[:, :0]}, r"probs.shape\[1\] must be 1 to.*, got 0"),
    ("sampling_from_probs", {"probs": every_other(P)}, r"probs.stride\(-1\) must be 1.*, got 2"),
    ("sampling_from_logits", {"logits": P[None]}, "sampling_from_logits: logits must have 2 dimensions, got 3"),
    ("sampling_from_logits", {"logits": P * 1j}, "sampling_from_logits: logits must have dtype float32"),
    ("top_p_renorm_probs", {"probs": P * 1j, "top_p": 0.9}, "top_p_renorm_probs: probs must have dtype float32"),
    (
        "softmax",
        {"logits": P * 1j},
        "softmax: logits must have dtype float32, float16 or bfloat16, got torch.complex64",
    ),
    (
        "sampling_from_probs",
        {"probs": P, "indices": torch.zeros(3)},
        "indices must be int32 or int64.*, got float32",
    ),
    ("sampling_from_probs", {"probs": P, "indices": torch.zeros(3, 1).int()}, "indices must have 1 dimension.*, got 2"),
    (
        "sampling_from_probs",
        {"probs": P[:0], "indices": torch.zeros(3).int()},
        r"must have rows for 3 indices, got shape\[0\] = 0",
    ),
    ("sampling_from_probs", {"probs": P, "indices": torch.zeros(3).short()}, "indices must be int32.*, got int16"),
    ("sampling_from_probs", {"probs": P, "indices": torch.tensor(1)}, r"indices must be a tensor"),
    ("sampling_from_logits", {"logits": P, "indices": [0, 1]}, r"indices must be a tensor of shape"),
    ("sampling_from_probs", {"probs": P, "generator": 7}, "generator must be a torch.Generator, got a int"),
    ("sampling_from_probs", {"probs": P, "seed": 1.5, "offset": 1}, "seed must be an int or a tensor, got a float"),
    ("sampling_from_probs", {"probs": P, "seed": 1, "offset": "1"}, "offset must be an int or a tensor, got a str"),
    (
        "sampling_from_probs",
        {"probs": P, "seed": 1, "offset": torch.zeros(1).long()},
        "both be tensors or both be scalars",
    ),
    (
        "sampling_from_probs",
        {"probs": P, "seed": torch.zeros(1).long(), "offset": 1},
        "both be tensors or both be scalars",
    ),
    (
        "sampling_from_probs",
        {"probs": P, "seed": torch.zeros(1), "offset": torch.zeros(1)},
        "must have dtype int64 or uint64",
    ),
    (
        "sampling_from_probs",
        {"probs": P, "seed": torch.zeros(3).long(), "offset": torch.zeros(4).long()},
        r"seed must have shape \(1,\) or \(4,\), got \(3,\)",
    ),
    (
        "sampling_from_probs",
        {"probs": P, "seed": torch.zeros(1).long(), "offset": torch.zeros(4, 1).long()},
        r"offset must have shape \(1,\) or \(4,\), got \(4, 1\)",
    ),
    (
        "top_k_top_p_sampling_from_probs",
        {"probs": P, "top_k": 1, "top_p": 0.5, "filter_apply_order": "top_p_first"},
        "Invalid filter_apply_order: 'top_p_first'",
    ),
    (
        "top_k_top_p_sampling_from_logits",
        {"logits": P, "top_k": 1, "top_p": 0.5, "filter_apply_order": ""},
        "Invalid filter_apply_order: ''",
    ),
    ("top_k_renorm_probs", {"probs": P.double(), "top_k": 1}, "probs must be float32 or float16.*, got float64"),
    ("top_k_mask_logits", {"logits": P.int(), "top_k": 1}, "logits must be float32 or float16.*, got int32"),
    ("softmax", {"logits": P[0]}, "softmax: logits must have 2 dimensions.*, got 1"),
    ("softmax", {"logits": P[0, 0], "temperature": torch.ones(1)}, "softmax: the input must have 2 dimensions, got 0"),
    (
        "softmax",
        {"logits": P, "temperature": torch.ones(4).to_sparse()},
        "softmax: temperature must be a dense tensor, got layout .*sparse_coo",
    ),
    ("sampling_from_probs", {"probs": P[0, 0]}, "sampling_from_probs: probs must have 2 dimensions, got 0"),
    ("top_k_sampling_from_probs", {"probs": P, "top_k": float("nan")}, "top_k must be a number"),
    ("top_k_sampling_from_probs", {"probs": P, "top_k": 2**70}, "top_k must be .*, got 1180591620717411303424"),
    (
        "chain_speculative_sampling",
        {"draft_probs": P, "draft_token_ids": torch.zeros(1, 4), "target_probs": P},
        "target_probs must have 3 dimensions, got 2",
    ),
    (
        "chain_speculative_sampling",
        {"draft_probs": P[None], "draft_token_ids": torch.zeros(1, 4), "target_probs": P[None]},
        r"target_probs.shape\[1\] must be 5.*, got 4",
    ),
    (
        "chain_speculative_sampling",
        {"draft_probs": P[None, :3], "draft_token_ids": torch.zeros(1, 4), "target_probs": P[None]},
        r"draft_token_ids.shape\[1\] must be 3.*, got 4",
    ),
]


@pytest.mark.parametrize("name, arguments, text", BAD, ids=[f"{b[0]}-{i}" for i, b in enumerate(BAD)])
def test_bad_arguments(device, name, arguments, text):
    moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    if "probs" in moved and "stride" in text:
        moved["probs"] = every_other(P.to(device))
    with pytest.raises(ArgumentError, match=text):
        getattr(flashinfer, name)(**moved)


@pytest.mark.parametrize("index", [-1, 4, 2**40])
def test_indices_of_no_row(index):
    indices = torch.tensor([0, 3, index])
    with pytest.raises(ArgumentError, match=rf"indices\[2\] must be a row of probs, which has 4.*, got {index}"):
        flashinfer.sampling_from_probs(P, indices)


def test_error_types(device):
    with pytest.raises(AssertionError):
        flashinfer.top_k_renorm_probs(P.to(device).double(), 3)
    with pytest.raises(ValueError):
        flashinfer.top_k_mask_logits(P.to(device), torch.ones(2, device=device))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a second device")
def test_devices_do_not_mix():
    with pytest.raises(ArgumentError, match="indices must be on cuda:0"):
        flashinfer.sampling_from_probs(P.cuda(), torch.zeros(2).int())
    with pytest.raises(ArgumentError, match="seed must be on cuda:0"):
        flashinfer.sampling_from_probs(P.cuda(), seed=torch.zeros(1).long(), offset=torch.zeros(1).long())


def test_devices_without_kernels():
    """Check that the error names the device, not the missing random generator."""
    probs = torch.ones(2, 8, device="meta")
    for name, call in (
        ("probs", lambda: flashinfer.sampling.sampling_from_probs(probs)),
        ("logits", lambda: flashinfer.sampling.top_k_top_p_sampling_from_logits(probs, 3, 0.5)),
    ):
        with pytest.raises(ArgumentError, match=rf": {name} must be on the CPU or a CUDA device.*, got meta"):
            call()


def test_names(device):
    module = flashinfer.sampling.get_sampling_module()
    assert module is flashinfer.sampling.get_sampling_module()
    p, none = P.to(device), None
    random = (True, None, 3, 4)
    for name, parameters, arguments in (
        ("sampling_from_probs", (), {}),
        ("top_p_sampling_from_probs", (none, 0.5), {"top_p": 0.5}),
        ("top_k_sampling_from_probs", (torch.full((4,), 3, device=device), 0), {"top_k": 3}),
        ("min_p_sampling_from_probs", (none, 0.5), {"min_p": 0.5}),
    ):
        tokens, valid = getattr(module, name)(p, none, *parameters, *random, True)
        assert torch.equal(tokens, getattr(flashinfer, name)(p, **arguments, seed=3, offset=4)) and valid.all()
    tokens = module.top_k_top_p_sampling_from_probs(p, none, none, 3, none, 0.5, *random, False)
    arguments = {"filter_apply_order": "joint", "seed": 3, "offset": 4}
    assert torch.equal(tokens, flashinfer.top_k_top_p_sampling_from_probs(p, 3, 0.5, **arguments))
    assert torch.equal(
        module.sampling_from_logits(p, none, *random), flashinfer.sampling_from_logits(p, seed=3, offset=4)
    )
    assert torch.equal(module.softmax(p, none, 0.5, None), flashinfer.softmax(p, 0.5))
    assert torch.equal(module.top_k_mask_logits(p, none, 3), flashinfer.top_k_mask_logits(p, 3))
    assert flashinfer.sampling.top_p_renorm_prob is flashinfer.top_p_renorm_probs
    assert flashinfer.sampling.top_k_renorm_prob is flashinfer.top_k_renorm_probs
    assert flashinfer.jit.gen_sampling_module().name == "sampling"
