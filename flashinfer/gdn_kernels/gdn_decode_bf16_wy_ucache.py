# SPDX-License-Identifier: Apache-2.0
"""Verification after a flat ring of corrections."""

from flashinfer.recurrent.gdn_ring import gated_delta_rule_mtp_ucache as gated_delta_rule_mtp_ucache
