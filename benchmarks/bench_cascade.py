# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of ``flashinfer.cascade``: bound by memory, so the figure to read is the fraction of peak.

python benchmarks/bench_cascade.py [-k merge_states] [--device cpu] [--json FILE]

The bytes of attention in levels count a shared prefix once; the baseline is torch attending to all keys of a request.
"""

from __future__ import annotations

import torch
from attention_inputs import attention_flops, torch_attention, workspace
from harness import Bench, bf16, case, fp16, fp32, grid, main, nbytes, rand

import flashinfer
import flashinfer.cascade as cascade
from flashinfer.trace.templates import cascade as templates

HEADS = {"num_heads": [32], "head_dim": [128]}  # heads of an 8B model
# One token, a decode batch, a prompt.
CUDA = grid(seq_len=[1, 64, 8192], dtype=[bf16], **HEADS) + grid(seq_len=[8192], dtype=[fp16, fp32], **HEADS)
CPU = grid(seq_len=[1, 64, 1024], dtype=[bf16], **HEADS) + grid(seq_len=[1024], dtype=[fp16], **HEADS)
# Many states: one token whose keys were split over all processors.
CUDA_STATES = [p | {"num_states": 8} for p in CUDA]
CUDA_STATES += grid(seq_len=[1], num_states=[128], dtype=[bf16], **HEADS)
CPU_STATES = [p | {"num_states": 8} for p in CPU]
# Length of a prompt that all requests share, and of the keys that each request has after the prompt.
LEVELS = {"num_qo_heads": [32], "num_kv_heads": [8], "head_dim": [128]}
CUDA_LEVELS = grid(batch_size=[64, 256], shared_len=[8192, 32768], own_len=[512], dtype=[bf16], **LEVELS)
CPU_LEVELS = grid(batch_size=[8], shared_len=[1024], own_len=[64], dtype=[bf16], **LEVELS)


def _torch_merge_states(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weights = torch.softmax(s * 0.6931471806, dim=1).to(v.dtype)
    return torch.einsum("nkhd,nkh->nhd", v, weights), torch.logsumexp(s * 0.6931471806, dim=1) * 1.4426950409


def _torch_merge_state(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    share = torch.sigmoid((s_b - s_a) * 0.6931471806).to(v_a.dtype).unsqueeze(-1)
    return torch.lerp(v_a, v_b, share), torch.logaddexp2(s_a, s_b)


@case("merge_state", cpu=CPU, cuda=CUDA)
def merge_state(seq_len: int, num_heads: int, head_dim: int, dtype: torch.dtype) -> Bench:
    v_a, v_b = (rand(seq_len, num_heads, head_dim, dtype) for _ in range(2))
    s_a, s_b = (rand(seq_len, num_heads, fp32) for _ in range(2))
    return Bench(
        run=cascade.merge_state,
        args=(v_a, s_a, v_b, s_b),
        baseline=_torch_merge_state,
        reference=templates.merge_state_trace.reference,
        bytes=nbytes(v_a, s_a) * 3,
    )


@case("merge_state_in_place", cpu=CPU, cuda=CUDA)
def merge_state_in_place(seq_len: int, num_heads: int, head_dim: int, dtype: torch.dtype) -> Bench:
    v, v_other = (rand(seq_len, num_heads, head_dim, dtype) for _ in range(2))
    s, s_other = (rand(seq_len, num_heads, fp32) for _ in range(2))

    def baseline(v: torch.Tensor, s: torch.Tensor, v_other: torch.Tensor, s_other: torch.Tensor) -> None:
        v.lerp_(v_other, torch.sigmoid((s_other - s) * 0.6931471806).to(v.dtype).unsqueeze(-1))
        torch.logaddexp2(s, s_other, out=s)

    return Bench(
        run=cascade.merge_state_in_place,
        args=(v, s, v_other, s_other),
        results=(0, 1),
        baseline=baseline,
        reference=templates.merge_state_in_place_trace.reference,
        bytes=nbytes(v, s) * 3,
    )


@case("variable_length_merge_states", cpu=CPU_STATES, cuda=CUDA_STATES)
def variable_length_merge_states(
    seq_len: int, num_states: int, num_heads: int, head_dim: int, dtype: torch.dtype
) -> Bench:
    v, s = rand(seq_len * num_states, num_heads, head_dim, dtype), rand(seq_len * num_states, num_heads, fp32)
    indptr = (torch.arange(seq_len + 1) * num_states).int()

    def baseline(v: torch.Tensor, s: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _torch_merge_states(v.unflatten(0, (seq_len, -1)), s.unflatten(0, (seq_len, -1)))

    return Bench(
        run=cascade.variable_length_merge_states,
        args=(v, s, indptr),
        baseline=baseline,
        reference=templates.variable_length_merge_states_trace.reference,
        bytes=nbytes(v, s) * (num_states + 1) // num_states,
    )


@case("merge_states", cpu=CPU_STATES, cuda=CUDA_STATES)
def merge_states(seq_len: int, num_states: int, num_heads: int, head_dim: int, dtype: torch.dtype) -> Bench:
    v, s = rand(seq_len, num_states, num_heads, head_dim, dtype), rand(seq_len, num_states, num_heads, fp32)
    return Bench(
        run=cascade.merge_states,
        args=(v, s),
        baseline=_torch_merge_states,
        reference=templates.merge_states_trace.reference,
        bytes=nbytes(v, s) * (num_states + 1) // num_states,
    )


@case("MultiLevelCascadeAttentionWrapper", cpu=CPU_LEVELS, cuda=CUDA_LEVELS)
def levels(
    batch_size: int,
    shared_len: int,
    own_len: int,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    page_size: int = 16,
) -> Bench:
    shared, each = shared_len // page_size, own_len // page_size
    k, v = (rand(shared + batch_size * each, page_size, num_kv_heads, head_dim, dtype) for _ in range(2))
    q, rows = rand(batch_size, num_qo_heads, head_dim, dtype), torch.arange(batch_size + 1).int()
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace())
    wrapper.plan(
        [rows[[0, -1]], rows],
        [torch.tensor([0, shared]).int(), rows * each],
        [torch.arange(shared).int(), torch.arange(shared, len(k)).int()],
        [torch.full((n,), page_size).int() for n in (1, batch_size)],
        *(num_qo_heads, num_kv_heads, head_dim, page_size),
        q_data_type=dtype,
    )

    def gathered(cache: torch.Tensor) -> torch.Tensor:
        """Gather the prefix and the keys of each request to ``[batch_size, heads, tokens, head_dim]``."""
        prefix = cache[:shared].flatten(0, 1).expand(batch_size, -1, -1, -1)
        own = cache[shared:].unflatten(0, (batch_size, each)).flatten(1, 2)
        return torch.cat([prefix, own], dim=1).transpose(1, 2).contiguous()

    dense_k, dense_v = gathered(k), gathered(v)
    return Bench(
        run={"fa2": lambda q, k, v: wrapper.run(q, (k, v))},
        args=(q, k, v),
        baseline=lambda q, *_: torch_attention(q, dense_k, dense_v, causal=False),
        reference=lambda q, *_: torch_attention(q.float(), dense_k.float(), dense_v.float(), causal=False).to(q.dtype),
        bytes=nbytes(q, q, k, v),
        flops=attention_flops(batch_size, 1, shared_len + own_len, head_dim, head_dim, num_qo_heads, False),
        flops_dtype=dtype,
    )


if __name__ == "__main__":
    main()
