# SPDX-License-Identifier: Apache-2.0
"""SGLang's attention backend on CPU tensors: its own index updaters plan, and forward_extend and forward_decode run.

Requests of a pool of tokens (page size 1) with cached prefixes. The translator that packs token slots is SGLang's, and
its Triton kernel runs in the interpreter; the pool of keys and values is two tensors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from types import SimpleNamespace
from typing import Any, Iterator, Optional
from unittest import mock

import torch

from .sglang_lane import OnHost, backend_module
from .table import case

DIM, CONTEXT, SLOTS = 64, 96, 400
#: Requests: tokens that are cached, and tokens that are computed now. The lane's window is shorter than some prefixes.
PREFIXES, EXTENDED = [30, 0, 5], [7, 12, 1]
FULL, WINDOWED = -1, 16


class Pool:
    """Keys and values of one layer by token slot, with the methods that the backend calls."""

    def __init__(self, kv_heads: int, dtype: torch.dtype) -> None:
        self.k, self.v = (torch.randn(SLOTS, kv_heads, DIM).to(dtype) for _ in range(2))

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.k, self.v

    def set_kv_buffer(self, layer: Any, where: Any, k: torch.Tensor, v: torch.Tensor, *scales: Any) -> None:
        self.k[where.loc], self.v[where.loc] = (x.view(-1, *self.k.shape[1:]).to(self.k.dtype) for x in (k, v))

    def get_kv_cache_quant_method(self) -> Any:
        access = SimpleNamespace(kind=None, scale_recipe=None)
        return SimpleNamespace(resolve_attention_access=lambda *_: access, needs_global_scale=lambda: False)


@dataclasses.dataclass(frozen=True)
class Model:
    heads: int = 4
    kv_heads: int = 2
    window: Optional[int] = None
    soft_cap: float = 0.0
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = torch.bfloat16


def runner_of(model: Any, config: Any, pool: Any, table: torch.Tensor) -> Any:
    """Return what a backend reads of SGLang's ModelRunner; the translator of token slots is a real one."""
    from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator

    ns = SimpleNamespace
    allocator = ns(get_kvcache=lambda: pool)
    translator = KVIndexTranslator(
        req_to_token=table, token_to_kv_pool_allocator=allocator, token_to_kv_pool=pool, page_size=1, device="cpu"
    )
    return ns(
        req_to_token_pool=ns(req_to_token=table, size=8), token_to_kv_pool=pool, kv_index_translator=translator,
        server_args=None, prefill_attention_backend_str="flashinfer", decode_attention_backend_str="flashinfer",
        is_draft_worker=False, token_to_kv_pool_allocator=allocator, kv_cache_dtype=model.kv_dtype, page_size=1,
        sliding_window_size=model.window, device="cpu", dtype=model.dtype, model_config=config,
    )  # fmt: skip


def _runner(model: Model, pool: Pool, table: torch.Tensor) -> Any:
    config = SimpleNamespace(
        num_attention_heads=model.heads, get_max_num_attention_heads=lambda: model.heads, context_len=CONTEXT,
        get_num_kv_heads=lambda *ranks: model.kv_heads, head_dim=DIM, v_head_dim=DIM, is_multimodal=False,
        is_encoder_decoder=False, hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"]),
    )  # fmt: skip
    return runner_of(model, config, pool, table)


@contextlib.contextmanager
def on_the_host(name: str = "flashinfer_backend", paged: bool = False, items: bool = False) -> Iterator[Any]:
    """Import a backend, and replace what asks for ranks, a server's settings or the device "cuda"."""
    backend = backend_module(name)
    translator = __import__("sglang.srt.mem_cache.kv_index_translator", fromlist=["x"])
    ranks = SimpleNamespace(attn_tp_size=1, attn_dcp_size=1, dcp_enabled=False, dcp_size=1)
    settings = SimpleNamespace(
        features=SimpleNamespace(enable_mis=items),
        deterministic=SimpleNamespace(enable_deterministic_inference=False),
        kernel=SimpleNamespace(flashinfer_mla_disable_ragged=False),
    )
    kept: dict[str, Any] = {}

    def buffer(name: str, make: Any) -> torch.Tensor:
        kept.setdefault(name, torch.zeros(64 << 20, dtype=torch.uint8))
        return kept[name]

    values = {
        "get_parallel": lambda: ranks,
        "get_exec": lambda: settings,
        "get_platform": lambda: SimpleNamespace(is_sm100=False),
        "get_buffer": buffer,
        "get_cuda_graph_max_batch_size": lambda size: size,
        "DllmConfig": SimpleNamespace(from_server_args=lambda args: None),
        "is_in_tc_piecewise_cuda_graph": lambda: False,
        "is_in_breakable_cuda_graph": lambda: False,
        "get_disagg": lambda: SimpleNamespace(disaggregation_mode="null"),
        "get_schedule": lambda: SimpleNamespace(disable_chunked_prefix_cache=False),
        "update_local_kv_lens_for_dcp": lambda lens: None,
        "torch": OnHost(),
    }
    with contextlib.ExitStack() as stack:
        for each, value in values.items():
            if hasattr(backend, each):
                stack.enter_context(mock.patch.object(backend, each, value))
        stack.enter_context(mock.patch.object(translator, "get_parallel", lambda: ranks))
        stack.enter_context(backend.envs.SGLANG_FLASHINFER_USE_PAGED.override(paged))
        yield backend


class Batch:
    """Requests of ``PREFIXES`` and ``EXTENDED``, their rows of the table of slots, and what a forward pass is told."""

    def __init__(self, mode: Any, table: torch.Tensor, prefixes: list[int], extended: list[int]) -> None:
        self.forward_mode, self.table = mode, table
        self.prefixes, self.extended = prefixes, extended
        lens = [a + b for a, b in zip(prefixes, extended, strict=True)]
        self.batch_size, self.req_pool_indices = len(lens), torch.tensor([2, 0, 3][: len(lens)])
        self.seq_lens = self.seq_lens_cpu = torch.tensor(lens)
        self.seq_lens_sum = sum(lens)
        self.extend_prefix_lens, self.extend_prefix_lens_cpu = torch.tensor(prefixes), prefixes
        rows = zip(self.req_pool_indices.tolist(), prefixes, lens, strict=True)
        self.out_cache_loc = torch.cat([table[row, begin:end] for row, begin, end in rows]).long()
        self.out_cache_loc_physical = True
        self.encoder_lens = self.spec_info = self.kv_loc_plan = self.cross_attention_custom_mask = None
        self.positions = torch.cat([torch.arange(a, b) for a, b in zip(prefixes, lens, strict=True)])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def _layer(model: Model, window: int) -> Any:
    kinds = __import__("sglang.srt.layers.radix_attention", fromlist=["AttentionType"]).AttentionType
    return SimpleNamespace(
        layer_id=0, tp_q_head_num=model.heads, tp_k_head_num=model.kv_heads, tp_v_head_num=model.kv_heads,
        head_dim=DIM, v_head_dim=DIM, scaling=DIM**-0.5, logit_cap=model.soft_cap, sliding_window_size=window,
        is_cross_attention=False, attn_type=kinds.DECODER, k_scale=None, v_scale=None, k_scale_float=None,
        v_scale_float=None,
    )  # fmt: skip


def _expected(model: Model, pool: Pool, batch: Batch, q: torch.Tensor, window: int) -> torch.Tensor:
    """Causal attention of each request's new tokens, in float64, over the keys that the pool holds in the end."""
    out, begin, group = [], 0, model.heads // model.kv_heads
    for i, row in enumerate(batch.req_pool_indices.tolist()):
        rows, keys = batch.extended[i], int(batch.seq_lens[i])
        slots = batch.table[row, :keys].long()
        k, v = (x[slots].double().repeat_interleave(group, dim=1) for x in (pool.k, pool.v))
        logits = torch.einsum("qhd,khd->hqk", q[begin : begin + rows].double(), k) * DIM**-0.5
        if model.soft_cap:
            logits = model.soft_cap * (logits / model.soft_cap).tanh()
        behind = torch.arange(keys - rows, keys)[:, None] - torch.arange(keys)
        visible = (behind >= 0) & ((behind <= window) if window >= 0 else True)
        out.append(torch.einsum("hqk,khd->qhd", logits.masked_fill(~visible, -math.inf).softmax(-1), v))
        begin += rows
    return torch.cat(out)


def table_of_slots() -> torch.Tensor:
    """Return four rows of token slots; no slot twice, and not slot 0, which is the padding of a pool."""
    return (torch.randperm(SLOTS - 1)[: 4 * CONTEXT] + 1).view(4, CONTEXT).int()


def _setup(model: Model) -> tuple[Pool, torch.Tensor]:
    torch.manual_seed(0)
    return Pool(model.kv_heads, model.kv_dtype), table_of_slots()


def _run(attend: Any, batch: Batch, model: Model, pool: Pool, window: int, tolerance: float = 2e-2) -> None:
    tokens = sum(batch.extended)
    q = torch.randn(tokens, model.heads, DIM).to(model.dtype)
    k, v = (torch.randn(tokens, model.kv_heads, DIM).to(model.dtype) for _ in range(2))
    out = attend(q.view(tokens, -1), k.view(tokens, -1), v.view(tokens, -1), _layer(model, window), batch)
    assert out.shape == (tokens, model.heads * DIM)
    expected = _expected(model, pool, batch, q, window)
    torch.testing.assert_close(out.view_as(expected).double(), expected, rtol=tolerance, atol=tolerance)


def run_attention(model: Model, paged: bool = False) -> None:
    """Prefill with and without cached tokens, then two decode steps of the same backend object."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    pool, table = _setup(model)
    windows = [FULL] if model.window is None else [FULL, model.window]
    with on_the_host(paged=paged) as backend:
        runner = backend.FlashInferAttnBackend(_runner(model, pool, table))
        for prefixes in (PREFIXES, [0, 0, 0]):
            batch = Batch(ForwardMode.EXTEND, table, prefixes, EXTENDED)
            runner.init_forward_metadata(batch)
            for window in windows:
                _run(runner.forward_extend, batch, model, pool, window)
        for step in range(2):
            before = [a + b + step for a, b in zip(PREFIXES, EXTENDED, strict=True)]
            batch = Batch(ForwardMode.DECODE, table, before, [1, 1, 1])
            runner.init_forward_metadata(batch)
            for window in windows:
                _run(runner.forward_decode, batch, model, pool, window)


WRAPPERS = "BatchPrefillWith{Ragged,Paged}..., BatchDecodeWithPagedKVCacheWrapper"


@case("sglang", "attention: prefill of new tokens and cached ones, decode", WRAPPERS + ", cascade.merge_state")
def sglang_attention() -> None:
    run_attention(Model())


@case("sglang", "attention, four heads a group: decode on the prefill kernel; logits' soft cap", WRAPPERS)
def sglang_attention_group() -> None:
    run_attention(Model(heads=8, soft_cap=3.0))


@case("sglang", "attention with prefill over pages alone", WRAPPERS)
def sglang_attention_paged() -> None:
    run_attention(Model(), paged=True)


@case("sglang", "attention with a sliding window: two wrappers, masks of prefixes", WRAPPERS)
def sglang_attention_window() -> None:
    run_attention(Model(window=WINDOWED))
    run_attention(Model(window=WINDOWED), paged=True)


@case("sglang", "attention in graph form: fast_decode_plan", "decode.fast_decode_plan, BatchDecode...")
def sglang_attention_graph_decode() -> None:
    """Run what a capture plans, without one: wrappers with buffers, a first plan, then plans by fast_decode_plan."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    for model in (Model(), Model(heads=8)):
        pool, table = _setup(model)
        with on_the_host() as backend:
            runner = backend.FlashInferAttnBackend(_runner(model, pool, table))
            runner.init_cuda_graph_state(8, 8)
            for step, before in enumerate(([3, 3, 3], [36, 12, 6], [70, 20, 9])):
                batch = Batch(ForwardMode.DECODE, table, before, [1, 1, 1])
                runner.init_forward_metadata_out_graph(batch, in_capture=step == 0)
                _run(runner.forward_decode, batch, model, pool, FULL)
            planned = runner.decode_cuda_graph_metadata[3][0].begin_forward
            assert isinstance(planned, functools.partial) and planned.func is backend.fast_decode_plan


def verify_input(draft_tokens: int) -> Any:
    """SGLang's input of a verify pass: the last tokens of each request, causal, none of them a tree."""
    from sglang.srt.speculative.dflash_info import DFlashVerifyInput

    nothing = torch.zeros(0, dtype=torch.int64)
    return DFlashVerifyInput(draft_token=nothing, positions=nothing, draft_token_num=draft_tokens)


def verify_batch(table: torch.Tensor, before: list[int], draft_tokens: int) -> Batch:
    """Return the batch of a verify pass. Lengths on the device lack the tokens to verify, those on the host do not."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    batch = Batch(ForwardMode.TARGET_VERIFY, table, before, [draft_tokens] * len(before))
    batch.seq_lens = torch.tensor(before)
    batch.seq_lens_cpu, batch.seq_lens_sum = batch.seq_lens + draft_tokens, sum(before)
    batch.spec_info = verify_input(draft_tokens)
    return batch


@case("sglang", "attention of a verify pass, eager and in graph form: fast_prefill_plan", "BatchPrefillWithPaged...")
def sglang_attention_verify() -> None:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    model = Model()
    pool, table = _setup(model)
    with on_the_host() as backend:
        runner = backend.FlashInferAttnBackend(_runner(model, pool, table))
        runner.init_cuda_graph_state(8, 32)
        for step, before in enumerate(([3, 3, 3], [36, 12, 6], [70, 20, 9])):
            for graph in (False, True):
                batch = verify_batch(table, before, 4)
                if graph:
                    runner.init_forward_metadata_out_graph(batch, in_capture=step == 0)
                else:
                    runner.init_forward_metadata(batch)
                metadata = runner.prefill_cuda_graph_metadata[3] if graph else runner.prefill_wrappers_verify
                runner.forward_metadata = backend.PrefillMetadata(metadata, False, False)
                batch.seq_lens = batch.seq_lens_cpu
                _run(runner.forward_extend, batch, model, pool, FULL)
        planned = runner.prefill_cuda_graph_metadata[3][0].begin_forward
        assert isinstance(planned, functools.partial) and planned.func is backend.fast_prefill_plan
        assert ForwardMode.TARGET_VERIFY.is_target_verify()


@case(
    "sglang",
    "attention of several scored items after one prefix: positions from the backend",
    "BatchPrefillWithPaged...",
)
def sglang_attention_items() -> None:
    """Tokens of an item see the prefix, and their item as far as themselves; a delimiter sees the prefix alone."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    model = Model()
    pool, table = _setup(model)
    delimiters = [torch.tensor([6, 9, 12]), torch.tensor([4, 10])]
    extended, cached = [15, 14], [5, 0]
    with on_the_host(items=True) as backend:
        runner = backend.FlashInferAttnBackend(_runner(model, pool, table))
        batch = Batch(ForwardMode.EXTEND, table, cached, extended)
        batch.multi_item_delimiter_indices, batch.extend_seq_lens_cpu = delimiters, extended
        batch.input_ids = torch.zeros(sum(extended))
        runner.init_forward_metadata(batch)
        q = torch.randn(sum(extended), model.heads, DIM).to(model.dtype)
        k, v = (torch.randn(sum(extended), model.kv_heads, DIM).to(model.dtype) for _ in range(2))
        out = runner.forward_extend(q, k, v, _layer(model, FULL), batch).view_as(q)
    begin = 0
    for i, row in enumerate(batch.req_pool_indices.tolist()):
        keys, first = cached[i] + extended[i], cached[i] + int(delimiters[i][0])
        marks = [cached[i] + int(x) for x in delimiters[i]]
        visible = torch.zeros(extended[i], keys, dtype=torch.bool)
        for n in range(extended[i]):
            place = cached[i] + n
            visible[n, : min(place + 1, first)] = True
            if place >= first:
                last = max(x for x in marks if x <= place)
                visible[n, last + 1 : place + 1] = True
        slots = table[row, :keys].long()
        wide = [x[slots].double().repeat_interleave(2, dim=1) for x in (pool.k, pool.v)]
        rows = slice(begin, begin + extended[i])
        logits = torch.einsum("qhd,khd->hqk", q[rows].double(), wide[0]) * DIM**-0.5
        weights = logits.masked_fill(~visible, -math.inf).softmax(-1)
        expected = torch.einsum("hqk,khd->qhd", weights, wide[1])
        torch.testing.assert_close(out[rows].double(), expected, rtol=2e-2, atol=2e-2)
        begin += extended[i]
