# SPDX-License-Identifier: Apache-2.0
"""SGLang's MLA backend on CPU tensors: prefill over ragged and over cached tokens, decode, verify, and graph form."""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace
from typing import Any

import torch

from .sglang_attention import (
    CONTEXT,
    EXTENDED,
    PREFIXES,
    SLOTS,
    Batch,
    on_the_host,
    runner_of,
    table_of_slots,
    verify_batch,
)
from .table import case

HEADS, CKV, KPE, NOPE, VALUE = 16, 512, 64, 128, 128
SCALE, DTYPE = (NOPE + KPE) ** -0.5, torch.bfloat16


class Pool:
    """The compressed keys of one layer by token slot."""

    def __init__(self) -> None:
        self.rows = torch.randn(SLOTS, 1, CKV + KPE).to(DTYPE)

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.rows

    def set_mla_kv_buffer(self, layer: Any, where: Any, k: torch.Tensor, k_rope: torch.Tensor) -> None:
        self.rows[where.loc] = torch.cat([k, k_rope], dim=-1).view(-1, 1, CKV + KPE)


def _backend(module: Any, pool: Pool, table: torch.Tensor) -> Any:
    config = SimpleNamespace(
        num_attention_heads=HEADS, kv_lora_rank=CKV, qk_nope_head_dim=NOPE, qk_rope_head_dim=KPE, v_head_dim=VALUE,
        scaling=SCALE, context_len=CONTEXT,
    )  # fmt: skip
    return module.FlashInferMLAAttnBackend(
        runner_of(SimpleNamespace(kv_dtype=DTYPE, window=None, dtype=DTYPE), config, pool, table)
    )


def _layer(head_dim: int, v_head_dim: int, kv_heads: int) -> Any:
    return SimpleNamespace(
        layer_id=0, tp_q_head_num=HEADS, tp_k_head_num=kv_heads, head_dim=head_dim, v_head_dim=v_head_dim,
        scaling=SCALE, logit_cap=0.0,
    )  # fmt: skip


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last tokens of one request, in float64: q, k and v by token and head."""
    rows, keys = len(q), len(k)
    logits = torch.einsum("qhd,khd->hqk", q.double(), k.double()) * SCALE
    visible = torch.arange(keys) <= torch.arange(keys - rows, keys)[:, None]
    return torch.einsum("hqk,khd->qhd", logits.masked_fill(~visible, -math.inf).softmax(-1), v.double())


def _run_absorbed(attend: Any, batch: Batch, pool: Pool) -> None:
    tokens = sum(batch.extended)
    q, rope = (torch.randn(tokens, HEADS, n).to(DTYPE) for n in (CKV, KPE))
    k, k_rope = (torch.randn(tokens, 1, n).to(DTYPE) for n in (CKV, KPE))
    out = attend(q, k, k, _layer(CKV + KPE, CKV, 1), batch, q_rope=rope, k_rope=k_rope).view(tokens, HEADS, CKV)
    begin, both = 0, torch.cat([q, rope], dim=-1)
    for row, before, count in zip(batch.req_pool_indices.tolist(), batch.prefixes, batch.extended, strict=True):
        keys = pool.rows[batch.table[row, : before + count].long()].expand(-1, HEADS, -1)
        expected = _attend(both[begin : begin + count], keys, keys[..., :CKV])
        torch.testing.assert_close(out[begin : begin + count].double(), expected, rtol=2e-2, atol=2e-2)
        begin += count


def _run_ragged(attend: Any, batch: Batch) -> None:
    tokens = sum(batch.extended)
    q, k = (torch.randn(tokens, HEADS, NOPE + KPE).to(DTYPE) for _ in range(2))
    v = torch.randn(tokens, HEADS, VALUE).to(DTYPE)
    out = attend(q, k, v, _layer(NOPE + KPE, VALUE, HEADS), batch, save_kv_cache=False).view(tokens, HEADS, VALUE)
    expected = torch.cat([_attend(*parts) for parts in zip(*(x.split(batch.extended) for x in (q, k, v)), strict=True)])
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)


@case(
    "sglang",
    "MLA: prefill of a prompt, of its rest over cached tokens, decode",
    "mla.BatchMLA..., BatchPrefillWithRagged...",
)
def sglang_mla() -> None:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    torch.manual_seed(0)
    pool, table = Pool(), table_of_slots()
    with on_the_host("flashinfer_mla_backend") as module:
        runner = _backend(module, pool, table)
        batch = Batch(ForwardMode.EXTEND, table, [0, 0, 0], EXTENDED)
        runner.init_forward_metadata(batch)
        _run_ragged(runner.forward_extend, batch)
        batch = Batch(ForwardMode.EXTEND, table, PREFIXES, EXTENDED)
        runner.init_forward_metadata(batch)
        _run_absorbed(runner.forward_extend, batch, pool)
        for before in ([36, 12, 6], [37, 13, 7]):
            batch = Batch(ForwardMode.DECODE, table, before, [1, 1, 1])
            runner.init_forward_metadata(batch)
            _run_absorbed(runner.forward_decode, batch, pool)


@case(
    "sglang",
    "MLA decode and verify in graph form: fast_mla_decode_plan on the planner",
    "mla.BatchMLAPagedAttentionWrapper",
)
def sglang_mla_graph() -> None:
    """Plans of a replay call the module's planner directly, and pass its results over."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    torch.manual_seed(0)
    pool, table = Pool(), table_of_slots()
    with on_the_host("flashinfer_mla_backend") as module:
        runner = _backend(module, pool, table)
        runner.init_cuda_graph_state(8, 32)
        for step, before in enumerate(([3, 3, 3], [36, 12, 6], [70, 20, 9])):
            batch = Batch(ForwardMode.DECODE, table, before, [1, 1, 1])
            runner.init_forward_metadata_out_graph(batch, in_capture=step == 0)
            runner.forward_metadata = module.DecodeMetadata(runner.decode_cuda_graph_metadata[3])
            _run_absorbed(runner.forward_decode, batch, pool)
        assert isinstance(runner.decode_cuda_graph_metadata[3].plan, functools.partial)
        for step, before in enumerate(([3, 3, 3], [36, 12, 6], [70, 20, 9])):
            batch = verify_batch(table, before, 4)
            runner.init_forward_metadata_out_graph(batch, in_capture=step == 0)
            runner.forward_metadata = module.PrefillMetadata(runner.prefill_cuda_graph_metadata[3], False)
            _run_absorbed(runner.forward_extend, batch, pool)
