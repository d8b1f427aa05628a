# SPDX-License-Identifier: Apache-2.0
"""Templates and references of the NVFP4 key-value dequantisers."""

from __future__ import annotations

from typing import Any

import torch

from ..notation import template_of_text
from ..template import Axis, Const, Tensor, TraceDispatch, TraceTemplate, Var
from .quantization_blocks import e2m1_values, random_bytes, scale_values
from .shared import randint, seeded

__all__ = ["nvfp4_kv_dequantize_paged_trace", "nvfp4_kv_dequantize_trace"]


def _nvfp4_kv_dequantize_reference(
    fp4_data: torch.Tensor,
    block_scales: torch.Tensor,
    global_scale: torch.Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    **_: Any,
) -> torch.Tensor:
    scales = scale_values(block_scales, True).repeat_interleave(16, dim=-1)
    return (e2m1_values(fp4_data) * scales * global_scale.reshape(())).to(out_dtype)


def _nvfp4_init(
    *, num_rows: int, num_bytes: int = 128, num_scales: int = 0, num_elements: int = 0, device: Any = "cpu"
) -> dict[str, Any]:
    # 0x7F and 0xFF are NaN.
    return {
        "fp4_data": random_bytes(num_rows, num_bytes, device=device),
        "block_scales": random_bytes(num_rows, num_bytes // 8, device=device, high=127).view(torch.float8_e4m3fn),
        "global_scale": torch.rand(1, device=device),
    }


def _nvfp4_template(prefix: str, dtype: str) -> TraceTemplate:
    return TraceTemplate(
        "dequantize",
        axes={"num_rows": Var(), "num_bytes": Var(), "num_scales": Var(), "num_elements": Var()},
        inputs={
            "fp4_data": Tensor(
                ("num_rows", "num_bytes"), dtype="uint8", description="two e2m1 codes, low nibble first"
            ),
            "block_scales": Tensor(("num_rows", "num_scales"), dtype="float8_e4m3fn", description="of 16 elements"),
            "global_scale": Tensor((), dtype="float32"),
        },
        outputs={"out": Tensor(("num_rows", "num_elements"), dtype=dtype)},
        name_prefix=prefix,
        reference=_nvfp4_kv_dequantize_reference,
        init=_nvfp4_init,
        constraints=["num_elements == 2 * num_bytes", "num_elements == 16 * num_scales"],
        description="e2m1 * scale * global_scale.",
    )


_NVFP4 = {
    torch.bfloat16: _nvfp4_template("nvfp4_kv_dequantize", "bfloat16"),
    torch.float16: _nvfp4_template("nvfp4_kv_dequantize_fp16", "float16"),
}


def _choose_nvfp4(output_dtype: torch.dtype = torch.bfloat16, **_: Any) -> TraceTemplate:
    return _NVFP4[output_dtype]


nvfp4_kv_dequantize_trace = TraceDispatch(_choose_nvfp4, tuple(_NVFP4.values()))


def _gather(
    cache: torch.Tensor,
    scales: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """``out`` with the tokens below ``seq_lens`` taken from an NHD cache."""
    position, page_size = torch.arange(out.shape[1], device=out.device), cache.shape[1]
    is_there = position < seq_lens.unsqueeze(1)
    page = torch.where(is_there, block_tables.long()[:, position // page_size], 0)
    slot = (position % page_size).expand_as(page)
    made = _nvfp4_kv_dequantize_reference(cache[page, slot], scales.view(torch.uint8)[page, slot], scale, out.dtype)
    return torch.where(is_there[:, :, None, None], made, out)


def _paged_nhd_reference(
    paged_kv_cache: torch.Tensor,
    kv_cache_sf: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    output_k: torch.Tensor,
    output_v: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        _gather(paged_kv_cache[:, 0], kv_cache_sf[:, 0], block_tables, seq_lens, k_scale, output_k),
        _gather(paged_kv_cache[:, 1], kv_cache_sf[:, 1], block_tables, seq_lens, v_scale, output_v),
    )


def _paged_hnd_reference(
    paged_kv_cache: torch.Tensor,
    kv_cache_sf: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    output_k: torch.Tensor,
    output_v: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    cache, scales = paged_kv_cache.transpose(2, 3), kv_cache_sf.transpose(2, 3)
    return _paged_nhd_reference(cache, scales, block_tables, seq_lens, k_scale, v_scale, output_k, output_v)


def _nvfp4_kv_dequantize_paged_nhd_reference(
    paged_k_cache: torch.Tensor,
    paged_v_cache: torch.Tensor,
    k_scales: torch.Tensor,
    v_scales: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    output_k: torch.Tensor,
    output_v: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        _gather(paged_k_cache, k_scales, block_tables, seq_lens, k_scale, output_k),
        _gather(paged_v_cache, v_scales, block_tables, seq_lens, v_scale, output_v),
    )


def _nvfp4_kv_dequantize_paged_hnd_reference(
    paged_k_cache: torch.Tensor,
    paged_v_cache: torch.Tensor,
    k_scales: torch.Tensor,
    v_scales: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    output_k: torch.Tensor,
    output_v: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    k, v, k_sf, v_sf = (part.transpose(1, 2) for part in (paged_k_cache, paged_v_cache, k_scales, v_scales))
    arguments = (block_tables, seq_lens, k_scale, v_scale, output_k, output_v)
    return _nvfp4_kv_dequantize_paged_nhd_reference(k, v, k_sf, v_sf, *arguments)


def _paged_init(
    *,
    batch_size: int,
    head_dim: int = 128,
    num_heads: int = 2,
    max_seq_len: int = 0,
    num_pages: int = 0,
    num_columns: int = 0,
    device: Any = "cpu",
) -> dict[str, Any]:
    page_size, pages, tokens = 16, 2 * batch_size + 1, 32
    shape = (pages, 2, page_size, num_heads)
    out = torch.full((batch_size, tokens, num_heads, head_dim), 7.0, dtype=torch.bfloat16, device=device)
    return {
        "paged_kv_cache": random_bytes(*shape, head_dim // 2, device=device),
        "kv_cache_sf": random_bytes(*shape, head_dim // 16, device=device, high=127).view(torch.float8_e4m3fn),
        "block_tables": torch.randperm(pages, device=device)[: 2 * batch_size].int().view(batch_size, 2),
        "seq_lens": torch.randint(0, tokens + 1, (batch_size,), dtype=torch.int32, device=device),
        "k_scale": torch.rand(1, device=device),
        "v_scale": torch.rand(1, device=device),
        "output_k": out,
        "output_v": out.clone(),
    }


def _nvfp4_kv_dequantize_paged_nhd_init(
    *,
    batch_size: int,
    max_seq_len: int,
    num_heads: int,
    k_head_dim: int = 128,
    v_head_dim: int = 128,
    k_packed_dim: int = 0,
    v_packed_dim: int = 0,
    k_scale_dim: int = 0,
    v_scale_dim: int = 0,
    num_pages: int = 0,
    page_size: int = 16,
    block_table_stride: int = 0,
    scalar: int = 1,
    kv_layout: str = "NHD",
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    g, heads_first = seeded(seed, device), kv_layout == "HND"
    columns = block_table_stride or -(-max_seq_len // page_size)
    num_pages = max(num_pages, batch_size * columns)
    order = (num_heads, page_size) if heads_first else (page_size, num_heads)
    dims = (k_head_dim, v_head_dim)
    codes = tuple(randint(g, 256, num_pages, *order, dim // 2).to(torch.uint8) for dim in dims)
    scales = tuple(randint(g, 127, num_pages, *order, dim // 16).to(torch.uint8) for dim in dims)  # 127 is NaN
    tables = torch.randperm(num_pages, generator=g, device=device)[: batch_size * columns]
    k_scale, v_scale = torch.rand(2, scalar, generator=g, device=device)
    rows = (batch_size, max_seq_len, num_heads)
    return {
        "paged_kv_cache": codes,
        "kv_cache_sf": tuple(part.view(torch.float8_e4m3fn) for part in scales),
        "block_tables": tables.int().view(batch_size, columns),
        "seq_lens": randint(g, max_seq_len + 1, batch_size),
        "k_scale": k_scale,
        "v_scale": v_scale,
        "output_k": torch.zeros(*rows, k_head_dim, dtype=torch.bfloat16, device=device),
        "output_v": torch.zeros(*rows, v_head_dim, dtype=torch.bfloat16, device=device),
        "kv_layout": kv_layout,
    }


def _nvfp4_kv_dequantize_paged_hnd_init(
    *,
    batch_size: int,
    max_seq_len: int,
    num_heads: int,
    k_head_dim: int = 128,
    v_head_dim: int = 128,
    k_packed_dim: int = 0,
    v_packed_dim: int = 0,
    k_scale_dim: int = 0,
    v_scale_dim: int = 0,
    num_pages: int = 0,
    page_size: int = 16,
    block_table_stride: int = 0,
    scalar: int = 1,
    kv_layout: str = "HND",
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    return _nvfp4_kv_dequantize_paged_nhd_init(
        batch_size=batch_size,
        max_seq_len=max_seq_len,
        num_heads=num_heads,
        k_head_dim=k_head_dim,
        v_head_dim=v_head_dim,
        num_pages=num_pages,
        page_size=page_size,
        block_table_stride=block_table_stride,
        scalar=scalar,
        kv_layout=kv_layout,
        device=device,
        seed=seed,
    )


_PAGED_AXES: dict[str, Axis] = {
    "batch_size": Var(),
    "max_seq_len": Var("tokens an output row has room for"),
    "num_pages": Var(),
    "num_columns": Var("pages a request may have"),
    "two": Const("keys, then values", abbrev="", value=2),
    "page_size": Const(abbrev="ps"),
    "num_heads": Const(abbrev="h"),
    "k_head_dim": Const(abbrev="dk"),
    "v_head_dim": Const(abbrev="dv"),
    "k_bytes": Const("half of k_head_dim", abbrev=""),
    "k_scales": Const("one for 16 elements of a head", abbrev=""),
}


def _stacked(layout: str) -> TraceTemplate:
    """A cache that is one tensor, keys before values."""
    order = ("page_size", "num_heads") if layout == "NHD" else ("num_heads", "page_size")
    outputs = {part: ("batch_size", "max_seq_len", "num_heads", f"{part}_head_dim") for part in "kv"}
    return TraceTemplate(
        "dequantize",
        axes=_PAGED_AXES,
        inputs={
            "paged_kv_cache": Tensor(("num_pages", "two", *order, "k_bytes"), dtype="uint8"),
            "kv_cache_sf": Tensor(("num_pages", "two", *order, "k_scales"), dtype="float8_e4m3fn"),
            "block_tables": Tensor(("batch_size", "num_columns"), dtype="int32", description="pages of a request"),
            "seq_lens": Tensor(("batch_size",), dtype="int32"),
            "k_scale": Tensor((), dtype="float32"),
            "v_scale": Tensor((), dtype="float32"),
            **{f"output_{part}": Tensor(dims, description="overwritten") for part, dims in outputs.items()},
        },
        outputs={
            part: Tensor(dims, param=f"output_{part}", dtype_from=f"output_{part}", description="tokens below seq_lens")
            for part, dims in outputs.items()
        },
        name_prefix=f"nvfp4_kv_dequantize_paged_stacked{'' if layout == 'NHD' else '_hnd'}",
        reference=_paged_nhd_reference if layout == "NHD" else _paged_hnd_reference,
        init=_paged_init if layout == "NHD" else None,
        description="Pages of an NVFP4 cache to dense rows: e2m1 * scale * global scale.",
    )


def _pair(layout: str, **rest: Any) -> TraceTemplate:
    """The published form: keys and values are a pair."""
    order = "page_size, num_heads" if layout == "NHD" else "num_heads, page_size"
    rows = "batch_size, max_seq_len, num_heads"
    outputs = f"output_k[{rows}, k_head_dim]{{}}; output_v[{rows}, v_head_dim]{{}}"
    return template_of_text(
        f"nvfp4_kv_dequantize_paged{'' if layout == 'NHD' else '_hnd'}"
        "_h{num_heads}_dk{k_head_dim}_dv{v_head_dim}_ps{page_size}",
        "dequantize_fp4",
        var="batch_size max_seq_len k_packed_dim v_packed_dim k_scale_dim v_scale_dim num_pages block_table_stride "
        "scalar",
        inputs=f"paged_k_cache[num_pages, {order}, k_packed_dim]<-paged_kv_cache[0]:uint8;"
        f"paged_v_cache[num_pages, {order}, v_packed_dim]<-paged_kv_cache[1]:uint8;"
        f"k_scales[num_pages, {order}, k_scale_dim]<-kv_cache_sf[0]:float8_e4m3fn;"
        f"v_scales[num_pages, {order}, v_scale_dim]<-kv_cache_sf[1]:float8_e4m3fn;"
        "block_tables[batch_size, block_table_stride]:int32; seq_lens[batch_size]:int32;"
        f"k_scale[(scalar)]:float32; v_scale[(scalar)]:float32; {outputs.format('', '')}",
        outputs=outputs.format("<-output_k=output_k", "<-output_v=output_v"),
        constraints=[
            "k_head_dim == k_packed_dim * 2",
            "v_head_dim == v_packed_dim * 2",
            "k_head_dim == k_scale_dim * 16",
            "v_head_dim == v_scale_dim * 16",
            "block_table_stride * page_size >= max_seq_len",
            "scalar == 1",
        ],
        notes={"output_k": "tokens below seq_lens are written", "output_v": "tokens below seq_lens are written"},
        description="Pages of an NVFP4 cache to dense rows: e2m1 * scale * global scale.",
        **rest,
    )


_nvfp4_kv_dequantize_paged_nhd_trace = _pair(
    "NHD", reference=_nvfp4_kv_dequantize_paged_nhd_reference, init=_nvfp4_kv_dequantize_paged_nhd_init
)
_nvfp4_kv_dequantize_paged_hnd_trace = _pair(
    "HND", reference=_nvfp4_kv_dequantize_paged_hnd_reference, init=_nvfp4_kv_dequantize_paged_hnd_init
)
_PAGED = {
    (True, "NHD"): _stacked("NHD"),
    (True, "HND"): _stacked("HND"),
    (False, "NHD"): _nvfp4_kv_dequantize_paged_nhd_trace,
    (False, "HND"): _nvfp4_kv_dequantize_paged_hnd_trace,
}


def _choose_paged(paged_kv_cache: Any = None, kv_layout: str = "NHD", **_: Any) -> TraceTemplate:
    return _PAGED[not isinstance(paged_kv_cache, (tuple, list)), kv_layout]


nvfp4_kv_dequantize_paged_trace = TraceDispatch(_choose_paged, tuple(_PAGED.values()))
