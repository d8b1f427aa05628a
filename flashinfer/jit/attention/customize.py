# SPDX-License-Identifier: Apache-2.0
"""Modules of users' own variants (docs/attention_variants.md).

``uri`` names the module: two variants must not share one. ``additional_*`` declare the variant's parameters, C++ types
as text; run() takes tensors, then scalars, after its own arguments. A tensor whose name starts with ``maybe`` may be
None.
"""

from __future__ import annotations

from typing import Any, Optional, Sequence

import torch

from ...errors import ArgumentError
from ..core import JitSpec
from .generate import AttentionModule, resolve_device
from .modules import check_backend
from .uri import get_batch_prefill_uri
from .variants import VariantParams, attention_sink_decl

__all__ = [
    "gen_customize_batch_attention_module",
    "gen_customize_batch_decode_module",
    "gen_customize_batch_pod_module",
    "gen_customize_batch_prefill_module",
    "gen_customize_pod_module",
    "gen_customize_single_decode_module",
    "gen_customize_single_prefill_module",
    "gen_batch_prefill_attention_sink_module",
]


def _pairs(what: str, names: Sequence[str], types: Sequence[str]) -> tuple[tuple[str, str], ...]:
    if len(names) != len(types):
        because = f"those of additional_{what}_names"
        raise ArgumentError(f"additional_{what}_dtypes has {len(types)} entries, expected {len(names)} ({because})")
    for name in names:
        if not name.isidentifier():
            raise ArgumentError(f"additional_{what}_names has {name!r}, expected the name of a variable")
    return tuple(zip(names, types, strict=True))


def _declared(
    tensor_names: Sequence[str], tensor_types: Sequence[str], scalar_names: Sequence[str], scalar_types: Sequence[str]
) -> VariantParams:
    return VariantParams(_pairs("tensor", tensor_names, tensor_types), _pairs("scalar", scalar_names, scalar_types))


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
) -> JitSpec:
    """``dtypes`` of q, kv and o, ``dims`` of qk and vo, ``variant`` its name and its text."""
    name, text = variant
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
    """One token of one request; the module has ``run``."""
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
    """A few tokens of each request; the module has ``plan``, ``run`` and ``workspace_size``."""
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
    """Many tokens of one request; the module has ``run``."""
    check_backend("gen_customize_single_prefill_module", backend)
    return _customized(
        "single_prefill", uri, (dtype_q, dtype_kv, dtype_o), (head_dim_qk, head_dim_vo),
        _declared(additional_tensor_names, additional_tensor_dtypes, additional_scalar_names, additional_scalar_dtypes),
        (variant_name, variant_decl), pos_encoding_mode, device,
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
    """Any number of tokens of each request; the module has ``plan``, ``ragged_run``, ``paged_run``, ``workspace_size``.

    Strides are always run-time values and the surface is always full: ``paged_kv_stride_mode`` and ``module_surface``
    are accepted for callers that name them.
    """
    check_backend("gen_customize_batch_prefill_module", backend)
    return _customized(
        "batch_prefill", uri, (dtype_q, dtype_kv, dtype_o), (head_dim_qk, head_dim_vo),
        _declared(additional_tensor_names, additional_tensor_dtypes, additional_scalar_names, additional_scalar_dtypes),
        (variant_name, variant_decl), pos_encoding_mode, device, idtype,
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
    """Batch prefill with a logit of each head that has no value: run takes ``sink`` and ``sm_scale``."""
    check_backend("gen_batch_prefill_attention_sink_module", backend)
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


# Mixed batches, and prefill together with decoding, run on the module of batch prefill.
gen_customize_batch_attention_module = gen_customize_batch_prefill_module
gen_customize_pod_module = gen_customize_batch_prefill_module
gen_customize_batch_pod_module = gen_customize_batch_prefill_module
