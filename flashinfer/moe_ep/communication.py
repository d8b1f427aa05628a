# SPDX-License-Identifier: Apache-2.0
"""Exchange of tokens for the ranks of an expert-parallel layer: an object per group, with its own memory."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any, Callable, Optional, TypeVar, Union

import torch

from .._runtime.errors import ArgumentError
from ..comm.comm_backend import TorchDistBackend
from ..comm.mapping import Mapping
from ..comm.mnnvl import MnnvlConfig
from ..comm.trtllm_moe_alltoall import MoeAlltoAll, moe_a2a_get_workspace_size_per_rank
from ..fused_moe.formats import QuantFormat
from .config import BootstrapConfig

__all__ = [
    "CakeAlltoAll",
    "CakeAlltoAllConfig",
    "MoEEpCommParams",
    "MoEEpCommunication",
    "MoEEpDispatchResult",
    "NVLinkOneSidedAlltoAll",
    "NVLinkOneSidedConfig",
    "NVLinkTwoSidedAlltoAll",
    "NVLinkTwoSidedConfig",
    "available_communication_backends",
    "create_communication",
    "register_communication",
]

#: Bytes of a token of hidden size h in each format, its scales included.
_BYTES: dict[QuantFormat, Callable[[int], int]] = {
    QuantFormat.BF16: lambda h: 2 * h,
    QuantFormat.FP16: lambda h: 2 * h,
    QuantFormat.FP8PerTensor: lambda h: h,
    QuantFormat.DeepSeekFp8: lambda h: h + 4 * -(-h // 128),
    QuantFormat.MXFP8: lambda h: h + -(-h // 32),
    QuantFormat.NVFP4: lambda h: -(-h // 2) + -(-h // 16),
    QuantFormat.MXFP4: lambda h: -(-h // 2) + -(-h // 32),
}


@dataclass(frozen=True)
class MoEEpCommParams:
    """Sizes of what the ranks exchange; the same on all of them."""

    num_experts: int
    top_k: int
    max_tokens_per_rank: int
    hidden_size: int
    dtype: Optional[torch.dtype] = None
    dispatch_format: Optional[QuantFormat] = None
    invalid_expert_id: int = -1

    def __post_init__(self) -> None:
        op = "MoEEpCommParams"
        for name in ("num_experts", "top_k", "max_tokens_per_rank", "hidden_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
                raise ArgumentError(f"{op}: {name} must be a positive int, got {value!r}")
        if self.top_k > self.num_experts:
            raise ArgumentError(f"{op}: top_k must be at most num_experts = {self.num_experts}, got {self.top_k}")
        if 0 <= self.invalid_expert_id < self.num_experts:
            raise ArgumentError(
                f"{op}: invalid_expert_id must be outside of [0, {self.num_experts}), got {self.invalid_expert_id}"
            )
        if self.dispatch_format is not None and self.dispatch_format not in _BYTES:
            raise ArgumentError(
                f"{op}: dispatch_format must be None or one of {', '.join(one.name for one in _BYTES)}, got "
                f"{self.dispatch_format!r}"
            )

    @property
    def token_dtype(self) -> torch.dtype:
        """The dtype of tokens and results; bfloat16 by default."""
        return torch.bfloat16 if self.dtype is None else self.dtype

    @property
    def dispatch_bytes_per_token(self) -> int:
        """Bytes of a token on its way to the experts."""
        if self.dispatch_format is None:
            return self.hidden_size * self.token_dtype.itemsize
        return _BYTES[self.dispatch_format](self.hidden_size)


@dataclass(frozen=True)
class MoEEpDispatchResult:
    """Rows that a rank received, ``ep_size * tokens_per_rank`` rows; views that hold until the matching combine."""

    hidden_states: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: Optional[torch.Tensor]
    tokens_per_rank: int
    hidden_states_scale: Optional[torch.Tensor] = None
    eplb_gathered_stats: Optional[torch.Tensor] = None


@dataclass(frozen=True)
class NVLinkOneSidedConfig:
    """Settings of :class:`NVLinkOneSidedAlltoAll`."""

    backend_name: str = "nvlink_one_sided"
    extra_payload_bytes_per_token: int = 0
    eplb_stats_num_experts: int = 0
    enable_rank_mask: bool = False
    use_low_precision_combine: bool = False
    comm_backend: Any = None


@dataclass(frozen=True)
class CakeAlltoAllConfig:
    """Settings of :class:`CakeAlltoAll`, which needs a Blackwell GPU."""

    backend_name: str = "cake"
    extra_payload_bytes_per_token: int = 0
    eplb_stats_num_experts: int = 0
    enable_rank_mask: bool = False
    use_low_precision_combine: bool = False
    comm_backend: Any = None


@dataclass(frozen=True)
class NVLinkTwoSidedConfig:
    """Settings of :class:`NVLinkTwoSidedAlltoAll`."""

    backend_name: str = "nvlink_two_sided"
    comm_backend: Any = None


class MoEEpCommunication(abc.ABC):
    """Exchange between the ranks of a layer. A token arrives at most once at a rank, with its experts' global numbers;
    experts apply the weights and add their results, so that a combine adds over ranks only."""

    backend_name = ""
    supports_cuda_graph = True

    def __init__(self, bootstrap: BootstrapConfig, params: MoEEpCommParams) -> None:
        if not self.is_platform_supported():
            raise RuntimeError(f"{type(self).__name__} is not supported on this platform")
        if params.num_experts % bootstrap.world_size:
            raise ArgumentError(
                f"{type(self).__name__} requires num_experts (E) divisible by the EP size: E must be a multiple of "
                f"{bootstrap.world_size}, got {params.num_experts}"
            )
        self.bootstrap, self.params = bootstrap, params
        self.ep_rank, self.ep_size = bootstrap.rank, bootstrap.world_size
        self.num_local_experts = params.num_experts // bootstrap.world_size
        self._rows: Optional[int] = None  # rows of the dispatch whose combine is due

    @classmethod
    def is_platform_supported(cls) -> bool:
        """Return whether this process could take part; asks no other rank."""
        return True

    def is_workload_feasible(self, num_tokens: int) -> bool:
        """Return whether a rank may have this many tokens."""
        return num_tokens <= self.params.max_tokens_per_rank

    def get_combine_input_buffer(self, dtype: torch.dtype) -> Optional[torch.Tensor]:
        """Return where results are read from, if experts may write there; holds between dispatch and combine."""
        return None

    @abc.abstractmethod
    def dispatch(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: Optional[torch.Tensor] = None,
        *,
        hidden_states_scale: Optional[torch.Tensor] = None,
        max_tokens_per_rank: Optional[int] = None,
        eplb_local_stats: Optional[torch.Tensor] = None,
    ) -> MoEEpDispatchResult:
        """Send this rank's tokens to their experts; every rank calls it, also without tokens."""

    @abc.abstractmethod
    def combine(self, expert_output: torch.Tensor, *, output: Optional[torch.Tensor] = None) -> torch.Tensor:
        """Add the results of this rank's tokens; one row of ``expert_output`` per received row."""

    @abc.abstractmethod
    def destroy(self) -> None:
        """Give the memory back; every rank calls it, any number of times."""

    def _begin(self, max_tokens_per_rank: Optional[int]) -> int:
        name, most = type(self).__name__, self.params.max_tokens_per_rank
        if self._rows is not None:
            raise RuntimeError(f"{name}: dispatch called twice without an intervening combine")
        rows = most if max_tokens_per_rank is None else max_tokens_per_rank
        if not 0 < rows <= most:
            raise ArgumentError(f"{name}.dispatch: max_tokens_per_rank must be in (0, {most}], got {rows}")
        return rows

    def _results(self, expert_output: torch.Tensor) -> torch.Tensor:
        """Return results as ``[ep, tokens, hidden]``."""
        name = type(self).__name__
        if self._rows is None:
            raise RuntimeError(f"{name}: combine called before dispatch")
        if expert_output.dim() not in (2, 3):
            raise ArgumentError(f"{name}.combine: expert_output must be 2D or 3D, got {expert_output.dim()}D")
        rows = expert_output.reshape(-1, expert_output.shape[-1])
        if rows.shape[0] != self.ep_size * self._rows:
            raise ArgumentError(
                f"{name}.combine: expert_output must have {self.ep_size * self._rows} rows, got {rows.shape[0]}"
            )
        return rows.view(self.ep_size, self._rows, -1)


_BACKENDS: dict[str, type[MoEEpCommunication]] = {}

C = TypeVar("C", bound=type[MoEEpCommunication])


def register_communication(name: str) -> Callable[[C], C]:
    """Return a decorator that makes a class known to :func:`create_communication`."""

    def register(cls: C) -> C:
        cls.backend_name = name
        _BACKENDS[name] = cls
        return cls

    return register


def available_communication_backends() -> list[str]:
    """Return the names of backends that this process could use."""
    return sorted(name for name, cls in _BACKENDS.items() if cls.is_platform_supported())


class _UnknownBackend(KeyError):
    def __str__(self) -> str:
        return str(self.args[0])  # KeyError shows the representation of its argument


def create_communication(
    bootstrap: BootstrapConfig, params: MoEEpCommParams, backend: Any, **options: Any
) -> MoEEpCommunication:
    """Make the exchange of a group; every rank of it calls this function.

    Parameters
    ----------
    bootstrap : BootstrapConfig
        The group and this rank.
    params : MoEEpCommParams
        Sizes.
    backend : str or object
        ``"nvlink_one_sided"``, ``"nvlink_two_sided"``, or a configuration with such a ``backend_name``.

    Examples
    --------
    >>> params = MoEEpCommParams(num_experts=64, top_k=8, max_tokens_per_rank=128, hidden_size=7168)
    >>> exchange = create_communication(BootstrapConfig(world, rank), params, NVLinkOneSidedConfig())
    >>> got = exchange.dispatch(x, topk_ids, topk_weights)
    >>> out = exchange.combine(experts(got.hidden_states, got.topk_ids, got.topk_weights))
    """
    name = backend if isinstance(backend, str) else getattr(backend, "backend_name", None)
    if not isinstance(name, str):
        raise TypeError(
            f"create_communication: backend must be a name or an object with a str backend_name, got "
            f"{type(backend).__name__}"
        )
    if name not in _BACKENDS:
        raise _UnknownBackend(f"unknown communication backend {name!r}; available: {sorted(_BACKENDS)}")
    if not isinstance(backend, str):
        options["config"] = backend
    return _BACKENDS[name](bootstrap, params, **options)


def _communicator(bootstrap: BootstrapConfig, given: Any, op: str) -> Any:
    """Return the ranks of a group, which must be those of the bootstrap; all of them take part in a vote."""
    if given is not None:
        comm = given
    elif bootstrap.world_size == 1 and not torch.distributed.is_initialized():
        from ..comm.local_ranks import local_comms

        comm = local_comms(1)[0]
    else:
        comm = TorchDistBackend(bootstrap.process_group)
    if (comm.Get_size(), comm.Get_rank()) != (bootstrap.world_size, bootstrap.rank):
        raise ArgumentError(
            f"{op}: comm_backend must be rank {bootstrap.rank} of {bootstrap.world_size} as the bootstrap says, got "
            f"rank {comm.Get_rank()} of {comm.Get_size()}"
        )
    return comm


def _device_of(bootstrap: BootstrapConfig, device: Union[str, torch.device, None]) -> torch.device:
    """Return the device of the tables. (The default device of torch, which engines set to the CPU, says nothing.)"""
    if device is not None:
        return torch.device(device)
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device() if bootstrap.device is None else bootstrap.device)


def _vote(comm: Any, is_supported: bool) -> None:
    votes = list(comm.allgather(bool(is_supported)))
    if not all(votes):
        refused = [rank for rank, vote in enumerate(votes) if not vote]
        raise RuntimeError(f"NVLink backends are not supported on EP ranks {refused}")


class _Exchange(MoeAlltoAll):
    """The exchange below, of whose older name users see nothing."""

    _is_deprecated = False


@register_communication("nvlink_one_sided")
class NVLinkOneSidedAlltoAll(MoEEpCommunication):
    """Exchange by stores into the memory of the peers: :class:`flashinfer.comm.MoeAlltoAll`. CPU tensors work too."""

    def __init__(
        self,
        bootstrap: BootstrapConfig,
        params: MoEEpCommParams,
        *,
        config: Optional[NVLinkOneSidedConfig] = None,
        device: Union[str, torch.device, None] = None,
    ) -> None:
        super().__init__(bootstrap, params)
        self.config = config = config or NVLinkOneSidedConfig()
        self._is_low_precision = config.use_low_precision_combine
        extra = config.extra_payload_bytes_per_token
        if extra < 0:
            raise ArgumentError(
                f"NVLinkOneSidedConfig: extra_payload_bytes_per_token must not be negative, got {extra}"
            )
        comm = _communicator(bootstrap, config.comm_backend, type(self).__name__)
        _vote(comm, self.is_platform_supported())
        world = bootstrap.world_size
        mapping = Mapping(world, bootstrap.rank, world, tp_size=world, moe_ep_size=world)
        dispatch = params.dispatch_bytes_per_token + 8 * params.top_k + extra
        combine = params.hidden_size * max(params.token_dtype.itemsize, 2)
        size = moe_a2a_get_workspace_size_per_rank(
            world, params.max_tokens_per_rank, dispatch, combine, config.eplb_stats_num_experts
        )
        self._alltoall: Optional[MoeAlltoAll] = _Exchange(
            mapping,
            params.max_tokens_per_rank,
            params.top_k,
            params.num_experts,
            size,
            mnnvl_config=MnnvlConfig(comm),
            eplb_stats_num_experts=config.eplb_stats_num_experts,
            enable_rank_mask=config.enable_rank_mask,
            device=_device_of(bootstrap, device),
            dispatch_bytes_per_token=dispatch,
        )

    @property
    def alltoall(self) -> MoeAlltoAll:
        """The exchange below; RuntimeError once destroyed."""
        if self._alltoall is None:
            raise RuntimeError(f"{type(self).__name__} has been destroyed")
        return self._alltoall

    def dispatch(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: Optional[torch.Tensor] = None,
        *,
        hidden_states_scale: Optional[torch.Tensor] = None,
        max_tokens_per_rank: Optional[int] = None,
        eplb_local_stats: Optional[torch.Tensor] = None,
        active_rank_mask: Optional[torch.Tensor] = None,
    ) -> MoEEpDispatchResult:
        rows, alltoall = self._begin(max_tokens_per_rank), self.alltoall
        ids = topk_ids.to(torch.int32)
        has_scale, has_weights = hidden_states_scale is not None, topk_weights is not None
        payloads = [hidden_states, hidden_states_scale, ids, topk_weights]
        views = alltoall.dispatch(
            ids,
            [x for x in payloads if x is not None],
            rows,
            self.params.invalid_expert_id,
            1 + has_scale,
            eplb_local_stats,
            active_rank_mask,
        )
        self._rows = rows
        flat = [x.view(-1, x.shape[-1]) for x in views]
        return MoEEpDispatchResult(
            hidden_states=flat[0],
            topk_ids=flat[1 + has_scale],
            topk_weights=flat[-1] if has_weights else None,
            tokens_per_rank=rows,
            hidden_states_scale=flat[1] if has_scale else None,
            eplb_gathered_stats=alltoall.eplb_gathered_stats,
        )

    def get_combine_input_buffer(self, dtype: torch.dtype) -> Optional[torch.Tensor]:
        if self._rows is None:
            return None
        found = self.alltoall.get_combine_payload_tensor_in_workspace(self._rows, self.params.hidden_size, dtype)
        return found.view(-1, self.params.hidden_size)

    def combine(
        self,
        expert_output: torch.Tensor,
        *,
        output: Optional[torch.Tensor] = None,
        active_rank_mask: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        alltoall, results = self.alltoall, self._results(expert_output)
        rows, self._rows = self._rows, None
        assert rows is not None
        return alltoall.combine(
            results.contiguous(),
            rows,
            output=output,
            use_low_precision=self._is_low_precision,
            active_rank_mask=active_rank_mask,
        )

    def destroy(self) -> None:
        if self._alltoall is not None:
            self._alltoall.destroy()
        self._alltoall = None

    def checkpoint_prepare(self) -> None:
        self.alltoall.checkpoint_prepare()

    def checkpoint_restore(self, comm_backend: Any) -> None:
        self.alltoall.checkpoint_restore(comm_backend)


@register_communication("nvlink_two_sided")
class NVLinkTwoSidedAlltoAll(NVLinkOneSidedAlltoAll):
    """The same exchange by its older name; ``num_experts`` is a multiple of 4, weights become float32."""

    def __init__(
        self,
        bootstrap: BootstrapConfig,
        params: MoEEpCommParams,
        *,
        config: Optional[NVLinkTwoSidedConfig] = None,
        device: Union[str, torch.device, None] = None,
    ) -> None:
        if params.num_experts % 4:
            raise ArgumentError(
                f"NVLinkTwoSidedAlltoAll: num_experts must be a multiple of 4, got {params.num_experts}"
            )
        one_sided = NVLinkOneSidedConfig(
            eplb_stats_num_experts=params.num_experts, comm_backend=None if config is None else config.comm_backend
        )
        super().__init__(bootstrap, params, config=one_sided, device=device)
        self.config = config or NVLinkTwoSidedConfig()  # type: ignore[assignment]

    def dispatch(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: Optional[torch.Tensor] = None,
        **options: Any,
    ) -> MoEEpDispatchResult:
        weights = None if topk_weights is None else topk_weights.float()
        return super().dispatch(hidden_states, topk_ids, weights, **options)


@register_communication("cake")
class CakeAlltoAll(MoEEpCommunication):
    """Exchange that needs compute capability 10.0 or 10.3 (Blackwell): making one raises."""

    @classmethod
    def is_platform_supported(cls) -> bool:
        return False

    def __init__(self, bootstrap: BootstrapConfig, params: MoEEpCommParams, **_: Any) -> None:
        raise RuntimeError(
            "CakeAlltoAll is not supported on this platform: it needs compute capability 10.0 or 10.3 (Blackwell)"
        )

    def dispatch(self, *args: Any, **kwargs: Any) -> MoEEpDispatchResult:
        raise NotImplementedError

    def combine(self, expert_output: torch.Tensor, *, output: Optional[torch.Tensor] = None) -> torch.Tensor:
        raise NotImplementedError

    def destroy(self) -> None:
        """Return: there is nothing to give back."""
