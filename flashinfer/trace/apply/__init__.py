# SPDX-License-Identifier: Apache-2.0
"""Replace ops by kernels of the user, chosen by the definition of each call.

    enable_apply({"rmsnorm_h4096": my_rmsnorm})        # a function, or a Solution
    FLASHINFER_TRACE_APPLY=1 FLASHINFER_TRACE_APPLY_PATH=solutions python serve.py

solutions.py    functions, ``Solution`` objects and folders of JSON files become candidates
calls.py        arguments of a call -> its names, its template, its axes
adapt.py        arguments and results of an API <-> inputs and outputs of a definition
plans.py        arguments of ``plan()`` that a definition of ``run()`` has among its inputs
patch.py        puts the replacements in place, counts what they do
"""

from .patch import disable_apply, enable_apply, is_enabled, stats

__all__ = ["disable_apply", "enable_apply", "is_enabled", "stats"]
