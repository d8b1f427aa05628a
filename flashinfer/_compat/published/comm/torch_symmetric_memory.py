# SPDX-License-Identifier: Apache-2.0
"""Published path of torch's symmetric memory."""

from typing import Any

__all__: list[str] = []


def _enable_symm_mem_for_group(group_name: Any) -> None:
    """Let torch make symmetric memory for a process group."""
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    enable_symm_mem_for_group(group_name)
