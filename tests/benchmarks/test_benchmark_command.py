# SPDX-License-Identifier: Apache-2.0
"""benchmarks/flashinfer_benchmark.py on fake routines: flags, output, CSV, test lists, checks."""

import csv
import json

import pytest
import torch

from .benchmark_path import BENCHMARKS  # noqa: F401  isort: skip
import flashinfer_benchmark as command
import harness
import measure
from harness import Bench, bf16, case, fp16, grid, nbytes, rand

from flashinfer._runtime.errors import ArgumentError, BackendSupportedError
from flashinfer.testing import cold_cache

QUICK = ["--device", "cpu", "-n", "2", "-d", "1"]


@pytest.fixture(autouse=True)
def routines(monkeypatch):
    monkeypatch.setattr(harness, "CASES", {})
    monkeypatch.setattr(measure.Peak, "bytes_per_sec", 1e9)
    monkeypatch.setattr(cold_cache, "_FLUSH_BYTES", 1 << 20)

    @case(
        "negate",
        grid(batch_size=[4, 8], hidden_size=[16], dtype=[bf16]),
        cuda=grid(batch_size=[9], hidden_size=[16], dtype=[bf16]),
    )
    def negate(batch_size, hidden_size, dtype, wrong=False, enable_pdl=None):
        x = rand(batch_size, hidden_size, dtype)
        return Bench(
            run=lambda x: x.clone() if wrong else x.neg(),
            args=(x,),
            baseline=torch.neg,
            reference=torch.neg,
            bytes=2 * nbytes(x),
        )

    @case("double", grid(n=[4]))
    def double(n):
        def unsupported(x):
            raise BackendSupportedError("needs sm90, this is a CPU")

        return Bench(run={"plain": lambda x: x * 2, "sm90": unsupported}, args=(rand(n),))

    @case("gpu_only", cuda=grid(n=[4]))
    def gpu_only(n):
        raise AssertionError("not built on the CPU")

    monkeypatch.setattr(command, "load_cases", lambda: harness.CASES)


def run(capsys, *words):
    """Return exit code, standard output and standard error."""
    code = command.main([*words])
    return (code, *capsys.readouterr())


def test_all_points_run_without_flags(capsys):
    code, out, _ = run(capsys, "-R", "negate", *QUICK)
    assert code == 0 and out.count("[PERF] cpu :: median time ") == 2
    assert "achieved tflops" in out and out.rstrip().endswith("TB/sec")


def test_all_routines_run_where_they_have_a_kernel(capsys, tmp_path):
    path = tmp_path / "all.json"
    code, out, _ = run(capsys, "-R", "all", "--json", str(path), *QUICK)
    assert code == 0 and out.count("[PERF]") == 3
    assert [r["routine"] for r in json.loads(path.read_text())["results"]] == ["negate", "negate", "double"]
    assert "belongs to a routine" in run(capsys, "-R", "all", "--n", "3", *QUICK)[2]


def test_flags_describe_one_point(capsys):
    code, out, _ = run(capsys, "--routine", "negate", "--batch_size", "5", "--input_dtype", "fp16", "-vv", *QUICK)
    assert code == 0 and out.count("[PERF]") == 1
    assert "negate batch_size=5 hidden_size=16 fp16 on cpu, timer: host clock" in out
    assert "argument 0: (5, 16) fp16" in out and "% peak" in out


def test_a_switch_needs_no_value(capsys):
    assert "wrong=True" in run(capsys, "-R", "negate", "--wrong", "-v", *QUICK)[1]
    assert "wrong=False" in run(capsys, "-R", "negate", "--wrong", "false", "-v", *QUICK)[1]


def test_flags_of_a_routine_that_passes_its_shape_on(capsys):
    @case("shaped", grid(nnz=[4], head_dim=[16]))
    def shaped(**shape):
        return Bench(run=torch.neg, args=(rand(shape["nnz"], shape["head_dim"]),))

    code, out, _ = run(capsys, "-R", "shaped", "--nnz", "3", "-vv", *QUICK)
    assert code == 0 and "argument 0: (3, 16)" in out
    assert "shaped  (cpu or cuda)  --nnz --head_dim" in run(capsys, "--list")[1]


def test_backends_include_torch_and_skip_unknown_ones(capsys):
    code, out, _ = run(capsys, "-R", "negate", "--batch_size", "4", "--backends", "cpu", "torch", "fa9", *QUICK)
    assert code == 0
    assert "[PERF] cpu ::" in out and "[PERF] torch ::" in out
    assert "backend 'fa9' is skipped, expected one of ['cpu', 'torch']" in out


def test_backend_that_the_device_lacks_is_skipped(capsys):
    code, out, _ = run(capsys, "-R", "double", "--backends", "sm90", "plain", *QUICK)
    assert code == 0 and "backend 'sm90' is skipped on this device: needs sm90" in out and "[PERF] plain ::" in out


def test_refcheck(capsys):
    code, out, _ = run(capsys, "-R", "negate", "--refcheck", "-v", "--batch_size", "4", *QUICK)
    assert code == 0 and "[REFCHECK] cpu agrees with the reference" in out
    wrong = ["-R", "negate", "--wrong", "true", *QUICK]
    with pytest.raises(AssertionError, match="negate cpu"):
        command.main([*wrong, "--refcheck"])
    code, out, _ = run(capsys, *wrong, "--refcheck", "--allow_output_mismatch")
    assert code == 0 and "[WARNING] output mismatch: negate cpu" in out and "[PERF]" in out
    assert run(capsys, *wrong, "--refcheck", "--backends", "torch")[0] == 0  # the torch baseline is not compared
    assert "has no reference" in run(capsys, "-R", "double", "--refcheck", *QUICK)[1]


@pytest.mark.parametrize(
    "words, text",
    [
        (["-R", "doubled"], "--routine is 'doubled', expected all or a name from --list, such as double"),
        (["-R", "?"], "--routine is '?', expected all or a name from --list, such as negate"),
        ([], "--routine is missing"),
        (
            ["-R", "negate", "--page_size", "16"],
            "negate: --page_size is not a flag of this routine, expected --batch_size",
        ),
        (["-R", "negate", "--batch_size", "many"], "negate: argument --batch_size: 'many' is not a size"),
        (["-R", "negate", "--batch_size", "-1"], "negate: argument --batch_size: '-1' is not a size"),
        (["-R", "negate", "--dtype", "float99"], "'float99' is not a dtype"),
        (["-R", "negate", "--wrong", "maybe"], "'maybe' is not a truth value"),
        (["-R", "gpu_only"], "gpu_only: device is cpu, expected cuda"),
        (["--num_iters", "x"], "'x' is not a number of runs, expected 1 or more"),
        (["--num_iters", "0"], "'0' is not a number of runs, expected 1 or more"),
        (["--testlist", "nowhere.txt"], "No such file or directory: 'nowhere.txt'"),
        (["-R", "negate", "--output_path", "nowhere/out.csv"], "--output_path is nowhere/out.csv, expected a file in"),
        (["-R", "negate", "--json", "."], "--json is ., expected a file in a folder that exists"),
        (["-R", "negate", "--plot", "a.bogus"], "--plot is a.bogus, expected a name that ends in one of ["),
        (
            ["-R", "negate", "--testlist", "a.txt"],
            "--routine belongs to a routine, expected in the lines of --testlist",
        ),
    ],
)
def test_mistakes_are_explained(capsys, words, text):
    code, out, err = run(capsys, *words, "--device", "cpu")
    assert code == 2 and text in err
    assert "[PERF]" not in out, "what cannot be written is not measured"


def test_mistakes_leave_the_table_of_the_last_run(capsys, tmp_path):
    path = tmp_path / "out.csv"
    path.write_text("results")
    assert run(capsys, "-R", "doubled", "--output_path", str(path))[0] == 2
    assert path.read_text() == "results"


def test_arguments_that_the_op_refuses(capsys, monkeypatch):
    def refuse(*args, **kwargs):
        raise ArgumentError("negate: dtype is int8, expected another")

    monkeypatch.setattr(command, "run_point", refuse)
    code, _, err = run(capsys, "-R", "negate", "--batch_size", "2")
    assert code == 2 and err.rstrip() == "flashinfer_benchmark.py: negate: dtype is int8, expected another"


def test_a_gpu_that_is_not_there(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, _, err = run(capsys, "-R", "gpu_only", "--device", "cuda")
    assert code == 2 and "--device is cuda, expected cpu (torch sees no GPU)" in err


def test_csv_has_the_published_columns(capsys, tmp_path):
    path = tmp_path / "out.csv"
    path.write_text("left over from another run")
    words = ["-R", "negate", "--output_path", str(path), "--case_tag", "night", "--generate_repro_command", *QUICK]
    assert run(capsys, *words)[0] == 0
    with path.open() as file:
        rows = list(csv.DictReader(file))
    published = ["routine", "median_time", "std_time", "tflops", "tb_per_sec", "backend", "resolved_backend"]
    assert list(rows[0])[:7] == published
    assert [row["batch_size"] for row in rows] == ["4", "8"]
    first = rows[0]
    assert first["backend"] == "auto" and first["resolved_backend"] == "cpu" and first["dtype"] == "bf16"
    assert first["case_tag"] == "night" and first["n"] == "" and float(first["median_time"]) > 0
    assert first["random_seed"] == "42" and first["use_cupti"] == "False"


def test_repro_command_repeats_the_run(capsys):
    _, out, _ = run(capsys, "-R", "negate", "--batch_size", "3", "--generate_repro_command", *QUICK)
    line = next(text for text in out.splitlines() if text.startswith("[REPRO] "))
    words = line.split()[3:]
    args, flags = command.shared_parser().parse_known_args(words)
    assert command.parse_point(harness.CASES["negate"], "cpu", flags) == {
        "batch_size": 3, "hidden_size": 16, "dtype": bf16,
    }  # fmt: skip
    assert args.num_iters == 2 and args.dry_run_iters == 1


def test_testlist_goes_on_after_an_error(capsys, tmp_path):
    listing, path = tmp_path / "list.txt", tmp_path / "out.csv"
    quick = " ".join(QUICK)
    listing.write_text(
        f"# nightly\n\n--routine double {quick}\n-R nothing\n-R negate --wrong 1 --refcheck {quick}\n"
        f"-R negate --batch_size 2 --dtype fp16 {quick}\n"
    )
    code, out, _ = run(capsys, "--testlist", str(listing), "--output_path", str(path))
    assert code == 1 and out.count("[PERF]") == 2
    assert f"[ERROR] {listing}:4: -R nothing: UsageError" in out
    assert f"[ERROR] {listing}:5: " in out and "AssertionError" in out
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["routine"], row["n"], row["dtype"]) for row in rows] == [("double", "4", ""), ("negate", "", "fp16")]


def test_testlist_takes_no_routine_flags(capsys, tmp_path):
    code, _, err = run(capsys, "--testlist", str(tmp_path / "none"), "--batch_size", "4")
    assert code == 2 and "--batch_size belongs to a routine" in err


def test_enable_pdl_reaches_routines_that_have_it(monkeypatch):
    parser = command.shared_parser()
    args, flags = parser.parse_known_args(["-R", "negate", "--enable_pdl", *QUICK])
    points = command.points_to_run(harness.CASES["negate"], args, flags)
    assert all(point["enable_pdl"] is True for point in points)
    with pytest.warns(UserWarning, match="double has no enable_pdl"):
        assert command.points_to_run(harness.CASES["double"], args, []) == [{"n": 4}]


def test_use_cupti_is_deprecated(capsys):
    with pytest.warns(UserWarning, match="deprecated"):
        run(capsys, "-R", "double", "--use_cupti", *QUICK)


def test_list_shows_devices_and_flags(capsys):
    code, out, _ = run(capsys, "--list")
    assert code == 0
    assert "negate  (cpu or cuda)  --batch_size --hidden_size --dtype --wrong" in out.splitlines()
    assert "gpu_only  (cuda)  --n" in out.splitlines()


def test_plot_writes_a_picture(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "chart.png"
    assert run(capsys, "-R", "negate", "--plot", str(path), *QUICK)[0] == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_roofline_is_drawn_where_operations_are_counted(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    import chart

    monkeypatch.setattr(measure.Peak, "flops_per_sec", lambda self, dtype: 1e12)
    result = measure.Result("mm", {"m": 8, "dtype": fp16}, "cpu", "cpu", measure.BenchTime(1e-3, 0.0), 10**5, 10**8)
    chart.plot(tmp_path / "roof.svg", [result])
    assert "operations per byte" in (tmp_path / "roof.svg").read_text()
    with pytest.raises(RuntimeError, match="no case counts bytes"):
        chart.plot(tmp_path / "none.png", [measure.Result("op", {}, "cpu", "cpu", measure.BenchTime(1.0, 0.0), 0, 0)])
