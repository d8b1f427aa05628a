# SPDX-License-Identifier: Apache-2.0
"""Templates and references of ``flashinfer.quantization``; those of the NVFP4 cache have a file of their own."""

from __future__ import annotations

import itertools
from typing import Any, Optional

import torch

from ..notation import template_of_text
from ..template import Axis, Scalar, Tensor, TraceDispatch, TraceTemplate, Var
from .quantization_blocks import dequantize, e2m1_values, mxfp8_blocks, padded_scales, random_bytes, scale_values
from .quantization_nvfp4 import nvfp4_kv_dequantize_paged_trace, nvfp4_kv_dequantize_trace
from .shared import normal, seeded

__all__ = [
    "block_scale_interleave_trace",
    "e2m1_and_ufp8sf_scale_to_float_trace",
    "mxfp4_dequantize_host_trace",
    "mxfp4_dequantize_trace",
    "mxfp8_dequantize_host_trace",
    "mxfp8_quantize_dispatch",
    "mxfp8_quantize_layout_trace",
    "mxfp8_quantize_trace",
    "nvfp4_kv_dequantize_paged_trace",
    "nvfp4_kv_dequantize_trace",
    "packbits_trace",
    "segment_packbits_trace",
    "shuffle_matrix_a_trace",
    "shuffle_matrix_sf_a_trace",
]


# Bits -----------------------------------------------------------------------------------------------------------------


def _packbits_reference(x: torch.Tensor, **_: Any) -> torch.Tensor:
    bits = torch.nn.functional.pad((x != 0).flatten(), (0, -x.numel() % 8))
    places = 1 << torch.arange(7, -1, -1, device=x.device)
    return (bits.view(-1, 8) * places).sum(dim=1).to(torch.uint8)


def _packbits_little_reference(x: torch.Tensor, **_: Any) -> torch.Tensor:
    bits = torch.nn.functional.pad((x != 0).flatten(), (0, -x.numel() % 8))
    places = 1 << torch.arange(8, device=x.device)
    return (bits.view(-1, 8) * places).sum(dim=1).to(torch.uint8)


def _segment_packbits_reference(x: torch.Tensor, indptr: torch.Tensor, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    edges = indptr.tolist()
    parts = [_packbits_reference(x[a:b]) for a, b in itertools.pairwise(edges)]
    packed = torch.cat(parts) if parts else x.new_empty(0, dtype=torch.uint8)
    lengths = torch.tensor([0, *(part.numel() for part in parts)], device=x.device)
    return packed, lengths.cumsum(0).to(torch.int32)


def _segment_packbits_little_reference(
    x: torch.Tensor, indptr: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    packed, offsets = _segment_packbits_reference(x, indptr)
    places = torch.arange(8, device=x.device)
    bits = packed.unsqueeze(1) >> places & 1  # the same bits, read from the other end
    return (bits << (7 - places)).sum(dim=1).to(torch.uint8), offsets


def _segments_init(*, num_bits: int, num_edges: int = 4, num_bytes: int = 0, device: Any = "cpu") -> dict[str, Any]:
    edges = torch.linspace(0, num_bits, num_edges, device=device).int()
    return {"x": torch.rand(num_bits, device=device) < 0.5, "indptr": edges}


def _packbits_template(order: str, rank: int) -> TraceTemplate:
    dims = ("num_bits",) if rank == 1 else tuple(f"dim{i}" for i in range(rank))
    axes: dict[str, Axis] = {name: Var() for name in dims}
    return TraceTemplate(
        "packbits",
        axes={**axes, "num_bytes": Var("elements over eight, rounded up")},
        inputs={"x": Tensor(dims)},
        outputs={"packed": Tensor(("num_bytes",), dtype="uint8")},
        name_prefix=f"packbits{'' if order == 'big' else '_little'}{'' if rank == 1 else f'_{rank}d'}",
        reference=_packbits_reference if order == "big" else _packbits_little_reference,
        description=f"Elements that are not zero, as bits, the {'highest' if order == 'big' else 'lowest'} bit first.",
    )


_PACKBITS = {
    (order, rank): _packbits_template(order, rank) for order in ("big", "little") for rank in (1, 0, 2, 3, 4, 5)
}


def _choose_packbits(x: Any = None, bitorder: str = "big", **_: Any) -> TraceTemplate:
    return _PACKBITS[bitorder, x.ndim]


packbits_trace = TraceDispatch(_choose_packbits, tuple(_PACKBITS.values()))

_SEGMENT_PACKBITS = {
    order: TraceTemplate(
        "packbits",
        axes={"num_bits": Var(), "num_edges": Var("segments and one more"), "num_bytes": Var("of all segments")},
        inputs={"x": Tensor(("num_bits",)), "indptr": Tensor(("num_edges",), dtype="int32")},
        outputs={
            "packed": Tensor(("num_bytes",), dtype="uint8"),
            "new_indptr": Tensor(("num_edges",), dtype="int32", description="byte offsets"),
        },
        name_prefix=prefix,
        reference=reference,
        init=_segments_init,
        description="packbits of each segment, which starts on a byte of its own.",
    )
    for order, prefix, reference in (
        ("big", "segment_packbits", _segment_packbits_reference),
        ("little", "segment_packbits_little", _segment_packbits_little_reference),
    )
}


def _choose_segment_packbits(bitorder: str = "big", **_: Any) -> TraceTemplate:
    return _SEGMENT_PACKBITS[bitorder]


segment_packbits_trace = TraceDispatch(_choose_segment_packbits, tuple(_SEGMENT_PACKBITS.values()))


# MXFP8 ----------------------------------------------------------------------------------------------------------------


def _mxfp8_quantize_reference(
    input: torch.Tensor,
    is_sf_swizzled_layout: bool = True,
    alignment: int = 32,
    enable_pdl: Optional[bool] = None,
    backend: str = "cuda",
    sf_swizzle_layout: Optional[int] = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    padded = torch.nn.functional.pad(input, (0, -input.shape[-1] % alignment))
    values, scales = _mxfp8_quantize_layout_reference(padded, is_sf_swizzled_layout, sf_swizzle_layout)
    return values.view(torch.float8_e4m3fn), scales


def _mxfp8_quantize_layout_reference(
    input: torch.Tensor, is_sf_swizzled_layout: bool = True, sf_swizzle_layout: Optional[int] = None, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    values, scales = mxfp8_blocks(input)
    layout = sf_swizzle_layout if sf_swizzle_layout is not None else 0 if is_sf_swizzled_layout else 2
    return values, padded_scales(scales, int(layout))


def _mxfp8_dequantize_host_reference(
    input: torch.Tensor,
    scale_tensor: torch.Tensor,
    is_sf_swizzled_layout: bool = True,
    sf_swizzle_layout: Optional[int] = None,
    **_: Any,
) -> torch.Tensor:
    layout = sf_swizzle_layout if sf_swizzle_layout is not None else 0 if is_sf_swizzled_layout else 2
    values = input.view(torch.float8_e4m3fn).float()
    return dequantize(values, scale_values(scale_tensor, False), 32, int(layout))


def _mxfp8_quantize_init(
    *, M: int, K: int = 4096, num_scale_elems: int = 0, device: Any = "cuda", seed: int = 0
) -> dict[str, Any]:
    return {"input": normal(seeded(seed, device), M, K)}


def _mxfp8_init(*, num_rows: int, num_cols: int = 128, num_scales: int = 0, device: Any = "cpu") -> dict[str, Any]:
    return {"input": torch.randn(num_rows, num_cols, device=device)}


def _mxfp8_dequantize_init(
    *, num_rows: int, num_cols: int = 128, num_scales: int = 0, device: Any = "cpu"
) -> dict[str, Any]:
    scales = random_bytes(num_rows, num_cols // 32, device=device, low=100, high=140)
    return {
        "input": random_bytes(num_rows, num_cols, device=device, high=127),  # 0x7F is NaN
        "scale_tensor": padded_scales(scales, 0),
    }


_MATRIX = ("num_rows", "num_cols")
_ROWS: dict[str, Axis] = {"num_rows": Var(), "num_cols": Var()}
_BLOCKS: dict[str, Axis] = {**_ROWS, "num_scales": Var("with the padding of the layout")}
_SCALES = Tensor(("num_scales",), dtype="uint8", description="ue8m0, one for 32 elements of a row")
_SWIZZLED = Scalar("bool", description="scales in tiles of 128 x 4, else row by row")
_LAYOUT = Scalar("int32", optional=True, description="0: tiles of 128 x 4, 1: of 8 x 4, 2: row by row")

mxfp8_quantize_trace = template_of_text(
    "mxfp8_quantize_k{K}",
    "quantization",
    var="M num_scale_elems",
    inputs="input[M, K]",
    outputs="quantized[M, K]:float8_e4m3fn; scales[num_scale_elems]:uint8",
    reference=_mxfp8_quantize_reference,
    init=_mxfp8_quantize_init,
    description="e4m3 with a power of two for 32 elements of a row, scales in tiles of 128 x 4.",
)
mxfp8_quantize_layout_trace = TraceTemplate(
    "quantize",
    axes=_BLOCKS,
    inputs={"input": Tensor(_MATRIX), "is_sf_swizzled_layout": _SWIZZLED, "sf_swizzle_layout": _LAYOUT},
    outputs={"out": Tensor(_MATRIX, dtype="uint8", description="e4m3"), "scales": _SCALES},
    name_prefix="mxfp8_quantize_layout",
    reference=_mxfp8_quantize_layout_reference,
    init=_mxfp8_init,
    description="e4m3 with a power of two for 32 elements of a row.",
)


def _choose_mxfp8(
    input: Any = None, is_sf_swizzled_layout: bool = True, sf_swizzle_layout: Any = None, **_: Any
) -> TraceTemplate:
    """The published definition has scales in tiles of 128 x 4; the other layouts are ours."""
    is_published = is_sf_swizzled_layout if sf_swizzle_layout is None else int(sf_swizzle_layout) == 0
    return mxfp8_quantize_trace if is_published else mxfp8_quantize_layout_trace


mxfp8_quantize_dispatch = TraceDispatch(_choose_mxfp8, (mxfp8_quantize_trace, mxfp8_quantize_layout_trace))
mxfp8_dequantize_host_trace = TraceTemplate(
    "dequantize",
    axes=_BLOCKS,
    inputs={
        "input": Tensor(_MATRIX, dtype="uint8", description="e4m3"),
        "scale_tensor": _SCALES,
        "is_sf_swizzled_layout": _SWIZZLED,
        "sf_swizzle_layout": _LAYOUT,
    },
    outputs={"out": Tensor(_MATRIX, dtype="float32")},
    name_prefix="mxfp8_dequantize_host",
    reference=_mxfp8_dequantize_host_reference,
    init=_mxfp8_dequantize_init,
    description="e4m3 * 2^(byte - 127).",
)


# FP4 ------------------------------------------------------------------------------------------------------------------


def _e2m1_reference(
    e2m1_tensor: torch.Tensor,
    ufp8_scale_tensor: torch.Tensor,
    global_scale_tensor: Optional[torch.Tensor] = None,
    sf_vec_size: int = 16,
    ufp8_type: int = 1,
    is_sf_swizzled_layout: bool = True,
    is_sf_8x4_layout: bool = False,
    **_: Any,
) -> torch.Tensor:
    layout = (1 if is_sf_8x4_layout else 0) if is_sf_swizzled_layout else 2
    scales = scale_values(ufp8_scale_tensor, ufp8_type == 1)
    return dequantize(e2m1_values(e2m1_tensor), scales, sf_vec_size, layout, global_scale_tensor)


def _e2m1_init(
    *, num_rows: int, num_bytes: int = 64, num_cols: int = 0, num_scales: int = 0, device: Any = "cpu"
) -> dict[str, Any]:
    return {
        "e2m1_tensor": random_bytes(num_rows, num_bytes, device=device),
        "ufp8_scale_tensor": padded_scales(random_bytes(num_rows, num_bytes // 8, device=device, high=127), 0),
        "global_scale_tensor": torch.rand(1, device=device),
    }


def _mxfp4_dequantize_reference(a_fp4: torch.Tensor, a_sf: torch.Tensor, sfLayout: int = 0, **_: Any) -> torch.Tensor:
    return dequantize(e2m1_values(a_fp4), scale_values(a_sf, False), 32, int(sfLayout))


def _mxfp4_init(
    *, num_rows: int, num_bytes: int = 64, num_cols: int = 0, num_scales: int = 0, device: Any = "cpu"
) -> dict[str, Any]:
    scales = random_bytes(num_rows, num_bytes // 16, device=device, low=100, high=140)
    return {"a_fp4": random_bytes(num_rows, num_bytes, device=device), "a_sf": padded_scales(scales, 0)}


def _mxfp4_dequantize_host_reference(
    weight: torch.Tensor, scale: torch.Tensor, group_size: int = 32, **_: Any
) -> torch.Tensor:
    values = e2m1_values(weight)
    return values * scale_values(scale, False).repeat_interleave(group_size, dim=-1)


def _mxfp4_host_init(
    *, num_rows: int, num_bytes: int = 64, num_cols: int = 0, num_groups: int = 0, device: Any = "cpu"
) -> dict[str, Any]:
    scale = random_bytes(num_rows, num_bytes // 16, device=device, low=100, high=140)
    return {"weight": random_bytes(num_rows, num_bytes, device=device), "scale": scale}


_FP4_AXES: dict[str, Axis] = {
    "num_rows": Var(),
    "num_bytes": Var(),
    "num_cols": Var("2 * num_bytes"),
    "num_scales": Var(),
}
_FP4 = Tensor(("num_rows", "num_bytes"), dtype="uint8", description="two e2m1 codes, low nibble first")

e2m1_and_ufp8sf_scale_to_float_trace = TraceTemplate(
    "dequantize",
    axes=_FP4_AXES,
    inputs={
        "e2m1_tensor": _FP4,
        "ufp8_scale_tensor": Tensor(("num_scales",), dtype="uint8"),
        "global_scale_tensor": Tensor((), dtype="float32", optional=True),
        "sf_vec_size": Scalar("int32", description="elements that share a scale"),
        "ufp8_type": Scalar("int32", description="scales are 1: e4m3, 0: ue8m0"),
        "is_sf_swizzled_layout": Scalar("bool"),
        "is_sf_8x4_layout": Scalar("bool"),
    },
    outputs={"out": Tensor(_MATRIX, dtype="float32")},
    name_prefix="e2m1_and_ufp8sf_scale_to_float",
    reference=_e2m1_reference,
    init=_e2m1_init,
    description="e2m1 * scale * global scale.",
)
mxfp4_dequantize_trace = TraceTemplate(
    "dequantize",
    axes=_FP4_AXES,
    inputs={"a_fp4": _FP4, "a_sf": _SCALES, "sfLayout": _LAYOUT},
    outputs={"out": Tensor(_MATRIX, dtype="float32")},
    name_prefix="mxfp4_dequantize",
    reference=_mxfp4_dequantize_reference,
    init=_mxfp4_init,
    description="e2m1 * 2^(byte - 127).",
)


def _choose_mxfp4_host(weight: Any = None, **_: Any) -> TraceTemplate:
    return _MXFP4_HOST[weight.ndim]


def _mxfp4_host_template(rank: int) -> TraceTemplate:
    lead = ("num_rows",) if rank == 2 else tuple(f"dim{i}" for i in range(rank - 1))
    axes: dict[str, Axis] = {name: Var() for name in lead}
    return TraceTemplate(
        "dequantize",
        axes={**axes, "num_bytes": Var(), "num_cols": Var("2 * num_bytes"), "num_groups": Var()},
        inputs={
            "weight": Tensor((*lead, "num_bytes"), dtype="uint8", description="two e2m1 codes, low nibble first"),
            "scale": Tensor((*lead, "num_groups"), dtype="uint8", description="ue8m0"),
            "group_size": Scalar("int32", description="elements that share a scale"),
        },
        outputs={"out": Tensor((*lead, "num_cols"), dtype="float32")},
        name_prefix="mxfp4_dequantize_host" if rank == 2 else f"mxfp4_dequantize_host_{rank}d",
        reference=_mxfp4_dequantize_host_reference,
        init=_mxfp4_host_init if rank == 2 else None,
        description="e2m1 * 2^(byte - 127), scales row by row.",
    )


_MXFP4_HOST = {rank: _mxfp4_host_template(rank) for rank in (2, 1, 3, 4)}
mxfp4_dequantize_host_trace = TraceDispatch(_choose_mxfp4_host, tuple(_MXFP4_HOST.values()))


# Layouts --------------------------------------------------------------------------------------------------------------


def _block_scale_interleave_reference(unswizzled_sf: torch.Tensor, **_: Any) -> torch.Tensor:
    matrices = unswizzled_sf if unswizzled_sf.ndim == 3 else unswizzled_sf.unsqueeze(0)
    parts = [padded_scales(matrix, 0) for matrix in matrices]
    return torch.cat(parts) if parts else unswizzled_sf.new_empty(0)


def _shuffle_matrix_a_reference(input_tensor: torch.Tensor, epilogue_tile_m: int, **_: Any) -> torch.Tensor:
    step = 4 if epilogue_tile_m % 128 == 0 else 2
    out = torch.empty_like(input_tensor)
    for row in range(input_tensor.shape[0]):
        inside = row % (8 * step)
        out[row - inside + inside // step + inside % step * 8] = input_tensor[row]
    return out


def _shuffle_matrix_sf_a_reference(
    input_tensor: torch.Tensor, epilogue_tile_m: int, num_elts_per_sf: int = 16, **_: Any
) -> torch.Tensor:
    return _block_scale_interleave_reference(_shuffle_matrix_a_reference(input_tensor, epilogue_tile_m))


def _interleave_template(rank: int) -> TraceTemplate:
    lead = ("num_experts",) if rank == 3 else ()
    axes: dict[str, Axis] = {name: Var() for name in (*lead, *_MATRIX)}
    return TraceTemplate(
        "interleave",
        axes={**axes, "num_scales": Var("with the padding")},
        inputs={"unswizzled_sf": Tensor((*lead, *_MATRIX))},
        outputs={"out": Tensor(("num_scales",), dtype_from="unswizzled_sf")},
        name_prefix="block_scale_interleave" if rank == 2 else "block_scale_interleave_experts",
        reference=_block_scale_interleave_reference,
        description="Scales from rows to tiles of 128 x 4, padded with zeros.",
    )


_INTERLEAVE = {rank: _interleave_template(rank) for rank in (2, 3)}


def _choose_interleave(unswizzled_sf: Any = None, **_: Any) -> TraceTemplate:
    return _INTERLEAVE[unswizzled_sf.ndim]


block_scale_interleave_trace = TraceDispatch(_choose_interleave, tuple(_INTERLEAVE.values()))

_TILE = Scalar("int32", description="blocks have 32 rows when 128 divides it, else 16")
shuffle_matrix_a_trace = TraceTemplate(
    "shuffle",
    axes=_ROWS,
    inputs={"input_tensor": Tensor(_MATRIX), "epilogue_tile_m": _TILE},
    outputs={"out": Tensor(_MATRIX, dtype_from="input_tensor")},
    name_prefix="shuffle_matrix_a",
    reference=_shuffle_matrix_a_reference,
    description="Rows reordered within blocks.",
)
shuffle_matrix_sf_a_trace = TraceTemplate(
    "shuffle",
    axes={**_ROWS, "num_scales": Var("with the padding")},
    inputs={
        "input_tensor": Tensor(_MATRIX),
        "epilogue_tile_m": _TILE,
        "num_elts_per_sf": Scalar("int32", description="elements that share a scale"),
    },
    outputs={"out": Tensor(("num_scales",), dtype_from="input_tensor")},
    name_prefix="shuffle_matrix_sf_a",
    reference=_shuffle_matrix_sf_a_reference,
    description="shuffle_matrix_a of scales, then block_scale_interleave.",
)
