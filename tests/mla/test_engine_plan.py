# SPDX-License-Identifier: Apache-2.0
"""Plans of MLA as serving engines use them for sparse attention.

Every query token is a request of one row, whose pages of one key are the selected rows of the cache. The engine plans
with upper bounds, and rewrites ends of works before launches.
"""

from __future__ import annotations

import pytest
import torch

import flashinfer.decode
import flashinfer.mla
from flashinfer import BatchMLAPagedAttentionWrapper

from ..attention.reference import Attention
from ..graphs import capture
from ..hopper.devices import has_hopper
from ..tensors import randn
from .latent import BF16, CKV, SCALE, close, workspace

WIDTH, TOKENS, ROWS = 160, 9, 400  # selected rows of a token, tokens of the largest step, rows of the cache


class Engine:
    """A wrapper with graph buffers, and what an engine does with it."""

    def __init__(self, device: str, backend: str, heads: int, kpe: int):
        def buffer(n):
            return torch.full((n,), -1, dtype=torch.int32, device=device)

        self.device, self.heads, self.kpe = device, heads, kpe
        self.buffers = buffer(TOKENS + 1), buffer(TOKENS + 1), buffer(TOKENS * WIDTH), buffer(TOKENS)
        names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
        graph = {"use_cuda_graph": True, **dict(zip(names, self.buffers, strict=True))}
        self.wrapper = BatchMLAPagedAttentionWrapper(workspace(device), backend=backend, **graph)

    def plan(self, bounds: list[int], entry: str = "plan") -> None:
        """Plan with the most keys that each token may have; further requests have neither rows nor keys."""
        lengths = torch.tensor([*bounds, *[0] * (TOKENS - len(bounds))], dtype=torch.int32)
        rows = torch.arange(TOKENS + 1, dtype=torch.int32).clamp_max(len(bounds))
        pages = torch.cat((torch.zeros(1), lengths.cumsum(0))).int()
        self.pages = pages
        wrapper = self.wrapper
        if entry == "native":  # as an engine that skips the wrapper and drops the result
            where = wrapper._float_workspace_buffer, wrapper._int_workspace_buffer
            tables = (rows, pages, lengths, self.heads, CKV, False)
            wrapper._cached_module.plan(*where, wrapper._pin_memory_int_workspace_buffer, *tables)
            return
        indices = self.buffers[2][: int(pages[-1])]  # its own buffer
        sizes, types = (self.heads, CKV, self.kpe, 1), {"q_data_type": BF16, "kv_data_type": BF16}
        wrapper.plan(rows, pages, indices, lengths, *sizes, False, SCALE, **types)

    def works(self) -> tuple[torch.Tensor, ...]:
        """First rows, first keys and ends of keys of the works, as views of the plan, and their number."""
        info = [int(x) for x in self.wrapper._plan_info]
        ints = self.wrapper._planned_backend._int_workspace_buffer.view(torch.int32)
        count, capacity = int(ints[info[15] // 4 + info[1]]), (info[3] - info[2]) // 4
        assert len(info) == 18 and 0 < count <= capacity
        return *(ints[at // 4 :][:count] for at in (info[2], info[13], info[14])), count

    def shorten(self, saved: torch.Tensor, valid: torch.Tensor) -> None:
        """Rewrite ends of works: what the engine's kernel does for each work."""
        rows, starts, ends, _ = self.works()
        ends.copy_(torch.maximum(torch.minimum(saved, valid[rows.long()]), starts))

    def write_ids(self, chosen: list[torch.Tensor]) -> None:
        """Write the selected rows of each token, and nothing that may be read behind them."""
        self.buffers[2].fill_(-1 << 20)
        for begin, ids in zip(self.pages.tolist(), chosen, strict=False):
            self.buffers[2][begin : begin + len(ids)] = ids.to(self.device)


def expected(q_nope, q_pe, ckv, kpe, chosen):
    what, results = Attention(causal=False, sm_scale=SCALE), []
    for i, ids in enumerate(chosen):
        keys = ckv[ids.long()].float()
        q = torch.cat([q_nope[i], q_pe[i]], -1)[None]
        results.append(what(q, torch.cat([keys, kpe[ids.long()].float()], -1), keys))
    return tuple(torch.cat(x) for x in zip(*results, strict=True))


def caches(device, kpe):
    packed = randn(ROWS, 1, CKV + kpe, dtype=BF16, device=device)
    return packed[..., :CKV], packed[..., CKV:]


def drawn(lengths):
    return [torch.randperm(ROWS)[:n].int() for n in lengths]


BACKENDS = ["fa2", *(["fa3"] if has_hopper() else [])]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads, kpe", [(16, 64), (128, 64), (16, 0)])
def test_rewritten_ends(device, backend, heads, kpe):
    """Exact lengths after a plan of upper bounds: shorter, none at all, those of the plan again; more tokens, fewer."""
    if backend == "fa3" and device != "cuda":
        pytest.skip("needs SM90")
    torch.manual_seed(0)
    engine = Engine(device, backend, heads, kpe)
    ckv, kpes = caches(device, kpe)
    for bounds in ([130, 7], [WIDTH] * TOKENS, [64, 1, 100, 33]):
        engine.plan(bounds)
        saved = engine.works()[2].clone()
        assert torch.equal(engine.buffers[1].cpu(), engine.pages)
        q_nope = randn(len(bounds), heads, CKV, dtype=BF16, device=device)
        q_pe = randn(len(bounds), heads, kpe, dtype=BF16, device=device)
        for draw in range(3):
            lengths = [int(n * x) for n, x in zip(bounds, torch.rand(len(bounds)).tolist(), strict=True)]
            lengths = bounds if draw == 2 else [0, *lengths[1:]]
            chosen = drawn(lengths)
            engine.shorten(saved, torch.tensor([*lengths, *[0] * TOKENS], dtype=torch.int32, device=device))
            engine.write_ids(chosen)
            result = engine.wrapper.run(q_nope, q_pe, ckv, kpes, return_lse=True)
            want = expected(q_nope, q_pe, ckv, kpes, [x.to(device) for x in chosen])
            close(result, want, 1e-2)


@pytest.mark.parametrize("entry", ["plan", "native"])
def test_published_arrays(device, entry):
    """Works cover the keys of each row, in the numbers that engines look up; a native plan refreshes them."""
    engine = Engine(device, "fa2", 16, 64)
    engine.plan([WIDTH] * 4)
    before = engine.wrapper._plan_info
    assert engine.wrapper._planned_backend._int_workspace_buffer is engine.wrapper._int_workspace_buffer
    engine.plan([150, 0, 31], entry)
    assert entry == "native" or engine.wrapper._plan_info == before, "addresses move"
    rows, starts, ends, _ = (x.cpu() if isinstance(x, torch.Tensor) else x for x in engine.works())
    covered = torch.zeros(TOKENS, dtype=torch.int64).index_add(0, rows.long(), (ends - starts).long())
    assert covered.tolist() == [150, 0, 31, *[0] * 6]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("backend", BACKENDS)
def test_graph(backend):
    """A captured launch follows later plans of more and fewer tokens, and ends that are rewritten between replays."""
    torch.manual_seed(1)
    engine = Engine("cuda", backend, 16, 64)
    ckv, kpes = caches("cuda", 64)
    q_nope, q_pe = (randn(TOKENS, 16, n, dtype=BF16, device="cuda") for n in (CKV, 64))
    engine.plan([5])
    engine.write_ids(drawn([5]))
    graph, (out, lse) = capture(lambda: engine.wrapper.run(q_nope, q_pe, ckv, kpes, return_lse=True))
    for bounds in ([WIDTH] * TOKENS, [100, 3]):
        engine.plan(bounds)
        saved = engine.works()[2].clone()
        for _ in range(2):
            lengths = [int(n * x) for n, x in zip(bounds, torch.rand(len(bounds)).tolist(), strict=True)]
            chosen = drawn(lengths)
            engine.shorten(saved, torch.tensor([*lengths, *[0] * TOKENS], dtype=torch.int32, device="cuda"))
            engine.write_ids(chosen)
            graph.replay()
            want = expected(q_nope, q_pe, ckv, kpes, [x.cuda() for x in chosen])
            close((out[: len(bounds)], lse[: len(bounds)]), want, 1e-2)


def test_page_ids_within_the_ends_are_checked():
    """The CPU refuses a page id that a launch would read, and ignores those behind the ends."""
    engine = Engine("cpu", "fa2", 16, 0)
    ckv, kpes = caches("cpu", 0)
    engine.plan([20])
    engine.write_ids(drawn([10]))
    arguments = (*(randn(1, 16, n, dtype=BF16, device="cpu") for n in (CKV, 0)), ckv, kpes)
    with pytest.raises(ValueError, match=r"run: kv_indices\[10\] must be 0 to 399 "):
        engine.wrapper.run(*arguments)
    engine.shorten(engine.works()[2].clone(), torch.tensor([10] * TOKENS, dtype=torch.int32))
    engine.wrapper.run(*arguments)


def test_graph_buffers_must_not_overlap(device):
    memory = torch.zeros(64, dtype=torch.int32, device=device)
    apart = (memory[:5], memory[5:10], memory[10:40], memory[40:44])
    BatchMLAPagedAttentionWrapper(workspace(device), True, *apart)
    with pytest.raises(ValueError, match="qo_indptr and kv_indptr must not share memory"):
        BatchMLAPagedAttentionWrapper(workspace(device), True, memory[:5], memory[4:9], *apart[2:])
    with pytest.raises(ValueError, match="kv_indices and kv_len_arr must not share memory"):
        BatchMLAPagedAttentionWrapper(workspace(device), True, *apart[:3], memory[39:43])


@pytest.mark.parametrize("name", ["batch_decode_sparse_mla_dsv4", "trtllm_batch_decode_sparse_mla_dsv4"])
def test_placeholders_name_the_way_on_hopper(name):
    """Both modules keep the names, and no name exists by which SGLang would change its choice of kernels."""
    for module in (flashinfer.mla, flashinfer.decode):
        with pytest.raises(ValueError, match=r"needs an SM100 .*BatchMLAPagedAttentionWrapper with page size 1"):
            getattr(module, name)()
    with pytest.raises(ValueError, match="BatchMLAPagedAttentionWrapper with page size 1"):
        flashinfer.decode.trtllm_batch_decode_with_kv_cache_mla(*[None] * 9, sparse_mla_top_k=2048)
    assert not hasattr(flashinfer.decode, "_grouped_size_compiled_for_decode_kernels")
