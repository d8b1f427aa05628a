# SPDX-License-Identifier: Apache-2.0
"""Tables of a batch of latent attention: offsets into page ids (CSR), or a table with a row for each request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import torch

from .._runtime.errors import ArgumentError
from ..attention.index_arrays import to_host

__all__ = ["MLAPlanMetadata", "csr_of_dense"]

_CSR = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
_DENSE = ("cum_seq_lens_q", "block_tables", "seq_lens")


@dataclass(frozen=True, eq=False)
class MLAPlanMetadata:
    """Tables that ``BatchMLAPagedAttentionWrapper.plan`` takes: made by :meth:`csr`, :meth:`dense` or :meth:`dual`.

    Attributes
    ----------
    qo_indptr, kv_indptr, kv_indices, kv_len_arr : Optional[torch.Tensor]
        The four arrays of the older form of ``plan``; None in a dense table.
    cum_seq_lens_q : Optional[torch.Tensor]
        ``(batch_size + 1,)``: rows of the queries of each request.
    block_tables : Optional[torch.Tensor]
        ``(batch_size, max_pages)``: page ids of each request; those after its keys are not read.
    seq_lens : Optional[torch.Tensor]
        ``(batch_size,)``: keys of each request.
    max_q_len : Optional[int]
        Most rows of a request.
    """

    qo_indptr: Optional[torch.Tensor] = None
    kv_indptr: Optional[torch.Tensor] = None
    kv_indices: Optional[torch.Tensor] = None
    kv_len_arr: Optional[torch.Tensor] = None
    cum_seq_lens_q: Optional[torch.Tensor] = None
    block_tables: Optional[torch.Tensor] = None
    seq_lens: Optional[torch.Tensor] = None
    max_q_len: Optional[int] = None

    def __post_init__(self) -> None:
        csr, dense = self._given(_CSR), self._given(_DENSE)
        for given, names in ((csr, _CSR), (dense, _DENSE)):
            if given and len(given) < len(names):
                missing = next(name for name in names if name not in given)
                raise ArgumentError(f"MLAPlanMetadata: {missing} must be a tensor (with {given[0]}), got None")
        if not csr and not dense:
            raise ArgumentError("MLAPlanMetadata: csr(), dense() or dual() must give the tables, got none")
        for name in (*csr, *dense):
            table, dims = getattr(self, name), 2 if name == "block_tables" else 1
            if not isinstance(table, torch.Tensor):
                raise TypeError(f"MLAPlanMetadata: {name} must be Tensor, got a {type(table).__name__}")
            if table.ndim != dims:
                raise ArgumentError(f"MLAPlanMetadata: {name} must have {dims} dimension(s), got {table.ndim}")
        if csr and dense:
            self._check_agreement()

    @classmethod
    def csr(
        cls, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, kv_indices: torch.Tensor, kv_len_arr: torch.Tensor
    ) -> MLAPlanMetadata:
        """Make tables from offsets into page ids."""
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr)

    @classmethod
    def dense(
        cls,
        cum_seq_lens_q: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        max_q_len: Optional[int] = None,
    ) -> MLAPlanMetadata:
        """Make tables from a row of page ids for each request."""
        return cls(cum_seq_lens_q=cum_seq_lens_q, block_tables=block_tables, seq_lens=seq_lens, max_q_len=max_q_len)

    @classmethod
    def dual(
        cls,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        *,
        cum_seq_lens_q: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        max_q_len: Optional[int] = None,
    ) -> MLAPlanMetadata:
        """Make tables in both forms, which must describe the same batch."""
        csr = (qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        return cls(*csr, cum_seq_lens_q, block_tables, seq_lens, max_q_len)

    @property
    def has_csr(self) -> bool:
        return self.qo_indptr is not None

    @property
    def has_dense(self) -> bool:
        return self.block_tables is not None

    def _given(self, names: tuple[str, ...]) -> list[str]:
        return [name for name in names if getattr(self, name) is not None]

    def _check_agreement(self) -> None:
        pairs = {"qo_indptr": "cum_seq_lens_q", "kv_len_arr": "seq_lens"}
        names = (*pairs, *pairs.values())
        host = dict(zip(names, to_host("MLAPlanMetadata", **{n: getattr(self, n) for n in names}), strict=True))
        for of_csr, of_dense in pairs.items():
            if host[of_csr].shape != host[of_dense].shape or (host[of_csr] != host[of_dense]).any():
                raise ArgumentError(
                    f"MLAPlanMetadata: {of_csr} and {of_dense} must agree, got {host[of_csr].tolist()} and "
                    f"{host[of_dense].tolist()}"
                )


def csr_of_dense(
    op: str,
    cum_seq_lens_q: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_q_len: Optional[int],
    page_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ``qo_indptr, kv_indptr, kv_indices, kv_len_arr``; page ids on their device, the rest on the host."""
    if page_size < 1:
        raise ArgumentError(f"{op}: page_size must be at least 1, got {page_size}")
    rows, lens = (torch.from_numpy(x) for x in to_host(op, cum_seq_lens_q=cum_seq_lens_q, seq_lens=seq_lens))
    batch_size, width = block_tables.shape
    for name, got, size in (("cum_seq_lens_q", rows, batch_size + 1), ("seq_lens", lens, batch_size)):
        if got.shape != (size,):
            raise ArgumentError(
                f"{op}: {name} must have shape ({size},) (block_tables has {batch_size} rows), got {tuple(got.shape)}"
            )
    counts = (lens.long() + page_size - 1) // page_size
    if batch_size and (int(counts.min()) < 0 or int(counts.max()) > width):
        raise ArgumentError(
            f"{op}: seq_lens must be 0 to {width * page_size} (block_tables has {width} columns), got "
            f"{int(lens.min())} to {int(lens.max())}"
        )
    most = int(rows.diff().max()) if batch_size else 0
    if max_q_len is not None and max_q_len < most:
        raise ArgumentError(f"{op}: max_q_len must be at least {most} (cum_seq_lens_q), got {max_q_len}")
    begins = torch.zeros(batch_size + 1, dtype=torch.int64)
    torch.cumsum(counts, 0, out=begins[1:])
    of_request = torch.repeat_interleave(torch.arange(batch_size), counts)
    columns = torch.arange(int(begins[-1])) - begins[of_request]
    taken = (of_request * width + columns).to(block_tables.device)
    return rows, begins.int(), block_tables.reshape(-1)[taken], lens
