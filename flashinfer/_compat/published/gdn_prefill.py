# SPDX-License-Identifier: Apache-2.0
"""Published path of the prefill of the gated delta rule (``flashinfer.recurrent.gdn_prefill``)."""

from flashinfer.recurrent.gdn_prefill import chunk_gated_delta_rule as chunk_gated_delta_rule

__all__ = ["chunk_gated_delta_rule"]
