# SPDX-License-Identifier: Apache-2.0
"""Backends that a layer of experts can choose from: where each runs, and the form of its weights."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, ClassVar, Optional

import torch

from .._runtime.errors import ArgumentError
from .prepare import prepare_bf16_weights, prepare_w4a16_weights

__all__ = [
    "B12xNvfp4Config",
    "B12xW4A16Config",
    "CuteDslConfig",
    "CutlassBf16Config",
    "CutlassConfig",
    "CutlassW4A16Config",
    "TrtllmBf16Config",
    "TrtllmFp4Config",
    "TrtllmFp8BlockConfig",
    "TrtllmFp8PerTensorConfig",
    "TrtllmMxInt4Config",
]


@dataclass(frozen=True)
class _Backend:
    """A backend: its key in :class:`MoEWeightPack`, and the architectures that it runs on."""

    key: ClassVar[str] = ""
    archs: ClassVar[frozenset[int]] = frozenset()
    runs_on_cpu: ClassVar[bool] = False
    #: What is missing, for backends that never run here.
    lacks: ClassVar[Optional[str]] = None

    @classmethod
    def supported(cls, arch: int) -> bool:
        """Tell whether the backend runs on an architecture, such as 90."""
        return arch in cls.archs


@dataclass(frozen=True)
class CutlassBf16Config(_Backend):
    """``cutlass_fused_moe`` with bfloat16 weights."""

    key: ClassVar[str] = "cutlass_bf16"
    archs: ClassVar[frozenset[int]] = frozenset({89, 90, 100, 103, 107, 110, 120, 121})
    runs_on_cpu: ClassVar[bool] = True

    @staticmethod
    def prepare_weights(
        w1_bf16: torch.Tensor,
        w2_bf16: torch.Tensor,
        *,
        num_local_experts: int,
        hidden_size: int,
        intermediate_size: int,
        device: Any = None,
    ) -> dict[str, torch.Tensor]:
        """Return the view of the weights: ``fc1_expert_weights`` and ``fc2_expert_weights``, contiguous.

        Parameters
        ----------
        w1_bf16 : torch.Tensor
            ``(num_local_experts, 2 * intermediate_size, hidden_size)`` bfloat16, rows [up ; gate].
        w2_bf16 : torch.Tensor
            ``(num_local_experts, hidden_size, intermediate_size)`` bfloat16.
        num_local_experts, hidden_size, intermediate_size : int
            Sizes that the weights must have.
        device : Any
            Where the view is; None: where the weights are.
        """
        return prepare_bf16_weights(w1_bf16, w2_bf16, num_local_experts, hidden_size, intermediate_size, device)


@dataclass(frozen=True)
class CutlassW4A16Config(_Backend):
    """``cutlass_fused_moe`` with MXFP4 weights and bfloat16 activations."""

    key: ClassVar[str] = "cutlass_w4a16"
    archs: ClassVar[frozenset[int]] = frozenset({90})
    runs_on_cpu: ClassVar[bool] = True

    @staticmethod
    def prepare_weights(
        w1_bf16: torch.Tensor,
        w2_bf16: torch.Tensor,
        *,
        num_local_experts: int,
        hidden_size: int,
        intermediate_size: int,
        device: Any = None,
    ) -> dict[str, torch.Tensor]:
        """Quantise bfloat16 weights, as those of :class:`CutlassBf16Config`, to MXFP4; return their view.

        Besides the weights, packed and interleaved, it has ``fc1_expert_scales`` and ``fc2_expert_scales``. The sizes
        are multiples of 128.
        """
        return prepare_w4a16_weights(w1_bf16, w2_bf16, num_local_experts, hidden_size, intermediate_size, device)


class CutlassConfig(_Backend):
    """Name of a backend that was replaced by :class:`CutlassBf16Config` and :class:`CutlassW4A16Config`."""

    key: ClassVar[str] = "cutlass"
    lacks = "a choice between CutlassBf16Config and CutlassW4A16Config, which replaced it"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        warnings.warn(
            "CutlassConfig is deprecated and supports nothing: use CutlassBf16Config or CutlassW4A16Config",
            DeprecationWarning,
            stacklevel=2,
        )


_BLACKWELL = "a Blackwell GPU and kernels for it, which this package does not have"


class _BlackwellBackend(_Backend):
    """Backend whose name can be configured, and that supports nothing here."""

    lacks = _BLACKWELL

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        object.__setattr__(self, "arguments", (args, kwargs))

    def prepare_weights(self, *args: Any, **kwargs: Any) -> Any:
        raise ArgumentError(f"{type(self).__name__}: backend must be one that runs here: it needs {_BLACKWELL}")


def _blackwell(name: str, key: str) -> type[_BlackwellBackend]:
    text = f"Not available here: needs {_BLACKWELL}."
    return type(name, (_BlackwellBackend,), {"key": key, "__doc__": text, "__module__": __name__})


B12xNvfp4Config = _blackwell("B12xNvfp4Config", "b12x_nvfp4")
B12xW4A16Config = _blackwell("B12xW4A16Config", "b12x_w4a16")
CuteDslConfig = _blackwell("CuteDslConfig", "cute_dsl_nvfp4")
TrtllmBf16Config = _blackwell("TrtllmBf16Config", "trtllm_bf16")
TrtllmFp4Config = _blackwell("TrtllmFp4Config", "trtllm_fp4")
TrtllmFp8BlockConfig = _blackwell("TrtllmFp8BlockConfig", "trtllm_fp8_block")
TrtllmFp8PerTensorConfig = _blackwell("TrtllmFp8PerTensorConfig", "trtllm_fp8_per_tensor")
TrtllmMxInt4Config = _blackwell("TrtllmMxInt4Config", "trtllm_mxint4")
