# SPDX-License-Identifier: Apache-2.0
"""Names of the Triton kernels that fill tables of pointers for the published segment GEMM.

Our kernels read segments themselves and need no tables, so that the names can be imported and a launch raises.
"""

from __future__ import annotations

from typing import Any, Callable, NoReturn

from flashinfer._compat.unsupported import needs

__all__ = ["compute_padding_mapping", "compute_sm80_group_gemm_args", "compute_sm90_group_gemm_args"]


class _MissingKernel:
    """A kernel that is launched as ``kernel[grid](...)``."""

    def __init__(self, name: str) -> None:
        self.__name__ = name
        self._refuse = needs(name, "Triton kernels, which SegmentGEMMWrapper of this package does without")

    def __getitem__(self, grid: Any) -> Callable[..., NoReturn]:
        return self._refuse

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse()


compute_padding_mapping = _MissingKernel("compute_padding_mapping")
compute_sm80_group_gemm_args = _MissingKernel("compute_sm80_group_gemm_args")
compute_sm90_group_gemm_args = _MissingKernel("compute_sm90_group_gemm_args")
