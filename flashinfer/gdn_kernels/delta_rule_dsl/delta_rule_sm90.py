# SPDX-License-Identifier: Apache-2.0
"""Prefill without a split of requests."""

from flashinfer.recurrent.gdn_launchers import chunk_gated_delta_rule_sm90 as chunk_gated_delta_rule_sm90
