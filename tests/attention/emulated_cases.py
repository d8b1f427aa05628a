# SPDX-License-Identifier: Apache-2.0
"""Batches for the emulated Hopper prefill kernel, its compilation, and the reference in float64."""

from __future__ import annotations

import math

import pytest
import torch

from ..emulation.build import Library, compile_emulated

CAUSAL, CUSTOM = 1, 2
CAP = 4.0
#: C++ types of results, and of queries, keys and values.
FLOATS = {torch.bfloat16: "__nv_bfloat16", torch.float16: "__half"}
TYPES = {**FLOATS, torch.float8_e4m3fn: "__nv_fp8_e4m3", torch.float8_e5m2: "__nv_fp8_e5m2"}
# One request of no rows, one of no keys, one of fewer keys than rows, one of whole tiles.
LENGTHS = ([37, 0, 70, 33, 64], [301, 5, 0, 20, 256])


def compiled(
    factory: pytest.TempPathFactory,
    dims: tuple[int, int],
    *options: str,
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.bfloat16, torch.bfloat16),
    dtype_o: torch.dtype = torch.bfloat16,
) -> tuple[Library, int, int, torch.dtype, torch.dtype, torch.dtype]:
    """Compile what ``options`` name: rows, pages, masks, cap, hooks or form (of users), scales, mixed or short.

    ``dtypes`` are those of queries and of keys; results have the type of 16-bit queries, or ``dtype_o``.
    """
    kinds = {name: str(name in options).lower() for name in ("rows", "pages", "masks", "cap")}
    defines = [f"HEAD_QK={dims[0]}", f"HEAD_VO={dims[1]}", f"HAS_CAP={kinds.pop('cap')}"]
    defines += [f"KERNEL_{name.upper()}={value}" for name, value in kinds.items()]
    defines += ["USER_HOOKS"] if "hooks" in options else []
    defines += ["SM90_FORM"] if "form" in options else []
    defines += ["MIXED", "__CUDA_ARCH_LIST__=900"] if "mixed" in options else []
    defines += ["SHORT_FORM"] if "short" in options else []
    defines += ["HEAD_SCALES"] if "scales" in options else []
    dtype_o = dtypes[0] if dtypes[0] in FLOATS else dtype_o
    names = {"Q": dtypes[0], "KV": dtypes[1], "O": dtype_o}
    defines += [f"DTYPE_{name}={TYPES[dtype]}" for name, dtype in names.items()]
    return compile_emulated("emulated_prefill.cpp", factory, defines=tuple(defines)), *dims, *dtypes, dtype_o


class Case:
    """A batch, ragged or paged, and how the kernel is to run it."""

    def __init__(self, kernel, qo_lens, kv_lens, heads, **options) -> None:
        self.library, self.qk, self.vo, self.dtype, self.dtype_kv, self.dtype_o = kernel
        self.qo_lens, self.kv_lens, (self.qo_heads, self.kv_heads) = qo_lens, kv_lens, heads
        self.page_size: int = options.pop("page_size", 0)
        self.layout: str = options.pop("layout", "NHD")
        self.mask_mode: int = options.pop("mask_mode", 0)
        self.window: int = options.pop("window", -1)
        self.split: int = options.pop("split", 0)
        self.blocks: int = options.pop("blocks", 2)
        self.gap: int = options.pop("gap", 0)  # extra rows between pages
        assert not options
        torch.manual_seed(sum(qo_lens) + 7 * sum(kv_lens))
        self.q = torch.randn(sum(qo_lens), self.qo_heads, self.qk).to(self.dtype)
        self.keys = torch.randn(sum(kv_lens), self.kv_heads, self.qk).to(self.dtype_kv)
        self.values = torch.randn(sum(kv_lens), self.kv_heads, self.vo).to(self.dtype_kv)
        self.bits = [torch.rand(q, k) < 0.6 for q, k in zip(qo_lens, kv_lens, strict=True)]
        self.sink = torch.randn(self.qo_heads)
        self.sm_scale = 1 / math.sqrt(self.qk)
        #: Scales of queries, keys and values of each head, for kernels that have them.
        self.scales: list[torch.Tensor] = []

    def pages(self, rows: torch.Tensor) -> torch.Tensor:
        """Scatter rows into shuffled pages, NaN where no row is; a view with unused rows between pages if ``gap``."""
        counts = [-(-n // self.page_size) for n in self.kv_lens]
        cache = torch.full((sum(counts) + 1, self.page_size + self.gap, *rows.shape[1:]), math.nan, dtype=rows.dtype)
        if self.layout == "HND":
            cache = cache.transpose(1, 2).contiguous().transpose(1, 2)
        cache = cache[:, : self.page_size]
        at, first = 0, 0
        for n, count in zip(self.kv_lens, counts, strict=True):
            for i in range(count):
                taken = min(self.page_size, n - i * self.page_size)
                cache[self.table[first + i], :taken] = rows[at : at + taken]
                at += taken
            first += count
        return cache

    def call(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """Return the numbers of a call, its outputs, and the tensors that the numbers point to."""
        lengths = lambda x: torch.tensor([0, *torch.tensor(x).cumsum(0).tolist()], dtype=torch.int32)  # noqa: E731
        qo_indptr, kv_indptr = lengths(self.qo_lens), lengths(self.kv_lens)
        kv_lens = torch.tensor(self.kv_lens, dtype=torch.int32)
        k, v, self.table = self.keys, self.values, torch.zeros(1, dtype=torch.int32)
        if self.page_size:
            counts = [-(-n // self.page_size) for n in self.kv_lens]
            kv_indptr = lengths(counts)
            self.table = torch.randperm(sum(counts) + 1)[: sum(counts)].to(torch.int32)
            k, v = self.pages(k), self.pages(v)
        packed = [_packed(bits) for bits in self.bits]
        mask, mask_indptr = torch.cat(packed), lengths([len(x) for x in packed])
        o = torch.full((len(self.q), self.qo_heads, self.vo), math.nan, dtype=self.dtype_o)
        lse = torch.full((len(self.q), self.qo_heads), math.nan)
        tensors = [self.q, k, v, o, lse, qo_indptr, kv_indptr, kv_lens, self.table, mask, mask_indptr, self.sink]
        page_stride = [k.stride(0) if self.page_size else 0, v.stride(0) if self.page_size else 0]
        numbers = [len(self.qo_lens), len(self.q), len(self.keys), self.qo_heads, self.kv_heads, self.page_size]
        strides = [self.q.stride(0), self.q.stride(1)]
        for stride, t in zip(page_stride, (k, v), strict=True):
            strides += [stride, t.stride(-3), t.stride(-2)]
        options = [self.mask_mode, self.window, self.split, self.blocks]
        pointers = [t.data_ptr() for t in tensors] + ([t.data_ptr() for t in self.scales] or [0, 0, 0])
        call = torch.tensor([*pointers, *numbers, *strides, *options], dtype=torch.int64)
        return call, o, lse, tensors

    def run(self, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        call, o, lse, _tensors = self.call()
        self.items = -self.library.call("run", call.data_ptr(), 1, self.sm_scale, CAP)
        self.library.seed(seed)
        assert self.library.call("run", call.data_ptr(), 0, self.sm_scale, CAP) == 0
        return o, lse

    def expected(self, soft_cap: float = 0.0, has_hooks: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        outputs, lses, group = [], [], self.qo_heads // self.kv_heads
        for b, (q_len, kv_len) in enumerate(zip(self.qo_lens, self.kv_lens, strict=True)):
            q0, k0 = sum(self.qo_lens[:b]), sum(self.kv_lens[:b])
            q = self.q[q0 : q0 + q_len].double() * (2 if has_hooks else 1)
            k = self.keys[k0 : k0 + kv_len].double().repeat_interleave(group, 1)
            v = self.values[k0 : k0 + kv_len].double().repeat_interleave(group, 1)
            if self.scales:
                scale_q, scale_k, scale_v = (x.double()[:, None] for x in self.scales)
                q, k = q * scale_q, k * scale_k.repeat_interleave(group, 0)
                v = v * scale_v.repeat_interleave(group, 0)
            s = torch.einsum("qhd,khd->hqk", q, k) * self.sm_scale
            if soft_cap:
                s = soft_cap * torch.tanh(s / soft_cap)
            i, j = torch.arange(q_len)[:, None] + kv_len - q_len, torch.arange(kv_len)[None]
            visible = torch.ones(q_len, kv_len, dtype=torch.bool)
            if self.mask_mode == CAUSAL:
                visible &= j <= i
            if self.mask_mode == CUSTOM:
                visible &= self.bits[b]
            if self.window >= 0:
                visible &= j >= i - self.window
            shown = visible[None].expand(self.qo_heads, -1, -1)
            if has_hooks:
                shown = shown & ((torch.arange(self.qo_heads) % 2 == 0)[:, None, None] | (j % 5 != 0)[None])
            s = s.masked_fill(~shown, -math.inf)
            sink = self.sink.double()[:, None, None].expand(-1, q_len, 1) if has_hooks else s[..., :0]
            lse = torch.logsumexp(torch.cat([s, sink], -1), -1)
            p = torch.exp(s - lse[..., None]).nan_to_num(0)
            o = torch.einsum("hqk,khd->qhd", p, v)
            outputs.append(-o if has_hooks else o)
            lses.append(lse.T / math.log(2))
        return torch.cat(outputs), torch.cat(lses)

    def check(self, soft_cap: float = 0.0, has_hooks: bool = False, seed: int = 1) -> None:
        self.compare(*self.run(seed), soft_cap, has_hooks)

    def compare(self, o: torch.Tensor, lse: torch.Tensor, soft_cap: float = 0.0, has_hooks: bool = False) -> None:
        want_o, want_lse = self.expected(soft_cap, has_hooks)
        torch.testing.assert_close(o.double(), want_o, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(lse.double(), want_lse, rtol=1e-3, atol=1e-3)


def _packed(bits: torch.Tensor) -> torch.Tensor:
    flat = bits.flatten().to(torch.uint8)
    flat = torch.cat([flat, torch.zeros(-len(flat) % 8, dtype=torch.uint8)]).view(-1, 8)
    return (flat << torch.arange(8, dtype=torch.uint8)).sum(1).to(torch.uint8)
