# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers: gated delta rule, Kimi delta attention, Mamba-2.

Published paths (``flashinfer.gdn_decode``, ``flashinfer.kda`` and so on) re-export what the modules of this folder
define; those are files of ``_compat/published``.
"""

__all__: list[str] = []
