# SPDX-License-Identifier: Apache-2.0
"""Attention of Hugging Face ``transformers`` on our kernels.

>>> from flashinfer.integrations import transformers as flashinfer_transformers
>>> flashinfer_transformers.register()
>>> model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="flashinfer")

``transformers`` keeps keys and values of a batch as ``(batch, num_kv_heads, kv_len, head_dim)``. That is a paged cache
in the HND layout whose pages are as long as the sequences, so attention reads it where it is.

``torch.compile(model)`` works: a graph ends at each attention and goes on behind it, because attention is planned on
the host for each batch. ``fullgraph=True`` is refused for the same reason. A program that needs one graph calls
``plan`` of :class:`~flashinfer.prefill.BatchPrefillWithPagedKVCacheWrapper` outside of the compiled function and
``run`` inside, which is a single op of the graph; or it compiles the modules between the attentions by themselves.
"""

from __future__ import annotations

import functools
import sys
import threading
from typing import Any, Callable, Optional

import torch

from .._runtime.codegen_wrapper import kept_out_of_graphs
from .._runtime.errors import ArgumentError, LibraryError
from ..prefill import BatchPrefillWithPagedKVCacheWrapper

__all__ = ["attention", "register"]

_OP = "flashinfer.integrations.transformers"
_WORKSPACE_BYTES = 128 << 20


class _PlannedAttention:
    """A wrapper and the key of its plan: the layers of a model use the same plan one after the other."""

    def __init__(self, device: torch.device) -> None:
        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        self._key: Optional[tuple[Any, ...]] = None
        self._mask: Optional[torch.Tensor] = None
        self._layer: Optional[int] = None  #: layer that ran last

    def run(
        self,
        layer: Optional[int],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: Optional[torch.Tensor],
        causal: bool,
        sm_scale: Optional[float],
        soft_cap: Optional[float],
        sinks: Optional[torch.Tensor],
    ) -> torch.Tensor:
        """Compute attention; q and the result: ``(batch, q_len, heads, dim)``; k and v: ``(batch, heads, n, dim)``."""
        batch, q_len, num_qo_heads, head_dim = q.shape
        version = None if mask is None or mask.is_inference() else mask._version  # counts writes to the mask
        key = (*q.shape, *k.shape, v.shape[-1], q.dtype, k.dtype, causal, sm_scale, soft_cap, version)
        if key != self._key or mask is not self._mask or self._may_be_rewritten(mask, layer):
            self._plan(q, k, v, mask, causal, sm_scale, soft_cap)
            self._key, self._mask = key, mask
        self._layer = layer
        out = self._wrapper.run(q.reshape(batch * q_len, num_qo_heads, head_dim), (k, v), sinks=sinks)
        assert isinstance(out, torch.Tensor)
        return out.view(batch, q_len, num_qo_heads, v.shape[-1])

    def _may_be_rewritten(self, mask: Optional[torch.Tensor], layer: Optional[int]) -> bool:
        """Return True if an inference mask, which counts no writes, may have changed; between layers it does not."""
        if mask is None or not mask.is_inference():
            return False
        return layer is None or self._layer is None or layer <= self._layer

    def _plan(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: Optional[torch.Tensor],
        causal: bool,
        sm_scale: Optional[float],
        soft_cap: Optional[float],
    ) -> None:
        batch, q_len, num_qo_heads, head_dim = q.shape
        num_kv_heads, kv_len = k.shape[1:3]
        self._key = None  # no plan is valid if this call fails
        pages = torch.arange(batch + 1, dtype=torch.int32)
        self._wrapper.plan(
            pages * q_len,
            pages,
            pages[:-1],
            torch.full((batch,), kv_len, dtype=torch.int32),
            num_qo_heads,
            num_kv_heads,
            head_dim,
            kv_len,
            head_dim_vo=v.shape[-1],
            custom_mask=None if mask is None else _as_rows(mask, batch, q_len, kv_len),
            causal=causal,
            sm_scale=sm_scale,
            logits_soft_cap=soft_cap,
            q_data_type=q.dtype,
            kv_data_type=k.dtype,
        )


def _as_rows(mask: torch.Tensor, batch: int, q_len: int, kv_len: int) -> torch.Tensor:
    """Flatten the mask of ``transformers`` into our format: for each request, ``q_len`` rows of ``kv_len``."""
    seen = _seen(mask)
    fits = mask.ndim == 4 and mask.shape[:2] in ((1, 1), (batch, 1)) and mask.shape[2] in (1, q_len)
    if seen is None or not fits or 1 < mask.shape[3] < kv_len:
        raise ArgumentError(
            f"{_OP}: attention_mask must have dtype torch.bool and shape ({batch}, 1, {q_len}, {kv_len}) (one mask for "
            "all heads, True where a query sees a key; or numbers to add that are 0 there and elsewhere the lowest of "
            f"a float type), got {mask.dtype} and shape {tuple(mask.shape)}"
        )
    return seen[:, 0, :, :kv_len].expand(batch, q_len, kv_len).reshape(-1)


def _seen(mask: torch.Tensor) -> Optional[torch.Tensor]:
    """Convert a mask to bool, True where a query sees a key; None if an additive mask has other values than two."""
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        return None
    seen, hidden = mask == 0, mask <= torch.finfo(mask.dtype).min
    return seen if bool((seen | hidden).all()) else None


class _Plans(threading.local):
    """Plans of one thread: with shared plans, another thread could plan between this thread's plan and its run."""

    def __init__(self) -> None:
        self.of_kind: dict[tuple[torch.device, bool, Optional[int]], _PlannedAttention] = {}


_plans = _Plans()


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Optional[torch.Tensor],
    dropout: float = 0.0,
    scaling: Optional[float] = None,
    is_causal: Optional[bool] = None,
    softcap: Optional[float] = None,
    s_aux: Optional[torch.Tensor] = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    r"""Compute the attention of one layer; models call this. For inference: there is no dropout and no gradient.

    Parameters
    ----------
    module : torch.nn.Module
        The layer; its ``is_causal`` counts where the argument is None.
    query : torch.Tensor
        ``(batch, num_qo_heads, q_len, head_dim)``.
    key, value : torch.Tensor
        ``(batch, num_kv_heads, kv_len, head_dim)``; heads are not repeated, any strides but the last.
    attention_mask : Optional[torch.Tensor]
        bool ``(batch, 1, q_len, kv_len)``, True where a query sees a key; windows and padding are in it. Additive
        masks of 0 and the lowest number of their type are converted to that. None: causal, or no mask.
    dropout : float
        0.
    scaling : Optional[float]
        1 / sqrt(head_dim) if None.
    is_causal : Optional[bool]
        Without a mask, whether a query sees keys up to its own position only.
    softcap : Optional[float]
        ``cap * tanh(logit / cap)`` of the logits.
    s_aux : Optional[torch.Tensor]
        ``(num_qo_heads,)`` attention sinks: logits that add to the denominator of the softmax.
    **kwargs
        What ``transformers`` tells every implementation. ``sliding_window`` is in the mask already; ``position_bias``
        is refused, and so is ``cu_seq_lens_q`` without a mask.

    Returns
    -------
    Tuple[torch.Tensor, None]
        ``(batch, q_len, num_qo_heads, head_dim)``, and no attention weights: they never exist. A query that sees no
        key has output 0.
    """
    _refuse_what_is_missing((query, key, value, s_aux), attention_mask, dropout, kwargs)
    q_len, kv_len = query.shape[2], key.shape[2]
    causal = (
        attention_mask is None
        and q_len > 1
        and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
    )
    if causal and kv_len > q_len:  # a static cache before its first use is empty behind the queries
        key, value = key[:, :, :q_len], value[:, :, :q_len]
    # Layers with a window and layers without one alternate in some models; each kind keeps its plan.
    kind = (query.device, attention_mask is None, kwargs.get("sliding_window"))
    planned = _plans.of_kind.get(kind)
    if planned is None:
        planned = _plans.of_kind[kind] = _PlannedAttention(query.device)
    layer = getattr(module, "layer_idx", None)
    out = planned.run(layer, query.transpose(1, 2), key, value, attention_mask, causal, scaling, softcap, s_aux)
    return out, None


def _refuse_what_is_missing(
    tensors: tuple[Optional[torch.Tensor], ...],
    attention_mask: Optional[torch.Tensor],
    dropout: float,
    kwargs: dict[str, Any],
) -> None:
    if dropout:
        raise ArgumentError(f"{_OP}: dropout must be 0 (call model.eval(): this is for inference), got {dropout}")
    if torch.is_grad_enabled():
        for name, tensor in zip(("query", "key", "value", "s_aux"), tensors, strict=True):
            if tensor is not None and tensor.requires_grad:
                raise ArgumentError(
                    f"{_OP}: {name} must not require a gradient (this is for inference), got one that does: use "
                    "torch.no_grad()"
                )
    if kwargs.get("position_bias") is not None:
        raise ArgumentError(f"{_OP}: position_bias must be None (attn_implementation='eager' has it), got a value")
    packed = kwargs.get("cu_seq_lens_q")
    if packed is not None and attention_mask is None and len(packed) > 2:
        raise ArgumentError(
            f"{_OP}: position_ids must start again with each sequence (transformers makes the mask of packed sequences "
            f"from them), got cu_seq_lens_q of {len(packed) - 1} sequences and no mask"
        )


_names: set[str] = set()  #: names that we are registered under


def register(name: str = "flashinfer") -> None:
    """Make ``attn_implementation=name`` known to ``transformers``. Calling it again changes nothing.

    ``transformers`` takes every name with "flash" in it for the package flash-attn and calls it differently; from here
    on, ours are not taken for it. Models refuse our name if they choose their layers from a table of names, or do not
    say that their attention goes through the interface (``_supports_attention_backend``, or ``_supports_sdpa``).

    Parameters
    ----------
    name : str
        What models will call it.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
        from transformers.masking_utils import sdpa_mask
        from transformers.utils.generic import is_flash_attention_requested
    except ImportError as error:
        raise LibraryError(f"{_OP}: the package transformers must be release 5, got none or an older one") from error
    AttentionInterface.register(name, kept_out_of_graphs(attention, "attention is planned on the host"))
    # sdpa_mask gives None where the causal flag suffices, else one bool for each (query, key) pair.
    AttentionMaskInterface.register(name, sdpa_mask)
    if not _names:
        _replace_everywhere(is_flash_attention_requested, _but_for_our_names(is_flash_attention_requested))
        _refuse_own_attention(PreTrainedModel)
    _names.add(name)


def _replace_everywhere(old: Callable[..., Any], new: Callable[..., Any]) -> None:
    """Replace ``old`` in each module of ``transformers`` that has imported it.

    Modules that are imported later find the new function where it is defined."""
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("transformers") and vars(module).get(old.__name__) is old:
            setattr(module, old.__name__, new)


def _but_for_our_names(ask: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(ask)
    def is_flash_attention_requested(
        config: Any = None, requested_attention_implementation: Optional[str] = None, *args: Any, **kwargs: Any
    ) -> bool:
        requested = requested_attention_implementation if config is None else config._attn_implementation
        return requested not in _names and ask(config, requested_attention_implementation, *args, **kwargs)

    return is_flash_attention_requested


def _refuse_own_attention(models: Any) -> None:
    """Make the base class of all models raise for models that cannot use our names."""
    choose = models.get_correct_attn_implementation

    @functools.wraps(choose)
    def get_correct_attn_implementation(model: Any, *args: Any, **kwargs: Any) -> str:
        chosen = choose(model, *args, **kwargs)
        if chosen in _names and _has_own_attention(model):
            raise ArgumentError(
                f"{_OP}: attn_implementation must be 'eager' or what else {type(model).__name__} has (its attention "
                f"does not go through the interface of transformers), got {chosen!r}"
            )
        return chosen

    models.get_correct_attn_implementation = get_correct_attn_implementation


def _has_own_attention(model: Any) -> bool:
    """Return True if a model would misread our masks, or chooses its layers from a table that we are not in."""
    names = dir(sys.modules.get(type(model).__module__))
    return any(name.endswith("_ATTENTION_CLASSES") for name in names) or not (
        model._supports_sdpa or model._supports_attention_backend
    )
