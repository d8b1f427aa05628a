# SPDX-License-Identifier: Apache-2.0
"""Mamba-2 over whole sequences (SSD): prefill, of batches and of packed sequences."""

from __future__ import annotations

import math
from typing import Any, Optional

import torch

from .._runtime.allocation import new_empty
from .._runtime.dispatch import NativeFunction
from .._runtime.errors import ArgumentError
from .._runtime.explain_error import explain_type_errors
from .._runtime.torch_ops import called, register_custom_op
from ..api_logging import flashinfer_api
from ..jit.codegen import module_cache
from ..jit.recurrent.mamba import gen_ssd_module
from ..trace.templates.recurrent_mamba_chunk import ssd_combined_fwd_trace, ssd_combined_layer_trace

__all__ = ["SSDCombined", "ssd_combined_fwd"]

_OP = "ssd_combined_fwd"
_get_module = module_cache(gen_ssd_module)
_native = NativeFunction(_get_module, "ssd_combined_fwd")
_native_cumsum = NativeFunction(_get_module, "seq_chunk_cumsum")
_BACKENDS = ("cute", "auto", "flashinfer", "cake")


class _CumsumModule:
    """The published module of ``seq_chunk_cumsum``, for any device."""

    @staticmethod
    def seq_chunk_cumsum(
        seq_idx: torch.Tensor,
        chunk_indices: torch.Tensor,
        chunk_offsets: torch.Tensor,
        output: torch.Tensor,
        tile_state: Optional[torch.Tensor],
        chunk_size: int,
        num_logical_chunks: int,
        num_seqs: int,
    ) -> None:
        """Count logical chunks by sequence into ``output``, ``(num_seqs + 1,)`` int32, as exclusive prefix sums."""
        _native_cumsum[seq_idx.is_cuda](
            seq_idx, chunk_indices, chunk_offsets, output, tile_state, chunk_size, num_logical_chunks, num_seqs
        )


def _get_seq_chunk_cumsum_module() -> type[_CumsumModule]:
    return _CumsumModule


@register_custom_op("flashinfer::ssd_combined_fwd", mutates_args=("out", "final_states", "bounds", "checkpoint_states"))
@called(_OP)
def _ssd(
    out: torch.Tensor,
    final_states: Optional[torch.Tensor],
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: Optional[torch.Tensor],
    z: Optional[torch.Tensor],
    dt_bias: Optional[torch.Tensor],
    initial_states: Optional[torch.Tensor],
    seq_idx: Optional[torch.Tensor],
    bounds: Optional[torch.Tensor],
    checkpoint_token_indices: Optional[torch.Tensor],
    checkpoint_state_slots: Optional[torch.Tensor],
    checkpoint_states: Optional[torch.Tensor],
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
    sequences: int,
) -> None:
    _native[x.is_cuda](
        out,
        final_states,
        x,
        dt,
        A,
        B,
        C,
        D,
        z,
        dt_bias,
        initial_states,
        seq_idx,
        bounds,
        checkpoint_token_indices,
        checkpoint_state_slots,
        checkpoint_states,
        dt_softplus,
        dt_min,
        dt_max,
        sequences,
    )


def _sequences_of(
    x: torch.Tensor,
    seq_idx: Optional[torch.Tensor],
    initial_states: Optional[torch.Tensor],
    seq_chunk_cumsum: Optional[torch.Tensor],
    num_seqs: Optional[int],
) -> int:
    if seq_idx is None:
        return x.shape[0]
    if initial_states is not None:
        return initial_states.shape[0]
    if num_seqs is not None:
        return num_seqs
    if seq_chunk_cumsum is not None:
        return seq_chunk_cumsum.shape[0] - 1
    raise ArgumentError(
        f"{_OP}: num_seqs must be given for packed sequences without initial_states and seq_chunk_cumsum, got None"
    )


def _run(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: Optional[torch.Tensor],
    z: Optional[torch.Tensor],
    dt_bias: Optional[torch.Tensor],
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    initial_states: Optional[torch.Tensor],
    seq_idx: Optional[torch.Tensor],
    checkpoints: tuple[Optional[torch.Tensor], Optional[torch.Tensor], Optional[torch.Tensor]],
    out: torch.Tensor,
    return_final_states: bool,
    sequences: int,
    state_dtype: torch.dtype,
) -> Optional[torch.Tensor]:
    given = [tensor is not None for tensor in checkpoints]
    if any(given) and not all(given):
        raise ArgumentError(
            f"{_OP}: checkpoint_token_indices, checkpoint_state_slots and checkpoint_states must be given together, "
            f"got {sum(given)} of 3"
        )
    if B.ndim != 4:
        raise ArgumentError(f"{_OP}: B must have 4 dimensions, got {B.ndim}")
    low, high = float(dt_limit[0]), float(dt_limit[1])
    if math.isnan(low) or math.isnan(high) or low > high:
        raise ArgumentError(f"{_OP}: dt_limit must be a pair of numbers that do not fall, got {tuple(dt_limit)}")
    final = None
    if return_final_states:
        final = new_empty(x, state_dtype, sequences, x.shape[2], x.shape[3], B.shape[3])
    bounds = None if seq_idx is None else new_empty(x, torch.int32, sequences, 2)
    _ssd(
        out,
        final,
        x,
        dt,
        A,
        B,
        C,
        D,
        z,
        dt_bias,
        initial_states,
        seq_idx,
        bounds,
        checkpoints[0],
        checkpoints[1],
        checkpoints[2],
        dt_softplus,
        low,
        high,
        sequences,
    )
    return final


@flashinfer_api(trace=ssd_combined_fwd_trace)
@explain_type_errors
def ssd_combined_fwd(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: Optional[torch.Tensor] = None,
    z: Optional[torch.Tensor] = None,
    dt_bias: Optional[torch.Tensor] = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    initial_states: Optional[torch.Tensor] = None,
    seq_idx: Optional[torch.Tensor] = None,
    chunk_indices: Optional[torch.Tensor] = None,
    chunk_offsets: Optional[torch.Tensor] = None,
    seq_chunk_cumsum: Optional[torch.Tensor] = None,
    update_seq_chunk_cumsum: bool = False,
    checkpoint_token_indices: Optional[torch.Tensor] = None,
    checkpoint_state_slots: Optional[torch.Tensor] = None,
    checkpoint_states: Optional[torch.Tensor] = None,
    out: Optional[torch.Tensor] = None,
    return_final_states: bool = True,
    num_seqs: Optional[int] = None,
) -> tuple[torch.Tensor, Optional[torch.Tensor]]:
    r"""Run Mamba-2 over whole sequences: the recurrence of :func:`selective_state_update` from token to token.

    ``dt' = clamp(softplus(dt + dt_bias), *dt_limit)``; the state begins again where ``seq_idx`` changes.

    Parameters
    ----------
    x : torch.Tensor
        ``(batch, seqlen, heads, headdim)`` bfloat16 or float16, any ``seqlen``; packed sequences have batch 1.
    dt : torch.Tensor
        ``(batch, seqlen, heads)``, bfloat16, float16 or float32.
    A : torch.Tensor
        ``(heads,)`` float32.
    B, C : torch.Tensor
        ``(batch, seqlen, groups, dstate)``, dtype of ``x``; on CUDA ``dstate`` is a multiple of 8 up to 256.
    D : Optional[torch.Tensor]
        ``(heads,)`` or ``(heads, headdim)``.
    z : Optional[torch.Tensor]
        Gate, shape and dtype of ``x``.
    dt_bias : Optional[torch.Tensor]
        ``(heads,)``.
    dt_softplus : bool
        Apply softplus to ``dt + dt_bias``.
    dt_limit : tuple of float
        Least and largest ``dt'``.
    initial_states : Optional[torch.Tensor]
        ``(sequences, heads, headdim, dstate)``; None: zeros. Its dtype, else that of ``checkpoint_states``, else
        bfloat16, is the dtype of all states.
    seq_idx : Optional[torch.Tensor]
        ``(1, seqlen)`` int32 or int64: the sequence of each token, for packed sequences, each in one piece.
    chunk_indices, chunk_offsets : Optional[torch.Tensor]
        Logical chunks, int32: not needed, because chunks follow the sequences.
    seq_chunk_cumsum : Optional[torch.Tensor]
        ``(sequences + 1,)`` int32: tells the number of sequences; written if ``update_seq_chunk_cumsum``.
    update_seq_chunk_cumsum : bool
        Write the logical chunks of each sequence, as prefix sums, to ``seq_chunk_cumsum``.
    checkpoint_token_indices, checkpoint_state_slots, checkpoint_states : Optional[torch.Tensor]
        ``(sequences,)`` each, and ``(slots, heads, headdim, dstate)``: the state before that token (absolute in a
        packed batch) goes to that slot; a negative slot: none.
    out : Optional[torch.Tensor]
        Shape and dtype of ``x``; written and returned when given.
    return_final_states : bool
        Whether to return the states after the last tokens.
    num_seqs : Optional[int]
        Number of packed sequences where no other argument tells it.

    Returns
    -------
    tuple of torch.Tensor
        ``out``, and the final states ``(sequences, heads, headdim, dstate)`` or None. A sequence without tokens has its
        initial state.

    Examples
    --------
    >>> x, dt, A = torch.randn(1, 100, 4, 64).bfloat16(), torch.rand(1, 100, 4), -torch.rand(4)
    >>> B, C = torch.randn(1, 100, 1, 128).bfloat16(), torch.randn(1, 100, 1, 128).bfloat16()
    >>> y, states = flashinfer.mamba.ssd_combined_fwd(x, dt, A, B, C)
    >>> y.shape, states.shape
    (torch.Size([1, 100, 4, 64]), torch.Size([1, 4, 64, 128]))
    """
    if x.ndim != 4:
        raise ArgumentError(f"{_OP}: x must have 4 dimensions, got {x.ndim}")
    sequences = _sequences_of(x, seq_idx, initial_states, seq_chunk_cumsum, num_seqs)
    states = initial_states if initial_states is not None else checkpoint_states
    state_dtype = torch.bfloat16 if states is None else states.dtype
    if update_seq_chunk_cumsum:
        _update_cumsum(seq_idx, chunk_indices, chunk_offsets, 128, seq_chunk_cumsum, sequences)
    if out is None:
        out = new_empty(x, x.dtype, *x.shape)
    checkpoints = (checkpoint_token_indices, checkpoint_state_slots, checkpoint_states)
    final = _run(
        *(x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit, initial_states, seq_idx, checkpoints, out),
        *(return_final_states, sequences, state_dtype),
    )
    return out, final


def _update_cumsum(
    seq_idx: Optional[torch.Tensor],
    chunk_indices: Optional[torch.Tensor],
    chunk_offsets: Optional[torch.Tensor],
    chunk_size: int,
    output: Optional[torch.Tensor],
    num_seqs: int,
) -> None:
    if seq_idx is None or chunk_indices is None or chunk_offsets is None or output is None:
        raise ArgumentError(
            f"{_OP}: update_seq_chunk_cumsum must come with seq_idx, chunk_indices, chunk_offsets and seq_chunk_cumsum,"
            " got None for one of them"
        )
    _CumsumModule.seq_chunk_cumsum(
        seq_idx, chunk_indices, chunk_offsets, output, None, chunk_size, chunk_indices.shape[0], num_seqs
    )


class SSDCombined:
    """The chunk scan of one layer: :func:`ssd_combined_fwd` with a configuration that is checked at each call.

    Parameters
    ----------
    chunk_size : int
        Tokens of a logical chunk.
    nheads, headdim, dstate, ngroups : int
        Sizes of the layer.
    io_dtype, state_dtype : torch.dtype
        Those of tokens and states.
    has_d, d_has_hdim, has_initial_states, has_varlen, has_z : bool
        Which arguments calls have.
    seq_idx_dtype : torch.dtype
        That of ``seq_idx``.
    backend : str
        "cute" has results ``(batch, heads, headdim, chunks, chunk)`` and takes whole chunks only; others as ``x``.
    """

    def __init__(
        self,
        chunk_size: int,
        nheads: int,
        headdim: int,
        dstate: int,
        ngroups: int,
        io_dtype: torch.dtype = torch.bfloat16,
        state_dtype: torch.dtype = torch.bfloat16,
        has_d: bool = True,
        d_has_hdim: bool = False,
        has_initial_states: bool = False,
        has_varlen: bool = False,
        has_z: bool = False,
        seq_idx_dtype: torch.dtype = torch.int64,
        backend: str = "cute",
    ) -> None:
        sizes = {"chunk_size": chunk_size, "nheads": nheads, "headdim": headdim, "dstate": dstate, "ngroups": ngroups}
        for name, size in sizes.items():
            if size <= 0:
                raise ArgumentError(f"SSDCombined: {name} must be positive, got {size}")
        if nheads % ngroups:
            raise ArgumentError(f"SSDCombined: ngroups must divide {nheads} (nheads), got {ngroups}")
        if backend not in _BACKENDS:
            raise ArgumentError(f"SSDCombined: backend must be one of {', '.join(_BACKENDS)}, got {backend!r}")
        self.chunk_size, self.nheads, self.headdim, self.dstate, self.ngroups = sizes.values()
        self.io_dtype, self.state_dtype, self.seq_idx_dtype = io_dtype, state_dtype, seq_idx_dtype
        self.has_d, self.d_has_hdim, self.has_z = has_d, d_has_hdim, has_z
        self.has_initial_states, self.has_varlen, self.backend = has_initial_states, has_varlen, backend

    def _check(self, x: torch.Tensor, B: torch.Tensor, given: dict[str, tuple[bool, Any]]) -> None:
        if tuple(x.shape[2:]) != (self.nheads, self.headdim) or tuple(B.shape[2:]) != (self.ngroups, self.dstate):
            raise ArgumentError(
                f"SSDCombined: x and B must end in {(self.nheads, self.headdim)} and {(self.ngroups, self.dstate)}, "
                f"got {tuple(x.shape)} and {tuple(B.shape)}"
            )
        if x.dtype != self.io_dtype:
            raise ArgumentError(f"SSDCombined: x must be {self.io_dtype} (io_dtype), got {x.dtype}")
        for name, (wanted, value) in given.items():
            if wanted != (value is not None):
                must = "be given" if wanted else "be None"
                got = "None" if value is None else "a tensor"
                raise ArgumentError(f"SSDCombined: {name} must {must} (as the layer was made), got {got}")
        if self.backend == "cute" and x.shape[1] % self.chunk_size:
            raise ArgumentError(
                f"SSDCombined: x.shape[1] must be a multiple of {self.chunk_size} (chunk_size), got {x.shape[1]}"
            )

    @flashinfer_api(trace=ssd_combined_layer_trace)
    def run(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: Optional[torch.Tensor] = None,
        z: Optional[torch.Tensor] = None,
        dt_bias: Optional[torch.Tensor] = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, math.inf),
        initial_states: Optional[torch.Tensor] = None,
        seq_idx: Optional[torch.Tensor] = None,
        chunk_indices: Optional[torch.Tensor] = None,
        chunk_offsets: Optional[torch.Tensor] = None,
        seq_chunk_cumsum: Optional[torch.Tensor] = None,
        update_seq_chunk_cumsum: bool = False,
        checkpoint_token_indices: Optional[torch.Tensor] = None,
        checkpoint_state_slots: Optional[torch.Tensor] = None,
        checkpoint_states: Optional[torch.Tensor] = None,
        out: Optional[torch.Tensor] = None,
        return_final_states: bool = True,
        num_seqs: Optional[int] = None,
    ) -> tuple[torch.Tensor, Optional[torch.Tensor]]:
        """Run the layer: arguments and results are those of :func:`ssd_combined_fwd`, ``out`` as the backend has it."""
        flags = {"D": (self.has_d, D), "z": (self.has_z, z), "seq_idx": (self.has_varlen, seq_idx)}
        self._check(x, B, flags | {"initial_states": (self.has_initial_states, initial_states)})
        sequences = _sequences_of(x, seq_idx, initial_states, seq_chunk_cumsum, num_seqs)
        if update_seq_chunk_cumsum:
            _update_cumsum(seq_idx, chunk_indices, chunk_offsets, self.chunk_size, seq_chunk_cumsum, sequences)
        by_token = out
        if self.backend == "cute":
            batch, tokens = x.shape[:2]
            shape = (batch, self.nheads, self.headdim, tokens // self.chunk_size, self.chunk_size)
            if out is None:
                out = new_empty(x, x.dtype, *shape)
            elif tuple(out.shape) != shape or not out.is_contiguous():
                raise ArgumentError(f"SSDCombined: out must be contiguous of shape {shape}, got {tuple(out.shape)}")
            by_token = out.view(batch, self.nheads, self.headdim, tokens).permute(0, 3, 1, 2)
        elif by_token is None:
            out = by_token = new_empty(x, x.dtype, *x.shape)
        assert out is not None and by_token is not None
        checkpoints = (checkpoint_token_indices, checkpoint_state_slots, checkpoint_states)
        final = _run(
            *(x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit, initial_states, seq_idx, checkpoints, by_token),
            *(return_final_states, sequences, self.state_dtype),
        )
        return out, final

    @staticmethod
    def compute_seq_chunk_cumsum(
        seq_idx: torch.Tensor,
        chunk_indices: torch.Tensor,
        chunk_offsets: torch.Tensor,
        chunk_size: int,
        num_seqs: int,
        seq_chunk_cumsum: Optional[torch.Tensor] = None,
        tile_state: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        """Count the logical chunks of each sequence; return prefix sums ``(num_seqs + 1,)`` int32.

        Chunk i belongs to sequence ``seq_idx[0, chunk_indices[i] * chunk_size + chunk_offsets[i]]``.
        """
        if seq_chunk_cumsum is None:
            seq_chunk_cumsum = new_empty(seq_idx, torch.int32, num_seqs + 1)
        _CumsumModule.seq_chunk_cumsum(
            *(seq_idx, chunk_indices, chunk_offsets, seq_chunk_cumsum, tile_state),
            *(chunk_size, chunk_indices.shape[0], num_seqs),
        )
        return seq_chunk_cumsum
