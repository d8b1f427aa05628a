# SPDX-License-Identifier: Apache-2.0
"""Settings of NVFP4 quantisation that callers build without a GPU. The quantisers themselves need Blackwell."""

from __future__ import annotations

import enum
import os
from dataclasses import dataclass
from typing import Optional

__all__ = ["NVFP44Over6Config", "NVFP44Over6ErrMode", "env_flag_enabled", "nvfp4_e4m3_max"]

E4M3_MAX = 448


class NVFP44Over6ErrMode(enum.IntEnum):
    """Which error decides between the two block scales: mean absolute, or mean squared."""

    MAE = 0
    MSE = 1


@dataclass(frozen=True)
class NVFP44Over6Config:
    """Choose, block by block, whether the largest element becomes 6 or 4, whichever loses less."""

    e4m3_max: int = E4M3_MAX
    err_mode: NVFP44Over6ErrMode = NVFP44Over6ErrMode.MAE
    err_use_fast_math: bool = False


def env_flag_enabled(name: str) -> bool:
    """Whether an environment variable is set to something other than 0, false, no or off."""
    return os.environ.get(name, "").strip().lower() not in ("", "0", "false", "no", "off")


def nvfp4_e4m3_max(nvfp4_4over6_config: Optional[NVFP44Over6Config]) -> int:
    """Largest block scale: what the configuration says, else the largest e4m3 number."""
    return E4M3_MAX if nvfp4_4over6_config is None else nvfp4_4over6_config.e4m3_max
