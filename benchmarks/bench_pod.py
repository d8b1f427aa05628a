# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of ``flashinfer.pod``: prefill together with decoding, next to the same two calls one after the other.

python benchmarks/bench_pod.py [-k Batch] [--device cpu] [--json FILE]

The backend ``pod`` is the wrapper; ``apart`` runs the two calls that the wrapper replaces.
"""

from __future__ import annotations

import torch
from attention_inputs import PagedBatch, attention_bytes, attention_flops, torch_attention, workspace
from harness import Bench, bf16, case, grid, main, rand

import flashinfer

HEADS = {"num_qo_heads": [32], "num_kv_heads": [8], "head_dim": [128], "dtype": [bf16]}
# A chunk of a prompt, and requests that decode.
CUDA = grid(s_qo=[2048, 8192], batch_size=[64, 256], s_kv=[2048], **HEADS)
CUDA += grid(s_qo=[4096], batch_size=[32], s_kv=[8192], **HEADS)
CPU = grid(s_qo=[256], batch_size=[8], s_kv=[512], **HEADS)


class Parts:
    """A prompt, in rows and in pages, and a batch that decodes."""

    def __init__(
        self,
        s_qo: int,
        batch_size: int,
        s_kv: int,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
    ) -> None:
        page_size = 16
        self.prompt = PagedBatch(1, s_qo, num_kv_heads, head_dim, head_dim, page_size, dtype)
        self.batch = PagedBatch(batch_size, s_kv, num_kv_heads, head_dim, head_dim, page_size, dtype)
        self.k, self.v = (x[0].transpose(0, 1).contiguous() for x in (self.prompt.k, self.prompt.v))
        self.q_p, self.q_d = (rand(n, num_qo_heads, head_dim, dtype) for n in (s_qo, batch_size))
        self.qo_indptr_p, self.qo_indptr_d = torch.tensor([0, s_qo]).int(), torch.arange(batch_size + 1).int()
        self.plan = (num_qo_heads, num_kv_heads, head_dim, page_size)
        self.flops = attention_flops(1, s_qo, s_qo, head_dim, head_dim, num_qo_heads, True)
        self.flops += attention_flops(batch_size, 1, s_kv, head_dim, head_dim, num_qo_heads, False)
        self.bytes = attention_bytes(self.q_p, self.k, self.v) + attention_bytes(self.q_d, self.batch.k, self.batch.v)
        self.dtype = dtype

    def expected(self, q_p: torch.Tensor, q_d: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k, v, k_d, v_d = (x.float() for x in (self.prompt.k, self.prompt.v, self.batch.k, self.batch.v))
        outs = torch_attention(q_p.float(), k, v, True), torch_attention(q_d.float(), k_d, v_d, False)
        return outs[0].to(q_p.dtype), outs[1].to(q_p.dtype)


@case("PODWithPagedKVCacheWrapper", cpu=CPU, cuda=CUDA)
def pod(
    s_qo: int, batch_size: int, s_kv: int, num_qo_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> Bench:
    parts = Parts(s_qo, batch_size, s_kv, num_qo_heads, num_kv_heads, head_dim, dtype)
    both = flashinfer.PODWithPagedKVCacheWrapper(workspace())
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(), use_tensor_cores=True)
    for wrapper in (both, decode):
        wrapper.plan(*parts.batch.table, *parts.plan, q_data_type=dtype)
    cache = (parts.batch.k_cache, parts.batch.v_cache)

    def apart(q_p: torch.Tensor, q_d: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return flashinfer.single_prefill_with_kv_cache(q_p, parts.k, parts.v, causal=True), decode.run(q_d, cache)

    return Bench(
        run={"pod": lambda q_p, q_d: both.run(q_p, parts.k, parts.v, q_d, cache, causal_p=True), "apart": apart},
        args=(parts.q_p, parts.q_d),
        reference=parts.expected,
        bytes=parts.bytes,
        flops=parts.flops,
        flops_dtype=dtype,
    )


@case("BatchPODWithPagedKVCacheWrapper", cpu=CPU, cuda=CUDA)
def batch_pod(
    s_qo: int, batch_size: int, s_kv: int, num_qo_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> Bench:
    parts = Parts(s_qo, batch_size, s_kv, num_qo_heads, num_kv_heads, head_dim, dtype)
    tables = ((parts.qo_indptr_p, *parts.prompt.table), (parts.qo_indptr_d, *parts.batch.table))
    both = flashinfer.BatchPODWithPagedKVCacheWrapper(workspace())
    both.plan(*tables[0], *tables[1], *parts.plan, q_data_type=dtype)
    prefill, decode = (flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace()) for _ in range(2))
    prefill.plan(*tables[0], *parts.plan, causal=True, q_data_type=dtype)
    decode.plan(*tables[1], *parts.plan, q_data_type=dtype)
    caches = tuple((batch.k_cache, batch.v_cache) for batch in (parts.prompt, parts.batch))

    def apart(q_p: torch.Tensor, q_d: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return prefill.run(q_p, caches[0]), decode.run(q_d, caches[1])

    return Bench(
        run={"pod": lambda q_p, q_d: both.run(q_p, caches[0], q_d, caches[1], causal_p=True), "apart": apart},
        args=(parts.q_p, parts.q_d),
        reference=parts.expected,
        bytes=parts.bytes,
        flops=parts.flops,
        flops_dtype=dtype,
    )


if __name__ == "__main__":
    main()
