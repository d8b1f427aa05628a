# SPDX-License-Identifier: Apache-2.0
"""The runner of each backend of a layer of experts; those that no machine serves here raise when one is made."""

from __future__ import annotations

from typing import Any, Sequence

from .._compat.unsupported import UnsupportedError
from . import backends
from .api import MoEActivationPack, MoEWeightPack
from .backends import _BLACKWELL
from .cutlass_runners import (
    CuTileBf16Runner,
    CuTileFp8PerTensorRunner,
    CutlassBf16Runner,
    CutlassFp8BlockRunner,
    CutlassFp8PerTensorRunner,
    CutlassHummingRunner,
    CutlassW4A8Runner,
    CutlassW4A16Runner,
)
from .runner import MoERunner, unpack_topk

__all__ = [
    "B12xNvfp4Runner",
    "B12xW4A16Runner",
    "CakeWarpDecodeRunner",
    "CuTileBf16Runner",
    "CuTileFp8PerTensorBf16Runner",
    "CuTileFp8PerTensorRunner",
    "CuTileMxfp4Bf16Runner",
    "CuTileMxfp4Mxfp8Runner",
    "CuTileMxfp4Runner",
    "CuTileMxfp8Bf16Runner",
    "CuTileMxfp8Runner",
    "CuTileNvfp4Bf16Runner",
    "CuTileNvfp4Runner",
    "CudnnFrostBf16Runner",
    "CudnnFrostMxfp8Mxfp4Runner",
    "CudnnFrostMxfp8Runner",
    "CudnnFrostNvfp4Runner",
    "CuteDslNvfp4Runner",
    "CutlassBf16Runner",
    "CutlassFp8BlockRunner",
    "CutlassFp8PerTensorRunner",
    "CutlassHummingRunner",
    "CutlassMxfp8Mxfp4Runner",
    "CutlassMxfp8Runner",
    "CutlassNvfp4Runner",
    "CutlassW4A16Runner",
    "CutlassW4A8Runner",
    "MoERunner",
    "PrimsTsRunner",
    "SM12xFp8Runner",
    "SM12xMxfp8Mxfp4Runner",
    "SM12xNvfp4Bf16Runner",
    "SM12xNvfp4Runner",
    "TrtllmBf16RoutedRunner",
    "TrtllmFp4RoutedRunner",
    "TrtllmFp8BlockRunner",
    "TrtllmFp8PerTensorRunner",
    "TrtllmMxInt4RoutedRunner",
    "unpack_topk",
]


class _BlackwellRunner(MoERunner):
    """Runner whose name can be imported; making one raises an error that names what is missing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise UnsupportedError(f"{type(self).__name__}: needs {_BLACKWELL}, which this machine lacks")

    def pack_inputs(self, activations: MoEActivationPack, weights: MoEWeightPack) -> list[Any]: ...  # type: ignore
    def get_valid_tactics(self, inputs: list[Any], profile: Any) -> Sequence[int]: ...  # type: ignore
    def forward(self, inputs: list[Any], tactic: Any = -1, do_preparation: bool = False, **kwargs: Any) -> Any: ...


def _blackwell(name: str, config: type) -> type[_BlackwellRunner]:
    text = f"Not available here: needs {_BLACKWELL}."
    return type(name, (_BlackwellRunner,), {"backend_key": config.key, "__doc__": text, "__module__": __name__})  # type: ignore[attr-defined]


B12xNvfp4Runner = _blackwell("B12xNvfp4Runner", backends.B12xNvfp4Config)
B12xW4A16Runner = _blackwell("B12xW4A16Runner", backends.B12xW4A16Config)
CakeWarpDecodeRunner = _blackwell("CakeWarpDecodeRunner", backends.CakeWarpDecodeConfig)
CuTileFp8PerTensorBf16Runner = _blackwell("CuTileFp8PerTensorBf16Runner", backends.CuTileFp8PerTensorBf16Config)
CuTileMxfp4Bf16Runner = _blackwell("CuTileMxfp4Bf16Runner", backends.CuTileMxfp4Bf16Config)
CuTileMxfp4Runner = _blackwell("CuTileMxfp4Runner", backends.CuTileMxfp4Config)
CuTileMxfp4Mxfp8Runner = _blackwell("CuTileMxfp4Mxfp8Runner", backends.CuTileMxfp4Mxfp8Config)
CuTileMxfp8Bf16Runner = _blackwell("CuTileMxfp8Bf16Runner", backends.CuTileMxfp8Bf16Config)
CuTileMxfp8Runner = _blackwell("CuTileMxfp8Runner", backends.CuTileMxfp8Config)
CuTileNvfp4Bf16Runner = _blackwell("CuTileNvfp4Bf16Runner", backends.CuTileNvfp4Bf16Config)
CuTileNvfp4Runner = _blackwell("CuTileNvfp4Runner", backends.CuTileNvfp4Config)
CudnnFrostBf16Runner = _blackwell("CudnnFrostBf16Runner", backends.CudnnFrostBf16Config)
CudnnFrostMxfp8Runner = _blackwell("CudnnFrostMxfp8Runner", backends.CudnnFrostMxfp8Config)
CudnnFrostMxfp8Mxfp4Runner = _blackwell("CudnnFrostMxfp8Mxfp4Runner", backends.CudnnFrostMxfp8Mxfp4Config)
CudnnFrostNvfp4Runner = _blackwell("CudnnFrostNvfp4Runner", backends.CudnnFrostNvfp4Config)
CuteDslNvfp4Runner = _blackwell("CuteDslNvfp4Runner", backends.CuteDslConfig)
CutlassMxfp8Runner = _blackwell("CutlassMxfp8Runner", backends.CutlassMxfp8Config)
CutlassMxfp8Mxfp4Runner = _blackwell("CutlassMxfp8Mxfp4Runner", backends.CutlassMxfp8Mxfp4Config)
CutlassNvfp4Runner = _blackwell("CutlassNvfp4Runner", backends.CutlassNvfp4Config)
PrimsTsRunner = _blackwell("PrimsTsRunner", backends.PrimsTsConfig)
SM12xFp8Runner = _blackwell("SM12xFp8Runner", backends.SM12xFp8Config)
SM12xMxfp8Mxfp4Runner = _blackwell("SM12xMxfp8Mxfp4Runner", backends.SM12xMxfp8Mxfp4Config)
SM12xNvfp4Bf16Runner = _blackwell("SM12xNvfp4Bf16Runner", backends.SM12xNvfp4Bf16Config)
SM12xNvfp4Runner = _blackwell("SM12xNvfp4Runner", backends.SM12xNvfp4Config)
TrtllmBf16RoutedRunner = _blackwell("TrtllmBf16RoutedRunner", backends.TrtllmBf16Config)
TrtllmFp4RoutedRunner = _blackwell("TrtllmFp4RoutedRunner", backends.TrtllmFp4Config)
TrtllmFp8BlockRunner = _blackwell("TrtllmFp8BlockRunner", backends.TrtllmFp8BlockConfig)
TrtllmFp8PerTensorRunner = _blackwell("TrtllmFp8PerTensorRunner", backends.TrtllmFp8PerTensorConfig)
TrtllmMxInt4RoutedRunner = _blackwell("TrtllmMxInt4RoutedRunner", backends.TrtllmMxInt4Config)

#: Runner of each backend; ``fused_moe.layer`` reads it at each call.
_BACKEND_RUNNERS: dict[type, type[MoERunner]] = {
    backends.B12xNvfp4Config: B12xNvfp4Runner,
    backends.B12xW4A16Config: B12xW4A16Runner,
    backends.CakeWarpDecodeConfig: CakeWarpDecodeRunner,
    backends.CuTileBf16Config: CuTileBf16Runner,
    backends.CuTileFp8PerTensorBf16Config: CuTileFp8PerTensorBf16Runner,
    backends.CuTileFp8PerTensorConfig: CuTileFp8PerTensorRunner,
    backends.CuTileMxfp4Bf16Config: CuTileMxfp4Bf16Runner,
    backends.CuTileMxfp4Config: CuTileMxfp4Runner,
    backends.CuTileMxfp4Mxfp8Config: CuTileMxfp4Mxfp8Runner,
    backends.CuTileMxfp8Bf16Config: CuTileMxfp8Bf16Runner,
    backends.CuTileMxfp8Config: CuTileMxfp8Runner,
    backends.CuTileNvfp4Bf16Config: CuTileNvfp4Bf16Runner,
    backends.CuTileNvfp4Config: CuTileNvfp4Runner,
    backends.CudnnFrostBf16Config: CudnnFrostBf16Runner,
    backends.CudnnFrostMxfp8Config: CudnnFrostMxfp8Runner,
    backends.CudnnFrostMxfp8Mxfp4Config: CudnnFrostMxfp8Mxfp4Runner,
    backends.CudnnFrostNvfp4Config: CudnnFrostNvfp4Runner,
    backends.CuteDslConfig: CuteDslNvfp4Runner,
    backends.CutlassBf16Config: CutlassBf16Runner,
    backends.CutlassFp8BlockConfig: CutlassFp8BlockRunner,
    backends.CutlassFp8PerTensorConfig: CutlassFp8PerTensorRunner,
    backends.CutlassHummingConfig: CutlassHummingRunner,
    backends.CutlassMxfp8Config: CutlassMxfp8Runner,
    backends.CutlassMxfp8Mxfp4Config: CutlassMxfp8Mxfp4Runner,
    backends.CutlassNvfp4Config: CutlassNvfp4Runner,
    backends.CutlassW4A16Config: CutlassW4A16Runner,
    backends.CutlassW4A8Config: CutlassW4A8Runner,
    backends.PrimsTsConfig: PrimsTsRunner,
    backends.SM12xFp8Config: SM12xFp8Runner,
    backends.SM12xMxfp8Mxfp4Config: SM12xMxfp8Mxfp4Runner,
    backends.SM12xNvfp4Bf16Config: SM12xNvfp4Bf16Runner,
    backends.SM12xNvfp4Config: SM12xNvfp4Runner,
    backends.TrtllmBf16Config: TrtllmBf16RoutedRunner,
    backends.TrtllmFp4Config: TrtllmFp4RoutedRunner,
    backends.TrtllmFp8BlockConfig: TrtllmFp8BlockRunner,
    backends.TrtllmFp8PerTensorConfig: TrtllmFp8PerTensorRunner,
    backends.TrtllmMxInt4Config: TrtllmMxInt4RoutedRunner,
}
