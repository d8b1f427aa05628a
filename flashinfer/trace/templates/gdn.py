# SPDX-License-Identifier: Apache-2.0
"""Templates of the gated delta rule under the name of the guide; ``recurrent_*`` define them."""

from .recurrent_gdn_prefill import chunk_gated_delta_rule_trace

__all__ = ["chunk_gated_delta_rule_trace"]
