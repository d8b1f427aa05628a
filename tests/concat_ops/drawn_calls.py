# SPDX-License-Identifier: Apache-2.0
"""Calls of concatenation for test_drawn_calls.py."""

from __future__ import annotations

import flashinfer

from ..traced_calls import traced

CALLS = {"concat_mla_k": traced(flashinfer.concat_ops.concat_mla_k, num_tokens=(0, 1, 3))}
