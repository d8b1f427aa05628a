# SPDX-License-Identifier: Apache-2.0
"""The published path of :mod:`flashinfer.trace.apply.plans`."""

from flashinfer.trace.apply.plans import adapter_for as adapter_for
from flashinfer.trace.apply.plans import fetch_plan_kwargs as fetch_plan_kwargs
from flashinfer.trace.apply.plans import stash_plan_kwargs as stash_plan_kwargs
