# SPDX-License-Identifier: Apache-2.0
"""Names of axes: those of published GEMM templates, and what ``init`` of every template takes."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import Any, Iterator

import pytest
import torch

from flashinfer.trace import Scalar, TraceTemplate, Var, templates
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


def fours(template: TraceTemplate, with_optional: bool) -> dict[str, Any]:
    """Return arguments in which every axis is 4 and every number is 1."""
    made: dict[str, Any] = {}
    for name, value in template.inputs.items():
        if value.optional and not with_optional:
            continue
        key = value.param or name
        if isinstance(value, Scalar):
            made[key] = 1 if "int" in value.dtype else True if value.dtype == "bool" else 1.0
            continue
        x = torch.empty([4] * len(value.dim_names), dtype=torch.bfloat16, device="meta")
        if value.tuple_idx is not None:
            several = list(made.get(key, ()))
            several += [None] * (value.tuple_idx + 1 - len(several))
            several[value.tuple_idx] = x
            made[key] = tuple(several)
        else:
            made[key] = x
    return made


@pytest.mark.parametrize("with_optional", [False, True])
def test_every_definition_of_fours(with_optional):
    """Check that every template defines a call whose axes are 4 and whose numbers are 1.

    Sizes that a template fixes yield to the tensors; a const axis that no input has is a parameter of the function.
    """
    raised = {}
    for template in all_templates():
        given = fours(template, with_optional)
        named = {axis for axis in template.axes if axis in inspect.signature(template.reference).parameters}
        of_parameters = dict.fromkeys(named - given.keys() - template.inputs.keys(), 4)
        try:
            made = TraceTemplate.build_fi_trace_fn(template, template.prefix)(**of_parameters, **given)
        except Exception as error:
            raised[template.prefix] = str(error)
        else:
            assert made["axes"].keys() == template.axes.keys()
    assert not raised


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
