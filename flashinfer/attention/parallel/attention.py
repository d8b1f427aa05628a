# SPDX-License-Identifier: Apache-2.0
"""Attention of a rank's tokens to those of all ranks.

Ulysses: ranks swap heads for tokens, so that each has whole sequences of some heads (``all_to_all_single``). Ring: keys
and values go round, and each rank merges what it computes with every part, by LSE. Both: Ulysses within, ring across.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
import torch.distributed as dist

from ..._runtime.errors import ArgumentError
from ...cascade import merge_state_in_place
from ...prefill import single_prefill_with_kv_cache
from .config import UnevenCPConfig, VarlenCPConfig, part_of, size_of

__all__ = ["ParallelAttention"]

_BACKENDS = {"auto": "auto", "fa2": "fa2", "fa3": "fa3", "flash-attn2": "fa2", "flash-attn3": "fa3"}


class ParallelAttention:
    """Attention over the ranks of a Ulysses group, of a ring, or of both.

    Parameters
    ----------
    attn_type : str
        Kernel: ``"auto"``, ``"fa2"`` or ``"fa3"``.
    ulysses_group, ring_group
        Process groups of :func:`get_parallel_groups`; None for none.
    uneven_cp_config : UnevenCPConfig, optional
        A sequence with padding at its end.
    varlen_cp_config : VarlenCPConfig, optional
        Packed sequences; over a Ulysses group or a ring, not both.
    fuse_qkv : bool
        Whether query, key and value travel in one exchange; they must have as many heads.
    """

    def __init__(
        self,
        attn_type: str,
        ulysses_group: Optional[Any],
        ring_group: Optional[Any],
        uneven_cp_config: Optional[UnevenCPConfig] = None,
        varlen_cp_config: Optional[VarlenCPConfig] = None,
        fuse_qkv: bool = False,
    ) -> None:
        op = "ParallelAttention"
        if attn_type not in _BACKENDS:
            raise ArgumentError(f"{op}: attn_type must be one of {', '.join(_BACKENDS)}, got {attn_type!r}")
        self._backend, self._fuse = _BACKENDS[attn_type], fuse_qkv
        self._ulysses, self._ring = ulysses_group, ring_group
        self._u, self._r = size_of(ulysses_group), size_of(ring_group)
        self._ring_rank = 0 if ring_group is None else dist.get_rank(ring_group)
        self._uneven, self._varlen = uneven_cp_config, varlen_cp_config
        if varlen_cp_config is not None and (self._u > 1 and self._r > 1):
            raise ArgumentError(f"{op}: varlen_cp_config must be None with a Ulysses group and a ring, got both")
        if varlen_cp_config is not None and uneven_cp_config is not None:
            raise ArgumentError(f"{op}: uneven_cp_config must be None with varlen_cp_config, got both")

    def run(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        tensor_layout: str,
        attn_mask: Optional[torch.Tensor] = None,
        is_causal: bool = False,
        return_lse: bool = False,
        cur_rank_cu_seqlens_q: Optional[torch.Tensor] = None,
        cur_rank_cu_seqlens_k: Optional[torch.Tensor] = None,
        cur_rank_max_seqlen_q: int = 0,
        cur_rank_max_seqlen_k: int = 0,
        **kwargs: Any,
    ) -> Any:
        """Return attention of this rank's queries to the keys of all ranks; every rank of both groups calls it.

        Parameters
        ----------
        query, key, value : torch.Tensor
            This rank's tokens, ``(heads, tokens, head_dim)`` ("HND") or ``(tokens, heads, head_dim)`` ("NHD"), or with
            a batch in front. Tokens of ranks are neighbours, in order of the ring, then of the Ulysses group.
        tensor_layout : str
            "HND" or "NHD".
        attn_mask : torch.Tensor, optional
            Must be None.
        is_causal : bool
            Whether a token sees only itself and earlier ones.
        return_lse : bool
            Whether to return the base-2 LSE as well, without heads' dimension last: ``(tokens, heads)``.
        cur_rank_cu_seqlens_q, cur_rank_cu_seqlens_k, cur_rank_max_seqlen_q, cur_rank_max_seqlen_k
            Accepted; ``varlen_cp_config`` says the same.
        **kwargs
            Of :func:`single_prefill_with_kv_cache`, such as ``sm_scale``.

        Returns
        -------
        torch.Tensor or tuple
            In the layout of ``query``; with ``return_lse`` a pair.
        """
        op = "ParallelAttention.run"
        if tensor_layout not in ("HND", "NHD"):
            raise ArgumentError(f"{op}: tensor_layout must be 'HND' or 'NHD', got {tensor_layout!r}")
        if attn_mask is not None:
            raise ArgumentError(f"{op}: attn_mask must be None, got a tensor; is_causal masks later tokens")
        if query.dim() == 4:
            if return_lse:
                raise ArgumentError(f"{op}: query must have 3 dimensions with return_lse, got 4")
            rows = [
                self.run(*one, tensor_layout, is_causal=is_causal, **kwargs)
                for one in zip(query, key, value, strict=True)
            ]
            return torch.stack(rows)
        if query.dim() != 3 or key.shape != value.shape or key.dim() != 3:
            raise ArgumentError(
                f"{op}: query, key and value must have 3 or 4 dimensions, got {tuple(query.shape)}, "
                f"{tuple(key.shape)} and {tuple(value.shape)}"
            )
        is_hnd = tensor_layout == "HND"
        parts = [x.transpose(0, 1) if is_hnd else x for x in (query, key, value)]
        for name, x in zip(("query", "key"), parts, strict=False):
            if x.shape[1] % self._u:
                raise ArgumentError(f"{op}: {name} must have heads divisible by {self._u} ranks, got {x.shape[1]}")
        q, k, v = self._gather(parts)
        out, lse = self._attend(q, k, v, is_causal, kwargs)
        out = self._scatter(out, parts[0].shape[0])
        out = out.transpose(0, 1) if is_hnd else out
        return (out, self._scatter(lse.unsqueeze(-1), parts[0].shape[0]).squeeze(-1)) if return_lse else out

    # Ulysses

    def _lengths(self, is_query: bool) -> Optional[torch.Tensor]:
        if self._varlen is None or self._u == 1:
            return None
        c = self._varlen
        cu = c.cu_seqlens_q_cur_ulysses_group if is_query else c.cu_seqlens_kv_cur_ulysses_group
        assert cu is not None
        return (cu[1:] - cu[:-1]).cpu()

    def _rows(self, own: int, is_query: bool) -> list[int]:
        """Return the rows of each rank of the Ulysses group."""
        lengths = self._lengths(is_query)
        if lengths is None:
            return [own] * self._u
        return [sum(part_of(int(n), self._u, r) for n in lengths) for r in range(self._u)]

    def _order(self, is_query: bool) -> Optional[torch.Tensor]:
        """Return where the rows of whole sequences are among those of the ranks, one after the other."""
        lengths = self._lengths(is_query)
        if lengths is None:
            return None
        begins = [0] * self._u
        for r, rows in enumerate(self._rows(0, is_query)[:-1]):
            begins[r + 1] = begins[r] + rows
        order = []
        for n in lengths.tolist():
            for r in range(self._u):
                count = part_of(n, self._u, r)
                order.append(torch.arange(begins[r], begins[r] + count))
                begins[r] += count
        return torch.cat(order)

    def _exchange(self, x: torch.Tensor, is_query: bool) -> torch.Tensor:
        """Return all rows of this rank's heads: ``(rows, heads, d)`` -> ``(rows of all, heads / u, d)``."""
        rows, heads, dim = x.shape
        sent = x.reshape(rows, self._u, heads // self._u, dim).transpose(0, 1).contiguous()
        counts = self._rows(rows, is_query)
        found = x.new_empty(sum(counts), heads // self._u, dim)
        dist.all_to_all_single(found, sent.flatten(0, 1), counts, [rows] * self._u, group=self._ulysses)
        order = self._order(is_query)
        return found if order is None else found[order.to(x.device)]

    def _gather(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        q, k, v = parts
        if self._u > 1:
            if self._fuse and q.shape == k.shape:
                q, k, v = self._exchange(torch.cat([q, k, v], -1), True).chunk(3, -1)
            else:
                q, k, v = self._exchange(q, True), self._exchange(k, False), self._exchange(v, False)
        if self._uneven is not None and self._uneven.seq_len_cur_ring_group is not None:
            q, k, v = (x[: self._uneven.seq_len_cur_ring_group] for x in (q, k, v))
        return [x.contiguous() for x in (q, k, v)]

    def _scatter(self, x: torch.Tensor, own: int) -> torch.Tensor:
        """Return all heads of this rank's rows, from all rows of its heads; rows of padding are zero."""
        counts = self._rows(own, True)
        if x.shape[0] < sum(counts):
            x = torch.cat([x, x.new_zeros(sum(counts) - x.shape[0], *x.shape[1:])])
        if self._u == 1:
            return x
        order = self._order(True)
        if order is not None:
            x = torch.empty_like(x).index_copy_(0, order.to(x.device), x)
        rows, heads, dim = counts[dist.get_rank(self._ulysses)], x.shape[1], x.shape[2]
        found = x.new_empty(self._u * rows, heads, dim)
        dist.all_to_all_single(found, x.contiguous(), [rows] * self._u, counts, group=self._ulysses)
        return found.view(self._u, rows, heads, dim).transpose(0, 1).reshape(rows, self._u * heads, dim)

    # Ring

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, options: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.zeros(*q.shape[:2], v.shape[2], dtype=q.dtype, device=q.device)
        lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
        block = torch.cat([k, v], -1)
        if self._uneven is not None and self._r > 1:
            rows = (self._uneven.seq_len_padded or 0) // self._r
            block = torch.cat([block, block.new_zeros(rows - block.shape[0], *block.shape[1:])])
        for step in range(self._r):
            source = (self._ring_rank - step) % self._r
            waiting = self._send(block, step)
            for q_part, kv_part in self._sequences(q.shape[0], block.shape[0], source):
                keys, values = block[kv_part].split([k.shape[2], v.shape[2]], -1)
                if q_part.stop == q_part.start or len(keys) == 0 or (is_causal and source > self._ring_rank):
                    continue
                one, its_lse = single_prefill_with_kv_cache(
                    q[q_part].contiguous(),
                    keys.contiguous(),
                    values.contiguous(),
                    causal=is_causal and source == self._ring_rank,
                    return_lse=True,
                    backend=self._backend,
                    **options,
                )
                merge_state_in_place(out[q_part], lse[q_part], one, its_lse)
            block = self._received(waiting, block)
        return out, lse

    def _sequences(self, q_rows: int, kv_rows: int, source: int) -> list[tuple[slice, slice]]:
        """Return the rows of each sequence, here and in the part of a rank of the ring."""
        c = self._varlen
        if c is None:
            if self._uneven is not None and self._r > 1:
                kv_rows = min(max((self._uneven.seq_len or 0) - source * kv_rows, 0), kv_rows)
            return [(slice(0, q_rows), slice(0, kv_rows))]
        if self._r > 1:
            assert c.cu_seqlens_q_cur_ring_group is not None and c.cu_seqlens_kv_cur_ring_group is not None
            q, kv = c.cu_seqlens_q_cur_ring_group[self._ring_rank], c.cu_seqlens_kv_cur_ring_group[source]
        else:
            assert c.cu_seqlens_q_cur_ulysses_group is not None and c.cu_seqlens_kv_cur_ulysses_group is not None
            q, kv = c.cu_seqlens_q_cur_ulysses_group, c.cu_seqlens_kv_cur_ulysses_group
        ends = zip(q.tolist(), q.tolist()[1:], kv.tolist(), kv.tolist()[1:], strict=False)
        return [(slice(a, b), slice(c, d)) for a, b, c, d in ends]

    def _send(self, block: torch.Tensor, step: int) -> Optional[tuple[torch.Tensor, Any]]:
        """Begin to pass a block on; the last one stays."""
        if self._ring is None or step == self._r - 1:
            return None
        rows = block.shape[0]
        if self._varlen is not None and self._varlen.cu_seqlens_kv_cur_ring_group is not None:
            rows = int(self._varlen.cu_seqlens_kv_cur_ring_group[(self._ring_rank - step - 1) % self._r, -1])
        after = dist.get_global_rank(self._ring, (self._ring_rank + 1) % self._r)
        before = dist.get_global_rank(self._ring, (self._ring_rank - 1) % self._r)
        found = block.new_empty(rows, *block.shape[1:])
        calls = [
            dist.P2POp(dist.isend, block.contiguous(), after, self._ring),
            dist.P2POp(dist.irecv, found, before, self._ring),
        ]
        return found, dist.batch_isend_irecv(calls)

    @staticmethod
    def _received(waiting: Optional[tuple[torch.Tensor, Any]], block: torch.Tensor) -> torch.Tensor:
        if waiting is None:
            return block
        for one in waiting[1]:
            one.wait()
        return waiting[0]
