# SPDX-License-Identifier: Apache-2.0
"""The engine of ``python examples/serve``: requests, batches, forward passes, CUDA graphs of decode steps.

Read it in this order. ``Request`` is a user's request. ``Engine.step`` is one forward pass: a prefill of waiting
prompts or, if there are none, a decode step with the last token of every running request, which is ``Launched`` before
the tokens of the step before are read. ``Batch`` holds the kernel
inputs of either: rows of tokens and a page table. ``DecodeGraph`` is a decode step as a CUDA graph. ``serve`` submits
requests when they arrive.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from dataclasses import dataclass, field, fields, replace
from typing import Any, Callable, Iterable, Optional, Sequence

import numpy as np
import torch

import flashinfer
from flashinfer.jit import JitSpec, build_jit_specs, gen_batch_decode_module, gen_batch_prefill_module
from flashinfer.jit.activation import gen_activation_module
from flashinfer.jit.fused_moe import gen_fused_moe_module, gen_moe_routing_module
from flashinfer.jit.gemm import gen_dense_gemm_sm90_module, gen_gemm_module, gen_quantize_1x128_module
from flashinfer.jit.indexer import gen_mqa_logits_module
from flashinfer.jit.norm import gen_norm_module
from flashinfer.jit.page import gen_page_module
from flashinfer.jit.recurrent.gdn_prefill import gen_gdn_prefill_module
from flashinfer.jit.recurrent.gdn_step import gen_gdn_step_module
from flashinfer.jit.rope import gen_rope_module
from flashinfer.jit.sampling import gen_sampling_module
from flashinfer.jit.sparse_mla import gen_sparse_mla_module
from flashinfer.jit.topk import gen_topk_module
from serve.model import Llama
from serve.recurrent import PADDING_SLOT
from serve.report import Step
from serve.sparse import Unplanned

WORKSPACE_BYTES = 128 << 20
NO_TOP_K = 2**31 - 1
LEAST_TEMPERATURE = 1e-5  # smaller temperatures overflow logits; the most likely token is certain long before
PADDING_PAGE = 0  # belongs to no request: padding rows of a CUDA graph write here


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of a request. Temperature 0 takes the most likely token, whatever the other parameters are.

    Random numbers depend on the seed, the position of the token in its request, and the row of the request in the
    batch: the same requests in the same order give the same text, but another batch may give another text.
    """

    temperature: float = 0.0
    top_k: int = NO_TOP_K
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        ranges = {
            "temperature": (0 <= self.temperature < math.inf, "0 or more"),
            "top_k": (1 <= self.top_k <= NO_TOP_K, f"1 to {NO_TOP_K}"),
            "top_p": (0 < self.top_p <= 1, "more than 0 and at most 1"),
            "seed": (-(2**63) <= self.seed < 2**63, "64 bits"),
        }
        for name, (is_right, expected) in ranges.items():
            if not is_right:
                raise ValueError(f"Sampling: {name} is {getattr(self, name)}, expected {expected}")


@dataclass(eq=False)
class Request:
    """Prompt of a user, and the state of its generation."""

    prompt: list[int]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    arrival: float = 0.0

    tokens: list[int] = field(init=False)  #: the prompt and the generated tokens
    pages: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))  #: int32
    slot: int = PADDING_SLOT  #: place in the states of recurrent layers
    num_cached: int = 0  #: tokens whose keys and values are in the pages
    first_token_at: Optional[float] = None
    finished_at: Optional[float] = None

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def max_length(self) -> int:
        return len(self.prompt) + self.max_new_tokens

    @property
    def num_uncached(self) -> int:
        """Number of tokens not yet in the cache: 1 while decoding (the latest token), more during prefill."""
        return len(self.tokens) - self.num_cached


@dataclass
class Batch:
    """Tokens of a forward pass as rows, request after request, with the page table *after* they are appended."""

    tokens: torch.Tensor
    positions: torch.Tensor
    batch_indices: torch.Tensor
    last_rows: torch.Tensor
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    kv_last_page_len: torch.Tensor
    slots: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    seed: torch.Tensor
    offset: torch.Tensor

    @staticmethod
    def of(chunks: Sequence[tuple[Request, int]], page_size: int, ahead: int = 0) -> Batch:
        """Make a batch of the next ``n`` tokens of each request, in host memory: ``plan`` then does not synchronise.

        With ``ahead``, of those after so many tokens, which are not known yet: their place is left to the caller.
        """
        starts = [request.num_cached + ahead for request, _ in chunks]
        ends = [start + n for start, (_, n) in zip(starts, chunks, strict=True)]
        pages = [request.pages[: -(-end // page_size)] for (request, _), end in zip(chunks, ends, strict=True)]
        counts = list(map(len, pages))
        # pinned where it can be: a long copy from other memory would wait for the step that the device works on
        kv_indices = torch.empty(sum(counts), dtype=torch.int32, pin_memory=torch.cuda.is_available())
        if chunks:
            np.concatenate(pages, out=kv_indices.numpy())
        qo_indptr = [0, *itertools.accumulate(n for _, n in chunks)]
        kv_indptr = [0, *itertools.accumulate(counts)]
        sampling = [request.sampling for request, _ in chunks]

        def ints(values: Iterable[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.tensor(list(values), dtype=dtype)

        rows = list(zip(chunks, starts, ends, strict=True))
        return Batch(
            tokens=ints(t for (r, n), start, end in rows for t in ([0] * n if ahead else r.tokens[start:end])),
            positions=ints(p for _, start, end in rows for p in range(start, end)),
            batch_indices=ints(i for i, (_, n) in enumerate(chunks) for _ in range(n)),
            last_rows=ints([end - 1 for end in qo_indptr[1:]]),
            qo_indptr=ints(qo_indptr),
            kv_indptr=ints(kv_indptr),
            kv_indices=kv_indices,
            kv_last_page_len=ints([(end - 1) % page_size + 1 for end in ends]),
            slots=ints(request.slot for request, _ in chunks),
            temperature=torch.tensor([s.temperature for s in sampling]),
            top_k=ints([s.top_k for s in sampling]),
            top_p=torch.tensor([s.top_p for s in sampling]),
            seed=ints([s.seed for s in sampling], torch.int64),
            offset=ints(ends, torch.int64),  # position of the sampled token: each has its own random numbers
        )

    def to(self, device: torch.device) -> Batch:
        return Batch(*(getattr(self, f.name).to(device, non_blocking=True) for f in fields(self)))

    @property
    def page_table(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.kv_indptr, self.kv_indices, self.kv_last_page_len


def sample(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Sample a token from each row of ``(batch, vocab_size)`` logits with the row's parameters, without waiting."""
    greedy = batch.temperature < LEAST_TEMPERATURE
    scaled = logits / batch.temperature.masked_fill(greedy, 1.0)[:, None]
    drawn = flashinfer.top_k_top_p_sampling_from_logits(
        scaled, batch.top_k, batch.top_p, seed=batch.seed, offset=batch.offset
    )
    return torch.where(greedy, logits.argmax(dim=-1), drawn)


@dataclass(frozen=True)
class Launched:
    """A step that the device works on: its chunks, when it was launched, and the tokens that it will give."""

    kind: str
    start: float
    chunks: tuple[tuple[Request, int], ...]
    tokens: torch.Tensor  #: on the device; the next step may overwrite them
    on_host: torch.Tensor  #: a copy in pinned memory, complete after ``done``
    done: Optional[torch.cuda.Event]

    @staticmethod
    def of(kind: str, start: float, chunks: Sequence[tuple[Request, int]], tokens: torch.Tensor) -> Launched:
        if not tokens.is_cuda:
            return Launched(kind, start, tuple(chunks), tokens, tokens, None)
        on_host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        on_host.copy_(tokens, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return Launched(kind, start, tuple(chunks), tokens, on_host, done)

    def read(self) -> list[int]:
        """Wait for the tokens."""
        if self.done is not None:
            self.done.synchronize()
        return self.on_host.tolist()[: len(self.chunks)]


class Engine:
    """Continuous batching: requests join and leave the batch between any two steps.

    Parameters
    ----------
    model : Llama
    num_pages, page_size : int
        Size of the cache, with ``page_size`` tokens per page (default: 16; 64 with sparse attention). On admission a
        request reserves the pages of its longest possible text, so no running request ever lacks a page. A request
        waits until enough pages are free.
    max_batch_size : int
        Largest number of concurrent requests.
    max_prefill_tokens : int
        Largest number of prompt tokens per step; longer prompts take several steps. Limits the delay of other requests.
    disable_split_kv : bool
        Attention never splits the keys of a request, so that its result does not depend on the rest of the batch, bit
        for bit. Slower for a few long requests on a GPU. (Matrix products may still depend on the batch size.)
    use_cuda_graphs : Optional[bool]
        Use CUDA graphs for decode steps; default: True on a GPU.
    run_ahead : Optional[bool]
        Launch a decode step before the tokens of the last one are read, which it takes from where the device wrote
        them: the device does not wait for the host. If a token ends its request, what the next step computed for the
        request is not used. Default: True on a GPU.
    """

    def __init__(
        self,
        model: Llama,
        num_pages: int = 512,
        page_size: Optional[int] = None,
        max_batch_size: int = 16,
        max_prefill_tokens: int = 2048,
        disable_split_kv: bool = False,
        use_cuda_graphs: Optional[bool] = None,
        run_ahead: Optional[bool] = None,
    ) -> None:
        self.model, self.num_pages = model, num_pages
        self.page_size = page_size = model.page_size if page_size is None else page_size
        self.max_batch_size, self.max_prefill_tokens = max_batch_size, max_prefill_tokens
        self.disable_split_kv = disable_split_kv
        self.cache = model.new_cache(num_pages, page_size)
        self.free_pages = [page for page in reversed(range(num_pages)) if page != PADDING_PAGE]
        self.states = model.new_states(max_batch_size)
        self.free_slots = list(reversed(range(max_batch_size)))
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.steps: list[Step] = []
        self.start = time.perf_counter()

        # Scratch memory is not used after a launch, so all wrappers share one workspace.
        self.workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=model.device)
        self.prefill_attention: Any = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self.workspace)
        self.decode_attention: Any = flashinfer.BatchDecodeWithPagedKVCacheWrapper(self.workspace)
        if model.config.sparse is not None:
            if use_cuda_graphs:
                raise ValueError("Engine: use_cuda_graphs is True, expected False: plan copies the tables of a graph")
            self.prefill_attention = self.decode_attention = Unplanned()
            use_cuda_graphs = False
        self.run_ahead = model.device.type == "cuda" if run_ahead is None else run_ahead
        self.launched: Optional[Launched] = None  # a step whose tokens nobody has read
        self.graphs: dict[int, DecodeGraph] = {}
        if model.device.type == "cuda" if use_cuda_graphs is None else use_cuda_graphs:
            self._capture_graphs()

    def _capture_graphs(self) -> None:
        """Capture a graph for each power of two up to the batch size, largest first: the others reuse its memory."""
        sizes = {min(2**i, self.max_batch_size) for i in range(self.max_batch_size.bit_length() + 1)}
        pool = None
        for size in sorted(sizes, reverse=True):
            self.graphs[size] = DecodeGraph(self, size, pool)
            pool = self.graphs[size].graph.pool()

    def now(self) -> float:
        """Return the seconds since the engine was created, or since ``start`` was set."""
        return time.perf_counter() - self.start

    @property
    def is_busy(self) -> bool:
        return bool(self.waiting or self.running)

    def check(self, request: Request) -> None:
        """Raise ``ValueError`` for a request that could never be served."""
        longest = min(self.model.config.max_length, (self.num_pages - 1) * self.page_size)
        if not request.prompt or request.max_new_tokens < 1 or request.max_length > longest:
            raise ValueError(
                f"submit: the prompt has {len(request.prompt)} tokens and max_new_tokens is {request.max_new_tokens}, "
                f"expected at least 1 of each and at most {longest} together (the model's length and the cache)"
            )
        strange = [token for token in request.prompt if not 0 <= token < self.model.config.vocab_size]
        if strange:
            raise ValueError(
                f"submit: the prompt has token {strange[0]}, expected 0 to {self.model.config.vocab_size - 1} (the "
                "model's vocabulary)"
            )

    def submit(self, request: Request) -> None:
        """Queue a request."""
        self.check(request)
        self.waiting.append(request)

    def _admit(self) -> None:
        """Admit requests in order of arrival. A request that does not fit blocks the rest, so that it cannot starve."""
        while self.waiting and self.free_slots:
            request = self.waiting[0]
            needed = -(-request.max_length // self.page_size)
            if needed > len(self.free_pages):
                return
            request.pages = np.array([self.free_pages.pop() for _ in range(needed)], np.int32)
            request.slot = self.free_slots.pop()
            if self.states is not None:
                self.states.clear(request.slot)
            self.running.append(self.waiting.popleft())

    def step(self) -> list[Request]:
        """Run one forward pass, and return the requests that have a new token."""
        this, self.launched = self.launched or self._launch(), None
        if self._may_run_ahead(this):
            self.launched = self._launch_decode(this.chunks, this.tokens)
        tokens = this.read()
        if self.model.parallel is not None:
            self.model.parallel.compare(tokens)
        now = self.now()
        start = max(this.start, self.steps[-1].end) if self.steps else this.start
        self.steps.append(Step(this.kind, start, now, this.chunks))
        advanced = []
        for (request, n), token in zip(this.chunks, tokens, strict=True):
            if request.finished_at is not None:  # the token before ended it, when this step ran already
                continue
            request.num_cached += n
            if request.num_uncached == 0:  # false if the prompt has more chunks to prefill
                self._append(request, token, now)
                advanced.append(request)
        if not self.running:
            self.launched = None
        return advanced

    def _launch(self) -> Launched:
        """Launch the prompts that wait, or else a token of every running request."""
        self._admit()
        prompts = [request for request in self.running if request.num_uncached > 1]
        if not prompts:
            return self._launch_decode([(request, 1) for request in self.running])
        chunks, start = self._cut(prompts), self.now()
        return Launched.of("prefill", start, chunks, self.prefill(chunks))

    def _launch_decode(self, chunks: Sequence[tuple[Request, int]], after: Optional[torch.Tensor] = None) -> Launched:
        start = self.now()
        return Launched.of("decode", start, chunks, self.decode(chunks, after))

    def _may_run_ahead(self, this: Launched) -> bool:
        """Tell whether the next step is known before the tokens of this one: nobody waits, nobody reaches the end."""
        if not self.run_ahead or this.kind != "decode" or self.waiting:
            return False
        return all(len(r.tokens) + 1 < r.max_length and r.finished_at is None for r, _ in this.chunks)

    def _cut(self, prompts: list[Request]) -> list[tuple[Request, int]]:
        """Split prompts into chunks for the next step: (request, number of tokens), up to ``max_prefill_tokens``."""
        chunks, budget = [], self.max_prefill_tokens
        for request in prompts:
            n = min(request.num_uncached, budget)
            if n:
                chunks.append((request, n))
            budget -= n
        return chunks

    def _append(self, request: Request, token: int, now: float) -> None:
        request.tokens.append(token)
        if request.first_token_at is None:
            request.first_token_at = now
        if token in self.model.config.eos_tokens or len(request.tokens) == request.max_length:
            request.finished_at = now
            self.running.remove(request)
            self.free_pages += request.pages.tolist()
            self.free_slots.append(request.slot)

    def prefill(self, chunks: Sequence[tuple[Request, int]]) -> torch.Tensor:
        batch = Batch.of(chunks, self.page_size)
        self.prefill_attention.plan(batch.qo_indptr, *batch.page_table, *self._heads(), causal=True, **self._options())
        return self.run(batch.to(self.model.device), self.prefill_attention)

    def decode(self, chunks: Sequence[tuple[Request, int]], after: Optional[torch.Tensor] = None) -> torch.Tensor:
        """Return the next token of each request; ``after`` are the last ones where the host has not read them."""
        if self.graphs:
            size = min(size for size in self.graphs if size >= len(chunks))
            return self.graphs[size].replay(self.padded(chunks, size, ahead=after is not None), after)
        batch = Batch.of(chunks, self.page_size, ahead=after is not None)
        self.plan_decode(self.decode_attention, batch)
        rows = batch.to(self.model.device)
        return self.run(rows if after is None else replace(rows, tokens=after.int()), self.decode_attention)

    def padded(self, chunks: Sequence[tuple[Request, int]], size: int, ahead: bool = False) -> Batch:
        """Make a batch of exactly ``size`` requests, padded with one-token requests on the padding page."""
        filler = Request([0], 1, pages=np.array([PADDING_PAGE], np.int32))
        return Batch.of([*chunks, *[(filler, 1)] * (size - len(chunks))], self.page_size, ahead)

    def plan_decode(self, attention: flashinfer.BatchDecodeWithPagedKVCacheWrapper, batch: Batch) -> None:
        attention.plan(*batch.page_table, *self._heads(), **self._options())

    def _heads(self) -> tuple[int, int, int, int]:
        config = self.model.config
        return config.num_qo_heads, config.num_kv_heads, config.head_dim, self.page_size

    def _options(self) -> dict[str, object]:
        window = self.model.config.window
        window_left = -1 if window is None else window - 1  # keys before a token, without itself
        return {
            "q_data_type": self.model.dtype,
            "disable_split_kv": self.disable_split_kv,
            "window_left": window_left,
        }

    @torch.inference_mode()
    def run(self, batch: Batch, attention: object) -> torch.Tensor:
        """Return the next token of each request, on the device."""
        return sample(self.model.forward(batch, self.cache, attention, self.states), batch)


def capture(step: Callable[[], torch.Tensor], pool: Optional[Any]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """Capture ``step``; return the graph and its result, which every replay overwrites. ``pool``: memory to reuse."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # warm-up: loads modules and allocates memory, which is not allowed in a capture
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        result = step()
    return graph, result


class DecodeGraph:
    """A decode step of a fixed batch size: hundreds of launches captured once, replayed as one.

    A graph reads and writes the addresses it was captured with, so inputs are copied into the tensors of
    ``self.batch``. The wrapper's ``plan`` writes the page table and the plan itself to fixed addresses.
    """

    def __init__(self, engine: Engine, size: int, pool: Optional[Any]) -> None:
        host = engine.padded([], size)
        device = engine.model.device
        self.engine = engine
        self.names = ["positions", "temperature", "top_k", "top_p", "seed", "offset"]
        if engine.states is not None:
            self.names.append("slots")
        self.batch = host.to(device)
        self.batch.kv_indices = torch.zeros(engine.num_pages + size, dtype=torch.int32, device=device)
        self.attention = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            engine.workspace, "NHD", True, False, *self.batch.page_table
        )
        engine.plan_decode(self.attention, host)
        self.graph, self.tokens = capture(lambda: engine.run(self.batch, self.attention), pool)

    def replay(self, host: Batch, after: Optional[torch.Tensor] = None) -> torch.Tensor:
        """Return the next tokens of a batch of this size. The next replay of any graph overwrites them."""
        self.batch.tokens.copy_(host.tokens if after is None else after, non_blocking=True)
        for name in self.names:
            getattr(self.batch, name).copy_(getattr(host, name), non_blocking=True)
        self.engine.plan_decode(self.attention, host)
        self.graph.replay()
        return self.tokens


def kernel_specs(model: Llama) -> list[JitSpec]:
    """Return the specs of all modules that serving this model needs, to build them up front and in parallel."""
    backend, head_dim = model.device.type, model.config.head_dim
    key = (model.dtype, model.dtype, model.dtype, torch.int32, head_dim, head_dim, 0, False, False)
    elementwise = [gen_norm_module, gen_rope_module, gen_page_module, gen_activation_module, gen_sampling_module]
    if model.config.experts is not None:
        elementwise.append(gen_moe_routing_module)
        if model.dtype != torch.float32:
            elementwise.append(gen_fused_moe_module)
    recurrent = []
    if model.config.recurrent is not None:
        is_hopper = backend == "cuda" and flashinfer.utils.is_sm90a_supported(model.device)
        recurrent = [gen_gdn_step_module(backend), gen_gdn_prefill_module("sm90" if is_hopper else backend)]
    products = []
    if model.fp8:
        general = [gen_gemm_module("cpu"), gen_quantize_1x128_module("cpu")]
        products = [gen_dense_gemm_sm90_module("fp8_block")] if backend == "cuda" else general
    if model.config.sparse is not None:
        elementwise += [gen_mqa_logits_module, gen_topk_module]
        attention = gen_sparse_mla_module(backend, model.dtype, model.dtype)
        return [*(gen(backend) for gen in elementwise), *products, attention]
    return [
        *(gen(backend) for gen in elementwise),
        *products,
        *recurrent,
        gen_batch_decode_module(*key, device=backend),
        gen_batch_prefill_module("fa2", *key, False, device=backend),
    ]


def build_kernels(model: Llama) -> tuple[int, float]:
    """Build the modules that are not in the cache. Returns the number of modules built, and the seconds."""
    start = time.perf_counter()
    missing = [spec for spec in kernel_specs(model) if not spec.is_compiled]
    try:
        build_jit_specs(missing)
    except RuntimeError as error:  # no compiler, for example: the text names the remedy, a traceback would hide it
        raise SystemExit(f"serve: {error}") from error
    return len(missing), time.perf_counter() - start


def serve(engine: Engine, requests: Sequence[Request], on_token: Callable[[Request], None]) -> None:
    """Submit each request when it arrives and run the engine until all are done. The clock starts with the call."""
    coming = deque(sorted(requests, key=lambda request: request.arrival))
    engine.start, parallel = time.perf_counter(), engine.model.parallel
    while coming or engine.is_busy:
        ready = sum(request.arrival <= engine.now() for request in coming)
        for _ in range(ready if parallel is None else parallel.first(ready)):  # ranks' clocks differ
            engine.submit(coming.popleft())
        if not engine.is_busy:
            time.sleep(max(coming[0].arrival - engine.now(), 0))
            continue
        for request in engine.step():
            on_token(request)


def warm_up(engine: Engine) -> None:
    """Serve a short request first, so that loading modules and initialising libraries is not part of measured times."""
    serve(engine, [Request([0, 0], 2)], lambda request: None)
    engine.steps.clear()
