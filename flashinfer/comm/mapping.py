# SPDX-License-Identifier: Apache-2.0
"""Assignment of model parts to ranks: tensor, context, pipeline and expert parallelism."""

from __future__ import annotations

from typing import Any, Optional

from .._runtime.errors import ArgumentError

__all__ = ["Mapping"]


class Mapping:
    """Sizes of the kinds of parallelism, and the index of one rank in each. Tensor ranks vary fastest, then context.

    Parameters
    ----------
    world_size, rank, gpus_per_node : int
        All ranks, this one, and how many share a node.
    cp_size, tp_size, pp_size : int
        Context, tensor and pipeline parallelism; their product is ``world_size``.
    cp_config : Optional[dict]
        Settings of context parallelism, kept as they are.
    moe_cluster_size, moe_tp_size, moe_ep_size : int
        How the tensor ranks divide experts; their product is ``tp_size``. -1: one cluster, and what is left over;
        experts are not divided where neither of the others is given.
    attn_tp_size, attn_cp_size : int
        How attention is divided; -1: all of ``tp_size * cp_size``, and 1.
    auto_parallel : bool
        Whether another program decides, so that all ranks of this mapping are 0.
    enable_attention_dp : bool
        Whether attention is divided by requests instead.
    """

    def __init__(
        self,
        world_size: int = 1,
        rank: int = 0,
        gpus_per_node: int = 8,
        *,
        cp_size: int = 1,
        cp_config: Optional[dict[str, Any]] = None,
        tp_size: int = 1,
        pp_size: int = 1,
        moe_cluster_size: int = -1,
        moe_tp_size: int = -1,
        moe_ep_size: int = -1,
        attn_tp_size: int = -1,
        attn_cp_size: int = -1,
        auto_parallel: bool = False,
        enable_attention_dp: bool = False,
    ) -> None:
        self.world_size, self.rank, self.gpus_per_node = world_size, rank, gpus_per_node
        self.cp_size, self.tp_size, self.pp_size = cp_size, tp_size, pp_size
        self.cp_config = cp_config or {}
        self.auto_parallel, self.enable_attention_dp = auto_parallel, enable_attention_dp
        self.moe_cluster_size = 1 if moe_cluster_size == -1 else moe_cluster_size
        per_cluster = tp_size // self.moe_cluster_size
        if moe_tp_size == -1:
            moe_ep_size = 1 if moe_ep_size == -1 else moe_ep_size
            moe_tp_size = per_cluster // moe_ep_size
        elif moe_ep_size == -1:
            moe_ep_size = per_cluster // moe_tp_size
        self.moe_tp_size, self.moe_ep_size = moe_tp_size, moe_ep_size
        self.attn_cp_size = 1 if attn_cp_size == -1 else attn_cp_size
        self.attn_tp_size = tp_size * cp_size // self.attn_cp_size if attn_tp_size == -1 else attn_tp_size
        self._check()

    def _check(self) -> None:
        if self.tp_size * self.pp_size * self.cp_size != self.world_size:
            raise ArgumentError(
                f"Mapping: world_size must be tp_size * pp_size * cp_size = {self.tp_size} * {self.pp_size} * "
                f"{self.cp_size}, got {self.world_size}"
            )
        if self.moe_tp_size * self.moe_ep_size * self.moe_cluster_size != self.tp_size:
            raise ArgumentError(
                f"Mapping: tp_size must be moe_tp_size * moe_ep_size * moe_cluster_size = {self.moe_tp_size} * "
                f"{self.moe_ep_size} * {self.moe_cluster_size}, got {self.tp_size}"
            )
        if self.attn_tp_size * self.attn_cp_size != self.tp_size * self.cp_size:
            raise ArgumentError(
                f"Mapping: attn_tp_size * attn_cp_size must be tp_size * cp_size = {self.tp_size * self.cp_size}, got "
                f"{self.attn_tp_size} * {self.attn_cp_size}"
            )
        if self.attn_cp_size != 1:
            raise ArgumentError(f"Mapping: attn_cp_size must be 1, got {self.attn_cp_size}")
        if self.moe_ep_size != 1 and self.cp_size > 1:
            raise NotImplementedError(
                f"Mapping: moe_ep_size must be 1 with cp_size = {self.cp_size}, got {self.moe_ep_size}"
            )

    # ------------------------------------------------------------------------------------------------ ranks

    @property
    def tp_rank(self) -> int:
        return 0 if self.auto_parallel else self.rank % self.tp_size

    @property
    def cp_rank(self) -> int:
        return 0 if self.auto_parallel else self.rank % (self.tp_size * self.cp_size) // self.tp_size

    @property
    def pp_rank(self) -> int:
        return 0 if self.auto_parallel else self.rank // (self.tp_size * self.cp_size)

    @property
    def moe_tp_rank(self) -> int:
        return self.tp_rank // (self.moe_ep_size * self.moe_cluster_size)

    @property
    def moe_cluster_rank(self) -> int:
        return self.tp_rank % self.moe_cluster_size

    @property
    def moe_ep_rank(self) -> int:
        return self.tp_rank % self.moe_ep_size

    @property
    def node_rank(self) -> int:
        return self.rank // self.gpus_per_node

    @property
    def local_rank(self) -> int:
        return self.rank % self.gpus_per_node

    def get_node_rank(self, rank: int) -> int:
        """Return the host of a rank."""
        return rank // self.gpus_per_node

    def get_local_rank(self, rank: int) -> int:
        """Return the index of a rank on its host."""
        return rank % self.gpus_per_node

    def is_multi_node(self) -> bool:
        return self.world_size > self.gpus_per_node

    # ------------------------------------------------------------------------------------------------ groups

    @property
    def _first_tp_rank(self) -> int:
        """Return the global rank of tensor rank 0 with the same context and pipeline ranks."""
        return self.rank // self.tp_size * self.tp_size

    @property
    def tp_group(self) -> list[int]:
        return [self._first_tp_rank + i for i in range(self.tp_size)]

    @property
    def cp_group(self) -> list[int]:
        stage = self.tp_size * self.cp_size
        first = self.rank // stage * stage + self.rank % self.tp_size
        return [first + i * self.tp_size for i in range(self.cp_size)]

    @property
    def pp_group(self) -> list[int]:
        stage = self.tp_size * self.cp_size
        return [self.rank % stage + i * stage for i in range(self.pp_size)]

    @property
    def moe_tp_group(self) -> list[int]:
        step = self.moe_cluster_size * self.moe_ep_size
        first = self._first_tp_rank + self.rank % self.tp_size % step
        return [first + i * step for i in range(self.moe_tp_size)]

    @property
    def moe_ep_group(self) -> list[int]:
        first = self._first_tp_rank + self.rank % self.tp_size // self.moe_ep_size * self.moe_ep_size
        return [first + i for i in range(self.moe_ep_size)]

    @property
    def moe_cluster_group(self) -> list[int]:
        first = self._first_tp_rank + self.rank % self.tp_size // self.moe_cluster_size * self.moe_cluster_size
        return [first + i for i in range(self.moe_cluster_size)]

    # ------------------------------------------------------------------------------------------------ questions

    def has_tp(self) -> bool:
        return self.tp_size > 1

    def has_cp(self) -> bool:
        return self.cp_size > 1

    def has_pp(self) -> bool:
        return self.pp_size > 1

    def has_moe_tp(self) -> bool:
        return self.moe_tp_size > 1

    def has_moe_ep(self) -> bool:
        return self.moe_ep_size > 1

    def has_moe_cluster(self) -> bool:
        return self.moe_cluster_size > 1

    def is_first_pp_rank(self) -> bool:
        return self.pp_rank == 0

    def is_last_pp_rank(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    def is_second_last_pp_rank(self) -> bool:
        return self.pp_rank == self.pp_size - 2

    def prev_pp_rank(self) -> int:
        return (self.rank - self.tp_size * self.cp_size) % self.world_size

    def next_pp_rank(self) -> int:
        return (self.rank + self.tp_size * self.cp_size) % self.world_size

    def pp_layers(self, num_layers: int) -> list[int]:
        """Return the layers of this stage; the first stages have one more if the layers do not divide evenly."""
        size, more = divmod(num_layers, self.pp_size)
        begin = self.pp_rank * size + min(self.pp_rank, more)
        return list(range(begin, begin + size + (self.pp_rank < more)))

    def ep_experts(self, num_experts: int) -> list[int]:
        """Return the experts of this rank."""
        if num_experts % self.moe_ep_size:
            raise ArgumentError(
                f"Mapping.ep_experts: num_experts must be a multiple of moe_ep_size = {self.moe_ep_size}, got "
                f"{num_experts}"
            )
        count = num_experts // self.moe_ep_size
        return list(range(self.moe_ep_rank * count, (self.moe_ep_rank + 1) * count))

    # ------------------------------------------------------------------------------------------------ as data

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments of the constructor."""
        return {
            name: getattr(self, name)
            for name in (
                "world_size", "rank", "gpus_per_node", "cp_size", "cp_config", "tp_size", "pp_size", "moe_cluster_size",
                "moe_tp_size", "moe_ep_size", "attn_tp_size", "attn_cp_size", "auto_parallel", "enable_attention_dp",
            )
        }  # fmt: skip

    @classmethod
    def from_dict(cls, mapping: dict[str, Any]) -> Mapping:
        """Return the mapping that :meth:`to_dict` described."""
        return cls(**mapping)

    def _identity(self) -> tuple[int, ...]:
        return (
            self.world_size, self.rank, self.gpus_per_node, self.cp_size, self.tp_size, self.pp_size,
            self.moe_cluster_size, self.moe_tp_size, self.moe_ep_size, self.attn_tp_size, self.attn_cp_size,
        )  # fmt: skip

    def __eq__(self, other: object) -> bool:
        return self._identity() == other._identity() if isinstance(other, Mapping) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._identity())
