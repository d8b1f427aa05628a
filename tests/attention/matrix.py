# SPDX-License-Identifier: Apache-2.0
"""Table of attention calls and their features, behind test_matrix.py and docs/attention_support.md.

python -m tests.attention.matrix --write      regenerate the page
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable

import torch

from flashinfer.jit import JitSpec
from flashinfer.jit import attention as jit

from . import calls
from .inputs import Batch
from .reference import Attention, Result

PAGE = Path(__file__).resolve().parents[2] / "docs" / "attention_support.md"


@dataclass(frozen=True)
class Feature:
    """Row of the table: a difference from the plain call."""

    title: str
    what: Callable[[Batch], calls.What] = lambda batch: Attention()
    batch: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    devices: tuple[str, ...] = ("cpu", "cuda")
    tolerance: float = 1.0
    #: True if by default only batch prefill, whose modules have the kernels of all other calls, builds modules of this
    #: feature on the CPU.
    rare: bool = False


def always(**settings: Any) -> Callable[[Batch], calls.What]:
    return lambda batch: Attention(**settings)


def random_masks(batch: Batch) -> calls.What:
    shapes = zip(batch.qo_lens, batch.kv_lens, strict=True)
    each = [Attention(mask=torch.rand(a, b, device=batch.device) < 0.5) for a, b in shapes]
    return each if len(each) > 1 else each[0]


def random_items(batch: Batch) -> calls.What:
    each = []
    for i, kv_len in enumerate(batch.kv_lens):
        prefix = kv_len // (i + 2)
        each.append(Attention(prefix_len=prefix, token_pos=torch.arange(kv_len - prefix + 1) % (4 + i)))
    return each


def sinks(batch: Batch) -> calls.What:
    return Attention(causal=True, sinks=torch.randn(batch.num_qo_heads, device=batch.device))


SCALED = always(k_scale=0.5, v_scale=2.0)
FEATURES = [
    Feature("plain"),
    Feature("causal", always(causal=True)),
    Feature("sliding window", always(causal=True, window_left=9)),
    Feature("window without causal", always(window_left=9)),
    Feature("soft cap", always(causal=True, logits_soft_cap=2.0), tolerance=2),
    Feature("ALiBi", always(causal=True, alibi=True)),
    Feature("ALiBi and soft cap", always(causal=True, alibi=True, logits_soft_cap=8.0), tolerance=2, rare=True),
    Feature("RoPE", always(causal=True, rope=True, rope_scale=2.0, rope_theta=5e3), tolerance=2),
    Feature("custom mask", random_masks),
    Feature("multi-item scoring", random_items),
    Feature("attention sinks", sinks),
    Feature("groups of 7 heads", batch={"num_qo_heads": 14}),
    Feature("HND", options={"layout": "HND"}),
    Feature("pages of 1", options={"page_size": 1}),
    Feature("pages of 5", options={"page_size": 5}),
    Feature("one tensor for keys and values", options={"form": "combined"}),
    Feature("different strides of keys and values", options={"form": "separate"}),
    Feature("several tokens per request", always(causal=True), batch={"qo_lens": [3, 3, 3, 3]}),
    Feature("disable_split_kv", options={"plan": {"disable_split_kv": True}}),
    Feature("fixed_split_size", options={"plan": {"fixed_split_size": 2}}),
    Feature("float32", batch={"dtype": torch.float32}, devices=("cpu",), rare=True),
    Feature("bfloat16", batch={"dtype": torch.bfloat16}, rare=True),
    Feature("head dim 80", batch={"head_dim_qk": 80}, rare=True),
    Feature("head dim 256", batch={"head_dim_qk": 256}, rare=True),
    Feature("head dims 192 and 128", always(causal=True), {"head_dim_qk": 192, "head_dim_vo": 128}, rare=True),
    Feature("scales of keys and values", SCALED),
    Feature("float8_e4m3fn keys", SCALED, {"kv_dtype": torch.float8_e4m3fn}, rare=True),
    Feature("float8_e5m2 keys", SCALED, {"dtype": torch.bfloat16, "kv_dtype": torch.float8_e5m2}, rare=True),
    Feature("NVFP4 keys", SCALED, {"kv_dtype": torch.uint8}, tolerance=4),
]  # fmt: skip


@dataclass(frozen=True)
class Api:
    """Column of the table: a call, the shape of its batches and the features that it has."""

    title: str
    call: Callable[..., Result]
    kind: str  #: kind of the native module
    features: tuple[str, ...]
    qo_lens: tuple[int, ...] = (1, 37, 5, 130)
    kv_lens: tuple[int, ...] = (70, 37, 260, 131)
    shape: dict[str, Any] = field(default_factory=dict)  #: further arguments of Batch
    #: Changes the computation of a feature to one that the call supports, such as a block mask.
    adapt: Callable[[Batch, calls.What], calls.What] = lambda batch, what: what
    #: Feature -> exception and text of a call that is rejected.
    refused: dict[str, tuple[type[Exception], str]] = field(default_factory=dict)

    def is_run(self, feature: Feature, device: str) -> bool:
        """Tell whether a cell runs: rare modules of other kinds need a GPU or ``FLASHINFER_TEST_ATTENTION_FULL=1``."""
        is_full = device == "cuda" or os.environ.get("FLASHINFER_TEST_ATTENTION_FULL") == "1"
        return is_full or not feature.rare or self.kind == "batch_prefill"

    def batch(self, feature: Feature, device: str) -> Batch:
        shape: dict[str, Any] = {"qo_lens": list(self.qo_lens), "kv_lens": list(self.kv_lens)}
        shape |= {"num_qo_heads": 6, "num_kv_heads": 2, **self.shape, **feature.batch}
        return Batch(**shape, device=device)

    def what(self, feature: Feature, batch: Batch) -> calls.What:
        return self.adapt(batch, feature.what(batch))


def in_blocks(batch: Batch, what: calls.What) -> calls.What:
    """Return attention with a mask of half of the blocks, unless the feature has its own mask."""
    one = calls.first(what)
    if one.mask is not None:
        return one
    rows, columns = batch.qo_lens[0], batch.kv_lens[0]
    some = torch.rand(-(-rows // calls.BLOCK), columns // calls.BLOCK, device=batch.device) < 0.5
    mask = some.repeat_interleave(calls.BLOCK, 0)[:rows].repeat_interleave(calls.BLOCK, 1)
    return one.with_(mask=mask)


def with_sinks(batch: Batch, what: calls.What) -> calls.What:
    return calls.first(what).with_(sinks=torch.randn(batch.num_qo_heads, device=batch.device))


def latent_scale(batch: Batch, what: calls.What) -> calls.What:
    return calls.first(what).with_(sm_scale=192**-0.5)


POSITIONS = ("sliding window", "soft cap", "ALiBi", "ALiBi and soft cap", "RoPE")
PAGES = ("pages of 1", "pages of 5", "one tensor for keys and values", "different strides of keys and values")
ALWAYS = ("plain", "float32", "groups of 7 heads", "HND", "bfloat16", "head dim 80", "head dim 256")
FP8 = ("float8_e4m3fn keys", "float8_e5m2 keys")
SCALES = "scales of keys and values"
PREFILL = (
    *ALWAYS,
    *POSITIONS,
    *FP8,
    SCALES,
    "causal",
    "window without causal",
    "custom mask",
    "head dims 192 and 128",
    "NVFP4 keys",
)
BATCHED = ("disable_split_kv", "fixed_split_size", "multi-item scoring")

NARROW = {"qo_lens": (1, 1, 1, 1), "kv_lens": (70, 3, 600, 128)}
DECODE = (*ALWAYS, *POSITIONS, *FP8, SCALES)
MIXED = ("plain", "causal", "groups of 7 heads", "HND", "bfloat16", *PAGES)
APIS = [
    Api("single decode", calls.single_decode, "single_decode", DECODE, (1,), (600,)),
    Api("single prefill", calls.single_prefill, "single_prefill", PREFILL, (37,), (600,)),
    Api(
        "batch decode",
        calls.batch_decode,
        "batch_decode",
        (*DECODE, *PAGES[:3], "disable_split_kv", "attention sinks"),
        **NARROW,
        refused={
            PAGES[3]: (ValueError, "must have identical strides"),
            "fixed_split_size": (ValueError, "must be None without use_tensor_cores"),
            "several tokens per request": (ValueError, "must be 1 without use_tensor_cores"),
        },
    ),
    Api(
        "batch decode, tensor cores",
        calls.tensor_core_decode,
        "batch_prefill",
        (*DECODE, *PAGES, *BATCHED[:2], "several tokens per request", "NVFP4 keys", "attention sinks"),
        **NARROW,
    ),
    Api("paged prefill", calls.paged_prefill, "batch_prefill", (*PREFILL, *PAGES, *BATCHED, "attention sinks")),
    Api("ragged prefill", calls.ragged_prefill, "batch_prefill", (*PREFILL, *BATCHED)),
    Api("BatchAttention", calls.batch_attention, "batch_prefill", (*MIXED, "soft cap", "NVFP4 keys", FP8[0])),
    Api(
        "with sinks", calls.attention_sink, "sink", (*MIXED[:4], *PAGES, "attention sinks", "sliding window"),
        adapt=with_sinks,
    ),
    Api(
        "cascade", calls.cascade, "batch_prefill", (*MIXED, "soft cap"),
        kv_lens=(80, 92, 140, 181), shape={"shared_prefix": 44},
    ),
    Api("POD", calls.pod, "batch_prefill", (*MIXED, "sliding window"), (37, 1, 1), (131, 70, 3)),
    Api("batch POD", calls.batch_pod, "batch_prefill", (*MIXED, "sliding window"), (37, 5, 1, 1), (131, 70, 3, 99)),
    Api(
        "block sparse", calls.block_sparse, "batch_prefill",
        ("plain", "soft cap", "custom mask", "groups of 7 heads", "bfloat16"), (128,), (256,), adapt=in_blocks,
    ),
    Api(
        "MLA", calls.mla, "mla", ("plain", "causal", "bfloat16", *PAGES[:2]), (1, 7, 3, 17), (70, 7, 260, 31),
        {"num_qo_heads": 16, "num_kv_heads": 1, "head_dim_qk": 576, "head_dim_vo": 512, "latent": True}, latent_scale,
    ),
]  # fmt: skip


def specs(device: str) -> list[JitSpec]:
    """Return the module specs of all cells, to be built in parallel."""
    found = {}
    for api in APIS:
        for feature in FEATURES:
            has_cell = feature.title in api.features and device in feature.devices and api.is_run(feature, device)
            if has_cell and api.kind in GENERATORS:
                batch = api.batch(feature, "cpu")  # only dtypes and sizes are read
                one = calls.first(api.what(feature, batch))
                dtypes, dims = (batch.dtype, batch.kv_dtype, batch.dtype), (batch.head_dim_qk, batch.head_dim_vo)
                flags = (1 if one.rope else 2 if one.alibi else 0, False, one.logits_soft_cap > 0)
                spec = GENERATORS[api.kind](dtypes, dims, flags, device)
                found[spec.name] = spec
    return list(found.values())


I32 = torch.int32
GENERATORS: dict[str, Callable[..., JitSpec]] = {
    "single_decode": lambda t, d, f, device: jit.gen_single_decode_module(*t, *d, *f, device=device),
    "single_prefill": lambda t, d, f, device: jit.gen_single_prefill_module("fa2", *t, *d, *f, False, device=device),
    "batch_decode": lambda t, d, f, device: jit.gen_batch_decode_module(*t, I32, *d, *f, device=device),
    "batch_prefill": lambda t, d, f, device: jit.gen_batch_prefill_module("fa2", *t, I32, *d, *f, False, device=device),
}


def cell(api: Api, feature: Feature) -> str:
    """Return the text of a cell of the page."""
    if feature.title in api.refused:
        return f"no: {api.refused[feature.title][0].__name__}"
    if feature.title not in api.features:
        return ""
    return "yes" if len(feature.devices) == 2 else feature.devices[0].upper()


def page() -> str:
    head = "| | " + " | ".join(api.title for api in APIS) + " |"
    rows = [f"| {f.title} | " + " | ".join(cell(api, f) for api in APIS) + " |" for f in FEATURES]
    return TEXT + "\n".join([head, "|---" * (len(APIS) + 1) + "|", *rows]) + "\n"


TEXT = """# Attention: what works where

Written by `python -m tests.attention.matrix --write` from the table that `tests/attention/test_matrix.py` runs. Each
"yes" is a comparison with the float64 reference, on the CPU and on CUDA; "CPU" or "CUDA" stands where only that device
has it. "no" names the exception; its text says what to do. An empty cell: the call has no such argument. Backend `fa2`
serves all of them; on CPU tensors it is the portable kernel. Queries may be float16 or bfloat16, on the CPU also
float32. Head dims are multiples of 16 up to 512, with any number of query heads per KV head.

"""


def main() -> None:
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page())
    else:
        print(page())


if __name__ == "__main__":
    main()
