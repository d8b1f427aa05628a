# SPDX-License-Identifier: Apache-2.0
"""Generators of modules for user-defined variants (docs/attention_variants.md).

``uri`` is the name of the module and must be unique for each variant. ``additional_*`` declare the parameters of the
variant, with C++ types as strings; run() takes these tensors, then these scalars, after its own arguments. A tensor
whose name starts with ``maybe`` may be None.
"""

from __future__ import annotations

from typing import Any, Optional, Sequence

import torch

from ..._runtime.enums import PosEncodingMode
from ..._runtime.errors import ArgumentError
from ..core import JitSpec
from .generate import AttentionModule, resolve_device
from .key import check_backend
from .uri import get_batch_prefill_uri
from .variants import (
    VariantParams,
    attention_sink_decl,
    bidirectional_ranges_decl,
    check_sm90_form,
    has_sm90_form,
)

__all__ = [
    "gen_customize_batch_attention_module",
    "gen_customize_batch_decode_module",
    "gen_customize_batch_pod_module",
    "gen_customize_batch_prefill_module",
    "gen_customize_pod_module",
    "gen_customize_single_decode_module",
    "gen_customize_single_prefill_module",
    "bidirectional_ranges_arguments",
    "gen_batch_prefill_attention_sink_module",
    "gen_batch_prefill_bidirectional_ranges_module",
]


_POS_ENCODINGS = [mode.value for mode in PosEncodingMode]
#: Reserved names: fields that kernels read (attention/common/params.h), which a parameter would hide.
_TAKEN = frozenset(
    (
        "q", "k", "v", "o", "lse", "q_stride_n", "q_stride_h", "o_stride_n", "o_stride_h", "k_stride_page",
        "k_stride_n", "k_stride_h", "v_stride_page", "v_stride_n", "v_stride_h", "k_sf", "v_sf",
        "k_sf_stride_page", "k_sf_stride_n", "k_sf_stride_h", "v_sf_stride_page", "v_sf_stride_n",
        "v_sf_stride_h", "qo_indptr", "kv_indptr", "kv_indices", "last_page_len", "kv_lens", "qo_len", "kv_len",
        "page_size", "kv_heads", "group", "num_qo_heads", "num_kv_heads", "window_left", "mask_mode",
        "out_scale", "lse_scale", "get_qo_len", "get_kv_len",
    )
)  # fmt: skip


def _pairs(what: str, names: Sequence[str], types: Sequence[str]) -> tuple[tuple[str, str], ...]:
    if isinstance(names, str) or isinstance(types, str):
        raise TypeError(f"additional_{what}_names and additional_{what}_dtypes must be lists of str, got str")
    if len(names) != len(types):
        because = f"those of additional_{what}_names"
        raise ArgumentError(f"additional_{what}_dtypes must have {len(names)} entries ({because}), got {len(types)}")
    for name, kind in zip(names, types, strict=True):
        if not isinstance(name, str) or not name.isidentifier():
            raise ArgumentError(f"additional_{what}_names must be names of variables, got {name!r}")
        if name in _TAKEN:
            raise ArgumentError(f"additional_{what}_names must not have names that kernels use, got {name!r}")
        if not isinstance(kind, str):
            raise TypeError(f"additional_{what}_dtypes must be C++ types, got {kind!r} for {name}")
    return tuple(zip(names, types, strict=True))


def _declared(
    tensor_names: Sequence[str], tensor_types: Sequence[str], scalar_names: Sequence[str], scalar_types: Sequence[str]
) -> VariantParams:
    tensors, scalars = _pairs("tensor", tensor_names, tensor_types), _pairs("scalar", scalar_names, scalar_types)
    names = [name for name, _ in (*tensors, *scalars)]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ArgumentError(f"the parameters of a variant must have different names, got {twice[0]!r} twice")
    return VariantParams(tensors, scalars)


def _customized(
    kind: str,
    uri: str,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    dims: tuple[int, int],
    params: VariantParams,
    variant: tuple[str, str],
    pos_encoding_mode: int,
    device: Optional[str],
    idtype: torch.dtype = torch.int32,
    backend: str = "fa2",
) -> JitSpec:
    """Generate a module: ``dtypes`` of q, kv and o, ``dims`` of qk and vo, ``variant`` its name and C++ source."""
    name, text = variant
    for what, x in (("uri", uri), ("variant_name", name), ("variant_decl", text)):
        if not isinstance(x, str):
            raise TypeError(f"gen_customize_{kind}_module: {what} must be text, got a {type(x).__name__}")
    if has_sm90_form(text):
        check_sm90_form(f"gen_customize_{kind}_module", text)
    if pos_encoding_mode not in _POS_ENCODINGS:
        raise ArgumentError(
            f"gen_customize_{kind}_module: pos_encoding_mode must be a value of "
            f"flashinfer.utils.PosEncodingMode, got {pos_encoding_mode!r}"
        )
    return AttentionModule(
        kind,
        uri,
        *dtypes,
        *dims,
        params=params,
        variant_name=name,
        variant_decl=text,
        idtype=idtype,
        pos_encoding_mode=int(pos_encoding_mode),
        device=resolve_device(device),
        backend=backend,
    ).spec()


def gen_customize_single_decode_module(
    uri: str,
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    head_dim_qk: int,
    head_dim_vo: int,
    additional_tensor_names: Sequence[str],
    additional_tensor_dtypes: Sequence[str],
    additional_scalar_names: Sequence[str],
    additional_scalar_dtypes: Sequence[str],
    variant_name: str,
    variant_decl: str,
    pos_encoding_mode: int = 0,
    use_sliding_window: bool = False,
    use_logits_soft_cap: bool = False,
    device: Optional[str] = None,
) -> JitSpec:
    """Generate a module for one query token of one request. It has ``run``."""
    return _customized(
        "single_decode", uri, (dtype_q, dtype_kv, dtype_o), (head_dim_qk, head_dim_vo),
        _declared(additional_tensor_names, additional_tensor_dtypes, additional_scalar_names, additional_scalar_dtypes),
        (variant_name, variant_decl), pos_encoding_mode, device,
    )  # fmt: skip


def gen_customize_batch_decode_module(
    uri: str,
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    idtype: torch.dtype,
    head_dim_qk: int,
    head_dim_vo: int,
    additional_tensor_names: Sequence[str],
    additional_tensor_dtypes: Sequence[str],
    additional_scalar_names: Sequence[str],
    additional_scalar_dtypes: Sequence[str],
    variant_name: str,
    variant_decl: str,
    pos_encoding_mode: int = 0,
    use_sliding_window: bool = False,
    use_logits_soft_cap: bool = False,
    device: Optional[str] = None,
) -> JitSpec:
    """Generate a module for a few query tokens of each request. It has ``plan``, ``run`` and ``workspace_size``."""
    return _customized(
        "batch_decode", uri, (dtype_q, dtype_kv, dtype_o), (head_dim_qk, head_dim_vo),
        _declared(additional_tensor_names, additional_tensor_dtypes, additional_scalar_names, additional_scalar_dtypes),
        (variant_name, variant_decl), pos_encoding_mode, device, idtype,
    )  # fmt: skip


def gen_customize_single_prefill_module(
    backend: str,
    uri: str,
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    head_dim_qk: int,
    head_dim_vo: int,
    additional_tensor_names: Sequence[str],
    additional_tensor_dtypes: Sequence[str],
    additional_scalar_names: Sequence[str],
    additional_scalar_dtypes: Sequence[str],
    variant_name: str,
    variant_decl: str,
    pos_encoding_mode: int = 0,
    use_sliding_window: bool = False,
    use_logits_soft_cap: bool = False,
    use_fp16_qk_reduction: bool = False,
    fp8_enabled: bool = False,
    device: Optional[str] = None,
) -> JitSpec:
    """Generate a module for many query tokens of one request. It has ``run``."""
    check_backend("gen_customize_single_prefill_module", backend, has_fa3=True)
    return _customized(
        "single_prefill", uri, (dtype_q, dtype_kv, dtype_o), (head_dim_qk, head_dim_vo),
        _declared(additional_tensor_names, additional_tensor_dtypes, additional_scalar_names, additional_scalar_dtypes),
        (variant_name, variant_decl), pos_encoding_mode, device, backend=backend,
    )  # fmt: skip


def gen_customize_batch_prefill_module(
    backend: str,
    uri: str,
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    idtype: torch.dtype,
    head_dim_qk: int,
    head_dim_vo: int,
    additional_tensor_names: Sequence[str],
    additional_tensor_dtypes: Sequence[str],
    additional_scalar_names: Sequence[str],
    additional_scalar_dtypes: Sequence[str],
    variant_name: str,
    variant_decl: str,
    pos_encoding_mode: int = 0,
    use_sliding_window: bool = False,
    use_logits_soft_cap: bool = False,
    use_fp16_qk_reduction: bool = False,
    fp8_enabled: bool = False,
    paged_kv_stride_mode: str = "runtime",
    module_surface: str = "full",
    device: Optional[str] = None,
) -> JitSpec:
    """Generate a module for any number of query tokens of each request.

    The module has ``plan``, ``ragged_run``, ``paged_run`` and ``workspace_size``. Strides are always run-time values,
    and all functions are always exported: ``paged_kv_stride_mode`` and ``module_surface`` are accepted and ignored.
    """
    check_backend("gen_customize_batch_prefill_module", backend, has_fa3=True)
    return _customized(
        "batch_prefill", uri, (dtype_q, dtype_kv, dtype_o), (head_dim_qk, head_dim_vo),
        _declared(additional_tensor_names, additional_tensor_dtypes, additional_scalar_names, additional_scalar_dtypes),
        (variant_name, variant_decl), pos_encoding_mode, device, idtype, backend,
    )  # fmt: skip


def gen_batch_prefill_attention_sink_module(
    backend: str,
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    dtype_idx: torch.dtype,
    head_dim_qk: int,
    head_dim_vo: int,
    pos_encoding_mode: int,
    use_sliding_window: bool,
    device: Optional[str] = None,
) -> JitSpec:
    """Generate a batch prefill module with attention sinks; its run functions take ``sink`` and ``sm_scale``."""
    check_backend("gen_batch_prefill_attention_sink_module", backend, has_fa3=True)
    dtypes, dims = (dtype_q, dtype_kv, dtype_o, dtype_idx), (head_dim_qk, head_dim_vo)
    name = get_batch_prefill_uri(backend, *dtypes, *dims, pos_encoding_mode, use_sliding_window, False, False)
    sink: dict[str, Any] = {
        "additional_tensor_names": ["sink"],
        "additional_tensor_dtypes": ["float"],
        "additional_scalar_names": ["sm_scale"],
        "additional_scalar_dtypes": ["double"],
        "variant_decl": attention_sink_decl[backend],
    }
    return gen_customize_batch_prefill_module(
        *(backend, f"{name}_attention_sink", *dtypes, *dims),
        variant_name="AttentionSink",
        pos_encoding_mode=pos_encoding_mode,
        device=device,
        **sink,
    )


def bidirectional_ranges_arguments(
    backend: str,
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    dtype_idx: torch.dtype,
    head_dim_qk: int,
    head_dim_vo: int,
) -> list[Any]:
    """Return what ``gen_customize_batch_prefill_module`` takes after the backend."""
    sizes = (dtype_q, dtype_kv, dtype_o, dtype_idx, head_dim_qk, head_dim_vo)
    name = get_batch_prefill_uri(backend, *sizes, 0, False, False, False)
    variant = ("BidirectionalRanges", bidirectional_ranges_decl)
    return [f"{name}_bidirectional_ranges", *sizes, ["ranges"], ["int32_t"], ["sm_scale"], ["double"], *variant]


def gen_batch_prefill_bidirectional_ranges_module(
    backend: str,
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    dtype_idx: torch.dtype,
    head_dim_qk: int,
    head_dim_vo: int,
    device: Optional[str] = None,
) -> JitSpec:
    """Generate the module of the wrapper for bidirectional ranges; run takes ``ranges`` and ``sm_scale``."""
    check_backend("gen_batch_prefill_bidirectional_ranges_module", backend, has_fa3=False)
    sizes = (dtype_q, dtype_kv, dtype_o, dtype_idx, head_dim_qk, head_dim_vo)
    generate: Any = gen_customize_batch_prefill_module
    return generate(backend, *bidirectional_ranges_arguments(backend, *sizes), device=device)


# Mixed batches and POD (prefill together with decoding) run on the batch prefill module.


def gen_customize_batch_attention_module(
    uri: str,
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    idtype: torch.dtype,
    head_dim_qk: int,
    head_dim_vo: int,
    additional_tensor_names: Sequence[str],
    additional_tensor_dtypes: Sequence[str],
    additional_scalar_names: Sequence[str],
    additional_scalar_dtypes: Sequence[str],
    variant_name: str,
    variant_decl: str,
    pos_encoding_mode: int = 0,
    use_logits_soft_cap: bool = False,
    use_profiler: bool = False,
    device: Optional[str] = None,
) -> JitSpec:
    """Generate a module for mixed batches, which is a batch prefill module; profiling changes nothing in it."""
    parameters = (additional_tensor_names, additional_tensor_dtypes, additional_scalar_names, additional_scalar_dtypes)
    return gen_customize_batch_prefill_module(
        *("fa2", uri, dtype_q, dtype_kv, dtype_o, idtype, head_dim_qk, head_dim_vo, *parameters),
        variant_name=variant_name,
        variant_decl=variant_decl,
        pos_encoding_mode=pos_encoding_mode,
        use_logits_soft_cap=use_logits_soft_cap,
        device=device,
    )


def gen_customize_pod_module(
    uri: str,
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    dtype_idx: torch.dtype,
    head_dim: int,
    additional_tensor_names: Sequence[str],
    additional_tensor_dtypes: Sequence[str],
    additional_scalar_names: Sequence[str],
    additional_scalar_dtypes: Sequence[str],
    variant_name_p: str,
    variant_name_d: str,
    variant_decl: str,
    pos_encoding_mode_p: int = 0,
    use_sliding_window_p: bool = False,
    use_logits_soft_cap_p: bool = False,
    pos_encoding_mode_d: int = 0,
    use_sliding_window_d: bool = False,
    use_logits_soft_cap_d: bool = False,
    device: Optional[str] = None,
) -> JitSpec:
    """Generate a module for POD, prefill (``_p``) and decoding (``_d``) in one launch: a batch prefill module.

    One kernel computes both, so both have the same variant and position encoding.
    """
    for what, prefill, decode in (
        ("variant_name", variant_name_p, variant_name_d),
        ("pos_encoding_mode", pos_encoding_mode_p, pos_encoding_mode_d),
    ):
        if prefill != decode:
            raise ArgumentError(
                f"gen_customize_pod_module: {what}_d must equal {what}_p = {prefill!r} (one kernel computes both), got "
                f"{decode!r}"
            )
    parameters = (additional_tensor_names, additional_tensor_dtypes, additional_scalar_names, additional_scalar_dtypes)
    return gen_customize_batch_prefill_module(
        *("fa2", uri, dtype_q, dtype_kv, dtype_o, dtype_idx, head_dim, head_dim, *parameters),
        variant_name=variant_name_p,
        variant_decl=variant_decl,
        pos_encoding_mode=pos_encoding_mode_p,
        use_sliding_window=use_sliding_window_p or use_sliding_window_d,
        use_logits_soft_cap=use_logits_soft_cap_p or use_logits_soft_cap_d,
        device=device,
    )


gen_customize_batch_pod_module = gen_customize_pod_module
