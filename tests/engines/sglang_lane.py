# SPDX-License-Identifier: Apache-2.0
"""SGLang's own modules on CPU tensors: they import with this package, and its MLA backend decodes."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from .table import case


def _backend(name: str) -> Any:
    """Import a backend as SGLang does where it sees a GPU: without one it does not ask for this package."""
    utils = importlib.import_module("sglang.srt.utils")
    utils.is_flashinfer_available = lambda: True
    return importlib.import_module(f"sglang.srt.layers.attention.{name}")


@case(
    "sglang",
    "attention backend: imports, helpers it takes at import",
    "flashinfer, flashinfer.decode, flashinfer.utils",
)
def sglang_attention_imports() -> None:
    backend = _backend("flashinfer_backend")
    assert backend.BatchPrefillWithPagedKVCacheWrapper.__module__.startswith("flashinfer.")
    assert backend.fast_decode_plan.__module__.startswith("flashinfer.")


@case("sglang", "MLA backend: imports", "flashinfer.mla.BatchMLAPagedAttentionWrapper")
def sglang_mla_imports() -> None:
    backend = _backend("flashinfer_mla_backend")
    assert backend.BatchMLAPagedAttentionWrapper.__module__.startswith("flashinfer.")


class _OnHost:
    """The module torch, for code that names the device "cuda" itself."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def empty(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        return torch.empty(*args, **kwargs)


@case("sglang", "MLA decode: plan of the indices updater, forward_decode", "mla.BatchMLAPagedAttentionWrapper")
def sglang_mla_decode() -> None:
    import flashinfer

    backend = _backend("flashinfer_mla_backend")
    torch.manual_seed(0)
    heads, ckv, kpe, lens, scaling, dtype = 16, 512, 64, [33, 5, 70], 192**-0.5, torch.bfloat16
    slots = torch.randperm(200)[: sum(lens)].int()
    cache = torch.randn(200, 1, ckv + kpe).to(dtype)

    def pack(plan: Any, *, req_pool_indices: Any, seq_lens: Any, indptr: Any, out: torch.Tensor) -> bool:
        out.copy_(slots)  # what SGLang's Triton kernel reads from its table of tokens
        return True

    starts = torch.arange(len(lens) + 1, dtype=torch.int32)
    state = SimpleNamespace(
        kv_indptr=torch.zeros(len(lens) + 1, dtype=torch.int32),
        q_indptr_decode=starts,
        kv_index_translator=SimpleNamespace(pack_read_stream=pack, needs_read_translate=False),
    )
    config = SimpleNamespace(
        num_attention_heads=heads, kv_lora_rank=ckv, qk_nope_head_dim=128, qk_rope_head_dim=kpe, scaling=scaling
    )
    ranks = SimpleNamespace(attn_tp_size=1, attn_dcp_size=1, dcp_enabled=False)
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(torch.empty(32 << 20, dtype=torch.uint8), backend="auto")
    q = torch.randn(len(lens), heads, ckv + kpe).to(dtype)
    with mock.patch.object(backend, "get_parallel", lambda: ranks), mock.patch.object(backend, "torch", _OnHost()):
        updater = backend.FlashInferMLAIndicesUpdaterDecode(SimpleNamespace(model_config=config, dtype=dtype), state)
        known = torch.tensor(lens)
        updater.update(known, sum(lens), wrapper, plan=None, req_pool_indices=torch.arange(len(lens)))
        runner = object.__new__(backend.FlashInferMLAAttnBackend)
        runner.forward_metadata = SimpleNamespace(decode_wrapper=wrapper)
        runner.token_to_kv_pool = SimpleNamespace(get_key_buffer=lambda layer: cache)
        layer = SimpleNamespace(tp_q_head_num=heads, head_dim=ckv + kpe, v_head_dim=ckv, layer_id=0)
        batch = SimpleNamespace(forward_mode=SimpleNamespace(is_decode=lambda: True))
        out = runner.forward_decode(q, None, None, layer, batch, save_kv_cache=False)
    for i, part in enumerate(slots.split(lens)):
        keys = cache[part.long(), 0].double()
        weights = (q[i].double() @ keys.T * scaling).softmax(-1)
        expected = (weights @ keys[:, :ckv]).view(-1)
        torch.testing.assert_close(out[i].double(), expected, rtol=2e-2, atol=2e-2)
