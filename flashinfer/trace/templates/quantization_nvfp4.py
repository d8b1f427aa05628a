# SPDX-License-Identifier: Apache-2.0
"""Templates and references of the NVFP4 key-value dequantisers."""

from __future__ import annotations

from typing import Any, Callable

import torch

from ..template import Axis, Const, Tensor, TraceDispatch, TraceTemplate, Var
from .quantization_blocks import e2m1_values, random_bytes, scale_values

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


def _nvfp4_init(num_rows: int, num_bytes: int = 128, device: Any = "cpu") -> dict[str, Any]:
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


def _pair_nhd_reference(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_cache_sf: torch.Tensor,
    v_cache_sf: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    output_k: torch.Tensor,
    output_v: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        _gather(k_cache, k_cache_sf, block_tables, seq_lens, k_scale, output_k),
        _gather(v_cache, v_cache_sf, block_tables, seq_lens, v_scale, output_v),
    )


def _pair_hnd_reference(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_cache_sf: torch.Tensor,
    v_cache_sf: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    output_k: torch.Tensor,
    output_v: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values, key_scales, value_scales = (t.transpose(1, 2) for t in (k_cache, v_cache, k_cache_sf, v_cache_sf))
    arguments = (block_tables, seq_lens, k_scale, v_scale, output_k, output_v)
    return _pair_nhd_reference(keys, values, key_scales, value_scales, *arguments)


def _paged_init(batch_size: int, head_dim: int = 128, num_heads: int = 2, device: Any = "cpu") -> dict[str, Any]:
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
    "v_bytes": Const("half of v_head_dim", abbrev=""),
    "k_scales": Const("one for 16 elements of a head", abbrev=""),
    "v_scales": Const("one for 16 elements of a head", abbrev=""),
}


def _paged_template(prefix: str, layout: str, stacked: bool) -> TraceTemplate:
    order = ("page_size", "num_heads") if layout == "NHD" else ("num_heads", "page_size")
    cache: dict[str, Any] = {}
    if stacked:
        cache["paged_kv_cache"] = Tensor(("num_pages", "two", *order, "k_bytes"), dtype="uint8")
        cache["kv_cache_sf"] = Tensor(("num_pages", "two", *order, "k_scales"), dtype="float8_e4m3fn")
    else:
        for name, param, last, dtype in (
            ("cache", "paged_kv_cache", "bytes", "uint8"),
            ("cache_sf", "kv_cache_sf", "scales", "float8_e4m3fn"),
        ):
            for i, part in enumerate("kv"):
                dims = ("num_pages", *order, f"{part}_{last}")
                cache[f"{part}_{name}"] = Tensor(dims, param=param, tuple_idx=i, dtype=dtype)
    unused = {"v_bytes", "v_scales"} if stacked else {"two"}
    outputs = {part: ("batch_size", "max_seq_len", "num_heads", f"{part}_head_dim") for part in "kv"}
    references: dict[tuple[bool, str], Callable[..., Any]] = {
        (True, "NHD"): _paged_nhd_reference,
        (True, "HND"): _paged_hnd_reference,
        (False, "NHD"): _pair_nhd_reference,
        (False, "HND"): _pair_hnd_reference,
    }
    return TraceTemplate(
        "dequantize",
        axes={name: axis for name, axis in _PAGED_AXES.items() if name not in unused},
        inputs={
            **cache,
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
        name_prefix=prefix,
        reference=references[stacked, layout],
        init=_paged_init if (stacked, layout) == (True, "NHD") else None,
        description="Pages of an NVFP4 cache to dense rows: e2m1 * scale * global scale.",
    )


_PAGED = {
    (stacked, layout): _paged_template(
        f"nvfp4_kv_dequantize_paged{'' if stacked else '_pair'}{'' if layout == 'NHD' else '_hnd'}", layout, stacked
    )
    for stacked in (True, False)
    for layout in ("NHD", "HND")
}


def _choose_paged(paged_kv_cache: Any = None, kv_layout: str = "NHD", **_: Any) -> TraceTemplate:
    return _PAGED[not isinstance(paged_kv_cache, (tuple, list)), kv_layout]


nvfp4_kv_dequantize_paged_trace = TraceDispatch(_choose_paged, tuple(_PAGED.values()))
