# SPDX-License-Identifier: Apache-2.0
"""The path under which published code replaces the number of SMs that a decision reads."""

from ...._runtime.arch import get_device_sm_count as get_num_sm
from ...dispatch import plan_b12x_moe

__all__ = ["get_num_sm", "plan_b12x_moe"]
