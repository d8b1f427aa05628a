# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism of ``torchrun --nproc-per-node N examples/serve --tensor-parallel N``: a model over N processes.

Each rank has some heads and some columns of the MLP: rows of the projections that come first, columns of those that
come second, whose results are then sums over the ranks. The sum, the residual and the next norm are one call of
``flashinfer.comm.allreduce_fusion``. Embedding and output matrix are on every rank. All ranks get the same bits, so
they run the same scheduler and sample the same tokens; only what depends on the clock is decided by rank 0.
"""

from __future__ import annotations

import os
import zlib
from dataclasses import replace
from typing import Any, Mapping, Union

import torch

from flashinfer.comm import AllReduceFusionPattern, allreduce_fusion, create_allreduce_fusion_workspace
from flashinfer.comm.comm_backend import TorchDistBackend

MAX_ROWS = 2048  #: rows of one call; longer batches take several
CHECK_STEPS = 256  #: steps between two comparisons of what the ranks have generated


class TensorParallel:
    """The ranks of a model.

    Parameters
    ----------
    comm : CommBackend
        The ranks, and nobody else.
    """

    def __init__(self, comm: Any) -> None:
        self.comm, self.rank, self.size = comm, comm.Get_rank(), comm.Get_size()
        self.workspace: Any = None
        self._steps, self._digest = 0, 0

    @staticmethod
    def start(size: int) -> TensorParallel:
        """Join the processes that torchrun started; raise ``ValueError`` if there are not ``size`` of them."""
        found = int(os.environ.get("WORLD_SIZE", "1"))
        if found != size:
            command = f"torchrun --nproc-per-node {size} examples/serve --tensor-parallel {size}"
            raise ValueError(f"--tensor-parallel: {size} processes are needed, torchrun started {found}; run {command}")
        torch.distributed.init_process_group("gloo")
        return TensorParallel(TorchDistBackend())

    def split(self, config: Any, weights: Mapping[str, torch.Tensor]) -> tuple[Any, dict[str, torch.Tensor]]:
        """Return this rank's part of a ``LlamaConfig`` and of the weights."""
        if config.recurrent is not None:
            raise ValueError("--tensor-parallel: hybrid models are served by one process, got recurrent layers")
        if config.has_codes:
            raise ValueError(
                "--tensor-parallel: e4m3 checkpoints are served by one process; --fp8 quantises 16-bit ones"
            )
        inner = config.intermediate_size if config.experts is None else config.experts.intermediate_size
        for name, value in (("heads", config.num_qo_heads), ("kv heads", config.num_kv_heads), ("columns", inner)):
            if value % self.size:
                text = f"the model has {value} {name}, which {self.size} ranks cannot share"
                raise ValueError(f"--tensor-parallel: {text}")
        experts = config.experts
        if experts is not None:
            experts = replace(experts, intermediate_size=inner // self.size)
        own = replace(
            config,
            num_qo_heads=config.num_qo_heads // self.size,
            num_kv_heads=config.num_kv_heads // self.size,
            intermediate_size=config.intermediate_size // self.size,
            experts=experts,
        )
        return own, {name: self._part(name, weight) for name, weight in weights.items()}

    def _part(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a weight: rows of first projections, columns of second ones, others whole."""
        projection = name.split(".")[-2]
        if projection in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "w1", "w3"):
            return weight.chunk(self.size, 0)[self.rank]
        if projection in ("o_proj", "down_proj", "w2"):
            if weight.dim() == 1:  # a bias is added once
                return weight if self.rank == 0 else torch.zeros_like(weight)
            return weight.chunk(self.size, 1)[self.rank]
        return weight

    def attach(self, hidden_size: int, dtype: torch.dtype, device: Union[str, torch.device]) -> None:
        """Make the memory that the ranks share."""
        self.workspace = create_allreduce_fusion_workspace(
            "trtllm", self.size, self.rank, MAX_ROWS, hidden_size, dtype, comm_backend=self.comm, device=device
        )

    def sum_add_rmsnorm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        """Sum ``x`` over the ranks and add it to ``residual``; ``x`` becomes the norm of that. In place, like
        ``flashinfer.fused_add_rmsnorm``."""
        for begin in range(0, len(x), MAX_ROWS):
            rows, added = x[begin : begin + MAX_ROWS], residual[begin : begin + MAX_ROWS]
            allreduce_fusion(
                rows,
                self.workspace,
                AllReduceFusionPattern.kARResidualRMSNorm,
                residual_in=added,
                residual_out=added,
                norm_out=rows,
                rms_gamma=weight,
                rms_eps=eps,
            )

    def first(self, number: int) -> int:
        """Return the number of rank 0."""
        return self.comm.allgather(number)[0]

    def compare(self, tokens: list[int]) -> None:
        """Take note of the tokens of a step; raise ``RuntimeError`` if the ranks have generated different ones."""
        self._digest = zlib.crc32(repr(tokens).encode(), self._digest)
        self._steps += 1
        if self._steps % CHECK_STEPS == 0 and len(set(self.comm.allgather(self._digest))) > 1:
            raise RuntimeError(f"tensor parallel ranks have generated different tokens within {self._steps} steps")

    def close(self) -> None:
        """Give the shared memory back."""
        if self.workspace is not None:
            self.workspace.destroy()
