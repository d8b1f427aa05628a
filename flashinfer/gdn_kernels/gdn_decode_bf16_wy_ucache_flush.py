# SPDX-License-Identifier: Apache-2.0
"""Verification after a ring of corrections, which is folded into the state when it is nearly full."""

from flashinfer.recurrent.gdn_ring import gated_delta_rule_mtp_ucache_flush as gated_delta_rule_mtp_ucache_flush
