# SPDX-License-Identifier: Apache-2.0
"""vLLM's attention backend on CPU tensors: its metadata builder plans, its forward pass runs.

Some cases answer for a Hopper GPU: XQA then decodes, queries of prefill are quantised where the cache is, and sinks
have a wrapper of their own. Cached keys and values lie as vLLM lays them: one page holds both, by head, side by side.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from types import SimpleNamespace
from typing import Any, Iterator, Optional
from unittest import mock

import torch

from .table import case

DIM, PAGE = 64, 16
F64, E4M3 = torch.float64, torch.float8_e4m3fn
#: Two requests that decode, one that continues a prompt and one that begins one.
QUERY_LENS, SEQ_LENS = [1, 1, 7, 20], [33, 5, 40, 20]
Q_SCALE, K_SCALE, V_SCALE = 0.02, 0.03, 0.02


@dataclasses.dataclass(frozen=True)
class Setting:
    heads: int = 4
    kv_heads: int = 2
    window: int = -1
    soft_cap: Optional[float] = None
    fp8: bool = False
    sinks: bool = False
    hopper: bool = False
    drafts: int = 0
    graph: bool = False
    dtype: torch.dtype = torch.bfloat16

    @property
    def quantised_prefill(self) -> bool:
        return self.hopper and self.fp8


def _config(setting: Setting) -> Any:
    """The parts of vLLM's configuration that the attention backend reads; what it does not read raises."""
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.kv_cache_layout import KVCacheLayout

    ns = SimpleNamespace
    drafts = ns(num_speculative_tokens=setting.drafts, parallel_drafting=False, enable_adaptive_verification=False)
    graph = CUDAGraphMode.FULL if setting.graph else CUDAGraphMode.NONE
    return ns(
        cache_config=ns(
            cache_dtype="fp8" if setting.fp8 else "auto", get_resolved_kv_cache_layout=lambda: KVCacheLayout.LBNHC
        ),
        model_config=ns(dtype=setting.dtype, max_model_len=256, get_num_attention_heads=lambda parallel: setting.heads),
        attention_config=ns(disable_flashinfer_q_quantization=False, use_trtllm_attention=None),
        compilation_config=ns(cudagraph_mode=graph, max_cudagraph_capture_size=None),
        scheduler_config=ns(max_num_batched_tokens=64, max_num_seqs=8),
        parallel_config=ns(cp_kv_cache_interleave_size=1, dcp_comm_backend="", decode_context_parallel_size=1),
        speculative_config=drafts if setting.drafts else None,
        num_speculative_tokens=setting.drafts,
    )


def _quantize(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what vLLM's compiled operator does: e4m3 of ``x / scale``."""
    return (x.float() / scale).clamp(-448, 448).to(E4M3), scale


@contextlib.contextmanager
def _on_the_host(setting: Setting) -> Iterator[Any]:
    from vllm.v1.attention.backends import flashinfer as backend

    layer = SimpleNamespace(
        window_left=setting.window, logits_soft_cap=setting.soft_cap, sm_scale=DIM**-0.5, has_sinks=setting.sinks
    )
    hopper = SimpleNamespace(
        is_device_capability=lambda number: number == 90 and setting.hopper,
        has_device_capability=lambda number: number <= 90,
        is_device_capability_family=lambda number: number == 90 and setting.hopper,
        get_device_capability=lambda: None,
    )

    def decodes(*args: Any, is_prefill: bool = False, **kwargs: Any) -> bool:
        return setting.hopper and not is_prefill

    values = {
        "get_dcp_world_size_and_rank": lambda sharded: (1, 0),
        "get_num_attention_heads_from_layers": lambda config, names: setting.heads,
        "get_per_layer_parameters": lambda config, names, cls: {"layer": layer},
        "can_use_trtllm_attention": decodes,
        "use_trtllm_attention": decodes,
        "force_use_trtllm_attention": lambda: None,
        "get_current_vllm_config_or_none": lambda: None,
        "_get_trtllm_workspace_buffer": lambda: torch.zeros(32 << 20, dtype=torch.uint8),
        "pin_host_range_buf": lambda n: None,
        "PIN_MEMORY": False,
        "current_platform": hopper,
        "custom_ops": SimpleNamespace(scaled_fp8_quant=lambda x, scale: _quantize(x, scale)),
    }
    with contextlib.ExitStack() as stack:
        for name, value in values.items():
            stack.enter_context(mock.patch.object(backend, name, value))
        stack.enter_context(
            mock.patch.object(backend.FlashInferBackend, "supports_sink", classmethod(lambda cls: True))
        )
        yield backend


class Batch:
    """Requests in pages, with what vLLM's scheduler says about them."""

    def __init__(self, setting: Setting, query_lens: list[int], seq_lens: list[int]) -> None:
        from vllm.v1.attention.backend import CommonAttentionMetadata

        self.setting, self.query_lens, self.seq_lens = setting, query_lens, seq_lens
        counts = [-(-n // PAGE) for n in seq_lens]
        pages = torch.randperm(sum(counts) + 3)[: sum(counts)].int()
        table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        stored = E4M3 if setting.fp8 else setting.dtype
        # Memory by page, token and head; vLLM names the dimensions of its caches by page, head and token.
        whole = torch.zeros(sum(counts) + 3, PAGE, setting.kv_heads, 2 * DIM).to(stored).transpose(1, 2)
        self.keys = []
        for i, (length, count) in enumerate(zip(seq_lens, counts, strict=True)):
            both = torch.randn(length, setting.kv_heads, 2 * DIM)
            if setting.fp8:
                both[..., :DIM] /= K_SCALE
                both[..., DIM:] /= V_SCALE
            self.keys.append(both.to(stored))
            mine = pages[sum(counts[:i]) :][:count]
            table[i, :count] = mine
            for token, row in enumerate(self.keys[-1]):
                whole[mine[token // PAGE], :, token % PAGE] = row
        self.cache = whole.view(torch.uint8) if setting.fp8 else whole
        self.starts = torch.tensor([0, *torch.tensor(query_lens).cumsum(0).tolist()], dtype=torch.int32)
        lens = torch.tensor(seq_lens, dtype=torch.int32)
        known = {
            "query_start_loc": self.starts, "query_start_loc_cpu": self.starts, "seq_lens": lens, "num_reqs": len(lens),
            "num_actual_tokens": int(self.starts[-1]), "max_query_len": max(query_lens), "max_seq_len": max(seq_lens),
            "block_table_tensor": table, "slot_mapping": torch.zeros(int(self.starts[-1]), dtype=torch.int64),
            "causal": True, "seq_lens_cpu_upper_bound": lens,
        }  # fmt: skip
        fields = {field.name for field in dataclasses.fields(CommonAttentionMetadata)}
        self.metadata = CommonAttentionMetadata(**{name: value for name, value in known.items() if name in fields})

    def expected(self, q: torch.Tensor, i: int, sinks: Optional[torch.Tensor]) -> torch.Tensor:
        """Causal attention of the last tokens of request ``i``, in float64."""
        setting, both = self.setting, self.keys[i].to(F64)
        group, (rows, keys) = setting.heads // setting.kv_heads, (len(q), len(both))
        k, v = (x.repeat_interleave(group, dim=1) for x in both.split(DIM, dim=-1))
        k, v = (k * K_SCALE, v * V_SCALE) if setting.fp8 else (k, v)
        logits = torch.einsum("qhd,khd->hqk", q.to(F64), k) / math.sqrt(DIM)
        if setting.soft_cap:
            logits = setting.soft_cap * (logits / setting.soft_cap).tanh()
        behind = torch.arange(keys - rows, keys)[:, None] - torch.arange(keys)
        visible = (behind >= 0) & ((behind <= setting.window) if setting.window >= 0 else True)
        logits = logits.masked_fill(~visible, -math.inf)
        if sinks is not None:  # one more logit of each head, without a value
            logits = torch.cat([logits, sinks.to(F64)[:, None, None].expand(-1, rows, 1)], dim=-1)
        return torch.einsum("hqk,khd->qhd", logits.softmax(-1)[..., :keys], v)


def run_attention(setting: Setting, *batches: tuple[list[int], list[int]]) -> Any:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode

    torch.manual_seed(0)
    mode = KVQuantMode.FP8_PER_TENSOR if setting.fp8 else KVQuantMode.NONE
    sinks = torch.randn(setting.heads) if setting.sinks else None
    scales = {
        f"_{name}_scale_float": value if is_scaled else 1.0
        for name, value, is_scaled in (
            ("q", Q_SCALE, setting.quantised_prefill), ("k", K_SCALE, setting.fp8), ("v", V_SCALE, setting.fp8)
        )
    }  # fmt: skip
    layer = SimpleNamespace(_q_scale=torch.tensor(Q_SCALE), **scales)
    with _on_the_host(setting) as backend:
        spec = FullAttentionSpec(
            block_size=PAGE, num_kv_heads=setting.kv_heads, head_size=DIM, kv_quant_mode=mode,
            dtype=torch.uint8 if setting.fp8 else setting.dtype,
        )  # fmt: skip
        builder = backend.FlashInferMetadataBuilder(spec, ["layer"], _config(setting), torch.device("cpu"))
        builder.set_workspace_buffer(torch.zeros(32 << 20, dtype=torch.uint8))
        sliding = None if setting.window < 0 else setting.window + 1
        kind = "fp8" if setting.fp8 else "auto"
        impl = backend.FlashInferImpl(
            setting.heads, DIM, DIM**-0.5, setting.kv_heads, None, sliding, kind, setting.soft_cap, sinks=sinks
        )
        impl.dcp_world_size, impl.bmm2_scale = 1, V_SCALE if setting.fp8 else 1.0
        impl.process_weights_after_loading(setting.dtype)
        for query_lens, seq_lens in batches or ((QUERY_LENS, SEQ_LENS),):
            batch = Batch(setting, query_lens, seq_lens)
            metadata = builder.build(0, batch.metadata)
            q = torch.randn(int(batch.starts[-1]), setting.heads, DIM).to(setting.dtype)
            out = torch.zeros_like(q)
            impl.forward(layer, q, None, None, batch.cache, metadata, out)
            for i in range(len(seq_lens)):
                rows = slice(int(batch.starts[i]), int(batch.starts[i + 1]))
                mine = q[rows]
                if setting.quantised_prefill and i >= metadata.num_decodes:
                    mine = _quantize(mine, torch.tensor(Q_SCALE))[0].to(F64) * Q_SCALE
                wide = 6e-2 if setting.quantised_prefill else 2e-2
                torch.testing.assert_close(out[rows].to(F64), batch.expected(mine, i, sinks), rtol=wide, atol=wide)
    return metadata


WRAPPERS = "BatchPrefill..., BatchDecodeWithPagedKVCacheWrapper"


@case("vllm", "attention: metadata builder, prefill and decode", WRAPPERS)
def attention() -> None:
    metadata = run_attention(Setting())
    assert (metadata.num_decodes, metadata.num_prefills) == (2, 2)
    run_attention(Setting(heads=8, soft_cap=3.0))


@case("vllm", "attention with a sliding window", WRAPPERS)
def attention_with_window() -> None:
    run_attention(Setting(window=11))


@case("vllm", "attention over an fp8 cache, queries in bf16", WRAPPERS)
def attention_fp8() -> None:
    run_attention(Setting(fp8=True))


@case("vllm", "attention in graph form: fast_plan_decode", "decode.fast_decode_plan, BatchDecode...")
def attention_graph() -> None:
    lens = [[3, 3, 3], [36, 12, 6], [70, 20, 9]]
    run_attention(Setting(graph=True), *(([1, 1, 1], each) for each in lens))


@case("vllm", "attention as on Hopper: XQA decode, prefill", "decode.xqa_batch_decode_with_kv_cache, BatchPrefill...")
def attention_hopper() -> None:
    run_attention(Setting(hopper=True))
    run_attention(Setting(hopper=True, window=11))


@case(
    "vllm",
    "attention as on Hopper with drafts: XQA with masks, of one length and of several",
    "decode.xqa_batch_decode_with_kv_cache",
)
def attention_hopper_drafts() -> None:
    run_attention(
        Setting(hopper=True, drafts=2), ([3, 3, 20], [33, 5, 40]), ([3, 2, 20], [33, 5, 40]), ([1, 1, 9], [33, 5, 40])
    )


@case(
    "vllm",
    "attention as on Hopper with sinks: XQA decode, prefill's wrapper for sinks",
    "BatchAttentionWithAttentionSinkWrapper, decode.xqa_batch_decode_with_kv_cache",
)
def attention_hopper_sinks() -> None:
    run_attention(Setting(hopper=True, sinks=True))
    run_attention(Setting(hopper=True, sinks=True, window=11, heads=8))


@case(
    "vllm",
    "attention as on Hopper over an fp8 cache: XQA decode, prefill of e4m3 queries",
    "BatchPrefill..., decode.xqa_batch_decode_with_kv_cache",
)
def attention_hopper_fp8() -> None:
    run_attention(Setting(hopper=True, fp8=True))
    run_attention(Setting(hopper=True, fp8=True, drafts=2), ([3, 3, 20], [33, 5, 40]))
