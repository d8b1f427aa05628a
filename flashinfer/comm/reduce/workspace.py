# SPDX-License-Identifier: Apache-2.0
"""Workspaces of the fused all-reduce: who makes which, how large they are, and one exchange of one rank."""

from __future__ import annotations

import ctypes
import logging
import time
import zlib
from typing import Any, Optional, Union

import torch

from ..._runtime.arch import get_device_sm_count
from ..._runtime.errors import ArgumentError
from ..._runtime.globaltimer import is_confidential_compute
from ..._runtime.knobs import knobs
from ...jit.codegen import module_cache
from ...jit.comm import gen_allreduce_module as gen_allreduce_module
from ..comm_backend import backend_for, seconds_of
from ..errors import CommTimeoutError
from ..memory.peers import PeerMemory, create_peer_memory
from ..workspace_base import AllReduceFusionWorkspace
from .names import forget, name_of

__all__ = [
    "AllReduceFusionWorkspace",
    "CommTimeoutError",
    "MNNVLAllReduceFusionWorkspace",
    "TRTLLMAllReduceFusionWorkspace",
    "create_allreduce_fusion_workspace",
]

get_allreduce_module = module_cache(gen_allreduce_module)
logger = logging.getLogger("flashinfer")

#: Most bytes that one generation of slots takes, as in the published workspaces.
MAX_COMM_SIZE = (2**31 - 1) & ~(2**21 - 1)
_MNNVL_ONE_SHOT_BYTES = 64 * 1024 * 8 * 2  # most bytes that published workspaces of multicast push once
_HEAD_BYTES = 512  # HEAD_BYTES of include/flashinfer/comm/allreduce/params.h
_GENERATIONS = {"cuda": 3, "cpu": 2}
_SENTINEL = -(2**31)  # bits of -0.0 in fp32, which no pushed word has
_WAIT_US = 50_000  # a call on the CPU returns to Python after this time, so that signals are handled


def _check(
    op: str, comm: Any, tp_size: int, tp_rank: int, max_token_num: int, hidden_dim: int, dtype: torch.dtype
) -> None:
    if not 1 <= tp_size <= 16:
        raise ArgumentError(f"{op}: world_size must be from 1 to 16, got {tp_size}")
    for name, value in (("max_token_num", max_token_num), ("hidden_dim", hidden_dim)):
        if value < 1:
            raise ArgumentError(f"{op}: {name} must be positive, got {value}")
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ArgumentError(f"{op}: dtype must be float16, bfloat16 or float32, got {dtype}")
    if (comm.Get_size(), comm.Get_rank()) != (tp_size, tp_rank):
        raise ArgumentError(
            f"{op}: world_size and rank must be those of comm_backend ({comm.Get_size()} and {comm.Get_rank()}), "
            f"got {tp_size} and {tp_rank}"
        )


class TRTLLMAllReduceFusionWorkspace(AllReduceFusionWorkspace):
    """Memory of the all-reduce over ordinary (unicast) peer memory: one-shot pushes into slots of every rank.

    Parameters
    ----------
    tp_size, tp_rank : int
        Size of the group, 1 to 16, and the rank in it.
    max_token_num, hidden_dim : int
        A call may have ``max_token_num * hidden_dim`` elements in any shape.
    dtype : torch.dtype
        float16 and bfloat16 share workspaces; float32 has its own.
    comm_backend, group
        The ranks that take part, and nobody else: a :class:`~.abstractions.CommBackend`, or a process group of torch.
    device
        Default: the current CUDA device, or the CPU where there is none.
    """

    def __init__(
        self,
        tp_size: int,
        tp_rank: int,
        max_token_num: int,
        hidden_dim: int,
        dtype: torch.dtype = torch.float16,
        comm_backend: Optional[Any] = None,
        group: Optional[Any] = None,
        *,
        device: Union[str, torch.device, None] = None,
    ) -> None:
        self._destroyed = True  # until there is something to destroy
        op = "create_allreduce_fusion_workspace"
        super().__init__(tp_size, tp_rank)
        comm = backend_for(comm_backend, group)
        self.device = _device(device)
        kind = self.device.type

        def prepare() -> None:
            _check(op, comm, tp_size, tp_rank, max_token_num, hidden_dim, dtype)
            self._run = get_allreduce_module(kind).allreduce_fusion

        self._elements, self._is_fp32 = max_token_num * hidden_dim, dtype == torch.float32
        slot = -(-self._elements * dtype.itemsize // 16) * 16
        slots = max(tp_size, 1) if kind == "cuda" else 1
        self._slot_bytes = min(slot, MAX_COMM_SIZE // slots // 16 * 16)
        self._elements = min(self._elements, self._slot_bytes // dtype.itemsize)
        nbytes = _HEAD_BYTES + _GENERATIONS[kind] * slots * self._slot_bytes
        self._memory: PeerMemory = create_peer_memory(
            comm,
            nbytes,
            self.device,
            op=op,
            initialise=self._initialise,
            agreed={"max_token_num": max_token_num, "hidden_dim": hidden_dim, "dtype": str(dtype)},
            prepare=prepare,
        )
        self._destroyed = False
        self.name = name_of(self, f"{max_token_num} x {hidden_dim} {dtype}")  # in compiled programs
        self._ptrs = torch.tensor(self._memory.ptrs, dtype=torch.int64)
        self._seconds = seconds_of(comm)
        self._broken = ""
        self._record = torch.zeros(4, dtype=torch.int32, pin_memory=True) if kind == "cuda" else None
        self._found = ctypes.c_int32.from_address(self._record.data_ptr()) if self._record is not None else None
        self._max_blocks = 0
        if kind == "cuda":
            # Streams of one device must all be resident, or the first rank would wait for one that cannot start.
            shared_by = tp_size if self._memory.provider == "local" else 1
            self._max_blocks = max(get_device_sm_count(self.device) // shared_by, 1)
        self._checks = kind == "cuda" and knobs.comm_check
        self._check_record = torch.zeros(4, dtype=torch.int32, pin_memory=True) if self._checks else None
        self.metadata = {
            "tp_rank": tp_rank,
            "tp_size": tp_size,
            "max_token_num": max_token_num,
            "hidden_dim": hidden_dim,
            "use_fp32_lamport": self._is_fp32,
            "buffer_size": tp_size * self._elements * dtype.itemsize,
            "flag_size": _HEAD_BYTES,
            "lamport_comm_size": slots * self._slot_bytes,
            "lamport_buffer_size": nbytes - _HEAD_BYTES,
        }

    @property
    def backend(self) -> str:
        return "trtllm"

    @staticmethod
    def _initialise(own: torch.Tensor) -> None:
        own[:_HEAD_BYTES].zero_()
        if own.is_cuda:
            own[_HEAD_BYTES:].view(torch.int32).fill_(_SENTINEL)

    def is_buffer_size_sufficient(
        self,
        tp_size: int,
        num_tokens: int,
        hidden_dim: int,
        dtype: torch.dtype,
        use_oneshot: Optional[bool] = None,
    ) -> bool:
        """Return whether a call of ``(num_tokens, hidden_dim)`` elements fits; a refusal is logged."""
        if (
            num_tokens * hidden_dim <= self._elements
            and tp_size == self.world_size
            and (dtype is torch.float32) is self._is_fp32
        ):
            return True
        logger.warning(
            "allreduce_fusion: a workspace of %s elements for %s ranks (float32: %s) does not serve %s x %s elements "
            "of %s for %s ranks",
            *(self._elements, self.world_size, self._is_fp32, num_tokens, hidden_dim, dtype, tp_size),
        )
        return False

    def check(self) -> None:
        """Raise :class:`CommTimeoutError` if a call waited for a rank in vain; RuntimeError once destroyed."""
        if self._found is not None and self._found.value and not self._broken:
            _, late, call, row = self._record.tolist()  # type: ignore[union-attr]
            self._broken = (
                f"allreduce_fusion: rank {late} must push its rows within {self._seconds:g} s, rank {self.rank} got no "
                f"data of row {row} in call {call & 0xFFFFFFFF}"
            )
        if self._broken:
            raise CommTimeoutError(self._broken + "; destroy the workspace")
        if self._destroyed:
            raise RuntimeError("allreduce_fusion: workspace is not attached; it was destroyed")
        self._memory.check("allreduce_fusion")

    def exchange(self, x: torch.Tensor, pattern: int, **given: Any) -> None:
        """Run one call of this rank; see ``csrc/allreduce.cu`` for the arguments. CPU: returns when it is done."""
        self.check()
        if self._checks and not torch.cuda.is_current_stream_capturing():
            self._compare(x, pattern)
        names = ("output", "residual_in", "residual_out", "rms_gamma", "norm_out", "quant_out", "scale", "scale_out")
        tensors = [given.get(name) for name in names]
        tensors += [given.get("packed_out"), given.get("group", 0)]
        tensors += [given.get("fp4_out"), given.get("fp4_scales"), given.get("fp4_layout", 0)]
        tensors += [given.get("index"), given.get("weights")]
        tensors += [given.get("add"), given.get("factor", 1.0), given.get("is_two_shot", False)]
        numbers = (given.get("scale_value", 1.0), given.get("rms_eps", 1e-6), given.get("weight_bias", 0.0))
        pdl = (given.get("launch_with_pdl", False), given.get("trigger_early", False))
        record = 0 if self._record is None else self._record.data_ptr()
        start, resume = time.monotonic(), False
        while True:
            outcome = self._run(
                *(x, self._ptrs, self.rank, self._slot_bytes, pattern, *tensors, *numbers, resume, _WAIT_US),
                *(self._max_blocks, int(self._seconds * 1e9), record, *pdl),
            )
            if outcome == -1:
                return
            self._judge(outcome, time.monotonic() - start)
            resume = True

    def _compare(self, x: torch.Tensor, pattern: int) -> None:
        """Raise on all ranks, before anything is written, if one of them asks for something else (CUDA)."""
        record = self._check_record
        assert record is not None
        digest = zlib.crc32(repr((tuple(x.shape), str(x.dtype), pattern)).encode())
        get_allreduce_module("cuda").allreduce_check(
            self._ptrs, self.rank, digest, int(self._seconds * 1e9), record.data_ptr(), x
        )
        torch.cuda.current_stream(self.device).synchronize()
        found, rank, check, _ = record.tolist()
        record.zero_()
        if found == 2:
            raise ArgumentError(
                "allreduce_fusion: shape, dtype and pattern must be equal on all ranks (FLASHINFER_COMM_CHECK), rank "
                f"{self.rank} got {tuple(x.shape)} {x.dtype}, pattern {pattern}, rank {rank} others, in check {check}"
            )
        if found == 1:
            self._broken = (
                f"allreduce_fusion: rank {rank} must enter check {check} (FLASHINFER_COMM_CHECK) within "
                f"{self._seconds:g} s, rank {self.rank} got nothing of it"
            )
            self.check()

    def _judge(self, outcome: int, waited: float) -> None:
        """Raise for an unfinished call on the CPU, unless there is time left to wait."""
        call = ctypes.c_uint32.from_address(self._memory.ptrs[self.rank]).value
        if outcome == -2:
            raise ArgumentError(
                f"allreduce_fusion: shape, dtype and pattern must be equal on all ranks in call {call}, got other ones"
            )
        if outcome >= 16:
            by, late = divmod(outcome - 16, 16)
            self._broken = f"allreduce_fusion: rank {late} must enter call {call}, rank {by} gave up waiting for it"
        elif self._seconds and waited > self._seconds:
            ctypes.c_uint32.from_address(self._memory.ptrs[self.rank] + 64).value = 1 + outcome
            self._broken = (
                f"allreduce_fusion: rank {outcome} must enter call {call} within {self._seconds:g} s, "
                f"rank {self.rank} got no input of it"
            )
        if self._broken:
            raise CommTimeoutError(self._broken + "; destroy the workspace")

    def checkpoint_prepare(self) -> None:
        """Raise NotImplementedError: memory is not given back and taken again at the same addresses yet."""
        raise NotImplementedError(
            "checkpoint_prepare: workspaces keep their memory, as those of torch symmetric memory do; destroy this one "
            "and create another"
        )

    def checkpoint_restore(self, comm_backend: Any) -> None:
        """Raise NotImplementedError, as :meth:`checkpoint_prepare` does."""
        self.checkpoint_prepare()

    def destroy(self) -> None:
        if not self._destroyed:
            self._destroyed = True
            forget(self.name)
            self._memory.close()


class MNNVLAllReduceFusionWorkspace(AllReduceFusionWorkspace):
    """Memory of the all-reduce over multicast. This package does not set up multicast yet: creation raises.

    vLLM tries this class first and takes ``"trtllm"`` when it raises; ``backend="auto"`` never chooses it.
    """

    def __init__(self, mapping: Any, *_: Any, **__: Any) -> None:
        self._destroyed = True
        super().__init__(mapping.tp_size, mapping.tp_rank)
        raise RuntimeError(_no_multicast())

    @property
    def backend(self) -> str:
        return "mnnvl"

    @staticmethod
    def get_required_buffer_size_bytes(
        tp_size: int, num_tokens: int, hidden_dim: int, dtype: torch.dtype, strategy: Any = None
    ) -> int:
        """Return the bytes of a buffer for calls of this size; ``strategy``: of :mod:`~.trtllm_mnnvl_ar`."""
        row = hidden_dim * dtype.itemsize
        once = num_tokens * tp_size * row
        value = getattr(strategy, "value", strategy)
        if value not in (0, 1):
            value = int(once > _MNNVL_ONE_SHOT_BYTES)
        return once if value == 0 else 2 * -(-num_tokens // tp_size) * tp_size * row

    def checkpoint_prepare(self) -> None:
        """Raise NotImplementedError: there is no memory to give back."""
        raise NotImplementedError("checkpoint_prepare: there is no memory to give back, nor torch symmetric memory")

    def checkpoint_restore(self, comm_backend: Any) -> None:
        """Raise NotImplementedError, as :meth:`checkpoint_prepare` does."""
        self.checkpoint_prepare()

    def destroy(self) -> None:
        self._destroyed = True

    def is_buffer_size_sufficient(self, *_: Any, **__: Any) -> bool:
        return False


def _no_multicast() -> str:
    return (
        "create_allreduce_fusion_workspace: backend 'mnnvl' needs multicast memory, which this package does not set up "
        "yet; use backend='trtllm'"
    )


def _device(device: Union[str, torch.device, None]) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    found = torch.device(device)
    if found.type == "cuda" and found.index is None:
        found = torch.device("cuda", torch.cuda.current_device())
    return found


def create_allreduce_fusion_workspace(
    backend: str = "auto",
    world_size: Optional[int] = None,
    rank: Optional[int] = None,
    max_token_num: Optional[int] = None,
    hidden_dim: Optional[int] = None,
    dtype: Optional[torch.dtype] = None,
    gpus_per_node: Optional[int] = None,
    comm_backend: Optional[Any] = None,
    force_oneshot_support: bool = False,
    group: Optional[Any] = None,
    *,
    top_k: Optional[int] = None,
    rms_eps: Optional[float] = None,
    weight_bias: Optional[float] = None,
    routed_scaling_factor: Optional[float] = None,
    include_shared_expert: Optional[bool] = None,
    add_residual: Optional[bool] = None,
    write_residual_output: Optional[bool] = None,
    apply_rms_norm: Optional[bool] = None,
    output_dtype: Optional[torch.dtype] = None,
    dynamic_fp8: Optional[bool] = None,
    write_norm_output: Optional[bool] = None,
    config: Optional[Any] = None,
    use_fp32_lamport: bool = False,
    device: Union[str, torch.device, None] = None,
) -> AllReduceFusionWorkspace:
    """Allocate the memory that the ranks of a group share for :func:`allreduce_fusion`; every rank calls it.

    All ranks succeed, or all raise the same error and nothing stays allocated.

    Parameters
    ----------
    backend : str
        ``"auto"`` and ``"trtllm"``: unicast memory. ``"mnnvl"`` raises RuntimeError, because this package sets up no
        multicast memory yet.
    world_size, rank : int
        Size of the group, at most 16, and the rank of the caller in it.
    max_token_num, hidden_dim : int
        Calls may have up to ``max_token_num * hidden_dim`` elements.
    dtype : torch.dtype
        float16 or bfloat16 (one workspace serves both), or float32.
    gpus_per_node, force_oneshot_support
        Accepted; the memory always has room for one-shot exchanges.
    comm_backend, group
        The ranks of the workspace, and nobody else: an object with ``Get_rank``, ``Get_size``, ``allgather`` and
        ``barrier``, or a process group of torch. Default: the default group, else MPI.
    top_k, rms_eps, weight_bias, routed_scaling_factor, include_shared_expert, add_residual
        Of ``backend="mnnvl-cutedsl"``, which needs a Blackwell GPU: must be None.
    write_residual_output, apply_rms_norm, output_dtype, dynamic_fp8, write_norm_output, config
        Of ``backend="mnnvl-cutedsl"``, which needs a Blackwell GPU: must be None.
    use_fp32_lamport : bool
        The same as ``dtype=torch.float32``.
    device
        Default: the current CUDA device, or the CPU where there is none.

    Returns
    -------
    AllReduceFusionWorkspace
        Its ``destroy()`` gives the memory back.

    Examples
    --------
    Two ranks that are threads of this process:

    >>> from flashinfer.comm.local_ranks import call_on_ranks
    >>> def work(comm):
    ...     group = {"world_size": comm.Get_size(), "rank": comm.Get_rank(), "comm_backend": comm, "device": "cpu"}
    ...     sizes = {"max_token_num": 4, "hidden_dim": 64, "dtype": torch.float32}
    ...     workspace = flashinfer.comm.create_allreduce_fusion_workspace(**group, **sizes)
    ...     total = flashinfer.comm.allreduce_fusion(torch.full((1, 64), 1.0 + comm.Get_rank()), workspace, 0)
    ...     workspace.destroy()
    ...     return total[0, 0].item()
    >>> call_on_ranks(2, work)
    [3.0, 3.0]
    """
    op = "create_allreduce_fusion_workspace"
    given = {
        "top_k": top_k,
        "rms_eps": rms_eps,
        "weight_bias": weight_bias,
        "config": config,
        "routed_scaling_factor": routed_scaling_factor,
        "include_shared_expert": include_shared_expert,
        "add_residual": add_residual,
        "write_residual_output": write_residual_output,
        "apply_rms_norm": apply_rms_norm,
        "output_dtype": output_dtype,
        "dynamic_fp8": dynamic_fp8,
        "write_norm_output": write_norm_output,
    }
    if backend == "mnnvl-cutedsl":
        raise RuntimeError(f"{op}: backend='mnnvl-cutedsl' needs compute capability 10.0 or 10.3 (Blackwell)")
    if backend not in ("auto", "trtllm", "mnnvl"):
        raise RuntimeError(f"Unknown backend: {op}: backend must be auto, trtllm or mnnvl, got {backend!r}")
    foreign = [name for name, value in given.items() if value is not None]
    if foreign:
        raise ArgumentError(
            f"{op}: Only backend='mnnvl-cutedsl' accepts: {', '.join(foreign)}, got backend={backend!r}"
        )
    needed = {"world_size": world_size, "rank": rank, "max_token_num": max_token_num, "hidden_dim": hidden_dim}
    for name, value in needed.items():
        if value is None:
            raise ArgumentError(f"{op}: {name} must be given, got None")
    if backend == "mnnvl":
        if is_confidential_compute():
            raise ArgumentError(
                f"{op}: backend 'mnnvl' needs multicast, which confidential computing forbids, got mnnvl"
            )
        raise RuntimeError(_no_multicast())
    if backend == "auto" and not 1 <= world_size <= 16:  # type: ignore[operator]
        raise ArgumentError(f"{op}: No suitable backend: world_size must be from 1 to 16, got {world_size}")
    dtype = torch.float32 if use_fp32_lamport else dtype if dtype is not None else torch.float16
    return TRTLLMAllReduceFusionWorkspace(
        *(world_size, rank, max_token_num, hidden_dim, dtype, comm_backend, group),  # type: ignore[arg-type]
        device=device,
    )
