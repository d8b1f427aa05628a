# SPDX-License-Identifier: Apache-2.0
"""``flashinfer.trace_apply``: ops replaced by solutions of the user."""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import types

import pytest
import torch

import flashinfer
import flashinfer.fused_moe
from flashinfer import trace_apply
from flashinfer._runtime.errors import ArgumentError
from flashinfer.trace import BuildSpec, Solution, SourceFile
from flashinfer.trace.apply import solutions
from flashinfer.trace.templates.attention import gqa_paged_decode_trace
from flashinfer.trace.templates.norm import fused_add_rmsnorm_trace, rmsnorm_trace
from flashinfer.trace_apply.adapt import (
    adapt_and_call,
    build_candidate_kwargs,
    extract_input_dtypes,
    output_dests,
)
from flashinfer.trace_apply.apply import bind_namespace, build_extractor_maps, extract_axes
from flashinfer.trace_apply.config import Definition
from flashinfer.trace_apply.loaders import load
from flashinfer.trace_apply.plan_capture import adapter_for, fetch_plan_kwargs, stash_plan_kwargs

from .programs import execute

RMSNORM = "flashinfer.norm.rmsnorm"


@pytest.fixture(autouse=True)
def restored():
    yield
    trace_apply.disable_apply()


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.bfloat16)


def sevens(hidden_states, weight):
    return torch.full_like(hidden_states, 7)


def test_a_matched_call_runs_the_solution():
    original = flashinfer.rmsnorm
    assert not trace_apply.is_enabled()
    assert trace_apply.enable_apply({"rmsnorm_h8": sevens}) == 1
    assert trace_apply.is_enabled()
    assert flashinfer.rmsnorm(ones(2, 8), ones(8)).eq(7).all()
    assert flashinfer.norm.rmsnorm(ones(2, 8), weight=ones(8)).eq(7).all()
    out = ones(2, 8)
    assert flashinfer.rmsnorm(ones(2, 8), ones(8), out=out) is out and out.eq(7).all()
    assert flashinfer.rmsnorm(ones(2, 16), ones(16)).eq(1).all(), "another definition: the original"
    counts = {"hit": 3, "fallback_no_candidate": 1, "fallback_unwarmed_in_capture": 0, "error": 0}
    assert trace_apply.stats() == {RMSNORM: counts}
    trace_apply.disable_apply()
    assert flashinfer.rmsnorm is original is flashinfer.norm.rmsnorm
    assert not trace_apply.is_enabled() and trace_apply.stats() == {}


def test_an_api_that_returns_a_list_does_so_with_a_solution():
    """Callers take the first element of what a layer of experts returns."""

    def solution(input, **_):
        return input + 6

    ids, weight = torch.zeros(2, 1, dtype=torch.int32), ones(1, 16, 8)
    call = {"token_selected_experts": ids, "token_final_scales": None, "fc1_expert_weights": weight}
    call |= {"input": ones(2, 8), "fc2_expert_weights": weight.mT[..., :8], "output_dtype": torch.bfloat16}
    trace_apply.enable_apply({"cutlass_fused_moe_topk1_e1_h8_i8": solution})
    result = flashinfer.fused_moe.cutlass_fused_moe(**call, quant_scales=None)
    assert isinstance(result, list) and len(result) == 1 and result[0].equal(torch.full_like(ones(2, 8), 7))
    out = ones(2, 8)
    assert flashinfer.fused_moe.cutlass_fused_moe(**call, quant_scales=None, output=out)[0] is out and out.eq(7).all()


def test_modules_that_imported_a_function_before_get_the_replacement(monkeypatch):
    program = types.ModuleType("a_program")
    program.rmsnorm = flashinfer.rmsnorm
    monkeypatch.setitem(sys.modules, "a_program", program)
    trace_apply.enable_apply({"rmsnorm_h8": sevens})
    assert program.rmsnorm(ones(1, 8), ones(8)).eq(7).all()
    trace_apply.disable_apply()
    assert program.rmsnorm is flashinfer.rmsnorm


def test_a_second_enable_replaces_the_first():
    trace_apply.enable_apply({"rmsnorm_h8": sevens})
    assert trace_apply.enable_apply({"rmsnorm_h16": sevens}) == 1
    assert flashinfer.rmsnorm(ones(1, 8), ones(8)).eq(1).all()
    assert flashinfer.rmsnorm(ones(1, 16), ones(16)).eq(7).all()


def test_a_solution_that_fails_raises():
    def fails(hidden_states, weight):
        raise KeyError("mine")

    trace_apply.enable_apply({"rmsnorm_h8": fails})
    with pytest.raises(KeyError, match="mine"):
        flashinfer.rmsnorm(ones(2, 8), ones(8))
    assert trace_apply.stats()[RMSNORM]["error"] == 1
    trace_apply.enable_apply({"rmsnorm_h8": lambda hidden_states, weight: None})
    with pytest.raises(ArgumentError, match=r"a candidate must return \['output'\], got None"):
        flashinfer.rmsnorm(ones(2, 8), ones(8))


def test_a_solution_may_call_the_op_that_it_replaces():
    trace_apply.enable_apply(
        {"rmsnorm_h8": lambda hidden_states, weight: 2 * flashinfer.rmsnorm(hidden_states, weight)}
    )
    assert flashinfer.rmsnorm(ones(2, 8), ones(8)).eq(2).all()


def test_an_argument_that_the_definition_lacks_is_passed_or_runs_the_original(caplog):
    """Check eps, which definitions of rmsnorm fix: a solution that does not take it computes something else."""
    trace_apply.enable_apply({"rmsnorm_h8": sevens})
    with caplog.at_level(logging.WARNING, "flashinfer"):
        assert flashinfer.rmsnorm(ones(2, 8), ones(8), eps=3.0).eq(0.5).all()
    assert "rmsnorm_h8: eps=3.0 is no input of the definition" in caplog.text
    trace_apply.enable_apply({"rmsnorm_h8": lambda hidden_states, weight, eps=1e-6: hidden_states * eps})
    assert flashinfer.rmsnorm(ones(2, 8), ones(8), eps=3.0).eq(3).all()


def test_ops_that_write_to_their_arguments():
    def solution(hidden_states, residual, weight):
        return hidden_states * 2, residual * 3

    trace_apply.enable_apply({"fused_add_rmsnorm_h8": solution})
    x, residual = ones(2, 8), ones(2, 8)
    assert flashinfer.fused_add_rmsnorm(x, residual, ones(8)) is None
    assert x.eq(2).all() and residual.eq(3).all()


def test_destination_passing_style():
    def solution(hidden_states, weight, output):
        output.fill_(5)

    arguments = {"template": rmsnorm_trace.templates[0], "fn": solution, "dps": True, "is_inplace": False}
    namespace = {"input": ones(2, 8), "weight": ones(8), "out": None}
    dests = output_dests(rmsnorm_trace.templates[0])
    result = adapt_and_call(namespace=namespace, dests=dests, **arguments)
    assert result.shape == (2, 8) and result.dtype == torch.bfloat16 and result.eq(5).all()
    out = ones(2, 8)
    assert adapt_and_call(namespace=namespace | {"out": out}, dests=dests, **arguments) is out
    assert adapt_and_call(namespace=namespace, dests=dests, positional=True, **arguments).eq(5).all()


def test_parts():
    namespace = bind_namespace(flashinfer.rmsnorm, (ones(2, 8),), {"weight": ones(8)})
    assert namespace["eps"] == 1e-6 and namespace["out"] is None
    template = rmsnorm_trace.templates[0]
    assert list(build_candidate_kwargs(template, namespace)) == ["hidden_states", "weight"]
    assert extract_input_dtypes(template, namespace) == {"hidden_states": "bfloat16", "weight": "bfloat16"}
    assert output_dests(fused_add_rmsnorm_trace) == {"output": "input", "residual": "residual"}
    maps = build_extractor_maps([template, gqa_paged_decode_trace])
    assert extract_axes(maps, namespace) == {"rmsnorm": {"batch_size": 2, "hidden_size": 8}}


def decode(page_size: int, **plan):
    """Plan two requests of two pages; return the wrapper and the arguments of run()."""
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    indptr, last = torch.tensor([0, 2, 4], dtype=torch.int32), torch.full((2,), 1, dtype=torch.int32)
    table = (indptr, torch.arange(4, dtype=torch.int32), last)
    wrapper.plan(*table, 4, 2, 64, page_size, q_data_type=torch.float16, kv_data_type=torch.float16, **plan)
    cache = tuple(torch.randn(4, page_size, 2, 64).half() for _ in "kv")
    return wrapper, torch.randn(2, 4, 64).half(), cache


def test_page_tables_of_plan_are_inputs_of_run():
    seen = {}

    def solution(q, k_cache, v_cache, kv_indptr, kv_indices, sm_scale, return_lse):
        seen.update(kv_indptr=kv_indptr, kv_indices=kv_indices, sm_scale=sm_scale)
        return gqa_paged_decode_trace.reference(q, k_cache, v_cache, kv_indptr, kv_indices, sm_scale)

    assert trace_apply.enable_apply({"gqa_paged_decode_h4_kv2_d64_ps1": solution}) == 1
    wrapper, q, cache = decode(1, sm_scale=0.25)
    out, lse = wrapper.run(q, cache, return_lse=True)
    assert seen["kv_indptr"].tolist() == [0, 2, 4] and len(seen["kv_indices"]) == 4 and seen["sm_scale"] == 0.25
    alone = wrapper.run(q, cache)
    assert alone.equal(out) and lse.shape == (2, 4)
    assert trace_apply.stats()["flashinfer.decode.BatchDecodeWithPagedKVCacheWrapper.run"]["hit"] == 2
    trace_apply.disable_apply()
    torch.testing.assert_close(wrapper.run(q, cache), out, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    "page_size, plan, text",
    [
        (1, {"window_left": 1}, "plan() has window_left=1"),
        (1, {"logits_soft_cap": 3.0}, "plan() has logits_soft_cap=3.0"),
        (16, {}, "the candidate does not take kv_last_page_len"),
    ],
)
def test_calls_that_a_definition_does_not_describe_run_the_original(caplog, page_size, plan, text):
    def solution(q, k_cache, v_cache, kv_indptr, kv_indices, sm_scale, return_lse):
        raise AssertionError("computes something else")

    trace_apply.enable_apply({f"gqa_paged_decode_h4_kv2_d64_ps{page_size}": solution})
    wrapper, q, cache = decode(page_size, **plan)
    with caplog.at_level(logging.WARNING, "flashinfer"):
        assert wrapper.run(q, cache).shape == q.shape
    assert text in caplog.text


def test_wrappers_planned_before_run_the_original(caplog):
    wrapper, q, cache = decode(1)
    trace_apply.enable_apply({"gqa_paged_decode_h4_kv2_d64_ps1": sevens})
    with caplog.at_level(logging.WARNING, "flashinfer"):
        assert wrapper.run(q, cache).shape == q.shape
    assert "planned before enable_apply()" in caplog.text


def test_plans_live_as_long_as_their_wrapper():
    class Wrapper:
        pass

    wrapper = Wrapper()
    assert fetch_plan_kwargs(wrapper) is None
    stash_plan_kwargs(wrapper, {"page_size": 1})
    assert fetch_plan_kwargs(wrapper) == {"page_size": 1}
    assert adapter_for("flashinfer.prefill.BatchPrefillWithPagedKVCacheWrapper.run").names["qo_indptr"] == "qo_indptr"
    assert adapter_for(RMSNORM) is None


SOURCES = {
    "main.py": "from part import FACTOR\n\ndef run(hidden_states, weight):\n    return hidden_states * FACTOR\n",
    "part.py": "FACTOR = 6\n",
}


def solution(**changes):
    spec = {"language": "python", "target_hardware": ["CPU"], "entry_point": "main.py::run"}
    sources = [{"path": path, "content": text} for path, text in SOURCES.items()]
    entry = {"name": "six", "definition": "rmsnorm_h8", "author": "me", "spec": spec, "sources": sources}
    return {**entry, **changes}


def test_solutions_of_python():
    trace_apply.enable_apply({"rmsnorm_h8": Solution.from_dict(solution())})
    assert flashinfer.rmsnorm(ones(2, 8), ones(8)).eq(6).all()


def test_solutions_of_cpp():
    text = """
        #include <tvm/ffi/tvm_ffi.h>
        void Fill(tvm::ffi::TensorView hidden_states, tvm::ffi::TensorView weight, tvm::ffi::TensorView output) {
          auto* values = static_cast<unsigned short*>(output.data_ptr());
          for (int64_t i = 0; i < output.numel(); ++i) values[i] = 0x4110;  // 9 in bfloat16
        }
        TVM_FFI_DLL_EXPORT_TYPED_FUNC(fill, Fill);
    """
    spec = BuildSpec("cpp", ["CPU"], "main.cc::fill", destination_passing_style=True, binding="tvm-ffi")
    native = Solution("nine", "rmsnorm_h8", "me", spec, [SourceFile("main.cc", text)])
    trace_apply.enable_apply({"rmsnorm_h8": native})
    assert flashinfer.rmsnorm(ones(2, 8), ones(8)).eq(9).all()


PROGRAM = """
    import multiprocessing, os, pathlib, sys, torch
    import flashinfer
    from flashinfer.trace import Solution

    SOURCES = {
        "main.py": "from part import FACTOR\\ndef run(hidden_states, weight):\\n    return hidden_states * FACTOR",
        "part.py": "FACTOR = 6",
    }

    def folders():
        return {path.name for path in pathlib.Path(os.environ["TMPDIR"]).glob("flashinfer_solution_*")}

    def call():
        spec = {"language": "python", "target_hardware": ["CPU"], "entry_point": "main.py::run"}
        sources = [{"path": path, "content": text} for path, text in SOURCES.items()]
        entry = {"name": "six", "definition": "rmsnorm_h8", "author": "me", "spec": spec, "sources": sources}
        flashinfer.trace_apply.enable_apply({"rmsnorm_h8": Solution.from_dict(entry)})
        assert flashinfer.rmsnorm(torch.ones(2, 8), torch.ones(8)).eq(6).all()

    END
"""


@pytest.mark.parametrize(
    "end",
    [
        "call(); assert len(folders()) == 1",
        "call(); SOURCES['main.py'] = 'raise KeyError'\n    try: call()\n    except KeyError: print('raised')",
        # A worker deletes its own folder and leaves that of its parent, whichever way it ends.
        "call(); mine = folders()\n"
        "    worker = multiprocessing.get_context('fork').Process(target=call)\n"
        "    worker.start(); worker.join(); assert worker.exitcode == 0 and folders() == mine\n"
        "    child = os.fork()\n    if child == 0: sys.exit()\n"
        "    assert os.waitpid(child, 0)[1] == 0 and folders() == mine",
    ],
    ids=["end", "exception", "children"],
)
def test_no_folder_is_left(tmp_path, end):
    execute(PROGRAM.replace("END", end), tmp_path, TMPDIR=str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_native_solution_is_compiled_once(tmp_path, monkeypatch):
    text = '#include <tvm/ffi/tvm_ffi.h>\n#include "part.h"\nTVM_FFI_DLL_EXPORT_TYPED_FUNC(five, Five);\n'
    part = "inline int Five() { return 5; }\n"
    spec = BuildSpec("cpp", ["CPU"], "main.cc::five", binding="tvm-ffi")
    files = [SourceFile("main.cc", text), SourceFile("part.h", part)]
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    native = Solution("five", "rmsnorm_h8", "me", spec, files)
    assert solutions._load_native(native)() == 5
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    assert solutions._load_native(native)() == 5
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def test_a_folder_of_solutions(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "six.json").write_text(json.dumps(solution()))
    (tmp_path / "definition.json").write_text(json.dumps({"name": "rmsnorm_h8"}))
    assert list(load(tmp_path)) == ["rmsnorm_h8"] and load(tmp_path / "a" / "six.json")["rmsnorm_h8"].name == "six"
    code = """
        import flashinfer, torch
        x = torch.ones(2, 8)
        print(round(flashinfer.rmsnorm(x, x[0])[0, 0].item(), 3), flashinfer.trace_apply.is_enabled())
    """
    variables = {"FLASHINFER_TRACE_APPLY": "1", "FLASHINFER_TRACE_APPLY_PATH": str(tmp_path)}
    assert execute(code, tmp_path, **variables).strip() == "6.0 True"
    output = execute(code, tmp_path, FLASHINFER_TRACE_APPLY="1")
    assert "1.0 False" in output and "FLASHINFER_TRACE_APPLY_PATH is not set" in output


@pytest.mark.parametrize(
    "given, text",
    [
        ({"rmsnorm_h8": 3}, r"solutions\['rmsnorm_h8'\] must be a function or a Solution, got 3"),
        (None, "solutions must be given where FLASHINFER_TRACE_APPLY_PATH is not set"),
    ],
)
def test_wrong_arguments(given, text):
    with pytest.raises(ArgumentError, match=text):
        trace_apply.enable_apply(given)
    assert not trace_apply.is_enabled()


def test_sources_stay_in_their_folder():
    wrong = solution(sources=[*solution()["sources"], {"path": "../other.py", "content": ""}])
    trace_apply.enable_apply({"rmsnorm_h8": Solution.from_dict(wrong)})
    with pytest.raises(ArgumentError, match=r"paths of sources must stay inside, got '\.\./other\.py'"):
        flashinfer.rmsnorm(ones(2, 8), ones(8))


def test_definitions_and_solutions_of_json():
    entry = flashinfer.rmsnorm.fi_trace(input=ones(2, 8), weight=ones(8))
    definition = Definition.from_dict(entry)
    assert (definition.name, definition.tags[0]) == ("rmsnorm_h8", f"fi_api:{RMSNORM}")
    with pytest.raises(ArgumentError, match="must have the fields of a solution, got KeyError"):
        Solution.from_dict({"name": "six"})
    with pytest.raises(ArgumentError, match=r"must have \['axes', 'inputs', 'outputs'\]"):
        Definition.from_dict({"name": "a", "op_type": "b"})
    for key, kind in [("name", "a string"), ("axes", "a mapping"), ("tags", "a list of strings")]:
        with pytest.raises(ArgumentError, match=f"Definition: {key} must be {kind}, got True"):
            Definition.from_dict({**entry, key: True})


def test_names_of_no_definition_are_reported(caplog):
    with caplog.at_level(logging.WARNING, "flashinfer"):
        assert trace_apply.enable_apply({"rmsnrom_h8": sevens}) == 0
    assert "no API has a definition named rmsnrom_h8" in caplog.text


def test_a_solution_that_has_not_run_yet_is_not_started_in_a_capture(monkeypatch):
    """Check that nothing is compiled or loaded while a graph is captured; torch's answers are simulated."""
    trace_apply.enable_apply({"rmsnorm_h8": sevens})
    x, weight = ones(2, 8), ones(8)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert flashinfer.rmsnorm(x, weight).eq(1).all()
    monkeypatch.undo()
    assert flashinfer.rmsnorm(x, weight).eq(7).all()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert flashinfer.rmsnorm(x, weight).eq(7).all()
    assert trace_apply.stats()[RMSNORM] == {
        **dict.fromkeys(("fallback_no_candidate", "error"), 0),
        "hit": 2,
        "fallback_unwarmed_in_capture": 1,
    }
