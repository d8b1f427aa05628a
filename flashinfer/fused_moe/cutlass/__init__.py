# SPDX-License-Identifier: Apache-2.0
"""``cutlass_fused_moe``: ``api.py`` is the function with its checks, ``call.py`` the one way to native code,
``faults.py`` words refusals, ``formats.py`` and ``tuning.py`` choose, ``workspace.py`` counts bytes."""
