# SPDX-License-Identifier: Apache-2.0
"""The ``flashinfer`` command on a machine without GPU and nvcc. Nothing is compiled here."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

import flashinfer
from flashinfer.__main__ import cli, main
from flashinfer._runtime.knobs import knobs
from flashinfer.autotuner import blocklist_gen
from flashinfer.jit import env as jit_env
from flashinfer.jit import jit_spec_registry

from ..fresh_process import run_python
from ..jit.toolbox import fake_toolkit

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a command with an empty cache, no nvcc and no targets, whatever this machine has."""
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    monkeypatch.setenv("FLASHINFER_NVCC", "/nonexistent/nvcc")
    monkeypatch.setattr(jit_spec_registry, "_specs", {})  # drops specs that other tests requested
    monkeypatch.chdir(tmp_path)

    def call(*arguments, code=0):
        result = CliRunner().invoke(main, list(arguments))
        assert result.exit_code == code, result.output
        assert result.exception is None or isinstance(result.exception, SystemExit)
        return result.output

    return call


def test_no_arguments_print_help(run):
    text = run()
    assert "Usage" in text
    for command in ("show-config", "module-status", "warmup", "replay"):
        assert command in text


def test_tactics_that_fail_are_listed(run, tmp_path, monkeypatch):
    """The tactics themselves run in tests/autotuner/test_blocklist_gen.py."""
    calls = []

    def generate(output, quant_modes, **sizes):
        calls.append((output, quant_modes, sizes))
        return {"bf16_gemm::OwnBf16Runner": [[0, 1], [2, 1]]}

    monkeypatch.setattr(blocklist_gen, "generate", generate)
    sizes = {"num_tokens": 4, "num_experts": 8, "hidden_size": 256, "intermediate_size": 128, "top_k": 2}
    options = [x for name, size in sizes.items() for x in (f"--{name.replace('_', '-')}", str(size))]
    modes = ("--quant-modes", "BF16-CUTLASS", "--quant-modes", "Fp8-PerTensor-CUTLASS")
    text = run("generate-tactics-blocklist", "-o", "list.json", *modes, *options, "--device", "cpu")
    assert "bf16_gemm::OwnBf16Runner: 2 tactics fail" in text and "Wrote list.json: 2 tactics" in text
    run("generate-tactics-blocklist")
    assert calls[0] == ("list.json", ["BF16-CUTLASS", "Fp8-PerTensor-CUTLASS"], {**sizes, "device": "cpu"})
    assert calls[1][:2] == ("tactics_blocklist.json", None) and calls[1][2]["device"] == "cuda:0"
    text = run("generate-tactics-blocklist", "--quant-modes", "fp3", code=2)
    assert "'fp3' is not one of NvFP4xNvFP4, " in text and len(calls) == 2


def test_missing_compiler_is_one_line(run, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "")
    (line,) = run("warmup", "activation", "--device", "cpu", code=1).splitlines()
    assert line.startswith("Error: activation_cpu: cannot find a host C++ compiler: looked at $CXX")


def test_runs_as_a_python_module():
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = run_python(["-m", "flashinfer", "--version"], env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"flashinfer, version {flashinfer.__version__}"


def test_the_log_of_calls_is_not_among_the_results(tmp_path):
    """Check that the call log goes to stderr, even if stdout is its destination: scripts read the results on stdout."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "FLASHINFER_LOGLEVEL": "1", "FLASHINFER_LOGDEST": "stdout"}
    script = tmp_path / "flashinfer"  # as installed by pip
    script.write_text("from flashinfer.__main__ import main\nmain()\n")
    for program in (["-m", "flashinfer"], [str(script)]):
        done = run_python([*program, "list-modules", "norm_cpu", "--json"], env=env)
        assert json.loads(done.stdout)[0]["name"] == "norm_cpu", done.stderr
        line = f"FlashInfer {flashinfer.__version__} (commit {flashinfer.__git_commit__[:8]})"
        assert line in done.stderr.splitlines(), "the log, whose first line has no time"


@pytest.mark.parametrize("words", ["--download-cubin", "download-cubin", "artifacts download"])
def test_what_images_of_engines_are_built_with(run, words):
    """Check commands that images of engines run: there is nothing to download, which is not an error."""
    text = run(*words.split())
    assert text.startswith("All cubin download tasks completed successfully") and "no binaries to download" in text


def test_list_cubins(run):
    assert run("list-cubins").split() == ["Cubin", "Status"]


def test_a_repository_of_ones_own(run, monkeypatch):
    """Check that commands look up what they call, which programs replace."""
    files = (("a/x.cubin", True), ("a/y.cubin", False))
    monkeypatch.setattr("flashinfer.__main__.get_artifacts_status", lambda: files)
    assert [line.split() for line in run("list-cubins").splitlines()[1:]] == [
        ["a/x.cubin", "Downloaded"],
        ["a/y.cubin", "Missing"],
    ]
    assert "Downloaded 1/2 cubins" in run("show-config")


def test_a_repository_that_does_not_answer(run, tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHINFER_CUBINS_REPOSITORY", str(tmp_path / "nowhere"))
    monkeypatch.setenv("FLASHINFER_NO_DOWNLOAD", "1")
    assert "Downloaded unknown (get_checksums: " in run("show-config")
    assert run("download-cubin", code=1).startswith("Error: Cubin download failed: get_checksums")


def test_clear_cubin(run, tmp_path, monkeypatch):
    """Check that downloads are deleted, and that a file that no download made stays."""
    assert run("clear-cubin").startswith("Cubin cleared successfully")
    monkeypatch.setenv("FLASHINFER_CUBIN_DIR", str(tmp_path / "mine"))
    (tmp_path / "mine").mkdir()
    for name in ("x.cubin", "y.cubin"):
        (tmp_path / "mine" / name).touch()
    (tmp_path / "mine" / "downloads.txt").write_text("x.cubin\n")
    assert run("clear-cubin").startswith("Cubin cleared successfully")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["y.cubin"]


def test_published_name_of_the_group():
    assert cli is main


def test_unknown_command_fails(run):
    assert "No such command" in run("frobnicate", code=2)


# ------------------------------------------------------------------------------------------------ show-config


def test_show_config_names_every_setting(run, tmp_path):
    text = run("show-config")
    for knob in knobs.all():
        assert knob.variable in text
    assert str(tmp_path / ".cache" / "flashinfer") in text
    assert "not found" in text  # nvcc is missing
    for title in ("Torch Version Info", "Environment Variables", "Artifact Path", "Downloaded Cubins"):
        assert f"=== {title} ===\n" in text
    assert "Downloaded 0/0 cubins" in text
    assert str(jit_env.FLASHINFER_CUBIN_DIR) in text


def test_show_config_marks_what_was_set(run, monkeypatch):
    monkeypatch.setenv("FLASHINFER_JIT_VERBOSE", "1")
    line = next(line for line in run("show-config").splitlines() if line.startswith("FLASHINFER_JIT_VERBOSE"))
    assert line.split() == ["FLASHINFER_JIT_VERBOSE", "True", "*"]


def test_show_config_names_variables_that_nothing_reads(run, monkeypatch):
    for name in [n for n in os.environ if n.startswith("FLASHINFER_TEST_")]:
        monkeypatch.delenv(name)
    assert "nothing reads" not in run("show-config")
    monkeypatch.setenv("FLASHINFER_LOG_LEVEL", "3")  # misspelt FLASHINFER_LOGLEVEL
    assert "Variables that nothing reads\nFLASHINFER_LOG_LEVEL  3\n" in run("show-config")


def test_show_config_json(run):
    config = json.loads(run("show-config", "--json"))
    assert config["Versions"]["flashinfer"].startswith(flashinfer.__version__)
    assert config["Modules"]["total"] == config["Modules"]["not_compiled"] > 0
    assert set(config["Settings"]) == {knob.variable for knob in knobs.all()}


def test_show_config_survives_a_broken_part(run, monkeypatch):
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "pascal")
    assert "unknown (" in run("show-config")


# ------------------------------------------------------------------------------------------------ modules


def test_list_modules(run):
    heading, *names = run("list-modules").splitlines()
    names = [name.strip() for name in names]
    assert heading == "Available compilation modules:"
    assert names == sorted(names)
    assert {"norm", "norm_cpu"} <= set(names)


def test_list_one_module(run):
    text = run("list-modules", "norm")
    assert [line.split("  ")[0] for line in text.splitlines() if ":" in line[:20]] == [
        "Module:",
        "Backend:",
        "Status:",
        "Library Path:",
        "Source Files:",
        "Created:",
        "Device Linking:",
    ]
    assert re.search(r"^Created: +\d{4}-\d\d-\d\d \d\d:\d\d:\d\d$", text, re.M)
    assert re.search(r"^Device Linking: +Not required$", text, re.M)
    assert "not compiled" in text
    assert "norm_jit_binding.cu" in text
    described = json.loads(run("list-modules", "norm_cpu", "--json"))
    assert described[0]["backend"] == "cpu"
    assert described[0]["state"] == "not compiled"


def test_list_unknown_module_fails(run):
    text = run("list-modules", "nrom", code=1)
    assert text == "Error: Module 'nrom' not found. module must be a name of list-modules, such as norm\n"


@pytest.mark.parametrize("which", ["all", "aot", "jit", "compiled", "not-compiled"])
def test_module_status_filters(run, which):
    rows = json.loads(run("module-status", "--filter", which, "--json"))
    assert bool(rows) == (which in ("all", "not-compiled"))
    count = len(rows)
    summary = run("module-status", "--filter", which).split("=== Summary ===\n")[1].splitlines()[:3]
    assert [line.split() for line in summary] == [
        ["Total", "modules:", str(count)],
        ["Compiled:", "0"],
        ["Not", "compiled:", str(count)],
    ]


def test_module_status_knows_pre_built_modules(run, tmp_path, monkeypatch):
    library = tmp_path / "aot" / "norm" / "norm.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"")
    monkeypatch.setattr(jit_env, "FLASHINFER_AOT_DIR", tmp_path / "aot", raising=False)
    rows = json.loads(run("module-status", "--filter", "aot", "--json"))
    assert [row["name"] for row in rows] == ["norm"]
    assert rows[0]["state"] == "pre-built"
    assert rows[0]["library"] == str(library)


def test_module_status_detailed(run):
    """Check the block of a module: what programs look for, and why the module would be built."""
    blocks = run("module-status", "--detailed").split("\n\n")
    norm = next(block for block in blocks if block.split()[:2] == ["Module:", "norm"])
    words = [line.split()[0] for line in norm.splitlines() if not line.startswith(" ")]
    assert words == ["Module:", "Backend:", "Status:", "Library:", "Sources:", "Created:"]
    assert "not compiled" in norm and "none (" in norm and "norm.cu" in norm


def test_module_status_counts_what_calls_built(run):
    """Check that cached modules of dtypes and sizes that no family lists are counted too."""
    assert "which calls asked for" not in run("module-status")
    library = jit_env.FLASHINFER_JIT_DIR / "decode_of_64" / "decode_of_64.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"")
    assert run("module-status").endswith("1 more in the cache, which calls asked for\n")
    assert run("module-status", "--detailed").endswith(f"which calls asked for\n{library}\n")


def test_a_closed_pipe_is_no_news(tmp_path):
    """Check that a closed pipe is not an error: ``flashinfer list-modules | head``"""
    reader, writer = os.pipe()
    os.close(reader)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "FLASHINFER_WORKSPACE_BASE": str(tmp_path)}
    command = [sys.executable, "-m", "flashinfer", "list-modules"]
    done = subprocess.run(command, env=env, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert done.stderr == ""


def test_warmup_passes_its_arguments_on(run, monkeypatch):
    calls = []

    def warmup(names=None, device=None):
        calls.append((names, device))
        return flashinfer.WarmupReport(("a", "b", "c", "d"), ("a",) if names else ("a", "b", "c", "d"), 2.5)

    monkeypatch.setattr(flashinfer, "warmup", warmup)
    assert run("warmup") == "4 modules ready in 2.5 s, built a, b, c and 1 more\n"
    assert run("warmup", "norm_cpu", "--device", "cpu") == "4 modules ready in 2.5 s, built a\n"
    assert calls == [(None, None), (["norm_cpu"], "cpu")]


def test_warmup_failure_is_one_line_and_exit_code_1(run, monkeypatch):
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    text = run("warmup", "norm_cpu", "--device", "cpu", code=1)
    assert text.startswith("Error: ")
    assert "FLASHINFER_DISABLE_JIT" in text


def test_clear_cache(run, tmp_path):
    module = jit_env.FLASHINFER_JIT_DIR / "norm"
    module.mkdir(parents=True)
    (module / "norm.so").write_bytes(bytes(2**20))
    assert run("clear-cache").startswith("Cache cleared successfully: 1.0 MiB in ")
    assert not jit_env.FLASHINFER_WORKSPACE_DIR.parent.exists()
    assert run("clear-cache").startswith("Cache cleared successfully: 0.0 MiB in ")  # an empty cache is not an error


def test_clear_cache_of_a_folder_bound_by_hand(run, tmp_path, monkeypatch):
    kept = jit_env.FLASHINFER_JIT_DIR / "norm" / "norm.so"
    kept.parent.mkdir(parents=True)
    kept.touch()
    (tmp_path / "bound" / "norm").mkdir(parents=True)
    monkeypatch.setitem(vars(jit_env), "FLASHINFER_JIT_DIR", tmp_path / "bound")
    assert str(tmp_path / "bound") in run("clear-cache")
    assert kept.exists() and not (tmp_path / "bound").exists()


@pytest.mark.parametrize("arguments", [("cc.json",), ("-o", "cc.json"), ()])
def test_export_compile_commands(run, tmp_path, arguments):
    """Check that without nvcc the CPU modules are exported and the others are reported as left out."""
    text = run("export-compile-commands", *arguments)
    assert text.count("Failed to generate compile commands for ") == 1, "one reason, one line"
    assert "Successfully exported" in text
    entries = json.loads((tmp_path / (arguments[-1] if arguments else "compile_commands.json")).read_text())
    assert any(entry["file"].endswith("/norm_jit_binding.cu") for entry in entries)
    assert all({"directory", "command", "file"} <= set(entry) for entry in entries)


def test_export_of_an_empty_registry(run, tmp_path, monkeypatch):
    monkeypatch.setattr("flashinfer.__main__._ensure_modules_registered", lambda: None)
    assert run("export-compile-commands") == "No modules found\n"
    assert not (tmp_path / "compile_commands.json").exists()


def test_export_of_specs_of_programs(run, tmp_path, monkeypatch):
    """Check that a spec needs a name and commands alone, and that one which raises does not hide the others."""

    class Spec:
        def __init__(self, name):
            self.name = name

        def get_compile_commands(self):
            if self.name == "broken":
                raise KeyError("no sources")
            return [{"directory": ".", "command": "c++ x.cpp", "file": "x.cpp"}]

    registry = SimpleNamespace(get_all_specs=lambda: {name: Spec(name) for name in ("broken", "mine")})
    monkeypatch.setattr("flashinfer.__main__.jit_spec_registry", registry)
    text = run("export-compile-commands")
    assert "Failed to generate compile commands for broken: 'no sources'" in text
    assert [entry["file"] for entry in json.loads((tmp_path / "compile_commands.json").read_text())] == ["x.cpp"]


def test_exported_sources_exist(run, tmp_path, monkeypatch):
    """Check that exported sources exist, generated ones too, though nothing was built: editors open these files."""
    fake_toolkit(tmp_path / "cuda")
    monkeypatch.setenv("FLASHINFER_NVCC", str(tmp_path / "cuda" / "bin" / "nvcc"))
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    assert "Failed" not in run("export-compile-commands", "all.json")
    files = [entry["file"] for entry in json.loads((tmp_path / "all.json").read_text())]
    assert any("generated" in file for file in files)
    assert [file for file in files if not Path(file).exists()] == []


def test_commands_compile_nothing(run, tmp_path):
    for command in ("list-modules", "module-status", "show-config", "export-compile-commands"):
        run(command)
    assert not list(tmp_path.rglob("*.so"))
    assert jit_spec_registry.get_stats()["compiled"] == 0


# ------------------------------------------------------------------------------------------------ replay


def test_replay_needs_an_existing_directory(run):
    assert "does not exist" in run("replay", "--dir", "nowhere", code=2)


def test_replay_on_a_device_that_is_none(run, tmp_path):
    assert "replay: device must be cpu or cuda, got 'tpu'" in run(
        "replay", "--dir", str(tmp_path), "--device", "tpu", code=1
    )


def test_replay_of_source(run, tmp_path):
    """Check the replay of a foreign dump: its C++ source is not compiled unless the user allows it."""
    directory = tmp_path / "20260101_000000_000_pid1_build_call0001"
    directory.mkdir()
    torch.save({}, directory / "inputs.pt")
    wrapper = "BatchDecodeWithPagedKVCacheWrapper"
    source = {"type": "list", "length": 1, "items": ["not C++"], "truncated": False}
    record = {
        "function_name": f"{wrapper}.__init__",
        "module": "flashinfer.decode",
        "process_id": 1,
        "self_id": 2,
        "input_metadata": {"arg_0": {"type": wrapper, "repr": "<...>"}, "kwarg_jit_args": source},
        "execution_status": "inputs_saved",
    }
    (directory / "metadata.jsonl").write_text(json.dumps(record) + "\n")
    assert "jit_args of BatchDecodeWithPagedKVCacheWrapper.__init__ must not hold code" in run(
        "replay", "--dir", str(tmp_path), code=1
    )
    text = run("replay", "--dir", str(tmp_path), "--allow-code", code=1)
    assert "float_workspace_buffer" in text and "holds" not in text, "the call was made"


def test_replay_of_an_empty_directory_fails(run, tmp_path):
    assert "no dump" in run("replay", "--dir", str(tmp_path), code=2)
