# SPDX-License-Identifier: Apache-2.0
"""Benchmark of the prefill of delta rules: bound by the chain of chunks for few requests, by memory for many.

python benchmarks/bench_gdn_prefill.py [--device cpu] [--json FILE]
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from harness import Bench, bf16, case, main, nbytes, rand

from flashinfer.gdn_prefill import chunk_gated_delta_rule
from flashinfer.recurrent import recurrent_kda
from flashinfer.trace.templates.recurrent_gdn_prefill import chunk_gated_delta_rule_trace
from flashinfer.trace.templates.recurrent_kda import recurrent_kda_trace

# Heads of Qwen3-Next, and of a rank of four: one long prompt, short prompts, a batch.
WHOLE = {"num_qo_heads": 16, "num_kv_heads": 32}
CUDA = [{"batch_size": n, "seq_len": t, **WHOLE} for n, t in [(1, 1024), (1, 8192), (4, 2048), (16, 777)]]
CUDA += [{"batch_size": 1, "seq_len": 8192, "num_qo_heads": 4, "num_kv_heads": 8}]
CPU = [{"batch_size": 2, "seq_len": 256, "num_qo_heads": 2, "num_kv_heads": 4}]


@case("chunk_gated_delta_rule", cpu=CPU, cuda=CUDA)
def chunk_gated_delta_rule_case(batch_size: int, seq_len: int, num_qo_heads: int, num_kv_heads: int) -> Bench:
    tokens = batch_size * seq_len
    q, k = (F.normalize(rand(tokens, num_qo_heads, 128), dim=-1).to(bf16) for _ in range(2))
    v = rand(tokens, num_kv_heads, 128, bf16)
    g, beta = torch.exp(-0.1 * rand(tokens, num_kv_heads).sigmoid()), rand(tokens, num_kv_heads).sigmoid()
    state = rand(batch_size, num_kv_heads, 128, 128)
    offsets = torch.arange(0, tokens + 1, seq_len)

    def run(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v, g, beta, state = args
        return chunk_gated_delta_rule(
            q, k, v, g, beta, initial_state=state, cu_seqlens=offsets, output_final_state=True
        )

    def reference(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v, g, beta, state = args
        call = chunk_gated_delta_rule_trace(output_final_state=True).reference
        return call(q, k, v, g, beta, initial_state=state, cu_seqlens=offsets)

    return Bench(
        run=run,
        args=(q, k, v, g, beta, state),
        reference=reference,
        bytes=nbytes(q, k, v, v, g, beta, state, state),
        flops=6 * tokens * num_kv_heads * 128 * 128,
    )


CUDA_KDA = [{"batch_size": n, "seq_len": t, "num_heads": 32} for n, t in [(1, 8192), (4, 2048)]]
CPU_KDA = [{"batch_size": 2, "seq_len": 64, "num_heads": 2}]


@case("recurrent_kda_prefill", cpu=CPU_KDA, cuda=CUDA_KDA)
def recurrent_kda_prefill_case(batch_size: int, seq_len: int, num_heads: int) -> Bench:
    """Kimi delta attention with the bounded gate; states are updated in place."""
    q, k, v, g = (rand(1, batch_size * seq_len, num_heads, 128, bf16) for _ in range(4))
    beta, state = rand(1, batch_size * seq_len, num_heads, bf16), rand(batch_size, num_heads, 128, 128)
    kw = {"A_log": rand(num_heads), "dt_bias": rand(num_heads * 128), "use_gate_in_kernel": True, "lower_bound": -5.0}
    kw |= {"beta_is_logit": True, "cu_seqlens": torch.arange(0, batch_size * seq_len + 1, seq_len)}

    def run(*args: torch.Tensor) -> torch.Tensor:
        return recurrent_kda(*args[:5], initial_state=args[5], **kw)[0]

    def reference(*args: torch.Tensor) -> torch.Tensor:
        return recurrent_kda_trace.reference(*args[:5], initial_state=args[5], **kw)[0]

    return Bench(
        run=run,
        args=(q, k, v, g, beta, state),
        reference=reference,
        bytes=nbytes(q, k, v, v, g, beta, state, state),
        flops=6 * batch_size * seq_len * num_heads * 128 * 128,
    )


if __name__ == "__main__":
    main()
