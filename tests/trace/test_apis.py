# SPDX-License-Identifier: Apache-2.0
"""Every public API against its template: present, consistent with the signature, and as committed in fi_trace_out."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
from pathlib import Path
from typing import Any, Callable, Iterator

import pytest
import torch

import flashinfer
from flashinfer.aot import FAMILIES
from flashinfer.api_logging import _TRACE_REGISTRY
from flashinfer.dump import apis
from flashinfer.fi_trace import traced_functions
from flashinfer.trace import Const, TraceTemplate

from ..fresh_process import run_python
from . import example
from .schema import validate

PACKAGE = Path(flashinfer.__file__).parent


#: Functions of families that allocate, compute sizes, or forward to one that has a trace.
PREPARING = {
    *("compute_fp4_swizzled_layout_sf_size", "create_allreduce_fusion_workspace", "moe_a2a_active_rank_mask"),
    *("moe_a2a_get_workspace_size_per_rank", "moe_a2a_initialize", "moe_a2a_sanitize_expert_ids"),
    *("moe_a2a_wrap_payload_tensor_in_workspace", "pack_strided_memory", "decode_cp_a2a_allocate_mnnvl_workspace"),
    *("decode_cp_a2a_init_workspace", "decode_cp_a2a_lse_reduce_create_workspace", "decode_cp_a2a_workspace_size"),
    *("decode_cp_a2a_lse_reduce_workspace_size", "merge_ulysses_output_head_chunk", "pack_ulysses_qkv_head_chunk"),
    *("trtllm_allreduce_fusion", "trtllm_moe_allreduce_fusion", "trtllm_moe_finalize_allreduce_fusion"),
    *("trtllm_create_ipc_workspace_for_all_reduce_fusion", "trtllm_destroy_ipc_workspace_for_all_reduce_fusion"),
    *("trtllm_lamport_initialize", "trtllm_lamport_initialize_all"),
    *("all_gather_matmul", "prepare_all_gather_matmul", "quantized_all_reduce"),
    *("decide_ulysses_backend", "probe_ulysses_rank_topology", "resolve_ulysses_backend"),
}


def public_apis() -> Iterator[Callable[..., Any]]:
    for family in (family for family in FAMILIES if family != "api_log_stats"):  # private
        module = importlib.import_module(f"flashinfer.{family}")
        found = (getattr(module, name) for name in module.__all__)
        yield from (f for f in found if inspect.isfunction(f) and f.__name__ not in PREPARING)


def templates(api: Callable[..., Any]) -> list[TraceTemplate]:
    template = api._trace_template
    return [template] if isinstance(template, TraceTemplate) else list(template.templates)


PAIRS = [(api, template) for api in public_apis() if hasattr(api, "fi_trace") for template in templates(api)]

OURS = {name: api for name, api in traced_functions.items() if name.startswith("flashinfer.")}  # not those of tests
EVERY_PAIR = [(api, template) for api in OURS.values() for template in templates(api)]
#: Exported functions that are not operators.
NO_OPERATORS = {
    *("fast_decode_plan", "fi_trace", "gdn_fused_decode_step_supported", "get_fp4_quantization_module"),
    "is_gated_activation",
    *("supports_gated_residual_next_rmsnorm", "supports_gated_residual_rmsnorm", "supports_rmsnorm_sigmoid_gate"),
    *("next_positive_power_of_2", "warmup"),
}


def test_every_public_api_has_a_trace():
    apis = list(public_apis())
    assert len(apis) >= 14
    assert [api.__name__ for api in apis if not hasattr(api, "fi_trace")] == []


def decorated() -> Iterator[tuple[str, str, Any]]:
    """Yield file, function and ``trace=`` (or None) of every ``@flashinfer_api``, by parsing the source."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            for decorator in getattr(node, "decorator_list", ()):
                called = isinstance(decorator, ast.Call)
                if getattr(decorator.func if called else decorator, "id", None) == "flashinfer_api":
                    keywords = {keyword.arg: keyword.value for keyword in decorator.keywords} if called else {}
                    yield str(path.relative_to(PACKAGE)), node.name, keywords.get("trace")


def test_every_decorator_names_a_template():
    """Check methods and functions that no family lists, too. Functions that only prepare or forward a call
    need none.
    """
    found = list(decorated())
    assert len(found) > len(OURS) > 80
    preparing = {"__init__", "plan", "begin_forward", "forward", "fast_decode_plan"}
    preparing |= {"plan_alone", "plan_mask", "plan_with"}
    bare = [
        f"{path}: {name}"
        for path, name, trace in found
        if name not in preparing and (trace is None or getattr(trace, "value", trace) is None)
    ]
    assert bare == []


def test_logs_and_dumps_name_what_users_call():
    """Check that the log names public methods such as ``Wrapper.plan``, not helpers."""
    names = [name.rpartition(".")[2] for module, name in apis._apis if module.startswith("flashinfer.")]
    assert [name for name in names if name.startswith("_") and name != "__init__"] == []


def test_every_exported_function_has_a_trace():
    """Check all exported functions except placeholders (``_compat.unsupported``), which compute nothing."""
    exported = {name: f for name, f in vars(flashinfer).items() if inspect.isfunction(f) and name[0] != "_"}
    served = {name for name, f in exported.items() if f.__module__ != "flashinfer._compat.unsupported"}
    assert {name for name in served if not hasattr(exported[name], "fi_trace")} == NO_OPERATORS


def test_every_exported_wrapper_has_a_trace():
    """Check wrappers that inherit ``run`` too; in the oldest wrapper it is ``forward``."""
    wrappers = [w for name, w in vars(flashinfer).items() if inspect.isclass(w) and name.endswith("Wrapper")]
    assert len(wrappers) >= 14
    calls = [getattr(w, "run", None) or w.forward for w in wrappers]
    assert [call.__qualname__ for call in calls if not hasattr(call, "fi_trace")] == []


def test_what_a_call_must_give_is_a_parameter():
    """Check that each required input of a trace is a parameter of the API; values known from ``plan`` are optional."""
    for api, template in EVERY_PAIR:
        needed = {value.param or name for name, value in template.inputs.items() if not value.optional}
        assert needed <= inspect.signature(api).parameters.keys(), template.prefix


def test_parameters_exist():
    for api, template in PAIRS:
        signature = inspect.signature(api).parameters
        assert set(template.parameters()) <= signature.keys(), template.prefix
        outputs = {value.dtype_from for value in template.outputs.values()} - {None}
        assert outputs <= {*template.inputs, *signature}, template.prefix


def planned(api: Callable[..., Any]) -> set[str]:
    """Return what ``plan`` of a wrapper takes, with the name that definitions have for lengths of last pages."""
    owner = getattr(importlib.import_module(api.__module__), api.__qualname__.split(".")[0])
    plan = getattr(owner, "plan", None)
    return {"kv_last_page_len", *(inspect.signature(plan).parameters if plan else ())}


def check_reference(api: Callable[..., Any], template: TraceTemplate) -> None:
    signature, reference = inspect.signature(api).parameters, dict(inspect.signature(template.reference).parameters)
    (rest,) = (name for name, p in reference.items() if p.kind is p.VAR_KEYWORD)  # ignored, or passed on
    del reference[rest]
    by_position = [name for name, p in reference.items() if p.default is p.empty]
    named = [name for name in template.inputs if name in by_position]
    assert named == [name for name in by_position if name in template.inputs]
    known = {*template.parameters(), *template.inputs, *signature, "workspace_buffer"}
    known |= {axis for axis, kind in template.axes.items() if isinstance(kind, Const)}
    known |= {f"{output}_dtype" for output in template.outputs} | planned(api)
    known |= {name for form in templates(api) for name in form.inputs}
    known |= {"heads_first"}  # tells references that several forms share the layout
    assert reference.keys() <= known
    written = {value.param for value in template.outputs.values()}
    for name in reference.keys() & signature.keys() - written:
        if signature[name].default is None and not getattr(template.inputs.get(name), "optional", True):
            continue  # required in this form of the call only
        if name == "causal" and "causal" not in template.inputs:
            continue  # published definitions of prefill are causal
        assert reference[name].default == signature[name].default, name


def test_reference_takes_the_inputs_and_shares_the_defaults():
    assert len(EVERY_PAIR) > 250
    for api, template in EVERY_PAIR:
        try:
            check_reference(api, template)
        except AssertionError as error:
            raise AssertionError(f"{template.prefix}: {error}") from error


def test_check_takes_tolerances():
    for _, template in EVERY_PAIR:
        outputs = {name: torch.ones(2, 3) for name in template.outputs}
        assert template.check(outputs, outputs), template.prefix
        for limits in ({"rtol": 0.1, "atol": 0.1}, {"max_mismatch_pct": 5.0, "min_cos_sim": None}):
            assert template.check(outputs, outputs, **limits), template.prefix


def test_tags_name_the_published_modules():
    """Check tags, by which data sets are keyed: they name the published module, not our file."""
    for name in (
        "attention._core.BatchAttention.run",
        "cudnn.decode.cudnn_batch_decode_with_kv_cache",
        "cudnn.prefill.cudnn_batch_prefill_with_kv_cache",
        "decode.trtllm_batch_decode_with_kv_cache",
        "decode.xqa_batch_decode_with_kv_cache",
        "gemm.gemm_base.bmm_fp8",
        "gemm.gemm_base.fp8_blockscale_gemm_sm90",
        "gemm.gemm_base.mm_bf16",
        "gemm.routergemm.tinygemm_bf16",
        "mla._core.BatchMLAPagedAttentionWrapper.run",
        "norm.rmsnorm",
        "prefill.BatchPrefillWithPagedKVCacheWrapper.run",
        "prefill.trtllm_fmha_v2_prefill",
        "quantization.fp4_quantization.mxfp4_dequantize",
        "quantization.fp4_quantization.nvfp4_kv_dequantize_paged",
        "quantization.fp8_quantization.mxfp8_quantize",
        "topk_varlen.topk_varlen.top_k_varlen",
    ):
        assert f"flashinfer.{name}" in OURS, name


def test_registry_lists_each_template_once():
    entries = [entry for entry in _TRACE_REGISTRY if entry[0] in OURS.values()]
    assert {(func, template) for func, template, _ in entries} == set(EVERY_PAIR)
    labels = [(func, label) for func, _, label in entries]
    assert len(labels) == len(set(labels))
    for func, _, _ in entries:
        found = importlib.import_module(func.__module__)
        for part in func.__qualname__.split("."):
            found = getattr(found, part)
        assert inspect.unwrap(found) is inspect.unwrap(func)


def test_required_parameters_are_described():
    """Check that the definition describes the whole call: each argument is an input, an axis, or an output's buffer or
    dtype."""
    for api, template in PAIRS:
        known = {*template.parameters(), *template.axes, *(value.dtype_from for value in template.outputs.values())}
        required = [p.name for p in inspect.signature(api).parameters.values() if p.default is p.empty]
        assert set(required) - {"workspace", "metainfo"} <= known, template.prefix  # memory of a group is no data


def test_names_tell_templates_apart():
    prefixes = [template.prefix for api in OURS.values() for template in templates(api)]
    assert len(prefixes) == len(set(prefixes))


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> dict[str, bytes]:
    """Return every definition that the example makes, by the name of its file."""
    return example.write_all(tmp_path_factory.mktemp("definitions"))


def test_example_writes_the_committed_files(written):
    """Check texts and hashes; print what is new in full, because a hash tells nothing."""
    committed = {path.name: path.read_bytes() for path in example.OUT.iterdir()}
    before, now = (json.loads(files[example.HASHES]) for files in (committed, example.files_to_commit(written)))
    changed = [name for name in now if before.get(name) != now[name]]
    for name in changed[:3]:
        print(f"{name}:\n{written[name].decode()}")
    run = "run python tests/trace/example.py, and look at the definitions above"
    assert changed == [] and sorted(before) == sorted(now), run
    assert committed == example.files_to_commit(written), run


def test_a_changed_definition_is_found(written):
    """Check one that is committed in full and one that is not: one byte more, a file less."""
    files = example.files_to_commit(written)
    for name in (example.FULL[0], next(name for name in written if name not in example.FULL)):
        assert example.files_to_commit(written | {name: written[name] + b" "}) != files
    fewer = {name: text for name, text in written.items() if name != "top_p_sampling_v128256.json"}
    assert len(fewer) == len(written) - 1 and example.files_to_commit(fewer) != files


def test_example_docstring_lists_the_files():
    listed = [line.strip() for line in example.__doc__.splitlines() if line.strip().endswith(".json")]
    assert listed == sorted(path.name for path in example.OUT.iterdir())


def test_example_calls_every_api():
    assert {api.__name__ for api, _ in example.calls()} == {api.__name__ for api in public_apis()}


def test_definitions_are_valid(written):
    assert len(written) > 120
    for name, text in written.items():
        definition = json.loads(text)
        validate(definition)
        assert f"{definition['name']}.json" == name
        scope: dict[str, Any] = {}
        exec(definition["reference"], scope)
        assert list(inspect.signature(scope["run"]).parameters) == list(definition["inputs"]), name


def test_import_reads_no_source():
    """Check that source is read at the first trace only: turning functions into text is slow and needs the files."""
    code = (
        "import inspect, flashinfer.fi_trace\n"
        "def refuse(*_): raise SystemExit('inspect.getsource was called')\n"
        "inspect.getsource = inspect.getsourcelines = refuse\n"
        "import flashinfer.trace.templates.norm, flashinfer.trace.templates.scale\n"
    )
    run_python(["-c", code], check=True, cwd=PACKAGE.parent)


def test_definition_of_a_cuda_call_needs_no_gpu():
    made = flashinfer.scale.fi_trace(torch.empty(4, 8, device="meta"), 2.0)
    assert made["name"] == "scale_2d"
