# SPDX-License-Identifier: Apache-2.0
"""Prefill of the gated delta rule: packed requests, chunk by chunk."""

from __future__ import annotations

import warnings
from typing import Any, Callable, Optional, Union

import torch

from .. import utils
from .._runtime.allocation import new_empty
from .._runtime.errors import ArgumentError
from .._runtime.torch_ops import called, register_custom_op
from ..api_logging import flashinfer_api
from ..jit.attention.generate import has_hopper_target
from ..jit.codegen import module_cache
from ..jit.recurrent.gdn_prefill import gen_gdn_prefill_module
from ..trace.templates.recurrent_gdn_prefill import chunk_gated_delta_rule_trace
from .gdn_prefill_checks import CHUNK, OP, check_checkpoints, check_options, check_requests, check_slots

__all__ = ["chunk_gated_delta_rule"]

get_gdn_prefill_module = module_cache(gen_gdn_prefill_module)

#: By device and probe: the call, the size of its workspace, and the multiprocessors among which requests may be split.
_Native = tuple[Callable[..., Any], Callable[..., int], int]
_functions: dict[Any, _Native] = {}
_LONG = 2048  #: tokens per request from which "auto" splits
_SHORTEST = 512  #: tokens of a part that "auto" makes


def _native(x: torch.Tensor) -> _Native:
    """Return the functions of the module that serves the device of ``x``."""
    probe = utils.is_sm90a_supported
    key = (x.get_device() if x.is_cuda else -1, probe)  # engines replace the probe
    found = _functions.get(key)
    if found is None:
        is_hopper = x.is_cuda and probe(x.device) and has_hopper_target()
        module = get_gdn_prefill_module("sm90" if is_hopper else "cuda" if x.is_cuda else "cpu")
        sms = torch.cuda.get_device_properties(x.device).multi_processor_count if is_hopper else 0
        found = _functions[key] = (module.gdn_prefill, module.gdn_prefill_workspace, sms)
    return found


def split_sms(x: torch.Tensor) -> int:
    """Return the multiprocessors among which the requests of ``x`` may be split; 0 if its device has no such kernel."""
    return _native(x)[2]


def should_use_cp(num_seqs: int, total_seqlen: int, num_heads: int, num_sms: int) -> bool:
    """Return True if "auto" computes the parts of requests side by side.

    A warpgroup follows 64 columns of a head, so a call has ``2 * num_seqs * num_heads`` chains. Parts are computed
    twice: they pay where the chains take a quarter of the card or less.
    """
    return num_seqs > 0 and 8 * num_seqs * num_heads <= num_sms and total_seqlen // num_seqs >= _LONG


def choose_cp_chunk_len(
    num_seqs: int, total_seqlen: int, num_heads: int, num_sms: int, granularity: int = CHUNK
) -> int:
    """Return the tokens of a part, a multiple of ``granularity``, with which the parts fill the multiprocessors."""
    parts = max(num_sms // max(2 * num_seqs * num_heads, 1), 2)
    length = total_seqlen // max(num_seqs, 1)
    return -(-max(-(-length // parts), _SHORTEST) // granularity) * granularity


def _segment(sms: int, requests: int, tokens: int, heads: int, use_cp: Optional[bool], given: int) -> int:
    """Return the tokens of the parts in which requests are computed side by side; 0: whole requests."""
    if sms == 0 or use_cp is False or tokens == 0:
        return 0
    if given:
        return given
    if use_cp is None and not should_use_cp(requests, tokens, heads, sms):
        return 0
    return choose_cp_chunk_len(requests, tokens, heads, sms)


@register_custom_op("flashinfer::gdn_prefill", mutates_args=("output", "output_state", "state_checkpoints"))
@called(OP)
def _gdn_prefill(
    output: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: Optional[torch.Tensor],
    beta: Optional[torch.Tensor],
    scale: float,
    initial_state: Optional[torch.Tensor],
    output_state: Optional[torch.Tensor],
    cu_seqlens: torch.Tensor,
    state_indices: Optional[torch.Tensor],
    state_checkpoints: Optional[torch.Tensor],
    checkpoint_cu_starts: Optional[torch.Tensor],
    checkpoint_every_n_tokens: int,
    normalize: bool,
    use_cp: Optional[bool],
    cp_chunk_len: int,
) -> None:
    run, size_of, sms = _native(q)
    workspace, segment = None, 0
    if q.is_cuda:
        requests, tokens, heads = cu_seqlens.shape[0] - 1, output.shape[0], output.shape[1]
        segment = _segment(sms, requests, tokens, heads, use_cp, cp_chunk_len)
        workspace = new_empty(q, torch.uint8, size_of(requests, tokens, heads, segment))
    run(
        output,
        q,
        k,
        v,
        g,
        beta,
        scale,
        initial_state,
        output_state,
        cu_seqlens,
        state_indices,
        state_checkpoints,
        checkpoint_cu_starts,
        checkpoint_every_n_tokens,
        torch.empty_like(q) if normalize else None,
        torch.empty_like(k) if normalize else None,
        workspace,
        segment,
    )


def _are_plain(
    g: Optional[torch.Tensor],
    beta: Optional[torch.Tensor],
    output: Optional[torch.Tensor],
    initial_state: Optional[torch.Tensor],
) -> bool:
    """Return True if the optional tensors need no copy: the common case, in fewer steps than `_split_fault`."""
    return (
        (g is None or (g.dtype is torch.float32 and g.is_contiguous()))
        and (beta is None or (beta.dtype is torch.float32 and beta.is_contiguous()))
        and (output is None or output.is_contiguous())
        and (initial_state is None or initial_state.is_contiguous())
    )


def _split_fault(*tensors: tuple[str, Optional[torch.Tensor], Optional[torch.dtype]]) -> str:
    """Return why the split form does not take the tensors; empty if it does."""
    for name, x, dtype in tensors:
        if x is None:
            continue
        if dtype is not None and x.dtype is not dtype:
            return f"{name} must be {dtype}, got {x.dtype}"
        if not x.is_contiguous():
            return f"{name} must be contiguous, got strides {x.stride()}"
    return ""


@flashinfer_api(trace=chunk_gated_delta_rule_trace)
def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: Optional[torch.Tensor] = None,
    beta: Optional[torch.Tensor] = None,
    scale: Optional[float] = None,
    initial_state: Optional[torch.Tensor] = None,
    output_final_state: bool = False,
    cu_seqlens: Optional[torch.Tensor] = None,
    use_qk_l2norm_in_kernel: bool = False,
    output: Optional[torch.Tensor] = None,
    output_state: Optional[torch.Tensor] = None,
    state_checkpoints: Optional[torch.Tensor] = None,
    checkpoint_cu_starts: Optional[torch.Tensor] = None,
    checkpoint_every_n_tokens: int = 0,
    use_cp: Union[str, bool] = "auto",
    state_indices: Optional[torch.Tensor] = None,
    _cp_chunk_len: Optional[int] = None,
    backend: str = "auto",
    max_seqlen: Optional[int] = None,
) -> Union[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    r"""Gated delta rule over packed requests.

    For each token of a request and each output head, in float32, with a state ``S`` of 128 keys by 128 values:
    ``S = g * S;  S = S + k (beta * (v - k^T S))^T;  o = scale * q^T S``.

    Parameters
    ----------
    q : torch.Tensor
        ``(total_tokens, num_q_heads, 128)``, float16 or bfloat16, on the CPU also float32.
    k : torch.Tensor
        ``(total_tokens, num_k_heads, 128)``, dtype of ``q``.
    v : torch.Tensor
        ``(total_tokens, num_v_heads, 128)``, dtype of ``q``. Either query heads share keys and values
        (``num_k_heads == num_v_heads``), or value heads share queries and keys (``num_q_heads == num_k_heads``).
    g : Optional[torch.Tensor]
        ``(total_tokens, num_heads)``, float32, the decay itself and not its logarithm; None is 1. ``num_heads`` is the
        larger number of heads of ``q`` and ``v``.
    beta : Optional[torch.Tensor]
        ``(total_tokens, num_heads)``, float32; None is 1.
    scale : Optional[float]
        None and 0 are ``128 ** -0.5``.
    initial_state : Optional[torch.Tensor]
        ``(requests, num_heads, 128, 128)``, values before keys, of any strides; float32, bfloat16, float16,
        float8_e4m3fn or float8_e5m2. None is 0.
    output_final_state : bool
        Return the states after the last tokens, too.
    cu_seqlens : torch.Tensor
        ``(requests + 1,)``, int32 or int64: the first token of each request, then ``total_tokens``.
    use_qk_l2norm_in_kernel : bool
        Divide each row of ``q`` and ``k`` by its Euclidean norm first.
    output : Optional[torch.Tensor]
        ``(total_tokens, num_heads, 128)``, dtype of ``q``; written and returned when given.
    output_state : Optional[torch.Tensor]
        Like ``initial_state``, which it may be; allocated in float32 when None. Rows of requests without tokens are not
        written.
    state_checkpoints : Optional[torch.Tensor]
        ``(checkpoints, num_heads, 128, 128)``, as ``initial_state``: row ``checkpoint_cu_starts[i] + j`` becomes the
        state of request ``i`` after ``(j + 1) * checkpoint_every_n_tokens`` tokens.
    checkpoint_cu_starts : Optional[torch.Tensor]
        ``(requests + 1,)``, int32 or int64.
    checkpoint_every_n_tokens : int
        A multiple of 64; 0 is none.
    use_cp : Union[str, bool]
        "auto", True or False: whether a long request may be computed in parts side by side, which "auto" does on Hopper
        where heads are few. States of prefixes are then equal bit by bit only with parts of a fixed size.
    state_indices : Optional[torch.Tensor]
        ``(requests,)``, int32 or int64, different from each other: rows of ``initial_state`` and ``output_state``,
        which are pools then.
    _cp_chunk_len : Optional[int]
        Tokens of a part where requests are split, a multiple of 64; default: chosen by the number of heads.
    backend : str
        "auto" or "flashinfer".
    max_seqlen : Optional[int]
        A bound of the lengths; results do not depend on it.

    Returns
    -------
    torch.Tensor or tuple[torch.Tensor, torch.Tensor]
        ``output``, or ``(output, output_state)`` if ``output_final_state``.

    Examples
    --------
    >>> q, k, v = (torch.nn.functional.normalize(torch.randn(100, 2, 128), dim=-1).bfloat16() for _ in range(3))
    >>> flashinfer.chunk_gated_delta_rule(q, k, v, cu_seqlens=torch.tensor([0, 30, 100])).shape
    torch.Size([100, 2, 128])
    """
    check_options(backend, use_cp, checkpoint_every_n_tokens, state_checkpoints, checkpoint_cu_starts)
    tokens, heads, dim = q.shape[0], max(q.shape[1], v.shape[1]), q.shape[2]
    offsets, requests = check_requests(cu_seqlens, max_seqlen, tokens)
    if state_checkpoints is not None:
        check_checkpoints(state_checkpoints, checkpoint_cu_starts, heads, requests)
    if state_indices is not None:
        check_slots(state_indices, requests)
        if output_final_state and output_state is None:
            raise ArgumentError(f"{OP}: output_final_state with state_indices needs an explicit output_state pool")
    if _cp_chunk_len is not None and (_cp_chunk_len < 0 or _cp_chunk_len % CHUNK):
        raise ArgumentError(f"{OP}: _cp_chunk_len must be a multiple of {CHUNK}, got {_cp_chunk_len}")
    if dim != 128:
        raise ArgumentError(f"{OP}: q must have head dimension 128, got {dim}")
    packed = None if state_indices is not None else initial_state
    fault = ""
    is_plain = q.is_contiguous() and k.is_contiguous() and v.is_contiguous() and _are_plain(g, beta, output, packed)
    if use_cp is not False and not is_plain:
        gates = (("g", g, torch.float32), ("beta", beta, torch.float32))
        optional = (("output", output, None), ("initial_state", packed, None))
        fault = _split_fault(*gates, ("q", q, None), ("k", k, None), ("v", v, None), *optional)
    if fault and use_cp is True:
        raise ArgumentError(f"{OP}: {fault} (for use_cp=True)")
    if fault:
        warnings.warn(f"{OP}: {fault}, so that requests are not split (use_cp='auto')", RuntimeWarning, stacklevel=3)
    if not is_plain and (fault or use_cp is False):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        g, beta = (None if x is None else x.to(torch.float32).contiguous() for x in (g, beta))
    if output_final_state and output_state is None:
        output_state = new_empty(q, torch.float32, requests, heads, 128, 128)
    written = new_empty(q, q.dtype, tokens, heads, 128) if output is None else output
    if not written.is_contiguous():
        written = torch.empty_like(written, memory_format=torch.contiguous_format)
    _gdn_prefill(
        written,
        q,
        k,
        v,
        g,
        beta,
        scale or 128**-0.5,
        initial_state,
        output_state if output_final_state else None,
        offsets,
        state_indices,
        state_checkpoints,
        checkpoint_cu_starts,
        checkpoint_every_n_tokens,
        use_qk_l2norm_in_kernel,
        False if fault else None if use_cp == "auto" else bool(use_cp),
        _cp_chunk_len or 0,
    )
    if output is None:
        output = written
    elif written is not output:
        output.copy_(written)
    return (output, output_state) if output_final_state and output_state is not None else output
