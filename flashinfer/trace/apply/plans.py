# SPDX-License-Identifier: Apache-2.0
"""Page tables of wrappers: arguments of ``plan()`` that the definition of ``run()`` has among its inputs."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any, Mapping, Optional

__all__ = [
    "PlanAdapter",
    "adapter_for",
    "augment_namespace",
    "fetch_plan_kwargs",
    "is_stateful",
    "stash_plan_kwargs",
]

_plans: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()

#: What a definition of attention takes for granted. A call that was planned otherwise is another computation.
_PLAIN = {
    "custom_mask": (None,),
    "logits_soft_cap": (None, 0, 0.0),
    "packed_custom_mask": (None,),
    "pos_encoding_mode": ("NONE",),
    "prefix_len_ptr": (None,),
    "token_pos_in_items_ptr": (None,),
    "v_indptr": (None,),
    "o_indptr": (None,),
    "window_left": (-1,),
    "window_right": (-1, 0, None),
}


@dataclass(frozen=True)
class PlanAdapter:
    """Names that arguments of ``plan()`` have in the definition of ``run()``, and what the definition assumes.

    Parameters
    ----------
    names : Mapping[str, str]
        Parameter of ``plan()`` -> name for the candidate.
    lengths : Optional[str]
        The name of the array that a candidate must take unless pages hold one token: the definition has no such input.
    assumed : Mapping[str, tuple]
        Values that arguments of ``plan()`` may have.
    is_decode : bool
        True if the definition has one row of queries for each request.
    """

    names: Mapping[str, str]
    lengths: Optional[str] = None
    assumed: Mapping[str, tuple[Any, ...]] = field(default_factory=lambda: _PLAIN)
    is_decode: bool = False

    def merge(self, plan: Mapping[str, Any], namespace: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of ``run()`` with those of ``plan()`` that the definition knows."""
        return {**{name: plan[key] for key, name in self.names.items() if key in plan}, **namespace}

    def obstacle(self, plan: Mapping[str, Any], namespace: Mapping[str, Any], taken: tuple[str, ...]) -> Optional[str]:
        """Return what keeps a candidate that takes the parameters ``taken`` from serving the call, or None."""
        for name, allowed in self.assumed.items():
            value = plan.get(name, allowed[0])
            if name not in taken and not any(value is one or value == one for one in allowed):
                return f"plan() has {name}={value}"
        if self.lengths is not None and plan.get("page_size", 1) != 1 and self.lengths not in taken:
            return f"pages hold several tokens and the candidate does not take {self.lengths}"
        rows = namespace.get("q", namespace.get("q_nope"))
        indptr = plan.get("indptr", plan.get("kv_indptr"))
        if self.is_decode and rows is not None and indptr is not None and len(rows) != len(indptr) - 1:
            return "requests have several rows"
        return None


_CAUSAL = {**_PLAIN, "causal": (True,)}
_ADAPTERS = {
    "flashinfer.decode.BatchDecodeWithPagedKVCacheWrapper.run": PlanAdapter(
        {"indptr": "kv_indptr", "indices": "kv_indices", "last_page_len": "kv_last_page_len", "sm_scale": "sm_scale"},
        "kv_last_page_len",
        is_decode=True,
    ),
    "flashinfer.prefill.BatchPrefillWithPagedKVCacheWrapper.run": PlanAdapter(
        {
            "qo_indptr": "qo_indptr",
            "paged_kv_indptr": "kv_indptr",
            "paged_kv_indices": "kv_indices",
            "paged_kv_last_page_len": "kv_last_page_len",
            "sm_scale": "sm_scale",
            "causal": "causal",
        },
        "kv_last_page_len",
        _CAUSAL,
    ),
    "flashinfer.prefill.BatchPrefillWithRaggedKVCacheWrapper.run": PlanAdapter(
        {name: name for name in ("qo_indptr", "kv_indptr", "sm_scale", "causal")}, None, _CAUSAL
    ),
    "flashinfer.mla._core.BatchMLAPagedAttentionWrapper.run": PlanAdapter(
        {name: name for name in ("kv_indptr", "kv_indices", "kv_len_arr", "sm_scale")}, "kv_len_arr", is_decode=True
    ),
}


def adapter_for(fi_api: str) -> Optional[PlanAdapter]:
    """Return how ``plan()`` and ``run()`` of an API go together; None if its definition needs no plan."""
    return _ADAPTERS.get(fi_api.removeprefix("fi_api:"))


def stash_plan_kwargs(instance: Any, kwargs: Mapping[str, Any]) -> None:
    """Keep the arguments of ``plan()`` as long as the wrapper lives, or until the next plan."""
    _plans[instance] = dict(kwargs)


def fetch_plan_kwargs(instance: Any) -> Optional[dict[str, Any]]:
    """Return the arguments of the last ``plan()`` of a wrapper; None if it was not seen."""
    return _plans.get(instance)


def is_stateful(fi_api: str) -> bool:
    """Tell whether a definition of an API has inputs that ``plan()`` was given."""
    return adapter_for(fi_api) is not None


def augment_namespace(fi_api: str, instance: Any, namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a ``run()`` with those of the last ``plan()`` that its definition knows."""
    adapter, plan = adapter_for(fi_api), fetch_plan_kwargs(instance)
    return dict(namespace) if adapter is None or plan is None else adapter.merge(plan, namespace)
