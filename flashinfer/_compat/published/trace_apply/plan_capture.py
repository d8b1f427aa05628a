# SPDX-License-Identifier: Apache-2.0
"""The published path of :mod:`flashinfer.trace.apply.plans`."""

from flashinfer.trace.apply.plans import _ADAPTERS as STATEFUL_ADAPTERS
from flashinfer.trace.apply.plans import PlanAdapter as StatefulAdapter
from flashinfer.trace.apply.plans import adapter_for as adapter_for
from flashinfer.trace.apply.plans import augment_namespace as augment_namespace
from flashinfer.trace.apply.plans import fetch_plan_kwargs as fetch_plan_kwargs
from flashinfer.trace.apply.plans import is_stateful as is_stateful
from flashinfer.trace.apply.plans import stash_plan_kwargs as stash_plan_kwargs

__all__ = ["STATEFUL_ADAPTERS", "StatefulAdapter"]
