# SPDX-License-Identifier: Apache-2.0
"""Names of axes: those of published GEMM templates, and what ``init`` of every template takes."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import Any, Iterator

import pytest

from flashinfer.trace import TraceTemplate, Var, templates
from flashinfer.trace.template import TraceDispatch
from flashinfer.trace.templates import gemm, gemm_blackwell, gemm_grouped, norm
from flashinfer.trace.templates.fused_moe import cutlass_fused_moe_trace

#: Templates whose ``init`` is that of a published one, which has another name for an axis, and the axes.
OF_PUBLISHED = {
    "append_init": {"indptr_len"},
    "_mapped_init": {"nnz"},
    "_init_append": {"v_heads", "head_dim"},
}


def every_template(found: Any) -> Iterator[TraceTemplate]:
    if isinstance(found, TraceTemplate):
        yield found
    elif isinstance(found, TraceDispatch):
        for one in found.templates:
            yield from every_template(one)


def all_templates() -> list[TraceTemplate]:
    modules = [
        importlib.import_module(f"{templates.__name__}.{x.name}") for x in pkgutil.iter_modules(templates.__path__)
    ]
    found = [one for module in modules for value in vars(module).values() for one in every_template(value)]
    return list({id(one): one for one in found}.values())


def test_every_init_takes_the_variable_axes():
    missing = {}
    for template in all_templates():
        if template.init is None:
            continue
        parameters = inspect.signature(template.init).parameters
        if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            continue
        of_published = OF_PUBLISHED.get(getattr(template.init, "__name__", ""), set())
        axes = {axis for axis, kind in template.axes.items() if isinstance(kind, Var)}
        if axes - parameters.keys() - of_published:
            missing[template.prefix] = sorted(axes - parameters.keys())
    assert not missing


@pytest.mark.parametrize(
    "template, axes",
    [
        (gemm.mm_bf16_trace, {"M", "N", "K"}),
        (gemm.bmm_bf16_trace, {"batch_size", "M", "N", "K"}),
        (gemm.bmm_fp8_trace, {"batch_size", "M", "N", "K"}),
        (gemm.tinygemm_bf16_trace, {"M", "N", "K"}),
        (gemm.fp8_blockscale_gemm_sm90_trace, {"M", "N", "K", "K_div_128", "N_div_128"}),
        (gemm_blackwell.mm_fp4_trace, {"M", "N", "K", "one", "A_scale_size", "B_scale_size"}),
        (gemm_blackwell.mm_mxfp8_trace, {"M", "N", "K", "A_scale_size", "B_scale_size"}),
        (norm.fused_rmsnorm_silu_trace, {"num_tokens", "hidden_size"}),
    ],
)
def test_published_names(template, axes):
    assert set(template.axes) == axes
    if "M" in axes:
        sizes = {axis: 4 for axis in axes if axis not in ("N", "K", "K_div_128", "N_div_128")}
        made = template.init(**sizes, N=128, K=128, device="cpu")
        assert next(iter(made.values())).shape[-2] == 4
        assert "_n128_k128" in template.definition_name({"N": 128, "K": 128})


def test_axes_of_layers():
    assert {"seq_len", "num_local_experts"} <= set(cutlass_fused_moe_trace.templates[0].axes)
    assert {"total_rows", "N", "K"} <= set(gemm_grouped.segment_gemm_run_trace.axes)
