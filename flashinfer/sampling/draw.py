# SPDX-License-Identifier: Apache-2.0
"""Drawing tokens: from all columns of a row, or from those that one filter keeps."""

from __future__ import annotations

from typing import Optional, Union

import torch

from ..api_logging import flashinfer_api
from ..trace.templates.sampling import (
    min_p_sampling_trace,
    sampling_from_logits_trace,
    sampling_from_probs_trace,
    top_k_sampling_trace,
    top_p_sampling_trace,
)
from .modules import FROM_ALL, FROM_MIN_P, FROM_TOP_K, FROM_TOP_P, NO_LIMIT, Samples, draw
from .random_stream import Number


@flashinfer_api(trace=sampling_from_logits_trace)
def sampling_from_logits(
    logits: torch.Tensor,
    indices: Optional[torch.Tensor] = None,
    deterministic: bool = True,
    generator: Optional[torch.Generator] = None,
    check_nan: bool = False,
    seed: Optional[Number] = None,
    offset: Optional[Number] = None,
) -> torch.Tensor:
    r"""Draw a token from ``softmax(logits)`` of each row: :func:`sampling_from_probs` without the probabilities in
    between.

    Parameters
    ----------
    logits : torch.Tensor
        ``(rows, vocab)``. Computed in float32; other dtypes are converted. The last dimension is contiguous.
    indices : Optional[torch.Tensor]
        ``(batch,)``, int32 or int64: output ``i`` is drawn from row ``indices[i]``. Any number of outputs may share a
        row. One that is no row is an error on the CPU; on CUDA it counts as the nearest. Default: each row once.
    deterministic : bool
        Accepted for compatibility. Results never depend on scheduling: every sum is one of integers.
    generator : Optional[torch.Generator]
        Where seed and offset come from unless both are given; see :func:`get_seed_and_offset`.
    check_nan : bool
        Raise if there is a NaN. Waits for the device. Without it, a NaN is never drawn.
    seed, offset : Optional[Union[int, torch.Tensor]]
        Two numbers, or two int64 or uint64 tensors of length 1 or ``batch`` on the device, which CUDA graphs read when
        they are replayed. With one element per output, each output has its own stream.

    Returns
    -------
    torch.Tensor
        ``(batch,)``, dtype of ``indices``, int32 without. 0 for a row of ``-inf`` or NaN.

    Notes
    -----
    Output ``i`` takes 64 bits of Philox4x32-10 with key ``seed`` and counter ``(offset, i)`` and draws by inverse
    transform, in the order of the columns. The same arguments give the same tokens on every device. A column of
    ``inf`` is drawn before any number.

    Examples
    --------
    >>> tokens = flashinfer.sampling_from_logits(torch.randn(4, 128256))
    """
    return draw(
        "sampling_from_logits", FROM_ALL, logits, True, indices, NO_LIMIT, 1.0, generator, check_nan, seed, offset,
        0, False,
    )  # type: ignore[return-value]  # fmt: skip


@flashinfer_api(trace=sampling_from_probs_trace)
def sampling_from_probs(
    probs: torch.Tensor,
    indices: Optional[torch.Tensor] = None,
    deterministic: bool = True,
    generator: Optional[torch.Generator] = None,
    check_nan: bool = False,
    seed: Optional[Number] = None,
    offset: Optional[Number] = None,
    return_valid: bool = False,
) -> Samples:
    r"""Draw a token from the probabilities of each row.

    By inverse transform: the first column at which the running sum reaches a uniform number of (0, 1]. Where rounding
    keeps the sum below it, the last column that is not 0. A probability of 0, below 0 or NaN is never drawn.

    Parameters
    ----------
    probs : torch.Tensor
        ``(rows, vocab)``, each row summing up to 1. Computed in float32; other dtypes are converted.
    indices, deterministic, generator, check_nan, seed, offset
        As for :func:`sampling_from_logits`.
    return_valid : bool
        Also return whether there was a token to draw.

    Returns
    -------
    samples : torch.Tensor
        ``(batch,)``, dtype of ``indices``, int32 without.
    valid : torch.Tensor
        Only with ``return_valid``: ``(batch,)``, bool. False for a row without a positive number, whose sample is 0.

    Examples
    --------
    >>> probs = torch.softmax(torch.randn(4, 128256), dim=-1)
    >>> tokens = flashinfer.sampling_from_probs(probs, seed=42, offset=0)
    """
    return draw(
        "sampling_from_probs", FROM_ALL, probs, False, indices, NO_LIMIT, 1.0, generator, check_nan, seed, offset,
        1, return_valid,
    )  # fmt: skip


@flashinfer_api(trace=top_p_sampling_trace)
def top_p_sampling_from_probs(
    probs: torch.Tensor,
    top_p: Union[torch.Tensor, float],
    indices: Optional[torch.Tensor] = None,
    deterministic: bool = True,
    generator: Optional[torch.Generator] = None,
    check_nan: bool = False,
    seed: Optional[Number] = None,
    offset: Optional[Number] = None,
    return_valid: bool = False,
) -> Samples:
    r"""Draw a token of each row from its most likely ones that have the probability ``top_p`` together.

    A column is kept if the columns above it sum to less than ``top_p``: the column that crosses the limit is kept, and
    columns equal to it are kept too.

    Parameters
    ----------
    probs : torch.Tensor
        ``(rows, vocab)``, each row summing up to 1.
    top_p : Union[torch.Tensor, float]
        A number, or ``(rows,)`` for each row of ``probs``. From 1 on, every column is kept; down to 0, the largest.
    indices, deterministic, generator, check_nan, seed, offset, return_valid
        As for :func:`sampling_from_probs`.

    Returns
    -------
    torch.Tensor, or a pair of them
        As for :func:`sampling_from_probs`.

    Examples
    --------
    >>> probs = torch.softmax(torch.randn(4, 128256), dim=-1)
    >>> tokens = flashinfer.top_p_sampling_from_probs(probs, 0.9)
    """
    return draw(
        "top_p_sampling_from_probs", FROM_TOP_P, probs, False, indices, NO_LIMIT, top_p, generator, check_nan, seed,
        offset, 32, return_valid,
    )  # fmt: skip


@flashinfer_api(trace=top_k_sampling_trace)
def top_k_sampling_from_probs(
    probs: torch.Tensor,
    top_k: Union[torch.Tensor, int],
    indices: Optional[torch.Tensor] = None,
    deterministic: bool = True,
    generator: Optional[torch.Generator] = None,
    check_nan: bool = False,
    seed: Optional[Number] = None,
    offset: Optional[Number] = None,
    return_valid: bool = False,
) -> Samples:
    r"""Draw a token of each row from its ``top_k`` most likely ones; columns equal to the last of these are kept too.

    Parameters
    ----------
    probs : torch.Tensor
        ``(rows, vocab)``. Need not be normalised, but columns below 2^-32 are not drawn beside one of 2^-24 or more.
    top_k : Union[torch.Tensor, int]
        A number, or ``(rows,)`` for each output. From the size of the vocabulary on, every column is kept; below 1, the
        largest.
    indices, deterministic, generator, check_nan, seed, offset, return_valid
        As for :func:`sampling_from_probs`.

    Returns
    -------
    torch.Tensor, or a pair of them
        As for :func:`sampling_from_probs`.

    Examples
    --------
    >>> probs = torch.softmax(torch.randn(4, 128256), dim=-1)
    >>> tokens = flashinfer.top_k_sampling_from_probs(probs, 50)
    """
    return draw(
        "top_k_sampling_from_probs", FROM_TOP_K, probs, False, indices, top_k, 1.0, generator, check_nan, seed, offset,
        32, return_valid,
    )  # fmt: skip


@flashinfer_api(trace=min_p_sampling_trace)
def min_p_sampling_from_probs(
    probs: torch.Tensor,
    min_p: Union[torch.Tensor, float],
    indices: Optional[torch.Tensor] = None,
    deterministic: bool = True,
    generator: Optional[torch.Generator] = None,
    check_nan: bool = False,
    seed: Optional[Number] = None,
    offset: Optional[Number] = None,
    return_valid: bool = False,
) -> Samples:
    r"""Draw a token of each row from those at least ``min_p`` times as likely as the most likely one.

    Parameters
    ----------
    probs : torch.Tensor
        ``(rows, vocab)``. Need not be normalised.
    min_p : Union[torch.Tensor, float]
        A number, or ``(rows,)`` for each output. From 1 on, the largest is kept.
    indices, deterministic, generator, check_nan, seed, offset, return_valid
        As for :func:`sampling_from_probs`.

    Returns
    -------
    torch.Tensor, or a pair of them
        As for :func:`sampling_from_probs`.

    Examples
    --------
    >>> probs = torch.softmax(torch.randn(4, 128256), dim=-1)
    >>> tokens = flashinfer.min_p_sampling_from_probs(probs, 0.1)
    """
    return draw(
        "min_p_sampling_from_probs", FROM_MIN_P, probs, False, indices, NO_LIMIT, min_p, generator, check_nan, seed,
        offset, 1, return_valid,
    )  # fmt: skip
