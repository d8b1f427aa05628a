# SPDX-License-Identifier: Apache-2.0
"""Settings of NVFP4 quantisation that callers build without a GPU. The quantisers themselves need Blackwell."""

from __future__ import annotations

import enum
import os
import warnings
from dataclasses import dataclass
from typing import Any, Optional, Union

import torch

from .._runtime.errors import ArgumentError
from .._runtime.knobs import knobs

__all__ = [
    "NVFP44Over6Config",
    "NVFP44Over6ErrMode",
    "current_nvfp4_4over6_config",
    "env_flag_enabled",
    "make_nvfp4_global_scale",
    "nvfp4_4over6_cache_key",
    "nvfp4_4over6_code",
    "nvfp4_4over6_from_code",
    "nvfp4_4over6_mode_label",
    "nvfp4_e4m3_max",
    "nvfp4_per_token_scale_inv",
    "resolve_nvfp4_4over6",
]

E4M3_MAX = 448
E2M1_MAX = 6

#: Environment variables that change the results of NVFP4 quantisers.
NVFP4_QUANT_ENV_VARS = (
    "FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH",
    "FLASHINFER_NVFP4_4OVER6",
    "FLASHINFER_NVFP4_4OVER6_ERR_MODE",
    "FLASHINFER_NVFP4_4OVER6_ERR_USE_FAST_MATH",
    "FLASHINFER_NVFP4_4OVER6_E4M3_USE_256",
)


class NVFP44Over6ErrMode(enum.IntEnum):
    """Error measure that decides between the two block scales: mean absolute, or mean squared."""

    MAE = 0
    MSE = 1


@dataclass(frozen=True)
class NVFP44Over6Config:
    """Scale each block such that its largest element becomes 6 or 4, whichever has the smaller error."""

    e4m3_max: int = E4M3_MAX
    err_mode: NVFP44Over6ErrMode = NVFP44Over6ErrMode.MAE
    err_use_fast_math: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.e4m3_max, bool) or self.e4m3_max not in (256, E4M3_MAX):
            raise ArgumentError(f"NVFP44Over6Config: e4m3_max must be either 256 or 448, got {self.e4m3_max!r}")
        if isinstance(self.err_mode, bool) or self.err_mode not in tuple(NVFP44Over6ErrMode):
            raise ArgumentError(f"NVFP44Over6Config: err_mode must be MAE or MSE, got {self.err_mode!r}")


def env_flag_enabled(name: str) -> bool:
    """Return True if an environment variable is set to something other than 0, false, no or off."""
    return os.environ.get(name, "").strip().lower() not in ("", "0", "false", "no", "off")


def current_nvfp4_4over6_config() -> Optional[NVFP44Over6Config]:
    """Read the configuration from the environment (``FLASHINFER_NVFP4_4OVER6`` and its companions), or None."""
    if not knobs.nvfp4_4over6:
        return None
    return NVFP44Over6Config(
        e4m3_max=256 if knobs.nvfp4_4over6_e4m3_use_256 else E4M3_MAX,
        err_mode=NVFP44Over6ErrMode[knobs.nvfp4_4over6_err_mode],
        err_use_fast_math=knobs.nvfp4_4over6_err_use_fast_math,
    )


#: What ``nvfp4_4over6=`` is when a caller leaves it out: the environment decides.
OMITTED: Any = ...


def resolve_nvfp4_4over6(nvfp4_4over6: Any = OMITTED) -> Optional[NVFP44Over6Config]:
    """Return the configuration that an argument ``nvfp4_4over6`` means, or None for none.

    Left out, it is that of the environment, with a ``FutureWarning`` where that switches it on; None is off; a
    configuration is itself.
    """
    if nvfp4_4over6 is OMITTED:
        found = current_nvfp4_4over6_config()
        if found is not None:
            warnings.warn(
                "FLASHINFER_NVFP4_4OVER6 will be read no longer: give nvfp4_4over6=NVFP44Over6Config(...)",
                FutureWarning,
                stacklevel=3,
            )
        return found
    if nvfp4_4over6 is not None and not isinstance(nvfp4_4over6, NVFP44Over6Config):
        raise TypeError(
            f"resolve_nvfp4_4over6: nvfp4_4over6 must be an NVFP44Over6Config or None, got {nvfp4_4over6!r}"
        )
    return nvfp4_4over6


def nvfp4_e4m3_max(nvfp4_4over6_config: Any = OMITTED) -> int:
    """Return the largest block scale: that of the configuration, else the largest e4m3 number."""
    config = resolve_nvfp4_4over6(nvfp4_4over6_config)
    return E4M3_MAX if config is None else config.e4m3_max


def nvfp4_per_token_scale_inv(nvfp4_4over6: Any = OMITTED) -> float:
    """Return ``1 / (6 * e4m3_max)``: times the largest magnitude of a token, it is the scale of that token."""
    return 1.0 / (E2M1_MAX * nvfp4_e4m3_max(nvfp4_4over6))


def nvfp4_4over6_code(nvfp4_4over6: Any = OMITTED) -> int:
    """Return a configuration as a number, for operators of torch: 0 is none."""
    config = resolve_nvfp4_4over6(nvfp4_4over6)
    if config is None:
        return 0
    is_256, is_fast = config.e4m3_max == 256, bool(config.err_use_fast_math)
    return 1 | is_256 << 1 | int(config.err_mode) << 2 | is_fast << 4


def nvfp4_4over6_from_code(code: int) -> Optional[NVFP44Over6Config]:
    """Return the configuration that :func:`nvfp4_4over6_code` made a number of; -1 is one that was left out."""
    if code == -1:
        return resolve_nvfp4_4over6()
    if code == 0:
        return None
    if not 0 < code < 32 or not code & 1 or code & 8:
        raise ArgumentError(f"nvfp4_4over6_from_code: code must be one of nvfp4_4over6_code, 0 or -1, got {code!r}")
    return NVFP44Over6Config(
        256 if code & 2 else E4M3_MAX, NVFP44Over6ErrMode(code >> 2 & 1), err_use_fast_math=bool(code & 16)
    )


def nvfp4_4over6_cache_key(nvfp4_4over6: Any = OMITTED) -> str:
    """Return a configuration as a text, for caches of modules and tactics: "off", or "4over6_448_MAE_0"."""
    config = resolve_nvfp4_4over6(nvfp4_4over6)
    if config is None:
        return "off"
    mode = NVFP44Over6ErrMode(config.err_mode).name
    return f"4over6_{config.e4m3_max}_{mode}_{int(config.err_use_fast_math)}"


def make_nvfp4_global_scale(
    input_tensor: torch.Tensor,
    per_token_activation: bool,
    global_scale: Union[float, torch.Tensor, None] = None,
    nvfp4_4over6_config: Optional[NVFP44Over6Config] = None,
) -> torch.Tensor:
    """Compute the global scale of a tensor that becomes NVFP4: the factor applied before blocks are scaled.

    Parameters
    ----------
    input_tensor : torch.Tensor
        The tensor to be quantised; it is not read where ``global_scale`` is given or each token has its own scale.
    per_token_activation : bool
        Whether each token has a scale of its own, so that the global one is ``1 / (6 * e4m3_max)``.
    global_scale : Union[None, float, torch.Tensor]
        The scale itself, a number or a tensor of one element.
    nvfp4_4over6_config : Optional[NVFP44Over6Config]
        Its ``e4m3_max`` replaces 448.

    Returns
    -------
    torch.Tensor
        ``(1,)`` float32 on the device of the input: ``6 * e4m3_max / max|x|``, the largest float32 for zeros.
    """
    if global_scale is not None:
        given = torch.as_tensor(global_scale, dtype=torch.float32, device=input_tensor.device)
        if given.numel() != 1:
            raise ArgumentError(
                f"make_nvfp4_global_scale: global_scale must have one element, got shape {tuple(given.shape)}"
            )
        return given.reshape(1)
    largest = float(nvfp4_e4m3_max(nvfp4_4over6_config) * E2M1_MAX)
    if per_token_activation:
        return torch.full((1,), 1 / largest, dtype=torch.float32, device=input_tensor.device)
    amax = input_tensor.abs().amax().float().reshape(1)
    return torch.where(amax > 0, largest / amax, torch.finfo(torch.float32).max)


def nvfp4_4over6_mode_label(per_token_activation: bool, nvfp4_4over6_config: Optional[NVFP44Over6Config]) -> str:
    """Label of a quantisation mode, for tables: "standard", or "per-token, 4over6-mae, e4m3-448, err-exactmath"."""
    parts = ["per-token"] if per_token_activation else []
    if nvfp4_4over6_config is not None:
        math = "fastmath" if nvfp4_4over6_config.err_use_fast_math else "exactmath"
        mode = NVFP44Over6ErrMode(nvfp4_4over6_config.err_mode).name.lower()
        parts += [f"4over6-{mode}", f"e4m3-{nvfp4_4over6_config.e4m3_max}", f"err-{math}"]
    return ", ".join(parts) or "standard"
